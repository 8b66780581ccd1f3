/* SPDX-License-Identifier: Apache-2.0 */
#include "base/mem.h"
#include "device/ops/row.h"

static const char *check_merge_adapter(const struct mt_merge_adapter *a)
{
    const struct mt_decode *d = &a->of;
    MT_OP_NEED(d->format < MT_N_PACKED && d->rows && a->r && a->a && a->b && d->out);
    MT_OP_NEED(!d->format || a->rescale || d->scales);
    const struct mt_packed_format *f = &mt_packed_formats[d->format];
    MT_OP_NEED(!d->format || f->by_rows || f->may_end || d->rows * d->cols % f->block == 0);
    MT_OP_NEED(!a->rescale || (d->format && d->format < MT_N_PACKABLE));
    MT_OP_NEED(d->format != MT_PACKED_NVFP4 || d->factor);
    bool int4 = mt_packed_kind(d->format) == MT_PACKED_INT4;
    MT_OP_NEED(!int4 || (d->format == MT_PACKED_INT4 && !mt_scale_has_zeros(d->scale)));
    MT_OP_NEED(!a->magnitude == !a->scale && !a->magnitude == !a->inverse);
    return NULL;
}

static void cost_merge_adapter(const struct mt_merge_adapter *a, struct mt_metered *out)
{
    mt_op_shape(out, a->of.dtype, MT_DIMS(a->of.rows, a->of.cols, a->r));
    out->variant = (unsigned)a->of.format;
    out->flags = a->magnitude ? MT_METER_NORM : 0;
    out->bytes = (a->magnitude ? 3 : 2) * mt_op_bytes(a->of.rows, a->of.cols, a->of.dtype);
}

static void fill_merge_adapter(mt_example *x, const struct mt_metered *shape, struct mt_merge_adapter *args)
{
    size_t rows = (size_t)shape->dim[0], cols = (size_t)shape->dim[1], r = (size_t)shape->dim[2];
    struct mt_decode d = {.rows = rows, .dtype = shape->dtype, .format = shape->variant};
    const struct mt_packed_format *f = &mt_packed_formats[d.format];
    bool odd = d.format && !f->by_rows && !f->may_end && rows * cols % f->block;
    d.cols = odd ? mt_align_up(cols, f->block) : cols;
    d.scale = f->scale;
    struct mt_merge_adapter a = {.of = d, .r = r, .s = 1};
    a.of.out = mt_example_update(x, d.dtype, rows * d.cols);
    if (d.format) {
        size_t n = mt_packed_n_scales(d.format, rows, d.cols);
        a.of.scales = mt_scale_size(d.scale) == 1 ? (void *)mt_example_ints(x, mt_div_up(n, 4), 0x01010101, 0x7f7f7f7f)
                                                  : mt_example_read(x, MT_F32, n);
        a.of.factor = d.format == MT_PACKED_NVFP4 ? mt_example_read(x, MT_F32, 1) : NULL;
    }
    a.a = mt_example_read(x, d.dtype, r * d.cols);
    a.b = mt_example_read(x, d.dtype, rows * r);
    if (shape->flags) {
        a.magnitude = mt_example_read(x, d.dtype, rows);
        a.scale = mt_example_write(x, MT_F32, rows);
        a.inverse = mt_example_write(x, MT_F32, rows);
    }
    *args = a;
}

MT_OP_ROW_OF(merge_adapter, mt_merge_adapter, of.rows,
             ("merge_bf16", "merge_nf4", "merge_mxfp4", "merge_fp8", "merge_int4", "merge_nvfp4", "merge_fp8_one_scale",
              "merge_fp8_row_scales"),
             .dim = {MT_SIZE_FFN, MT_SIZE_HIDDEN, MT_SIZE_HEAD_DIM /* a rank is about as large */},
             .flags = {0, MT_METER_NORM});
