/* SPDX-License-Identifier: Apache-2.0 */
#include <inttypes.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/fs.h"
#include "base/mem.h"
#include "checkpoint/manifest.h"
#include "checkpoint/output.h"
#include "cli.h"
#include "train/watch.h"

static uint64_t newest_step(const char *dir)
{
    MT_FREED uint64_t *steps = NULL;
    size_t n = 0;
    return !mt_checkpoint_list(dir, &steps, &n, NULL) && n ? steps[0] : 0;
}

/* Waits until no run has the folder; false: longer than that. */
static bool wait_for_end(const char *dir, double seconds)
{
    int64_t begin = mt_now_ns();
    while (mt_output_in_use(dir)) {
        if (seconds > 0 && mt_seconds_since(begin) > seconds)
            return false;
        nanosleep(&(struct timespec){0, 100000000}, NULL);
    }
    return true;
}

static int say_end(const char *dir, bool seen)
{
    uint64_t step = newest_step(dir);
    printf("%s: %s; ", dir, seen ? "the run has stopped" : "the run had ended before it saw the request");
    if (!step) {
        printf("it has saved nothing\n");
        return EXIT_RUNTIME;
    }
    printf("newest checkpoint: checkpoint-%" PRIu64 "; megatrain run CONFIG --resume goes on from there\n", step);
    return 0;
}

int cli_cmd_stop(struct cli *cli, const struct cli_args *args, struct mt_err *err)
{
    const char *dir = args->operands[0];
    double limit = (double)cli_whole(args, "wait", 0);
    const char *path = MT_PATH("%s/%s", dir, MT_REQUEST_STOP);
    if (!mt_output_in_use(dir))
        return mt_fail(err, MT_ERR_USAGE, -ENOENT, "%s: no run of this machine writes to this folder (checkpoint.dir; of several "
                       "hosts the first one's)", dir);
    int rc = mt_write_file(path, "", 0, err);
    if (rc)
        return rc;
    if (!cli->quiet)
        fprintf(stderr, "%s: asked to stop and to save; waiting\n", dir);
    if (!wait_for_end(dir, limit))
        return mt_fail(err, MT_ERR_RUNTIME, -ETIMEDOUT, "%s: the run still goes on after %.0f s; it is saving, or waits for a drive",
                       dir, limit);
    return say_end(dir, unlink(path) != 0);
}
