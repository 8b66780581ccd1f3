/* SPDX-License-Identifier: Apache-2.0 */
/* The cpu device: memory comes from the arena, work goes to the streams. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "device/cpu/cpu.h"

static struct mt_cpu_device *cpu(mt_device *dev)
{
    return (struct mt_cpu_device *)dev;
}

static void cpu_destroy(mt_device *dev)
{
    struct mt_cpu_device *d = cpu(dev);
    for (int s = 0; s < MT_N_STREAMS; s++)
        mt_cpu_stream_destroy(&d->streams[s]);
    for (int i = 0; d->bf16_gemm && i < d->base.limits.n_threads; i++)
        mt_cpu_bf16_gemm_destroy(&d->bf16_gemm[i]);
    mt_pool_destroy(&d->pool);
    mt_arena_destroy(&d->arena);
    if (d->memory)
        munmap(d->memory, mt_arena_span(d->base.limits.budget_bytes));
    free(d->bf16_gemm);
    mt_cpu_gemm_destroy(&d->gemm);
    free(d);
}

static int map_memory(struct mt_cpu_device *d, size_t budget, struct mt_err *err)
{
    size_t bytes = mt_arena_span(budget);
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED)
        return mt_fail(err, MT_ERR_NO_FIT, -ENOMEM, "cannot map a device arena of %zu bytes: %s", bytes,
                       strerror(errno));
    d->memory = p;
    return mt_arena_create(&d->arena, p, budget, err);
}

/* Maps the pages now: no page faults during steps, and a lack of memory shows at once. Older kernels, which do not know
 * this advice, map them later. */
static void touch(void *p, size_t bytes)
{
#ifdef MADV_POPULATE_WRITE
    const uintptr_t page = 4096, from = (uintptr_t)p & ~(page - 1), to = (uintptr_t)p + bytes;
    madvise((void *)from, to - from, MADV_POPULATE_WRITE);
#else
    (void)p;
    (void)bytes;
#endif
}

static int cpu_alloc(mt_device *dev, size_t bytes, const char *tag, void **out, struct mt_err *err)
{
    int rc = mt_arena_alloc(cpu(dev)->arena, bytes, tag, out, err);
    if (!rc)
        touch(*out, bytes);
    return rc;
}

static void cpu_free(mt_device *dev, void *ptr)
{
    mt_arena_free(cpu(dev)->arena, ptr);
}

static size_t cpu_bytes_used(const mt_device *dev)
{
    return mt_arena_used(((const struct mt_cpu_device *)dev)->arena);
}

static void run_poison(struct mt_cpu_device *, struct mt_cpu_stream *, const void *args)
{
    const struct mt_zero *z = args;
    memset(z->ptr, 0xff, z->bytes); /* a NaN in bf16 and in f32 */
}

static void cpu_poison(mt_device *dev, void *ptr, size_t bytes)
{
    struct mt_zero z = {ptr, bytes};
    mt_cpu_stream_submit(cpu(dev)->streams[MT_STREAM_COMPUTE], run_poison, &z, sizeof(z));
}

/* What work on the streams may lack is memory for a product. */
static int cpu_status(mt_device *dev, struct mt_err *err)
{
    return atomic_load(&cpu(dev)->no_memory)
               ? mt_fail_nomem(err, "scratch of a product", 0)
               : 0;
}

static int cpu_event_sync(mt_device *dev, mt_event *ev, struct mt_err *err)
{
    mt_cpu_event_sync(ev);
    return cpu_status(dev, err);
}

struct call {
    void (*fn)(void *ctx);
    void *ctx;
};

static void run_call(struct mt_cpu_device *, struct mt_cpu_stream *, const void *args)
{
    const struct call *c = args;
    c->fn(c->ctx);
}

static int cpu_call(mt_device *dev, void (*fn)(void *ctx), void *ctx, struct mt_err *)
{
    struct call c = {fn, ctx};
    mt_cpu_stream_submit(cpu(dev)->streams[MT_STREAM_COMPUTE], run_call, &c, sizeof(c));
    return 0;
}

static int cpu_sync(mt_device *dev, struct mt_err *err)
{
    for (int s = 0; s < MT_N_STREAMS; s++)
        mt_cpu_stream_drain(cpu(dev)->streams[s]);
    return cpu_status(dev, err);
}

#define CPU_COMMAND(ID, name, type)                                                                \
    _Static_assert(sizeof(type) <= MT_CPU_MAX_ARGS, "arguments must fit a command");                    \
    static void command_##name(struct mt_cpu_device *d, struct mt_cpu_stream *s, const void *args) \
    {                                                                                              \
        (void)s;                                                                                   \
        mt_cpu_run_##name(d, args);                                                                \
    }
MT_DEVICE_OPS(CPU_COMMAND, CPU_COMMAND)
#undef CPU_COMMAND

static int cpu_submit(mt_device *dev, enum mt_dev_op op, const void *args, struct mt_err *)
{
    static const struct {
        mt_cpu_command run;
        size_t bytes;
    } command[MT_N_DEV_OPS] = {
#define CPU_ENTRY(ID, name, type) {command_##name, sizeof(type)},
        MT_DEVICE_OPS(CPU_ENTRY, CPU_ENTRY)
#undef CPU_ENTRY
    };
    mt_cpu_stream_submit(cpu(dev)->streams[MT_STREAM_COMPUTE], command[op].run, args, command[op].bytes);
    return 0;
}

static size_t kind_workspace(const struct mt_device_limits *l, enum mt_dev_op op, const void *args)
{
    switch (op) {
#define WITHOUT(ID, name, type)
#define WITH(ID, name, type)                                                                       \
    case MT_DEV_##ID:                                                                              \
        return mt_cpu_##name##_workspace(l, args);
        MT_DEVICE_OPS(WITHOUT, WITH)
#undef WITHOUT
#undef WITH
    default:
        return 0;
    }
}

static size_t cpu_workspace(mt_device *dev, enum mt_dev_op op, const void *args)
{
    return kind_workspace(&dev->limits, op, args);
}

static const struct mt_device_backend cpu_backend = {
    .destroy = cpu_destroy,
    .alloc = cpu_alloc,
    .free = cpu_free,
    .bytes_used = cpu_bytes_used,
    .poison = cpu_poison,
    .event_create = mt_cpu_event_create,
    .event_destroy = mt_cpu_event_destroy,
    .event_record = mt_cpu_event_record,
    .event_wait = mt_cpu_event_wait,
    .event_sync = cpu_event_sync,
    .event_time_ns = mt_cpu_event_time_ns,
    .copy = mt_cpu_copy,
    .call = cpu_call,
    .sync = cpu_sync,
    .status = cpu_status,
    .submit = cpu_submit,
    .workspace = cpu_workspace,
};

static int create_bf16_gemm(struct mt_cpu_device *d, struct mt_err *err)
{
    size_t n = (size_t)d->base.limits.n_threads;
    int rc = 0;
    d->bf16_gemm = mt_calloc(n, sizeof(*d->bf16_gemm));
    if (!d->bf16_gemm)
        return mt_fail_nomem(err, "bf16 products", n * sizeof(*d->bf16_gemm));
    for (size_t i = 0; i < n && !rc; i++)
        rc = mt_cpu_bf16_gemm_create(&d->bf16_gemm[i], err);
    d->base.limits.native_bf16 = d->base.limits.makes_products = d->bf16_gemm[0] != NULL;
    return rc;
}

/*
 * The compute stream's thread is one of the compute threads. If the others are bound to cores it must be bound, too: it
 * could otherwise run on the core of another one and wait for it, while its own core is idle. Copies keep off its core:
 * an operation's end often wakes one, and there it would hold up the next operation, for which the others wait. Any
 * other compute thread can be late: the rest do its share.
 */
static int create_stream(struct mt_cpu_device *d, const struct mt_device_params *p, enum mt_stream s,
                         struct mt_err *err)
{
    static const char *const names[] = {"mt-compute", "mt-h2d", "mt-d2h"};
    bool compute = s == MT_STREAM_COMPUTE, bound = p->cpus && p->n_threads > 1;
    struct mt_cpu_stream_params sp = {.name = names[s],
                                      .cpu = bound && compute ? p->cpus[0] : -1,
                                      .not_cpu = bound && !compute ? p->cpus[0] : -1,
                                      .thread_init = compute ? mt_cpu_bf16_gemm_thread_init : NULL,
                                      .gbps = compute ? 0 : p->link_gbps};
    return mt_cpu_stream_create(&d->streams[s], d, &sp, err);
}

static int create(mt_device **out, const struct mt_device_params *p, struct mt_err *err)
{
    struct mt_cpu_device *d = mt_calloc(1, sizeof(*d));
    if (!d)
        return mt_fail_nomem(err, "the cpu device", sizeof(*d));
    char gemm[96];
    mt_cpu_gemm_describe(gemm, sizeof(gemm));
    d->base.backend = &cpu_backend;
    d->base.limits = mt_device_kind_limits(&mt_cpu_kind, p->budget_bytes, p->n_threads);
    snprintf(d->base.limits.name, sizeof(d->base.limits.name), "cpu (%s)", gemm);
    for (int bf16 = 0; bf16 < 2; bf16++)
        mt_cpu_gemm_arithmetic(d->base.limits.arithmetic[bf16], sizeof(d->base.limits.arithmetic[bf16]), bf16);
    struct mt_pool_params pool = {"compute", p->n_threads, p->cpus, mt_cpu_bf16_gemm_thread_init};
    int rc = map_memory(d, p->budget_bytes, err)
                 ?: create_bf16_gemm(d, err)
                 ?: mt_cpu_gemm_create(&d->gemm, p->n_threads, err)
                 ?: mt_pool_create(&d->pool, &pool, err);
    for (int s = 0; s < MT_N_STREAMS && !rc; s++)
        rc = create_stream(d, p, s, err);
    if (!rc && p->warm)
        mt_cpu_gemm_warm(d->gemm);
    if (rc) {
        cpu_destroy(&d->base);
        return rc;
    }
    *out = &d->base;
    return 0;
}

static void probe(struct mt_device_info *out, int)
{
    *out = (struct mt_device_info){.present = true, .text = "cpu"};
}

const struct mt_device_kind mt_cpu_kind = {
    .name = "cpu",
    .shares_host_memory = true,
    .alignment = MT_ARENA_ALIGNMENT,
    .row_bucket = 32, /* oneDNN prepares bf16 products for each shape */
    .library_bytes = 1 << 20,
    .workspace = kind_workspace,
    .probe = probe,
    .create = create,
};
