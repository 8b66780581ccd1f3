/* SPDX-License-Identifier: Apache-2.0 */
#include "train/texts.h"

#include <errno.h>
#include <string.h>

#include "base/mem.h"
#include "machine/stored.h"
#include "model/model.h"

enum { MOST_BY_RULES = 64 };
/* Of a thread for each logit of a row: its exponential, and sums. 0.97 were measured on one core of a busy Xeon. */
static const double DRAW_NS = 1;

/* While the device waits, logits cross the link by parts, and threads draw from a row each of the part before. */
static double drawing_seconds(const struct mt_plan_request *r, size_t texts)
{
    double logits = (double)texts * (double)r->layout->cfg.vocab, gbs = r->machine->rate[MT_RATE_D2H].value;
    size_t part = MT_MIN(texts, (size_t)MT_DRAWN_TOGETHER);
    size_t threads = MT_MIN((size_t)r->placement.threads, part);
    double copied = r->machine->cpu || !(gbs > 0) ? 0 : logits * sizeof(float) / (gbs * 1e9);
    double drawn = logits * DRAW_NS * 1e-9 / (double)threads;
    return MT_MAX(copied, drawn) + MT_MIN(copied, drawn) / (double)mt_div_up(texts, part);
}

void mt_texts_request(struct mt_plan_request *r, const struct mt_texts *of, size_t n)
{
    r->numerics.seq_len = (int64_t)of->len;
    r->numerics.micro_batch = 1;
    r->numerics.rows_per_step = (int64_t)n;
    r->cache = mt_inputs_texts_cache(&r->draws, r->layout, of, n);
}

static int plan_pass(struct mt_texts_pass *out, const struct mt_plan_request *request, const struct mt_texts *of,
                     size_t texts, struct mt_err *err)
{
    struct mt_plan_request r = *request;
    MT_CLOSED_BY(mt_plan_choice_finish) struct mt_plan_choice c = {0};
    mt_texts_request(&r, of, texts);
    if (!r.cache.slots)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "texts of %zu tokens of this model have no cache (megatrain help "
                       "sampling)", of->len);
    int rc = mt_resolve(&c, &r, err);
    if (rc)
        return rc;
    const struct mt_sim_result *s = &c.sim;
    *out = (struct mt_texts_pass){.texts = texts, .drawing = drawing_seconds(&r, texts),
                                  .caches = c.engine.n_caches_stay, .weights = c.engine.n_stay,
                                  .units = c.layout->n_units};
    out->seconds = s->seconds + out->drawing;
    out->per_second = (double)texts / out->seconds;
    out->bound = out->drawing > s->seconds ? "drawing" : mt_queues[s->bound[MT_SIM_FORWARD]].title;
    return 0;
}

/* Between the best and twice as many, for which there may be no memory: towards the most that are about as fast, since
 * products take whole tiles of rows, and the fullest last one may be there. */
static int plan_between(struct mt_texts_pass pass[MT_TEXTS_PASSES], size_t *n, size_t *best,
                        const struct mt_plan_request *r, const struct mt_texts *of, struct mt_err *err)
{
    size_t from = *best;
    for (size_t more = pass[from].texts / 2, i = 0; more && i < MT_TEXTS_BETWEEN; more /= 2, i++) {
        struct mt_texts_pass between;
        size_t at = from + 1, texts = pass[from].texts + more;
        int rc = texts > of->n ? -ENOSPC : plan_pass(&between, r, of, texts, err);
        if (rc == -ENOSPC)
            continue;
        if (rc)
            return rc;
        memmove(&pass[at + 1], &pass[at], (*n - at) * sizeof(*pass));
        pass[at] = between;
        *n += 1;
        from = between.per_second > 0.9 * pass[*best].per_second ? at : from;
        *best = between.per_second > pass[*best].per_second ? at : *best;
    }
    return 0;
}

int mt_texts_plan(struct mt_texts_pass pass[MT_TEXTS_PASSES], size_t *n, size_t *best, const struct mt_plan_request *r,
                  const struct mt_texts *of, size_t least, struct mt_err *err)
{
    int rc = 0;
    *n = *best = 0;
    for (size_t texts = least; texts <= MT_MIN(of->n, (size_t)MT_TEXTS_MOST) && !rc; texts *= 2) {
        rc = plan_pass(&pass[*n], r, of, texts, err);
        if (!rc && pass[*n].per_second > pass[*best].per_second)
            *best = *n;
        *n += !rc;
    }
    rc = rc == -ENOSPC && *n ? 0 : rc;
    return rc ?: plan_between(pass, n, best, r, of, err);
}

/* Whether caches of so many texts stay on the device, in a run that the budgets have room for. */
static bool stays(const struct mt_plan_request *request, const struct mt_texts *of, size_t texts, mt_device *dev)
{
    struct mt_plan_request r = *request;
    MT_CLOSED_BY(mt_plan_choice_finish) struct mt_plan_choice c = {0};
    mt_texts_request(&r, of, texts);
    return r.cache.slots && !mt_resolve_by_rules(&c, &r, dev, NULL) && c.host_bytes <= r.placement.host_budget.bytes &&
           c.engine.n_caches_stay == c.layout->n_units;
}

size_t mt_texts_choose(const struct mt_plan_request *request, const struct mt_texts *of, mt_device *dev)
{
    struct mt_texts_pass pass[MT_TEXTS_PASSES];
    MT_CLOSED_BY(mt_machine_finish) struct mt_machine machine = {0};
    struct mt_plan_request r = *request;
    size_t n = 0, best = 0, least = MT_MIN(of->n, (size_t)MT_TEXTS_FEW);
    r.machine = &machine;
    if (least < of->n && !mt_machine_load(&machine, mt_device_limits(dev), (int)r.placement.threads, NULL) &&
        !mt_texts_plan(pass, &n, &best, &r, of, least, NULL))
        return pass[best].texts;
    r.machine = NULL;
    for (n = MT_MIN(of->n, (size_t)MOST_BY_RULES); n && !stays(&r, of, n, dev);)
        n /= 2;
    return n ? n : least;
}
