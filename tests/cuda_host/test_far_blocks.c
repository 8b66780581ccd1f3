/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Whole matrices of more than 2^32 elements: the last rows of a result have the bits that they have where these rows are
 * all there is. Only the last blocks of a launch run, and of an operand only the end is written: the emulation's device
 * memory is there when it is touched. An operation's arguments are those of the example of its row.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/packed.h"
#include "device/op.h"
#include "emu/emu.h"
#include "kinds/kinds.h"

enum { NEAR = 8, ROWS = 4, WIDTH = 1032, TAIL = 1 << 16 /* elements that are written */, MAX_TAKEN = 24, FEW = 16 /* bytes */,
       MOST_BYTES = 1 << 20 };
static const size_t far = ((size_t)1 << 22) + NEAR, budget = (size_t)400 << 30;

static mt_device *dev;
static struct mt_err err;

/* Operations whose results are not of their own rows alone, whose example has operands all over the matrix, or that write
 * all of it. */
static const enum mt_dev_op not_by_rows[] = {
    MT_DEV_GEMM, MT_DEV_ATTENTION, MT_DEV_ATTENTION_BWD, MT_DEV_ATTENTION_CACHED, MT_DEV_DELTA_RULE, MT_DEV_DELTA_RULE_BWD,
    MT_DEV_ADAFACTOR, MT_DEV_APOLLO, MT_DEV_EIGEN, MT_DEV_AMAX, MT_DEV_ROUTE_LISTS, MT_DEV_SIGNS, MT_DEV_PERTURB,
    MT_DEV_EMBEDDING_BWD, MT_DEV_ZERO,
};
/* Those that sum pieces of all elements: the last piece is as long as what is near, and others' sums are zeros. */
static const enum mt_dev_op by_pieces[] = {MT_DEV_MUON, MT_DEV_LOW_ADAM};
/* Those of which the last blocks have some of the columns, or whose rows are not those of the result. */
static const enum mt_dev_op some_columns[] = {MT_DEV_ATTENTION_SINK, MT_DEV_DELTA_GATES_BWD, MT_DEV_SHORT_CONV_BWD,
                                              MT_DEV_QUANTISE};

#define WITHOUT(ID, name, type)
#define WITH(ID, name, type) MT_DEV_##ID,
static const enum mt_dev_op with_workspace[] = {MT_DEVICE_OPS(WITHOUT, WITH)};
#undef WITHOUT
#undef WITH

static bool among(const enum mt_dev_op *list, size_t n, enum mt_dev_op op)
{
    while (n && list[n - 1] != op)
        n--;
    return n;
}

static void must(int rc, const char *name)
{
    if (rc) {
        printf("FAIL %s: %s\n", name, err.msg);
        exit(1);
    }
}

static void copy(void *dst, const void *src, size_t bytes)
{
    must(mt_device_copy(dev, MT_STREAM_COMPUTE, &(struct mt_copy){dst, bytes, src, bytes, bytes, 1}, &err), "copy");
    must(mt_device_sync(dev, &err), "copy");
}

struct taken {
    struct {
        char *p;
        size_t bytes, element;
        unsigned use;
    } of[MAX_TAKEN];
    int n;
};

/* The end of a buffer: halves that are sane as bf16 and, in pairs, as f32, by their distance from the end. */
static void *take(void *ctx, unsigned use, enum mt_dtype dtype, size_t n)
{
    static uint16_t end[TAIL * 2];
    struct taken *t = ctx;
    size_t element = mt_dtype_size(dtype), bytes = n * element, halves = MT_MIN(n, (size_t)TAIL) * element / 2;
    void *p = NULL;
    must(mt_device_alloc(dev, MT_MAX(bytes, (size_t)64), "test", &p, &err), "memory");
    for (size_t i = 0; i < halves; i++) {
        uint64_t bits = (halves - i) * UINT64_C(0x9e3779b97f4a7c15) >> 40;
        end[i] = (uint16_t)((0x3f00 | (bits & 0x7f)) ^ (bits & 0x8000));
    }
    if (use & MT_TAKE_READ)
        copy((char *)p + bytes - halves * 2, end, halves * 2);
    t->of[t->n].p = p;
    t->of[t->n].bytes = bytes;
    t->of[t->n].element = element;
    t->of[t->n++].use = use;
    return p;
}

/* Dimensions beside the rows, so that rows have some thousand elements. */
static uint64_t size_of(enum mt_op_size what, size_t rows)
{
    switch (what) {
    case MT_SIZE_ELEMENTS: return rows * WIDTH;
    case MT_SIZE_ROWS:
    case MT_SIZE_LOSS_ROWS: return rows;
    case MT_SIZE_HIDDEN_64: return mt_align_up(WIDTH, 64);
    case MT_SIZE_VOCAB:
    case MT_SIZE_EXPERTS: return 1024;
    case MT_SIZE_HEADS:
    case MT_SIZE_ALL_HEADS: return 8;
    case MT_SIZE_HEAD_DIM: return 128;
    case MT_SIZE_TOP_K: return 2;
    default: return WIDTH;
    }
}

static struct mt_metered shape_of(const struct mt_metered *of, size_t rows)
{
    const struct mt_op *op = mt_dev_op(of->op);
    struct mt_metered m = *of;
    for (; m.n_dims < MT_METER_DIMS && op->dim[m.n_dims] != MT_SIZE_NONE; m.n_dims++)
        m.dim[m.n_dims] = size_of(op->dim[m.n_dims], rows);
    if (op->dim[0] == MT_SIZE_FFN)
        m.dim[0] = rows;
    if (m.op == MT_DEV_PACKED_GEMM) /* the rows of B */
        memcpy(m.dim, (const uint64_t[]){5, rows, m.dim[2]}, 3 * sizeof(*m.dim));
    if (m.op == MT_DEV_MERGE_ADAPTER)
        m.dim[2] = 8;
    if (m.op == MT_DEV_MOE_COMBINE) /* an entry a token */
        m.dim[3] = 1;
    if (m.op == MT_DEV_DELTA_GATES || m.op == MT_DEV_DELTA_GATES_BWD)
        m.dim[1] = WIDTH;
    return m;
}

/* What the operation left in the last rows of a buffer that has some for each row; 0: it has not. */
static size_t last_rows(const struct taken *t, int i, const struct taken *near, const struct taken *end,
                        enum mt_dev_op op, char *out)
{
    size_t bytes = t->of[i].bytes, row = near->of[i].bytes / NEAR, element = t->of[i].element;
    bool narrow = row < 64 * element || among(some_columns, MT_ARRAY_LEN(some_columns), op) ||
                  among(by_pieces, MT_ARRAY_LEN(by_pieces), op);
    size_t want = MT_MIN(narrow ? (size_t)FEW : ROWS * row, near->of[i].bytes);
    if (!(t->of[i].use & MT_TAKE_WRITE) || near->of[i].bytes == end->of[i].bytes)
        return 0;
    copy(out, t->of[i].p + bytes - want, want);
    return want;
}

static struct mt_decode *codes_of(enum mt_dev_op op, void *args)
{
    return op == MT_DEV_DECODE          ? args
           : op == MT_DEV_PACKED_GEMM   ? &((struct mt_packed_gemm *)args)->b
           : op == MT_DEV_MERGE_ADAPTER ? &((struct mt_merge_adapter *)args)->of
                                        : NULL;
}

/* Scales that an example has by their index, or has too many of: here they are by the distance from the end, too. */
static void set_scales(const struct mt_decode *d)
{
    static char end[TAIL];
    size_t size = mt_scale_size(d->scale), n = mt_packed_n_scales(d->format, d->rows, d->cols), some = MT_MIN(n, TAIL / size);
    for (size_t i = 0; i < some * size; i++)
        end[i] = (char)(0x3c + (some - i / size) % 4);
    if (d->scales && size < sizeof(float))
        copy((char *)(uintptr_t)d->scales + (n - some) * size, end, some * size);
}

/* Row i is row i. */
static void set_order(const int32_t *on_device, size_t rows)
{
    int32_t *order = mt_calloc(rows, sizeof(*order));
    must(order ? 0 : -1, "memory");
    for (size_t i = 0; i < rows; i++)
        order[i] = (int32_t)i;
    copy((int32_t *)(uintptr_t)on_device, order, rows * sizeof(*order));
    free(order);
}

/* What an example has in another order or by a row's number. */
static void adapt(enum mt_dev_op op, void *args, size_t rows)
{
    const struct mt_decode *codes = codes_of(op, args);
    if (codes && codes->format)
        set_scales(codes);
    if (op == MT_DEV_DROPOUT)
        ((struct mt_dropout *)args)->first_row = far - rows;
    if (op == MT_DEV_EXPERT_GLU_BWD)
        ((struct mt_expert_glu_bwd *)args)->list = NULL;
    if (op == MT_DEV_EMBEDDING)
        set_order(((struct mt_embedding *)args)->ids, rows);
    if (op == MT_DEV_MOE_GATHER)
        set_order(((struct mt_moe_gather *)args)->list, rows);
    if (op == MT_DEV_MOE_COMBINE)
        set_order(((struct mt_moe_combine *)args)->places, rows);
}

/* Blocks that sum over rows have thousands of rows each. */
static uint64_t blocks_of(const struct mt_metered *m)
{
    bool alone = m->op == MT_DEV_PACKED_GEMM || (m->op == MT_DEV_QK_ROPE_BWD && !(m->flags & MT_METER_NORM));
    bool sums = among(with_workspace, MT_ARRAY_LEN(with_workspace), m->op) ||
                among(by_pieces, MT_ARRAY_LEN(by_pieces), m->op);
    return sums && !alone ? 1 : 128;
}

static void run(const struct mt_metered *m, size_t rows, struct taken *t)
{
    mt_example *x = NULL;
    must(mt_example_create(&x, &(struct mt_example_params){.dev = dev, .shape = *m, .take = take, .ctx = t}, &err),
         mt_metered_name(m));
    adapt(m->op, mt_example_args(x), rows);
    for (int i = 0; among(by_pieces, MT_ARRAY_LEN(by_pieces), m->op) && i < t->n; i++)
        if (!t->of[i].use) /* the workspace */
            must(mt_op_zero(dev, &(struct mt_zero){t->of[i].p, t->of[i].bytes}, &err), "zero");
    mt_emu_run_last_blocks(rows == far ? blocks_of(m) : 0);
    must(mt_example_submit(x, &err), mt_metered_name(m));
    must(mt_device_sync(dev, &err), mt_metered_name(m));
    mt_example_destroy(&x);
}

static void release(struct taken *t)
{
    while (t->n)
        mt_device_free(dev, t->of[--t->n].p);
}

/* Fresh memory is all ones. */
static bool is_fresh(const char *p, size_t bytes)
{
    while (bytes && (unsigned char)p[bytes - 1] == 0xff)
        bytes--;
    return !bytes;
}

/* Number of results that are compared; *failures counts those that differ. */
static int compare(const struct mt_metered *m, int *failures)
{
    static char a[MOST_BYTES], b[MOST_BYTES];
    struct taken all = {0}, end = {0};
    struct mt_metered near = shape_of(m, NEAR), whole = shape_of(m, far);
    int n = 0;
    run(&near, NEAR, &all);
    run(&whole, far, &end);
    for (int i = 0; i < end.n; i++) {
        size_t bytes = last_rows(&all, i, &all, &end, m->op, a);
        if (!bytes)
            continue;
        last_rows(&end, i, &all, &end, m->op, b);
        bool same = !memcmp(a, b, bytes) && !is_fresh(a, bytes);
        printf("%s %s %u %s: %zu bytes of its operand %d\n", same ? "ok" : "FAIL", mt_metered_name(m), m->flags,
               mt_dtype_name(m->dtype), bytes, i);
        *failures += !same;
        n++;
    }
    release(&all);
    release(&end);
    return n;
}

/* Not what takes seconds, and has the indices of another: codes of FP8 and scales of NVFP4 are made on the host. */
static bool is_tried(const struct mt_metered *m)
{
    const char *name = mt_metered_name(m);
    bool merge = m->op == MT_DEV_MERGE_ADAPTER, decode = m->op == MT_DEV_DECODE;
    bool packed = merge || decode || m->op == MT_DEV_PACKED_GEMM;
    bool slow = (packed && (m->dtype == MT_F32 || (strstr(name, "fp8") && !merge) || (strstr(name, "nvfp4") && !decode))) ||
                (m->op == MT_DEV_GATED_NORM_BWD && m->flags & MT_METER_PLAIN) ||
                (m->flags & MT_METER_NESTED && !strstr(name, "nf4"));
    return !slow && !among(not_by_rows, MT_ARRAY_LEN(not_by_rows), m->op);
}

int main(void)
{
    int failures = 0, n = 0;
    must(mt_device_create(&dev, &(struct mt_device_params){.kind = "cuda", .n_threads = 1, .budget_bytes = budget}, &err),
         "device");
    for (int id = 0; id < MT_N_DEV_OPS; id++) {
        const struct mt_op *op = mt_dev_op((enum mt_dev_op)id);
        for (unsigned v = 0; op->name[v]; v++)
            for (unsigned f = 0; f < MT_OP_FLAGS && (!f || op->flags[f]); f++)
                for (int wide = op->f32_only; wide < (op->bf16_only ? 1 : 2); wide++) {
                    struct mt_metered m = {.op = (enum mt_dev_op)id, .variant = v, .flags = op->flags[f],
                                           .dtype = wide ? MT_F32 : MT_BF16};
                    n += is_tried(&m) ? compare(&m, &failures) : 0;
                }
    }
    mt_device_destroy(&dev);
    printf("%d results, %d of them wrong\n", n, failures);
    return failures || n < 100;
}
