/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A tiny model trained with its planes in host memory and on disk: the same bits, even after an abandoned step; and if
 * any I/O fails, the step returns an error and nothing hangs.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <pthread.h>
#include <unistd.h>

#include "base/fs.h"
#include "base/mem.h"
#include "base/philox.h"
#include "engine/engine.h"
#include "kinds/kinds.h"
#include "made_batch.h"
#include "model/ranges.h"
#include "test.h"
#include "weights/weights.h"

enum { TOKENS = 24, MICRO = 2, STEPS = 3 };

static const char model_config[] =
    "{\"architectures\": [\"Qwen3ForCausalLM\"], \"hidden_size\": 32, \"intermediate_size\": 40,\n"
    " \"num_hidden_layers\": 4, \"num_attention_heads\": 2, \"num_key_value_heads\": 1, \"head_dim\": 16,\n"
    " \"vocab_size\": 96, \"tie_word_embeddings\": %s, \"torch_dtype\": \"float32\"}\n";

static char root[64];

static int set_up(void **)
{
    alarm(500); /* a hang is a failure */
    /* in memory: hundreds of small runs, while another test may keep a real drive busy */
    snprintf(root, sizeof(root), "/dev/shm/mt-tier-XXXXXX");
    return mkdtemp(root) ? 0 : -1;
}

static int tear_down(void **)
{
    return mt_remove_tree(root, NULL);
}

/* How a trainer is placed. */
struct placing {
    enum mt_dtype dtype;
    bool tied;
    enum mt_states states;
    enum mt_activations act;
    uint64_t host_bytes;
    size_t device_bytes; /* 0: the least that works */
    enum mt_io_kind io;
    const char *fault;
    bool without_sums;
    bool by_block; /* clipping */
    double grad_clip;
    enum mt_update_order update;
    int64_t pending, slots;
};

struct trainer {
    struct mt_layout *layout;
    mt_device *dev;
    struct mt_engine_params ep;
    struct mt_engine_plan plan;
    size_t device_bytes;
    mt_disk *disk;
    mt_plane_set *planes;
    mt_engine *engine;
    struct mt_batch micro[MICRO];
    struct mt_step_data data;
};

static void make_layout(struct trainer *t, bool tied)
{
    static struct mt_hf_config cfg;
    char dir[96], path[128], text[512];
    snprintf(dir, sizeof(dir), "%s/model-%d", root, tied);
    snprintf(path, sizeof(path), "%s/config.json", dir);
    snprintf(text, sizeof(text), model_config, tied ? "true" : "false");
    assert_int_equal(mt_mkdir_p(dir, NULL), 0);
    assert_int_equal(mt_write_file(path, text, strlen(text), NULL), 0);
    assert_int_equal(mt_hf_config_read(&cfg, dir, NULL), 0);
    struct mt_layout_params lp = {.decay_embeddings = true, .cut = mt_cut_layer};
    assert_int_equal(mt_layout_create(&t->layout, &cfg, &lp, NULL), 0);
}

static int make_plan(struct trainer *t, size_t device_bytes, struct mt_err *err)
{
    struct mt_device_params p = {.kind = "cpu", .n_threads = 2, .budget_bytes = device_bytes};
    assert_int_equal(mt_device_create(&t->dev, &p, NULL), 0);
    t->ep.dev = t->dev;
    int rc = mt_engine_plan(&t->plan, &t->ep, err);
    if (rc)
        mt_device_destroy(&t->dev);
    return rc;
}

/* The least device budget that fits, to 16 KiB. */
static size_t least_budget(struct trainer *t)
{
    size_t too_little = 64 << 10, enough = 4 << 20;
    while (enough - too_little > 16 << 10) {
        size_t mid = (too_little + enough) / 2;
        if (make_plan(t, mid, NULL)) {
            too_little = mid;
            continue;
        }
        enough = mid;
        mt_engine_plan_finish(&t->plan);
        mt_device_destroy(&t->dev);
    }
    return enough;
}

static void make_planes(struct trainer *t, const struct placing *p)
{
    struct mt_io_fault f;
    const char *dirs[] = {root};
    struct mt_plane_set_params pp;
    assert_int_equal(
        mt_layout_plane_params(&pp, t->layout, t->ep.numerics.optimizer, p->dtype, NULL), 0);
    mt_engine_plan_trim(&t->plan, &pp);
    pp.on_disk = t->plan.on_disk;
    pp.window_bytes = 8192;
    pp.sums = t->ep.placement.nvme_checksums;
    pp.piece_elems = t->plan.program.piece_elems;
    if (t->plan.uses_disk) {
        struct mt_disk_params dp = {.dirs = dirs, .n_dirs = 1, .io = p->io, .request_bytes = 8192,
                                    .bytes = mt_plane_set_disk_bytes(&pp) + t->plan.disk_spill_bytes};
        if (p->fault) {
            assert_int_equal(mt_io_fault_parse(&f, p->fault, NULL), 0);
            dp.fault = &f;
        }
        MUST(mt_disk_open, &t->disk, &dp);
    }
    pp.disk = t->ep.disk = t->disk;
    t->ep.disk_spill_at = mt_plane_set_disk_bytes(&pp);
    assert_int_equal(mt_plane_set_create(&t->planes, &pp, NULL), 0);
    free(pp.elems);
    t->ep.planes = t->planes;
}

static void make_data(struct trainer *t)
{
    for (size_t m = 0; m < MICRO; m++) {
        uint32_t ids[TOKENS];
        for (size_t i = 0; i < TOKENS; i++)
            ids[i] = (uint32_t)(mt_philox_uniform(4, m, i) * 96);
        made_batch(&t->data, &t->micro[m], TOKENS, ids, TOKENS, 10);
    }
    t->data.micro = t->micro;
    t->data.cap = t->data.n = MICRO;
}

/* Returns the error if weights cannot be written to a faulty disk. */
static int begin(struct trainer *t, const struct placing *p, struct mt_err *err)
{
    *t = (struct trainer){0};
    make_layout(t, p->tied);
    t->ep = (struct mt_engine_params){.layout = t->layout,
                                      .numerics.dtype = p->dtype,
                                      .numerics.grad_dtype = p->dtype,
                                      .max_tokens = TOKENS,
                                      .max_docs = 2,
                                      .max_len = TOKENS,
                                      .max_micro = MICRO,
                                      .numerics.logits_chunk = 64,
                                      .train = true,
                                      .placement.slots = p->slots ? p->slots : 2,
                                      .placement.activations = p->act,
                                      .placement.poison = true,
                                      .numerics.optimizer = &mt_adamw,
                                      .numerics.optimizer_keys = {0.9, 0.99, 1e-8},
                                      .numerics.weight_decay = 0.1,
                                      .numerics.grad_clip = p->by_block ? p->grad_clip : 0.5,
                                      .numerics.clip = p->by_block ? MT_CLIP_UNIT : MT_CLIP_GLOBAL,
                                      .placement.update = p->update,
                                      .placement.update_pending = p->pending,
                                      .placement.threads = 2,
                                      .placement.states = p->states,
                                      .may_use_disk =
                                          p->states != MT_STATES_HOST || p->act == MT_ACT_DISK,
                                      .host_bytes = p->host_bytes,
                                      .placement.piece_elems = MT_PIECE_ALIGN,
                                      .placement.nvme_checksums = !p->without_sums};
    t->device_bytes = p->device_bytes ? p->device_bytes : least_budget(t);
    if (make_plan(t, t->device_bytes, err))
        fail_msg("%s", err->msg);
    make_planes(t, p);
    make_data(t);
    int rc = mt_weights_init_random(t->layout, t->planes, 1, 1, err);
    return rc ? rc : mt_engine_create(&t->engine, &t->ep, err);
}

static void end(struct trainer *t)
{
    mt_engine_destroy(&t->engine);
    mt_plane_set_destroy(&t->planes);
    mt_disk_close(&t->disk);
    mt_engine_plan_finish(&t->plan);
    mt_device_destroy(&t->dev);
    mt_layout_destroy(&t->layout);
    for (size_t m = 0; m < MICRO; m++)
        mt_batch_finish(&t->micro[m]);
}

/* All of hi, lo, m and v, read wherever they are. */
static int read_all(struct trainer *t, char **out, size_t *bytes, struct mt_err *err)
{
    size_t at = 0, cap = 0;
    char *all = NULL;
    int rc = 0;
    for (size_t u = 0; u < t->layout->n_units; u++)
        for (int k = 0; k < MT_N_PLANES; k++) {
            const struct mt_plane_desc *d = mt_plane_desc_of(t->planes, (enum mt_plane_kind)k);
            size_t n = mt_plane_elems(t->planes, u, (enum mt_plane_kind)k), size = d->block_bytes;
            if (!n || d->role == MT_ROLE_GRADIENT)
                continue;
            assert_true(mt_grow(&all, &cap, at + n * size, 1));
            if (!rc)
                rc = mt_planes_read(t->planes, u, (enum mt_plane_kind)k, 0, n, all + at, err);
            at += n * size;
        }
    *bytes = at;
    *out = all;
    return rc;
}

static char *snapshot(struct trainer *t, size_t *bytes)
{
    char *all = NULL;
    MUST(read_all, t, &all, bytes);
    return all;
}

struct outcome {
    double loss[STEPS], norm[STEPS];
    char *planes;
    size_t bytes;
};

static void train(struct outcome *o, const struct placing *p, struct mt_disk_traffic *last)
{
    struct trainer t;
    struct mt_err err = {0};
    struct mt_step_result r;
    MUST(begin, &t, p);
    for (int i = 0; i < STEPS; i++) {
        if (mt_engine_step(t.engine, &(struct mt_learner_step){&t.data, 1e-2}, &r, &err))
            fail_msg("step %d: %s", i, err.msg);
        o->loss[i] = r.loss;
        o->norm[i] = r.grad_norm;
    }
    if (last)
        *last = r.traffic;
    assert_memory_equal(r.traffic.written, t.plan.traffic.written, sizeof(r.traffic.written));
    if (mt_engine_flush(t.engine, &err))
        fail_msg("flush: %s", err.msg);
    o->planes = snapshot(&t, &o->bytes);
    end(&t);
}

static void check_same(const struct outcome *a, const struct outcome *b)
{
    for (int i = 0; i < STEPS; i++)
        assert_true(a->loss[i] == b->loss[i] && a->norm[i] == b->norm[i]);
    assert_int_equal(a->bytes, b->bytes);
    assert_memory_equal(a->planes, b->planes, a->bytes);
}

static const struct placing in_host = {.states = MT_STATES_HOST, .act = MT_ACT_KEEP,
                                       .host_bytes = UINT64_MAX, .device_bytes = 8 << 20};

TEST(every_placement_gives_the_same_bits)
{
    for (int v = 0; v < 4; v++) {
        struct placing base = in_host;
        struct outcome want, got;
        base.dtype = v & 1 ? MT_BF16 : MT_F32;
        base.tied = v >> 1;
        train(&want, &base, NULL);
        for (int w = 0; w < 6; w++) {
            struct placing p = base;
            struct mt_disk_traffic traffic;
            p.states = w == 3 ? MT_STATES_AUTO : w == 4 ? MT_STATES_HOST : MT_STATES_DISK;
            p.host_bytes = w == 3 ? 700 << 10 : w ? 0 : UINT64_MAX;
            p.act = w == 2 ? MT_ACT_RECOMPUTE : w >= 4 ? MT_ACT_DISK : MT_ACT_KEEP;
            p.device_bytes = w < 4 ? 8 << 20 : 0;
            p.io = w == 1 ? MT_IO_THREADS : MT_IO_AUTO;
            train(&got, &p, &traffic);
            check_same(&want, &got);
            assert_true((traffic.written[MT_DISK_STATES] > 0) == (w != 4));
            assert_true((traffic.written[MT_DISK_ACTIVATIONS] > 0) == (w >= 4));
            free(got.planes);
        }
        free(want.planes);
    }
}

/* The order of updates is placement: on every tier, in pieces, with few slots and many. */
TEST(updates_under_backward_have_the_bits_of_forward)
{
    for (int v = 0; v < 4; v++) {
        struct placing base = in_host;
        struct outcome want, got;
        base.dtype = v & 1 ? MT_BF16 : MT_F32;
        base.tied = v >> 1;
        base.by_block = true;
        base.grad_clip = v == 0 || v == 3 ? 0.05 : 0;
        train(&want, &base, NULL);
        for (int w = 0; w < 8; w++) {
            struct placing p = base;
            struct mt_disk_traffic traffic;
            p.update = MT_UPDATE_BACKWARD;
            p.pending = w % 4;
            p.slots = w & 1 ? 4 : 2;
            p.states = w < 2 ? MT_STATES_HOST : w == 2 ? MT_STATES_AUTO : MT_STATES_DISK;
            p.host_bytes = w < 2 ? UINT64_MAX : w == 2 ? 600 << 10 : w < 5 ? 0 : UINT64_MAX;
            p.act = w == 1 || w == 4 ? MT_ACT_RECOMPUTE : w >= 6 ? MT_ACT_DISK : MT_ACT_KEEP;
            p.device_bytes = w < 6 ? 8 << 20 : 0;
            train(&got, &p, &traffic);
            check_same(&want, &got);
            assert_int_equal(traffic.written[MT_DISK_GRADIENTS], 0);
            assert_int_equal(traffic.written[MT_DISK_STATES] > 0, w > 1);
            free(got.planes);
        }
        free(want.planes);
    }
}

static void *interrupt_soon(void *arg)
{
    struct trainer *t = arg;
    usleep((useconds_t)(mt_philox_uniform(9, (uint64_t)(uintptr_t)t->engine, 0) * 4000));
    mt_engine_interrupt(t->engine);
    return NULL;
}

/* After an abandoned step the planes are those of the last applied update, on the disk too. */
TEST(an_abandoned_step_completes_the_pending_update)
{
    struct placing on_disk = in_host;
    struct trainer a, b;
    struct mt_err err = {0};
    struct mt_step_result r;
    int abandoned = 0;
    on_disk.dtype = MT_BF16;
    on_disk.states = MT_STATES_DISK;
    on_disk.host_bytes = 0;
    struct placing host = in_host;
    host.dtype = MT_BF16;
    host.by_block = on_disk.by_block = true;
    for (int i = 0; i < 24; i++) {
        on_disk.update = i < 12
                             ? MT_UPDATE_FORWARD
                             : MT_UPDATE_BACKWARD; /* then a step that has begun to update ends */
        on_disk.fault =
            i % 2 ? "read:delay:1:0" : NULL; /* reads that end late, for copies that never begin */
        assert_int_equal(begin(&a, &host, &err), 0);
        assert_int_equal(begin(&b, &on_disk, &err), 0);
        for (int k = 0; k < 2; k++) {
            assert_int_equal(mt_engine_step(a.engine, &(struct mt_learner_step){&a.data, 1e-2}, &r, &err), 0);
            assert_int_equal(mt_engine_step(b.engine, &(struct mt_learner_step){&b.data, 1e-2}, &r, &err), 0);
        }
        pthread_t thread;
        if (i % 3)
            assert_int_equal(pthread_create(&thread, NULL, interrupt_soon, &b), 0);
        else
            mt_engine_interrupt(b.engine); /* before its first instruction */
        int rc = mt_engine_step(b.engine, &(struct mt_learner_step){&b.data, 1e-2}, &r, &err);
        if (i % 3)
            pthread_join(thread, NULL);
        mt_engine_clear_interrupt(b.engine);
        assert_true(rc == 0 || rc == -ECANCELED);
        assert_true(mt_engine_whole(b.engine));
        abandoned += rc != 0;
        if (!rc)
            assert_int_equal(mt_engine_step(a.engine, &(struct mt_learner_step){&a.data, 1e-2}, &r, &err), 0);
        assert_int_equal(mt_engine_flush(a.engine, &err), 0);
        assert_int_equal(mt_engine_flush(b.engine, &err), 0);
        assert_int_equal(mt_engine_updates(a.engine, 0), mt_engine_updates(b.engine, 0));
        size_t n, m;
        char *x = snapshot(&a, &n), *y = snapshot(&b, &m);
        assert_int_equal(n, m);
        assert_memory_equal(x, y, n);
        free(x);
        free(y);
        /* and training continues from there */
        assert_int_equal(mt_engine_step(b.engine, &(struct mt_learner_step){&b.data, 1e-2}, &r, &err), 0);
        end(&a);
        end(&b);
    }
    assert_true(abandoned >= 8);
}

/* Breaks the nth transfer of a run of two steps and a flush; the error, or 0 where it has fewer. */
static int run_broken(const char *fault, bool interrupted)
{
    static size_t least; /* searched for once */
    struct placing p = {.dtype = MT_BF16, .states = MT_STATES_DISK, .act = MT_ACT_DISK,
                        .device_bytes = least, .fault = fault};
    struct trainer t;
    struct mt_err err = {0};
    struct mt_step_result r;
    int rc = begin(&t, &p, &err);
    least = t.device_bytes;
    for (int i = 0; i < 2 && !rc; i++)
        rc = mt_engine_step(t.engine, &(struct mt_learner_step){&t.data, 1e-2}, &r, &err);
    if (interrupted && !rc) {
        mt_engine_interrupt(t.engine);
        rc = mt_engine_step(t.engine, &(struct mt_learner_step){&t.data, 1e-2}, &r, &err);
        rc = rc == -ECANCELED ? 0 : rc;
    } else if (!rc) {
        rc = mt_engine_flush(t.engine, &err);
    }
    if (rc) {
        assert_non_null(strstr(err.msg, "megatrain-scratch"));
        assert_int_equal(rc, err.code);
    }
    end(&t);
    return rc;
}

TEST(any_transfer_that_goes_on_failing_ends_the_step_with_its_error)
{
#ifdef __SANITIZE_THREAD__
    int step = 97; /* threads are expensive there, and a trainer has a dozen */
#else
    const char *full = getenv("MEGATRAIN_TEST_FULL");
    int step = full && *full ? 1 : 29;
#endif
    for (int write = 0; write < 2; write++)
        for (int kind = 0; kind < 2; kind++) {
            int failed = 0, apart = kind ? step : MT_MIN(5 * step, 145); /* errors that are tried again take a second */
            for (int n = 1 + write * 3 + kind;; n += apart) {
                char fault[64];
                snprintf(fault, sizeof(fault), "%s:%s:%d:%d", write ? "write" : "read", kind ? "enospc" : "eio", n,
                         kind); /* eio stays */
                int rc = run_broken(fault, (n / apart) & 1);
                if (!rc)
                    break;
                assert_int_equal(rc, kind ? -ENOSPC : -EIO);
                failed++;
            }
            assert_true(failed > 1);
        }
}

/* A run on a drive that reports success and moves wrong data: the error it ends with, or what it computed. */
static int run_deceived(struct placing *p, struct outcome *o, uint64_t *written, struct mt_err *err)
{
    struct trainer t;
    struct mt_step_result r;
    struct mt_disk_stats stats;
    *o = (struct outcome){{0}};
    int rc = begin(&t, p, err);
    p->device_bytes = t.device_bytes; /* searched for once */
    for (int i = 0; i < STEPS && !rc; i++) {
        rc = mt_engine_step(t.engine, &(struct mt_learner_step){&t.data, 1e-2}, &r, err);
        o->loss[i] = r.loss;
        o->norm[i] = r.grad_norm;
    }
    if (!rc)
        rc = mt_engine_flush(t.engine, err);
    if (!rc)
        rc = read_all(&t, &o->planes, &o->bytes, err);
    mt_disk_stats(t.disk, &stats);
    *written = stats.bytes[1];
    end(&t);
    return rc;
}

static bool same(const struct outcome *a, const struct outcome *b)
{
    return a->bytes == b->bytes && !memcmp(a->loss, b->loss, sizeof(a->loss)) &&
           !memcmp(a->norm, b->norm, sizeof(a->norm)) && !memcmp(a->planes, b->planes, a->bytes);
}

/* Of `n` seeded runs: how many gave the right bits, were stopped, and gave other bits. */
static void deceive(int n, bool sums, int *right, int *stopped, int *wrong)
{
    static const char *const kinds[] = {"flip", "stale", "swap", "drop"}, *const dirs[] = {"any", "read", "write"};
    struct placing p = {.dtype = MT_BF16, .states = MT_STATES_DISK, .act = MT_ACT_DISK, .without_sums = !sums};
    struct outcome want, got;
    struct mt_err err = {0};
    uint64_t written, unused;
    assert_int_equal(run_deceived(&p, &want, &written, &err), 0);
    *right = *stopped = *wrong = 0;
    for (int i = 0; i < n; i++) {
        char fault[64];
        struct mt_philox x = mt_philox(77, 1, (uint64_t)i);
        unsigned long long nth = 1 + x.v[1] % (2 * written / 8192), count = 1 + x.v[2] % 3;
        snprintf(fault, sizeof(fault), "%s:%s:%llu:%llu", dirs[x.v[3] % 3], kinds[x.v[0] % 4], nth, count);
        p.fault = fault;
        int rc = run_deceived(&p, &got, &unused, &err);
        if (rc && sums && (rc != -EBADMSG || !strstr(err.msg, "not what was written") || !strstr(err.msg, "megatrain-scratch")))
            fail_msg("%s: %s", fault, err.msg);
        bool is_same = !rc && same(&want, &got);
        if (!rc && !is_same && sums)
            fail_msg("%s: other bits, and no error", fault);
        *(rc ? stopped : is_same ? right : wrong) += 1;
        free(got.planes);
    }
    free(want.planes);
}

TEST(what_a_drive_changes_in_silence_stops_the_run_or_changes_nothing)
{
    const char *full = getenv("MEGATRAIN_TEST_FULL");
    int right, stopped, wrong, n = full && *full ? 1000 : 40;
#ifdef __SANITIZE_THREAD__
    n /= 10;
#endif
    deceive(n, true, &right, &stopped, &wrong);
    print_message("%d runs: %d with the right bits, %d stopped, %d with others\n", n, right, stopped, wrong);
    assert_true(stopped > 0 && right > 0 && !wrong);
    deceive(n, false, &right, &stopped, &wrong);
    print_message("without sums: %d right, %d stopped, %d with others\n", right, stopped, wrong);
    assert_true(wrong > 0); /* without sums these faults give wrong bits */
}

TEST_GROUP(set_up, tear_down)
