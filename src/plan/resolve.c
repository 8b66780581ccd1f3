/* SPDX-License-Identifier: Apache-2.0 */
#include "plan/resolve.h"

#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/mem.h"
#include "base/units.h"
#include "engine/records.h"
#include "hw/hw.h"
#include "kinds/kinds.h"
#include "kinds/select.h"
#include "objective/policy.h"
#include "plan/evaluate.h"

/* Defaults: tokens of a micro-batch by rules, and of a step if none are configured. */
enum { MICRO_BATCH_TOKENS = 8192, STEP_TOKENS = 65536 };

static const uint64_t GIB = (uint64_t)1 << 30;

int mt_resolve_learning_rate(struct mt_config *c, const char **why, struct mt_err *err)
{
    static const struct {
        const char *rate, *origin, *why;
    } of[2][2] = {{{"1e-5", "auto: for all weights", "weights"}, {"2e-4", "auto: with adapters", "adapters"}},
                  {{"1e-6", "auto: for all weights", "weights on preferences or rollouts"},
                   {"1e-5", "auto: with adapters", "adapters on preferences or rollouts"}}};
    bool adapters = c->adapter.kind != MT_ADAPTER_NONE;
    bool preference = strcmp(c->preference.loss, "off") != 0 || strcmp(c->policy.loss, "off") != 0;
    bool is_auto = c->train.learning_rate == MT_AUTO;
    if (why)
        *why = is_auto ? of[preference][adapters].why : NULL;
    return is_auto ? mt_config_override(c, "train.learning_rate", of[preference][adapters].rate,
                                        of[preference][adapters].origin, err)
                   : 0;
}

/* --- limits of a machine -------------------------------------------------------------------------- */

static const char *const kind_names[] = {
    [MT_DEVICE_AUTO] = "auto", [MT_DEVICE_CUDA] = "cuda", [MT_DEVICE_CPU] = "cpu"};

uint64_t mt_plan_host_budget(uint64_t total_bytes)
{
    return (uint64_t)((double)total_bytes * 0.9);
}

/* The driver keeps 8 bytes for each locked page of 4 KiB, in the GPU's memory while there is some (uvm_mmu.c of
 * NVIDIA/open-gpu-kernel-modules). */
uint64_t mt_plan_device_reserve(uint64_t total_bytes, uint64_t host_bytes, bool display)
{
    uint64_t tables = MT_MAX(host_bytes / 512, GIB / 2);
    return MT_MAX((display ? GIB : GIB / 2) + tables, total_bytes / 25);
}

/* Under WSL 12 GB of which 0.88 were asked for failed, and 0.80 did not (microsoft/WSL#41176). */
static uint64_t reserve_of(const struct mt_device_info *gpu, uint64_t host_bytes)
{
    uint64_t least = mt_plan_device_reserve(gpu->total_bytes, host_bytes, gpu->has_display);
    return gpu->is_paged ? MT_MAX(least, gpu->total_bytes / 8) : least;
}

/* What each GPU can give at least. */
static void take_least(struct mt_plan_limits *out, const struct mt_device_info *gpu)
{
    uint64_t reserve = reserve_of(gpu, out->host_bytes), bytes = gpu->present ? gpu->free_bytes : 0;
    bool less = bytes - MT_MIN(bytes, reserve) <
                out->device_bytes - MT_MIN(out->device_bytes, out->device_reserve);
    if (less) {
        out->device_bytes = bytes;
        out->device_reserve = reserve;
    }
}

static void set_bytes(struct mt_size *s, uint64_t whole, uint64_t when_auto)
{
    uint64_t bytes = s->is_auto ? when_auto : s->is_ratio ? (uint64_t)((double)whole * s->ratio) : s->bytes;
    *s = (struct mt_size){.bytes = bytes};
}

/* One memory for the host and a device, which has what is configured, or a quarter, as on the cpu device. */
static void share_memory(struct mt_plan_limits *out, struct mt_size device)
{
    set_bytes(&device, out->host_bytes, out->host_bytes / 4);
    out->device_bytes = out->host_bytes;
    out->device_share = MT_MIN(device.bytes, out->host_bytes);
    out->host_bytes -= out->device_share;
    out->device_reserve = out->host_bytes;
}

/* The devices of a run. Those that a list names are looked up before the kind is known, which the
 * first decides. */
static int find_devices(struct mt_plan_limits *out, const struct mt_config *c, struct mt_err *err)
{
    const char *gpus = c->device.gpus;
    bool list = mt_device_list_named(gpus) && c->device.kind != MT_DEVICE_CPU;
    struct mt_device_info gpu;
    out->gpu[0] = (int)c->device.index;
    int rc = list ? mt_device_select(out->gpu, &out->n_gpus, MT_MAX_DEVICES, "cuda", gpus, 0, err) : 0;
    if (rc)
        return rc;
    out->kind = mt_device_choose(kind_names[c->device.kind], out->gpu[0], &gpu);
    out->device_bytes = gpu.present ? gpu.free_bytes : 0;
    out->device_reserve = reserve_of(&gpu, out->host_bytes);
    if (gpu.present && gpu.is_integrated)
        share_memory(out, c->placement.device_budget);
    rc = mt_device_select(out->gpu, &out->n_gpus, MT_MAX_DEVICES, out->kind, gpus, (int)c->device.index, err);
    for (int i = 1; i < out->n_gpus && gpu.present && !rc; i++) {
        mt_device_probe(&gpu, out->kind, out->gpu[i]);
        take_least(out, &gpu);
        if (!gpu.present)
            rc = mt_fail(err, MT_ERR_DEVICE, -ENODEV, "device.gpus = %.100s: %s", gpus, gpu.text);
    }
    return rc;
}

int mt_plan_limits_here(struct mt_plan_limits *out, const struct mt_config *c, struct mt_err *err)
{
    struct mt_hw_memory hw;
    MT_FREED int *cpus = NULL;
    int n = 0, rc = mt_hw_memory(&hw, "", err) ?: mt_hw_cores(&cpus, &n, err);
    if (rc)
        return rc;
    *out = (struct mt_plan_limits){
        .host_bytes = mt_hw_memory_usable(&hw),
        .threads = n,
        .drives = c->memory.nvme_paths.n,
    };
    return find_devices(out, c, err);
}

static bool drives_are_rated(const struct mt_machine *m)
{
    return m->rate[MT_RATE_READ].value > 0 && m->rate[MT_RATE_WRITE].value > 0;
}

struct mt_plan_limits mt_plan_limits_of(const struct mt_machine *m)
{
    uint64_t device = (uint64_t)(m->rate[MT_RATE_DEVICE_GIB].value * (double)GIB);
    uint64_t host = (uint64_t)(m->rate[MT_RATE_HOST_GIB].value * (double)GIB);
    return (struct mt_plan_limits){
        .kind = mt_machine_device_kind(m),
        .host_bytes = host,
        .device_bytes = device,
        .device_reserve = mt_plan_device_reserve(device, host, false),
        .threads = (int)m->rate[MT_RATE_CORES].value,
        .drives = drives_are_rated(m) ? (int)m->rate[MT_RATE_DRIVES].value : 0,
    };
}

/* --- from the configuration ------------------------------------------------------------------------ */

bool mt_plan_by_rewards(const struct mt_config *c)
{
    const struct mt_objective *o = mt_objective_find(c->policy.loss);
    return o && o->by_rewards;
}

int64_t mt_plan_rollouts(const struct mt_config *c)
{
    int64_t variants = mt_plan_by_rewards(c) ? (int64_t)mt_mezo_variants(&c->numerics.mezo) : 1;
    return c->policy.prompts_per_round * c->policy.samples * variants;
}

static int count_rows(struct mt_numerics *n, const struct mt_config *c, struct mt_err *err)
{
    int64_t tokens = c->train.tokens_per_step, len = n->seq_len;
    if (tokens % len)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL,
                       "train.tokens_per_step = %lld must be a multiple of data.seq_len = %lld: the nearest are %lld and "
                       "%lld",
                       (long long)tokens, (long long)len, (long long)(tokens / len * len),
                       (long long)(tokens / len * len + len));
    n->rows_per_step = c->train.batch_size ? c->train.batch_size : tokens / len;
    if (!n->rows_per_step) /* a plan may leave it auto */
        n->rows_per_step = MT_MAX(STEP_TOKENS / len, (int64_t)1);
    return 0;
}

/* "NAME_loss" or "NAME_accuracy" of one of eval.sets. */
static bool is_of_set(const struct mt_config *c)
{
    for (int i = 0; i < c->eval.sets.n; i++) {
        const char *item = c->eval.sets.items[i];
        if (mt_measure_of_set(c->eval.best_by, item, strcspn(item, ":")))
            return true;
    }
    return false;
}

/* [preference] or [policy] decides, where it has a loss. */
static int find_objective(struct mt_numerics *n, const struct mt_config *c, struct mt_err *err)
{
    bool preference = strcmp(c->preference.loss, "off") != 0, policy = strcmp(c->policy.loss, "off") != 0;
    const char *name = preference ? c->preference.loss : policy ? c->policy.loss : c->train.objective;
    if (preference && policy)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "preference.loss = %s and policy.loss = %s: a run has one objective, set one of them to off",
                       c->preference.loss, c->policy.loss);
    n->objective = mt_objective_find(name);
    if (!n->objective)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "%s: there is no such objective", name);
    const char *by = c->eval.best_by;
    bool rewards = !strcmp(by, "reward") && c->eval.generate[0] && c->policy.reward[0];
    if (strcmp(by, MT_EVAL_ACCURACY) && mt_objective_measure(n->objective, by) < 0 && !is_of_set(c) && !rewards)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "eval.best_by = %s: evaluations of %s have no such measure to be compared "
                       "by: set loss, accuracy, one of these with the name of a set of eval.sets (code_loss)%s", c->eval.best_by, n->objective->title,
                       !n->objective->answers ? "" : n->objective->rated ? ", or rewards/margins"
                                                                         : ", rewards/accuracies or rewards/margins");
    if (n->objective->teacher != (*c->distill.teacher != 0))
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, n->objective->teacher
                           ? "train.objective = %s: set distill.teacher to a file of megatrain score --top"
                           : "distill.teacher is set, but what is minimized is %s: set train.objective = distill, or remove the key",
                       n->objective->name);
    if ((n->objective->reference || policy) && c->adapter.dropout > 0)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "adapter.dropout = %g with %s.loss = %s: set it to 0; what is dropped "
                       "would count as a difference to the reference", c->adapter.dropout, policy ? "policy" : "preference",
                       n->objective->name);
    if (policy)
        return mt_policy_resolve(n->objective, &n->objective_keys.policy, err);
    if (!n->objective->answers)
        return 0;
    if (n->objective_keys.beta == MT_AUTO)
        n->objective_keys.beta = n->objective->beta;
    if (n->objective_keys.sft == MT_AUTO)
        n->objective_keys.sft = n->objective->sft;
    return 0;
}

/* What does not go with directions that are made on the device, of a gradient that has just become whole. */
static int check_directions(const struct mt_numerics *n, const struct mt_config *c, struct mt_err *err)
{
    const char *type = n->optimizer->type;
    if (n->grad_clip > 0)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "train.grad_clip = %g with optimizer.type = %s: set it to 0; steps are made "
                       "from the gradient before its norm is known, and do not grow with it", n->grad_clip, type);
    if (n->rounding == MT_ROUND_STOCHASTIC)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "optimizer.rounding = stochastic with optimizer.type = %s: set it to nearest, "
                       "to which the device rounds", type);
    if (c->adapter.kind != MT_ADAPTER_NONE)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "optimizer.type = %s is for training weights, not adapters: set "
                       "optimizer.type = adamw, lion or sgd, or adapter.kind = none", type);
    return 0;
}

static bool is_usual(const struct mt_mezo_keys *k)
{
    return k->eps == 1e-3 && k->samples == 1 && k->layers == 1 && k->small == 1 && k->noise == MT_NOISE_NORMAL;
}

/* What steps by losses alone cannot have, and [mezo] where there are none. */
static int check_zeroth(const struct mt_numerics *n, const struct mt_config *c, struct mt_err *err)
{
    const struct mt_policy_keys *policy = &n->objective_keys.policy;
    bool es = n->mezo.rewards;
    if (!n->optimizer->zeroth && es)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "policy.loss = es with optimizer.type = %s: rewards of perturbed weights have no gradient: "
                       "set optimizer.type = mezo", n->optimizer->type);
    if (!n->optimizer->zeroth && !is_usual(&n->mezo))
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "keys of [mezo] are set, but optimizer.type = %s has none of them: set "
                       "optimizer.type = mezo, or remove them", n->optimizer->type);
    const struct {
        bool set;
        const char *key, *why, *mend;
    } keys[] = {
        {n->grad_clip > 0, "train.grad_clip", "there is no gradient to clip", "set it to 0"},
        {n->clip != MT_CLIP_GLOBAL, "train.clip", "there is no gradient to clip", "remove it"},
        {n->groups > 1, "train.groups", "there are no gradients to be added in groups", "set it to 1"},
        {n->chunk > 0, "train.chunk", "without a backward pass a row takes little memory", "set it to 0"},
        {n->router_aux_loss > 0, "train.router_aux_loss", "it is a gradient that is added in the backward pass", "set it to 0"},
        {c->model.share_layers > 1, "model.share_layers", "it is for training from the beginning", "set it to 1"},
        {n->compute == MT_COMPUTE_FP8, "model.compute = fp8", "E4M3 rounds the perturbation away", "set it to auto"},
        {c->placement.update == MT_UPDATE_BACKWARD, "memory.update = backward", "there is no backward pass", "set it to auto"},
        {strcmp(c->train.blocks, "off") != 0, "train.blocks", "what is frozen saves no memory here", "set it to off"},
        {c->adapter.dropout > 0, "adapter.dropout", "both signs of the noise are measured without it", "set it to 0"},
        {n->mezo.small < 1 && c->adapter.kind != MT_ADAPTER_NONE, "mezo.small with adapters", "these begin at 0, or at random",
         "set it to 1"},
        {c->adapter.merge_aware != MT_MERGE_OFF, "adapter.merge_aware", "adapters are merged before they are perturbed",
         "set it to off"},
        {n->objective->weights || n->objective->learn, "preference.loss, policy.loss or train.objective = distill",
         "what is minimized is not the mean loss of tokens", "set them to off and cross_entropy, or policy.loss = es"},
        {es && n->mezo.small < 1, "mezo.small with policy.loss = es", "which weights are small is of a run, and others sample", "set it to 1"},
        {es && (policy->kl_weight > 0 || policy->mismatch != MT_MISMATCH_NONE || policy->old == MT_OLD_FILE),
         "policy.kl_weight, policy.mismatch or policy.old = file with policy.loss = es", "no log-probabilities are computed", "remove them"},
    };
    for (size_t i = 0; i < MT_ARRAY_LEN(keys) && n->optimizer->zeroth; i++)
        if (keys[i].set)
            return mt_fail(err, MT_ERR_USAGE, -EINVAL, "%s with optimizer.type = mezo: %s; %s", keys[i].key, keys[i].why,
                           keys[i].mend);
    return 0;
}

/* Of train.chunk, as far as the configuration says. */
static int check_chunk(const struct mt_numerics *n, struct mt_err *err)
{
    long long chunk = n->chunk, len = n->seq_len, most = chunk;
    if (chunk <= 0 || chunk >= len)
        return 0;
    while (len % most)
        most--;
    if (len % chunk)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "train.chunk = %lld must divide data.seq_len = %lld: set it to %lld", chunk,
                       len, most);
    if (n->micro_batch > 1)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "train.chunk = %lld makes micro-batches of less than a row: set "
                       "train.micro_batch = 1, or train.chunk = 0", chunk);
    if (n->groups > 1 && n->rows_per_step % n->groups)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "train.chunk = %lld with train.groups = %lld: all chunks of a row are in one "
                       "group, so the %lld rows of a step must be a multiple of the groups: change train.tokens_per_step or "
                       "train.groups", chunk, (long long)n->groups, (long long)n->rows_per_step);
    return 0;
}

const struct mt_optimizer *mt_plan_optimizer(const struct mt_config *c)
{
    const struct mt_numerics *n = &c->numerics;
    const struct mt_optimizer *o = mt_optimizer_find(c->optimizer.type, n->state_type, n->optimizer_keys);
    return o && o->zeroth && n->mezo.small < 1 ? &mt_mezo_small : o;
}

int mt_resolve_numerics(struct mt_numerics *out, const struct mt_config *c, struct mt_err *err)
{
    struct mt_numerics n = c->numerics;
    int rc = count_rows(&n, c, err);
    if (rc)
        return rc;
    if (n.compute == MT_COMPUTE_BF16 && n.dtype != MT_BF16)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "model.compute = bf16 needs model.dtype = bf16: set it, or "
                       "model.compute = auto");
    if (n.grad_dtype == MT_DTYPE_AUTO) /* adapters have few gradients */
        n.grad_dtype = c->adapter.kind == MT_ADAPTER_NONE ? n.dtype : MT_F32;
    n.optimizer = mt_plan_optimizer(c);
    if (!n.optimizer)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "optimizer.type = %s keeps no states of that optimizer.state_dtype: "
                       "set f32", c->optimizer.type);
    if (n.rounding == MT_ROUND_STOCHASTIC && (n.state_type != MT_STATE_BF16 || !n.optimizer->n_states))
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "optimizer.rounding = stochastic is for states in bf16: set "
                       "optimizer.state_dtype = bf16, or rounding = nearest");
    if (n.master != MT_MASTER_F32 && n.dtype == MT_F32)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "optimizer.master = %s is for compute in bf16, and model.dtype = f32 "
                       "computes with the masters: set optimizer.master = f32, or model.dtype = bf16",
                       n.master == MT_MASTER_BF16 ? "bf16" : "24bit");
    if (!mt_optimizer_takes(n.optimizer, n.master))
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "optimizer.type = %s updates masters of 32 bits alone: set "
                       "optimizer.master = f32", n.optimizer->type);
    rc = mt_optimizer_resolve_keys(n.optimizer, n.optimizer_keys, err);
    if (!rc && c->optimizer.matrices.n && !n.optimizer->matrices)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "optimizer.matrices is set, but optimizer.type = %s has no such key: remove "
                       "it", n.optimizer->type);
    if (!rc && n.optimizer->direct)
        rc = check_directions(&n, c, err);
    n.seed = (uint64_t)c->train.seed;
    rc = rc ?: find_objective(&n, c, err);
    n.mezo.rewards = !rc && n.objective->by_rewards;
    rc = rc ?: check_chunk(&n, err) ?: check_zeroth(&n, c, err);
    if (!rc)
        *out = n;
    return rc;
}

int64_t mt_resolve_micro_batch(const struct mt_numerics *n)
{
    int64_t rows = n->micro_batch == MT_AUTO ? MT_MAX(MICRO_BATCH_TOKENS / n->seq_len, (int64_t)1) : n->micro_batch;
    if (mt_row_chunks(n) > 1)
        return 1;
    return MT_MIN(rows, n->rows_per_step);
}

/* What cluster.`what` names for each of n hosts, if it does and there are several. */
static int read_each(uint64_t *of, const char *what, const struct mt_cfg_list *named, int n, struct mt_err *err)
{
    int rc = 0;
    if (n < 2 || !named->n)
        return 0;
    if (named->n != n)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "cluster.%s names the %s of %d hosts, and there are %d", what, what, named->n, n);
    for (int i = 0; i < n && !rc; i++)
        if (!mt_parse_bytes(named->items[i], &of[i]))
            rc = mt_fail(err, MT_ERR_USAGE, -EINVAL, "cluster.%s: \"%s\" is no size such as 64GiB", what, named->items[i]);
    return rc;
}

/* The least of all hosts' budgets, what each has beyond it, and what the drives of each may take. */
static int resolve_each(struct mt_plan_request *r, const struct mt_config *c, const struct mt_plan_limits *l,
                        struct mt_err *err)
{
    int n = MT_MIN(MT_MAX(l->n_hosts, 1), MT_MAX_LANES);
    uint64_t memory[MT_MAX_LANES], least = UINT64_MAX;
    for (int i = 0; i < n; i++) {
        struct mt_size of = c->placement.host_budget;
        uint64_t has = l->each[i] ? l->each[i] - MT_MIN(l->each[i], l->device_share) : l->host_bytes;
        set_bytes(&of, has, mt_plan_host_budget(has));
        memory[i] = of.bytes;
        r->drive_room[i] = l->drive_room[i];
    }
    int rc = read_each(memory, "memory", &c->cluster.memory, n, err)
          ?: read_each(r->drive_room, "drives", &c->cluster.drives, n, err);
    for (int i = 0; i < n; i++)
        least = MT_MIN(least, memory[i]);
    for (int i = 0; i < n; i++) {
        r->more[i] = memory[i] - least;
        r->drive_room[i] = c->cluster.drives.n && n > 1 ? MT_MAX(r->drive_room[i], (uint64_t)1) : r->drive_room[i];
    }
    r->placement.host_budget = (struct mt_size){.bytes = least};
    return rc;
}

static void resolve_placement(struct mt_placement *p, const struct mt_plan_limits *l)
{
    if (p->threads == MT_AUTO)
        p->threads = l->threads;
    if (mt_device_kind(l->kind)->shares_host_memory)
        set_bytes(&p->device_budget, p->host_budget.bytes,
                  p->host_budget.bytes / 4 / (uint64_t)MT_MAX(p->lanes, 1));
    else
        set_bytes(&p->device_budget, l->device_bytes, l->device_bytes - MT_MIN(l->device_bytes, l->device_reserve));
    p->poison = getenv("MEGATRAIN_POISON") != NULL;
    const char *piece = getenv("MEGATRAIN_DISK_PIECE");
    if (piece)
        p->piece_elems = mt_align_up(strtoull(piece, NULL, 10), MT_PIECE_ALIGN);
}

int mt_resolve_request(struct mt_plan_request *out, const struct mt_config *c, const struct mt_plan_limits *limits,
                       struct mt_err *err)
{
    struct mt_plan_request r = {.train = true, .placement = c->placement, .drives = limits->drives};
    int named = 0, rc = mt_resolve_numerics(&r.numerics, c, err)
                     ?: mt_device_count_named(&named, c->device.gpus, MT_MAX_DEVICES, err);
    if (!rc && !limits->n_gpus && !named)
        rc = mt_fail(err, MT_ERR_USAGE, -EINVAL,
                     "device.gpus = all: how many GPUs a stored machine has is not known; give a number");
    r.placement.lanes = limits->n_gpus ? limits->n_gpus : named;
    if (!rc && r.placement.lanes > 1 && r.numerics.optimizer->zeroth)
        rc = mt_fail(err, MT_ERR_USAGE, -EINVAL, "device.gpus = %lld with optimizer.type = mezo: its steps are of one device; "
                     "set device.gpus = 1", (long long)r.placement.lanes);
    bool few_groups = r.numerics.groups < r.placement.lanes;
    bool by_units = r.placement.map == MT_MAP_UNITS || (r.placement.map == MT_MAP_AUTO && few_groups);
    if (!rc && r.placement.lanes > 1 && by_units && r.numerics.router_aux_loss > 0)
        rc = mt_fail(err, MT_ERR_USAGE, -EINVAL,
                     "device.gpus = %lld with train.router_aux_loss: that loss is of the tokens that all layers send to each expert, "
                     "which devices add up where they share micro-batches, not layers: set device.map = data and train.groups to a "
                     "power of two, at least %lld, or train.router_aux_loss = 0, or device.gpus = 1",
                     (long long)r.placement.lanes, (long long)r.placement.lanes);
    if (!rc && r.placement.lanes > 1 && r.placement.map == MT_MAP_DATA && few_groups)
        rc = mt_fail(err, MT_ERR_USAGE, -EINVAL,
                     "device.map = data with device.gpus = %lld needs train.groups = %lld or more, which are shared: it is %lld",
                     (long long)r.placement.lanes, (long long)r.placement.lanes, (long long)r.numerics.groups);
    if (!rc && c->eval.generate[0] && (r.placement.lanes > 1 || mt_row_chunks(&r.numerics) > 1))
        rc = mt_fail(err, MT_ERR_USAGE, -EINVAL, "eval.generate is of one device and of rows that are not cut: remove it, or set device.gpus = 1 "
                     "and train.chunk = 0");
    rc = rc ?: resolve_each(&r, c, limits, err);
    if (rc)
        return rc;
    r.draws = c->eval.generate[0] ? (size_t)r.numerics.seq_len : 0;
    resolve_placement(&r.placement, limits);
    /* an upper bound, as the data are not read; of preferences a sample is up to four documents */
    r.docs_per_row = c->data.packing ? (size_t)r.numerics.seq_len : mt_objective_of(&r.numerics)->answers ? 4 : 1;
    r.link_gbps = mt_device_kind(limits->kind)->shares_host_memory ? c->device.link_gbps : 0;
    *out = r;
    return 0;
}

static bool can_be_in_files(const struct mt_unit *u)
{
    return u->n_in_planes[MT_RANGE_IN_FILE] || u->n_in_planes[MT_RANGE_IN_FILE_WIDE] || u->packed_in_files;
}

/* Refuses chunks of rows where layers would not compute what they do of whole ones. */
static int check_chunks(const struct mt_plan_request *r, struct mt_err *err)
{
    const struct mt_layout *l = r->layout;
    bool chunks = mt_row_chunks(&r->numerics) > 1;
    const char *what = chunks ? mt_layout_unchunked(l, (size_t)r->numerics.seq_len) : NULL;
    return !what ? 0 : mt_fail(err, MT_ERR_USAGE, -EINVAL, "train.chunk = %lld: %s has layers with %s, which are not "
                               "computed in chunks yet: set train.chunk = 0", (long long)r->numerics.chunk,
                               l->cfg.family->architecture, what);
}

/* Refuses records, a memory.base and chunks of rows that are not possible. */
static int check_request(const struct mt_plan_request *r, struct mt_err *err)
{
    size_t n_frozen = 0, n_in_file = 0;
    int rc = mt_records_check(r->layout, &r->placement, err);
    if (rc)
        return rc;
    for (size_t i = 0; i < r->layout->n_tensors; i++)
        n_frozen += !r->layout->tensors[i].trainable;
    for (size_t u = 0; u < r->layout->n_units; u++)
        n_in_file += can_be_in_files(&r->layout->units[u]);
    const char *on_disk = r->placement.base == MT_BASE_DISK         ? "base"
                          : r->placement.states == MT_STATES_DISK   ? "states"
                          : r->placement.activations == MT_ACT_DISK ? "activations"
                                                                    : NULL;
    if (on_disk && !r->drives)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "memory.%s = disk needs folders on drives: set memory.nvme_paths, or for a "
                       "plan of another machine --nvme", on_disk);
    if (r->placement.base == MT_BASE_FILES && !n_in_file)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "memory.base = files: %s",
                       n_frozen ? "no frozen tensor of the model's files can be read in place: none has 1 MiB or more (in "
                                  "bf16), and packed ones cannot unless they stay packed under adapters, as files have them "
                                  "(FP8 with scales other than F16; not GPTQ or AWQ); set memory.base = auto"
                                : "nothing is frozen (model.freeze), and trained weights cannot be read from the model's files");
    return check_chunks(r, err);
}

/* --- from the machine ------------------------------------------------------------------------------- */

int mt_resolve(struct mt_plan_choice *out, const struct mt_plan_request *r, struct mt_err *err)
{
    int rc = check_request(r, err);
    if (rc)
        return rc;
    if (r->numerics.compute == MT_COMPUTE_FP8 && !(r->machine->rate[MT_RATE_GEMM_E4M3].value > 0))
        return mt_fail(err, MT_ERR_RUNTIME, -ENOENT, "model.compute = fp8: %s has no compute.gemm_e4m3_tflops: GPUs before "
                       "compute capability 8.9 have no products in FP8; else measure it: megatrain probe all",
                       r->machine->name);
    if (r->drives && !drives_are_rated(r->machine))
        return mt_fail(err, MT_ERR_RUNTIME, -ENOENT,
                       "the drives of memory.nvme_paths have not been measured: megatrain probe all --dir and one of "
                       "these folders");
    return mt_plan_search(out, r, err);
}

/* Chooses the longest chunk whose logits take a small part of the device. */
static void choose_chunk(struct mt_plan_request *r, uint64_t device_bytes)
{
    enum { PART = 16 };
    int64_t chunk[MT_PLAN_MAX_CHUNKS];
    struct mt_plan_request t = *r;
    size_t n = mt_plan_chunks(r, chunk), i = n - 1;
    for (; i; i--) {
        t = *r;
        mt_plan_take_chunk(&t, chunk[i]);
        uint64_t piece = (uint64_t)(t.numerics.logits_piece == MT_AUTO ? chunk[i] : t.numerics.logits_piece);
        uint64_t rest = piece < (uint64_t)chunk[i] ? (uint64_t)chunk[i] * mt_dtype_size(t.numerics.dtype) : 0;
        if ((piece * sizeof(float) + rest) * (uint64_t)r->layout->cfg.vocab <= device_bytes / PART)
            break;
    }
    mt_plan_take_chunk(r, chunk[i]);
}

int mt_resolve_by_rules(struct mt_plan_choice *out, const struct mt_plan_request *r, mt_device *dev,
                        struct mt_err *err)
{
    struct mt_plan_request t = *r;
    int rc = check_request(r, err);
    if (rc)
        return rc;
    t.numerics.micro_batch = mt_resolve_micro_batch(&r->numerics);
    choose_chunk(&t, mt_device_limits(dev)->budget_bytes);
    struct mt_engine_params p = mt_plan_engine_params(&t, dev);
    if (r->halves && !mt_engine_fits(&p))
        t = mt_plan_request_in_halves(&t);
    rc = mt_plan_place(out, &t, dev, err);
    if (rc || t.layout == r->halves || !mt_plan_wants_codes(out, r, mt_device_limits(dev)->coded_rows))
        return rc;
    mt_plan_choice_finish(out);
    t = mt_plan_request_in_halves(&t);
    return mt_plan_place(out, &t, dev, err);
}
