/* SPDX-License-Identifier: Apache-2.0 */
/* Measures the machine's rates: products, memory, the optimizer, drives, operations. */
#include "machine/measure.h"

#include <stdio.h>

#include "base/mem.h"
#include "device/op.h"
#include "hw/hw.h"
#include "hw/probe.h"
#include "kinds/kinds.h"
#include "machine/measure_priv.h"
#include "optim/adam_probe.h"
#include "store/disk.h"

enum { LOOKS = 5 }; /* at the cores, before anything is measured */
static const size_t TOGETHER = (size_t)1 << 30;

static void report(const struct mt_measure_params *p, const char *what)
{
    if (p->progress)
        p->progress(p->ctx, what);
}

static bool has_sample(const struct mt_machine *m, const struct mt_metered *op)
{
    for (size_t i = 0; i < m->n_samples; i++)
        if (mt_same_operation(&m->samples[i].op, op))
            return true;
    return false;
}

/* How many operations, at least one, have buffers that fit TOGETHER bytes; they are timed in turn. */
static size_t next_group(const struct mt_measure_params *p, const struct mt_metered *ops, size_t n)
{
    size_t k = 0, bytes = 0;
    for (; k < n; k++) {
        bytes += mt_measure_operation_bytes(p, &ops[k]);
        if (k && bytes > TOGETHER)
            break;
    }
    return k;
}

static int measure_group(struct mt_machine *m, const struct mt_measure_params *p, const struct mt_metered *ops,
                         size_t n, struct mt_err *err)
{
    MT_FREED double *seconds = NULL;
    int rc = MT_NEW(&seconds, n, "a measurement", err);
    for (size_t i = 0; i < n && !rc; i++) {
        char what[200];
        mt_operation_format(what, sizeof(what), &ops[i]);
        report(p, what);
    }
    rc = rc ?: mt_measure_in_turn(seconds, p, ops, n, err);
    for (size_t i = 0; i < n && !rc; i++)
        if (!mt_machine_add_sample(m, &ops[i], seconds[i]))
            rc = mt_fail_nomem(err, "a machine profile", n * sizeof(struct mt_op_sample));
    return rc;
}

static int measure_all(struct mt_machine *m, const struct mt_measure_params *p, const struct mt_metered *ops,
                       size_t n, struct mt_err *err)
{
    int rc = 0;
    for (size_t at = 0, k; at < n && !rc; at += k) {
        k = next_group(p, ops + at, n - at);
        rc = measure_group(m, p, ops + at, k, err);
    }
    return rc;
}

int mt_measure_operations(struct mt_machine *m, const struct mt_measure_params *p,
                          const struct mt_metered *ops, size_t n, struct mt_err *err)
{
    size_t n_new = 0;
    int rc = mt_products_measure(p, ops, n, &n_new, err);
    bool missing = n_new; /* those products take other times now */
    for (size_t i = 0; i < n && !missing; i++)
        missing = !has_sample(m, &ops[i]);
    return rc || !missing ? rc : measure_all(m, p, ops, n, err);
}

/* n tokens in documents of `len`. */
static struct mt_metered attention_op(enum mt_dev_op id, enum mt_dtype t, uint64_t n, uint64_t len)
{
    struct mt_metered op = {.op = id, .dtype = t, .n_dims = 6, .dim = {n, len + 1, 8, 4, 64, 64}};
    mt_metered_count(&op);
    return op;
}

static void add_to_grid(struct mt_measure_grid *g, const struct mt_metered *op)
{
    for (size_t i = 0; i < g->n; i++)
        if (mt_same_operation(&g->ops[i], op))
            return;
    if (g->n < MT_ARRAY_LEN(g->ops) && op->bytes > 0)
        g->ops[g->n++] = *op;
    else
        g->failed = true;
}

/* Products of several shapes and attention of several lengths: their rates depend on these. */
static void list_products(struct mt_measure_grid *g, enum mt_dtype t, uint64_t scale, uint64_t part)
{
    static const uint64_t shape[][3] = {{256, 256, 256},    {512, 512, 512},   {1024, 512, 512},
                                        {512, 2048, 512},   {512, 512, 2048},  {1024, 1024, 1024},
                                        {2048, 256, 1024},  {256, 4096, 512}};
    for (size_t i = 0; i < MT_ARRAY_LEN(shape); i++)
        for (unsigned v = MT_GEMM_NT; v <= MT_GEMM_TN; v++) {
            struct mt_metered op = mt_measure_gemm(v, t, shape[i][0] * scale / part, shape[i][1] * scale / part,
                                                   shape[i][2] * scale / part);
            add_to_grid(g, &op);
        }
    for (uint64_t len = 128; len <= 2048; len *= 4)
        for (int bwd = 0; bwd < 2; bwd++) {
            enum mt_dev_op id = bwd ? MT_DEV_ATTENTION_BWD : MT_DEV_ATTENTION;
            struct mt_metered op = attention_op(id, t, 2048 * scale / part, len / part);
            add_to_grid(g, &op);
        }
}

/* All other operations, in every variant, with n rows of c elements. */
static void list_by_bytes(struct mt_measure_grid *g, enum mt_dtype t, uint64_t n, uint64_t c)
{
    const struct mt_op_sizes sizes = {{
        [MT_SIZE_ROWS] = n, [MT_SIZE_HIDDEN] = c, [MT_SIZE_FFN] = 2 * c, [MT_SIZE_LOSS_ROWS] = n / 8,
        [MT_SIZE_VOCAB] = 8 * c, [MT_SIZE_RUNS] = n / 2, [MT_SIZE_HEADS] = 8, [MT_SIZE_KV_HEADS] = 4,
        [MT_SIZE_ALL_HEADS] = 12, [MT_SIZE_HEAD_DIM] = 64, [MT_SIZE_LENGTH] = n + 1, [MT_SIZE_ELEMENTS] = n * 1024,
        [MT_SIZE_EXPERTS] = 64, [MT_SIZE_TOP_K] = 4}};
    struct mt_metered op;
    int rc = 0;
    for (int id = 0; id < MT_N_DEV_OPS; id++) {
        /* whose rates no length changes, or no number of rows */
        bool alike = id == MT_DEV_DELTA_RULE || id == MT_DEV_DELTA_RULE_BWD || id == MT_DEV_PACKED_GEMM;
        if (mt_dev_op((enum mt_dev_op)id)->bound != MT_BOUND_BYTES && !alike)
            continue;
        for (unsigned which = 0; !(rc = mt_metered_example(&op, (enum mt_dev_op)id, which, &sizes, t)); which++)
            add_to_grid(g, &op);
        g->failed |= rc != -ERANGE;
    }
}

void mt_measure_list_grid(struct mt_measure_grid *g, uint64_t scale, uint64_t part)
{
    *g = (struct mt_measure_grid){.n = 0};
    for (int t = MT_F32; t <= MT_BF16; t++) {
        list_products(g, (enum mt_dtype)t, scale, part);
        for (uint64_t n = 512 / part; n <= 4096 / part; n *= 8)
            list_by_bytes(g, (enum mt_dtype)t, n, 512 * scale / part);
    }
}

static int measure_grid(struct mt_machine *m, const struct mt_measure_params *p, struct mt_err *err)
{
    MT_FREED struct mt_measure_grid *g = NULL;
    int rc = MT_NEW(&g, 1, "a machine profile", err);
    if (rc)
        return rc;
    mt_measure_list_grid(g, m->cpu ? 1 : 4, p->small ? 16 : 1);
    return g->failed ? mt_fail(err, MT_ERR_RUNTIME, -ENOMEM, "too many operations to measure, or out of memory (after %zu)", g->n)
                     : measure_all(m, p, g->ops, g->n, err);
}

static struct mt_metered add_op(uint64_t n)
{
    struct mt_metered op = {.op = MT_DEV_ADD, .dtype = MT_F32, .n_dims = 1, .dim = {n}};
    mt_metered_count(&op);
    return op;
}

/* Rates for shapes without samples: of large products, of attention and of a memory-bound operation; and the cost of a
 * launch, by an operation so small that its own time does not matter. */
static int measure_compute(struct mt_machine *m, const struct mt_measure_params *p, struct mt_err *err)
{
    uint64_t part = p->small ? 16 : 1, side = (m->cpu ? 1536 : 8192) / part, len = 2048 / part;
    const struct {
        enum mt_rate_id id;
        struct mt_metered op;
    } rates[] = {{MT_RATE_GEMM_BF16, mt_measure_gemm(MT_GEMM_NT, MT_BF16, side, side, side)},
                 {MT_RATE_GEMM_F32, mt_measure_gemm(MT_GEMM_NT, MT_F32, side, side, side)},
                 {MT_RATE_GEMM_E4M3, mt_measure_gemm(MT_GEMM_NT, MT_E4M3, side, side, side)},
                 {MT_RATE_ATTENTION, attention_op(MT_DEV_ATTENTION, MT_BF16, m->cpu ? len : 4 * len, len)},
                 {MT_RATE_ATTENTION_BWD, attention_op(MT_DEV_ATTENTION_BWD, MT_BF16, m->cpu ? len : 4 * len, len)},
                 {MT_RATE_DEVICE_GBS, add_op((16 << 20) / part / part)},
                 {MT_RATE_OP_US, add_op(64)}};
    MT_CLOSED_BY(mt_device_destroy) mt_device *dev = NULL;
    size_t bytes = 0;
    double s = 0;
    for (size_t i = 0; i < MT_ARRAY_LEN(rates); i++)
        bytes = MT_MAX(bytes, mt_measure_operation_bytes(p, &rates[i].op));
    int rc = mt_measure_device(&dev, p, bytes, err);
    for (size_t i = 0; i < MT_ARRAY_LEN(rates) && !rc; i++) {
        const struct mt_metered *op = &rates[i].op;
        if (op->dtype == MT_E4M3 && !mt_device_limits(dev)->e4m3)
            continue;
        rc = mt_measure_operation(&s, dev, op, mt_measure_round_ns(p), err);
        if (!rc)
            mt_machine_measured(m, rates[i].id, rates[i].id == MT_RATE_OP_US ? s * 1e6
                                                : op->flops > 0              ? op->flops / s * 1e-12
                                                                             : op->bytes / s * 1e-9);
    }
    return rc;
}

static int measure_adam(struct mt_machine *m, const struct mt_measure_params *p, int threads, struct mt_err *err)
{
    double ns = 0;
    const struct mt_adam_probe_params adam = {.n_threads = threads, .cpus = p->cpus, .numa = p->numa};
    int rc = mt_probe_adam(&adam, &ns, err);
    if (!rc && mt_machine_add_update(m, "", threads, ns))
        m->adam_source = MT_RATE_MEASURED;
    return rc;
}

/* All forms of updates but that of measure_adam(): with one thread, and with all. */
static int measure_updates(struct mt_machine *m, const struct mt_measure_params *p, struct mt_err *err)
{
    struct mt_adam_probe_params probe = {.n = 4 << 20, .cpus = p->cpus, .numa = p->numa};
    const int threads[] = {1, p->n_threads};
    int rc = 0;
    for (size_t i = 1; mt_update_form_at(i, &probe.form) && !rc; i++)
        for (int k = 0; k < 1 + (p->n_threads > 1) && !rc; k++) {
            char name[MT_OPTIMIZER_NAME];
            double ns = 0;
            probe.n_threads = threads[k];
            mt_update_form_name(&probe.form, name);
            rc = mt_probe_adam(&probe, &ns, err);
            if (!rc)
                mt_machine_add_update(m, name, threads[k], ns);
        }
    return rc;
}

static int measure_host(struct mt_machine *m, const struct mt_measure_params *p, struct mt_err *err)
{
    struct mt_hw_memory mem;
    double gbs = 0;
    int rc = mt_hw_memory(&mem, "", err)
          ?: mt_probe_copy(p->n_threads, p->cpus, p->numa, &gbs, err);
    if (rc)
        return rc;
    mt_machine_measured(m, MT_RATE_CORES, p->n_threads);
    mt_machine_measured(m, MT_RATE_HOST_GIB, (double)MT_MIN(mem.total, mem.cgroup_free) / (double)(1 << 30));
    mt_machine_measured(m, MT_RATE_DRAM, gbs);
    for (int t = 1; t <= p->n_threads && !rc; t = t < p->n_threads ? MT_MIN(2 * t, p->n_threads) : t + 1)
        rc = measure_adam(m, p, t, err);
    return rc ?: measure_updates(m, p, err);
}

/* A drive, with the I/O that training uses: past the page cache in p->disk_dir, alone and together. */
static int measure_disk(struct mt_machine *m, const struct mt_measure_params *p, struct mt_err *err)
{
    struct mt_disk_rates r;
    struct mt_disk_probe probe = {.dir = p->disk_dir, .bytes = (uint64_t)(p->small ? 16 : 512) << 20, .both = true};
    uint64_t free_bytes = 0;
    int rc = mt_disk_measure(&r, &probe, err);
    if (rc)
        return rc;
    /* `together` is the sum of both directions */
    const struct {
        enum mt_rate_id id;
        double value;
    } rates[] = {{MT_RATE_DRIVES, 1},
                 {MT_RATE_READ, r.read},
                 {MT_RATE_WRITE, r.write},
                 {MT_RATE_READ_BOTH, r.together * 0.5},
                 {MT_RATE_WRITE_BOTH, r.together * 0.5}};
    for (size_t i = 0; i < MT_ARRAY_LEN(rates); i++)
        mt_machine_measured(m, rates[i].id, rates[i].value);
    if (!mt_hw_disk_free(p->disk_dir, &free_bytes, NULL))
        mt_machine_measured(m, MT_RATE_DISK_GIB, (double)free_bytes / (double)(1 << 30));
    return 0;
}

int mt_measure_again(struct mt_machine *m, const struct mt_measure_params *p, const struct mt_metered *ops,
                     size_t n, struct mt_err *err)
{
    return measure_all(m, p, ops, n, err)
        ?: measure_adam(m, p, p->n_threads, err)
        ?: mt_measure_link(m, p, err);
}

/* Adds samples to the mean share of the n before; rates that are measured beside other work are too low. */
static int look_at_cores(const struct mt_measure_params *p, int *n, int n_more, struct mt_err *err)
{
    double share = 1;
    int rc = 0;
    for (int i = 0; i < n_more && p->cores_share && !rc; i++) {
        rc = mt_probe_cores(p->n_threads, p->cpus, &share, err);
        *p->cores_share = (*p->cores_share * *n + share) / (*n + 1);
        ++*n;
    }
    if (!rc && p->cores_share && *p->cores_share < p->least_share)
        rc = mt_fail(err, MT_ERR_RUNTIME, -EBUSY, "other work runs on this machine: measuring got %.0f%% of the time of its cores (%d)",
                     100 * *p->cores_share, p->n_threads);
    return rc;
}

int mt_measure_machine(struct mt_machine *out, const struct mt_measure_params *p, struct mt_err *err)
{
    const struct mt_device_kind *kind = mt_device_kind(p->device_kind);
    MT_CLOSED_BY(mt_machine_finish) struct mt_machine m = {.cpu = kind && kind->shares_host_memory};
    struct mt_device_info info;
    mt_device *dev = NULL;
    int n_looks = 0;
    if (p->cores_share)
        *p->cores_share = 0;
    mt_device_probe(&info, p->device_kind, p->device_index);
    int rc = mt_measure_device(&dev, p, 0, err);
    if (rc)
        return rc;
    if (!m.cpu) {
        mt_machine_measured(&m, MT_RATE_DEVICE_GIB, (double)info.total_bytes / (double)(1 << 30));
        mt_machine_measured(&m, MT_RATE_CAPABILITY, mt_device_limits(dev)->capability);
        mt_machine_measured(&m, MT_RATE_MULTIPROCESSORS, mt_device_limits(dev)->multiprocessors);
    }
    snprintf(m.name, sizeof(m.name), "%s", mt_device_limits(dev)->name);
    mt_machine_fingerprint(m.fingerprint, sizeof(m.fingerprint), mt_device_limits(dev)->name, p->n_threads);
    mt_device_destroy(&dev);
    rc = look_at_cores(p, &n_looks, LOOKS, err);
    static const struct {
        const char *what;
        int (*run)(struct mt_machine *, const struct mt_measure_params *, struct mt_err *);
    } parts[] = {{"host memory, optimizer", measure_host}, {"products", measure_compute},
                 {"copies", mt_measure_link}, {"sharing of cores", mt_measure_shares},
                 {"disk", measure_disk}, {"operations", measure_grid}};
    for (size_t i = 0; i < MT_ARRAY_LEN(parts) && !rc; i++) {
        bool skip = (parts[i].run == mt_measure_shares && !m.cpu) ||
                    (parts[i].run == measure_disk && !p->disk_dir) ||
                    (parts[i].run == measure_grid && p->brief);
        if (skip)
            continue;
        report(p, parts[i].what);
        rc = parts[i].run(&m, p, err) ?: look_at_cores(p, &n_looks, 1, err);
    }
    rc = rc ?: mt_machine_complete(&m, "the measured profile", err);
    if (!rc)
        *out = MT_GIVE(m);
    return rc;
}
