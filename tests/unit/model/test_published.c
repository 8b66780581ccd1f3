/* SPDX-License-Identifier: Apache-2.0 */
/* The stored shapes of published models (configs/models): each is read and has the parameters of its model. */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fs.h"
#include "base/mem.h"
#include "hf/hf_config.h"
#include "model/layout.h"
#include "test.h"

static const char *folder;

static const struct {
    const char *name;
    uint64_t n_params; /* as the hub counts their files, or transformers, without layers beyond the decoder; correction
                          biases among them */
} published[] = {
    {"DeepSeek-V2-Lite", UINT64_C(15706484224)},
    {"DeepSeek-V3", UINT64_C(671026419200)},
    {"ERNIE-4.5-21B-A3B", UINT64_C(21825437888)},
    {"ERNIE-4.5-300B-A47B", UINT64_C(299484163264)},
    {"GLM-4.5", UINT64_C(352797829024)},
    {"GLM-4.5-Air", UINT64_C(106852251264)},
    {"GLM-4.6", UINT64_C(352797829024)},
    {"GLM-4.7", UINT64_C(352797829024)},
    {"GLM-4.7-Flash", UINT64_C(29943393920)},
    {"GLM-5", UINT64_C(743180209920)}, /* without its indexer, which is copied */
    {"gemma-4-26B-A4B", UINT64_C(25233141790)},
    {"gemma-4-31B", UINT64_C(30697345340)},
    {"granite-4.0-h-small", UINT64_C(32207337984)},
    {"Hunyuan-A13B", UINT64_C(80393183232)},
    {"Kimi-K2", UINT64_C(1026408232448)},
    {"Kimi-K2-Thinking", UINT64_C(1026408232448)},
    {"Llama-3.1-405B", UINT64_C(405853388800)},
    {"Llama-3.1-70B", UINT64_C(70553706496)},
    {"Llama-3.1-8B", UINT64_C(8030261248)},
    {"Llama-3.2-1B", UINT64_C(1235814400)},
    {"Llama-3.2-3B", UINT64_C(3212749824)},
    {"Llama-3.3-70B", UINT64_C(70553706496)},
    {"Meta-Llama-3-70B", UINT64_C(70553706496)},
    {"Meta-Llama-3-8B", UINT64_C(8030261248)},
    {"MiniMax-M2", UINT64_C(228689764864)},
    {"Mistral-7B", UINT64_C(7248023552)},
    {"Mistral-Large", UINT64_C(122610069504)},
    {"Mistral-Medium-3.5", UINT64_C(125025988608)},
    {"Mistral-Nemo", UINT64_C(12247782400)},
    {"Mistral-Small-24B", UINT64_C(23572403200)},
    {"Mistral-Small-4-119B", UINT64_C(118972826624)},
    {"Mixtral-8x22B", UINT64_C(140630071296)},
    {"Mixtral-8x7B", UINT64_C(46702792704)},
    {"Moonlight-16B-A3B", UINT64_C(15960110208)},
    {"Nemotron-3-Nano", UINT64_C(31577940288)},
    {"Nemotron-3-Super", UINT64_C(120668707840)},
    {"OLMoE-1B-7B", UINT64_C(6919161856)},
    {"Qwen2-57B-A14B", UINT64_C(57408658944)},
    {"Qwen2.5-0.5B", UINT64_C(494032768)},
    {"Qwen2.5-1.5B", UINT64_C(1543714304)},
    {"Qwen2.5-14B", UINT64_C(14770033664)},
    {"Qwen2.5-32B", UINT64_C(32763876352)},
    {"Qwen2.5-3B", UINT64_C(3085938688)},
    {"Qwen2.5-72B", UINT64_C(72706203648)},
    {"Qwen2.5-7B", UINT64_C(7615616512)},
    {"Qwen3-0.6B", UINT64_C(596049920)},
    {"Qwen3-1.7B", UINT64_C(1720574976)},
    {"Qwen3-14B", UINT64_C(14768307200)},
    {"Qwen3-235B-A22B", UINT64_C(235093634560)},
    {"Qwen3-30B-A3B", UINT64_C(30532122624)},
    {"Qwen3-32B", UINT64_C(32762123264)},
    {"Qwen3-4B", UINT64_C(4022468096)},
    {"Qwen3-8B", UINT64_C(8190735360)},
    {"Qwen3-Coder-30B-A3B", UINT64_C(30532122624)},
    {"Qwen3-Coder-480B-A35B", UINT64_C(480154875392)},
    {"Qwen3-Next-80B-A3B", UINT64_C(79674391296)},
    {"Qwen3.5-27B", UINT64_C(26895998464)},
    {"Qwen3.5-35B-A3B", UINT64_C(34660610688)},
    {"Qwen3.5-122B-A10B", UINT64_C(122111526912)},
    {"Qwen3.5-397B-A17B", UINT64_C(396346350336)},
    {"dots.llm1", UINT64_C(142774381696)},
    {"gpt-oss-120b", UINT64_C(116829156672)},
    {"gpt-oss-20b", UINT64_C(20914757184)},
};

static uint64_t count(const char *name)
{
    char path[4096];
    char *text;
    size_t len;
    struct mt_hf_config cfg;
    struct mt_layout *l = NULL;
    struct mt_err err = {0};
    const struct mt_layout_params p = {.decay_embeddings = true, .cut = mt_cut_layer};
    snprintf(path, sizeof(path), "%s/%s.json", folder, name);
    if (mt_read_file(path, &text, &len, &err) || mt_hf_config_parse(&cfg, text, len, path, &err) ||
        mt_layout_create(&l, &cfg, &p, &err))
        fail_msg("%s", err.msg);
    uint64_t n = l->n_params;
    mt_layout_destroy(&l);
    free(text);
    return n;
}

TEST(stored_models_have_their_parameter_counts)
{
    for (size_t i = 0; i < MT_ARRAY_LEN(published); i++) {
        uint64_t n = count(published[i].name);
        if (n != published[i].n_params)
            fail_msg("%s: %llu parameters", published[i].name, (unsigned long long)n);
    }
}

TEST(every_stored_model_is_in_the_table)
{
    size_t n = 0;
    DIR *d = opendir(folder);
    assert_non_null(d);
    for (const struct dirent *e; (e = readdir(d));)
        n += strstr(e->d_name, ".json") != NULL;
    closedir(d);
    assert_int_equal(n, MT_ARRAY_LEN(published));
}

int main(int argc, char **argv)
{
    if (argc < 2)
        return 2;
    folder = argv[1];
    return test_run();
}
