/* SPDX-License-Identifier: Apache-2.0 */
#include "trial.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Allowed difference, relative to norms; rounding probabilities and results to bf16 causes a quarter of it. */
static const double tolerance = 2e-2;
enum { PIECE = 4 << 20 };

static const char *const ways[] = {"fixed", "ragged", "copies", "rounded", "own"};
static const char *const verdicts[] = {"open", "fused", "tiles"};

static bool same_kind(const struct mt_trial_kind *a, const struct mt_trial_kind *b)
{
    return a->backward == b->backward && a->window == b->window && a->way == b->way && a->dim == b->dim &&
           a->dim_v == b->dim_v && a->n_q == b->n_q && a->n_kv == b->n_kv && a->len == b->len;
}

struct mt_trials *mt_trials_create(void)
{
    struct mt_trials *t = mt_calloc(1, sizeof(*t));
    if (!t)
        return NULL;
    pthread_mutex_init(&t->lock, NULL);
    pthread_cond_init(&t->ended, NULL);
    t->users = 1;
    return t;
}

struct mt_trials *mt_trials_join(struct mt_trials *t)
{
    t->users++;
    return t;
}

void mt_trials_leave(struct mt_trials **t)
{
    if (*t && !--(*t)->users) {
        pthread_cond_destroy(&(*t)->ended);
        pthread_mutex_destroy(&(*t)->lock);
        free(*t);
    }
    *t = NULL;
}

/* Its index; -1: there are too many kinds. */
static int index_of_kind(struct mt_trials *t, const struct mt_trial_kind *k)
{
    int i = 0;
    while (i < t->n && !same_kind(&t->of[i].kind, k))
        i++;
    if (i == MT_TRIAL_MAX)
        return -1;
    if (i == t->n) {
        memset(&t->of[i], 0, sizeof(t->of[i]));
        t->of[t->n++].kind = *k;
    }
    return i;
}

enum mt_trial_verdict *mt_trials_find(struct mt_trials *t, const struct mt_trial_kind *k)
{
    int i = index_of_kind(t, k);
    return i < 0 ? NULL : &t->of[i].verdict;
}

enum mt_trial_turn mt_trials_begin(struct mt_trials *t, const struct mt_trial_kind *k, enum mt_trial_verdict **v)
{
    enum mt_trial_turn turn = MT_TRIAL_TAKE;
    pthread_mutex_lock(&t->lock);
    int i = index_of_kind(t, k);
    *v = i < 0 ? NULL : &t->of[i].verdict;
    while (i >= 0 && t->of[i].compares)
        pthread_cond_wait(&t->ended, &t->lock);
    if (i >= 0 && t->of[i].verdict == MT_TRIAL_TILES) {
        turn = MT_TRIAL_REFUSE;
    } else if (i >= 0 && (t->of[i].verdict == MT_TRIAL_OPEN || t->of[i].again)) {
        turn = MT_TRIAL_COMPARE;
        t->of[i].compares = true;
    }
    pthread_mutex_unlock(&t->lock);
    return turn;
}

void mt_trials_end(struct mt_trials *t, const struct mt_trial_kind *k, enum mt_trial_verdict found, bool compared)
{
    pthread_mutex_lock(&t->lock);
    int i = index_of_kind(t, k);
    t->of[i].compares = false;
    t->of[i].again &= !compared;
    if (found != MT_TRIAL_OPEN)
        t->of[i].verdict = found;
    pthread_cond_broadcast(&t->ended);
    pthread_mutex_unlock(&t->lock);
}

void mt_trials_settle(struct mt_trials *t, enum mt_trial_verdict *v, enum mt_trial_verdict to)
{
    pthread_mutex_lock(&t->lock);
    if (v)
        *v = to;
    pthread_mutex_unlock(&t->lock);
}

bool mt_trials_is(struct mt_trials *t, const enum mt_trial_verdict *v, enum mt_trial_verdict what)
{
    pthread_mutex_lock(&t->lock);
    bool is = v && *v == what;
    pthread_mutex_unlock(&t->lock);
    return is;
}

void mt_trials_doubt(struct mt_trials *t)
{
    for (int i = 0; i < t->n; i++)
        t->of[i].again = true;
}

/* The shape of a kind in every way: a way that was not tried yet must not take the place of one that is withdrawn. */
static void add_ways(struct mt_trials *t, struct mt_trial_kind k)
{
    for (size_t way = 0; way < MT_ARRAY_LEN(ways); way++) {
        k.way = (enum mt_trial_way)way;
        mt_trials_find(t, &k);
    }
}

size_t mt_trials_withdraw(struct mt_trials *t)
{
    size_t n = 0;
    int tried = t->n;
    for (int i = 0; i < tried; i++)
        add_ways(t, t->of[i].kind);
    for (int i = 0; i < t->n; i++) {
        t->of[i].before = t->of[i].verdict;
        n += i < tried && t->of[i].verdict != MT_TRIAL_TILES;
        t->of[i].verdict = MT_TRIAL_TILES;
    }
    t->n_withdrawn = t->n;
    return n;
}

void mt_trials_reinstate(struct mt_trials *t)
{
    for (int i = 0; i < t->n_withdrawn; i++)
        t->of[i].verdict = t->of[i].before;
    t->n_withdrawn = 0;
}

void mt_trials_print(const struct mt_trials *t, struct mt_str *out)
{
    bool first = true;
    mt_str_printf(out, "%s", t->engine);
    for (int i = 0; i < t->n; i++) {
        const struct mt_trial_kind *k = &t->of[i].kind;
        if (t->of[i].verdict == MT_TRIAL_OPEN)
            continue;
        mt_str_printf(out, "%s %s %s%s %d", first ? ":" : ";", k->backward ? "backward" : "forward", ways[k->way],
                      k->window ? " window" : "", k->dim);
        if (k->dim_v != k->dim)
            mt_str_printf(out, "/%d", k->dim_v);
        mt_str_printf(out, " of %d/%d to %d %s", k->n_q, k->n_kv, k->len, verdicts[t->of[i].verdict]);
        first = false;
    }
}

static int index_of(const char *word, const char *const *words, int n)
{
    int i = 0;
    while (i < n && strcmp(word, words[i]))
        i++;
    return i < n ? i : -1;
}

static bool read_one(struct mt_trials *t, const char *text)
{
    char pass[16], way[16], width[16], verdict[16];
    struct mt_trial_kind k = {0};
    int at = 0, rest = 0;
    if (sscanf(text, " %15s %15s%n", pass, way, &at) != 2)
        return false;
    k.window = !strncmp(text + at, " window", 7);
    rest = at + (k.window ? 7 : 0);
    if (sscanf(text + rest, " %15[0-9/] of %d/%d to %d %15[a-z]", width, &k.n_q, &k.n_kv, &k.len, verdict) != 5)
        return false;
    if (sscanf(width, "%d/%d", &k.dim, &k.dim_v) == 1)
        k.dim_v = k.dim;
    int w = index_of(way, ways, (int)MT_ARRAY_LEN(ways)), v = index_of(verdict, verdicts, (int)MT_ARRAY_LEN(verdicts));
    k.backward = !strcmp(pass, "backward");
    if (w < 0 || v < 0 || (!k.backward && strcmp(pass, "forward")))
        return false;
    k.way = (enum mt_trial_way)w;
    enum mt_trial_verdict *found = mt_trials_find(t, &k);
    if (found && *found != MT_TRIAL_TILES) /* one that was wrong once is not tried again */
        *found = (enum mt_trial_verdict)v;
    return true;
}

bool mt_trials_read(struct mt_trials *t, const char *text)
{
    size_t len = strlen(t->engine);
    if (strncmp(text, t->engine, len) || (text[len] && text[len] != ':'))
        return false;
    bool ok = true;
    for (const char *at = text[len] ? text + len + 1 : NULL; at; at = strchr(at, ';')) {
        at += *at == ';';
        ok &= read_one(t, at);
    }
    return ok;
}

/* --- one trial ----------------------------------------------------------------------------------- */

static size_t row_bytes(const struct mt_trial_tensor *x)
{
    return x->of.n * x->of.dim * mt_dtype_size(x->dtype);
}

/* Copies rows [row, row + rows) to `host`, or from it: there, heads lie side by side. */
static int copy_rows(struct mt_cuda_device *d, const struct mt_trial_tensor *x, size_t row, size_t rows, char *host,
                     bool back, struct mt_err *err)
{
    const struct mt_heads *h = &x->of;
    size_t e = mt_dtype_size(x->dtype), pitch = h->ld * e, width = row_bytes(x), n = mt_heads_adjoin(h) ? 1 : h->n;
    int rc = 0;
    for (size_t i = 0; i < n && !rc; i++) {
        char *device = (char *)h->p + mt_heads_at(h, row, i) * e, *at = host + i * h->dim * e;
        rc = mt_cuda_copy(&d->base, MT_STREAM_COMPUTE,
                          &(struct mt_copy){back ? device : at, back ? pitch : width, back ? at : device,
                                            back ? width : pitch, width / n, rows}, err);
    }
    return rc ? rc : mt_cuda_check(d, cudaStreamSynchronize(d->streams[MT_STREAM_COMPUTE]), err, "attention's trial");
}

int mt_trial_keep(struct mt_cuda_device *d, struct mt_trial *t, struct mt_err *err)
{
    int rc = 0;
    for (int i = 0; i < t->n && !rc; i++) {
        const struct mt_trial_tensor *x = &t->tensor[i];
        t->kept[i] = malloc(x->rows * row_bytes(x));
        rc = t->kept[i] ? copy_rows(d, x, 0, x->rows, t->kept[i], false, err)
                        : mt_fail_nomem(err, "the first comparison of attention", x->rows * row_bytes(x));
    }
    return rc;
}

int mt_trial_restore(struct mt_cuda_device *d, const struct mt_trial *t, struct mt_err *err)
{
    int rc = 0;
    for (int i = 0; i < t->n && !rc; i++)
        rc = copy_rows(d, &t->tensor[i], 0, t->tensor[i].rows, t->kept[i], true, err);
    return rc;
}

void mt_trial_finish(struct mt_trial *t)
{
    for (int i = 0; i < t->n; i++)
        free(t->kept[i]);
}

/* Sums of squares; not finite if any element is not. */
struct norms {
    double fused, tiles, difference;
};

static double element(const char *p, enum mt_dtype t, size_t i)
{
    return t == MT_F32 ? (double)((const float *)(const void *)p)[i]
                       : (double)mt_bf16_to_f32(((const uint16_t *)(const void *)p)[i]);
}

static void add_norms(struct norms *s, const char *fused, const char *tiles, enum mt_dtype t, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        double a = element(fused, t, i), b = element(tiles, t, i);
        s->fused += a * a;
        s->tiles += b * b;
        s->difference += (a - b) * (a - b);
    }
}

static int measure(struct mt_cuda_device *d, const struct mt_trial_tensor *x, const char *fused, struct norms *s,
                   struct mt_err *err)
{
    size_t width = row_bytes(x), most = MT_MAX((size_t)PIECE / width, (size_t)1);
    char *tiles = malloc(MT_MIN(most, x->rows) * width);
    int rc = tiles ? 0 : mt_fail_nomem(err, "the first comparison of attention", most * width);
    for (size_t row = 0; row < x->rows && !rc; row += most) {
        size_t rows = MT_MIN(most, x->rows - row);
        rc = copy_rows(d, x, row, rows, tiles, false, err);
        if (!rc)
            add_norms(s, fused + row * width, tiles, x->dtype, rows * x->of.n * x->of.dim);
    }
    free(tiles);
    return rc;
}

static bool agrees(const struct mt_trial_tensor *x, const struct norms *s, double all, char *why, size_t why_len)
{
    double norm = MT_MAX(sqrt(s->tiles), x->relative ? x->floor * all : x->floor);
    if (!isfinite(s->fused))
        snprintf(why, why_len, "%s is not finite", x->name);
    else if (sqrt(s->difference) > tolerance * norm)
        snprintf(why, why_len, "%s differs by %.2g of its norm", x->name, sqrt(s->difference / MT_MAX(s->tiles, 1e-300)));
    else
        return true;
    return false;
}

int mt_trial_judge(struct mt_cuda_device *d, struct mt_trial *t, enum mt_trial_verdict *verdict, char *why,
                   size_t why_len, struct mt_err *err)
{
    struct norms s[MT_TRIAL_TENSORS] = {{0}};
    double all = 0;
    int rc = 0;
    for (int i = 0; i < t->n && !rc; i++) {
        rc = measure(d, &t->tensor[i], t->kept[i], &s[i], err);
        all += s[i].tiles;
    }
    if (rc)
        return rc;
    *verdict = MT_TRIAL_OPEN;
    if (!isfinite(all))
        return 0;
    bool same = true;
    for (int i = 0; i < t->n && same; i++)
        same = agrees(&t->tensor[i], &s[i], sqrt(all), why, why_len);
    if (!same)
        *verdict = MT_TRIAL_TILES;
    else if (s[0].tiles > 0)
        *verdict = MT_TRIAL_FUSED;
    return 0;
}
