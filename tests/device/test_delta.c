/* SPDX-License-Identifier: Apache-2.0 */
/* The gated delta rule, the plain one of Mamba 2, and short convolutions, against the recurrence in double and differences
 * of it. */
#include <math.h>
#include <string.h>

#include "base/mem.h"
#include "harness.h"

enum { MAX_DOCS = 4, MAX_CUTS = 4 };
struct shape {
    size_t nk, nv, dk, dv, n_docs, len[MAX_DOCS];
    double decay; /* most that a step decays by: e^-decay */
    bool plain;   /* with a skip */
    size_t cut[MAX_CUTS + 1]; /* pieces end there */
};

struct problem {
    struct shape s;
    size_t n;
    double *q, *k, *v, *beta, *g, *d_o, *skip;     /* inputs; skip: zeros if the rule is not plain */
    double *o, *dq, *dk, *dv, *dbeta, *dg, *dskip; /* by the recurrence */
    double scale, eps;
    int32_t cu[MAX_DOCS + 1];
};

/* eps of 0: it stays as long as it is */
static void unit(double *y, const double *x, size_t n, double eps, double by)
{
    double sq = eps > 0 ? eps : 1;
    for (size_t i = 0; eps > 0 && i < n; i++)
        sq += x[i] * x[i];
    for (size_t i = 0; i < n; i++)
        y[i] = x[i] / sqrt(sq) * by;
}

/* Gradient through that: d is of y, and becomes that of x. */
static void unit_backward(double *d, const double *x, size_t n, double eps, double by)
{
    double sq = eps > 0 ? eps : 1, dot = 0;
    for (size_t i = 0; eps > 0 && i < n; i++) {
        sq += x[i] * x[i];
        dot += x[i] * d[i];
    }
    for (size_t i = 0; i < n; i++)
        d[i] = by / sqrt(sq) * (d[i] - x[i] * dot / sq);
}

/* One document and value head; states: [len + 1][dk * dv] scratch. */
static void recur(struct problem *p, size_t begin, size_t end, size_t hv, double *states, double *work)
{
    const struct shape *s = &p->s;
    size_t dk = s->dk, dv = s->dv, hk = hv / (s->nv / s->nk), one = dk * dv;
    double corrected = s->plain ? 0 : 1;
    double *k = work, *q = k + dk, *u = q + dk, *dS = u + dv, *du = dS + one, *gk = du + dv, *gq = gk + dk;
    memset(states, 0, one * sizeof(double));
    for (size_t t = begin; t < end; t++) {
        const double *v = p->v + (t * s->nv + hv) * dv, *before = states + (t - begin) * one;
        double *S = states + (t - begin + 1) * one, decay = exp(p->g[t * s->nv + hv]), beta = p->beta[t * s->nv + hv];
        unit(k, p->k + (t * s->nk + hk) * dk, dk, p->eps, 1);
        unit(q, p->q + (t * s->nk + hk) * dk, dk, p->eps, p->scale);
        for (size_t j = 0; j < dv; j++) {
            double sum = 0, o = 0;
            for (size_t i = 0; i < dk; i++)
                sum += corrected * decay * before[i * dv + j] * k[i];
            u[j] = beta * (v[j] - sum);
            for (size_t i = 0; i < dk; i++) {
                S[i * dv + j] = decay * before[i * dv + j] + k[i] * u[j];
                o += S[i * dv + j] * q[i];
            }
            p->o[(t * s->nv + hv) * dv + j] = o + p->skip[hv] * v[j];
        }
    }
    memset(dS, 0, one * sizeof(double));
    for (size_t t = end; t-- > begin;) {
        const double *v = p->v + (t * s->nv + hv) * dv, *before = states + (t - begin) * one;
        const double *S = states + (t - begin + 1) * one, *d_o = p->d_o + (t * s->nv + hv) * dv;
        double decay = exp(p->g[t * s->nv + hv]), beta = p->beta[t * s->nv + hv], dbeta = 0, dg = 0;
        unit(k, p->k + (t * s->nk + hk) * dk, dk, p->eps, 1);
        unit(q, p->q + (t * s->nk + hk) * dk, dk, p->eps, p->scale);
        memset(gk, 0, dk * sizeof(double));
        memset(gq, 0, dk * sizeof(double));
        for (size_t j = 0; j < dv; j++) {
            double sum = 0;
            du[j] = 0;
            for (size_t i = 0; i < dk; i++)
                sum += corrected * decay * before[i * dv + j] * k[i];
            double rest = v[j] - sum;
            for (size_t i = 0; i < dk; i++) {
                gq[i] += S[i * dv + j] * d_o[j];
                dS[i * dv + j] += q[i] * d_o[j];
                du[j] += dS[i * dv + j] * k[i];
                gk[i] += dS[i * dv + j] * beta * rest;
            }
            dbeta += du[j] * rest;
            p->dv[(t * s->nv + hv) * dv + j] = beta * du[j] + p->skip[hv] * d_o[j];
            p->dskip[t * s->nv + hv] += d_o[j] * v[j];
            for (size_t i = 0; i < dk; i++) {
                gk[i] -= corrected * beta * du[j] * decay * before[i * dv + j];
                double d = dS[i * dv + j] - corrected * beta * du[j] * k[i]; /* of the decayed state */
                dg += d * decay * before[i * dv + j];
                dS[i * dv + j] = d * decay;
            }
        }
        p->dbeta[t * s->nv + hv] = dbeta;
        p->dg[t * s->nv + hv] = dg;
        unit_backward(gq, p->q + (t * s->nk + hk) * dk, dk, p->eps, p->scale);
        unit_backward(gk, p->k + (t * s->nk + hk) * dk, dk, p->eps, 1);
        for (size_t i = 0; i < dk; i++) {
            p->dq[(t * s->nk + hk) * dk + i] += gq[i];
            p->dk[(t * s->nk + hk) * dk + i] += gk[i];
        }
    }
}

static void solve(struct harness *h, struct problem *p)
{
    const struct shape *s = &p->s;
    size_t longest = 0, keys = p->n * s->nk * s->dk, values = p->n * s->nv * s->dv;
    for (size_t i = 0; i < s->n_docs; i++)
        longest = MT_MAX(longest, s->len[i]);
    double *states = scratch(h, (longest + 1) * s->dk * s->dv), *work = scratch(h, s->dk * s->dv + 8 * (s->dk + s->dv));
    p->o = scratch(h, values);
    p->dv = scratch(h, values);
    p->dq = scratch(h, keys);
    p->dk = scratch(h, keys);
    p->dbeta = scratch(h, p->n * s->nv);
    p->dg = scratch(h, p->n * s->nv);
    p->dskip = scratch(h, p->n * s->nv);
    for (size_t i = 0; i < s->n_docs; i++)
        for (size_t hv = 0; hv < s->nv; hv++)
            recur(p, (size_t)p->cu[i], (size_t)p->cu[i + 1], hv, states, work);
}

struct device_problem {
    struct dbuf *q, *k, *v, *o, *beta, *g, *d_o, *dq, *dk, *dv, *dbeta, *dg, *skip, *dskip;
};

/* A piece of some documents' rows, which are cut where `at` says (ascending, with 0 after the last; NULL: not at all): the
 * one that begins with row `from`. */
struct cut {
    size_t from, n, n_docs;
    int32_t cu[MAX_DOCS + 1];
    bool began, goes_on; /* the first document in the piece before, the last one in the next */
};

static struct cut cut_of(const int32_t *cu, size_t n_docs, const size_t *at, size_t from)
{
    struct cut x = {.from = from};
    size_t to = (size_t)cu[n_docs];
    while (at && *at && *at <= from)
        at++;
    to = at && *at ? *at : to;
    x.n = to - from;
    for (size_t i = 0; i < n_docs; i++) {
        size_t begin = (size_t)cu[i], end = (size_t)cu[i + 1];
        x.began |= begin < from && from < end;
        x.goes_on |= begin < to && to < end;
        if (end > from && begin < to)
            x.cu[++x.n_docs] = (int32_t)(MT_MIN(end, to) - from);
    }
    return x;
}

static struct mt_heads rows_from(const struct harness *h, const struct dbuf *b, size_t from, size_t heads, size_t dim)
{
    return mt_heads((char *)b->p + from * heads * dim * mt_dtype_size(h->dtype), heads * dim, heads, dim);
}

static void run_rule(struct harness *h, struct problem *p, struct device_problem *d)
{
    const struct shape *s = &p->s;
    size_t keys = s->nk * s->dk, values = s->nv * s->dv, states = s->dk * values, longest = 0, k = 0;
    for (size_t i = 0; i < s->n_docs; i++)
        longest = MT_MAX(longest, s->len[i]);
    d->o = buf_nan(h, h->dtype, p->n * values);
    d->dv = buf_nan(h, h->dtype, p->n * values);
    d->dq = buf_nan(h, h->dtype, p->n * keys);
    d->dk = buf_nan(h, h->dtype, p->n * keys);
    d->dbeta = buf_nan(h, MT_F32, p->n * s->nv);
    d->dg = buf_nan(h, MT_F32, p->n * s->nv);
    d->dskip = buf_nan(h, MT_F32, p->n * s->nv);
    struct cut x[MAX_CUTS + 1];
    struct mt_delta_rule_bwd b[MAX_CUTS + 1];
    void *state = NULL, *gradient = NULL;
    for (size_t at = 0; at < p->n; at += x[k++].n) {
        x[k] = cut_of(p->cu, s->n_docs, s->cut, at);
        struct mt_delta_rule a = {
            .n = x[k].n, .n_docs = x[k].n_docs, .max_len = longest, .dtype = h->dtype, .plain = s->plain,
            .skip = s->plain ? d->skip->p : NULL, .scale = (float)p->scale, .eps = (float)p->eps,
            .cu_seqlens = buf_ints(h, x[k].cu, x[k].n_docs + 1)->p, .cu_seqlens_host = x[k].cu,
            .q = rows_from(h, d->q, at, s->nk, s->dk), .k = rows_from(h, d->k, at, s->nk, s->dk),
            .v = rows_from(h, d->v, at, s->nv, s->dv), .o = rows_from(h, d->o, at, s->nv, s->dv),
            .beta = (float *)d->beta->p + at * s->nv, .g = (float *)d->g->p + at * s->nv,
            .handed = {x[k].began ? state : NULL, x[k].goes_on ? buf_nan(h, MT_F32, states)->p : NULL}};
        a.workspace = workspace(h, mt_op_delta_rule_workspace(h->dev, &a));
        RUN(h, mt_op_delta_rule, &a);
        state = a.handed.to;
        a.handed.to = NULL;
        b[k].fwd = a;
    }
    while (k-- > 0) {
        size_t at = x[k].from;
        b[k] = (struct mt_delta_rule_bwd){
            .fwd = b[k].fwd, .d_o = rows_from(h, d->d_o, at, s->nv, s->dv), .dq = rows_from(h, d->dq, at, s->nk, s->dk),
            .dk = rows_from(h, d->dk, at, s->nk, s->dk), .dv = rows_from(h, d->dv, at, s->nv, s->dv),
            .dbeta = (float *)d->dbeta->p + at * s->nv, .dg = (float *)d->dg->p + at * s->nv,
            .dskip = s->plain ? (float *)d->dskip->p + at * s->nv : NULL,
            .handed = {x[k].goes_on ? gradient : NULL, x[k].began ? buf_nan(h, MT_F32, states)->p : NULL}};
        RUN(h, mt_op_delta_rule_bwd, &b[k]);
        gradient = b[k].handed.to;
    }
}

static void make_problem(struct harness *h, struct problem *p, struct device_problem *d)
{
    const struct shape *s = &p->s;
    for (size_t i = 0; i < s->n_docs; i++)
        p->cu[i + 1] = p->cu[i] + (int32_t)s->len[i];
    p->n = (size_t)p->cu[s->n_docs];
    p->scale = 1 / sqrt((double)s->dk);
    p->eps = s->plain ? 0 : 1e-6;
    double *spread;
    d->skip = buf_random(h, h->dtype, s->nv, 1, &p->skip);
    if (!s->plain)
        memset(p->skip, 0, s->nv * sizeof(double));
    d->q = buf_random(h, h->dtype, p->n * s->nk * s->dk, 1, &p->q);
    d->k = buf_random(h, h->dtype, p->n * s->nk * s->dk, 1, &p->k);
    d->v = buf_random(h, h->dtype, p->n * s->nv * s->dv, 1, &p->v);
    d->d_o = buf_random(h, h->dtype, p->n * s->nv * s->dv, 1, &p->d_o);
    buf_random(h, MT_F32, 2 * p->n * s->nv, 1, &spread);
    p->beta = scratch(h, p->n * s->nv);
    p->g = scratch(h, p->n * s->nv);
    for (size_t i = 0; i < p->n * s->nv; i++) {
        p->beta[i] = (double)(float)sigmoid(2 * spread[i]);
        p->g[i] = (double)(float)(-s->decay * fabs(spread[p->n * s->nv + i]) * fabs(spread[p->n * s->nv + i]));
    }
    d->beta = buf_values(h, MT_F32, p->n * s->nv, p->beta);
    d->g = buf_values(h, MT_F32, p->n * s->nv, p->g);
}

static void rule_case(struct harness *h, const struct shape *s, double tol, double tol_g)
{
    struct problem p = {.s = *s};
    struct device_problem d;
    make_problem(h, &p, &d);
    solve(h, &p);
    run_rule(h, &p, &d);
    size_t keys = p.n * s->nk * s->dk, values = p.n * s->nv * s->dv;
    expect_close(h, "o", buf_get(h, d.o), p.o, values, tolerance(h, tol, 4e-3));
    expect_close(h, "dq", buf_get(h, d.dq), p.dq, keys, tolerance(h, tol, 4e-3));
    expect_close(h, "dk", buf_get(h, d.dk), p.dk, keys, tolerance(h, tol, 4e-3));
    expect_close(h, "dv", buf_get(h, d.dv), p.dv, values, tolerance(h, tol, 4e-3));
    expect_close(h, "dbeta", buf_get(h, d.dbeta), p.dbeta, p.n * s->nv, tol);
    expect_close(h, "dg", buf_get(h, d.dg), p.dg, p.n * s->nv, tol_g);
    if (s->plain)
        expect_close(h, "dskip", buf_get(h, d.dskip), p.dskip, p.n * s->nv, tol);
}

DEVICE_TEST(delta_rule_matches_the_recurrence)
{
    static const struct shape shapes[] = {
        {1, 1, 8, 8, 1, {1}, 0.1},           {2, 4, 16, 24, 3, {64, 1, 130}, 0.3}, {1, 3, 24, 8, 2, {63, 65}, 1},
        {3, 3, 40, 16, 4, {5, 2, 70, 128}, 20}, {1, 2, 128, 128, 1, {100}, 0.1},
        {2, 4, 16, 24, 3, {90, 1, 130}, 0.3, .cut = {1, 70, 91, 190}}, {1, 3, 24, 8, 1, {240}, 1, .cut = {100, 239}},
        {4, 8, 16, 24, 1, {1000}, 0.1},
    };
    for (size_t i = 0; i < MT_ARRAY_LEN(shapes); i++)
        rule_case(h, &shapes[i], 2e-6, 2e-6);
}

/* Key heads with one job, with several, and with a last one of fewer value heads. */
DEVICE_TEST(plain_rule_matches_the_recurrence)
{
    static const struct shape shapes[] = {
        {1, 1, 8, 8, 1, {1}, 0.1, true},  {2, 4, 16, 24, 3, {64, 1, 130}, 0.3, true},
        {1, 19, 24, 8, 2, {63, 66}, 1, true}, {2, 32, 16, 8, 4, {5, 2, 70, 128}, 20, true},
        {1, 2, 128, 64, 1, {100}, 0.1, true},
        {2, 20, 16, 24, 3, {90, 1, 130}, 0.3, true, {1, 70, 91, 190}},
    };
    for (size_t i = 0; i < MT_ARRAY_LEN(shapes); i++)
        rule_case(h, &shapes[i], 2e-6, 2e-6);
}

/* Decays of a chunk that add up to hundreds, over more chunks than are kept at a time. */
DEVICE_TEST(delta_rule_keeps_its_precision_where_decay_is_strong)
{
    static const struct shape strong = {1, 1, 16, 16, 1, {8192}, 16}, mild = {1, 1, 16, 16, 1, {8192}, 0.01};
    rule_case(h, &strong, 1e-6, 1e-6);
    rule_case(h, &mild, 2e-6, 2e-6);
}

DEVICE_TEST(plain_rule_keeps_its_precision_where_decay_is_strong)
{
    static const struct shape strong = {1, 1, 16, 16, 1, {8192}, 16, true};
    rule_case(h, &strong, 1e-6, 1e-6);
}

/* A document has the same bits whatever stands beside it. */
static void starts_anew(struct harness *h, size_t nv, bool plain)
{
    struct problem p = {.s = {2, nv, 16, 16, 3, {70, 33, 129}, 0.2, plain}}, one;
    struct device_problem d, e;
    make_problem(h, &p, &d);
    run_rule(h, &p, &d);
    size_t first = 70, n = 33, values = nv * 16, keys = 32;
    one = p;
    one.n = n;
    one.s.n_docs = 1;
    one.s.len[0] = n;
    one.cu[1] = (int32_t)n;
    e.skip = d.skip;
    e.q = buf_values(h, h->dtype, n * keys, p.q + first * keys);
    e.k = buf_values(h, h->dtype, n * keys, p.k + first * keys);
    e.v = buf_values(h, h->dtype, n * values, p.v + first * values);
    e.d_o = buf_values(h, h->dtype, n * values, p.d_o + first * values);
    e.beta = buf_values(h, MT_F32, n * nv, p.beta + first * nv);
    e.g = buf_values(h, MT_F32, n * nv, p.g + first * nv);
    run_rule(h, &one, &e);
    expect_close(h, "o alone", buf_get(h, e.o), buf_get(h, d.o) + first * values, n * values, 0);
    expect_close(h, "dk alone", buf_get(h, e.dk), buf_get(h, d.dk) + first * keys, n * keys, 0);
    expect_close(h, "dv alone", buf_get(h, e.dv), buf_get(h, d.dv) + first * values, n * values, 0);
    expect_close(h, "dg alone", buf_get(h, e.dg), buf_get(h, d.dg) + first * nv, n * nv, 0);
}

DEVICE_TEST(delta_rule_starts_anew_with_each_document)
{
    starts_anew(h, 4, false);
    starts_anew(h, 20, true);
}

/* Cut at whole chunks of its tokens, each has the bits that it has uncut. */
static void cut_at_chunks(struct harness *h, const struct shape *s)
{
    struct problem p = {.s = *s};
    struct device_problem d, e;
    memset(p.s.cut, 0, sizeof(p.s.cut));
    make_problem(h, &p, &d);
    run_rule(h, &p, &d);
    e = d;
    p.s = *s;
    run_rule(h, &p, &e);
    const struct dbuf *whole[] = {d.o, d.dq, d.dk, d.dv, d.dbeta, d.dg};
    const struct dbuf *cut[] = {e.o, e.dq, e.dk, e.dv, e.dbeta, e.dg};
    for (size_t i = 0; i < MT_ARRAY_LEN(whole); i++)
        expect_close(h, "results in pieces", buf_get(h, cut[i]), buf_get(h, whole[i]), whole[i]->n, 0);
}

DEVICE_TEST(delta_rule_in_pieces_has_the_same_bits)
{
    static const struct shape shapes[] = {
        {2, 4, 16, 24, 3, {130, 33, 140}, 0.2, false, {64, 163, 227}}, {2, 20, 16, 24, 3, {130, 33, 140}, 0.2, true, {64, 163, 227}},
        {4, 8, 16, 24, 1, {1000}, 0.2, false, {320, 640}}, /* states of all chunks, or of some */
        {2, 20, 16, 24, 1, {1000}, 0.2, true, {320, 640}},
    };
    for (size_t i = 0; i < MT_ARRAY_LEN(shapes); i++)
        cut_at_chunks(h, &shapes[i]);
}

/* Some rows of some documents, as an operation gets them: row i of document d of `whole`, which begins at cu[d]. */
enum { PIECES = 4 };
struct piece {
    size_t n_docs, n, doc[MAX_DOCS], from[MAX_DOCS];
    int32_t cu[MAX_DOCS + 1], past[MAX_DOCS], place[MAX_DOCS];
};

/* Each document's next rows, so many in each piece; *has[d]: rows that it had. false: there are none. */
static bool next_piece(struct piece *x, const int32_t *whole, size_t n_docs, const size_t *rows, size_t *has)
{
    *x = (struct piece){0};
    for (size_t d = n_docs; d-- > 0;) {
        size_t left = (size_t)(whole[d + 1] - whole[d]) - has[d], some = MT_MIN(rows[d], left), i = x->n_docs;
        if (!some)
            continue;
        x->doc[i] = d;
        x->from[i] = (size_t)whole[d] + has[d];
        x->past[i] = (int32_t)has[d];
        x->place[i] = (int32_t)(n_docs - 1 - d);
        x->n += some;
        x->cu[++x->n_docs] = (int32_t)x->n;
        has[d] += some;
    }
    return x->n_docs > 0;
}

static struct dbuf *rows_of(struct harness *h, enum mt_dtype t, const struct piece *x, const double *all, size_t width)
{
    double *some = scratch(h, x->n * width);
    for (size_t i = 0; i < x->n_docs; i++)
        memcpy(some + (size_t)x->cu[i] * width, all + x->from[i] * width,
               (size_t)(x->cu[i + 1] - x->cu[i]) * width * sizeof(double));
    return buf_values(h, t, x->n * width, some);
}

static void put_rows(struct harness *h, const struct piece *x, const struct dbuf *some, double *all, size_t width)
{
    const double *got = buf_get(h, some);
    for (size_t i = 0; i < x->n_docs; i++)
        memcpy(all + x->from[i] * width, got + (size_t)x->cu[i] * width,
               (size_t)(x->cu[i + 1] - x->cu[i]) * width * sizeof(double));
}

static struct mt_carried carried_by(struct harness *h, const struct piece *x, struct dbuf *before, struct dbuf *after,
                                    size_t ld_bytes)
{
    return (struct mt_carried){before->p, after->p, ld_bytes, buf_ints(h, x->past, x->n_docs)->p,
                               buf_ints(h, x->place, x->n_docs)->p};
}

/* In place, and from one buffer to another, in chunks that are not whole, with the bits of whole documents. */
static void goes_on(struct harness *h, bool plain)
{
    static const size_t rows[PIECES][3] = {{64, 1, 30}, {1, 9, 70}, {3, 9, 1}, {99, 99, 99}};
    struct problem p = {.s = {2, plain ? 20 : 4, 16, 24, 3, {130, 1, 140}, 0.3, plain}};
    struct device_problem d;
    make_problem(h, &p, &d);
    run_rule(h, &p, &d);
    const struct shape *s = &p.s;
    size_t keys = s->nk * s->dk, values = s->nv * s->dv, has[3] = {0};
    struct mt_delta_rule shape = {.dtype = h->dtype, .k = {.n = s->nk, .dim = s->dk}, .v = {.n = s->nv, .dim = s->dv}};
    size_t ld = mt_delta_kept(&shape).bytes + 64;
    double *got = scratch(h, p.n * values);
    struct dbuf *state[2] = {buf_nan(h, MT_F32, 3 * ld / 4), buf_nan(h, MT_F32, 3 * ld / 4)};
    struct piece x;
    for (size_t i = 0; i < PIECES && next_piece(&x, p.cu, 3, rows[i], has); i++) {
        struct dbuf *o = buf_nan(h, h->dtype, x.n * values);
        struct mt_delta_rule a = {
            .n = x.n, .n_docs = x.n_docs, .max_len = 140, .dtype = h->dtype, .plain = plain, .scale = (float)p.scale,
            .eps = (float)p.eps, .skip = plain ? d.skip->p : NULL, .cu_seqlens = buf_ints(h, x.cu, x.n_docs + 1)->p,
            .cu_seqlens_host = x.cu, .q = mt_heads(rows_of(h, h->dtype, &x, p.q, keys)->p, keys, s->nk, s->dk),
            .k = mt_heads(rows_of(h, h->dtype, &x, p.k, keys)->p, keys, s->nk, s->dk),
            .v = mt_heads(rows_of(h, h->dtype, &x, p.v, values)->p, values, s->nv, s->dv),
            .o = mt_heads(o->p, values, s->nv, s->dv), .beta = rows_of(h, MT_F32, &x, p.beta, s->nv)->p,
            .g = rows_of(h, MT_F32, &x, p.g, s->nv)->p,
            .carried = carried_by(h, &x, state[i / 2], state[(i + 1) / 2 % 2], ld)};
        a.workspace = workspace(h, mt_op_delta_rule_workspace(h->dev, &a));
        RUN(h, mt_op_delta_rule, &a);
        put_rows(h, &x, o, got, values);
    }
    expect_close(h, "o", got, buf_get(h, d.o), p.n * values, 0);
}

DEVICE_TEST(delta_rule_goes_on_with_the_same_bits)
{
    goes_on(h, false);
    goes_on(h, true);
}

DEVICE_TEST(short_convolution_goes_on_with_the_same_bits)
{
    static const size_t rows[PIECES][3] = {{2, 1, 5}, {1, 1, 1}, {1, 1, 9}, {600, 1, 600}};
    static const int32_t cu[] = {0, 7, 8, 560};
    enum { N = 560, C = 2 * 70, TAPS = 4, LD = (TAPS - 1) * C + 4 };
    double *x, *w, *got = scratch(h, N * C);
    struct dbuf *bx = buf_random(h, h->dtype, N * C, 1, &x), *bw = buf_random(h, h->dtype, C * TAPS, 1, &w);
    struct dbuf *by = buf_nan(h, h->dtype, N * C), *tail[2] = {buf_nan(h, h->dtype, 3 * LD), buf_nan(h, h->dtype, 3 * LD)};
    struct mt_short_conv a = {.n = N, .taps = TAPS, .n_docs = 3, .dtype = h->dtype, .cu_seqlens = buf_ints(h, cu, 4)->p,
                              .x = mt_heads(bx->p, C, 2, 70), .y = mt_heads(by->p, C, 2, 70), .w = bw->p};
    RUN(h, mt_op_short_conv, &a);
    struct piece p;
    size_t has[3] = {0};
    for (size_t i = 0; i < PIECES && next_piece(&p, cu, 3, rows[i], has); i++) {
        struct dbuf *y = buf_nan(h, h->dtype, p.n * C);
        a.n = p.n;
        a.n_docs = p.n_docs;
        a.cu_seqlens = buf_ints(h, p.cu, p.n_docs + 1)->p;
        a.x.p = rows_of(h, h->dtype, &p, x, C)->p;
        a.y.p = y->p;
        a.carried = carried_by(h, &p, tail[i / 2], tail[(i + 1) / 2 % 2], LD * mt_dtype_size(h->dtype));
        RUN(h, mt_op_short_conv, &a);
        put_rows(h, &p, y, got, C);
    }
    expect_close(h, "y", got, buf_get(h, by), N * C, 0);
}

/* Heads of x and y lie in wider rows, apart. One head: there is no bias. */
static void conv_case(struct harness *h, size_t heads, size_t dim, size_t taps, size_t stride, const size_t *cuts)
{
    static const int32_t cu[] = {0, 3, 4, 70, 600};
    enum { N = 600, DOCS = 4 };
    size_t c = heads * dim, ld = heads * stride + 3, tail = (taps - 1) * c + 1, e = mt_dtype_size(h->dtype), k = 0;
    bool biased = heads > 1;
    double *x, *w, *dy, *dw0, *want = scratch(h, N * ld), *slope = scratch(h, N * c), *dx = scratch(h, N * ld);
    double *dw = scratch(h, c * taps), *bias, *db0, *db = scratch(h, c);
    struct dbuf *bbias = buf_random(h, h->dtype, c, 1, &bias), *bdb = buf_random(h, MT_F32, c, 1, &db0);
    struct dbuf *bx = buf_random(h, h->dtype, N * ld, 1, &x), *bw = buf_random(h, h->dtype, c * taps, 1, &w);
    struct dbuf *bdy = buf_random(h, h->dtype, N * c, 1, &dy), *bdw = buf_random(h, MT_F32, c * taps, 1, &dw0);
    double *zero = scratch(h, N * ld);
    struct dbuf *y = buf_nan(h, h->dtype, N * c), *bdx = buf_values(h, h->dtype, N * ld, zero);
    struct cut pieces[MAX_CUTS + 1];
    struct mt_short_conv all[MAX_CUTS + 1];
    void *inputs = NULL, *slopes = NULL;
    for (size_t at = 0; at < N; at += pieces[k++].n) {
        struct cut p = pieces[k] = cut_of(cu, DOCS, cuts, at);
        all[k] = (struct mt_short_conv){
            .n = p.n, .taps = taps, .n_docs = p.n_docs, .dtype = h->dtype, .cu_seqlens = buf_ints(h, p.cu, p.n_docs + 1)->p,
            .x = {(char *)bx->p + at * ld * e, ld, stride, heads, dim}, .y = rows_from(h, y, at, heads, dim), .w = bw->p,
            .bias = biased ? bbias->p : NULL,
            .handed = {p.began ? inputs : NULL, p.goes_on ? buf_nan(h, h->dtype, tail)->p : NULL}};
        RUN(h, mt_op_short_conv, &all[k]);
        inputs = all[k].handed.to;
        all[k].handed.to = NULL;
    }
    while (k-- > 0) {
        struct cut p = pieces[k];
        struct mt_short_conv_bwd b = {
            .fwd = all[k], .dy = rows_from(h, bdy, p.from, heads, dim), .dx = all[k].x, .dw = bdw->p,
            .dbias = biased ? bdb->p : NULL,
            .handed = {p.goes_on ? slopes : NULL, p.began ? buf_nan(h, MT_F32, tail)->p : NULL}};
        b.dx.p = (char *)bdx->p + p.from * ld * e;
        b.workspace = workspace(h, mt_op_short_conv_bwd_workspace(h->dev, &b));
        RUN(h, mt_op_short_conv_bwd, &b);
        slopes = b.handed.to;
    }
    memcpy(dw, dw0, c * taps * sizeof(double));
    memcpy(db, db0, c * sizeof(double));
    for (size_t doc = 0; doc < DOCS; doc++)
        for (size_t t = (size_t)cu[doc]; t < (size_t)cu[doc + 1]; t++)
            for (size_t i = 0; i < c; i++) {
                double s = biased ? bias[i] : 0;
                size_t at = i / dim * stride + i % dim;
                for (size_t j = 0; j < taps; j++)
                    if (t + j >= (size_t)cu[doc] + taps - 1)
                        s += w[i * taps + j] * x[(t + j - taps + 1) * ld + at];
                want[t * c + i] = s * sigmoid(s);
                slope[t * c + i] = dy[t * c + i] * (sigmoid(s) * (1 + s * (1 - sigmoid(s))));
                db[i] += biased ? slope[t * c + i] : 0;
                for (size_t j = 0; j < taps; j++)
                    if (t + j >= (size_t)cu[doc] + taps - 1) {
                        dw[i * taps + j] += slope[t * c + i] * x[(t + j - taps + 1) * ld + at];
                        dx[(t + j - taps + 1) * ld + at] += slope[t * c + i] * w[i * taps + j];
                    }
            }
    expect_close(h, "y", buf_get(h, y), want, N * c, tolerance(h, 1e-6, 4e-3));
    expect_close(h, "dx", buf_get(h, bdx), dx, N * ld, tolerance(h, 1e-6, 4e-3));
    expect_close(h, "dw", buf_get(h, bdw), dw, c * taps, 2e-6);
    expect_close(h, "dbias", buf_get(h, bdb), db, c, 2e-6);
}

DEVICE_TEST(short_convolution_matches_the_definition)
{
    static const size_t cuts[] = {1, 2, 70, 333, 0}, few[] = {72, 75, 76, 80, 0};
    conv_case(h, 1, 8, 4, 8, NULL);
    conv_case(h, 3, 72, 4, 80, NULL);
    conv_case(h, 1, 260, 3, 260, NULL);
    conv_case(h, 2, 5, 8, 7, NULL);
    conv_case(h, 1, 9, 1, 9, NULL);
    conv_case(h, 3, 72, 4, 80, cuts);
    conv_case(h, 2, 5, 8, 7, few);
}
