/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A save goes through a recording vfs. From the record: the order of operations, and what a power cut
 * leaves at each point when everything that was not yet synced is lost. Whatever is left, the newest
 * complete checkpoint must be found and verify.
 */

#include "base/mem.h"
#include "recorder.h"
#include "test.h"

TEST(write_sync_rename_sync_prune_in_this_order)
{
    struct made_model m;
    struct mt_vfs vfs;
    struct recorder *rec = calloc(1, sizeof(*rec));
    record_two_saves(&m, rec, &vfs);
    size_t rename = find(rec, RENAME, 0), parent = find(rec, SYNC_DIR, rename);
    size_t prune = find(rec, REMOVE, rename), last_dir = 0;
    assert_true(rename < parent && parent < prune && prune < rec->n);
    assert_string_equal(rec->r[parent].path, m.dir);
    for (size_t i = 0; i < rec->n; i++) {
        const struct record *r = &rec->r[i];
        if (r->op == CREATE) { /* its last write is before its sync, its sync before its close */
            size_t sync = i, close = i, write = i;
            for (size_t k = i + 1; k < rec->n && close == i; k++) {
                if (rec->r[k].fd != r->fd)
                    continue;
                if (rec->r[k].op == WRITE)
                    write = k;
                if (rec->r[k].op == SYNC)
                    sync = k;
                if (rec->r[k].op == CLOSE)
                    close = k;
            }
            assert_true(i < write && write < sync && sync < close && close < rename);
            last_dir = close;
        }
        if (r->op == WRITE || r->op == CREATE)
            assert_true(i < rename);
    }
    size_t tmp_synced = find(rec, SYNC_DIR, last_dir);
    assert_true(tmp_synced < rename);
    made_model_finish(&m);
    free_records(rec);
}

/* What a power cut after `n` operations leaves of the new checkpoint, below `dir`. `renamed`: a rename
 * that was not yet synced may or may not have reached the disk; here it has. */
static bool lay_out(const struct recorder *rec, size_t n, bool renamed, const char *from, const char *dir)
{
    size_t rename = find(rec, RENAME, 0), parent = find(rec, SYNC_DIR, rename);
    bool there = n > parent || (renamed && n > rename);
    if (!there)
        return false;
    for (size_t i = 0; i < n; i++) {
        const struct record *r = &rec->r[i];
        char folder[256], path[512];
        bool entry = false, synced = false;
        if (r->op != CREATE)
            continue;
        snprintf(folder, sizeof(folder), "%s", r->path);
        *strrchr(folder, '/') = 0;
        struct mt_str data = {0};
        for (size_t k = i + 1; k < n; k++) {
            if (rec->r[k].op == SYNC_DIR && !strcmp(rec->r[k].path, folder))
                entry = true;
            if (rec->r[k].fd != r->fd || rec->r[k].op == CREATE)
                continue;
            if (rec->r[k].op == WRITE)
                mt_str_append(&data, rec->r[k].data, rec->r[k].len);
            synced |= rec->r[k].op == SYNC;
            if (rec->r[k].op == CLOSE)
                break;
        }
        for (size_t k = i + 1; k < n && !entry; k++)
            entry = rec->r[k].op == SYNC_DIR && !strcmp(rec->r[k].path, folder);
        if (strcmp(folder, from)) { /* a folder in it: its own name must be there, too */
            bool named = false;
            for (size_t k = find(rec, MKDIR, 0); k < n && !named; k++)
                named = rec->r[k].op == SYNC_DIR && !strcmp(rec->r[k].path, from);
            entry &= named;
        }
        if (entry) {
            snprintf(path, sizeof(path), "%s%s", dir, r->path + strlen(from));
            *strrchr(path, '/') = 0;
            assert_int_equal(mt_mkdir_p(path, NULL), 0);
            path[strlen(path)] = '/';
            assert_int_equal(mt_write_file(path, data.p ? data.p : "", synced ? data.len : 0, NULL), 0);
        }
        mt_str_finish(&data);
    }
    return true;
}

/* Two saves that were recorded, and folders to lay out what a power cut leaves of them. */
struct scene {
    struct made_model m;
    struct recorder *rec;
    char old[256], cut[256], new_dir[300], from[300];
};

static void set_scene(struct scene *s)
{
    struct mt_vfs vfs;
    s->rec = calloc(1, sizeof(*s->rec));
    record_two_saves(&s->m, s->rec, &vfs);
    snprintf(s->from, sizeof(s->from), "%s/checkpoint-4.tmp", s->m.dir);
    snprintf(s->old, sizeof(s->old), "%s/old", s->m.dir);
    snprintf(s->cut, sizeof(s->cut), "%s/cut", s->m.dir);
    snprintf(s->new_dir, sizeof(s->new_dir), "%s/checkpoint-4", s->cut);
    made_fill(&s->m, 1);
    assert_int_equal(mt_mkdir_p(s->old, NULL), 0);
    struct made_model at_old = s->m;
    snprintf(at_old.dir, sizeof(at_old.dir), "%.63s", s->old);
    assert_int_equal(save(&at_old, NULL, 2), 0);
}

/* Is the newest checkpoint that a cut after `n` operations leaves whole, and the new one where that has its name? */
static bool survives(const struct scene *s, size_t n, bool renamed, size_t *news)
{
    MT_FREED char *found = NULL;
    char cmd[700];
    size_t removed = find(s->rec, REMOVE, find(s->rec, RENAME, 0));
    assert_int_equal(mt_remove_tree(s->cut, NULL), 0);
    assert_int_equal(mt_mkdir_p(s->cut, NULL), 0);
    bool fresh = lay_out(s->rec, n, renamed, s->from, s->new_dir);
    if (n <= removed) {
        snprintf(cmd, sizeof(cmd), "cp -r %s/checkpoint-2 %s/", s->old, s->cut);
        assert_int_equal(system(cmd), 0);
    }
    bool good = !mt_checkpoint_find_newest(s->cut, false, &found, NULL) && found &&
                strstr(found, fresh ? "checkpoint-4" : "checkpoint-2");
    *news += fresh;
    return good;
}

TEST(a_power_cut_at_any_point_leaves_a_good_checkpoint)
{
    struct scene s;
    size_t news = 0;
    set_scene(&s);
    for (size_t n = 0; n <= s.rec->n; n++)
        for (int renamed = 0; renamed < 2; renamed++)
            assert_true(survives(&s, n, renamed, &news));
    assert_true(news > 2);
    made_model_finish(&s.m);
    free_records(s.rec);
}

/* Each sync of a save, left out of the record, is missed by some power cut: none is there for nothing, and none could
 * be taken out of the code without a test that fails. */
TEST(no_sync_can_be_left_out)
{
    struct scene s;
    size_t unused = 0, n_syncs = 0;
    set_scene(&s);
    size_t done = find(s.rec, SYNC_DIR, find(s.rec, RENAME, 0));
    for (size_t at = 0; at <= done; at++) {
        struct record *r = &s.rec->r[at], was = *r;
        if (r->op != SYNC && r->op != SYNC_DIR)
            continue;
        bool missed = false;
        r->op = LINK; /* which changes nothing of what is laid out */
        for (size_t n = done; n <= s.rec->n && !missed; n++)
            for (int renamed = 0; renamed < 2 && !missed; renamed++)
                missed = !survives(&s, n, renamed, &unused);
        if (!missed)
            fail_msg("nothing is lost without sync %zu, of %s", n_syncs, was.path);
        *r = was;
        n_syncs++;
    }
    print_message("%zu syncs, each of them needed\n", n_syncs);
    assert_true(n_syncs > 8);
    made_model_finish(&s.m);
    free_records(s.rec);
}

TEST(a_full_disk_leaves_the_older_checkpoint)
{
    for (int at = 1; at < 40; at += 3) {
        struct made_model m;
        struct mt_vfs vfs = recording;
        struct recorder *rec = calloc(1, sizeof(*rec));
        char *found = NULL, tmp[200];
        vfs.ctx = rec;
        rec->fail_at = at;
        assert_int_equal(made_model_init(&m), 0);
        assert_int_equal(save(&m, NULL, 2), 0);
        int rc = save(&m, &vfs, 4);
        assert_true(rc == -ENOSPC || (rc == 0 && rec->writes < at));
        assert_int_equal(mt_checkpoint_find_newest(m.dir, false, &found, NULL), 0);
        assert_non_null(strstr(found, rc ? "checkpoint-2" : "checkpoint-4"));
        snprintf(tmp, sizeof(tmp), "%s/checkpoint-4.tmp", m.dir);
        assert_false(mt_path_exists(tmp));
        free(found);
        made_model_finish(&m);
        free_records(rec);
    }
}

/* What the save says of a failure: only planes that cannot be read are lost, and are not worth another try. */
static bool is_lost(const struct made_model *m, const char *fault, const struct mt_vfs *vfs)
{
    struct made_model on_disk = *m;
    struct mt_io_fault f;
    struct mt_plane_set_params p;
    mt_plane_bits all[8] = {~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u};
    const char *dirs[] = {m->dir};
    mt_disk *disk = NULL;
    bool lost = false;
    assert_int_equal(mt_io_fault_parse(&f, fault, NULL), 0);
    assert_int_equal(mt_layout_plane_params(&p, m->layout, &mt_adamw, MT_BF16, NULL), 0);
    assert_true(p.n_units <= MT_ARRAY_LEN(all));
    p.on_disk = all;
    struct mt_disk_params dp = {.dirs = dirs, .n_dirs = 1, .bytes = mt_plane_set_disk_bytes(&p), .fault = &f};
    assert_int_equal(mt_disk_open(&disk, &dp, NULL), 0);
    p.disk = disk;
    assert_int_equal(mt_plane_set_create(&on_disk.planes, &p, NULL), 0);
    struct mt_train_state st = {.step = 7, .best_loss = 1.5};
    int rc = mt_checkpoint_save(&(struct mt_checkpoint_save){.vfs = vfs, .dir = m->dir, .model_dir = m->model_dir,
                                                             .layout = m->layout, .planes = on_disk.planes, .state = &st,
                                                             .full = true, .shard_bytes = 2000, .lost = &lost},
                                NULL);
    assert_true(rc);
    mt_plane_set_destroy(&on_disk.planes);
    mt_disk_close(&disk);
    free(p.elems);
    return lost;
}

TEST(only_planes_that_cannot_be_read_are_lost)
{
    struct made_model m;
    struct mt_vfs full = recording;
    struct recorder *rec = calloc(1, sizeof(*rec));
    full.ctx = rec;
    rec->fail_at = 5;
    assert_int_equal(made_model_init(&m), 0);
    assert_true(is_lost(&m, "read:eio:1:0", NULL));
    assert_false(is_lost(&m, "read:delay:1", &full));
    made_model_finish(&m);
    free_records(rec);
}

static int fail_remove(void *ctx, const char *path)
{
    (void)ctx;
    (void)path;
    return -EIO;
}

TEST(a_prune_cut_short_leaves_no_torn_checkpoint)
{
    struct made_model m;
    struct mt_vfs vfs = mt_vfs_posix;
    struct mt_prune_policy keep_one = {.keep = 1};
    char path[200];
    vfs.remove_tree = fail_remove;
    assert_int_equal(made_model_init(&m), 0);
    assert_int_equal(save(&m, NULL, 2), 0);
    assert_int_equal(save(&m, NULL, 4), 0);
    assert_int_equal(mt_checkpoint_prune(&vfs, m.dir, &keep_one, NULL), -EIO);
    snprintf(path, sizeof(path), "%s/checkpoint-2", m.dir);
    assert_false(mt_path_exists(path));
    snprintf(path, sizeof(path), "%s/checkpoint-2.tmp", m.dir);
    assert_true(mt_path_exists(path));
    assert_int_equal(mt_checkpoint_prune(NULL, m.dir, &keep_one, NULL), 0); /* the next one clears up */
    assert_false(mt_path_exists(path));
    snprintf(path, sizeof(path), "%s/checkpoint-4", m.dir);
    assert_int_equal(mt_checkpoint_verify(path, NULL), 0);
    made_model_finish(&m);
}

TEST(what_is_loaded_is_what_was_saved)
{
    struct made_model a, b;
    char path[200];
    struct mt_train_state st;
    assert_int_equal(made_model_init(&a), 0);
    assert_int_equal(made_model_init(&b), 0);
    assert_int_equal(save(&a, NULL, 6), 0);
    made_fill(&b, 99);
    snprintf(path, sizeof(path), "%s/checkpoint-6", a.dir);
    assert_int_equal(mt_checkpoint_load(path, b.layout, b.planes, NULL), 0);
    for (size_t i = 0; i < a.layout->n_tensors; i++) {
        const struct mt_tensor *t = &a.layout->tensors[i];
        for (int k = 0; k < MT_N_PLANES; k++) {
            const struct mt_plane_desc *d = mt_plane_desc_of(a.planes, (enum mt_plane_kind)k);
            size_t size = d->block_bytes;
            if (!mt_plane(a.planes, t->unit, k) || d->role == MT_ROLE_GRADIENT)
                continue;
            assert_memory_equal((char *)mt_plane(a.planes, t->unit, k) + t->first * size,
                                (char *)mt_plane(b.planes, t->unit, k) + t->first * size, t->n * size);
        }
    }
    assert_int_equal(mt_checkpoint_read_state(path, &st, NULL), 0);
    assert_int_equal(st.step, 6);
    assert_true(st.best_loss == 1.5);
    mt_train_state_finish(&st);
    made_model_finish(&a);
    made_model_finish(&b);
}
