/* SPDX-License-Identifier: Apache-2.0 */
/* One placement: what it takes of each tier and how long its step is. */
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "model/model.h"
#include "plan/evaluate.h"
#include "store/planes.h"

void mt_plan_choice_finish(struct mt_plan_choice *c)
{
    mt_engine_plan_finish(&c->engine);
    free(c->tier);
    free(c->tried);
    *c = (struct mt_plan_choice){0};
}

uint64_t mt_plan_process_bytes(int threads, uint64_t tokens_per_step)
{
    return ((uint64_t)48 << 20) + (uint64_t)threads * ((uint64_t)5 << 20) + 2 * tokens_per_step * 40;
}

static int make_meter(mt_device **dev, const struct mt_plan_request *r, struct mt_err *err)
{
    return mt_device_create_meter(dev,
                                  &(struct mt_meter_params){
                                      .kind = r->machine->cpu ? "cpu" : "cuda",
                                      .name = r->machine->name,
                                      .budget_bytes = (size_t)r->device_budget,
                                      .n_threads = r->threads,
                                  },
                                  err);
}

struct mt_engine_params mt_plan_engine_params(const struct mt_plan_request *r, mt_device *dev)
{
    size_t micro = MT_MIN(r->micro_batch ? r->micro_batch : 1, r->rows_per_step);
    return (struct mt_engine_params){
        .dev = dev,
        .layout = r->layout,
        .dtype = r->dtype,
        .grad_dtype = r->grad_dtype,
        .max_tokens = micro * r->seq_len,
        .max_docs = micro * MT_MAX(r->docs_per_row, (size_t)1),
        .max_len = r->seq_len,
        .max_micro = mt_div_up(r->rows_per_step, micro),
        .logits_chunk = r->logits_chunk ? r->logits_chunk : mt_model_auto_logits_chunk(r->layout),
        .train = true,
        .slots = r->slots,
        .activations = r->activations,
        .keep_layers = MT_MAX(r->keep_layers, 0),
        .microbatch = r->microbatch,
        .poison = r->poison,
        .adam_threads = r->threads,
    };
}

/* --- tiers of units ------------------------------------------------------------------------------ */

struct needs {
    uint64_t fixed, budget; /* host bytes beside the planes; all there is */
    uint64_t ring;          /* staging, where anything is on disk */
};

static uint64_t plane_bytes(const struct mt_plan_request *r, size_t unit, enum mt_unit_tier t)
{
    const struct mt_unit *u = &r->layout->units[unit];
    uint64_t n = u->n_elems, g = mt_dtype_size(r->grad_dtype);
    if (t == MT_UNIT_ON_DISK)
        return 0;
    if (t == MT_UNIT_STATES_ON_DISK && u->trainable)
        return n * (2 + g);
    return n * (u->trainable ? 12 + g : 4);
}

static uint64_t sum_planes(const struct mt_plan_request *r, const enum mt_unit_tier *tier)
{
    uint64_t sum = 0;
    for (size_t u = 0; u < r->layout->n_units; u++)
        sum += plane_bytes(r, u, tier[u]);
    return sum;
}

static void set_all(const struct mt_plan_request *r, enum mt_unit_tier *tier, enum mt_unit_tier t)
{
    for (size_t u = 0; u < r->layout->n_units; u++)
        tier[u] = t;
}

/* Units in forward order come back to `t` while there is room. */
static void raise_while_fits(const struct mt_plan_request *r, const struct needs *n,
                             enum mt_unit_tier *tier, enum mt_unit_tier t)
{
    uint64_t have = n->fixed + n->ring + sum_planes(r, tier);
    for (size_t u = 0; u < r->layout->n_units; u++) {
        uint64_t more = plane_bytes(r, u, t) - plane_bytes(r, u, tier[u]);
        if (have + more > n->budget)
            return;
        have += more;
        tier[u] = t;
    }
}

static int fail_host(const struct mt_plan_request *r, uint64_t need, struct mt_err *err)
{
    char a[32], b[32], c[32];
    return mt_fail(err, MT_ERR_NO_FIT, -ENOSPC,
                   "the host budget of %s is short by %s: %s are needed%s",
                   mt_format_bytes(a, sizeof(a), r->host_budget),
                   mt_format_bytes(b, sizeof(b), need - r->host_budget),
                   mt_format_bytes(c, sizeof(c), need),
                   r->machine->rate[MT_RATE_DRIVES].value > 0 ? "" : ", and there is no drive for states");
}

/* Host memory first, then states on disk, then all of a unit there; in forward order. */
static int place_units(const struct mt_plan_request *r, const struct needs *n, enum mt_unit_tier *tier,
                       struct mt_err *err)
{
    bool drives = r->machine->rate[MT_RATE_DRIVES].value > 0 && r->machine->rate[MT_RATE_READ].value > 0;
    set_all(r, tier, MT_UNIT_ON_HOST);
    uint64_t all = n->fixed + sum_planes(r, tier);
    if (r->states != MT_STATES_DISK && all <= n->budget)
        return 0;
    if (r->states == MT_STATES_HOST || !drives)
        return fail_host(r, all, err);
    set_all(r, tier, MT_UNIT_STATES_ON_DISK);
    if (n->fixed + n->ring + sum_planes(r, tier) <= n->budget) {
        if (r->states == MT_STATES_AUTO)
            raise_while_fits(r, n, tier, MT_UNIT_ON_HOST);
        return 0;
    }
    set_all(r, tier, MT_UNIT_ON_DISK);
    if (n->fixed + n->ring > n->budget)
        return fail_host(r, n->fixed + n->ring, err);
    raise_while_fits(r, n, tier, MT_UNIT_STATES_ON_DISK);
    return 0;
}

/* Staging of the disk's rings: an update's planes in pieces, and whole units' weights and gradients. */
static uint64_t ring_bytes(const struct mt_plan_request *r)
{
    const uint64_t piece = (uint64_t)64 << 20;
    uint64_t largest = 0, g = mt_dtype_size(r->grad_dtype), w = mt_dtype_size(r->dtype);
    for (size_t u = 0; u < r->layout->n_units; u++)
        largest = MT_MAX(largest, (uint64_t)r->layout->units[u].n_elems);
    return MT_SIM_UNIT_RING * (MT_MIN(largest, piece) * (12 + g) + largest * (w + g));
}

static uint64_t disk_room(const struct mt_plan_request *r)
{
    const struct mt_rate *rate = r->machine->rate;
    return r->disk_budget ? r->disk_budget
                          : (uint64_t)(rate[MT_RATE_DRIVES].value * rate[MT_RATE_DISK_GIB].value *
                                       (double)(1 << 30));
}

static int place_planes(struct mt_plan_choice *c, const struct mt_plan_request *r, struct mt_err *err)
{
    struct needs n = {.budget = r->host_budget, .ring = ring_bytes(r)};
    const struct mt_program_params *pp = &c->engine.program;
    uint64_t spill = c->engine.spill_bytes;
    c->spill_on_disk = r->spill_on_disk && spill;
    c->process_bytes = mt_plan_process_bytes(r->threads, c->n_micro * c->micro_batch * r->seq_len);
    c->staging_bytes = c->engine.staging_bytes;
    if (c->spill_on_disk) {
        c->disk_bytes = spill;
        c->staging_bytes += 2 * MT_SIM_SPILL_RING * MT_MAX(pp->boundary_bytes, pp->record_bytes);
        spill = 0;
    }
    n.fixed = spill + c->staging_bytes + c->process_bytes +
              (r->machine->cpu ? c->engine.device_bytes : 0);
    c->tier = mt_calloc(r->layout->n_units, sizeof(*c->tier));
    if (!c->tier)
        return mt_fail_nomem(err, "a plan", r->layout->n_units);
    int rc = place_units(r, &n, c->tier, err);
    if (rc)
        return rc;
    for (size_t u = 0; u < r->layout->n_units; u++) {
        c->n_tier[c->tier[u]]++;
        c->disk_bytes += plane_bytes(r, u, MT_UNIT_ON_HOST) - plane_bytes(r, u, c->tier[u]);
    }
    bool disk = c->n_tier[MT_UNIT_ON_HOST] < r->layout->n_units;
    c->planes_bytes = sum_planes(r, c->tier);
    c->staging_bytes += disk ? n.ring : 0;
    c->host_bytes = n.fixed + c->planes_bytes + (disk ? n.ring : 0);
    uint64_t room = disk_room(r);
    if (room && c->disk_bytes > room) {
        char a[32], b[32];
        return mt_fail(err, MT_ERR_NO_FIT, -ENOSPC, "the drives' room of %s is short by %s",
                       mt_format_bytes(a, sizeof(a), room),
                       mt_format_bytes(b, sizeof(b), c->disk_bytes - room));
    }
    return 0;
}

/* --- the whole ----------------------------------------------------------------------------------- */

/* The step's program and all memory. */
static int place(struct mt_plan_choice *c, struct mt_program *prog, const struct mt_plan_request *r,
                 struct mt_err *err)
{
    mt_device *dev = NULL;
    int rc = make_meter(&dev, r, err);
    if (rc)
        return rc;
    struct mt_engine_params p = mt_plan_engine_params(r, dev);
    c->micro_batch = p.max_tokens / r->seq_len;
    c->n_micro = p.max_micro;
    c->logits_chunk = p.logits_chunk;
    c->keep_layers = p.keep_layers;
    if (c->n_micro > INT16_MAX)
        rc = mt_fail(err, MT_ERR_NO_FIT, -ENOSPC, "%zu micro-batches a step are more than %d", c->n_micro,
                     INT16_MAX);
    if (!rc)
        rc = mt_engine_divide(&c->engine, &p, err);
    if (!rc)
        rc = mt_program_build(prog, &c->engine.program, err);
    mt_device_destroy(&dev);
    if (rc)
        return rc;
    c->engine.spill_bytes = prog->spill_bytes;
    c->engine.h2d_bytes = mt_program_link_bytes(prog, MT_Q_H2D);
    c->engine.d2h_bytes = mt_program_link_bytes(prog, MT_Q_D2H);
    c->activations = c->engine.activations;
    c->slots = c->engine.program.n_buffers[MT_POOL_WEIGHTS];
    return place_planes(c, r, err);
}

int mt_plan_fits(const struct mt_plan_request *r, struct mt_err *err)
{
    struct mt_program prog = {0};
    struct mt_plan_choice c = {0};
    int rc = place(&c, &prog, r, err);
    mt_program_finish(&prog);
    mt_plan_choice_finish(&c);
    return rc;
}

static int simulate(struct mt_plan_choice *c, const struct mt_program *prog,
                    const struct mt_plan_request *r, mt_cost_table *costs, struct mt_sim_graph *graph,
                    struct mt_err *err)
{
    struct mt_sim_graph g = {0};
    struct mt_sim_params sp = {.machine = r->machine, .layout = r->layout, .dtype = r->dtype,
                               .grad_dtype = r->grad_dtype, .adam_threads = r->threads,
                               .link_gbps = r->link_gbps, .tier = c->tier,
                               .spill_on_disk = c->spill_on_disk,
                               .tokens = (double)(r->rows_per_step * r->seq_len)};
    int rc = mt_sim_graph_build(&g, prog, costs, &sp, err);
    if (!rc)
        rc = mt_sim_run(&c->sim, &g, &sp, err);
    if (!rc && graph)
        *graph = g;
    else
        mt_sim_graph_finish(&g);
    return rc;
}

int mt_plan_with_costs(struct mt_plan_choice *out, const struct mt_plan_request *r, mt_cost_table *costs,
                       struct mt_sim_graph *graph, struct mt_err *err)
{
    struct mt_program prog = {0};
    struct mt_plan_choice c = {0};
    int rc = place(&c, &prog, r, err);
    if (!rc)
        rc = simulate(&c, &prog, r, costs, graph, err);
    mt_program_finish(&prog);
    if (rc) {
        mt_plan_choice_finish(&c);
        return rc;
    }
    *out = c;
    return 0;
}

int mt_plan_costs(mt_cost_table **out, const struct mt_plan_request *r, struct mt_err *err)
{
    struct mt_engine_params p = mt_plan_engine_params(r, NULL);
    return mt_cost_table_create(out,
                                &(struct mt_cost_params){.engine = &p,
                                                         .machine = r->machine,
                                                         .seq_len = r->seq_len,
                                                         .rows_per_step = r->rows_per_step,
                                                         .micro_batch = p.max_tokens / r->seq_len},
                                err);
}

int mt_plan_evaluate(struct mt_plan_choice *out, const struct mt_plan_request *r,
                     struct mt_sim_graph *graph, struct mt_err *err)
{
    mt_cost_table *costs = NULL;
    int rc = mt_plan_costs(&costs, r, err);
    if (!rc)
        rc = mt_plan_with_costs(out, r, costs, graph, err);
    mt_cost_table_destroy(&costs);
    return rc;
}
