/* SPDX-License-Identifier: Apache-2.0 */
/* The statistics of a step on the device: losses and counts by micro-batch, partial squares of gradients, the sums of
 * probabilities of routers. */
#include "base/mem.h"
#include "model/moe.h"
#include "model/part.h"

void mt_model_place_partials(const struct mt_layout *l, size_t *at)
{
    at[0] = 0;
    for (size_t t = 0; t < l->n_tensors; t++)
        at[t + 1] = at[t] + mt_div_up(l->tensors[t].n, MT_SUMSQ_BLOCK);
}

/* Of an array of a micro-batch, or of the row of which it is a chunk. */
static size_t array_bytes(const struct mt_model_params *p)
{
    return mt_align_up(mt_model_chunks(p) * p->max_tokens * 4, MT_RECORD_ALIGN);
}

/* Bytes of all arrays of n micro-batches: losses, whether targets are the likeliest tokens, and entropies. */
static size_t arrays_bytes(const struct mt_model_params *p, size_t n)
{
    return mt_div_up(n, mt_model_chunks(p)) * (2 + p->entropy) * array_bytes(p);
}

/* The place of the micro-batch's part of an array. */
static void *stats_at(const mt_model *m, char *base, size_t mb, size_t array)
{
    size_t chunks = mt_model_chunks(&m->p);
    return base + arrays_bytes(&m->p, mb / chunks * chunks) + array * array_bytes(&m->p) + m->inputs[mb].first_loss * 4;
}

size_t mt_model_stats_bytes(const struct mt_model_params *p)
{
    return arrays_bytes(p, p->max_micro) + mt_align_up(p->layout->n_partials * 4, MT_RECORD_ALIGN) +
           mt_groups_n(p->groups) * mt_model_prob_sum_bytes(p);
}

float *mt_model_stats_loss(const mt_model *m, char *base, size_t mb)
{
    return stats_at(m, base, mb, 0);
}

int32_t *mt_model_stats_correct(const mt_model *m, char *base, size_t mb)
{
    return stats_at(m, base, mb, 1);
}

float *mt_model_stats_entropy(const mt_model *m, char *base, size_t mb)
{
    return m->p.entropy ? stats_at(m, base, mb, 2) : NULL;
}

float *mt_model_stats_partials(const mt_model *m, char *base)
{
    return (float *)(void *)(base + arrays_bytes(&m->p, m->p.max_micro));
}

static int fetch(mt_model *m, size_t first, size_t bytes, struct mt_err *err)
{
    return mt_device_copy(
        m->dev, MT_STREAM_D2H,
        &(struct mt_copy){m->stats_host + first, bytes, m->stats_dev + first, bytes, bytes, 1}, err);
}

static size_t partials_begin(const mt_model *m, size_t tensor)
{
    return arrays_bytes(&m->p, m->p.max_micro) + m->partials_at[tensor] * sizeof(float);
}

int mt_model_fetch_stats(mt_model *m, size_t n_micro, bool with_gradients, size_t n_tensors, struct mt_err *err)
{
    int rc = fetch(m, 0, arrays_bytes(&m->p, n_micro), err);
    size_t first = partials_begin(m, 0), end = partials_begin(m, n_tensors);
    size_t probs = (size_t)((char *)mt_model_prob_sum(m, m->stats_dev, 0) - m->stats_dev);
    if (!rc && with_gradients && end > first)
        rc = fetch(m, first, end - first, err);
    if (!rc && with_gradients && m->stats_bytes > probs)
        rc = fetch(m, probs, m->stats_bytes - probs, err);
    return rc;
}

int mt_model_fetch_partials(mt_model *m, size_t unit, struct mt_err *err)
{
    const struct mt_unit *u = &m->layout->units[unit];
    size_t first = partials_begin(m, u->first_tensor), end = partials_begin(m, u->first_tensor + u->n_tensors);
    return fetch(m, first, end - first, err);
}

void *mt_model_stats_of(mt_model *m, enum mt_stats_part part, size_t i, size_t *bytes)
{
    const struct mt_unit *u = &m->layout->units[part == MT_STATS_OF_UNIT ? i : 0];
    switch (part) {
    case MT_STATS_OF_MICRO:
        *bytes = m->inputs[i].row_before ? 0 : arrays_bytes(&m->p, 1);
        return mt_model_stats_loss(m, m->stats_host, i);
    case MT_STATS_OF_FEW:
        *bytes = m->inputs[i].of.choose ? m->inputs[i].n_loss * m->p.few * sizeof(float) : 0;
        return mt_inputs_on_host(m, i).few_values;
    case MT_STATS_OF_GROUP:
        return mt_model_group_counts(m, i, bytes);
    case MT_STATS_PROBABILITIES:
        *bytes = mt_model_balances(m) ? mt_model_prob_sum_bytes(&m->p) : 0;
        return mt_model_prob_sum(m, m->stats_host, i);
    default: /* MT_STATS_OF_UNIT */
        *bytes = partials_begin(m, u->first_tensor + u->n_tensors) - partials_begin(m, u->first_tensor);
        return m->stats_host + partials_begin(m, u->first_tensor);
    }
}

struct mt_micro_stats mt_model_micro_stats(const mt_model *m, size_t mb)
{
    const struct mt_micro_inputs host = mt_inputs_on_host(m, mb);
    const size_t row = mt_model_loss_at(m, mb);
    return (struct mt_micro_stats){.loss = mt_model_stats_loss(m, m->stats_host, mb),
                                   .correct = mt_model_stats_correct(m, m->stats_host, mb),
                                   .entropy = mt_model_stats_entropy(m, m->stats_host, mb),
                                   .few = host.few_values,
                                   .drawn = host.targets,
                                   .top = m->top ? m->top + row * m->p.top : NULL,
                                   .rest = m->top_rest ? m->top_rest + row : NULL};
}

const float *mt_model_partials(const mt_model *m, size_t tensor, size_t *n)
{
    *n = m->partials_at[tensor + 1] - m->partials_at[tensor];
    return mt_model_stats_partials(m, m->stats_host) + m->partials_at[tensor];
}
