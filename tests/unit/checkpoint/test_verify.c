/* SPDX-License-Identifier: Apache-2.0 */
/* A byte is turned, wherever it may be: verifying names the file and the tensor. */
#include <fcntl.h>
#include <ftw.h>
#include <sys/stat.h>

#include "base/json.h"
#include "base/mem.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/manifest.h"
#include "hf/safetensors.h"
#include "made_model.h"
#include "test.h"

static struct made_model model;
static char dir[128];

static int set_up(void **state)
{
    struct mt_train_state st = {.step = 3, .updates = 3, .best_loss = 1.25};
    struct mt_checkpoint_save s;
    (void)state;
    if (made_model_init(&model))
        return -1;
    st.config = strdup("[train]\nsteps = 4\n");
    s = (struct mt_checkpoint_save){.dir = model.dir, .model_dir = model.model_dir, .layout = model.layout,
                                    .planes = model.planes, .state = &st, .full = true, .shard_bytes = 2000};
    int rc = mt_checkpoint_save(&s, NULL);
    mt_train_state_finish(&st);
    snprintf(dir, sizeof(dir), "%s/checkpoint-3", model.dir);
    return rc;
}

static int tear_down(void **)
{
    made_model_finish(&model);
    return 0;
}

/* Turns a bit of a byte, verifies, turns it back. The message must hold all words. */
static void turn(const char *path, off_t at, int bit, const char *words[3])
{
    unsigned char c = 0, bad;
    struct mt_err err = {0};
    int fd = open(path, O_RDWR | O_CLOEXEC);
    assert_true(fd >= 0 && pread(fd, &c, 1, at) == 1);
    bad = c ^ (unsigned char)(1 << bit);
    assert_int_equal(pwrite(fd, &bad, 1, at), 1);
    int rc = mt_checkpoint_verify(dir, &err);
    assert_int_equal(pwrite(fd, &c, 1, at), 1);
    close(fd);
    if (!rc)
        fail_msg("bit %d of byte %ld of %s was not missed", bit, (long)at, path);
    assert_int_equal(err.kind, MT_ERR_CHECKPOINT);
    for (int i = 0; i < 3 && words[i]; i++)
        if (!strstr(err.msg, words[i]))
            fail_msg("byte %ld of %s: \"%s\" does not say \"%s\"", (long)at, path, err.msg, words[i]);
}

static off_t size_of(const char *path)
{
    struct stat st;
    assert_int_equal(stat(path, &st), 0);
    return st.st_size;
}

static void check_tensors(const char *path)
{
    struct mt_st_model m;
    assert_int_equal(mt_st_open_file(&m, path, NULL), 0);
    uint64_t header = UINT64_MAX;
    for (size_t i = 0; i < m.n_tensors; i++) {
        const struct mt_st_tensor *t = &m.tensors[i];
        char name[200];
        snprintf(name, sizeof(name), "tensor %s", t->name);
        const char *words[3] = {path, name};
        turn(path, (off_t)t->offset, 0, words);
        turn(path, (off_t)(t->offset + t->n_bytes / 2), 3, words);
        turn(path, (off_t)(t->offset + t->n_bytes - 1), 7, words);
        header = MT_MIN(header, t->offset);
    }
    const char *words[3] = {path};
    for (uint64_t at = 0; at < header; at += at < 8 ? 1 : 13)
        turn(path, (off_t)at, (int)(at % 8), words);
    mt_st_close(&m);
}

static int n_files;
static int visit(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
    const char *dot = strrchr(path, '.');
    (void)ftw;
    if (type != FTW_F)
        return 0;
    n_files++;
    if (dot && !strcmp(dot, ".safetensors")) {
        check_tensors(path);
    } else {
        const char *words[3] = {path};
        for (off_t at = 0; at < st->st_size; at += st->st_size > 500 ? 37 : 1)
            turn(path, at, (int)(at % 7), words);
    }
    return 0;
}

TEST(a_turned_bit_anywhere_names_its_file_and_tensor)
{
    n_files = 0;
    assert_int_equal(mt_checkpoint_verify(dir, NULL), 0);
    assert_int_equal(nftw(dir, visit, 8, FTW_PHYS), 0);
    assert_true(n_files >= 8);
    assert_int_equal(mt_checkpoint_verify(dir, NULL), 0); /* all is as it was */
}

TEST(several_damaged_tensors_are_named)
{
    char path[200];
    struct mt_st_model m;
    struct mt_err err = {0};
    snprintf(path, sizeof(path), "%s/megatrain/state-00001.safetensors", dir);
    assert_int_equal(mt_st_open_file(&m, path, NULL), 0);
    assert_true(m.n_tensors > 5);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    unsigned char c;
    for (int pass = 0; pass < 2; pass++) {
        for (size_t i = 0; i < 5; i++) {
            assert_int_equal(pread(fd, &c, 1, (off_t)m.tensors[i].offset), 1);
            c ^= 1;
            assert_int_equal(pwrite(fd, &c, 1, (off_t)m.tensors[i].offset), 1);
        }
        assert_int_equal(mt_checkpoint_verify(dir, &err), pass ? 0 : -EBADMSG);
    }
    close(fd);
    assert_non_null(strstr(err.msg, m.tensors[0].name));
    assert_non_null(strstr(err.msg, m.tensors[2].name));
    assert_non_null(strstr(err.msg, " and 2 more"));
    mt_st_close(&m);
}

/* Loading looks for itself: the file may have changed since it was verified. */
TEST(a_turned_bit_is_not_loaded)
{
    char path[200];
    struct mt_st_model m;
    struct mt_err err = {0};
    snprintf(path, sizeof(path), "%s/megatrain/state-00001.safetensors", dir);
    assert_int_equal(mt_st_open_file(&m, path, NULL), 0);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    unsigned char c;
    for (size_t i = 0; i < 2 * m.n_tensors; i++) { /* there and back */
        const struct mt_st_tensor *t = &m.tensors[i / 2];
        off_t at = (off_t)(t->offset + t->n_bytes / 2);
        assert_int_equal(pread(fd, &c, 1, at), 1);
        c ^= 16;
        assert_int_equal(pwrite(fd, &c, 1, at), 1);
        assert_int_equal(mt_checkpoint_load(dir, model.layout, model.planes, &err), i % 2 ? 0 : -EBADMSG);
        assert_non_null(strstr(err.msg, t->name));
    }
    close(fd);
    mt_st_close(&m);
}

static int cut(const char *path, off_t by, struct mt_err *err)
{
    MT_FREED char *text = NULL;
    size_t len = 0;
    assert_int_equal(mt_read_file(path, &text, &len, NULL), 0);
    assert_int_equal(truncate(path, (off_t)len + by), 0);
    int rc = mt_checkpoint_verify(dir, err);
    FILE *f = fopen(path, "we"); /* back, without the syncs of mt_write_file() */
    assert_true(f && fwrite(text, 1, len, f) == len && !fclose(f));
    return rc;
}

TEST(files_cut_grown_or_gone_are_told)
{
    static const char *const names[] = {"megatrain/state-00002.safetensors", "megatrain/state.json",
                                        "megatrain/seal.json", "config.json", "trainer_state.json"};
    for (size_t i = 0; i < MT_ARRAY_LEN(names); i++) {
        char path[200], away[210];
        struct mt_err err = {0};
        snprintf(path, sizeof(path), "%s/%s", dir, names[i]);
        snprintf(away, sizeof(away), "%s.away", path);
        assert_int_equal(cut(path, -1, &err), -EBADMSG);
        assert_non_null(strstr(err.msg, path));
        assert_int_equal(cut(path, 1, &err), -EBADMSG);
        assert_non_null(strstr(err.msg, path));
        assert_int_equal(cut(path, -size_of(path), &err), -EBADMSG);
        assert_non_null(strstr(err.msg, path));
        assert_int_equal(rename(path, away), 0);
        assert_true(mt_checkpoint_verify(dir, &err) < 0);
        assert_int_equal(err.kind, MT_ERR_CHECKPOINT);
        assert_non_null(strstr(err.msg, names[i]));
        assert_int_equal(rename(away, path), 0);
        assert_int_equal(mt_checkpoint_verify(dir, &err), 0);
    }
}

/* Verifies with a list of files, sealed as it should be, that lacks `name`, and has `more`, if it is not NULL. */
static int verify_list_with(const char *name, const char *more, struct mt_err *err)
{
    char path[2][200], *was[2], *text;
    size_t len[2];
    uint64_t sum, size;
    cJSON *o = NULL;
    snprintf(path[0], sizeof(path[0]), "%s/megatrain/state.json", dir);
    snprintf(path[1], sizeof(path[1]), "%s/megatrain/seal.json", dir);
    for (int i = 0; i < 2; i++)
        assert_int_equal(mt_read_file(path[i], &was[i], &len[i], NULL), 0);
    assert_int_equal(mt_json_read_file(&o, path[0], MT_ERR_CHECKPOINT, NULL), 0);
    assert_non_null(cJSON_GetObjectItem(cJSON_GetObjectItem(o, "files"), name));
    cJSON *entry = cJSON_DetachItemFromObject(cJSON_GetObjectItem(o, "files"), name);
    if (more)
        cJSON_AddItemToObject(cJSON_GetObjectItem(o, "files"), more, entry);
    else
        cJSON_Delete(entry);
    text = cJSON_Print(o);
    assert_int_equal(mt_write_file(path[0], text, strlen(text), NULL), 0);
    cJSON_Delete(o);
    cJSON_free(text);
    assert_int_equal(mt_sum_file(path[0], 0, UINT64_MAX, &sum, &size, NULL), 0);
    text = mt_seal_text("state.json", sum);
    assert_int_equal(mt_write_file(path[1], text, strlen(text), NULL), 0);
    free(text);
    int rc = mt_checkpoint_verify(dir, err);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(mt_write_file(path[i], was[i], len[i], NULL), 0);
        free(was[i]);
    }
    return rc;
}

/* A file that is not listed is not looked at. */
TEST(a_list_that_lacks_a_file_is_not_complete)
{
    static const char *const names[] = {"config.json", "model.safetensors.index.json", "megatrain/state-00000.safetensors",
                                        "megatrain/state-00001.safetensors"};
    for (size_t i = 0; i < MT_ARRAY_LEN(names); i++) {
        struct mt_err err = {0};
        if (verify_list_with(names[i], NULL, &err) != -EBADMSG || !strstr(err.msg, "list of files is not complete"))
            fail_msg("without %s: %s", names[i], err.msg);
    }
    assert_int_equal(mt_checkpoint_verify(dir, NULL), 0);
}

/* It may be a stranger's: what it names is read. */
TEST(a_list_names_files_of_the_folder_alone)
{
    static const char *const names[] = {"../../../dev/zero", "/etc/passwd", "megatrain/../../x", "megatrain/", "..", "a/b"};
    for (size_t i = 0; i < MT_ARRAY_LEN(names); i++) {
        struct mt_err err = {0};
        if (verify_list_with("trainer_state.json", names[i], &err) != -EBADMSG || !strstr(err.msg, "outside the folder"))
            fail_msg("%s: %s", names[i], err.msg);
    }
}

TEST(what_is_not_a_file_is_not_read)
{
    char path[200], aside[200];
    uint64_t sum, size;
    struct mt_err err = {0};
    snprintf(path, sizeof(path), "%s/config.json", dir);
    snprintf(aside, sizeof(aside), "%s/aside", dir);
    assert_int_equal(rename(path, aside), 0);
    assert_int_equal(mkfifo(path, 0600), 0);
    assert_int_equal(mt_sum_file(path, 0, UINT64_MAX, &sum, &size, &err), -EINVAL); /* and is not waited for */
    assert_non_null(strstr(err.msg, path));
    assert_true(mt_checkpoint_verify(dir, NULL));
    assert_int_equal(unlink(path), 0);
    assert_int_equal(symlink("/dev/zero", path), 0);
    assert_true(mt_checkpoint_verify(dir, NULL));
    assert_int_equal(rename(aside, path), 0);
    assert_int_equal(mt_checkpoint_verify(dir, NULL), 0);
}

TEST(checkpoints_are_listed_newest_first)
{
    static const char *const names[] = {"checkpoint-10", "checkpoint-9", "checkpoint-100.tmp", "checkpoint-",
                                        "checkpoint-x", "checkpoint-007", "checkpoint-18446744073709551616", "checkpoint--5", "checkpoint-+7", "checkpoint- 8", "other"};
    char path[300];
    MT_FREED uint64_t *steps = NULL;
    size_t n = 99;
    assert_int_equal(mt_checkpoint_list("/no/such/folder", &steps, &n, NULL), 0);
    assert_int_equal(n, 0);
    for (size_t i = 0; i < MT_ARRAY_LEN(names); i++) {
        snprintf(path, sizeof(path), "%s/%s", model.dir, names[i]);
        assert_int_equal(mt_mkdir_p(path, NULL), 0);
    }
    assert_int_equal(mt_checkpoint_list(model.dir, &steps, &n, NULL), 0);
    assert_int_equal(n, 3);
    assert_true(steps[0] == 10 && steps[1] == 9 && steps[2] == 3);
}

TEST_GROUP(set_up, tear_down)
