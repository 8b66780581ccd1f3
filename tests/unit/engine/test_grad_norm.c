/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <string.h>

#include "engine/state.h"
#include "test.h"

static const char config[] =
    "{\"architectures\": [\"LlamaForCausalLM\"], \"hidden_size\": 16, \"intermediate_size\": 24, "
    "\"num_hidden_layers\": 3, \"num_attention_heads\": 2, \"num_key_value_heads\": 1, \"vocab_size\": 40}";

static struct mt_layout *lay_out(bool halves)
{
    static struct mt_hf_config cfg;
    struct mt_layout *l = NULL;
    assert_int_equal(mt_hf_config_parse(&cfg, config, strlen(config), "config.json", NULL), 0);
    const struct mt_layout_params p = {.decay_embeddings = true, .cut = halves ? mt_cut_half : mt_cut_layer};
    assert_int_equal(mt_layout_create(&l, &cfg, &p, NULL), 0);
    return l;
}

/* Sums of such sizes that small ones are lost or not depending on the order of addition. */
static double far_apart(const void *ctx, size_t tensor)
{
    const size_t *bad = ctx;
    return bad && (tensor == bad[0] || tensor == bad[1])
               ? NAN : ldexp(1 + (double)tensor / 97, (int)(tensor * 37 % 11) * 7);
}

TEST(the_order_is_the_same_however_layers_are_cut)
{
    struct mt_layout *whole = lay_out(false), *halves = lay_out(true);
    const struct mt_tensor *bad;
    double sum = 0, other = 0;
    for (size_t u = whole->n_units; u-- > 0;)
        for (size_t i = 0; i < whole->units[u].n_tensors; i++)
            sum += far_apart(NULL, whole->units[u].first_tensor + i);
    for (size_t u = halves->n_units; u-- > 0;)
        for (size_t i = 0; i < halves->units[u].n_tensors; i++)
            other += far_apart(NULL, halves->units[u].first_tensor + i);
    assert_true(sum != other); /* else the order would not matter */
    for (size_t i = 0; i < whole->n_tensors; i++)
        assert_string_equal(whole->tensors[i].name, halves->tensors[i].name);
    assert_true(mt_grad_norm(whole, 0, far_apart, NULL, &bad) == sqrt(sum));
    assert_null(bad);
    assert_true(mt_grad_norm(halves, 0, far_apart, NULL, &bad) == sqrt(sum));
    assert_null(bad);
    mt_layout_destroy(&whole);
    mt_layout_destroy(&halves);
}

TEST(the_first_bad_tensor_of_the_last_bad_layer_is_named)
{
    for (int cut = 0; cut < 2; cut++) {
        struct mt_layout *l = lay_out(cut);
        const struct mt_tensor *bad, *k = mt_layout_find(l, "model.layers.1.self_attn.k_proj.weight");
        size_t both[] = {(size_t)(k - l->tensors),
                         (size_t)(mt_layout_find(l, "model.layers.1.mlp.up_proj.weight") - l->tensors)};
        assert_true(isnan(mt_grad_norm(l, 0, far_apart, both, &bad)));
        assert_ptr_equal(bad, k);
        mt_layout_destroy(&l);
    }
}
