/* SPDX-License-Identifier: Apache-2.0 */
/* Attention of the CUDA device on the emulation: which engine runs, how many plans are made, and what is found wrong. */
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "host_side.h"
#include "test.h"

#include "attention.h"
#include "base/log.h"
#include "base/mem.h"
#include "emu/emu.h"
#include "kinds/kinds.h"
#include "fused.h"
#include "workspace.h"

TEST(the_name_tells_which_attention_runs)
{
    mt_device *dev = NULL;
    struct mt_err err = {0};
    struct mt_device_params p = {.kind = "cuda", .n_threads = 1, .budget_bytes = 40 * MIB};
    dev = open_device(40 * MIB);
    assert_non_null(strstr(mt_device_limits(dev)->name, "attention: emulated cuDNN"));
    mt_device_destroy(&dev);
    setenv("MEGATRAIN_ATTENTION", "tiled", 1);
    dev = open_device(40 * MIB);
    assert_non_null(strstr(mt_device_limits(dev)->name, "attention: tiled"));
    mt_device_destroy(&dev);
    setenv("MEGATRAIN_ATTENTION", "other", 1);
    assert_int_equal(mt_device_create(&dev, &p, &err), -EINVAL);
    unsetenv("MEGATRAIN_ATTENTION");
}

static char warned[1024];

static void keep_warnings(enum mt_log_level level, const char *line)
{
    if (level == MT_LOG_WARN)
        snprintf(warned, sizeof(warned), "%s", line);
}

/* Attention is slower then, and whoever built the program with cuDNN does not expect it. */
TEST(a_fused_engine_that_cannot_be_loaded_is_warned_of)
{
    mt_log_set_sink(keep_warnings);
    setenv("MT_EMU_NO_FUSED", "1", 1);
    MT_CLOSED_BY(mt_device_destroy) mt_device *dev = open_device(40 * MIB);
    unsetenv("MT_EMU_NO_FUSED");
    mt_log_set_sink(NULL);
    assert_non_null(strstr(mt_device_limits(dev)->name, "attention: own"));
    assert_non_null(strstr(warned, "MT_EMU_NO_FUSED is set"));
}

/* What bits depend on: the emulated products have no version of their own. */
#define ENGINE "emulated cuDNN, cuBLASLt 13.0.0, sm_90, 2 multiprocessors"

enum { PACK_TOKENS = 256, PACK_LEN = 128, HEAD = 8 };

static void put_documents(mt_device *dev, char *memory, const int32_t *cu, size_t n_docs)
{
    must_copy(dev, MT_STREAM_COMPUTE, &(struct mt_copy){memory, 4096, (void *)(uintptr_t)cu, 4096,
                                                        (n_docs + 1) * sizeof(*cu), 1});
}

/* Attention of one head over the documents that were put there, forward and backward; nobody looks at the numbers. */
static void attend(mt_device *dev, char *memory, const int32_t *cu, size_t n_docs, float scale)
{
    enum { TENSOR = PACK_TOKENS * HEAD * 2 };
    struct mt_heads tensor[10];
    for (size_t i = 0; i < 10; i++)
        tensor[i] = mt_heads(memory + 4096 + i * TENSOR, HEAD, 1, HEAD);
    struct mt_attention a = {
        .n = (size_t)cu[n_docs], .n_docs = n_docs, .most_n = PACK_TOKENS, .most_len = PACK_LEN, .dtype = MT_BF16,
        .scale = scale, .cu_seqlens = (const int32_t *)memory, .cu_seqlens_host = cu, .q = tensor[0], .k = tensor[1],
        .v = tensor[2], .o = tensor[3], .lse = (float *)tensor[4].p, .workspace = memory + 4096 + 10 * TENSOR};
    struct mt_attention_bwd b = {.d_o = tensor[6], .dq = tensor[7], .dk = tensor[8], .dv = tensor[9]};
    for (size_t i = 0; i < n_docs; i++)
        a.max_len = MT_MAX(a.max_len, (size_t)(cu[i + 1] - cu[i]));
    b.fwd = a;
    MUST(mt_op_attention, dev, &a);
    MUST(mt_op_attention_bwd, dev, &b);
}

static char *memory_to_attend(mt_device *dev)
{
    enum { BYTES = 8 * MIB };
    struct mt_err err = {0};
    char *memory = take(dev, BYTES, "attention");
    assert_int_equal(mt_op_zero(dev, &(struct mt_zero){memory, MIB / 4}, &err), 0);
    return memory;
}

/* Micro-batches as they come: packed to the brim or nearly, or of one document. */
TEST(packs_of_all_lengths_share_a_few_plans)
{
    MT_CLOSED_BY(mt_device_destroy) mt_device *dev = open_device(64 * MIB);
    char *memory = memory_to_attend(dev);
    size_t before = mt_emu_fused_plans();
    uint64_t random = 1;
    int packs = mt_emu_settings()->jitter_us ? 20 : 500; /* delays change nothing here, and add up */
    for (int pack = 0; pack < packs; pack++) {
        int32_t cu[PACK_TOKENS + 1] = {0}, len;
        size_t n = 0;
        for (int doc = 0; doc < (pack % 4 ? 12 : 1); doc++) { /* what does not fit is left out */
            len = 1 + (int32_t)(mt_emu_random(&random) % PACK_LEN);
            if (cu[n] + len > PACK_TOKENS)
                continue;
            cu[n + 1] = cu[n] + len;
            n++;
        }
        put_documents(dev, memory, cu, n);
        attend(dev, memory, cu, n, 0.25f);
    }
    must_sync(dev);
    size_t made = mt_emu_fused_plans() - before;
    if (made < 2 || made >= 60)
        fail_msg("%zu plans", made);
}

/* The emulated engine bears no more than that at once, and none that goes while it runs. */
TEST(a_plan_goes_when_there_are_many_and_is_made_again)
{
    static const int32_t cu[] = {0, 24};
    enum { N = 150 };
    MT_CLOSED_BY(mt_device_destroy) mt_device *dev = open_device(64 * MIB);
    char *memory = memory_to_attend(dev);
    size_t before = mt_emu_fused_plans();
    put_documents(dev, memory, cu, 1);
    for (int i = 1; i <= N; i++) /* no waiting between them */
        attend(dev, memory, cu, 1, (float)i);
    assert_int_equal(mt_emu_fused_plans() - before, 2 * N);
    attend(dev, memory, cu, 1, N);
    assert_int_equal(mt_emu_fused_plans() - before, 2 * N);
    attend(dev, memory, cu, 1, 1);
    assert_int_equal(mt_emu_fused_plans() - before, 2 * N + 2);
    must_sync(dev);
}

/* --- what is wrong with a fused engine -------------------------------------------------------------- */

static const int32_t two[] = {0, 128, 250}, three[] = {0, 64, 127, 190};

/* Values near 1 for all that attention reads; attends once; then the first of dv. */
static uint16_t attend_to_values(mt_device *dev, char *memory, const int32_t *docs, size_t n_docs, float scale)
{
    enum { N = PACK_TOKENS * HEAD, TENSOR = N * 2 };
    static uint16_t values[N * 7];
    uint64_t random = 3;
    uint16_t dv = 0;
    for (size_t i = 0; i < MT_ARRAY_LEN(values); i++)
        values[i] = mt_f32_to_bf16((float)(mt_emu_random(&random) % 2000) * 1e-3f - 0.7f);
    put_documents(dev, memory, docs, n_docs);
    must_copy(dev, MT_STREAM_COMPUTE, &(struct mt_copy){memory + 4096, sizeof(values), values, sizeof(values),
                                                        sizeof(values), 1});
    attend(dev, memory, docs, n_docs, scale);
    must_copy(dev, MT_STREAM_COMPUTE, &(struct mt_copy){&dv, 2, memory + 4096 + 9 * TENSOR, 2, 2, 1});
    must_sync(dev);
    return dv;
}

/* A new device with what an earlier one found, if any; it attends once. Returns the first of dv. */
static uint16_t attend_anew(const char *adopt, const char *fault, struct mt_str *found)
{
    mt_log_set_sink(keep_warnings);
    *warned = 0;
    MT_CLOSED_BY(mt_device_destroy) mt_device *dev = open_device(64 * MIB);
    char *memory = memory_to_attend(dev);
    if (adopt)
        assert_true(mt_device_adopt_findings(dev, adopt));
    setenv("MT_EMU_FUSED_FAULT", fault, 1);
    uint16_t dv = attend_to_values(dev, memory, two, 2, 0.25f);
    unsetenv("MT_EMU_FUSED_FAULT");
    mt_log_set_sink(NULL);
    mt_device_findings(dev, found);
    return dv;
}

TEST(an_engine_that_does_wrong_is_found_at_once)
{
    static const char *const faults[] = {"backward ragged nan", "backward ragged off", "forward ragged nan",
                                         "forward ragged off"};
    MT_STR_FREED struct mt_str good = {0};
    attend_anew(NULL, "", &good);
    assert_string_equal(good.p, ENGINE ": forward ragged 8 of 1/1 to 128 fused; backward ragged 8 of 1/1 to 128 fused");
    assert_int_equal(*warned, 0);
    for (size_t i = 0; i < MT_ARRAY_LEN(faults); i++) {
        struct mt_str found = {0};
        uint16_t dv = attend_anew(NULL, faults[i], &found);
        assert_true(isfinite(mt_bf16_to_f32(dv)));
        assert_non_null(strstr(warned, strstr(faults[i], "nan") ? "is not finite" : "of its norm"));
        assert_non_null(strstr(warned, "in another way from now on"));
        const char *pass = strstr(faults[i], "forward") ? "forward ragged 8 of 1/1 to 128 tiles" : "backward ragged 8 of 1/1 to 128 tiles";
        if (!strstr(found.p, pass) || !strstr(found.p, "fused"))
            fail_msg("%s: %s", faults[i], found.p);
        mt_str_finish(&found);
    }
}

/* As cuDNN did before 9.25: what is right with two documents is not with three, which an empty one joins. */
TEST(an_engine_that_errs_with_empty_sequences_is_given_none)
{
    struct mt_str found = {0};
    MT_CLOSED_BY(mt_device_destroy) mt_device *dev = open_device(64 * MIB);
    char *memory = memory_to_attend(dev);
    setenv("MT_EMU_FUSED_FAULT", "forward backward ragged empty nan", 1);
    for (size_t n_docs = 2; n_docs <= 3; n_docs++)
        for (int i = 0; i < 2; i++)
            assert_true(isfinite(mt_bf16_to_f32(attend_to_values(dev, memory, n_docs == 2 ? two : three, n_docs, 0.25f))));
    unsetenv("MT_EMU_FUSED_FAULT");
    mt_device_findings(dev, &found);
    assert_string_equal(found.p, ENGINE ": forward ragged 8 of 1/1 to 128 fused; backward ragged 8 of 1/1 to 128 fused; "
                                 "forward rounded 8 of 1/1 to 64 tiles; forward ragged 8 of 1/1 to 64 fused; "
                                 "backward rounded 8 of 1/1 to 64 tiles; backward ragged 8 of 1/1 to 64 fused");
    mt_str_finish(&found);
}

TEST(what_was_found_is_not_looked_for_again)
{
    struct mt_str found = {0}, again = {0};
    uint16_t fused = attend_anew(NULL, "", &found);
    static const char wrong[] = ENGINE ": forward ragged 8 of 1/1 to 128 fused; backward ragged 8 of 1/1 to 128 tiles; "
                                "backward copies 8 of 1/1 to 128 tiles";
    uint16_t tiles = attend_anew(wrong, "", &again);
    assert_string_equal(again.p, wrong);
    assert_int_not_equal(attend_anew(found.p, "backward ragged nan", &again), fused); /* nobody compares any more */
    assert_int_equal(attend_anew(wrong, "backward ragged nan", &again), tiles);
    mt_device *dev = open_device(40 * MIB);
    assert_false(mt_device_adopt_findings(dev, "cuDNN 9.19.0, cuBLASLt 13.0.0, sm_90, 2 multiprocessors: forward ragged 8 of 1/1 to 128 fused"));
    assert_false(mt_device_adopt_findings(dev, ENGINE ": sideways ragged 8 of 1/1 to 128 fused"));
    assert_true(mt_device_adopt_findings(dev, ENGINE ": forward copies window 64 of 4/2 to 512 tiles"));
    mt_str_finish(&again);
    mt_device_findings(dev, &again);
    assert_string_equal(again.p, ENGINE ": forward copies window 64 of 4/2 to 512 tiles");
    mt_device_destroy(&dev);
    mt_str_finish(&found);
    mt_str_finish(&again);
}

TEST(inputs_that_tell_nothing_decide_nothing)
{
    static const int32_t cu[] = {0, 24};
    struct mt_str found = {0};
    MT_CLOSED_BY(mt_device_destroy) mt_device *dev = open_device(64 * MIB);
    char *memory = memory_to_attend(dev); /* zeros */
    put_documents(dev, memory, cu, 1);
    attend(dev, memory, cu, 1, 1);
    must_sync(dev);
    mt_device_findings(dev, &found);
    assert_string_equal(found.p, ENGINE);
    mt_str_finish(&found);
}

/* Right for the first step's data is not right for all: what is in doubt is compared again, and else is not. */
TEST(a_library_that_errs_later_is_found_when_it_is_doubted)
{
    struct mt_str found = {0};
    MT_CLOSED_BY(mt_device_destroy) mt_device *dev = open_device(64 * MIB);
    char *memory = memory_to_attend(dev);
    uint16_t right = attend_to_values(dev, memory, two, 2, 0.25f);
    mt_device_doubt(dev);
    assert_int_equal(attend_to_values(dev, memory, two, 2, 0.25f), right); /* compared, and the same bits */
    setenv("MT_EMU_FUSED_FAULT", "backward ragged nan", 1);
    assert_false(isfinite(mt_bf16_to_f32(attend_to_values(dev, memory, two, 2, 0.25f))));
    mt_device_doubt(dev);
    for (int i = 0; i < 2; i++)
        assert_true(isfinite(mt_bf16_to_f32(attend_to_values(dev, memory, two, 2, 0.25f))));
    unsetenv("MT_EMU_FUSED_FAULT");
    mt_device_findings(dev, &found);
    assert_non_null(strstr(found.p, "backward ragged 8 of 1/1 to 128 tiles"));
    mt_str_finish(&found);
}

/* Other heads, groups and lengths are other kernels. */
TEST(heads_groups_and_lengths_are_tried_apart)
{
    static struct mt_trials t = {.engine = "cuDNN"};
    const struct mt_trial_kind k = {.dim = 128, .dim_v = 128, .n_q = 32, .n_kv = 8, .len = 4096};
    struct mt_trial_kind heads = k, group = k, len = k;
    struct mt_str text = {0}, again = {0};
    heads.n_q = 64;
    group.n_kv = 4;
    len.len = 8192;
    *mt_trials_find(&t, &k) = MT_TRIAL_FUSED;
    assert_int_equal(*mt_trials_find(&t, &heads), MT_TRIAL_OPEN);
    assert_int_equal(*mt_trials_find(&t, &group), MT_TRIAL_OPEN);
    assert_int_equal(*mt_trials_find(&t, &len), MT_TRIAL_OPEN);
    *mt_trials_find(&t, &group) = MT_TRIAL_TILES;
    mt_trials_print(&t, &text);
    assert_string_equal(text.p, "cuDNN: forward fixed 128 of 32/8 to 4096 fused; forward fixed 128 of 32/4 to 4096 tiles");
    t.n = 0;
    assert_true(mt_trials_read(&t, text.p));
    mt_trials_print(&t, &again);
    assert_string_equal(text.p, again.p);
    mt_str_finish(&text);
    mt_str_finish(&again);
}

/* Devices of a step: the one that calls second goes by what the first has found, and does not look for itself. */
TEST(what_one_device_found_holds_for_the_other)
{
    for (int wrong = 0; wrong < 2; wrong++) {
        struct mt_str found[2] = {{0}, {0}};
        uint16_t dv[2];
        mt_device *dev[2] = {open_device(64 * MIB), open_device(64 * MIB)};
        assert_true(mt_device_share_findings(dev[1], dev[0]));
        mt_log_set_sink(keep_warnings);
        for (int i = 0; i < 2; i++) {
            setenv("MT_EMU_FUSED_FAULT", i == !wrong ? "backward ragged nan" : "", 1);
            dv[i] = attend_to_values(dev[i], memory_to_attend(dev[i]), two, 2, 0.25f);
        }
        unsetenv("MT_EMU_FUSED_FAULT");
        mt_log_set_sink(NULL);
        assert_true(isfinite(mt_bf16_to_f32(dv[0])));
        assert_int_equal(!isfinite(mt_bf16_to_f32(dv[1])), !wrong); /* right at first: nobody compares any more */
        assert_int_equal(mt_device_distrust(dev[1]), 0);            /* the first is asked for both */
        for (int i = 0; i < 2; i++) {
            mt_device_findings(dev[i], &found[i]);
            mt_device_destroy(&dev[i]); /* what was found goes with the second */
        }
        assert_non_null(strstr(found[0].p, wrong ? "backward ragged 8 of 1/1 to 128 tiles" : "backward ragged 8 of 1/1 to 128 fused"));
        assert_string_equal(found[0].p, found[1].p);
        mt_str_finish(&found[0]);
        mt_str_finish(&found[1]);
    }
}

static struct {
    struct mt_trials *t;
    struct mt_trial_kind kind;
    atomic_int begun;
    enum mt_trial_turn turn;
} late;

static void *call_late(void *arg)
{
    enum mt_trial_verdict *v;
    atomic_store(&late.begun, 1);
    late.turn = mt_trials_begin(late.t, &late.kind, &v);
    return arg;
}

/* A call of a kind that another device compares waits for the verdict. */
TEST(a_call_waits_for_the_comparison_of_its_kind)
{
    enum mt_trial_verdict *v;
    pthread_t thread;
    for (int wrong = 0; wrong < 2; wrong++) {
        late.t = mt_trials_create();
        late.kind = (struct mt_trial_kind){.dim = 128, .dim_v = 128, .n_q = 32, .n_kv = 8, .len = 4096};
        assert_int_equal(mt_trials_begin(late.t, &late.kind, &v), MT_TRIAL_COMPARE);
        atomic_store(&late.begun, 0);
        late.turn = MT_TRIAL_COMPARE;
        assert_int_equal(pthread_create(&thread, NULL, call_late, NULL), 0);
        while (!atomic_load(&late.begun))
            sched_yield();
        nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
        mt_trials_end(late.t, &late.kind, wrong ? MT_TRIAL_TILES : MT_TRIAL_FUSED, true);
        pthread_join(thread, NULL);
        assert_int_equal(late.turn, wrong ? MT_TRIAL_REFUSE : MT_TRIAL_TAKE);
        mt_trials_leave(&late.t);
        assert_null(late.t);
    }
}

/* A first comparison may miss what others have found. */
TEST(versions_that_are_known_to_be_wrong_are_not_used)
{
    const struct {
        int version, sm;
        bool backward;
        size_t n_kv;
        bool wrong;
    } cases[] = {{91700, 90, true, 8, true},   {91700, 90, false, 8, false}, {91800, 90, true, 8, false},
                 {91700, 89, true, 8, false},  {91900, 100, false, 4, true}, {92000, 103, true, 7, true},
                 {92000, 100, true, 8, false}, {92100, 100, true, 4, false}, {0, 90, true, 8, false}};
    for (size_t i = 0; i < MT_ARRAY_LEN(cases); i++) {
        struct mt_attention_bwd b = {.fwd.k.n = cases[i].n_kv};
        struct mt_cuda_call c = {&b.fwd, cases[i].backward ? &b : NULL};
        if (!mt_fused_known_wrong(cases[i].version, cases[i].sm, &c) == cases[i].wrong)
            fail_msg("case %zu", i);
    }
}

/* What lives outside the arena may be refused memory: attention goes on, and says what helps. */
TEST(plans_that_the_gpu_has_no_memory_for_are_done_without)
{
    size_t free_bytes, total;
    struct mt_str found = {0};
#ifdef __SANITIZE_ADDRESS__
    skip(); /* nearly all of the memory cannot be had: its allocations stand apart */
#endif
    assert_int_equal(cudaMemGetInfo(&free_bytes, &total), cudaSuccess);
    MT_CLOSED_BY(mt_device_destroy) mt_device *dev = open_device(free_bytes - 12 * MIB);
    char *memory = memory_to_attend(dev);
    mt_log_set_sink(keep_warnings);
    *warned = 0;
    for (int i = 0; i < 12; i++)
        assert_true(isfinite(mt_bf16_to_f32(attend_to_values(dev, memory, two, 2, 0.25f + 0.01f * (float)i))));
    mt_log_set_sink(NULL);
    assert_non_null(strstr(warned, "memory.device_budget"));
    mt_device_findings(dev, &found);
    assert_non_null(strstr(found.p, "ragged 8 of 1/1 to 128 tiles"));
    mt_str_finish(&found);
}

/* Memory that is short for a moment must not leave the choice to the moment. */
TEST(a_kind_whose_plan_got_no_memory_stays_with_tiles)
{
    struct mt_str found = {0}, again = {0};
    uint16_t short_of_it = attend_anew(NULL, "backward ragged fixed memory", &found);
    assert_non_null(strstr(warned, "memory.device_budget"));
    assert_string_equal(found.p, ENGINE ": forward ragged 8 of 1/1 to 128 fused; backward ragged 8 of 1/1 to 128 tiles; "
                                 "backward copies 8 of 1/1 to 128 tiles");
    assert_int_equal(attend_anew(found.p, "", &again), short_of_it); /* there is memory again */
    mt_str_finish(&found);
    mt_str_finish(&again);
}

struct tries {
    const int *rc;
    int n;
};

static int try_one(void *ctx, int64_t i)
{
    struct tries *t = ctx;
    t->n++;
    return t->rc[i];
}

static int built_first(const int *rc, int n_candidates, int n_tried)
{
    struct tries t = {rc, 0};
    int end = mt_fused_build_first(n_candidates, try_one, &t);
    assert_int_equal(t.n, n_tried);
    return end;
}

/* Another candidate would have other bits. */
TEST(no_memory_for_a_candidate_is_no_reason_to_take_the_next)
{
    assert_int_equal(built_first((int[]){0, 0}, 2, 1), 0);
    assert_int_equal(built_first((int[]){-1, 0}, 2, 2), 0); /* it never can be built */
    assert_int_equal(built_first((int[]){-ENOMEM, 0}, 2, 1), -ENOMEM);
    assert_int_equal(built_first((int[]){-1, -1}, 2, 2), -1);
    assert_int_equal(built_first(NULL, 0, 0), -1);
}

/* A document that is alone in its micro-batch may have any length: each would have a plan of its own. */
TEST(a_document_alone_has_a_fixed_plan_at_its_longest_only)
{
    static const struct {
        int32_t cu[3];
        size_t n;
        bool fixed;
    } packs[] = {{{0, 64}, 1, false}, {{0, PACK_LEN}, 1, true}, {{0, 64, 128}, 2, true}, {{0, 48, 96}, 2, false}};
    for (size_t i = 0; i < MT_ARRAY_LEN(packs); i++) {
        struct mt_str found = {0};
        mt_device *dev = open_device(64 * MIB);
        attend_to_values(dev, memory_to_attend(dev), packs[i].cu, packs[i].n, 0.25f);
        mt_device_findings(dev, &found);
        assert_true(found.p && !strstr(found.p, "forward fixed") == !packs[i].fixed);
        mt_str_finish(&found);
        mt_device_destroy(&dev);
    }
}

/* Eight query heads that share a key head: all at once, but for the sums of their keys' gradients. */
TEST(products_of_a_group_are_batches)
{
    enum { N_Q = 8, LEN = 16, TENSOR = N_Q * LEN * HEAD * 2 };
    static const int32_t cu[] = {0, LEN};
    struct mt_err err = {0};
    setenv("MEGATRAIN_ATTENTION", "tiled", 1);
    MT_CLOSED_BY(mt_device_destroy) mt_device *dev = open_device(64 * MIB);
    unsetenv("MEGATRAIN_ATTENTION");
    char *x = memory_to_attend(dev);
    put_documents(dev, x, cu, 1);
    char *at = x + 4096, *d = at + 3 * TENSOR;
    struct mt_heads q = mt_heads(at, N_Q * HEAD, N_Q, HEAD), kv = mt_heads(at, HEAD, 1, HEAD);
    struct mt_attention a = {.n = LEN, .n_docs = 1, .max_len = LEN, .dtype = MT_BF16, .scale = 1,
                             .cu_seqlens = (const int32_t *)x, .cu_seqlens_host = cu, .q = q, .k = kv, .v = kv,
                             .o = mt_heads(at + TENSOR, N_Q * HEAD, N_Q, HEAD), .lse = (float *)(at + 2 * TENSOR),
                             .workspace = x + MIB};
    struct mt_attention_bwd b = {.fwd = a, .d_o = q, .dq = mt_heads(d, N_Q * HEAD, N_Q, HEAD),
                                 .dk = mt_heads(d + TENSOR, HEAD, 1, HEAD), .dv = mt_heads(d + 2 * TENSOR, HEAD, 1, HEAD)};
    size_t before = mt_emu_products();
    assert_int_equal(mt_op_attention(dev, &a, &err), 0);
    assert_int_equal(mt_emu_products() - before, 2);
    assert_int_equal(mt_op_attention_bwd(dev, &b, &err), 0);
    assert_int_equal(mt_emu_products() - before, 2 + 3 + 2 * N_Q);
}

static int attend_alone(mt_device *dev, char *x, int32_t len, size_t width, struct mt_err *err)
{
    enum { TENSOR = 256 << 10 };
    const int32_t cu[] = {0, len};
    put_documents(dev, x, cu, 1);
    struct mt_heads h = mt_heads(x + 4096, width, 1, 64);
    struct mt_attention a = {.n = (size_t)len, .n_docs = 1, .max_len = (size_t)len, .dtype = MT_BF16, .scale = 1,
                             .cu_seqlens = (const int32_t *)x, .cu_seqlens_host = cu, .q = h, .k = h, .v = h,
                             .o = mt_heads(x + 4096 + TENSOR, width, 1, 64), .lse = (float *)(x + 4096 + 2 * TENSOR),
                             .workspace = x + MIB};
    int rc = mt_op_attention(dev, &a, err);
    assert_int_equal(mt_device_sync(dev, NULL), 0);
    return rc;
}

/* Tiles have no room for what our own kernels take, beyond the length at which these are compared with them. */
TEST(documents_too_long_for_tiles_are_not_compared)
{
    struct mt_err err = {0};
    setenv("MT_EMU_CAPABILITY", "89", 1);
    MT_CLOSED_BY(mt_device_destroy) mt_device *dev = open_device(64 * MIB);
    unsetenv("MT_EMU_CAPABILITY");
    char *x = memory_to_attend(dev);
    struct mt_heads h = mt_heads(NULL, 64, 1, 64);
    size_t before = mt_emu_products();
    int32_t most = (int32_t)mt_cuda_tiled_len(&(struct mt_attention){.max_len = 1 << 20, .dtype = MT_BF16, .q = h, .k = h, .v = h});
    assert_in_range(most, 512, 1024); /* of the emulation's small tiles */
    assert_int_equal(attend_alone(dev, x, most + 1, 64, &err), 0);
    assert_int_equal(mt_emu_products(), before);
    assert_int_equal(attend_alone(dev, x, most, 64, &err), 0);
    assert_true(mt_emu_products() > before);
    assert_int_equal(attend_alone(dev, x, most + 1, 67, &err), -ENOTSUP); /* rows that they do not take */
    assert_non_null(strstr(err.msg, "MEGATRAIN_ATTENTION=tiled"));
}

/* Two documents with own kernels, forward and backward; the results and the log-sum-exps to `out`. */
enum { OWN_ROWS = 300, OWN_TENSOR = OWN_ROWS * 2 * 64 * 2, OWN_RESULTS = 5 * OWN_TENSOR };
static void attend_own(mt_device *dev, char *x, char *out)
{
    static const int32_t cu[] = {0, 100, OWN_ROWS};
    static uint16_t values[4 * OWN_TENSOR / 2];
    struct mt_heads h[8];
    for (size_t i = 0; i < MT_ARRAY_LEN(values); i++)
        values[i] = mt_f32_to_bf16((float)(i * 7919 % 509) / 509.0f - 0.4f);
    for (size_t i = 0, at = 4096; i < 8; i++, at += OWN_TENSOR) { /* q, d_o, k, v; o, dq, dk, dv */
        size_t n = i / 2 % 2 ? 1 : 2;
        h[i] = mt_heads(x + at, n * 64, n, 64);
    }
    put_documents(dev, x, cu, 2);
    must_copy(dev, MT_STREAM_COMPUTE, &(struct mt_copy){x + 4096, sizeof(values), values, sizeof(values), sizeof(values), 1});
    struct mt_attention a = {.n = OWN_ROWS, .n_docs = 2, .max_len = 200, .dtype = MT_BF16, .scale = 0.125f,
                             .cu_seqlens = (const int32_t *)x, .cu_seqlens_host = cu, .q = h[0], .k = h[2], .v = h[3],
                             .o = h[4], .lse = (float *)(x + 4096 + 8 * OWN_TENSOR), .workspace = x + MIB};
    struct mt_attention_bwd b = {.fwd = a, .d_o = h[1], .dq = h[5], .dk = h[6], .dv = h[7]};
    MUST(mt_op_zero, dev, &(struct mt_zero){h[4].p, OWN_RESULTS});
    MUST(mt_op_attention, dev, &a);
    MUST(mt_op_attention_bwd, dev, &b);
    must_copy(dev, MT_STREAM_COMPUTE, &(struct mt_copy){out, OWN_RESULTS, h[4].p, OWN_RESULTS, OWN_RESULTS, 1});
    must_sync(dev);
}

/* The driver ends a launch that takes seconds where a display is on the GPU. */
TEST(launches_are_short_where_a_display_is)
{
    static char out[2][OWN_RESULTS];
    size_t n[2];
    setenv("MEGATRAIN_ATTENTION", "own", 1);
    MT_CLOSED_BY(mt_device_destroy) mt_device *dev = open_device(64 * MIB);
    char *x = memory_to_attend(dev);
    for (int display = 0; display < 2; display++) {
        size_t before = mt_emu_launches();
        setenv("MT_EMU_DISPLAY", display ? "1" : "0", 1);
        attend_own(dev, x, out[display]);
        n[display] = mt_emu_launches() - before;
    }
    unsetenv("MT_EMU_DISPLAY");
    unsetenv("MEGATRAIN_ATTENTION");
    assert_int_equal(n[0], 7); /* three lists of tiles, as many passes, and delta */
    assert_int_equal(n[1], 7 + 2 + 2 + 1); /* three tiles of queries in as many launches, two of keys in one */
    assert_memory_equal(out[0], out[1], OWN_RESULTS);
}
