/* SPDX-License-Identifier: Apache-2.0 */
#include "train/memory.h"

#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "base/log.h"
#include "base/mem.h"
#include "checkpoint/checkpoint.h"
#include "hw/hw.h"
#include "hw/wear.h"

#define FILE_LIMIT "ulimit -f"

static void add_limit(struct mt_memory *m, const char *tier, const char *source, uint64_t wanted,
                      uint64_t available)
{
    if (available != UINT64_MAX && m->n_limits < MT_MEMORY_MAX_LIMITS)
        m->limits[m->n_limits++] = (struct mt_memory_limit){tier, source, wanted, available};
}

/* Scratch on the drives. With several drives, how the file is striped decides: that is checked when it is allocated. */
static void add_scratch_limit(const struct mt_setup *s, struct mt_memory *m)
{
    uint64_t have, least = UINT64_MAX;
    m->disk_bytes += s->choice.disk_bytes;
    if (s->in->cfg->cluster.drives.n && s->cluster)
        add_limit(m, "nvme", "cluster.drives", s->choice.disk_bytes, s->request.drive_room[s->request.placement.host]);
    for (int i = 0; i < s->in->cfg->memory.nvme_paths.n; i++)
        if (!mt_hw_disk_free(s->in->cfg->memory.nvme_paths.items[i], &have, NULL))
            least = MT_MIN(least, have);
    if (s->in->cfg->memory.nvme_paths.n == 1)
        add_limit(m, "nvme", s->in->cfg->memory.nvme_paths.items[0], s->choice.disk_bytes, least);
}

/* A checkpoint of each learner, plus the part of the scratch that is on the same file system. */
static void add_checkpoint_row(const struct mt_setup *s, const struct mt_plane_set_params *pp, uint64_t scratch,
                               struct mt_memory *m)
{
    const struct mt_cfg_list *dirs = &s->in->cfg->memory.nvme_paths;
    uint64_t have, beside = 0;
    uint64_t checkpoint = 0;
    for (size_t i = 0; i < s->n_learners; i++)
        checkpoint += mt_checkpoint_bytes(mt_setup_layout_of(s, i), pp->desc,
                                          s->in[i].cfg->checkpoint.save == MT_SAVE_FULL, mt_setup_names_base(s, i));
    const struct mt_lay_out o = {s->in->cfg, &s->in->hf, NULL, &s->in->resumed};
    const struct mt_plan_blocks blocks = {o, s->choice.layout, s->in->total_steps, NULL, NULL};
    uint64_t overlays = mt_plan_overlay_bytes(&blocks);
    if (mt_hw_disk_free(s->in->cfg->checkpoint.dir, &have, NULL))
        return;
    for (int i = 0; i < dirs->n; i++)
        if (mt_hw_same_file_system(dirs->items[i], s->in->cfg->checkpoint.dir))
            beside += scratch / (uint64_t)dirs->n;
    m->disk_bytes += checkpoint + overlays;
    m->checkpoint_bytes = checkpoint;
    mt_memory_add_row(&m->rows, "disk", "a checkpoint", checkpoint);
    mt_memory_add_row(&m->rows, "disk", "overlays of phases", overlays);
    beside += overlays;
    m->checkpoint_free = have > beside ? have - beside : 0;
    add_limit(m, "disk", beside > overlays ? "scratch's drive" : "free space", checkpoint + beside, have);
    struct rlimit file;
    if (!getrlimit(RLIMIT_FSIZE, &file))
        add_limit(m, "disk", FILE_LIMIT, MT_MIN(checkpoint, s->in->cfg->checkpoint.shard_size), file.rlim_max);
}

int mt_setup_memory(const struct mt_setup *s, struct mt_memory *m, struct mt_err *err)
{
    struct mt_plane_set_params pp = {.elems = NULL};
    struct mt_hw_memory hw;
    *m = (struct mt_memory){0};
    int rc = mt_setup_plane_params(s, &pp, err) ?: mt_hw_memory(&hw, "", err);
    if (!rc) {
        mt_plan_add_rows(&m->rows, &s->choice);
        m->device_bytes = s->choice.engine.device_bytes;
        m->n_lanes = mt_program_own_lanes(&s->choice.engine.program);
        for (int i = 0; i < m->n_lanes; i++)
            m->lane_bytes[i] = s->choice.engine.lane_bytes[i];
        for (int i = 0; i < m->rows.n; i++)
            m->host_bytes += strcmp(m->rows.row[i].tier, "host") ? 0 : m->rows.row[i].bytes;
        uint64_t all = s->choice.host_bytes;
        add_limit(m, "host", "memory.host_budget", all, mt_plan_host_limit(&s->request));
        add_limit(m, "host", "MemAvailable", all, hw.available);
        add_limit(m, "host", "cgroup memory limit", all, hw.cgroup_free);
        add_limit(m, "host", "RLIMIT_AS", all, hw.address_space);
    }
    if (!rc && s->choice.engine.uses_disk)
        add_scratch_limit(s, m);
    if (!rc && s->request.train)
        add_checkpoint_row(s, &pp, m->disk_bytes, m);
    free(pp.elems);
    return rc;
}

int mt_memory_check(const struct mt_memory *m, struct mt_err *err)
{
    char want[32], have[32], gap[32];
    for (const struct mt_memory_limit *l = m->limits; l < m->limits + m->n_limits; l++) {
        if (l->wanted <= l->available)
            continue;
        bool nvme = !strcmp(l->tier, "nvme"), disk = nvme || !strcmp(l->tier, "disk");
        return mt_fail(err, MT_ERR_NO_FIT, -ENOSPC,
                       "it will not fit: %s of %s wanted, %s allows %s: %s short; %s",
                       mt_format_need(want, sizeof(want), l->wanted), disk ? "disk" : "host memory",
                       l->source, mt_format_bytes(have, sizeof(have), l->available),
                       mt_format_need(gap, sizeof(gap), l->wanted - l->available),
                       nvme   ? "make room there, name more folders in memory.nvme_paths, or raise memory.host_budget"
                       : !strcmp(l->source, FILE_LIMIT) ? "raise it, or lower checkpoint.shard_size"
                       : disk ? "make room in checkpoint.dir or set checkpoint.save = weights"
                            : "lower memory.device_budget or train.tokens_per_step, set "
                                "memory.states = disk and memory.nvme_paths, use a smaller model, or "
                                "raise the limit");
    }
    return 0;
}

/* As the switch to the block decides it. */
static int fits(void *ctx, struct mt_layout **layout, struct mt_layout **halves, struct mt_err *err)
{
    struct mt_setup s = *(const struct mt_setup *)ctx;
    struct mt_memory m;
    s.request.numerics = s.choice.numerics;
    s.request.layout = *layout;
    s.request.halves = *halves;
    s.choice = (struct mt_plan_choice){.layout = NULL};
    int rc = s.predicted ? mt_resolve(&s.choice, &s.request, NULL) : -ENOENT;
    rc = rc ? mt_resolve_by_rules(&s.choice, &s.request, s.dev[0], err) : 0;
    rc = rc ?: mt_setup_memory(&s, &m, err) ?: mt_memory_check(&m, err);
    mt_plan_choice_finish(&s.choice);
    return rc;
}

static int try_delinked(const struct mt_setup *s, const struct mt_lay_out *o, struct mt_err *err)
{
    MT_CLOSED_BY(mt_layout_destroy) struct mt_layout *layout = NULL, *halves = NULL;
    struct mt_resumed later = *o->resumed;
    struct mt_err why;
    later.step = (uint64_t)o->cfg->train.delink_at;
    int rc = mt_plan_lay_out(&layout, &halves, o->cfg, o->hf, o->dir, &later, err);
    if (!rc && fits((void *)s, &layout, &halves, &why))
        mt_warn("from step %llu on each layer has weights of its own (train.delink_at), for which there is no room here: "
                "%s. The run will end there with a checkpoint, from which a larger machine can go on with --resume",
                (unsigned long long)later.step, why.msg);
    return rc;
}

int mt_setup_check_later(const struct mt_setup *s, struct mt_err *err)
{
    MT_CLOSED_BY(mt_config_destroy) struct mt_config *cfg = NULL;
    const struct mt_inputs *in = s->in;
    int rc = mt_config_copy(&cfg, in->cfg, "chosen", err); /* placement is decided anew in each phase */
    const struct mt_lay_out o = {cfg, &in->hf, in->weights_dir, &in->resumed};
    if (!rc && cfg->train.delink_at && in->layout->share > 1)
        return try_delinked(s, &o, err);
    return rc ?: mt_plan_check_blocks(&(struct mt_plan_blocks){o, in->layout, in->total_steps, fits, (void *)s}, err);
}

void mt_setup_wear(const struct mt_setup *s, uint64_t tbw, struct mt_wear *out)
{
    struct mt_wear w = {.rated_bytes = tbw};
    const struct mt_cfg_list *dirs = &s->in->cfg->memory.nvme_paths;
    for (int i = 0; i < MT_N_DISK_USES; i++) {
        w.read_bytes += s->choice.engine.traffic.read[i];
        w.written_bytes += s->choice.engine.traffic.written[i];
    }
    w.run_bytes = w.written_bytes * s->in->total_steps / (uint64_t)MT_MAX(dirs->n, 1);
    for (int i = 0; i < dirs->n && !tbw; i++) {
        struct mt_hw_wear drive;
        if (!mt_hw_wear(&drive, dirs->items[i]) || !drive.rated_bytes)
            continue;
        w.rated_bytes = w.measured ? MT_MIN(w.rated_bytes, drive.rated_bytes) : drive.rated_bytes;
        w.measured = true;
    }
    w.share = w.rated_bytes ? (double)w.run_bytes / (double)w.rated_bytes : 0;
    *out = w;
}
