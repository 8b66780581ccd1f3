/* SPDX-License-Identifier: Apache-2.0 */
/* From a configuration and a machine to a request: rows, dtypes, budgets. */
#include <string.h>

#include "base/fs.h"
#include "base/mem.h"
#include "plan/resolve.h"
#include "shapes.h"
#include "test.h"

static const uint64_t GIB = (uint64_t)1 << 30;

static struct mt_config *load(const char *const *sets, int n)
{
    struct mt_config *c = NULL;
    MUST(mt_config_load, &c, NULL, sets, n);
    return c;
}

static struct mt_placement placed(const struct mt_plan_limits *l, const char *device, const char *host)
{
    const char *sets[] = {device, host};
    struct mt_config *c = load(sets, 2);
    struct mt_plan_request r;
    MUST(mt_resolve_request, &r, c, l);
    mt_config_destroy(&c);
    assert_false(r.placement.device_budget.is_auto || r.placement.device_budget.is_ratio);
    assert_false(r.placement.host_budget.is_auto || r.placement.host_budget.is_ratio);
    return r.placement;
}

TEST(budgets_are_shares_of_what_there_is)
{
    const struct mt_plan_limits gpu = {.kind = "cuda", .host_bytes = 100 * GIB, .device_bytes = 24 * GIB,
                                       .device_reserve = GIB, .threads = 8};
    const struct mt_plan_limits cpu = {.kind = "cpu", .host_bytes = 100 * GIB, .threads = 8};
    static const char *const device = "memory.device_budget=", *const host = "memory.host_budget=";
    static const struct {
        const char *device, *host;
        double gpu_gib, cpu_gib, host_gib;
    } cases[] = {
        {"auto", "90%", 23, 22.5, 90}, {"auto", "auto", 23, 22.5, 90}, {"50%", "auto", 12, 45, 90},
        {"3GiB", "40GiB", 3, 3, 40},   {"auto", "50%", 23, 12.5, 50},
    };
    for (size_t i = 0; i < MT_ARRAY_LEN(cases); i++) {
        char d[64], h[64];
        snprintf(d, sizeof(d), "%s%s", device, cases[i].device);
        snprintf(h, sizeof(h), "%s%s", host, cases[i].host);
        struct mt_placement on_gpu = placed(&gpu, d, h), on_cpu = placed(&cpu, d, h);
        assert_int_equal(on_gpu.device_budget.bytes, cases[i].gpu_gib * (double)GIB);
        assert_int_equal(on_cpu.device_budget.bytes, cases[i].cpu_gib * (double)GIB);
        assert_int_equal(on_gpu.host_budget.bytes, cases[i].host_gib * (double)GIB);
        assert_int_equal(on_cpu.host_budget.bytes, cases[i].host_gib * (double)GIB);
        assert_int_equal(on_gpu.threads, 8);
    }
    const struct mt_plan_limits least = {.kind = "cuda", .host_bytes = GIB, .device_bytes = 1 << 20,
                                         .device_reserve = GIB, .threads = 1};
    assert_int_equal(placed(&least, "memory.device_budget=auto", "memory.host_budget=auto").device_budget.bytes, 0);
}

/* Devices without memory of their own: what they have of a host's is not the host's. */
TEST(a_host_has_what_its_device_leaves)
{
    const struct mt_plan_limits l = {.kind = "cuda", .host_bytes = 90 * GIB, .threads = 8, .n_hosts = 2, .each = {[1] = 110 * GIB},
                                     .device_bytes = 120 * GIB, .device_share = 30 * GIB, .device_reserve = 90 * GIB};
    struct mt_placement p = placed(&l, "memory.device_budget=auto", "memory.host_budget=50%");
    assert_int_equal(p.device_budget.bytes, 30 * GIB);
    assert_int_equal(p.host_budget.bytes, 40 * GIB);
}

/* Of several hosts the least budget counts, and what each has beyond it is known. */
TEST(hosts_may_use_what_each_has)
{
    const struct mt_plan_limits l = {.kind = "cpu", .host_bytes = 100 * GIB, .threads = 8, .n_hosts = 3,
                                     .each = {[1] = 40 * GIB, [2] = 60 * GIB}, .drive_room = {7, 0, 9}};
    static const struct {
        const char *budget, *memory;
        double least, more[3];
        const char *drives;
        uint64_t room[3];
    } cases[] = {{"50%", "", 20, {30, 0, 10}, "", {7, 0, 9}},
                 {"10GiB", "", 10, {0}, "2KiB, 0GB, 1KiB", {2048, 1, 1024}},
                 {"50%", "9GiB, 8GiB, 12GiB", 8, {1, 0, 4}, "", {7, 0, 9}}};
    for (size_t i = 0; i < MT_ARRAY_LEN(cases); i++) {
        const char *sets[] = {MT_PATH("memory.host_budget=%s", cases[i].budget), MT_PATH("cluster.memory=%s", cases[i].memory),
                              MT_PATH("cluster.drives=%s", cases[i].drives)};
        MT_CLOSED_BY(mt_config_destroy) struct mt_config *c = load(sets, 3);
        struct mt_plan_request r;
        MUST(mt_resolve_request, &r, c, &l);
        assert_int_equal(r.placement.host_budget.bytes, cases[i].least * (double)GIB);
        assert_int_equal(r.placement.device_budget.bytes, cases[i].least / 4 * (double)GIB);
        for (int host = 0; host < 3; host++) {
            assert_int_equal(r.more[host], cases[i].more[host] * (double)GIB);
            assert_int_equal(r.drive_room[host], cases[i].room[host]);
        }
    }
    static const char *const bad[][2] = {{"cluster.memory=9GiB, 8GiB", "2 hosts, and there are 3"}, {"cluster.memory=9GiB, x, 1GiB", "\"x\""},
                                        {"cluster.drives=1TB, 2TB", "drives of 2 hosts, and there are 3"}};
    for (size_t i = 0; i < MT_ARRAY_LEN(bad); i++) {
        MT_CLOSED_BY(mt_config_destroy) struct mt_config *c = load(bad[i], 1);
        struct mt_plan_request r;
        struct mt_err err = {0};
        assert_int_equal(mt_resolve_request(&r, c, &l, &err), -EINVAL);
        assert_non_null(strstr(err.msg, bad[i][1]));
    }
}

TEST(a_gpu_keeps_memory_for_what_lives_outside_the_budget)
{
    assert_int_equal(mt_plan_device_reserve(8 * GIB, 64 * GIB, false), GIB);
    assert_int_equal(mt_plan_device_reserve(24 * GIB, 256 * GIB, true), GIB + GIB / 2);
    assert_int_equal(mt_plan_device_reserve(150 * GIB, 512 * GIB, false), 6 * GIB);
    assert_int_equal(mt_plan_device_reserve(150 * GIB, 512 * GIB, true), 6 * GIB);
}

/* Of 8 bytes for 4 KiB: with much host memory they take more of a small GPU than all else. */
TEST(page_tables_of_the_hosts_memory_lie_outside_the_budget)
{
    assert_int_equal(mt_plan_device_reserve(24 * GIB, 1024 * GIB, false), 2 * GIB + GIB / 2);
    assert_int_equal(mt_plan_device_reserve(24 * GIB, 1024 * GIB, true), 3 * GIB);
    assert_int_equal(mt_plan_device_reserve(150 * GIB, 4096 * GIB, false), 8 * GIB + GIB / 2);
    MT_CLOSED_BY(mt_machine_finish) struct mt_machine m = make_machine(24, 512, 2);
    assert_int_equal(mt_plan_limits_of(&m).device_reserve, GIB + GIB / 2);
}

TEST(a_machines_limits_are_those_of_its_profile)
{
    MT_CLOSED_BY(mt_machine_finish) struct mt_machine m = make_machine(24, 128, 2);
    struct mt_plan_limits l = mt_plan_limits_of(&m);
    assert_string_equal(l.kind, "cuda");
    assert_int_equal(l.device_bytes, 24 * GIB);
    assert_int_equal(l.device_reserve, GIB);
    assert_int_equal(l.host_bytes, 128 * GIB);
    assert_int_equal(l.drives, 2);
    m.rate[MT_RATE_READ].value = 0;
    assert_int_equal(mt_plan_limits_of(&m).drives, 0);
}

TEST(rows_of_a_step_are_whole)
{
    static const struct {
        const char *tokens, *rows, *len;
        int64_t want; /* -1: refused */
        const char *word;
    } cases[] = {
        {"1024", "0", "512", 2, NULL}, {"1000", "0", "512", -1, "512 and 1024"}, {"100", "0", "512", -1, "0 and 512"},
        {"0", "7", "512", 7, NULL},    {"0", "0", "512", 128, NULL},              {"0", "0", "1000000", 1, NULL},
    };
    for (size_t i = 0; i < MT_ARRAY_LEN(cases); i++) {
        char t[64], b[64], s[64];
        snprintf(t, sizeof(t), "train.tokens_per_step=%s", cases[i].tokens);
        snprintf(b, sizeof(b), "train.batch_size=%s", cases[i].rows);
        snprintf(s, sizeof(s), "data.seq_len=%s", cases[i].len);
        const char *sets[] = {t, b, s};
        MT_CLOSED_BY(mt_config_destroy) struct mt_config *c = load(sets, 3);
        struct mt_numerics n = {.rows_per_step = -5};
        struct mt_err err = {0};
        int rc = mt_resolve_numerics(&n, c, &err);
        assert_int_equal(rc, cases[i].want < 0 ? -EINVAL : 0);
        assert_int_equal(n.rows_per_step, cases[i].want < 0 ? -5 : cases[i].want);
        if (rc)
            assert_non_null(strstr(err.msg, cases[i].word));
        else
            assert_true(n.grad_dtype == n.dtype && n.optimizer == &mt_adamw && n.micro_batch == MT_AUTO);
    }
}

TEST(the_rule_for_micro_batches_is_of_the_numerics_alone)
{
    struct mt_numerics n = {.seq_len = 2048, .rows_per_step = 64, .micro_batch = MT_AUTO};
    assert_int_equal(mt_resolve_micro_batch(&n), 4);
    n.rows_per_step = 3;
    assert_int_equal(mt_resolve_micro_batch(&n), 3);
    n.seq_len = 100000;
    assert_int_equal(mt_resolve_micro_batch(&n), 1);
    n.micro_batch = 2;
    assert_int_equal(mt_resolve_micro_batch(&n), 2);
}

/* Experts of Qwen3-235B have 18 Mi parameters: 36 MiB in bf16; NF4 has 0.516 bytes for each, FP8 just over 1. */
TEST(groups_of_experts_go_by_the_bytes_of_a_load)
{
    static const char model[] =
        "{\"architectures\": [\"Qwen3MoeForCausalLM\"], \"hidden_size\": 4096, \"intermediate_size\": 12288, "
        "\"moe_intermediate_size\": 1536, \"num_hidden_layers\": 2, \"num_attention_heads\": 64, "
        "\"num_key_value_heads\": 4, \"head_dim\": 128, \"vocab_size\": 1000, \"num_experts\": 128, "
        "\"num_experts_per_tok\": 8}";
    static const struct {
        const char *sets[3];
        size_t group;
    } cases[] = {
        {{"model.freeze=", "model.base_dtype=auto", "memory.expert_group=auto"}, 7},
        {{"model.freeze=*.experts.*", "model.base_dtype=auto", "memory.expert_group=auto"}, 7},
        {{"model.freeze=*.experts.*", "model.base_dtype=nf4", "memory.expert_group=auto"}, 27},
        {{"model.freeze=*.experts.*", "model.base_dtype=fp8", "memory.expert_group=auto"}, 14},
        {{"model.freeze=*.experts.*", "model.base_dtype=nf4", "memory.expert_group=3"}, 3},
        {{"model.freeze=*.experts.7.*", "model.base_dtype=nf4", "memory.expert_group=auto"}, 7}, /* others are larger */
        {{"adapter.kind=lora", "model.base_dtype=nf4", "adapter.targets=q_proj"}, 27},
        {{"adapter.kind=lora", "model.base_dtype=nf4", "adapter.targets=*.experts.*"}, 26}, /* and adapters */
    };
    struct mt_hf_config cfg;
    struct mt_err err = {0};
    MUST(mt_hf_config_parse, &cfg, model, sizeof(model) - 1, "config.json");
    for (size_t i = 0; i < MT_ARRAY_LEN(cases); i++) {
        MT_CLOSED_BY(mt_config_destroy) struct mt_config *c = load(cases[i].sets, 3);
        MT_CLOSED_BY(mt_layout_destroy) struct mt_layout *l = NULL, *halves = NULL;
        if (mt_plan_lay_out(&l, &halves, c, &cfg, NULL, NULL, &err))
            fail_msg("case %zu: %s", i, err.msg);
        if (l->cut.expert_group != cases[i].group || halves->cut.expert_group != cases[i].group)
            fail_msg("case %zu: groups of %zu, in halves of %zu", i, l->cut.expert_group, halves->cut.expert_group);
    }
}
