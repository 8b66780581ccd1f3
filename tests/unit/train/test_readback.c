/* SPDX-License-Identifier: Apache-2.0 */
/* A new checkpoint is read back while the run goes on; if the drive has lost any of it, older checkpoints stay. */
#include <stdio.h>
#include <unistd.h>

#include "../checkpoint/made_model.h"
#include "base/mem.h"
#include "checkpoint/checkpoint.h"
#include "test.h"
#include "train/readback.h"

static struct made_model model;

static int set_up(void **state)
{
    MT_CLOSED_BY(mt_train_state_finish) struct mt_train_state st = {.step = 3, .updates = 3, .best_loss = 1.25};
    (void)state;
    if (made_model_init(&model))
        return -1;
    st.config = strdup("[train]\nsteps = 4\n");
    struct mt_checkpoint_save s = {.dir = model.dir, .model_dir = model.model_dir, .layout = model.layout,
                                   .planes = model.planes, .state = &st, .full = true, .shard_bytes = 2000};
    return mt_checkpoint_save(&s, NULL);
}

static int tear_down(void **)
{
    made_model_finish(&model);
    return 0;
}

static enum mt_readback_state read_back(const char *path, struct mt_err *err)
{
    mt_readback *r = NULL;
    enum mt_readback_state state;
    assert_int_equal(mt_readback_start(&r, path, NULL, NULL), 0);
    while ((state = mt_readback_poll(r, err)) == MT_READBACK_RUNS)
        usleep(1000);
    mt_readback_drop(&r);
    assert_null(r);
    return state;
}

TEST(what_was_lost_is_told)
{
    char dir[256], path[300];
    struct mt_err err = {0};
    snprintf(dir, sizeof(dir), "%s/checkpoint-3", model.dir);
    assert_int_equal(read_back(dir, &err), MT_READBACK_GOOD);
    snprintf(path, sizeof(path), "%s/megatrain/state-00001.safetensors", dir);
    FILE *f = fopen(path, "r+b");
    assert_non_null(f);
    assert_int_equal(fseek(f, -40, SEEK_END), 0);
    int c = fgetc(f);
    assert_int_equal(fseek(f, -40, SEEK_END), 0);
    fputc(c ^ 4, f);
    fclose(f);
    assert_int_equal(read_back(dir, &err), MT_READBACK_BAD);
    assert_non_null(strstr(err.msg, "state-00001"));
}

/* A run that ends does not wait for it. */
TEST(one_that_is_dropped_ends_by_itself)
{
    char dir[256];
    snprintf(dir, sizeof(dir), "%s/checkpoint-3", model.dir);
    for (int i = 0; i < 20; i++) {
        mt_readback *r = NULL;
        assert_int_equal(mt_readback_start(&r, dir, dir, NULL), 0);
        usleep(i * 200);
        mt_readback_drop(&r);
    }
    usleep(300000); /* for leak checkers */
}

TEST_GROUP(set_up, tear_down)
