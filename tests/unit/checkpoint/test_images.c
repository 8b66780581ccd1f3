/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a power cut may leave, drawn at random from the record of a save and a prune: of what was not yet synced any part
 * reached the drive, in whatever order: sectors of a file, its size before its data, names, renames, removals.
 */
#include <sys/stat.h>

#include "recorder.h"
#include "base/mem.h"
#include "test.h"

enum { SECTOR = 512 };

struct image {
    const struct recorder *rec;
    size_t n; /* operations until the cut */
    uint64_t seed, drawn;
    char parent[256], cut[256];
};

static double draw(struct image *im)
{
    return mt_philox_uniform(im->seed, im->n, im->drawn++);
}

static bool chance(struct image *im)
{
    return draw(im) < 0.5;
}

/* Was the folder synced after operation i? Else what it has of it is drawn. */
static bool name_is_there(struct image *im, size_t i, const char *dir)
{
    for (size_t k = i + 1; k < im->n; k++)
        if (im->rec->r[k].op == SYNC_DIR && !strcmp(im->rec->r[k].path, dir))
            return true;
    return chance(im);
}

static void folder_of(char dir[256], const char *path)
{
    snprintf(dir, 256, "%s", path);
    *strrchr(dir, '/') = 0;
}

/* Of what was written behind the last sync some sectors are there, and the size is anything up to all of it. */
static void tear(struct image *im, char *data, size_t durable, size_t *len)
{
    for (size_t at = durable / SECTOR * SECTOR; at < *len; at += SECTOR) {
        size_t from = MT_MAX(at, durable), to = MT_MIN(at + SECTOR, *len);
        if (chance(im))
            memset(data + from, 0, to - from);
    }
    *len = durable + (size_t)(draw(im) * (double)(*len - durable + 1));
}

static void put_file(struct image *im, size_t created, const char *to)
{
    MT_STR_FREED struct mt_str data = {0};
    size_t durable = 0;
    int fd = im->rec->r[created].fd;
    mt_str_append(&data, "", 0);
    for (size_t k = created + 1; k < im->n; k++) {
        const struct record *r = &im->rec->r[k];
        if (r->fd != fd || r->op == CREATE)
            continue;
        if (r->op == WRITE)
            mt_str_append(&data, r->data, r->len);
        if (r->op == SYNC)
            durable = data.len;
        if (r->op == CLOSE)
            break;
    }
    size_t len = data.len;
    tear(im, data.p, durable, &len);
    FILE *f = fopen(to, "w");
    assert_non_null(f);
    assert_int_equal(fwrite(data.p, 1, len, f), len);
    fclose(f);
}

/* What there is of a folder that the save makes, below the name that it has. */
static void put_folder(struct image *im, const char *from, const char *to)
{
    assert_int_equal(mkdir(to, 0777), 0);
    for (size_t i = 0; i < im->n; i++) {
        const struct record *r = &im->rec->r[i];
        char dir[256], path[600];
        if (r->op != CREATE && r->op != MKDIR)
            continue;
        folder_of(dir, r->path);
        if (strcmp(dir, from) || !name_is_there(im, i, dir))
            continue;
        snprintf(path, sizeof(path), "%s/%s", to, strrchr(r->path, '/') + 1);
        if (r->op == MKDIR)
            put_folder(im, r->path, path);
        else
            put_file(im, i, path);
    }
}

/* The older checkpoint as far as it is not pruned: its rename and each of its files, drawn one by one. */
static void put_older(struct image *im, const char *old, size_t renamed)
{
    char cmd[900], to[300];
    bool other = renamed < im->n && chance(im), removed = false;
    for (size_t i = renamed; i < im->n; i++)
        removed |= im->rec->r[i].op == REMOVE;
    snprintf(to, sizeof(to), "%s/checkpoint-2%s", im->cut, other ? ".tmp" : "");
    snprintf(cmd, sizeof(cmd), "cp -r %s/checkpoint-2 %s", old, to);
    assert_int_equal(system(cmd), 0);
    static const char *const files[] = {"config.json", "model.safetensors.index.json", "trainer_state.json",
                                        "megatrain/state.json", "megatrain/seal.json",
                                        "megatrain/state-00001.safetensors"};
    for (size_t i = 0; removed && i < MT_ARRAY_LEN(files); i++) {
        snprintf(cmd, sizeof(cmd), "%s/%s", to, files[i]);
        if (chance(im))
            unlink(cmd);
    }
}

static size_t find_rename(const struct recorder *rec, const char *name)
{
    size_t i = 0, n = strlen(name);
    while (i < rec->n && (rec->r[i].op != RENAME || strcmp(rec->r[i].path + strlen(rec->r[i].path) - n, name)))
        i++;
    assert_true(i < rec->n);
    return i;
}

/* Lays one image out; the newest that can be resumed is whole, and not older than what was durable. */
static void check_image(struct image *im, const char *old)
{
    char tmp[300], to[300], *found = NULL;
    struct mt_err err = {0};
    size_t renamed = find_rename(im->rec, "checkpoint-4.tmp"), parent = find(im->rec, SYNC_DIR, renamed);
    snprintf(tmp, sizeof(tmp), "%.200s/checkpoint-4.tmp", im->parent);
    assert_int_equal(mt_remove_tree(im->cut, NULL), 0);
    assert_int_equal(mkdir(im->cut, 0777), 0);
    bool named = renamed < im->n && name_is_there(im, renamed, im->parent);
    snprintf(to, sizeof(to), "%s/checkpoint-4%s", im->cut, named ? "" : ".tmp");
    size_t made = 0;
    while (made < im->n && (im->rec->r[made].op != MKDIR || strcmp(im->rec->r[made].path, tmp)))
        made++;
    if (named || (made < im->n && name_is_there(im, made, im->parent)))
        put_folder(im, tmp, to);
    put_older(im, old, find_rename(im->rec, "checkpoint-2"));
    mt_history_adopt(NULL, im->cut);
    if (mt_checkpoint_find_newest(im->cut, false, &found, &err) || !found)
        fail_msg("cut after %zu, draw %llu: nothing is found: %s", im->n, (unsigned long long)im->seed, err.msg);
    if (im->n > parent && !strstr(found, "checkpoint-4"))
        fail_msg("cut after %zu, draw %llu: %s is older than what was durable", im->n, (unsigned long long)im->seed, found);
    free(found);
}

TEST(every_image_has_a_checkpoint_that_was_durable)
{
    struct made_model m, older;
    struct mt_vfs vfs;
    struct recorder *rec = calloc(1, sizeof(*rec));
    struct image im = {.rec = rec};
    char old[100];
    size_t n = 0, most = getenv("MEGATRAIN_TEST_FULL") ? 10000 : 300;
    record_two_saves(&m, rec, &vfs);
    made_fill(&m, 1);
    older = m;
    snprintf(older.dir, sizeof(older.dir), "%.50s/old", m.dir);
    snprintf(old, sizeof(old), "%s", older.dir);
    assert_int_equal(mt_mkdir_p(old, NULL), 0);
    assert_int_equal(save(&older, NULL, 2), 0);
    snprintf(im.parent, sizeof(im.parent), "%s", m.dir);
    snprintf(im.cut, sizeof(im.cut), "%s/cut", m.dir);
    size_t renamed = find_rename(rec, "checkpoint-4.tmp");
    for (; n < most; n++) {
        im.seed = n + 1;
        im.drawn = 0;
        im.n = 1 + n * 31 % rec->n; /* every other one is near the end, where more can go wrong */
        if (n % 2)
            im.n = renamed + n / 2 % (rec->n - renamed + 1);
        check_image(&im, old);
    }
    print_message("%zu images of %zu operations\n", n, rec->n);
    made_model_finish(&m);
    free_records(rec);
}
