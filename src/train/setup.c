/* SPDX-License-Identifier: Apache-2.0 */
#include "train/setup.h"

#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/mem.h"
#include "checkpoint/checkpoint.h"
#include "device/products.h"
#include "hw/hw.h"
#include "kinds/kinds.h"
#include "machine/products.h"
#include "machine/stored.h"
#include "model/ranges.h"
#include "plan/evaluate.h"
#include "train/cluster.h"
#include "train/shared.h"
#include "train/texts.h"

/* oneDNN aborts the process when malloc fails: warm its products up only if this much memory is free. */
static const uint64_t WARM_NEEDS = (uint64_t)256 << 20;

/* Must come before planes are allocated and threads are started: it sets the policy for memory taken later. */
static void spread_memory(struct mt_setup *s)
{
    bool interleaved = mt_numa_choose(&s->numa, s->in->cfg->device.numa);
    if (s->numa.n > 1)
        mt_info("host memory is spread over %d NUMA nodes%s (device.numa = auto)", s->numa.n,
                interleaved ? "" : ", but for staging and activations, as memory policies are forbidden here");
}

/* Results may differ in bits between products, and any device may compute any unit. */
static int check_product(const mt_device *first, const mt_device *other, struct mt_err *err)
{
    const char *a = mt_device_limits(first)->product, *b = mt_device_limits(other)->product;
    return !strcmp(a, b) ? 0
                         : mt_fail(err, MT_ERR_USAGE, -EINVAL,
                                   "device.gpus: %s and %s may differ in bits: name GPUs of one product",
                                   mt_device_limits(first)->name, mt_device_limits(other)->name);
}

static int open_devices(struct mt_setup *s, const struct mt_plan_limits *limits, struct mt_err *err)
{
    struct mt_hw_memory hw;
    const struct mt_config *c = s->in->cfg;
    const struct mt_placement *p = &s->request.placement;
    uint64_t budget = p->device_budget.bytes;
    MT_STR_FREED struct mt_str products = {0}; /* one table for all devices */
    int n = 0, rc = mt_hw_memory(&hw, "", err);
    rc = rc ?: mt_hw_cores(&s->cpus, &n, err);
    if (rc)
        return rc;
    if (p->threads > n) { /* more threads than cores are not bound */
        free(s->cpus);
        s->cpus = NULL;
    }
    uint64_t most = MT_MIN(hw.address_space, hw.cgroup_free);
    bool warm = most > budget && most - budget > WARM_NEEDS;
    struct mt_device_params params = {
        .kind = limits->kind,
        .index = limits->gpu[0],
        .budget_bytes = (size_t)budget,
        .n_threads = (int)p->threads,
        .cpus = s->cpus,
        .link_gbps = c->device.link_gbps,
        .warm = warm,
    };
    s->device_index = params.index;
    rc = mt_device_create(&s->dev[0], &params, err) ?: mt_products_load(s->dev[0], err);
    if (!rc)
        mt_device_products(s->dev[0], &products);
    for (s->n_devs = 1; s->n_devs < p->lanes && !rc; s->n_devs++) {
        mt_device **dev = &s->dev[s->n_devs];
        params.index = limits->gpu[s->n_devs];
        rc = mt_device_create(dev, &params, err) ?: check_product(s->dev[0], *dev, err);
        if (!rc)
            mt_device_share_findings(*dev, s->dev[0]);
        if (!rc && !mt_device_adopt_products(*dev, products.p ? products.p : ""))
            rc = mt_fail_nomem(err, "the choices of algorithms", products.len);
    }
    s->request.makes_products = !rc && mt_device_limits(s->dev[0])->makes_products;
    if (!rc && warm && !s->in->resident)
        rc = mt_hw_resident(&s->in->resident, err);
    s->request.resident = warm ? s->in->resident : 0;
    return rc;
}

/* If the machine has a profile, the search decides every `auto`. *found: it did. */
static int search(struct mt_setup *s, bool *found, struct mt_err *err)
{
    const struct mt_device_limits *lim = mt_device_limits(s->dev[0]);
    struct mt_err why = {0};
    *found = false;
    int rc = mt_machine_load(&s->machine, lim, (int)s->request.placement.threads, &why);
    if (!rc) {
        s->request.machine = &s->machine;
        rc = mt_resolve(&s->choice, &s->request, &why);
        *found = !rc;
        if (rc == -ENOSPC)
            return 0; /* deciding by rules then fails with what is short */
        if (rc == -ENOENT)
            mt_warn("no prediction: %s", why.msg);
    } else if (rc != -ENOENT) {
        mt_warn("no prediction: %s", why.msg);
        rc = 0;
    }
    if (rc && rc != -ENOENT && err)
        *err = why;
    return rc == -ENOENT ? 0 : rc;
}

struct mt_engine_params mt_setup_engine_params(const struct mt_setup *s)
{
    struct mt_plan_request r = mt_plan_request_as(&s->request, &s->choice);
    struct mt_engine_params p = mt_plan_engine_params(&r, s->dev[0]);
    p.other_dev = &s->dev[1];
    p.net = mt_cluster_net(s->cluster);
    p.update_cpus = s->cpus;
    const char *isa = getenv("MEGATRAIN_ADAM_ISA");
    for (enum mt_isa i = MT_ISA_SCALAR; isa && i <= MT_ISA_AVX512; i++)
        if (!strcmp(isa, mt_isa_name(i)) && mt_isa_available(i))
            p.isa = i;
    return p;
}

/* Refuses FP8 on a GPU that has no products in it; the cpu device has its numbers, and not its speed. */
static int check_compute(const struct mt_setup *s, struct mt_err *err)
{
    const struct mt_device_limits *l = mt_device_limits(s->dev[0]);
    if (s->request.numerics.compute != MT_COMPUTE_FP8)
        return 0;
    if (l->e4m3 && l->shares_host_memory)
        mt_info("model.compute = fp8 on the cpu device saves neither time nor memory: it shows what a GPU would compute");
    if (!l->shares_host_memory && s->request.numerics.dtype == MT_F32)
        return mt_fail(err, MT_ERR_USAGE, -ENOTSUP, "model.compute = fp8 with model.dtype = f32 is for comparisons on the cpu "
                       "device: set model.dtype = bf16");
    return l->e4m3 ? 0
                   : mt_fail(err, MT_ERR_USAGE, -ENOTSUP, "model.compute = fp8: %s has no products in FP8, which GPUs have since "
                             "compute capability 8.9: set model.compute = bf16", l->product[0] ? l->product : l->name);
}

/* Of texts whose number at once is open. */
static void choose_texts(struct mt_setup *s)
{
    struct mt_inputs *in = s->in;
    size_t n = mt_texts_choose(&s->request, &in->texts, s->dev[0]);
    mt_texts_request(&s->request, &in->texts, n);
    in->cache = s->request.cache;
    in->draws = s->request.draws;
    in->cfg->train.batch_size = (int64_t)n;
    mt_debug("%zu texts share a pass", n);
}

/* Turns the request into the choice. */
static int decide(struct mt_setup *s, const struct mt_plan_limits *limits, struct mt_err *err)
{
    spread_memory(s);
    s->request.layout = s->in->layout;
    s->request.halves = s->in->halves;
    int rc = mt_shared_request(s, err) ?: open_devices(s, limits, err) ?: check_compute(s, err);
    if (!rc && s->in->texts.n)
        choose_texts(s);
    if (!rc && s->request.train)
        rc = search(s, &s->predicted, err);
    if (!rc && !s->predicted)
        rc = mt_resolve_by_rules(&s->choice, &s->request, s->dev[0], err);
    if (!rc && s->cluster) /* of the first, for all */
        s->request.process = s->request.placement.host_budget.bytes - mt_setup_engine_params(s).host_bytes;
    return rc ?: mt_shared_take_choice(s, err);
}

int mt_setup_findings(const struct mt_setup *s, struct mt_str *out)
{
    for (int pass = 0; pass < 2; pass++) /* the others' to the first, and then all to each */
        for (int i = 1; i < s->n_devs; i++) {
            MT_STR_FREED struct mt_str text = {0};
            mt_device_findings(s->dev[pass ? 0 : i], &text);
            if (text.failed)
                return -ENOMEM;
            if (text.p)
                mt_device_adopt_findings(s->dev[pass ? i : 0], text.p);
        }
    mt_device_findings(s->dev[0], out);
    return out->failed ? -ENOMEM : 0;
}

bool mt_setup_adopt_findings(struct mt_setup *s, const char *text)
{
    bool taken = true;
    for (int i = 0; i < s->n_devs; i++)
        taken &= mt_device_adopt_findings(s->dev[i], text);
    return taken;
}

void mt_setup_adopt_checkpoint(struct mt_setup *s)
{
    const char *dirs[] = {s->in->cfg->adapter.path, s->in->model_dir};
    bool found = false;
    for (size_t i = 0; i < MT_ARRAY_LEN(dirs) && !found; i++) {
        MT_CLOSED_BY(mt_train_state_finish) struct mt_train_state st = {.step = 0};
        if (*dirs[i] && !mt_checkpoint_read_state(dirs[i], &st, NULL) && st.findings) {
            found = true;
            if (mt_setup_adopt_findings(s, st.findings))
                mt_debug("libraries are used as %s was made (%s)", dirs[i], st.findings);
            else
                mt_debug("%s was made with another library or GPU, so results may differ in bits (%s)", dirs[i], st.findings);
        }
    }
}

void mt_setup_doubt(const struct mt_setup *s)
{
    for (int i = 0; i < s->n_devs; i++)
        mt_device_doubt(s->dev[i]);
}

size_t mt_setup_distrust(const struct mt_setup *s)
{
    size_t n = 0;
    for (int i = 0; i < s->n_devs; i++)
        n += mt_device_distrust(s->dev[i]);
    return n;
}

void mt_setup_trust(const struct mt_setup *s)
{
    for (int i = 0; i < s->n_devs; i++)
        mt_device_trust(s->dev[i]);
}

const struct mt_numerics *mt_setup_numerics_of(const struct mt_setup *s, size_t learner)
{
    return s->learner ? &s->learner[learner] : &s->choice.numerics;
}

const struct mt_layout *mt_setup_layout_of(const struct mt_setup *s, size_t learner)
{
    if (!s->learner)
        return s->choice.layout;
    return s->choice.layout == s->shared[1] ? s->in[learner].halves : s->in[learner].layout;
}

static int check_copies(const struct mt_setup *s, struct mt_err *err)
{
    const struct mt_config *c = s->in->cfg;
    if (!s->request.train || !s->choice.engine.uses_files || c->checkpoint.save != MT_SAVE_FULL ||
        s->choice.layout->n_adapters || c->checkpoint.frozen != MT_FROZEN_COPY)
        return 0;
    return mt_fail(err, MT_ERR_USAGE, -EINVAL, "memory.base = files with checkpoint.frozen = copy: a run that goes on from "
                   "a copy cannot read it in place; set checkpoint.frozen = name, or memory.base = host");
}

/* Of what comes after steps that the run does not have. */
static void say_unreached(const struct mt_inputs *in)
{
    const struct mt_config *c = in->cfg;
    const struct mt_lr *lr = &in->lr;
    const uint64_t blocks = strcmp(c->train.blocks, "off") ? (uint64_t)c->train.block_steps : 0, all = in->total_steps;
    const struct {
        const char *key, *what;
        uint64_t steps;
        bool late;
    } of[] = {{"train.warmup", "the learning rate never reaches its peak", lr->warmup, lr->warmup >= all},
              {"train.decay", "the learning rate never comes down to its least", lr->decay, lr->schedule == MT_LR_WSD && lr->decay > all},
              {"train.delink_at", "layers share their weights to the end", (uint64_t)c->train.delink_at, (uint64_t)c->train.delink_at >= all},
              {"adapter.merge_every", "adapters are never merged", (uint64_t)c->adapter.merge_every, (uint64_t)c->adapter.merge_every >= all},
              {"train.block_steps", "one block alone is trained", blocks, blocks >= all}};
    for (size_t i = 0; i < MT_ARRAY_LEN(of); i++)
        if (of[i].late)
            mt_warn("%s is %llu steps of a run of %llu: %s", of[i].key, (unsigned long long)of[i].steps,
                    (unsigned long long)all, of[i].what);
}

/* A learner's steps, and what was decided, into its configuration. */
static int lay_out_learner(struct mt_setup *s, size_t i, struct mt_err *err)
{
    struct mt_inputs *in = &s->in[i];
    struct mt_numerics *n = s->learner ? &s->learner[i] : &s->choice.numerics;
    int rc = in->data || in->eval_data ? mt_inputs_lay_out_steps(in, n, err) : 0;
    rc = rc ?: mt_config_adopt(in->cfg, n, &s->choice.placement, "chosen", err);
    if (!rc && s->request.train && in->sampler)
        say_unreached(in);
    return rc;
}

static int request_hosts(struct mt_setup *s, struct mt_err *err)
{
    const mt_net *net = mt_cluster_net(s->cluster);
    s->request.placement.hosts = net ? mt_net_size(net) : 1;
    mt_cluster_take_limits(s->cluster, &s->request);
    return net ? mt_plan_on_hosts(&s->request, s->in->cfg, mt_net_rank(net), err) : 0;
}

int mt_setup_open_all(struct mt_setup *s, struct mt_inputs *in, size_t n, enum mt_inputs_use use,
                      struct mt_cluster *cluster, struct mt_err *err)
{
    struct mt_plan_limits limits;
    *s = (struct mt_setup){.in = in, .n_learners = n, .cluster = cluster};
    int rc = mt_shared_check(s, err)
          ?: mt_plan_limits_here(&limits, in->cfg, err);
    rc = rc ?: mt_cluster_set_limits(cluster, &limits, in->cfg, err)
            ?: mt_resolve_request(&s->request, in->cfg, &limits, err);
    s->request.train = use == MT_RUN_TRAIN;
    s->request.top = s->request.train ? 0 : in->top;
    s->request.cache = in->cache;
    if (in->draws || !s->request.train)
        s->request.draws = in->draws;
    else if (in->n_answers)
        s->request.cache = mt_inputs_answers_cache(&s->request.draws, in->layout, s->request.draws, in->answer_len,
                                                   in->n_answers);
    rc = rc ?: request_hosts(s, err)
            ?: decide(s, &limits, err)
            ?: check_copies(s, err);
    for (size_t i = 0; i < n && !rc; i++)
        rc = lay_out_learner(s, i, err);
    return rc;
}

int mt_setup_open(struct mt_setup *s, struct mt_inputs *in, enum mt_inputs_use use, struct mt_err *err)
{
    return mt_setup_open_all(s, in, 1, use, NULL, err);
}

/* The request with every value fixed as it is run. */
static int request_as_run(const struct mt_setup *s, struct mt_plan_request *r, struct mt_err *err)
{
    if (!s->predicted)
        return mt_fail(err, MT_ERR_RUNTIME, -ENOENT,
                       s->request.machine ? "the search found no placement"
                                          : "this machine has not been measured: megatrain probe all");
    *r = mt_plan_request_as(&s->request, &s->choice);
    return 0;
}

int mt_setup_predict(const struct mt_setup *s, struct mt_sim_graph *graph, struct mt_err *err)
{
    MT_CLOSED_BY(mt_plan_choice_finish) struct mt_plan_choice c = {0};
    struct mt_plan_request r;
    return request_as_run(s, &r, err) ?: mt_plan_evaluate(&c, &r, graph, err);
}

int mt_setup_operations(const struct mt_setup *s, struct mt_metered **ops, size_t *n, struct mt_err *err)
{
    struct mt_plan_request r;
    return request_as_run(s, &r, err) ?: mt_plan_operations(ops, n, &r, err);
}

bool mt_setup_names_base(const struct mt_setup *s, size_t learner)
{
    const struct mt_config *cfg = s->in[learner].cfg;
    bool named = s->choice.layout->n_adapters || cfg->checkpoint.frozen == MT_FROZEN_NAME;
    return cfg->checkpoint.save == MT_SAVE_FULL && named;
}

int mt_setup_plane_params(const struct mt_setup *s, struct mt_plane_set_params *p, struct mt_err *err)
{
    const struct mt_numerics *n = &s->choice.numerics;
    int rc = mt_layout_plane_params(p, s->choice.layout, s->request.train ? n->optimizer : NULL, n->grad_dtype, err);
    if (!rc)
        mt_engine_plan_trim(&s->choice.engine, p);
    if (s->cluster && mt_cluster_leads(s->cluster))
        p->move = (struct mt_plane_move){mt_cluster_move, (void *)s};
    p->sums = s->choice.placement.nvme_checksums;
    p->numa = &s->numa;
    return rc;
}

void mt_setup_finish(struct mt_setup *s)
{
    mt_plan_choice_finish(&s->choice);
    mt_machine_finish(&s->machine);
    for (size_t i = 0; i < MT_ARRAY_LEN(s->dev); i++)
        mt_device_destroy(&s->dev[i]);
    free(s->cpus);
    free(s->learner);
    mt_layout_destroy(&s->shared[0]);
    mt_layout_destroy(&s->shared[1]);
    *s = (struct mt_setup){0};
}
