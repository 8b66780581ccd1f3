/* SPDX-License-Identifier: Apache-2.0 */
#include "base/mem.h"
#include "device/ops/row.h"

static const char *check_int4(const struct mt_decode *a, const struct mt_packed_format *f)
{
    MT_OP_NEED(mt_scale_size(a->scale) == sizeof(uint16_t) && mt_scale_has_zeros(a->scale) == !!a->zeros);
    MT_OP_NEED((!a->zeros && f->block) || (a->cols % 32 == 0 && (!f->block || a->cols % f->block == 0)));
    return NULL;
}

static const char *check_decode(const struct mt_decode *a)
{
    MT_OP_NEED(a->format > MT_PACKED_NONE && a->format < MT_N_PACKED);
    MT_OP_NEED(aligned(a->codes) && a->scales && aligned(a->out));
    const struct mt_packed_format *f = &mt_packed_formats[a->format];
    MT_OP_NEED(f->by_rows || f->may_end || a->rows * a->cols % f->block == 0);
    MT_OP_NEED(!a->nested_scales == !a->nested_map && !a->nested_scales == !a->nested_offset);
    MT_OP_NEED(!a->nested_scales == (a->scale != MT_SCALE_NESTED));
    if (mt_packed_kind(a->format) == MT_PACKED_INT4)
        return check_int4(a, f);
    bool e4m3 = a->scale == MT_SCALE_E4M3 || a->scale == MT_SCALE_E4M3_OVER;
    MT_OP_NEED(e4m3 == (a->format == MT_PACKED_NVFP4) && e4m3 == !!a->factor);
    bool any = f->bytes && (mt_scale_size(a->scale) != sizeof(uint16_t) || a->scale == MT_SCALE_BF16);
    MT_OP_NEED(e4m3 || a->scale == f->scale || (a->scale == MT_SCALE_NESTED ? a->format == MT_PACKED_NF4 : any));
    return NULL;
}

static size_t scale_bytes(const struct mt_decode *a)
{
    return mt_packed_n_scales(a->format, a->rows, a->cols) * mt_scale_size(a->scale);
}

static size_t zero_bytes(const struct mt_decode *a)
{
    return a->zeros ? mt_packed_n_zeros(a->format, a->rows, a->cols) * sizeof(*a->zeros) : 0;
}

static void cost_decode(const struct mt_decode *a, struct mt_metered *out)
{
    bool blocks = a->format > MT_PACKED_FP8R; /* which cost what those of the usual size do */
    out->variant = (unsigned)(blocks ? mt_packed_kind(a->format) : a->format) - 1;
    out->flags = a->nested_scales ? MT_METER_NESTED : 0;
    mt_op_shape(out, a->dtype, MT_DIMS(a->rows, a->cols));
    out->bytes = mt_op_bytes(a->rows, a->cols, a->dtype) +
                 (double)(mt_packed_code_bytes(a->format, a->rows, a->cols) + scale_bytes(a) + zero_bytes(a));
}

static void *words(mt_example *x, size_t bytes)
{
    return mt_example_read(x, MT_F32, mt_div_up(bytes, sizeof(float)));
}

/* Codes and scales of a matrix; shape: variant and flags of the operation. */
static void fill_codes(mt_example *x, const struct mt_metered *shape, struct mt_decode *a)
{
    const struct mt_packed_format *f = &mt_packed_formats[a->format];
    bool nested = shape->flags & MT_METER_NESTED && a->format == MT_PACKED_NF4;
    a->scale = nested ? MT_SCALE_NESTED : f->scale;
    size_t bytes = mt_packed_code_bytes(a->format, a->rows, a->cols);
    size_t blocks = mt_packed_n_scales(a->format, a->rows, a->cols);
    /* bytes of FP8, and of scales that are powers of two, from 0 to 126, so that none is a NaN or infinite */
    a->codes = f->bytes ? (void *)mt_example_ints(x, mt_div_up(bytes, 4), 0x01010101, 0x7f7f7f7f) : words(x, bytes);
    if (nested) {
        a->nested_scales = words(x, mt_div_up(blocks, MT_NF4_NESTED) * sizeof(float));
        a->nested_map = words(x, 256 * sizeof(float));
        a->nested_offset = words(x, sizeof(float));
    }
    bytes = scale_bytes(a);
    a->scales = a->scale == MT_SCALE_E8M0 || a->scale == MT_SCALE_E4M3_OVER
                    ? (void *)mt_example_ints(x, mt_div_up(bytes, 4), 0x01010101, 0x7f7f7f7f)
                    : words(x, bytes);
    a->factor = a->format == MT_PACKED_NVFP4 ? words(x, sizeof(float)) : NULL;
}

static void fill_decode(mt_example *x, const struct mt_metered *shape, struct mt_decode *a)
{
    *a = (struct mt_decode){.rows = (size_t)shape->dim[0], .cols = (size_t)shape->dim[1], .dtype = shape->dtype,
                            .format = shape->variant + 1};
    const struct mt_packed_format *f = &mt_packed_formats[a->format];
    if (!f->by_rows && !f->may_end && a->rows * a->cols % f->block)
        a->cols = mt_align_up(a->cols, f->block);
    fill_codes(x, shape, a);
    a->out = mt_example_write(x, shape->dtype, a->rows * a->cols);
}

MT_OP_ROW_OF(decode, mt_decode, rows,
             ("decode_nf4", "decode_mxfp4", "decode_fp8", "decode_int4", "decode_nvfp4", "decode_fp8_one_scale",
              "decode_fp8_row_scales"),
             .dim = {MT_SIZE_FFN, MT_SIZE_HIDDEN}, .flags = {0, MT_METER_NESTED});

static const char *check_packed_gemm(const struct mt_packed_gemm *a)
{
    struct mt_decode b = a->b;
    b.out = a->d;
    MT_OP_NEED(aligned(a->a) && a->lda >= a->b.cols && a->lda % 8 == 0);
    MT_OP_NEED(a->b.dtype == MT_BF16 && a->b.rows && a->b.cols % 64 == 0);
    MT_OP_NEED(a->d && a->ldd >= a->b.rows && (!a->c || a->ldc >= a->b.rows) && (a->c != a->d || a->ldc == a->ldd));
    MT_OP_NEED(a->d_dtype == MT_BF16 || a->d_dtype == MT_F32);
    return check_decode(&b);
}

static void cost_packed_gemm(const struct mt_packed_gemm *a, struct mt_metered *out)
{
    size_t n = a->b.rows, k = a->b.cols;
    cost_decode(&a->b, out);
    mt_op_shape(out, MT_BF16, MT_DIMS(a->m, n, k));
    out->flags |= (a->bias || a->c ? MT_METER_ADDS : 0) | (a->d_dtype == MT_F32 ? MT_METER_F32_OUT : 0);
    out->flops = 2 * (double)a->m * (double)n * (double)k;
    out->bytes += mt_op_bytes(a->m, k, MT_BF16) + mt_op_bytes(a->m, n, a->d_dtype) * (a->c ? 2 : 1) -
                  mt_op_bytes(n, k, MT_BF16); /* which decode writes */
}

static void fill_packed_gemm(mt_example *x, const struct mt_metered *shape, struct mt_packed_gemm *a)
{
    size_t m = (size_t)shape->dim[0], n = (size_t)shape->dim[1], k = (size_t)shape->dim[2];
    *a = (struct mt_packed_gemm){.m = m, .lda = k, .ldc = n, .ldd = n,
                                 .d_dtype = shape->flags & MT_METER_F32_OUT ? MT_F32 : MT_BF16,
                                 .b = {.rows = n, .cols = k, .dtype = MT_BF16, .format = shape->variant + 1}};
    a->a = mt_example_fresh(x, MT_BF16, m * k);
    fill_codes(x, shape, &a->b);
    a->c = shape->flags & MT_METER_ADDS ? mt_example_read(x, a->d_dtype, m * n) : NULL;
    a->d = mt_example_write(x, a->d_dtype, m * n);
    a->workspace = mt_example_workspace(x, mt_device_workspace(mt_example_device(x), MT_DEV_PACKED_GEMM, a));
}

MT_OP_ROW_OF(packed_gemm, mt_packed_gemm, m,
             ("packed_gemm_nf4", "packed_gemm_mxfp4", "packed_gemm_fp8", "packed_gemm_int4", "packed_gemm_nvfp4",
              "packed_gemm_fp8_one_scale", "packed_gemm_fp8_row_scales"),
             .bound = MT_BOUND_PACKED_PRODUCT, .bf16_only = true,
             .dim = {MT_SIZE_EXPERTS, MT_SIZE_FFN, MT_SIZE_HIDDEN_64},
             .flags = {0, MT_METER_NESTED, MT_METER_ADDS | MT_METER_F32_OUT});
