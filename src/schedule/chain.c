/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Embedding, layers and head as units with values: unit u reads boundary u and writes boundary u + 1; backward updates
 * one gradient of a boundary in place, from the head down.
 */
#include <string.h>

#include "schedule/unit.h"

/* Where the values of unit u stand; the boundaries' gradient comes last. */
static int32_t weights(size_t u)
{
    return 4 * (int32_t)u;
}

static int32_t gradient(size_t u)
{
    return 4 * (int32_t)u + 1;
}

static int32_t boundary(size_t u)
{
    return 4 * (int32_t)u + 2;
}

static int32_t record(size_t u)
{
    return 4 * (int32_t)u + 3;
}

static void use(struct mt_call *c, int32_t value, enum mt_access access)
{
    c->use[c->n_uses++] = (struct mt_use){value, (uint8_t)access};
}

static void describe_embedding(struct mt_unit_shape *s, int32_t dx)
{
    s->size_class = MT_CLASS_VOCAB;
    s->forward = (struct mt_call){.op = MT_OP_EMBED};
    use(&s->forward, weights(0), MT_READ);
    use(&s->forward, boundary(1), MT_WRITE);
    s->backward = (struct mt_call){.op = MT_OP_EMBED_BWD};
    use(&s->backward, dx, MT_READ);
    use(&s->backward, gradient(0), MT_ADD);
}

static void describe_layer(struct mt_unit_shape *s, size_t u, int32_t dx)
{
    s->size_class = MT_CLASS_LAYER;
    s->forward = (struct mt_call){.op = MT_OP_FORWARD};
    use(&s->forward, weights(u), MT_READ);
    use(&s->forward, boundary(u), MT_READ);
    use(&s->forward, boundary(u + 1), MT_WRITE);
    s->backward = (struct mt_call){.op = MT_OP_BACKWARD};
    use(&s->backward, weights(u), MT_READ);
    use(&s->backward, boundary(u), MT_READ);
    if (s->record_bytes) {
        use(&s->forward, record(u), MT_WRITE);
        use(&s->backward, record(u), MT_READ);
    }
    use(&s->backward, dx, MT_UPDATE);
    use(&s->backward, gradient(u), MT_ADD);
}

/* Its forward operation computes the gradients too: logits are too large to keep. */
static void describe_head(struct mt_unit_shape *s, size_t u, const struct mt_chain *c, int32_t dx)
{
    s->size_class = c->tied ? MT_CLASS_NORM : MT_CLASS_VOCAB;
    s->forward = (struct mt_call){.op = MT_OP_HEAD};
    s->backward = (struct mt_call){.n_uses = 0};
    use(&s->forward, weights(u), MT_READ);
    if (c->tied)
        use(&s->forward, weights(0), MT_READ);
    use(&s->forward, boundary(u), MT_READ);
    s->logits = s->forward;
    s->logits.op = MT_OP_LOGITS;
    use(&s->forward, dx, MT_WRITE);
    use(&s->forward, gradient(u), MT_ADD);
    if (c->tied)
        use(&s->forward, gradient(0), MT_ADD);
}

void mt_chain_describe(struct mt_unit_shape *units, struct mt_value *values, const struct mt_chain *c)
{
    int32_t dx = (int32_t)mt_chain_n_values(c->n_units) - 1;
    for (size_t u = 0; u < c->n_units; u++) {
        const struct mt_unit_shape *s = &units[u];
        int32_t unit = (int32_t)u;
        values[weights(u)] = (struct mt_value){MT_OBJ_WEIGHTS, MT_LIFE_STEP, unit, s->weight_bytes};
        values[gradient(u)] = (struct mt_value){MT_OBJ_GRAD, MT_LIFE_STEP, unit, s->grad_elems * sizeof(float)};
        values[boundary(u)] = (struct mt_value){MT_OBJ_BOUNDARY, MT_LIFE_MICROBATCH, unit, c->boundary_bytes};
        values[record(u)] = (struct mt_value){MT_OBJ_RECORD, MT_LIFE_MICROBATCH, unit, s->record_bytes};
    }
    values[dx] = (struct mt_value){MT_OBJ_DX, MT_LIFE_MICROBATCH, 0, c->boundary_bytes};
    describe_embedding(&units[0], dx);
    for (size_t u = 1; u + 1 < c->n_units; u++)
        describe_layer(&units[u], u, dx);
    describe_head(&units[c->n_units - 1], c->n_units - 1, c, dx);
}
