/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A save through a recording vfs. */
#include <stdio.h>

#include "base/strbuf.h"
#include "checkpoint/checkpoint.h"
#include "made_model.h"
#include "test.h"

enum op { CREATE, WRITE, SYNC, CLOSE, MKDIR, SYNC_DIR, RENAME, REMOVE, LINK };

struct record {
    enum op op;
    int fd;
    char path[256], to[256];
    char *data;
    size_t len;
};

struct recorder {
    struct record r[4096];
    size_t n;
    long long fail_at; /* write that fails with -ENOSPC, from 1; 0: none */
    long long writes;
};

static struct record *add(void *ctx, enum op op, int fd, const char *path)
{
    struct recorder *rec = ctx;
    struct record *r = &rec->r[rec->n++];
    assert_true(rec->n < 4096);
    *r = (struct record){.op = op, .fd = fd};
    snprintf(r->path, sizeof(r->path), "%s", path ? path : "");
    return r;
}

static int rec_create(void *ctx, const char *path)
{
    int fd = mt_vfs_posix.create(NULL, path);
    add(ctx, CREATE, fd, path);
    return fd;
}

static int rec_write(void *ctx, int fd, const void *data, size_t len)
{
    struct recorder *rec = ctx;
    if (++rec->writes == rec->fail_at)
        return -ENOSPC;
    struct record *r = add(ctx, WRITE, fd, NULL);
    r->data = malloc(len + 1);
    r->len = len;
    memcpy(r->data, data, len);
    return mt_vfs_posix.write(NULL, fd, data, len);
}

static int rec_hole(void *ctx, int fd, size_t len)
{
    char *zeros = calloc(len, 1);
    int rc = rec_write(ctx, fd, zeros, len);
    free(zeros);
    return rc;
}

static int rec_sync(void *ctx, int fd)
{
    add(ctx, SYNC, fd, NULL);
    return 0;
}

static int rec_close(void *ctx, int fd)
{
    add(ctx, CLOSE, fd, NULL);
    return mt_vfs_posix.close(NULL, fd);
}

static int rec_make_dir(void *ctx, const char *path)
{
    add(ctx, MKDIR, -1, path);
    return mt_vfs_posix.make_dir(NULL, path);
}

static int rec_sync_dir(void *ctx, const char *path)
{
    add(ctx, SYNC_DIR, -1, path);
    return 0;
}

static int rec_rename(void *ctx, const char *from, const char *to)
{
    snprintf(add(ctx, RENAME, -1, from)->to, 256, "%s", to);
    return mt_vfs_posix.rename(NULL, from, to);
}

static int rec_remove(void *ctx, const char *path)
{
    add(ctx, REMOVE, -1, path);
    return mt_vfs_posix.remove_tree(NULL, path);
}

static int rec_link(void *ctx, const char *target, const char *path)
{
    snprintf(add(ctx, LINK, -1, path)->to, 256, "%s", target);
    return mt_vfs_posix.link(NULL, target, path);
}

static const struct mt_vfs recording = {.create = rec_create, .write = rec_write, .hole = rec_hole,
                                        .sync = rec_sync, .close = rec_close, .make_dir = rec_make_dir,
                                        .sync_dir = rec_sync_dir, .rename = rec_rename,
                                        .remove_tree = rec_remove, .link = rec_link};

static int save(const struct made_model *m, const struct mt_vfs *vfs, uint64_t step)
{
    struct mt_train_state st = {.step = step, .updates = step, .best_loss = 1.5};
    st.config = strdup("[train]\nsteps = 4\n");
    struct mt_checkpoint_save s = {.vfs = vfs, .dir = m->dir, .model_dir = m->model_dir,
                                   .layout = m->layout, .planes = m->planes, .state = &st, .full = true,
                                   .shard_bytes = 2000};
    int rc = mt_checkpoint_save(&s, NULL);
    mt_train_state_finish(&st);
    return rc;
}

static size_t find(const struct recorder *rec, enum op op, size_t from)
{
    while (from < rec->n && rec->r[from].op != op)
        from++;
    return from;
}

static void record_two_saves(struct made_model *m, struct recorder *rec, struct mt_vfs *vfs)
{
    struct mt_prune_policy keep_one = {.keep = 1};
    assert_int_equal(made_model_init(m), 0);
    assert_int_equal(save(m, NULL, 2), 0);
    made_fill(m, 9);
    *vfs = recording;
    vfs->ctx = rec;
    assert_int_equal(save(m, vfs, 4), 0);
    assert_int_equal(mt_checkpoint_prune(vfs, m->dir, &keep_one, NULL), 0);
}

static void free_records(struct recorder *rec)
{
    for (size_t i = 0; i < rec->n; i++)
        free(rec->r[i].data);
    free(rec);
}
