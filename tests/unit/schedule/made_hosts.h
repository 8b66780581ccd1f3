/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "schedule/program.h"
#include "test.h"

/** The programs of all hosts that share a step. */
struct step {
    struct mt_program of[MT_MAX_LANES];
    int n;
};

static int check(const struct step *s, struct mt_err *err)
{
    const struct mt_program *p[MT_MAX_LANES];
    for (int i = 0; i < s->n; i++)
        p[i] = &s->of[i];
    return mt_program_check_hosts(p, s->n, err);
}

static void finish(struct step *s)
{
    for (int i = 0; i < s->n; i++)
        mt_program_finish(&s->of[i]);
}

/** Builds and checks the program of each host; finish with finish(). */
static void build_hosts(struct step *s, struct mt_program_params p)
{
    struct mt_err err = {0};
    s->n = mt_program_hosts(&p);
    for (p.host = 0; p.host < s->n; p.host++)
        MUST(mt_program_build, &s->of[p.host], &p);
    if (check(s, &err))
        fail_msg("%d hosts of %d lanes, %zu micro-batches: %s", s->n, mt_program_own_lanes(&p), p.n_micro, err.msg);
}
