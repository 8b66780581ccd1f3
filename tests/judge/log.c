/* SPDX-License-Identifier: Apache-2.0 */
#include "log.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "device/op.h"

enum { MAX_ARRAYS = 24 };

/* --- an operation ------------------------------------------------------------------------------- */

struct mt_judge_call {
    char numbers[1024];
    size_t len;
    struct mt_judge_array array[MAX_ARRAYS];
    size_t n;
};

static void mt_judge_number(struct mt_judge_call *c, const char *name, double v)
{
    if (v != 0)
        c->len += (size_t)snprintf(c->numbers + c->len, sizeof(c->numbers) - c->len, " %s=%.9g", name, v);
}

static void mt_judge_dtype(struct mt_judge_call *c, const char *name, enum mt_dtype t)
{
    c->len += (size_t)snprintf(c->numbers + c->len, sizeof(c->numbers) - c->len, " %s=%s", name, mt_dtype_name(t));
}

static void add_array(struct mt_judge_call *c, const struct mt_judge_array *a)
{
    if (a->p && a->bytes)
        c->array[c->n++] = *a;
}

static void mt_judge_rows(struct mt_judge_call *c, int use, const char *name, const void *p, size_t rows, size_t bytes,
                          size_t pitch)
{
    add_array(c, &(struct mt_judge_array){name, use, p, bytes, 1, 0, rows, pitch});
}

static void mt_judge_heads(struct mt_judge_call *c, int use, const char *name, const struct mt_heads *h, size_t n,
                           size_t e)
{
    size_t heads = h->stride ? h->n : MT_MIN(h->n, (size_t)1);
    add_array(c, &(struct mt_judge_array){name, use, h->p, heads ? h->dim * e : 0, heads, h->stride * e, n, h->ld * e});
}

static void mt_judge_groups(struct mt_judge_call *c, int use, const char *name, const void *p, size_t n, size_t bytes,
                            const struct mt_row_groups *g, size_t e)
{
    struct mt_judge_array a = {name, use, p, bytes, 1, 0, n, bytes};
    if (g->group) {
        a.inner = g->group;
        a.stride = g->stride * e;
        a.outer = n / g->group;
        a.pitch = g->ld * e;
    }
    add_array(c, &a);
}

#include "judge_arguments.inc"

void mt_judge_say(struct mt_judge_log *j, const char *fmt, ...)
{
    char line[4096];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(line, sizeof(line), fmt, ap);
    va_end(ap);
    mt_str_append(j->out, line, strlen(line));
}

void mt_judge_operation(void *ctx, const struct mt_metered *op, const void *args)
{
    struct mt_judge_log *j = ctx;
    struct mt_judge_call c = {.len = 0};
    char text[1024], name[64];
    judge_call[op->op](args, &c);
    mt_judge_say(j, "%4zu %s%s", j->n_ops, mt_dev_op_name(op->op), c.numbers);
    if (op->beside > 1)
        mt_judge_say(j, " beside=%d", op->beside);
    for (size_t i = 0; i < c.n; i++) {
        const struct mt_judge_array *a = &c.array[i];
        if (a->use & MT_JUDGE_READ) {
            j->n_unwritten += mt_judge_describe(j->memory, a, text, sizeof(text));
            mt_judge_say(j, " %s=%s", a->name, text);
        }
    }
    for (size_t i = 0; i < c.n; i++)
        if (c.array[i].use & MT_JUDGE_WRITE) {
            snprintf(name, sizeof(name), "%zu.%s", j->n_ops, c.array[i].name);
            mt_judge_write(j->memory, &c.array[i], name);
            mt_judge_say(j, " ->%s", c.array[i].name);
        }
    mt_judge_say(j, "\n");
    j->n_ops++;
}

void mt_judge_copy(void *ctx, enum mt_stream stream, const struct mt_copy *c)
{
    struct mt_judge_log *j = ctx;
    char text[1024], name[64];
    const struct mt_judge_array from = {"src", MT_JUDGE_READ, c->src, c->width, 1, 0, c->rows, c->src_pitch};
    const struct mt_judge_array to = {"dst", MT_JUDGE_WRITE, c->dst, c->width, 1, 0, c->rows, c->dst_pitch};
    if (stream != MT_STREAM_COMPUTE || !mt_judge_holds(j->memory, from.p))
        return;
    mt_judge_describe(j->memory, &from, text, sizeof(text));
    mt_judge_say(j, "%4zu copy src=%s ->dst\n", j->n_ops, text);
    snprintf(name, sizeof(name), "%zu.dst", j->n_ops++);
    mt_judge_write(j->memory, &to, name);
}

void mt_judge_known(struct mt_judge_log *j, const void *p, size_t bytes, const char *name)
{
    if (p && bytes)
        mt_judge_write(j->memory, &(struct mt_judge_array){name, MT_JUDGE_WRITE, p, bytes, 1, 0, 1, 0}, name);
}

void mt_judge_told(struct mt_judge_log *j, const void *p, size_t bytes, const char *name)
{
    char text[1024];
    if (!p || !bytes)
        return;
    mt_judge_describe(j->memory, &(struct mt_judge_array){name, MT_JUDGE_READ, p, bytes, 1, 0, 1, 0}, text,
                      sizeof(text));
    mt_judge_say(j, "     %s = %s\n", name, text);
}
