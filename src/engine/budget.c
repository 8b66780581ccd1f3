/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Divides the device's budget among the pools, in this order: the fewest buffers that work, with the records of kept
 * layers; a third weight slot and a spare buffer of each kind, so that copies overlap with compute; all boundaries and
 * rows; records to be offloaded; more slots with what is left. If that does not fit, memory is saved at the cost of
 * time: embedding and head share the layers' buffers, gradients are cast in place. The choice never changes the
 * result's bits.
 */
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "engine/records.h"
#include "engine/shapes.h"
#include "engine/share.h"
#include "model/ranges.h"
#include "objective/objective.h"
#include "schedule/build.h"

struct budget {
    size_t free, alignment;
    size_t bytes[MT_N_POOLS];
    int *n, most[MT_N_POOLS];
};

static bool gathers(const struct mt_engine_params *p)
{
    return p->placement.embedding == MT_EMBEDDING_HOST && mt_optimizer_gathers(p->numerics.optimizer);
}

/* Combinations of memory savings to try, in order of the time they cost. */
enum { ONE_RING = 1, CAST_IN_PLACE = 2 };
static const int savings[] = {0, ONE_RING, CAST_IN_PLACE, ONE_RING | CAST_IN_PLACE};

static void describe_program(struct mt_engine_plan *plan, const struct mt_engine_params *p, int saving)
{
    struct mt_plane_desc desc[MT_N_PLANES];
    mt_plane_descs(desc, p->train ? p->numerics.optimizer : NULL, p->layout->master,
                   p->numerics.grad_dtype);
    plan->program = (struct mt_program_params){
        .mode = mt_engine_mode(p),
        .units = plan->units,
        .n_units = p->layout->n_units,
        .values = plan->values,
        .n_values = plan->program.n_values,
        .n_micro = p->max_micro,
        .groups = mt_engine_groups(p),
        .chunks = mt_row_chunks(&p->numerics) > 1 ? mt_row_chunks(&p->numerics) : 0,
        .weighs_rows = mt_engine_weighs(p, MT_ROWS_WEIGHED_BY_ROW),
        .n_lanes = (int)mt_engine_all_lanes(p),
        .by_data = mt_engine_by_data(p),
        .n_hosts = (int)mt_engine_n_hosts(p),
        .host = (int)p->placement.host,
        .owned = mt_engine_is_owned(p),
        .one_ring = saving & ONE_RING,
        .join = p->numerics.dtype == MT_F32,
        .cast = p->numerics.grad_dtype != MT_F32 && !(saving & CAST_IN_PLACE),
        .gather = gathers(p) && !plan->loads_table && !mt_engine_is_owned(p),
        .poison = p->placement.poison,
        .grad_bytes = mt_dtype_size(p->numerics.grad_dtype),
        .count_bytes = p->numerics.router_aux_loss > 0 ? (size_t)p->layout->cfg.moe.n_experts * sizeof(int64_t) : 0,
        .piece_align = mt_piece_align(desc),
        .draws_apart = p->train && p->cache.slots,
    };
}

/* Grows a pool towards `want` buffers while the budget lasts. */
static void grow(struct budget *b, int pool, int want)
{
    want = MT_MIN(want, b->most[pool]);
    if (!b->bytes[pool] || want <= b->n[pool])
        return;
    size_t add = MT_MIN((size_t)(want - b->n[pool]), b->free / b->bytes[pool]);
    b->n[pool] += (int)add;
    b->free -= add * b->bytes[pool];
}

/* Adds up to `more` buffers for records of each size, small ones first: a layer's are stored while the next compute. */
static void grow_records(struct budget *b, size_t more)
{
    size_t before = SIZE_MAX;
    for (size_t i = 0; i < more && b->free < before; i++) {
        before = b->free;
        for (int pool = MT_POOL_RECORD_LAST; pool >= MT_POOL_RECORD; pool--)
            grow(b, pool, b->n[pool] + 1);
    }
}

/* A unit of experts runs group after group, and the next one again: what one group uses stays for all of the lane's. */
static void grow_by_group(struct budget *b, const struct mt_engine_params *p)
{
    static const int pools[] = {MT_POOL_ROWS, MT_POOL_SUM, MT_POOL_ROUTING};
    size_t lanes = mt_engine_by_data(p) ? mt_engine_all_lanes(p) : 1;
    size_t groups = mt_div_up(mt_groups_n(mt_engine_groups(p)), lanes);
    for (size_t i = 0; i < MT_ARRAY_LEN(pools); i++)
        grow(b, pools[i], b->n[pools[i]] * (int)groups);
}

static void divide(struct budget *b, const struct mt_engine_params *p, enum mt_activations activations)
{
    struct mt_records records = mt_records_of(p->layout, &p->placement);
    bool keep = activations == MT_ACT_KEEP;
    bool offload = activations == MT_ACT_RECOMPUTE && mt_records_offload(&records);
    static const int before[] = {MT_POOL_BOUNDARY, MT_POOL_MOMENTS, MT_POOL_CAST, MT_POOL_GRAD};
    static const int after[] = {MT_POOL_ROWS, MT_POOL_ROUTING, MT_POOL_KEYS, MT_POOL_DKEYS};
    grow(b, MT_POOL_WEIGHTS, p->placement.slots == MT_AUTO ? 3 : (int)p->placement.slots);
    grow_by_group(b, p);
    for (size_t i = 0; i < MT_ARRAY_LEN(before); i++)
        grow(b, before[i], b->n[before[i]] + 1);
    if (mt_engine_all_lanes(p) > 1) /* backward of several units is interleaved */
        grow(b, MT_POOL_GRAD, 3);
    if (mt_groups_n(mt_engine_groups(p)) > 1)
        grow(b, MT_POOL_GRAD, b->most[MT_POOL_GRAD]);
    grow_records(b, 1);
    for (size_t i = 0; i < MT_ARRAY_LEN(after); i++)
        grow(b, after[i], b->n[after[i]] + 1);
    if (offload) { /* each micro-batch's boundary replaces that of the layer before */
        grow(b, MT_POOL_BOUNDARY, (int)MT_MIN(p->max_micro + 3, (size_t)MT_MAX_BUFFERS));
        grow_records(b, MT_MIN(2 * p->max_micro, (size_t)MT_MAX_BUFFERS));
    }
    grow(b, MT_POOL_BOUNDARY, b->most[MT_POOL_BOUNDARY]);
    grow(b, MT_POOL_ROUTING, b->most[MT_POOL_ROUTING]);
    grow(b, MT_POOL_ROWS, b->most[MT_POOL_ROWS]);
    grow(b, MT_POOL_KEYS, b->most[MT_POOL_KEYS]);
    if (keep || offload)
        grow_records(b, MT_MAX_BUFFERS);
    if (p->placement.slots == MT_AUTO)
        grow(b, MT_POOL_WEIGHTS, b->most[MT_POOL_WEIGHTS]);
    grow(b, MT_POOL_WEIGHTS_VOCAB, b->most[MT_POOL_WEIGHTS_VOCAB]);
}

/* The experts' pools grow with the tokens of a step, so only fewer tokens make them smaller. */
static void advise_tokens(char *text, size_t len, const struct mt_engine_params *p, size_t need, const struct budget *b)
{
    static const int pools[] = {MT_POOL_ROWS, MT_POOL_SUM, MT_POOL_ROUTING};
    size_t budget = mt_device_limits(p->dev)->budget_bytes, of_step = 0, tokens = p->max_micro * p->max_tokens;
    char bytes[32];
    text[0] = 0;
    for (size_t i = 0; i < MT_ARRAY_LEN(pools); i++)
        of_step += (size_t)b->n[pools[i]] * b->bytes[pools[i]];
    if (!of_step)
        return;
    int at = snprintf(text, len, "; a step of %zu tokens needs %s of these for its experts", tokens,
                      mt_format_bytes(bytes, sizeof(bytes), of_step));
    size_t rest = need - of_step, left = budget - MT_MIN(rest, budget);
    size_t fit = (size_t)((double)left / (double)of_step * (double)tokens) / p->max_tokens * p->max_tokens;
    if (fit && at > 0 && (size_t)at < len)
        snprintf(text + at, len - (size_t)at, ": a step of %zu tokens would fit (train.batch_size)", fit);
}

enum { LONG_ROW = 4096 }; /* tokens from which chunks of it are advised */

static int fail_short(struct mt_err *err, const struct mt_engine_params *p, size_t need,
                      const struct mt_engine_plan *plan, const struct budget *b)
{
    char have[32], want[32], slot[32], grad[32], scratch[32], logits[32], tokens[160], group[64] = "", chunk[64] = "";
    size_t row = p->max_len / mt_row_chunks(&p->numerics);
    size_t experts = p->layout->cut.expert_group;
    size_t w = MT_MAX(b->bytes[MT_POOL_WEIGHTS], b->bytes[MT_POOL_WEIGHTS_VOCAB]);
    size_t g = b->bytes[MT_POOL_GRAD] + b->bytes[MT_POOL_GRAD_VOCAB];
    const struct mt_device_limits *lim = mt_device_limits(p->dev);
    advise_tokens(tokens, sizeof(tokens), p, need, b);
    if (experts > 1)
        snprintf(group, sizeof(group), ", or memory.expert_group = %zu", experts / 2);
    bool may_cut = !p->cache.slots && !mt_optimizer_variants(&p->numerics); /* a pass without backward takes little */
    if (row > LONG_ROW && may_cut && !mt_layout_unchunked(p->layout, p->max_len))
        snprintf(chunk, sizeof(chunk), ", or set train.chunk, to %zu or less", row / 2);
    int rc = mt_fail(
        err, MT_ERR_NO_FIT, -ENOSPC,
        "the device budget of %s is short: at least %s are needed (largest weight slot %s, gradients "
        "%s, scratch of a micro-batch %s, logits %s); raise memory.device_budget, lower "
        "train.micro_batch or data.seq_len%s%s%s%s%s",
        mt_format_bytes(have, sizeof(have), lim->budget_bytes + lim->own_bytes),
        mt_format_need(want, sizeof(want), need + lim->own_bytes), mt_format_bytes(slot, sizeof(slot), w),
        mt_format_bytes(grad, sizeof(grad), g),
        mt_format_bytes(scratch, sizeof(scratch), plan->scratch),
        mt_format_bytes(logits, sizeof(logits), plan->logits), chunk,
        plan->activations == MT_ACT_RECOMPUTE ? "" : ", or set memory.activations = recompute",
        p->layout->cut.n_units > 1 ? "" : ", or memory.unit = half", group, tokens);
    if (err)
        err->short_device = need - MT_MIN(need, lim->budget_bytes);
    return rc;
}

/* What every lane has beside its pools. */
static size_t beside_pools(const struct mt_engine_plan *plan)
{
    return plan->scratch + plan->logits + plan->inputs + plan->tables;
}

/* *needed: the least bytes that are enough for the lane. */
static int divide_lane(struct mt_engine_plan *plan, const struct mt_engine_params *p, int lane, size_t *needed,
                       struct mt_err *err)
{
    bool keep = plan->activations == MT_ACT_KEEP;
    const struct mt_device_limits *lim = mt_device_limits(p->dev);
    struct budget b = {.alignment = lim->alignment, .n = plan->program.n_buffers[lane]};
    size_t need = beside_pools(plan);
    int first = (int)mt_engine_first_lane(p);
    bool own = lane >= first && lane < first + (int)mt_engine_n_lanes(p); /* not of another host */
    bool recompute = plan->activations == MT_ACT_RECOMPUTE;
    mt_program_size_pools(&plan->program, lane, b.bytes, b.n, b.most);
    if (p->placement.slots > b.n[MT_POOL_WEIGHTS])
        b.n[MT_POOL_WEIGHTS] = MT_MIN((int)p->placement.slots, MT_MAX(b.most[MT_POOL_WEIGHTS], 2));
    for (int i = 0; i < MT_N_POOLS; i++) {
        if (!mt_pools[i].device)
            continue;
        b.bytes[i] = mt_align_up(b.bytes[i], lim->alignment);
        if (keep && i == MT_POOL_BOUNDARY)
            b.n[i] = b.most[i];
        if (mt_engine_is_record_pool(i) && keep)
            b.n[i] = b.most[i];
        else if (mt_engine_is_record_pool(i) && recompute)
            b.n[i] = MT_MIN(MT_MAX((int)mt_engine_kept_records(plan, p, lane, i), b.n[i]), b.most[i]);
        need += (size_t)b.n[i] * b.bytes[i];
    }
    *needed = need;
    if (need > lim->budget_bytes)
        return fail_short(err, p, need, plan, &b);
    b.free = lim->budget_bytes - need;
    divide(&b, p, plan->activations);
    size_t lane_bytes = beside_pools(plan);
    for (int i = 0; i < MT_N_POOLS; i++) {
        if (!mt_pools[i].device)
            continue;
        plan->pool_bytes[i] += own ? (size_t)b.n[i] * b.bytes[i] : 0;
        lane_bytes += (size_t)b.n[i] * b.bytes[i];
    }
    if (own) {
        plan->lane_bytes[lane - first] = lane_bytes;
        plan->device_bytes += lane_bytes;
    }
    plan->bytes_of_host[lane / (int)mt_engine_n_lanes(p)] += lane_bytes;
    return 0;
}

/* Each lane's budget; *needed: of the lane that needs most, which an error names. */
static int divide_budget(struct mt_engine_plan *plan, const struct mt_engine_params *p, size_t *needed,
                         struct mt_err *err)
{
    int rc = 0;
    plan->device_bytes = 0;
    memset(plan->pool_bytes, 0, sizeof(plan->pool_bytes));
    memset(plan->bytes_of_host, 0, sizeof(plan->bytes_of_host));
    for (int lane = 0; lane < mt_program_lanes(&plan->program); lane++) {
        struct mt_err why = {0};
        size_t need = 0;
        int failed = divide_lane(plan, p, lane, &need, &why);
        if (failed && (!rc || need > *needed)) {
            rc = failed;
            if (err)
                *err = why;
        }
        *needed = MT_MAX(*needed, need);
    }
    return rc;
}

/* Whether the device has room for the caches, and the weights, of so many units, in buffers that they keep. */
static bool may_stay(struct mt_engine_plan *plan, const struct mt_engine_params *p, size_t caches, size_t weights)
{
    size_t needed;
    plan->n_caches_stay = caches;
    plan->n_stay = weights;
    plan->activations = MT_ACT_RECOMPUTE;
    mt_engine_describe_units(plan, p);
    describe_program(plan, p, 0);
    return !divide_budget(plan, p, &needed, NULL);
}

/* As many caches as there is room for, and then weights: a cache crosses the link both ways. */
static void choose_what_stays(struct mt_engine_plan *plan, const struct mt_engine_params *p)
{
    size_t n = p->layout->n_units, least[2] = {0}, most[2] = {n, n};
    for (int of = 0; of < 2; of++) {
        if (may_stay(plan, p, of ? least[0] : n, of ? n : 0)) {
            least[of] = n;
            continue;
        }
        while (most[of] - least[of] > 1) {
            size_t some = (least[of] + most[of]) / 2;
            *(may_stay(plan, p, of ? least[0] : some, of ? some : 0) ? &least[of] : &most[of]) = some;
        }
    }
    plan->n_caches_stay = least[0];
    plan->n_stay = least[1];
}

/* Try memory savings only if no activation mode fits without them. On failure report the attempt that came closest. */
static int choose_mode(struct mt_engine_plan *plan, const struct mt_engine_params *p, struct mt_err *err)
{
    bool open = p->placement.activations == MT_ACT_AUTO;
    const enum mt_activations modes[] = {open ? MT_ACT_KEEP : p->placement.activations, MT_ACT_RECOMPUTE};
    size_t n_modes = open ? 2 : 1, least = SIZE_MAX;
    if (p->draws && !p->train)
        choose_what_stays(plan, p);
    for (size_t i = 0; i < n_modes * MT_ARRAY_LEN(savings); i++) {
        int saving = savings[i / n_modes];
        struct mt_err why = {0};
        size_t needed = 0;
        if (saving & ONE_RING && p->layout->tied) /* a tied table's gradient lives from head to embedding */
            continue;
        if (!i || plan->activations != modes[i % n_modes] || p->draws) {
            plan->activations = modes[i % n_modes];
            mt_engine_describe_units(plan, p);
        }
        describe_program(plan, p, saving);
        if (!divide_budget(plan, p, &needed, &why))
            return 0;
        if (needed < least && err)
            *err = why;
        least = MT_MIN(least, needed);
    }
    return -ENOSPC;
}

/* Of a step that draws between those that train: homes of its caches. */
static int make_room_for_caches(struct mt_engine_plan *plan, struct mt_err *err)
{
    struct mt_program_params params = plan->program;
    struct mt_program prog;
    params.mode = MT_MODE_LOGITS;
    params.n_micro = 1;
    int rc = mt_program_place(&prog, &params, err);
    if (rc)
        return rc;
    plan->spill_bytes = MT_MAX(plan->spill_bytes, prog.spill_bytes);
    mt_program_finish(&prog);
    return 0;
}

/* Where something is spilled, and how much, is known before a program is complete, but of a host's part after that. */
static int place_program(struct mt_engine_plan *plan, struct mt_program *prog, struct mt_err *err)
{
    bool part = mt_program_hosts(&plan->program) > 1;
    int rc = (part ? mt_program_build : mt_program_place)(prog, &plan->program, err);
    if (rc)
        return rc;
    plan->spill_bytes = prog->spill_bytes;
    plan->sum_bytes = prog->sum_bytes;
    plan->disk_spill_bytes = prog->disk_spill_bytes;
    return plan->program.draws_apart ? make_room_for_caches(plan, err) : 0;
}

static int complete_program(struct mt_engine_plan *plan, struct mt_program *prog, struct mt_err *err)
{
    int rc = mt_program_hosts(&plan->program) > 1 ? 0 : mt_program_complete(prog, &plan->program, err);
    if (rc)
        return rc;
    plan->disk_spill_bytes = prog->disk_spill_bytes;
    plan->h2d_bytes = mt_program_link_bytes(prog, MT_Q_H2D);
    plan->d2h_bytes = mt_program_link_bytes(prog, MT_Q_D2H);
    plan->traffic = mt_program_disk_traffic(prog);
    return 0;
}

/* Whether the program has to be placed again for where planes and spills are now. */
static bool is_outdated(const struct mt_engine_plan *plan, unsigned placed_for)
{
    return mt_program_hosts(&plan->program) > 1 ? mt_program_uses_disk(&plan->program) || plan->uses_files
                                                : mt_program_placed_for(&plan->program) != placed_for;
}

/* Whether rows of the embedding were to be gathered, and cannot be, since drives are used: then its table is loaded,
 * for which its lane has no buffer if the head is on another. */
static bool lacks_table(const struct mt_engine_plan *plan, const struct mt_engine_params *p)
{
    return mt_engine_all_lanes(p) > 1 && plan->program.gather && plan->units[0].trainable &&
           !mt_program_gathers(&plan->program);
}

/* Places the step with everything in host memory, and decides from that what is kept on the disk: of several hosts as
 * the first does, so that all have one step. */
int mt_engine_plan_step(struct mt_engine_plan *plan, struct mt_program *prog, uint64_t *host_bytes,
                        const struct mt_engine_params *p, struct mt_err *err)
{
    int wanted[MT_N_POOLS] = {0};
    unsigned placed_for = mt_program_placed_for(&plan->program);
    const int own = (int)p->placement.host, n_deals = plan->n_deals;
    plan->program.host = 0;
    plan->program.most_spill = 0;
    int rc = place_program(plan, prog, err);
    if (rc)
        return rc;
    for (size_t i = 0; i < prog->n_objects; i++) {
        enum mt_pool_id spilled = mt_pools[prog->objects[i].pool].spilled;
        if (prog->objects[i].spill >= 0 && spilled != MT_NO_POOL)
            wanted[spilled]++;
    }
    uint64_t takes = mt_tiers_choose(plan, p, wanted);
    bool lacks = lacks_table(plan, p);
    if (lacks || plan->n_deals > n_deals) {
        mt_program_finish(prog);
        plan->loads_table |= lacks;
        rc = lacks ? choose_mode(plan, p, err) : 0;
        return rc ? rc : mt_engine_plan_step(plan, prog, host_bytes, p, err);
    }
    if (host_bytes) {
        *host_bytes = takes;
        if (takes > p->host_bytes) {
            mt_program_finish(prog);
            return mt_fail(err, MT_ERR_NO_FIT, -ENOSPC, "host memory is short by %llu bytes",
                           (unsigned long long)(takes - p->host_bytes));
        }
    }
    if (is_outdated(plan, placed_for)) {
        mt_program_finish(prog);
        rc = place_program(plan, prog, err);
    }
    plan->program.most_spill = plan->spill_bytes;
    if (!rc && own) {
        mt_program_finish(prog);
        plan->program.host = own;
        rc = place_program(plan, prog, err);
    }
    return rc ? rc : complete_program(plan, prog, err);
}

struct mt_model_params mt_engine_model_params(const struct mt_engine_params *p)
{
    bool policy = mt_objective_of(&p->numerics)->rollouts && !p->numerics.mezo.rewards;
    struct mt_model_params m = {
        .layout = p->layout,
        .dtype = p->numerics.dtype,
        .fp8 = p->numerics.compute == MT_COMPUTE_FP8,
        .coded_weights = mt_engine_codes_weights(p),
        .max_tokens = p->max_tokens,
        .max_docs = p->max_docs,
        .max_len = p->max_len,
        .max_micro = p->max_micro,
        .row_tokens = mt_row_chunks(&p->numerics) > 1 ? p->max_len : 0,
        .groups = mt_engine_groups(p),
        .logits_chunk = (size_t)p->numerics.logits_chunk,
        .assumed_rows = p->assumed_rows,
        .router_aux_loss = p->numerics.router_aux_loss,
        .logits_piece = (size_t)MT_MAX(p->numerics.logits_piece, (int64_t)0),
        .temperature = policy ? (float)p->numerics.objective_keys.policy.temperature : 1,
        .entropy = policy,
        .row_weights = mt_engine_weighs(p, MT_ROWS_WEIGHED),
        .few = mt_engine_few(p),
        .cache = p->cache,
        .draws = p->draws,
        .top = p->top,
        .used_rows = p->train && !p->layout->tied && gathers(p),
        .expert_streams = (int)p->placement.expert_streams,
        .expert_sums = mt_groups_n(mt_engine_groups(p)) > 1 ? 0 : (int)p->placement.expert_sums,
        .backward = p->train && !mt_engine_variants(p),
        .groups_of_step = mt_engine_variants(p) > 0,
        .poison = p->placement.poison,
    };
    if (p->train)
        mt_optimizer_own_keys(p->numerics.optimizer, p->numerics.optimizer_keys, m.optimizer_keys);
    return m;
}

bool mt_engine_may_update_under_backward(const struct mt_engine_params *p)
{
    bool may = p->train && mt_clips_by_block(&p->numerics) && !mt_engine_variants(p);
    for (size_t i = 0; i < p->n_learners; i++)
        may &= mt_clips_by_block(&p->learner[i]);
    return may;
}

int mt_engine_divide(struct mt_engine_plan *out, const struct mt_engine_params *p, struct mt_err *err)
{
    if (p->train && p->placement.update == MT_UPDATE_BACKWARD && !mt_engine_may_update_under_backward(p))
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "memory.update = backward needs train.clip = unit or train.grad_clip = 0");
    if (p->train && mt_groups_n(mt_engine_groups(p)) > p->max_micro)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "train.groups = %zu: a step has only %zu micro-batches: lower train.groups or "
                       "train.micro_batch", mt_groups_n(mt_engine_groups(p)), p->max_micro);
    if (mt_engine_by_data(p) && mt_groups_n(mt_engine_groups(p)) < mt_engine_all_lanes(p))
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "device.map = data: %zu devices%s need train.groups of at least as many, and it "
                       "is %zu", mt_engine_all_lanes(p), mt_engine_n_hosts(p) > 1 ? " of all hosts" : "",
                       mt_groups_n(mt_engine_groups(p)));
    if (mt_engine_all_lanes(p) > MT_MAX_LANES)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "%zu hosts of %zu devices: at most %d devices in all", mt_engine_n_hosts(p),
                       mt_engine_n_lanes(p), MT_MAX_LANES);
    MT_CLOSED_BY(mt_engine_plan_finish) struct mt_engine_plan plan = {0};
    struct mt_model_params mp = mt_engine_model_params(p);
    struct mt_model_bytes mb;
    size_t align = mt_device_limits(p->dev)->alignment;
    int rc = mt_model_bytes(&mb, p->dev, &mp, err);
    if (rc)
        return rc;
    plan.scratch = mt_align_up(mb.scratch, align);
    plan.logits = mt_align_up(mb.logits, align);
    plan.inputs = mt_align_up(mb.inputs, align) + align;
    plan.tables = mt_align_up(mb.tables, align);
    plan.staging_bytes = mt_engine_n_lanes(p) * (mb.inputs + mb.counts);
    plan.top_bytes = mt_engine_top_bytes(p, &mp);
    plan.units = mt_arrays_add(&plan.arrays, p->layout->n_units, sizeof(*plan.units));
    plan.on_disk = mt_arrays_add(&plan.arrays, p->layout->n_units, sizeof(*plan.on_disk));
    plan.in_files = mt_arrays_add(&plan.arrays, p->layout->n_units, sizeof(*plan.in_files));
    plan.owned = mt_arrays_add(&plan.arrays, p->layout->n_units, sizeof(*plan.owned));
    plan.elsewhere = mt_arrays_add(&plan.arrays, p->layout->n_units, sizeof(*plan.elsewhere));
    plan.values = mt_arrays_add(&plan.arrays, mt_flow_max_values(p->layout->n_units), sizeof(*plan.values));
    plan.planes = mt_arrays_add(&plan.arrays, p->layout->n_units, sizeof(*plan.planes));
    if (plan.arrays.failed)
        return mt_fail_nomem(err, "the plan", p->layout->n_units * sizeof(*plan.units));
    rc = choose_mode(&plan, p, err);
    if (!rc)
        *out = MT_GIVE(plan);
    return rc;
}

bool mt_engine_fits(const struct mt_engine_params *p)
{
    MT_CLOSED_BY(mt_engine_plan_finish) struct mt_engine_plan plan = {0};
    return !mt_engine_divide(&plan, p, NULL);
}

int mt_engine_plan(struct mt_engine_plan *out, const struct mt_engine_params *p, struct mt_err *err)
{
    MT_CLOSED_BY(mt_engine_plan_finish) struct mt_engine_plan plan = {0};
    MT_CLOSED_BY(mt_program_finish) struct mt_program prog = {0};
    int rc = mt_engine_divide(&plan, p, err)
          ?: mt_engine_plan_step(&plan, &prog, NULL, p, err); /* the caller checks the host memory */
    if (!rc)
        *out = MT_GIVE(plan);
    return rc;
}

void mt_engine_plan_trim(const struct mt_engine_plan *plan, struct mt_plane_set_params *planes)
{
    for (size_t u = 0; u < planes->n_units; u++)
        if (plan->units[u].grad_in_ring)
            planes->elems[u].n[MT_PLANE_GRAD] = 0;
    planes->on_disk = plan->on_disk;
    planes->in_files = plan->in_files;
    planes->elsewhere = plan->elsewhere;
    planes->piece_elems = plan->program.piece_elems;
}

void mt_engine_plan_finish(struct mt_engine_plan *plan)
{
    mt_arrays_finish(&plan->arrays);
    *plan = (struct mt_engine_plan){0};
}
