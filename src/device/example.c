/* SPDX-License-Identifier: Apache-2.0 */
#include "device/example.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "device/meter.h"
#include "device/op.h"

enum { MAX_BUFFERS = 24, PATTERN = 1 << 20, MIN_BYTES = 64, FLOW_ALIGN = 256 };

struct mt_example {
    struct mt_example_params p;
    void *args;
    void *buffer[MAX_BUFFERS]; /* from the device's arena */
    int32_t *host[MAX_BUFFERS];
    int n_buffers, n_host;
    size_t flow_used; /* bytes of the flow that fresh operands have */
    uint32_t *pattern; /* PATTERN bytes, filled when first needed */
    struct mt_err err; /* the first failure */
};

static void fail(mt_example *x, size_t bytes)
{
    if (!x->err.code)
        mt_fail_nomem(&x->err, "an example of an operation", bytes);
}

static void fill_random(uint32_t *w, size_t n)
{
    uint64_t x = 88172645463325252u;
    for (size_t i = 0; i < n; i++) {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        w[i] = (0x3f003f00u | (uint32_t)(x & 0x007f007fu)) ^ (uint32_t)(x >> 32 & 0x80008000u);
    }
}

static int upload(mt_device *dev, void *dst, const void *src, size_t bytes, struct mt_err *err)
{
    struct mt_copy c = {dst, bytes, src, bytes, bytes, 1};
    int rc = mt_device_copy(dev, MT_STREAM_COMPUTE, &c, err);
    return rc ? rc : mt_device_sync(dev, err);
}

static int fill_pattern(mt_device *dev, char *dst, size_t bytes, uint32_t **pattern, struct mt_err *err)
{
    int rc = 0;
    if (!*pattern) {
        *pattern = mt_calloc(PATTERN / 4, 4);
        if (!*pattern)
            return mt_fail_nomem(err, "random values", PATTERN);
        fill_random(*pattern, PATTERN / 4);
    }
    for (size_t at = 0; at < bytes && !rc; at += PATTERN)
        rc = upload(dev, dst + at, *pattern, MT_MIN((size_t)PATTERN, bytes - at), err);
    return rc;
}

static int fill(mt_example *x, void *p, size_t bytes)
{
    return x->p.zero ? mt_op_zero(x->p.dev, &(struct mt_zero){p, bytes}, &x->err)
                     : fill_pattern(x->p.dev, p, bytes, &x->pattern, &x->err);
}

static void *take_from_arena(mt_example *x, size_t bytes, bool floats)
{
    void *p = NULL;
    if (x->err.code || mt_device_alloc(x->p.dev, MT_MAX(bytes, (size_t)MIN_BYTES), "example", &p, &x->err))
        return NULL;
    x->buffer[x->n_buffers++] = p;
    if (floats && !x->p.dry && fill(x, p, bytes))
        return NULL;
    return p;
}

static void *take(mt_example *x, unsigned use, enum mt_dtype dtype, size_t n, bool floats)
{
    size_t bytes = n * mt_dtype_size(dtype);
    if (x->err.code)
        return NULL;
    if (!x->p.take)
        return take_from_arena(x, bytes, floats);
    void *p = x->p.take(x->p.ctx, use, dtype, n);
    if (!p)
        fail(x, bytes);
    return p;
}

mt_device *mt_example_device(const mt_example *x)
{
    return x->p.dev;
}

void *mt_example_take(mt_example *x, unsigned use, enum mt_dtype dtype, size_t n)
{
    size_t bytes = mt_align_up(n * mt_dtype_size(dtype), FLOW_ALIGN), at = x->flow_used;
    if (!(use & MT_TAKE_FRESH) || !x->p.flow.data || bytes > x->p.flow.bytes - at)
        return take(x, use, dtype, n, true);
    x->flow_used += bytes;
    return (char *)x->p.flow.data + at;
}

void *mt_example_workspace(mt_example *x, size_t bytes)
{
    return take(x, 0, MT_F32, mt_div_up(bytes, sizeof(float)), true);
}

int32_t *mt_example_host_ints(mt_example *x, size_t n, uint64_t mul, uint64_t mod)
{
    int32_t *v = x->err.code ? NULL : mt_calloc(n, sizeof(*v));
    if (!v) {
        fail(x, n * sizeof(*v));
        return NULL;
    }
    x->host[x->n_host++] = v;
    for (size_t i = 0; i < n; i++)
        v[i] = (int32_t)(mod ? i * mul % mod : i * mul);
    return v;
}

int32_t *mt_example_upload(mt_example *x, const int32_t *host, size_t n)
{
    int32_t *p = host ? take(x, MT_TAKE_READ, MT_F32, n, false) : NULL;
    if (p && !x->p.dry && upload(x->p.dev, p, host, n * sizeof(*p), &x->err))
        return NULL;
    return p;
}

int32_t *mt_example_ints(mt_example *x, size_t n, uint64_t mul, uint64_t mod)
{
    return mt_example_upload(x, mt_example_host_ints(x, n, mul, mod), n);
}

const uint16_t *mt_example_choices(mt_example *x, size_t n, size_t e, size_t k)
{
    size_t words = mt_div_up(n * k, 2);
    int32_t *v = mt_example_host_ints(x, words, 0, 0);
    for (size_t i = 0; v && i < n * k; i++) {
        uint16_t id = (uint16_t)((i / k * 7 + i % k) % e);
        memcpy((char *)v + i * sizeof(id), &id, sizeof(id));
    }
    return (const uint16_t *)(const void *)mt_example_upload(x, v, words);
}

int mt_example_create(mt_example **out, const struct mt_example_params *p, struct mt_err *err)
{
    const struct mt_op *op = mt_dev_op(p->shape.op);
    mt_example *x = mt_calloc(1, sizeof(*x));
    void *args = mt_calloc(1, op->args_bytes);
    if (!x || !args) {
        free(x);
        free(args);
        return mt_fail_nomem(err, "an example of an operation", sizeof(*x) + op->args_bytes);
    }
    x->p = *p;
    x->args = args;
    op->fill(x, &p->shape, args);
    if (x->err.code) {
        int rc = x->err.code;
        if (err)
            *err = x->err;
        mt_example_destroy(&x);
        return rc;
    }
    *out = x;
    return 0;
}

void mt_example_destroy(mt_example **example)
{
    mt_example *x = *example;
    if (!x)
        return;
    mt_device_sync(x->p.dev, NULL);
    for (int i = 0; i < x->n_buffers; i++)
        mt_device_free(x->p.dev, x->buffer[i]);
    for (int i = 0; i < x->n_host; i++)
        free(x->host[i]);
    free(x->pattern);
    free(x->args);
    free(x);
    *example = NULL;
}

int mt_example_submit(mt_example *x, struct mt_err *err)
{
    return mt_device_submit(x->p.dev, x->p.shape.op, x->args, err);
}

void *mt_example_args(mt_example *x)
{
    return x->args;
}

int mt_example_n_buffers(const mt_example *x)
{
    return x->n_buffers;
}

int mt_example_flow_create(struct mt_example_flow *out, mt_device *dev, size_t bytes, struct mt_err *err)
{
    void *p = NULL;
    uint32_t *pattern = NULL;
    int rc = mt_device_alloc(dev, MT_MAX(bytes, (size_t)MIN_BYTES), "example", &p, err);
    if (!rc)
        rc = fill_pattern(dev, p, bytes, &pattern, err);
    free(pattern);
    if (rc) {
        mt_device_free(dev, p);
        return rc;
    }
    *out = (struct mt_example_flow){p, bytes};
    return 0;
}

/* --- shapes ------------------------------------------------------------------------------------- */

/* The cost of example arguments, made on a counting device of any kind: cost does not depend on the kind. */
int mt_metered_count(struct mt_metered *m)
{
    struct mt_example_params p = {.shape = *m, .dry = true};
    struct mt_metered counted;
    mt_example *x = NULL;
    struct mt_meter_params meter = {.kind = &mt_cpu_kind, .budget_bytes = SIZE_MAX};
    int rc = mt_device_create_meter(&p.dev, &meter, NULL);
    if (!rc)
        rc = mt_example_create(&x, &p, NULL);
    if (!rc) {
        mt_dev_op_cost(m->op, x->args, &counted);
        m->flags = counted.flags;
        m->flops = counted.flops;
        m->bytes = counted.bytes;
    }
    mt_example_destroy(&x);
    mt_device_destroy(&p.dev);
    return rc;
}

static unsigned length_of(const char *const *name)
{
    unsigned n = 0;
    while (name[n])
        n++;
    return n;
}

int mt_metered_example(struct mt_metered *out, enum mt_dev_op id, unsigned which, const struct mt_op_sizes *sizes,
                       enum mt_dtype dtype)
{
    const struct mt_op *op = mt_dev_op(id);
    unsigned variants = length_of(op->name), flags = which / variants;
    if (flags >= MT_OP_FLAGS || (flags && !op->flags[flags]))
        return -ERANGE;
    *out = (struct mt_metered){.op = id, .variant = which % variants, .flags = op->flags[flags],
                               .dtype = op->f32_only ? MT_F32 : op->bf16_only ? MT_BF16 : dtype};
    for (; out->n_dims < MT_METER_DIMS && op->dim[out->n_dims] != MT_SIZE_NONE; out->n_dims++)
        out->dim[out->n_dims] = op->dim[out->n_dims] == MT_SIZE_HIDDEN_64 ? mt_align_up(sizes->of[MT_SIZE_HIDDEN], 64)
                                                                           : sizes->of[op->dim[out->n_dims]];
    return mt_metered_count(out);
}
