/* SPDX-License-Identifier: Apache-2.0 */
/* Submits operations: checks the arguments by the operation's row, then passes them to the device. */
#include <stdio.h>
#include <string.h>

#include "device/backend.h"
#include "device/op.h"

#define ROW(ID, name, type) extern const struct mt_op mt_op_row_##name;
MT_DEVICE_OPS(ROW, ROW)
#undef ROW

static const struct {
    const char *name;
    const struct mt_op *row;
} table[MT_N_DEV_OPS] = {
#define ROW(ID, name, type) {#name, &mt_op_row_##name},
    MT_DEVICE_OPS(ROW, ROW)
#undef ROW
};

const struct mt_op *mt_dev_op(enum mt_dev_op op)
{
    return table[op].row;
}

const char *mt_dev_op_name(enum mt_dev_op op)
{
    return table[op].name;
}

int mt_device_submit(mt_device *dev, enum mt_dev_op op, const void *args, struct mt_err *err)
{
    const struct mt_op *row = table[op].row;
    const char *wrong = row->check(args);
    size_t count;
    if (wrong)
        return mt_fail(err, MT_ERR_DEVICE, -EINVAL, "%s: %s", table[op].name, wrong);
    memcpy(&count, (const char *)args + row->count, sizeof(count));
    return count ? dev->backend->submit(dev, op, args, err) : 0;
}

size_t mt_device_workspace(mt_device *dev, enum mt_dev_op op, const void *args)
{
    return dev->backend->workspace(dev, op, args);
}

static int n_dims_of(const struct mt_op *row)
{
    int n = 0;
    while (n < MT_METER_DIMS && row->dim[n] != MT_SIZE_NONE)
        n++;
    return n;
}

void mt_dev_op_cost(enum mt_dev_op op, const void *args, struct mt_metered *out)
{
    const struct mt_op *row = table[op].row;
    *out = (struct mt_metered){.op = op, .dtype = MT_F32};
    row->cost(args, out);
    out->n_dims = n_dims_of(row);
}

const char *mt_dev_op_describe(char *buf, size_t len, enum mt_dev_op op, const void *args)
{
    struct mt_metered m;
    int at = 0;
    mt_dev_op_cost(op, args, &m);
    for (int i = 0; i < m.n_dims && (size_t)at < len; i++)
        at += snprintf(buf + at, len - (size_t)at, "%s%llu", i ? ", " : "[", (unsigned long long)m.dim[i]);
    if ((size_t)at < len)
        snprintf(buf + at, len - (size_t)at, "] %s", mt_dtype_name(m.dtype));
    return buf;
}

const char *mt_metered_name(const struct mt_metered *m)
{
    return table[m->op].row->name[m->variant];
}

void mt_metered_complete(struct mt_metered *m)
{
    for (int n = n_dims_of(table[m->op].row); m->n_dims && m->n_dims < n; m->n_dims++)
        m->dim[m->n_dims] = m->dim[m->n_dims - 1];
}

bool mt_metered_find(struct mt_metered *m, const char *name)
{
    for (int op = 0; op < MT_N_DEV_OPS; op++)
        for (unsigned v = 0; table[op].row->name[v]; v++)
            if (!strcmp(table[op].row->name[v], name)) {
                m->op = (enum mt_dev_op)op;
                m->variant = v;
                return true;
            }
    return false;
}
