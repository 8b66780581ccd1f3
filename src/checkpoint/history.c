/* SPDX-License-Identifier: Apache-2.0 */
#include "checkpoint/history.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/fs.h"
#include "base/log.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/seal.h"

static const struct mt_lineage no_lineage;

static void name_checkpoint(char path[4096], const char *dir, uint64_t step, const char *suffix)
{
    mt_path_printf(path, 4096, "%s/checkpoint-%llu%s", dir, (unsigned long long)step, suffix);
}

bool mt_history_holds(const struct mt_history *h, const char *dir, uint64_t step, bool full)
{
    struct mt_checkpoint_id id;
    char path[4096];
    if (!h->has || h->step != step || (full && !h->full))
        return false;
    name_checkpoint(path, dir, step, "");
    int rc = mt_checkpoint_identify(path, &id, NULL);
    if (!rc) {
        bool same = id.full == h->full && !strcmp(id.sum, h->sum);
        mt_checkpoint_id_finish(&id);
        rc = same ? mt_checkpoint_check_whole(path, NULL) : -EBADMSG;
    }
    return !rc || !mt_checkpoint_is_damage(rc); /* nothing says that it is not what was written */
}

int mt_history_set_aside(const struct mt_history *h, const struct mt_vfs *vfs, const char *dir, uint64_t step,
                         char to[4096], struct mt_err *err)
{
    char path[4096], aside[4096], suffix[64];
    int n = 1;
    name_checkpoint(path, dir, step, "");
    do {
        if (n == 1)
            snprintf(suffix, sizeof(suffix), ".abandoned-%s", h ? h->lineage->run : "");
        else
            snprintf(suffix, sizeof(suffix), ".abandoned-%s-%d", h ? h->lineage->run : "", n);
        name_checkpoint(aside, dir, step, suffix);
        n++;
    } while (mt_path_exists(aside));
    int rc = vfs->rename(vfs->ctx, path, aside);
    if (rc)
        return mt_fail(err, MT_ERR_RUNTIME, rc, "cannot rename %s to %s: %s", path, aside, strerror(-rc));
    if (to)
        memcpy(to, aside, sizeof(aside));
    return 0;
}

/* Is it a checkpoint of another history? A copy under another step's name is not: it is never used as a checkpoint. */
static bool is_another_run(const struct mt_history *h, const char *dir, uint64_t step)
{
    struct mt_checkpoint_id id;
    char path[4096];
    name_checkpoint(path, dir, step, "");
    if (mt_checkpoint_identify(path, &id, NULL))
        return false;
    bool other = id.step == step && !mt_lineage_has(h->lineage, id.lineage.run, step);
    mt_checkpoint_id_finish(&id);
    return other;
}

/* Sets aside checkpoints of other histories, or all. */
static int set_others_aside(const struct mt_history *h, const struct mt_vfs *vfs, const char *dir, bool all,
                            struct mt_err *err)
{
    MT_FREED uint64_t *steps = NULL;
    size_t n, moved = 0;
    char path[4096], aside[4096];
    int rc = mt_checkpoint_list(dir, &steps, &n, err);
    for (size_t i = 0; i < n && !rc; i++) {
        if (!all && !is_another_run(h, dir, steps[i]))
            continue;
        name_checkpoint(path, dir, steps[i], "");
        rc = mt_history_set_aside(h, vfs, dir, steps[i], aside, err);
        if (!rc)
            mt_warn("%s is not of this run: renamed to %s", path, aside);
        moved += !rc;
    }
    return rc || !moved ? rc : vfs->sync_dir(vfs->ctx, dir);
}

int mt_history_set_all_aside(const struct mt_history *h, const struct mt_vfs *vfs, const char *dir, struct mt_err *err)
{
    mt_history_adopt(vfs, dir); /* else a later --resume would adopt them, and resume what this run sets aside */
    return set_others_aside(h, vfs ? vfs : &mt_vfs_posix, dir, true, err);
}

/* Is it "checkpoint-<step>.abandoned-<this run>" or the same with "-<number>", and a checkpoint of that step? */
static bool is_set_aside(const struct mt_history *h, const char *path, const char *name)
{
    static const char word[] = ".abandoned-";
    const char *dot = strchr(name, '.');
    struct mt_checkpoint_id id;
    uint64_t step;
    size_t n = strlen(h->lineage->run);
    if (!dot || strncmp(dot, word, sizeof(word) - 1) || !mt_checkpoint_parse_name(name, dot, &step))
        return false;
    const char *run = dot + sizeof(word) - 1;
    if (!n || strncmp(run, h->lineage->run, n) || (run[n] && run[n] != '-') || mt_checkpoint_identify(path, &id, NULL))
        return false;
    mt_checkpoint_id_finish(&id);
    return id.step == step;
}

static bool is_leftover(const struct mt_history *, const char *, const char *name)
{
    uint64_t step;
    return mt_checkpoint_parse_name(name, ".tmp", &step);
}

static int remove_those(const struct mt_history *h, const struct mt_vfs *vfs, const char *dir,
                        bool (*which)(const struct mt_history *, const char *, const char *), struct mt_err *err)
{
    MT_DIR_CLOSED DIR *d = opendir(dir);
    int rc = 0;
    for (struct dirent *e; d && !rc && (e = readdir(d));) {
        const char *path = MT_PATH("%s/%s", dir, e->d_name);
        if (!which(h, path, e->d_name))
            continue;
        rc = vfs->remove_tree(vfs->ctx, path);
        if (rc)
            mt_fail(err, MT_ERR_RUNTIME, rc, "cannot remove %s: %s", path, strerror(-rc));
    }
    return rc;
}

int mt_history_settle(struct mt_history *h, const struct mt_vfs *vfs, const char *dir, struct mt_err *err)
{
    if (h->settled)
        return 0;
    int rc = set_others_aside(h, vfs, dir, false, err);
    if (!rc && h->removes)
        rc = remove_those(h, vfs, dir, is_set_aside, err);
    h->settled = !rc;
    return rc;
}

/* The syncs that a kill between the last write and the rename left undone: the other files have been synced. */
static int make_durable(const struct mt_vfs *vfs, const char *dir)
{
    MT_FD_CLOSED int fd = open(MT_PATH("%s/megatrain/seal.json", dir), O_RDONLY | O_CLOEXEC);
    int rc = fd < 0 ? -errno : vfs->sync(vfs->ctx, fd);
    return rc ?: vfs->sync_dir(vfs->ctx, MT_PATH("%s/megatrain", dir)) ?: vfs->sync_dir(vfs->ctx, dir);
}

void mt_history_adopt(const struct mt_vfs *vfs, const char *dir)
{
    MT_DIR_CLOSED DIR *d = opendir(dir);
    char tmp[4096], path[4096];
    vfs = vfs ? vfs : &mt_vfs_posix;
    for (struct dirent *e; d && (e = readdir(d));) {
        uint64_t step;
        if (!mt_checkpoint_parse_name(e->d_name, ".tmp", &step))
            continue;
        name_checkpoint(tmp, dir, step, ".tmp");
        name_checkpoint(path, dir, step, "");
        if (mt_path_exists(path) || mt_checkpoint_verify(tmp, NULL) || make_durable(vfs, tmp))
            continue;
        if (!vfs->rename(vfs->ctx, tmp, path) && !vfs->sync_dir(vfs->ctx, dir))
            mt_warn("%s was complete, but not yet renamed: renamed now", path);
    }
}

/* --- pruning -------------------------------------------------------------------------------------- */

/* Is it of this lineage and complete? *full: it has training state. */
static bool counts(const struct mt_prune_policy *p, const char *dir, uint64_t step, bool *full)
{
    struct mt_checkpoint_id id;
    char path[4096];
    name_checkpoint(path, dir, step, "");
    if (mt_checkpoint_identify(path, &id, NULL))
        return false;
    bool ours = id.step == step && mt_lineage_has(p->lineage ? p->lineage : &no_lineage, id.lineage.run, step);
    *full = id.full;
    mt_checkpoint_id_finish(&id);
    return ours && !mt_checkpoint_check_whole(path, NULL);
}

static bool keeps(const struct mt_prune_policy *p, uint64_t step, size_t newer)
{
    return newer < p->keep || (p->keep_every && step % p->keep_every == 0) ||
           (p->keep_best && step == p->best_step);
}

/* Renames first, so that a kill cannot leave an incomplete folder with a checkpoint's name. */
static int remove_checkpoint(const struct mt_vfs *vfs, const char *dir, uint64_t step, struct mt_err *err)
{
    char path[4096], tmp[4096];
    name_checkpoint(path, dir, step, "");
    name_checkpoint(tmp, dir, step, ".tmp");
    int rc = vfs->rename(vfs->ctx, path, tmp) ?: vfs->remove_tree(vfs->ctx, tmp);
    return rc ? mt_fail(err, MT_ERR_RUNTIME, rc, "cannot remove %s: %s", path, strerror(-rc)) : 0;
}

int mt_checkpoint_prune(const struct mt_vfs *vfs, const char *dir, const struct mt_prune_policy *p,
                        struct mt_err *err)
{
    MT_FREED uint64_t *steps = NULL;
    size_t n, newer[2] = {0, 0};
    vfs = vfs ? vfs : &mt_vfs_posix;
    int rc = mt_checkpoint_list(dir, &steps, &n, err)
          ?: remove_those(NULL, vfs, dir, is_leftover, err);
    for (size_t i = 0; i < n && !rc; i++) {
        bool full;
        if (counts(p, dir, steps[i], &full) && !keeps(p, steps[i], newer[full]++))
            rc = remove_checkpoint(vfs, dir, steps[i], err);
    }
    return rc;
}

void mt_checkpoint_link_best(const struct mt_vfs *vfs, const char *dir, uint64_t *best)
{
    char path[4096], link[4096], target[64];
    struct stat st;
    vfs = vfs ? vfs : &mt_vfs_posix;
    name_checkpoint(path, dir, *best, "");
    mt_path_printf(link, sizeof(link), "%s/best", dir);
    snprintf(target, sizeof(target), "checkpoint-%llu", (unsigned long long)*best);
    if (*best && !mt_path_exists(path))
        *best = 0;
    if (*best) {
        int rc = vfs->link(vfs->ctx, target, link);
        rc = rc ? rc : vfs->sync_dir(vfs->ctx, dir);
        if (rc)
            mt_warn("cannot link %s to %s: %s", link, target, strerror(-rc));
    } else if (!lstat(link, &st) && S_ISLNK(st.st_mode) && unlink(link)) {
        mt_warn("cannot remove %s: %s", link, strerror(errno));
    }
}
