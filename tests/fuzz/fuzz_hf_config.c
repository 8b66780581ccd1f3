/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>

#include "base/mem.h"
#include "fuzz.h"
#include "hf/hf_config.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    enum { POSITIONS = 3 };
    static struct mt_hf_config cfg;
    static float cos_t[POSITIONS * MT_ROPE_MAX_FACTORS], sin_t[POSITIONS * MT_ROPE_MAX_FACTORS];
    struct mt_err err = {0};
    mt_log_set_sink(fuzz_quiet);
    char *text = malloc(size ? size : 1); /* of its own, without a NUL behind */
    memcpy(text, data, size);
    int rc = mt_hf_config_parse(&cfg, text, size, "config.json", &err);
    free(text);
    if (rc) {
        fuzz_assert(err.msg[0] && err.code == rc);
        return 0;
    }
    const struct mt_layer_spec *first = mt_layer_of(&cfg, 0);
    fuzz_assert(cfg.n_layers >= 1 && cfg.n_layers <= MT_MAX_LAYERS && first->n_heads % first->n_kv_heads == 0);
    fuzz_assert(first->head_dim >= 8 && cfg.hidden >= 8 && cfg.vocab >= 1 && cfg.n_eos <= MT_MAX_EOS);
    fuzz_assert(isfinite(first->norm.eps) && first->norm.eps >= 0);
    size_t rot = cfg.rope[0].dims, widest = 0;
    for (int i = 0; i < cfg.n_specs; i++)
        widest = MT_MAX(widest, (size_t)cfg.spec[i].head_dim);
    fuzz_assert(rot % 2 == 0 && rot <= widest && rot / 2 <= MT_ROPE_MAX_FACTORS);
    mt_rope_tables(&cfg.rope[0], POSITIONS, 4096, cos_t, sin_t);
    return 0;
}
