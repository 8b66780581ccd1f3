/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A device that fails: for every N, the Nth submission of two whole training steps. The step must return the
 * error, nothing may hang or leak, and the planes must be those of some whole number of updates.
 */
#include <unistd.h>

#include <xxhash.h>

#include "../checkpoint/made_model.h"
#include "base/mem.h"
#include "device_fault.h"
#include "engine/engine.h"
#include "kinds/kinds.h"
#include "made_batch.h"
#include "test.h"

enum { TOKENS = 12, MICRO = 2, BUDGET = 512 << 10 };

static struct made_model model; /* made once: its planes are filled anew for each run */

struct rig {
    struct mt_step_data data;
    mt_device *dev, *other; /* of the second lane, or NULL */
    mt_engine *engine;
};

static int lanes = 1, failing_lane; /* for rigs opened later */

/* `stride` decides which tokens there are; micro: [MICRO], whose memory close_rig() or the caller frees. */
static void make_data(struct mt_step_data *sd, struct mt_batch *micro, uint32_t stride)
{
    uint32_t ids[TOKENS];
    *sd = (struct mt_step_data){.micro = micro, .cap = MICRO, .n = MICRO};
    for (int m = 0; m < MICRO; m++) {
        for (uint32_t i = 0; i < TOKENS; i++)
            ids[i] = (i * stride + (uint32_t)m * 3) % 40;
        made_batch(sd, &micro[m], TOKENS, ids, TOKENS, 5);
    }
}

/* What fails, if it is to be on that lane; an event of a device with faults is none for one without them. */
static mt_device *open_lane(int lane, const char *what, int64_t nth)
{
    struct mt_device_params p = {.kind = "cpu", .budget_bytes = BUDGET, .n_threads = 1};
    mt_device *cpu = NULL, *dev = NULL;
    assert_int_equal(mt_device_create(&cpu, &p, NULL), 0);
    if (!what)
        return cpu;
    assert_int_equal(mt_device_create_fault(&dev, cpu, what, lane == failing_lane ? nth : INT64_MAX, NULL), 0);
    return dev;
}

/* Opens everything but the engine; `what` NULL: devices without faults. */
static void open_rig(struct rig *r, const char *what, int64_t nth)
{
    static struct mt_batch micro[MICRO];
    *r = (struct rig){0};
    made_fill(&model, 5);
    for (size_t u = 0; u < model.layout->n_units; u++) /* moments like those of a fresh run */
        for (int k = 0; k < mt_adamw.n_states; k++)
            memset(mt_plane(model.planes, u, MT_PLANE_STATE + k), 0,
                   mt_plane_elems(model.planes, u, MT_PLANE_STATE) * 4);
    make_data(&r->data, micro, 7);
    r->dev = open_lane(0, what, nth);
    r->other = lanes > 1 ? open_lane(1, what, nth) : NULL;
}

static enum mt_pin pin; /* for engines made later */
static enum mt_embedding_place embedding;
static enum mt_update_order order; /* backward: clipping by blocks, too */
static int n_lost; /* runs whose state was lost */

static int create_engine(struct rig *r, struct mt_err *err)
{
    struct mt_engine_params p = {
        .dev = r->dev, .other_dev = &r->other, .placement.lanes = lanes, .layout = model.layout, .planes = model.planes, .numerics.dtype = MT_BF16,
        .numerics.grad_dtype = MT_BF16, .max_tokens = TOKENS, .max_docs = 2, .max_len = TOKENS, .max_micro = MICRO,
        .numerics.logits_chunk = 64, .train = true, .placement.slots = 2, .placement.activations = MT_ACT_OFFLOAD,
        .numerics.optimizer = &mt_adamw, .numerics.optimizer_keys = {0.9, 0.999, 1e-8}, .numerics.weight_decay = 0.1, .numerics.grad_clip = order ? 0 : 1, .placement.update = order, .isa = MT_ISA_SCALAR,
        .placement.threads = 1, .placement.pin = pin, .placement.embedding = embedding, .placement.update_pending = 1};
    return mt_engine_create(&r->engine, &p, err);
}

static void close_rig(struct rig *r)
{
    mt_engine_destroy(&r->engine);
    assert_int_equal(mt_device_bytes_used(r->dev), 0);
    assert_true(!r->other || !mt_device_bytes_used(r->other));
    mt_device_destroy(&r->dev);
    mt_device_destroy(&r->other);
    for (size_t i = 0; i < r->data.cap; i++)
        mt_batch_finish(&r->data.micro[i]);
}

static int set_up(void **)
{
    return made_model_init(&model);
}

static int tear_down(void **)
{
    made_model_finish(&model);
    return 0;
}

static uint64_t state_hash(void)
{
    uint64_t h = 0;
    for (size_t u = 0; u < model.layout->n_units; u++)
        for (int k = 0; k < MT_N_PLANES; k++) {
            const struct mt_plane_desc *d = mt_plane_desc_of(model.planes, (enum mt_plane_kind)k);
            size_t bytes = mt_plane_desc_bytes(d, mt_plane_elems(model.planes, u, k));
            if (bytes && d->role != MT_ROLE_GRADIENT)
                h = XXH3_64bits_withSeed(mt_plane(model.planes, u, k), bytes, h);
        }
    return h;
}

static int step(struct rig *r, struct mt_err *err)
{
    struct mt_step_result res;
    int rc = mt_engine_step(r->engine, &(struct mt_learner_step){&r->data, 1e-2}, &res, err);
    assert_true(rc || (!res.skipped && res.loss == res.loss));
    return rc;
}

/* The states after 0, 1 and 2 updates. */
static void make_reference(uint64_t want[3])
{
    struct rig r;
    open_rig(&r, NULL, 0);
    assert_int_equal(create_engine(&r, NULL), 0);
    want[0] = state_hash();
    for (int i = 1; i < 3; i++) {
        assert_int_equal(step(&r, NULL), 0);
        assert_int_equal(mt_engine_flush(r.engine, NULL), 0);
        assert_int_equal(mt_engine_updates(r.engine, 0), i);
        want[i] = state_hash();
    }
    assert_true(want[0] != want[1] && want[1] != want[2]);
    close_rig(&r);
}

/* Two steps with the Nth submission failing; false if there are fewer, and then the steps must succeed. */
static bool run_with_fault(const char *what, int64_t nth, const uint64_t want[3])
{
    struct rig r;
    struct mt_err err = {0};
    open_rig(&r, what, nth);
    int rc = create_engine(&r, &err);
    for (int i = 0; i < 2 && !rc; i++)
        rc = step(&r, &err);
    if (rc) {
        assert_int_equal(rc, -EIO);
        assert_int_equal(err.code, -EIO);
        assert_int_equal(err.kind, MT_ERR_DEVICE);
        if (!strstr(err.msg, "fault device"))
            fail_msg("%s %lld: the message is \"%s\"", what, (long long)nth, err.msg);
    }
    if (r.engine && !mt_engine_whole(r.engine)) {
        assert_true(rc && order == MT_UPDATE_BACKWARD);
        n_lost++;
    } else if (r.engine) {
        /* the update that was pending in the failed step is made exactly once */
        assert_int_equal(mt_engine_flush(r.engine, &err), 0);
        uint64_t n = mt_engine_updates(r.engine, 0);
        assert_true(n <= 2 && (rc || n == 2));
        if (state_hash() != want[n])
            fail_msg("%s %lld: the planes are not those of %d updates", what, (long long)nth, (int)n);
    }
    close_rig(&r);
    return rc != 0;
}

/* Every reference has the embedding on the device: where its rows are taken from changes no bit. */
static void sweep(const char *what, enum mt_embedding_place home)
{
    uint64_t want[3];
    int64_t n = 1;
    make_reference(want);
    embedding = home;
    while (run_with_fault(what, n, want))
        n++;
    embedding = MT_EMBEDDING_DEVICE;
    print_message("%s: each of %d failed in its turn\n", what, (int)n - 1);
    assert_true(n > 1);
}

TEST(a_step_survives_any_submission_that_is_refused)
{
    sweep("any", MT_EMBEDDING_DEVICE);
    sweep("any", MT_EMBEDDING_HOST);
}

TEST(a_step_survives_work_that_fails_later)
{
    static const char *const what[] = {"async gemm", "async copy", "async attention_bwd", "async grad_cast",
                                       "async cross_entropy", "async record", "async wait"};
    for (size_t i = 0; i < MT_ARRAY_LEN(what); i++)
        sweep(what[i], MT_EMBEDDING_DEVICE);
    sweep("async copy", MT_EMBEDDING_HOST);
}

/* The reference is one lane's. */
TEST(a_step_survives_faults_of_either_lane)
{
    static const char *const what[] = {"any", "async gemm", "async copy", "async record", "async wait"};
    size_t n_what = MT_ARRAY_LEN(what);
#ifdef __SANITIZE_THREAD__
    n_what = 1; /* work that is dropped later no longer orders the other lane's, which is of a step that is lost */
#endif
    for (size_t i = 0; i < 2 * n_what; i++) {
        uint64_t want[3];
        int64_t n = 1;
        make_reference(want);
        lanes = 2;
        failing_lane = (int)i % 2;
        while (run_with_fault(what[i / 2], n, want))
            n++;
        print_message("%s: each of %d failed in its turn on lane %d\n", what[i / 2], (int)n - 1, failing_lane);
        assert_true(n > 1);
        lanes = 1;
        failing_lane = 0;
    }
}

/* Under backward a failure after the first of the step's own updates loses the state, and says so; before, it does not. */
TEST(a_fault_after_an_update_of_the_step_loses_the_state)
{
    static const char *const what[] = {"any", "async gemm", "async copy", "async record"};
    int kept = 0; /* how many are lost depends on how far the host's threads are when a failure is noticed */
    for (size_t i = 0; i < MT_ARRAY_LEN(what); i++) {
        uint64_t want[3];
        int64_t n = 1;
        order = MT_UPDATE_FORWARD;
        make_reference(want);
        order = MT_UPDATE_BACKWARD;
        for (n_lost = 0; run_with_fault(what[i], n, want);)
            n++;
        print_message("%s: of %d that failed in their turn %d lost the state\n", what[i], (int)n - 1, n_lost);
        kept += (int)n - 1 - n_lost;
    }
    assert_true(kept > 0); /* with the right planes, as run_with_fault() has seen */
    order = MT_UPDATE_AUTO;
}

TEST(an_engine_half_made_is_taken_down)
{
    static const char *const what[] = {"alloc", "register"};
    for (size_t k = 0; k < MT_ARRAY_LEN(what); k++)
        for (int64_t n = 1;; n++) {
            struct rig r;
            struct mt_err err = {0};
            open_rig(&r, what[k], n);
            int rc = create_engine(&r, &err);
            assert_true(!rc == (r.engine != NULL));
            close_rig(&r);
            if (!rc) {
                assert_true(n > 2);
                break;
            }
            assert_int_equal(rc, -ENOMEM);
            assert_int_equal(err.kind, MT_ERR_NO_FIT);
        }
}

/* Ranges of host memory that an engine has the device lock. */
static int n_locked(enum mt_pin how)
{
    pin = how;
    for (int nth = 1;; nth++) {
        struct rig r;
        open_rig(&r, "register", nth);
        int rc = create_engine(&r, NULL);
        close_rig(&r);
        if (!rc) {
            pin = MT_PIN_AUTO;
            return nth - 1;
        }
    }
}

TEST(planes_and_spill_are_locked_where_they_are_to_be)
{
    assert_int_equal(n_locked(MT_PIN_AUTO), n_locked(MT_PIN_ALL));
    /* bf16: hi and gradients; and what is offloaded */
    assert_int_equal(n_locked(MT_PIN_STAGING), n_locked(MT_PIN_ALL) - 3);
}

TEST(a_step_without_events_fails_and_the_next_one_works)
{
    uint64_t want[3];
    make_reference(want);
    for (int64_t n = 1;; n++) {
        struct rig r;
        struct mt_err err = {0};
        open_rig(&r, "event", n);
        assert_int_equal(create_engine(&r, &err), 0);
        int rc = step(&r, &err);
        if (rc) {
            assert_int_equal(rc, -ENOMEM);
            assert_int_equal(step(&r, &err), 0);
        }
        assert_int_equal(mt_engine_flush(r.engine, &err), 0);
        assert_true(state_hash() == want[1]);
        close_rig(&r);
        if (!rc) {
            assert_true(n > 20);
            break;
        }
    }
}

/* A skipped step between two others, each with tokens of its own. Returns a hash of the final state. */
static uint64_t run_with_skip(enum mt_embedding_place home)
{
    struct rig r;
    struct mt_batch micro[MICRO];
    struct mt_step_data other;
    struct mt_step_result res;
    uint16_t *hi = mt_plane(model.planes, 2, MT_PLANE_HI), old;
    open_rig(&r, NULL, 0);
    make_data(&other, micro, 4); /* 20 tokens at most */
    embedding = home;
    assert_int_equal(create_engine(&r, NULL), 0);
    embedding = MT_EMBEDDING_DEVICE;
    assert_int_equal(step(&r, NULL), 0);
    assert_int_equal(mt_engine_flush(r.engine, NULL), 0);
    old = hi[3];
    hi[3] = 0x7fc0; /* NaN */
    assert_int_equal(mt_engine_step(r.engine, &(struct mt_learner_step){&r.data, 1e-2}, &res, NULL), 0);
    assert_true(res.skipped);
    hi[3] = old;
    assert_int_equal(mt_engine_step(r.engine, &(struct mt_learner_step){&other, 1e-2}, &res, NULL), 0);
    assert_false(res.skipped);
    assert_int_equal(step(&r, NULL), 0);
    assert_int_equal(mt_engine_flush(r.engine, NULL), 0);
    uint64_t hash = state_hash();
    for (size_t i = 0; i < MICRO; i++)
        mt_batch_finish(&micro[i]);
    close_rig(&r);
    return hash;
}

/* Rows of the embedding's gradient that a step left behind are in no later gradient. */
TEST(the_gradient_of_a_skipped_step_is_in_no_update)
{
    assert_true(run_with_skip(MT_EMBEDDING_HOST) == run_with_skip(MT_EMBEDDING_DEVICE));
}

/* A bit of any trained plane, at any place: the next update finds it, or the look before a save; nothing later is false. */
TEST(a_bit_that_changes_in_memory_is_found)
{
    enum { FLIPS = 58 };
    pin = MT_PIN_AUTO;
    embedding = MT_EMBEDDING_AUTO;
    for (uint64_t i = 0; i < FLIPS; i++) {
        static const enum mt_plane_kind kinds[] = {MT_PLANE_HI, MT_PLANE_LO, MT_PLANE_STATE, MT_PLANE_STATE + 1};
        enum mt_plane_kind k = kinds[i % MT_ARRAY_LEN(kinds)];
        struct mt_guard_params p = {.planes = model.planes, .n_units = model.layout->n_units, .trained = true, .n_threads = 1};
        struct rig r;
        struct mt_err err = {0};
        mt_guard *guard = NULL;
        size_t u = (size_t)(i * 7 % model.layout->n_units);
        open_rig(&r, NULL, 0);
        assert_int_equal(create_engine(&r, NULL), 0);
        assert_int_equal(mt_guard_create(&guard, &p, NULL), 0);
        mt_engine_set_guard(r.engine, guard);
        for (int n = 0; n < 2; n++)
            assert_int_equal(step(&r, NULL), 0);
        assert_int_equal(mt_guard_check_trained(guard, NULL), 0);
        const struct mt_plane_desc *d = mt_plane_desc_of(model.planes, k);
        size_t bytes = mt_plane_desc_bytes(d, mt_plane_elems(model.planes, u, k));
        ((char *)mt_plane(model.planes, u, k))[i * 1000003 % bytes] ^= (char)(1 << i % 8);
        int rc = i & 1 ? mt_guard_check_trained(guard, &err) : step(&r, &err);
        if (rc != -EBADMSG || !strstr(err.msg, "changed"))
            fail_msg("flip %d of plane %d of unit %zu: %d, %s", (int)i, (int)k, u, rc, err.msg);
        assert_true(i & 1 || !mt_engine_whole(r.engine));
        close_rig(&r);
        mt_guard_destroy(&guard);
    }
}

TEST_GROUP(set_up, tear_down)

int main(void)
{
    alarm(500); /* a hang is a failure */
    return test_run();
}
