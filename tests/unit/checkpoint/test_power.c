/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A branch is saved over an older history and that is pruned, and the power goes. What reached the disk of the names in
 * the output folder: everything up to the last sync of it, and any of what came after, in whatever selection. Whatever
 * it is, a checkpoint is found, verifies, and is the branch's own once its save was done.
 */
#include <sys/stat.h>

#include "base/mem.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/seal.h"
#include "made_model.h"
#include "test.h"

enum op { MAKE, RENAME, REMOVE, SYNC };
enum { MOST = 64 };

/* Names of the output folder, and the folder that each stands for. */
struct names {
    struct {
        char name[64];
        int object;
    } p[MOST];
    int n;
};

static struct {
    const char *dir;
    struct {
        enum op op;
        char from[64], to[64];
        int object; /* MAKE: the new one */
    } ops[MOST];
    int n, n_objects;
    int saved;                /* operations when the save was done */
    char object[MOST][200];   /* where each is kept */
    struct names now;
} rec;

static const char *below(const char *path)
{
    size_t n = strlen(rec.dir);
    return !strncmp(path, rec.dir, n) && path[n] == '/' && !strchr(path + n + 1, '/') ? path + n + 1 : NULL;
}

static int find(const struct names *s, const char *name)
{
    for (int i = 0; i < s->n; i++)
        if (!strcmp(s->p[i].name, name))
            return i;
    return -1;
}

static void drop(struct names *s, const char *name)
{
    int i = find(s, name);
    if (i >= 0)
        s->p[i] = s->p[--s->n];
}

static void put(struct names *s, const char *name, int object)
{
    drop(s, name);
    assert_true(s->n < MOST);
    snprintf(s->p[s->n].name, sizeof(s->p[0].name), "%s", name);
    s->p[s->n++].object = object;
}

static void move(struct names *s, const char *from, const char *to)
{
    int i = find(s, from);
    if (i < 0)
        return; /* its making was lost */
    int object = s->p[i].object;
    drop(s, from);
    put(s, to, object);
}

static void note(enum op op, const char *from, const char *to, int object)
{
    assert_true(rec.n < MOST);
    rec.ops[rec.n].op = op;
    snprintf(rec.ops[rec.n].from, sizeof(rec.ops[0].from), "%s", from);
    snprintf(rec.ops[rec.n].to, sizeof(rec.ops[0].to), "%s", to);
    rec.ops[rec.n++].object = object;
}

static int on_make(void *ctx, const char *path)
{
    (void)ctx;
    if (below(path)) {
        note(MAKE, below(path), "", rec.n_objects);
        put(&rec.now, below(path), rec.n_objects++);
    }
    return mt_vfs_posix.make_dir(NULL, path);
}

static int on_rename(void *ctx, const char *from, const char *to)
{
    (void)ctx;
    note(RENAME, below(from), below(to), 0);
    move(&rec.now, below(from), below(to));
    return mt_vfs_posix.rename(NULL, from, to);
}

/* Kept aside, so that it can be there again. */
static int on_remove(void *ctx, const char *path)
{
    char kept[300];
    int i = find(&rec.now, below(path));
    (void)ctx;
    if (i < 0)
        return 0;
    note(REMOVE, below(path), "", 0);
    snprintf(kept, sizeof(kept), "%s/store/%d", rec.dir, rec.now.p[i].object);
    drop(&rec.now, below(path));
    return rename(path, kept) ? -errno : 0;
}

static int on_sync_dir(void *ctx, const char *path)
{
    (void)ctx;
    if (!strcmp(path, rec.dir))
        note(SYNC, "", "", 0);
    return 0;
}

static int no_sync(void *ctx, int fd)
{
    (void)ctx;
    (void)fd;
    return 0;
}

static int save(struct made_model *m, struct mt_train_state *st, struct mt_history *h, uint64_t step,
                const struct mt_vfs *vfs)
{
    st->step = step;
    made_fill(m, step);
    return mt_checkpoint_save(&(struct mt_checkpoint_save){.vfs = vfs, .dir = m->dir, .model_dir = m->model_dir,
                                                           .layout = m->layout, .planes = m->planes, .state = st,
                                                           .history = h, .full = true, .shard_bytes = 2000},
                              NULL);
}

static void apply(struct names *s, int i)
{
    if (rec.ops[i].op == MAKE)
        put(s, rec.ops[i].from, rec.ops[i].object);
    else if (rec.ops[i].op == RENAME)
        move(s, rec.ops[i].from, rec.ops[i].to);
    else if (rec.ops[i].op == REMOVE)
        drop(s, rec.ops[i].from);
}

/* The folder as it is found after the power came back; what the run must go on from. */
static void check(const struct made_model *m, const struct names *s, bool must_be_new, const char *run)
{
    char cut[200], path[400], *found = NULL;
    struct mt_checkpoint_id id;
    struct mt_err err = {0};
    snprintf(cut, sizeof(cut), "%s/cut", m->dir);
    assert_int_equal(mt_remove_tree(cut, NULL), 0);
    assert_int_equal(mkdir(cut, 0777), 0);
    for (int i = 0; i < s->n; i++) {
        snprintf(path, sizeof(path), "%s/%s", cut, s->p[i].name);
        assert_int_equal(symlink(rec.object[s->p[i].object], path), 0);
    }
    mt_history_adopt(NULL, cut);
    if (mt_checkpoint_find_newest(cut, false, &found, &err) || !found)
        fail_msg("nothing is found: %s", err.msg);
    assert_int_equal(mt_checkpoint_identify(found, &id, NULL), 0);
    assert_true(!must_be_new || !strcmp(id.lineage.run, run));
    mt_checkpoint_id_finish(&id);
    free(found);
}

TEST(whatever_reached_the_disk_a_checkpoint_is_found)
{
    struct made_model m;
    struct mt_vfs vfs = mt_vfs_posix;
    struct mt_train_state a = {.best_loss = 1}, b;
    struct mt_history h = {.lineage = &a.lineage};
    struct names first;
    char path[300];
    int states = 0;
    vfs.sync = no_sync;
    vfs.sync_dir = on_sync_dir;
    assert_int_equal(made_model_init(&m), 0);
    rec.dir = m.dir;
    snprintf(path, sizeof(path), "%s/store", m.dir);
    assert_int_equal(mkdir(path, 0777), 0);
    a.config = strdup("");
    assert_int_equal(mt_lineage_begin(&a.lineage, NULL), 0);
    for (uint64_t s = 2; s <= 6; s += 2)
        assert_int_equal(save(&m, &a, &h, s, NULL), 0);
    rec.n = 0;
    for (int s = 2; s <= 6; s += 2) {
        snprintf(path, sizeof(path), "checkpoint-%d", s);
        put(&rec.now, path, rec.n_objects++);
    }
    first = rec.now;
    snprintf(path, sizeof(path), "%s/checkpoint-2", m.dir);
    assert_int_equal(mt_checkpoint_read_state(path, &b, NULL), 0);
    assert_int_equal(mt_lineage_go_on(&b.lineage, 2, b.sum, NULL), 0);
    vfs.make_dir = on_make;
    vfs.rename = on_rename;
    vfs.remove_tree = on_remove;
    h = (struct mt_history){.lineage = &b.lineage};
    assert_int_equal(save(&m, &b, &h, 4, &vfs), 0);
    rec.saved = rec.n;
    struct mt_prune_policy keep_one = {.keep = 1, .lineage = &b.lineage};
    assert_int_equal(mt_checkpoint_prune(&vfs, m.dir, &keep_one, NULL), 0);
    for (int o = 0; o < rec.n_objects; o++)
        snprintf(rec.object[o], sizeof(rec.object[o]), "%s/store/%d", m.dir, o);
    for (int i = 0; i < rec.now.n; i++)
        snprintf(rec.object[rec.now.p[i].object], sizeof(rec.object[0]), "%.100s/%s", m.dir, rec.now.p[i].name);
    assert_true(rec.n > rec.saved && rec.saved > 5);
    for (int n = 1; n <= rec.n; n++) { /* the first makes the temporary folder */
        int synced = n;
        while (synced > 0 && rec.ops[synced - 1].op != SYNC)
            synced--;
        for (unsigned pick = 0; pick < 1u << (n - synced); pick++, states++) {
            struct names s = first;
            for (int i = 0; i < n; i++)
                if (i < synced || pick >> (i - synced) & 1)
                    apply(&s, i);
            check(&m, &s, n >= rec.saved, b.lineage.run);
        }
    }
    assert_true(states > 20);
    mt_train_state_finish(&a);
    mt_train_state_finish(&b);
    made_model_finish(&m);
}
