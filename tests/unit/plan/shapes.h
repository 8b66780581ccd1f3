/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdio.h>

#include "kinds/kinds.h"
#include "plan/search.h"
#include "test.h"

/** Dense decoder shapes, and a machine of round numbers for which times can be computed by hand. */
struct shape {
    int hidden, ffn, layers, heads, kv, vocab;
};
static const struct shape tiny = {64, 96, 4, 4, 2, 320}, small = {512, 1536, 8, 8, 4, 4096},
                          llama70b = {8192, 28672, 80, 64, 8, 128256},
                          mistral123b = {12288, 28672, 88, 96, 8, 32768},
                          llama405b = {16384, 53248, 126, 128, 8, 128256};

/** freeze: a tensor's name or pattern; NULL: all are trained. */
static inline struct mt_layout *lay_out_but(const struct shape *s, bool halves, const char *freeze)
{
    char json[1024];
    struct mt_hf_config cfg;
    struct mt_layout *l = NULL;
    struct mt_err err = {0};
    const struct mt_layout_params p = {.decay_embeddings = true, .cut = halves ? mt_cut_half : mt_cut_layer,
                                       .freeze = &freeze, .n_freeze = freeze != NULL};
    int n = snprintf(json, sizeof(json),
                     "{\"architectures\":[\"LlamaForCausalLM\"],\"model_type\":\"llama\",\"hidden_size\":%d,"
                     "\"intermediate_size\":%d,\"num_hidden_layers\":%d,\"num_attention_heads\":%d,"
                     "\"num_key_value_heads\":%d,\"vocab_size\":%d,\"max_position_embeddings\":131072,"
                     "\"rms_norm_eps\":1e-5,\"rope_theta\":500000.0,\"tie_word_embeddings\":false,"
                     "\"hidden_act\":\"silu\"}",
                     s->hidden, s->ffn, s->layers, s->heads, s->kv, s->vocab);
    if (mt_hf_config_parse(&cfg, json, (size_t)n, "shape", &err) ||
        mt_layout_create(&l, &cfg, &p, &err))
        fail_msg("%s", err.msg);
    return l;
}

static inline struct mt_layout *lay_out(const struct shape *s, bool halves)
{
    return lay_out_but(s, halves, NULL);
}

static inline struct mt_layout *make_layout(const struct shape *s)
{
    return lay_out(s, false);
}

/* 100 TFLOP/s for every shape, links of 25 GB/s, drives of 7 and 5 GB/s; nothing slows anything else down. */
static inline struct mt_machine make_machine(double device_gib, double host_gib, double drives)
{
    struct mt_machine m = {.name = "round numbers"};
    const struct {
        enum mt_rate_id id;
        double v;
    } rates[] = {{MT_RATE_GEMM_BF16, 100},  {MT_RATE_GEMM_F32, 50},   {MT_RATE_ATTENTION, 100},
                 {MT_RATE_ATTENTION_BWD, 100}, {MT_RATE_DEVICE_GBS, 1e6}, {MT_RATE_OP_US, 0},
                 {MT_RATE_DEVICE_GIB, device_gib}, {MT_RATE_H2D, 25},  {MT_RATE_D2H, 25},
                 {MT_RATE_H2D_BOTH, 25},    {MT_RATE_D2H_BOTH, 25},   {MT_RATE_COPY_US, 0},
                 {MT_RATE_CORES, 16},       {MT_RATE_HOST_GIB, host_gib}, {MT_RATE_DRAM, 1000},
                 {MT_RATE_DRIVES, drives},  {MT_RATE_READ, 7},        {MT_RATE_WRITE, 5},
                 {MT_RATE_READ_BOTH, 7},    {MT_RATE_WRITE_BOTH, 5},  {MT_RATE_DISK_US, 0},
                 {MT_RATE_STEP_US, 0},      {MT_RATE_TOKEN_NS, 0}};
    for (size_t i = 0; i < sizeof(rates) / sizeof(*rates); i++)
        m.rate[rates[i].id] = (struct mt_rate){rates[i].v, MT_RATE_RATED};
    mt_machine_add_update(&m, "", 16, 0.2); /* 130 GB/s of 26 B */
    MUST(mt_machine_complete, &m, "round numbers");
    return m;
}

static inline struct mt_plan_request make_request(const struct mt_layout *l, const struct mt_machine *m,
                                           size_t seq_len, size_t rows)
{
    const double gib = 1073741824.0;
    return (struct mt_plan_request){
        .machine = m,
        .layout = l,
        .train = true,
        .numerics.dtype = MT_BF16,
        .numerics.grad_dtype = MT_BF16,
        .numerics.optimizer = &mt_adamw,
        .numerics.seq_len = (int64_t)seq_len,
        .numerics.rows_per_step = (int64_t)rows,
        .numerics.micro_batch = MT_AUTO,
        .numerics.logits_chunk = MT_AUTO,
        .numerics.logits_piece = MT_AUTO,
        .docs_per_row = 1,
        .placement.slots = MT_AUTO,
        .placement.keep_layers = MT_AUTO,
        .placement.offload_layers = MT_AUTO,
        .placement.offload_attention = MT_AUTO,
        .placement.update_pending = MT_AUTO,
        .placement.activations = MT_ACT_AUTO,
        .placement.states = MT_STATES_AUTO,
        .placement.device_budget.bytes = (uint64_t)(m->rate[MT_RATE_DEVICE_GIB].value * gib) +
                                         mt_device_kind(mt_machine_device_kind(m))->own_bytes,
        .placement.host_budget.bytes = (uint64_t)(m->rate[MT_RATE_HOST_GIB].value * gib * 0.9),
        .placement.threads = 16,
        .drives = (int)m->rate[MT_RATE_DRIVES].value,
    };
}
