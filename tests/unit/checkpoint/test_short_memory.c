/* SPDX-License-Identifier: Apache-2.0 */
/* Each allocation of a save fails in turn: it says so, or what it sealed is whole, to the last field. */

#include "base/json.h"
#include "checkpoint/checkpoint.h"
#include "made_model.h"
#include "test.h"

/* The linker sends the libraries' allocations here (--wrap). */
void *__real_malloc(size_t n);
void *__real_calloc(size_t n, size_t size);
void *__real_realloc(void *p, size_t n);
char *__real_strdup(const char *s);
void *__wrap_malloc(size_t n);
void *__wrap_calloc(size_t n, size_t size);
void *__wrap_realloc(void *p, size_t n);
char *__wrap_strdup(const char *s);

static long count, fail_from, fail_to; /* allocations [from, to) fail; 0: none */

static bool fails(void)
{
    count++;
    return count >= fail_from && count < fail_to;
}

void *__wrap_malloc(size_t n)
{
    return fails() ? NULL : __real_malloc(n);
}

void *__wrap_calloc(size_t n, size_t size)
{
    return fails() ? NULL : __real_calloc(n, size);
}

void *__wrap_realloc(void *p, size_t n)
{
    return fails() ? NULL : __real_realloc(p, n);
}

char *__wrap_strdup(const char *s)
{
    return fails() ? NULL : __real_strdup(s);
}

static int no_sync(void *ctx, int fd)
{
    (void)ctx;
    (void)fd;
    return 0;
}

static int no_sync_dir(void *ctx, const char *path)
{
    (void)ctx;
    (void)path;
    return 0;
}

static void fill_state(struct mt_train_state *st)
{
    *st = (struct mt_train_state){.step = 4, .updates = 4, .data_hash = 77, .best_loss = 1.5, .best_step = 2};
    st->config = strdup("[train]\nsteps = 4\n");
    for (int i = 0; i < 3; i++) {
        cJSON *o = cJSON_CreateObject();
        cJSON_AddNumberToObject(o, "step", i);
        mt_log_rows_add(&st->log, o);
        cJSON_Delete(o);
    }
    assert_int_equal(mt_lineage_begin(&st->lineage, NULL), 0);
}

static void expect_whole(const char *path)
{
    struct mt_train_state st;
    assert_int_equal(mt_checkpoint_verify(path, NULL), 0);
    assert_int_equal(mt_checkpoint_read_state(path, &st, NULL), 0);
    assert_true(st.step == 4 && st.data_hash == 77 && st.best_step == 2 && st.best_loss == 1.5);
    assert_string_equal(st.config, "[train]\nsteps = 4\n");
    assert_int_equal(st.log.n, 3);
    assert_int_equal(strlen(st.lineage.run), MT_RUN_ID - 1);
    mt_train_state_finish(&st);
}

/* The number of points at which it failed. */
static int sweep(bool for_ever)
{
    struct made_model m;
    struct mt_vfs vfs = mt_vfs_posix;
    struct mt_train_state st;
    char path[100];
    int failures = 0;
    bool reached = true;
    vfs.sync = no_sync;
    vfs.sync_dir = no_sync_dir;
    assert_int_equal(made_model_init(&m), 0);
    fill_state(&st);
    snprintf(path, sizeof(path), "%s/checkpoint-4", m.dir);
    long stride = getenv("MEGATRAIN_TEST_FULL") ? 1 : 7; /* no divisor of what a tensor's record takes */
    for (long n = 1; reached; n += stride) {
        assert_int_equal(mt_remove_tree(path, NULL), 0);
        struct mt_checkpoint_save s = {.vfs = &vfs, .dir = m.dir, .model_dir = m.model_dir, .layout = m.layout,
                                       .planes = m.planes, .state = &st, .full = true, .shard_bytes = 2000};
        struct mt_err err = {0};
        count = 0;
        fail_from = n;
        fail_to = for_ever ? 1L << 40 : n + 1;
        int rc = mt_checkpoint_save(&s, &err);
        reached = count >= n;
        fail_from = fail_to = 0;
        if (rc && (rc != -ENOMEM || err.kind != MT_ERR_NO_FIT) && !strstr(err.msg, "Cannot allocate memory"))
            fail_msg("allocation %ld: %d, %s", n, rc, err.msg);
        if (!rc)
            expect_whole(path);
        else
            assert_false(mt_path_exists(path));
        failures += rc != 0;
    }
    mt_train_state_finish(&st);
    made_model_finish(&m);
    return failures;
}

TEST(one_allocation_that_fails_seals_nothing_bad)
{
    assert_true(sweep(false) > 20);
}

TEST(memory_that_stays_short_seals_nothing)
{
    assert_true(sweep(true) > 20);
}
