/* SPDX-License-Identifier: Apache-2.0 */
/* Times device operations: one by itself, or several in turn. */
#include <stdlib.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/sort.h"
#include "device/example.h"
#include "machine/measure_priv.h"

/* Timing in turn lasts as long as 100 rounds by itself, within these numbers of rounds. */
enum { ALONE_ROUNDS = 5, WARM_ROUNDS = 2, LEAST_ROUNDS = 8, IN_TURN = 100 };

double mt_measure_median(double *v, int n)
{
    mt_sort_doubles(v, (size_t)n);
    return v[n / 2];
}

/* --- by itself ------------------------------------------------------------------------------------ */

struct timed {
    mt_device *dev;
    mt_example *x;
    mt_event *ev[2]; /* before and after a round */
};

/* Nanoseconds of `reps` submissions, on the stream. */
static int time_round(const struct timed *t, int reps, int64_t *ns, struct mt_err *err)
{
    int rc = mt_event_record(t->dev, t->ev[0], MT_STREAM_COMPUTE, err);
    for (int i = 0; i < reps && !rc; i++)
        rc = mt_example_submit(t->x, err);
    rc = rc ?: mt_event_record(t->dev, t->ev[1], MT_STREAM_COMPUTE, err)
            ?: mt_event_sync(t->dev, t->ev[1], err);
    *ns = mt_event_time_ns(t->ev[1]) - mt_event_time_ns(t->ev[0]);
    return rc;
}

static int time_rounds(const struct timed *t, int64_t round_ns, double *seconds, struct mt_err *err)
{
    double round[ALONE_ROUNDS];
    int64_t ns = 0;
    int reps = 1, rc = time_round(t, 1, &ns, err); /* warm */
    rc = rc ?: time_round(t, 1, &ns, err);
    reps = (int)MT_MIN(MT_MAX(round_ns / MT_MAX(ns, (int64_t)1), (int64_t)1), (int64_t)200);
    for (int r = 0; r < ALONE_ROUNDS && !rc; r++) {
        rc = time_round(t, reps, &ns, err);
        round[r] = (double)ns * 1e-9 / reps;
    }
    if (!rc)
        *seconds = MT_MAX(mt_measure_median(round, ALONE_ROUNDS), 1e-9);
    return rc;
}

int mt_measure_operation(double *seconds, mt_device *dev, const struct mt_metered *op, int64_t round_ns,
                         struct mt_err *err)
{
    struct timed t = {.dev = dev};
    int rc = mt_example_create(&t.x, &(struct mt_example_params){.dev = dev, .shape = *op}, err);
    for (int i = 0; i < 2 && !rc; i++)
        rc = mt_event_create(dev, &t.ev[i], err);
    rc = rc ?: time_rounds(&t, round_ns, seconds, err);
    mt_example_destroy(&t.x);
    for (int i = 0; i < 2; i++)
        mt_event_destroy(&t.ev[i]);
    return rc;
}

/* --- in turn -------------------------------------------------------------------------------------- */

struct mt_turns {
    mt_device *dev;
    size_t n;
    struct mt_example_flow flow;
    mt_example **example;    /* [n] */
    mt_event **ev;           /* [n + 1] events before, between and after them */
};

static size_t turns_bytes(const struct mt_measure_params *p, const struct mt_metered *ops, size_t n, size_t *flow)
{
    double largest = 0;
    size_t sum = 0;
    for (size_t i = 0; i < n; i++) {
        largest = MT_MAX(largest, ops[i].bytes);
        sum += mt_measure_operation_bytes(p, &ops[i]);
    }
    *flow = (size_t)largest;
    return sum + *flow;
}

int mt_turns_create(mt_turns **out, const struct mt_measure_params *p, const struct mt_metered *ops, size_t n,
                    struct mt_err *err)
{
    size_t flow;
    MT_CLOSED_BY(mt_turns_destroy) mt_turns *t = NULL;
    int rc = MT_NEW(&t, 1, "a measurement", err)
          ?: MT_NEW(&t->example, n, "a measurement", err)
          ?: MT_NEW(&t->ev, n + 1, "a measurement", err);
    if (rc)
        return rc;
    t->n = n;
    rc = mt_measure_device(&t->dev, p, turns_bytes(p, ops, n, &flow), err)
      ?: mt_example_flow_create(&t->flow, t->dev, flow, err);
    for (size_t i = 0; i < n && !rc; i++)
        rc = mt_example_create(&t->example[i],
                               &(struct mt_example_params){.dev = t->dev, .shape = ops[i], .flow = t->flow}, err);
    for (size_t i = 0; i <= n && !rc; i++)
        rc = mt_event_create(t->dev, &t->ev[i], err);
    if (!rc)
        *out = MT_GIVE(t);
    return rc;
}

void mt_turns_destroy(mt_turns **turns)
{
    mt_turns *t = *turns;
    if (!t)
        return;
    for (size_t i = 0; t->example && i < t->n; i++)
        mt_example_destroy(&t->example[i]);
    for (size_t i = 0; t->ev && i <= t->n; i++)
        mt_event_destroy(&t->ev[i]);
    if (t->dev)
        mt_device_free(t->dev, t->flow.data);
    mt_device_destroy(&t->dev);
    free(t->example);
    free(t->ev);
    free(t);
    *turns = NULL;
}

int mt_turns_run(mt_turns *t, double *seconds, struct mt_err *err)
{
    int rc = mt_event_record(t->dev, t->ev[0], MT_STREAM_COMPUTE, err);
    for (size_t i = 0; i < t->n && !rc; i++)
        rc = mt_example_submit(t->example[i], err)
          ?: mt_event_record(t->dev, t->ev[i + 1], MT_STREAM_COMPUTE, err);
    rc = rc ?: mt_event_sync(t->dev, t->ev[t->n], err);
    for (size_t i = 0; i < t->n && !rc; i++)
        seconds[i] = (double)(mt_event_time_ns(t->ev[i + 1]) - mt_event_time_ns(t->ev[i])) * 1e-9;
    return rc;
}

struct ranked {
    double total;
    const double *seconds;
};

static int by_total(const void *a, const void *b)
{
    const struct ranked *x = a, *y = b;
    return mt_compare_doubles(&x->total, &y->total);
}

void mt_turns_mean(double *seconds, const double *rounds, size_t n, int n_rounds)
{
    struct ranked round[MT_MOST_ROUNDS];
    int from = n_rounds / 4, to = n_rounds - n_rounds / 4;
    for (int r = 0; r < n_rounds; r++) {
        round[r] = (struct ranked){0, rounds + (size_t)r * n};
        for (size_t i = 0; i < n; i++)
            round[r].total += round[r].seconds[i];
    }
    qsort(round, (size_t)n_rounds, sizeof(*round), by_total);
    for (size_t i = 0; i < n; i++) {
        double sum = 0;
        for (int r = from; r < to; r++)
            sum += round[r].seconds[i];
        seconds[i] = MT_MAX(sum / (to - from), 1e-9);
    }
}

int mt_measure_in_turn(double *seconds, const struct mt_measure_params *p, const struct mt_metered *ops, size_t n,
                       struct mt_err *err)
{
    MT_CLOSED_BY(mt_turns_destroy) mt_turns *t = NULL;
    MT_FREED double *all = mt_calloc(n, MT_MOST_ROUNDS * sizeof(double));
    int rc = all ? mt_turns_create(&t, p, ops, n, err)
                 : mt_fail_nomem(err, "a measurement", n * MT_MOST_ROUNDS * sizeof(double));
    int rounds = 0;
    for (int r = 0; r < WARM_ROUNDS && !rc; r++)
        rc = mt_turns_run(t, all, err);
    int64_t begin = mt_now_ns();
    while (!rc && rounds < MT_MOST_ROUNDS &&
           (rounds < LEAST_ROUNDS || mt_now_ns() - begin < IN_TURN * mt_measure_round_ns(p)))
        rc = mt_turns_run(t, all + (size_t)rounds++ * n, err);
    if (!rc)
        mt_turns_mean(seconds, all, n, rounds);
    return rc;
}
