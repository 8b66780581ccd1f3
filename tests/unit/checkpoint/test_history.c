/* SPDX-License-Identifier: Apache-2.0 */
/* Which of a folder's checkpoints are a run's own, which is its newest, and what is never touched. */
#include <errno.h>
#include <sys/stat.h>

#include "base/mem.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/seal.h"
#include "made_model.h"
#include "test.h"

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

static struct mt_vfs quick; /* syncs take most of a save's time */

/* A process: its history, and what it has trained to. */
struct run {
    struct made_model *m;
    struct mt_train_state st;
    struct mt_history h;
};

static void begin(struct run *r, struct made_model *m)
{
    *r = (struct run){.m = m, .st = {.best_loss = 1.5}};
    r->st.config = strdup("[train]\nsteps = 4\n");
    r->h.lineage = &r->st.lineage;
    assert_int_equal(mt_lineage_begin(&r->st.lineage, NULL), 0);
}

static void go_on(struct run *r, struct made_model *m, uint64_t step)
{
    char path[200];
    *r = (struct run){.m = m};
    snprintf(path, sizeof(path), "%s/checkpoint-%d", m->dir, (int)step);
    assert_int_equal(mt_checkpoint_read_state(path, &r->st, NULL), 0);
    r->h = (struct mt_history){.lineage = &r->st.lineage, .has = true, .full = true, .step = step};
    memcpy(r->h.sum, r->st.sum, sizeof(r->h.sum));
    assert_int_equal(mt_lineage_go_on(&r->st.lineage, step, r->st.sum, NULL), 0);
}

/* Trains to `step`, which gives the planes of that seed, and saves. */
static int save(struct run *r, uint64_t step, uint64_t seed, bool full, size_t keep, const struct mt_vfs *vfs)
{
    vfs = vfs ? vfs : &quick;
    r->st.step = step;
    made_fill(r->m, seed);
    int rc = mt_checkpoint_save(&(struct mt_checkpoint_save){.vfs = vfs, .dir = r->m->dir,
                                                             .model_dir = r->m->model_dir, .layout = r->m->layout,
                                                             .planes = r->m->planes, .state = &r->st,
                                                             .history = &r->h, .full = full, .shard_bytes = 2000},
                                NULL);
    struct mt_prune_policy p = {.keep = keep, .lineage = &r->st.lineage};
    return rc || !keep ? rc : mt_checkpoint_prune(vfs, r->m->dir, &p, NULL);
}

static bool there(const struct made_model *m, const char *name)
{
    char path[300];
    snprintf(path, sizeof(path), "%s/%s", m->dir, name);
    return mt_is_dir(path);
}

/* The newest checkpoint is of that step and loads as the planes of that seed. */
static void expect_newest(const struct made_model *m, uint64_t step, uint64_t seed)
{
    struct made_model want;
    MT_FREED char *path = NULL;
    char name[64];
    MUST(mt_checkpoint_find_newest, m->dir, false, &path);
    snprintf(name, sizeof(name), "/checkpoint-%d", (int)step);
    assert_non_null(path);
    assert_string_equal(path + strlen(m->dir), name);
    assert_int_equal(made_model_init(&want), 0);
    made_fill(&want, seed);
    made_fill(m, 1000);
    assert_int_equal(mt_checkpoint_load(path, m->layout, m->planes, NULL), 0);
    for (size_t i = 0; i < m->layout->n_tensors; i++) {
        const struct mt_tensor *t = &m->layout->tensors[i];
        for (int k = 0; k < MT_N_PLANES; k++) {
            const struct mt_plane_desc *d = mt_plane_desc_of(m->planes, (enum mt_plane_kind)k);
            size_t size = d->block_bytes;
            if (!mt_plane(m->planes, t->unit, k) || d->role == MT_ROLE_GRADIENT)
                continue;
            assert_memory_equal((char *)mt_plane(m->planes, t->unit, k) + t->first * size,
                                (char *)mt_plane(want.planes, t->unit, k) + t->first * size, t->n * size);
        }
    }
    made_model_finish(&want);
}

static void finish(struct run *r)
{
    mt_train_state_finish(&r->st);
}

/* What most tests have: a model, and a run that began with it. */
static struct made_model model;
static struct run first;

static int set_up(void **)
{
    int rc = made_model_init(&model);
    if (!rc)
        begin(&first, &model);
    return rc;
}

static int tear_down(void **)
{
    finish(&first);
    made_model_finish(&model);
    return 0;
}

TEST_WITH(a_branch_saves_its_own_bytes_and_sets_the_others_aside, set_up, tear_down)
{
    struct run b;
    char name[64];
    for (uint64_t s = 2; s <= 6; s += 2)
        assert_int_equal(save(&first, s, s, true, 9, NULL), 0);
    go_on(&b, &model, 2);
    assert_int_equal(save(&b, 4, 40, true, 9, NULL), 0);
    expect_newest(&model, 4, 40);
    assert_false(there(&model, "checkpoint-6"));
    for (int s = 4; s <= 6; s += 2) {
        snprintf(name, sizeof(name), "checkpoint-%d.abandoned-%s", s, b.st.lineage.run);
        assert_true(there(&model, name));
    }
    assert_true(there(&model, "checkpoint-2"));
    finish(&b);
}

TEST_WITH(own_bytes_are_not_written_twice, set_up, tear_down)
{
    struct stat was, is;
    char path[200];
    assert_int_equal(save(&first, 2, 1, true, 2, NULL), 0);
    snprintf(path, sizeof(path), "%s/checkpoint-2/megatrain/state.json", model.dir);
    assert_int_equal(stat(path, &was), 0);
    assert_int_equal(save(&first, 2, 1, true, 2, NULL), 0);
    assert_int_equal(save(&first, 2, 1, false, 2, NULL), 0);
    assert_int_equal(stat(path, &is), 0);
    assert_true(was.st_ino == is.st_ino);
    finish(&first);
    go_on(&first, &model, 2);
    assert_int_equal(save(&first, 2, 1, true, 2, NULL), 0);
    assert_int_equal(stat(path, &is), 0);
    assert_true(was.st_ino == is.st_ino);
    assert_int_equal(remove(path), 0); /* now they are not there any more */
    assert_int_equal(save(&first, 2, 1, true, 2, NULL), 0);
    expect_newest(&model, 2, 1);
    snprintf(path, sizeof(path), "%s/checkpoint-2/megatrain/state-00001.safetensors", model.dir);
    assert_int_equal(truncate(path, 100), 0); /* nor is all of this one */
    assert_int_equal(save(&first, 2, 1, true, 2, NULL), 0);
    expect_newest(&model, 2, 1);
}

TEST_WITH(keep_counts_its_own_lineage, set_up, tear_down)
{
    char cmd[400];
    assert_int_equal(save(&first, 3, 3, true, 1, NULL), 0);
    snprintf(cmd, sizeof(cmd), "cp -r %s/checkpoint-3 %s/checkpoint-20251101", model.dir, model.dir);
    assert_int_equal(system(cmd), 0);
    assert_int_equal(save(&first, 4, 4, true, 1, NULL), 0);
    assert_true(there(&model, "checkpoint-20251101"));
    assert_false(there(&model, "checkpoint-3"));
    expect_newest(&model, 4, 4);
    finish(&first);
    go_on(&first, &model, 4); /* to which the copy is of no step that it came from */
    assert_int_equal(save(&first, 5, 5, true, 1, NULL), 0);
    assert_true(there(&model, "checkpoint-20251101"));
}

TEST_WITH(weights_alone_do_not_push_out_what_can_be_resumed, set_up, tear_down)
{
    char path[200];
    assert_int_equal(save(&first, 3, 3, true, 1, NULL), 0);
    assert_int_equal(save(&first, 5, 5, false, 1, NULL), 0);
    snprintf(path, sizeof(path), "%s/checkpoint-5", model.dir);
    assert_int_equal(mt_checkpoint_verify(path, NULL), 0); /* it is sealed, too */
    expect_newest(&model, 3, 3);
    assert_int_equal(save(&first, 5, 5, true, 1, NULL), 0); /* room came back */
    expect_newest(&model, 5, 5);
    assert_false(there(&model, "checkpoint-3"));
    snprintf(path, sizeof(path), "checkpoint-5.abandoned-%s", first.st.lineage.run);
    assert_false(there(&model, path)); /* what is better has taken the place of the weights */
}

TEST_WITH(marked_ones_are_kept_beside_the_newest, set_up, tear_down)
{
    for (uint64_t s = 1; s <= 5; s++)
        assert_int_equal(save(&first, s, s, true, 0, NULL), 0);
    struct mt_prune_policy p = {.keep = 1, .keep_every = 3, .keep_best = true, .best_step = 2, .lineage = &first.st.lineage};
    assert_int_equal(mt_checkpoint_prune(&quick, model.dir, &p, NULL), 0);
    assert_true(there(&model, "checkpoint-5") && there(&model, "checkpoint-3") && there(&model, "checkpoint-2"));
    assert_false(there(&model, "checkpoint-4") || there(&model, "checkpoint-1"));
}

TEST_WITH(only_what_is_whole_and_its_own_is_counted, set_up, tear_down)
{
    struct run b;
    char path[200], cmd[400];
    for (uint64_t s = 1; s <= 3; s++)
        assert_int_equal(save(&first, s, s, true, 0, NULL), 0);
    snprintf(path, sizeof(path), "%s/checkpoint-3/megatrain/state-00001.safetensors", model.dir);
    assert_int_equal(truncate(path, 100), 0);
    struct mt_prune_policy p = {.keep = 2, .lineage = &first.st.lineage};
    assert_int_equal(mt_checkpoint_prune(&quick, model.dir, &p, NULL), 0);
    assert_true(there(&model, "checkpoint-3") && there(&model, "checkpoint-2") && there(&model, "checkpoint-1"));
    begin(&b, &model);
    assert_int_equal(save(&b, 4, 40, true, 0, NULL), 0); /* sets those of the first run aside */
    snprintf(cmd, sizeof(cmd), "mv %s/checkpoint-2.abandoned-%s %s/checkpoint-2", model.dir, b.st.lineage.run, model.dir);
    assert_int_equal(system(cmd), 0); /* which somebody undoes */
    p = (struct mt_prune_policy){.keep = 1, .lineage = &b.st.lineage};
    assert_int_equal(mt_checkpoint_prune(&quick, model.dir, &p, NULL), 0);
    assert_true(there(&model, "checkpoint-4") && there(&model, "checkpoint-2"));
    finish(&b);
}

TEST(what_a_run_came_from_is_its_own_however_far_back)
{
    struct made_model m;
    struct run r[3];
    assert_int_equal(made_model_init(&m), 0);
    for (int i = 0; i < 3; i++) { /* each goes on from the one before */
        uint64_t step = 2 * (uint64_t)i + 2;
        if (i)
            go_on(&r[i], &m, step - 2);
        else
            begin(&r[i], &m);
        assert_int_equal(save(&r[i], step, step, true, 0, NULL), 0);
    }
    assert_true(there(&m, "checkpoint-2") && there(&m, "checkpoint-4") && there(&m, "checkpoint-6"));
    for (int i = 0; i < 3; i++)
        finish(&r[i]);
    made_model_finish(&m);
}

static void replace_by_copy(const struct made_model *m, const char *name, const char *from)
{
    char cmd[600];
    snprintf(cmd, sizeof(cmd), "rm -rf %s/%s && cp -r %s/%s %s/%s", m->dir, name, m->dir, from, m->dir, name);
    assert_int_equal(system(cmd), 0);
}

/* Another run's checkpoint comes to lie where this process has saved, twice. */
TEST_WITH(what_took_the_place_of_own_bytes_is_set_aside, set_up, tear_down)
{
    struct run b;
    char name[2][80];
    assert_int_equal(save(&first, 4, 4, true, 0, NULL), 0);
    replace_by_copy(&model, "others", "checkpoint-4");
    begin(&b, &model);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(save(&b, 4, 40, true, 0, NULL), 0);
        expect_newest(&model, 4, 40);
        if (i < 2)
            replace_by_copy(&model, "checkpoint-4", "others");
        snprintf(name[i % 2], sizeof(name[0]), "checkpoint-4.abandoned-%s%s", b.st.lineage.run, i == 1 ? "-2" : "");
        assert_true(there(&model, name[i % 2]));
    }
    finish(&b);
}

static int n_renames;
static int second_rename_fails(void *ctx, const char *from, const char *to)
{
    return ++n_renames == 2 ? -EIO : mt_vfs_posix.rename(ctx, from, to);
}

TEST_WITH(a_rename_that_fails_gives_the_name_back, set_up, tear_down)
{
    struct mt_vfs vfs = quick;
    struct run b;
    char name[80];
    vfs.rename = second_rename_fails;
    assert_int_equal(save(&first, 4, 4, true, 0, NULL), 0);
    begin(&b, &model);
    n_renames = 0;
    assert_int_equal(save(&b, 4, 40, true, 0, &vfs), -EIO); /* the older one is set aside, the new one not put there */
    expect_newest(&model, 4, 4);
    snprintf(name, sizeof(name), "checkpoint-4.abandoned-%s", b.st.lineage.run);
    assert_false(there(&model, name) || there(&model, "checkpoint-4.tmp"));
    finish(&b);
}

/* A save that was cut off before its rename: adopted if all of it is there, else left for the next prune. */
TEST_WITH(only_what_is_whole_is_adopted, set_up, tear_down)
{
    char path[200], tmp[210], file[300];
    for (uint64_t s = 2; s <= 4; s += 2)
        assert_int_equal(save(&first, s, s, true, 0, NULL), 0);
    snprintf(path, sizeof(path), "%s/checkpoint-4", model.dir);
    snprintf(tmp, sizeof(tmp), "%s.tmp", path);
    assert_int_equal(rename(path, tmp), 0);
    mt_history_adopt(&quick, model.dir);
    expect_newest(&model, 4, 4);
    assert_int_equal(rename(path, tmp), 0);
    snprintf(file, sizeof(file), "%s/megatrain/state-00001.safetensors", tmp);
    assert_int_equal(truncate(file, 100), 0);
    mt_history_adopt(&quick, model.dir);
    assert_true(there(&model, "checkpoint-4.tmp") && !there(&model, "checkpoint-4"));
    expect_newest(&model, 2, 2);
}

/* A link to itself in the place of a file stands for a file system that does not answer. */
static void replace_by_loop(const char *path)
{
    assert_int_equal(remove(path), 0);
    assert_int_equal(symlink(path, path), 0);
}

TEST(what_cannot_be_read_now_is_not_passed_over)
{
    static const char *const files[] = {"megatrain/seal.json", "megatrain/state-00001.safetensors"};
    for (size_t i = 0; i < MT_ARRAY_LEN(files); i++) {
        struct made_model m;
        struct run a;
        struct mt_err err = {0};
        char path[200], *found = NULL;
        assert_int_equal(made_model_init(&m), 0);
        begin(&a, &m);
        for (uint64_t s = 2; s <= 4; s += 2)
            assert_int_equal(save(&a, s, s, true, 0, NULL), 0);
        snprintf(path, sizeof(path), "%s/checkpoint-4/%s", m.dir, files[i]);
        replace_by_loop(path);
        assert_int_equal(mt_checkpoint_find_newest(m.dir, false, &found, &err), -ELOOP);
        assert_true(!found && err.kind == MT_ERR_CHECKPOINT && strstr(err.msg, "checkpoint-4"));
        assert_int_equal(mt_checkpoint_find_newest(m.dir, true, &found, &err), 0); /* --force */
        assert_non_null(strstr(found, "checkpoint-2"));
        free(found);
        finish(&a);
        made_model_finish(&m);
    }
}

static int n_left; /* operations until the power goes */
static int cut(void)
{
    return n_left-- > 0 ? 0 : -EIO;
}
#define CUT(name, args, pass) \
    static int cut_##name args \
    { \
        int rc = cut(); \
        return rc ? rc : mt_vfs_posix.name pass; \
    }
CUT(create, (void *c, const char *p), (c, p))
CUT(write, (void *c, int fd, const void *d, size_t n), (c, fd, d, n))
CUT(make_dir, (void *c, const char *p), (c, p))
CUT(rename, (void *c, const char *f, const char *t), (c, f, t))
CUT(remove_tree, (void *c, const char *p), (c, p))
CUT(link, (void *c, const char *t, const char *p), (c, t, p))

/* Nothing happens from the n-th operation on, as after a kill: whichever it is, either the old newest or the new one loads. */
TEST(a_branch_that_is_killed_anywhere_loses_nothing)
{
    struct mt_vfs vfs = quick;
    bool done = false;
    vfs.create = cut_create;
    vfs.write = cut_write;
    vfs.make_dir = cut_make_dir;
    vfs.rename = cut_rename;
    vfs.remove_tree = cut_remove_tree;
    vfs.link = cut_link;
    for (int at = 0; !done; at += at < 20 ? 5 : 1) {
        struct made_model m;
        struct run a, b;
        uint64_t *steps = NULL;
        size_t n = 0;
        char *path = NULL;
        struct mt_checkpoint_id id;
        assert_int_equal(made_model_init(&m), 0);
        begin(&a, &m);
        for (uint64_t s = 2; s <= 6; s += 2)
            assert_int_equal(save(&a, s, s, true, 9, NULL), 0);
        go_on(&b, &m, 2);
        n_left = at;
        bool durable = !save(&b, 4, 40, true, 1, &vfs) || b.h.has;
        done = n_left > 0;
        mt_history_adopt(NULL, m.dir);
        assert_int_equal(mt_checkpoint_find_newest(m.dir, false, &path, NULL), 0);
        assert_int_equal(mt_checkpoint_identify(path, &id, NULL), 0);
        bool new = !strcmp(id.lineage.run, b.st.lineage.run);
        assert_true(new || !durable || b.h.step != 4);
        expect_newest(&m, new ? 4 : 6, new ? 40 : 6);
        mt_checkpoint_id_finish(&id);
        assert_int_equal(mt_checkpoint_list(m.dir, &steps, &n, NULL), 0);
        free(steps);
        free(path);
        finish(&a);
        finish(&b);
        made_model_finish(&m);
    }
}

static int cut_share(void *c, const char *from, const char *to)
{
    int rc = cut();
    return rc ? rc : mt_vfs_posix.share(c, from, to);
}

static int cut_exchange(void *c, const char *a, const char *b)
{
    int rc = cut();
    return rc ? rc : mt_vfs_posix.exchange(c, a, b);
}

/* What the newest checkpoint says of the last evaluation. */
static double newest_best(const struct made_model *m, uint64_t step)
{
    struct mt_train_state st = {.step = 0};
    MT_FREED char *path = NULL;
    char name[64];
    assert_int_equal(mt_checkpoint_find_newest(m->dir, false, &path, NULL), 0);
    snprintf(name, sizeof(name), "/checkpoint-%d", (int)step);
    assert_non_null(path);
    assert_string_equal(path + strlen(m->dir), name);
    assert_int_equal(mt_checkpoint_read_state(path, &st, NULL), 0);
    double best = st.best_loss;
    assert_true(st.eval_step == (best < 1 ? step : 0));
    mt_train_state_finish(&st);
    return best;
}

/* Nothing happens from the n-th operation on, as after a kill, with second names for files and without: whichever it is,
 * the checkpoint is there with its tensors, and says either nothing of the evaluation or all. */
TEST(what_an_evaluation_finds_is_added_in_one_step)
{
    for (int way = 0; way < 4; way++) {
        bool full = way % 2, links = way / 2, done = false;
        struct mt_vfs vfs = quick;
        vfs.create = cut_create;
        vfs.write = cut_write;
        vfs.make_dir = cut_make_dir;
        vfs.rename = cut_rename;
        vfs.remove_tree = cut_remove_tree;
        vfs.share = links ? cut_share : NULL;
        vfs.exchange = links ? cut_exchange : NULL;
        for (int at = 0; !done; at += at < 24 ? 8 : 1) {
            struct made_model m;
            struct run a;
            assert_int_equal(made_model_init(&m), 0);
            begin(&a, &m);
            assert_int_equal(save(&a, 2, 2, true, 9, NULL), 0);
            assert_int_equal(save(&a, 4, 4, full, 9, NULL), 0);
            a.st.best_loss = 0.5;
            a.st.eval_step = 4;
            n_left = at;
            int rc = mt_checkpoint_amend(&(struct mt_checkpoint_save){.vfs = &vfs, .dir = m.dir, .state = &a.st, .history = &a.h},
                                         NULL);
            done = n_left > 0;
            assert_true(!rc || !done);
            mt_history_adopt(NULL, m.dir);
            if (full) {
                double best = newest_best(&m, 4);
                assert_true(best == 0.5 || (rc && best == 1.5));
                expect_newest(&m, 4, 4);
            }
            char path[200];
            snprintf(path, sizeof(path), "%s/checkpoint-4", m.dir);
            assert_true(!mt_checkpoint_verify(path, NULL));
            assert_true(rc || mt_history_holds(&a.h, m.dir, 4, full));
            assert_true(!done || !there(&m, "checkpoint-4.tmp"));
            finish(&a);
            made_model_finish(&m);
        }
    }
}

TEST(none_that_is_good_is_not_none_at_all)
{
    struct made_model m;
    struct run a;
    struct mt_err err = {0};
    char path[200], *found = NULL;
    assert_int_equal(made_model_init(&m), 0);
    assert_int_equal(mt_checkpoint_find_newest(m.dir, false, &found, &err), 0);
    assert_null(found);
    begin(&a, &m);
    assert_int_equal(save(&a, 3, 3, true, 1, NULL), 0);
    snprintf(path, sizeof(path), "%s/checkpoint-3/megatrain/state-00001.safetensors", m.dir);
    assert_int_equal(truncate(path, 100), 0);
    assert_int_equal(mt_checkpoint_find_newest(m.dir, false, &found, &err), -EBADMSG);
    assert_int_equal(err.kind, MT_ERR_CHECKPOINT);
    assert_int_equal(mt_checkpoint_find_newest(m.dir, true, &found, &err), -EBADMSG); /* nor with --force */
    assert_null(found);
    assert_null(mt_checkpoint_find_whole(m.dir));
    assert_int_equal(save(&a, 4, 4, true, 9, NULL), 0);
    found = mt_checkpoint_find_whole(m.dir);
    assert_non_null(strstr(found, "checkpoint-4"));
    free(found);
    finish(&a);
    made_model_finish(&m);
}

TEST_WITH(starting_anew_removes_what_this_run_set_aside_alone, set_up, tear_down)
{
    struct run b, c;
    char aside[2][128], path[300], tmp[310];
    assert_int_equal(save(&first, 3, 3, true, 1, NULL), 0);
    begin(&b, &model); /* as with --force --resume: nothing is removed */
    assert_int_equal(mt_history_set_all_aside(&b.h, &quick, model.dir, NULL), 0);
    assert_int_equal(save(&b, 3, 5, true, 1, NULL), 0);
    begin(&c, &model); /* --force */
    c.h.removes = true;
    assert_int_equal(mt_history_set_all_aside(&c.h, &quick, model.dir, NULL), 0);
    snprintf(aside[0], sizeof(aside[0]), "checkpoint-3.abandoned-%s", b.st.lineage.run);
    snprintf(aside[1], sizeof(aside[1]), "checkpoint-3.abandoned-%s", c.st.lineage.run);
    assert_true(there(&model, aside[0]) && there(&model, aside[1]));
    assert_int_equal(save(&c, 1, 7, true, 1, NULL), 0);
    assert_true(there(&model, aside[0]) && !there(&model, aside[1]));
    expect_newest(&model, 1, 7);
    /* a save that was killed before its rename is not found again by a later --resume */
    finish(&b);
    begin(&b, &model);
    b.h.removes = true;
    snprintf(path, sizeof(path), "%s/checkpoint-1", model.dir);
    snprintf(tmp, sizeof(tmp), "%s.tmp", path);
    assert_int_equal(rename(path, tmp), 0);
    assert_int_equal(mt_history_set_all_aside(&b.h, &quick, model.dir, NULL), 0);
    mt_history_adopt(&quick, model.dir);
    assert_true(!there(&model, "checkpoint-1") && !there(&model, "checkpoint-1.tmp"));
    finish(&b);
    finish(&c);
}

int main(void)
{
    quick = mt_vfs_posix;
    quick.sync = no_sync;
    quick.sync_dir = no_sync_dir;
    return test_run();
}
