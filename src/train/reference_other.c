/* SPDX-License-Identifier: Apache-2.0 */
/* A reference that is not in the session's planes: a file of `megatrain score`, another model, an adapter, or the model
 * as training began, of a run that goes on. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fs.h"
#include "base/json.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/sort.h"
#include "train/memory.h"
#include "train/reference.h"
#include "weights/peft.h"

/* A line of the file: whose log-probability, by mt_dataset_sample_hash(). */
struct known {
    uint64_t hash;
    double logp;
};

struct known_list {
    struct known *items;
    size_t n, cap;
};

/* Answers of which the file says nothing. */
struct missing {
    size_t n, of;
    char at[160];
};

static int add_line(struct known_list *k, const char *text, size_t len, const char *where,
                    struct mt_err *err)
{
    MT_JSON_FREED cJSON *o = NULL;
    char *end = NULL;
    int rc = mt_json_parse(&o, text, len, where, MT_ERR_INPUT, err);
    if (rc)
        return rc;
    const cJSON *hash = mt_json_get(o, "hash"), *logp = mt_json_get(o, "logprob");
    uint64_t h = cJSON_IsString(hash) ? strtoull(hash->valuestring, &end, 16) : 0;
    if (!end || *end || end - hash->valuestring != 16 || !cJSON_IsNumber(logp))
        rc = mt_fail(err, MT_ERR_INPUT, -EINVAL,
                     "%s: a line of megatrain score has \"hash\" and \"logprob\"", where);
    else if (!mt_grow(&k->items, &k->cap, k->n + 1, sizeof(*k->items)))
        rc = mt_fail_nomem(err, where, k->n * sizeof(*k->items));
    else
        k->items[k->n++] = (struct known){h, logp->valuedouble};
    return rc;
}

static int read_file(struct known_list *k, const char *path, struct mt_err *err)
{
    MT_STREAM_CLOSED FILE *f = fopen(path, "re");
    MT_FREED char *line = NULL;
    size_t cap = 0;
    ssize_t len;
    int rc = f ? 0 : mt_fail(err, MT_ERR_INPUT, -errno, "%s: %s", path, strerror(errno));
    for (size_t at = 1; !rc && (len = getline(&line, &cap, f)) > 0; at++) {
        rc = add_line(k, line, (size_t)len, MT_PATH("%s:%zu", path, at), err);
    }
    if (!rc && ferror(f))
        rc = mt_fail(err, MT_ERR_INPUT, -EIO, "%s: it cannot be read", path);
    if (!rc && k->n)
        qsort(k->items, k->n, sizeof(*k->items), mt_compare_u64); /* by hash */
    return rc;
}

/* Fills of[2 samples]. */
static void look_up(const mt_dataset *d, const struct known_list *k, double *of, struct missing *m)
{
    for (uint64_t i = 0; i < 2 * mt_dataset_stats(d)->n_samples; i++) {
        size_t all = mt_dataset_sample(d, i / 2, NULL, NULL), chosen = mt_dataset_chosen(d, i / 2);
        if ((i % 2 ? all - chosen : chosen) == 0) /* of a rated item */
            continue;
        const uint64_t hash = mt_dataset_sample_hash(d, i / 2, i % 2 == 0);
        const struct known *found = k->n ? bsearch(&hash, k->items, k->n, sizeof(*found), mt_compare_u64) : NULL;
        m->of++;
        if (found)
            of[i] = found->logp;
        else if (!m->n++)
            mt_dataset_place(d, i / 2, m->at, sizeof(m->at));
    }
}

static int take_file(const struct mt_inputs *in, const char *path, double *of, struct mt_err *err)
{
    struct known_list k = {0};
    struct missing m = {0};
    int rc = read_file(&k, path, err);
    if (!rc)
        look_up(in->data, &k, of, &m);
    if (!rc && in->eval_data)
        look_up(in->eval_data, &k, of + mt_sampler_stats(in->sampler)->n_answers, &m);
    free(k.items);
    if (rc || !m.n)
        return rc;
    return mt_fail(
        err, MT_ERR_INPUT, -ENODATA,
        "preference.reference = %s has no log-probability of %zu of %zu answers, the first "
        "one of %s: it is of other data, or was made with another tokenizer, chat template or "
        "data.seq_len; make it by "
        "megatrain score --data of the same file",
        path, m.n, m.of, m.at);
}

/* The configuration of the reference: another model, this one with the adapter, or this one as it began. */
static int choose_model(struct mt_config **out, const struct mt_inputs *in, struct mt_err *err)
{
    const char *dir = in->cfg->preference.reference;
    bool start = mt_reference_is_start(in), adapter = !start && mt_peft_is_folder(dir);
    MT_CLOSED_BY(mt_config_destroy) struct mt_config *c = NULL;
    int rc = mt_config_copy(&c, in->cfg, "chosen", err);
    if (!rc && !start)
        rc = mt_inputs_use_adapter(c, adapter ? dir : NULL, "preference.reference", err);
    if (!rc && !start && !adapter)
        rc = mt_config_override(c, "model.path", dir, "preference.reference", err);
    if (!rc && !start)
        rc = mt_config_override(c, "model.init", "weights", "preference.reference", err);
    if (!rc)
        *out = MT_GIVE(c);
    return rc;
}

static int check_vocabulary(const struct mt_inputs *own, const struct mt_inputs *other,
                            struct mt_err *err)
{
    uint64_t a = 0, b = 0;
    int rc = mt_inputs_tokenizer_hash(&a, own, err) ?: mt_inputs_tokenizer_hash(&b, other, err);
    if (rc)
        return rc;
    if (a && b && a != b)
        return mt_fail(
            err, MT_ERR_INPUT, -EINVAL,
            "preference.reference = %s has another tokenizer than %s: log-probabilities of "
            "the same tokens cannot be compared",
            other->model_dir, own->model_dir);
    if (other->hf.vocab < own->hf.vocab || (!(a && b) && other->hf.vocab != own->hf.vocab))
        return mt_fail(err, MT_ERR_INPUT, -EINVAL,
                       "preference.reference = %s has a vocabulary of %lld tokens, %s one of %lld: "
                       "log-probabilities of the same tokens cannot be compared",
                       other->model_dir, (long long)other->hf.vocab, own->model_dir,
                       (long long)own->hf.vocab);
    return 0;
}

/* With the samplers of the run, so that its micro-batches are the same. */
static int run_model(const struct mt_inputs *in, struct mt_inputs *ref, const struct mt_train_state *st, double *of,
                     struct mt_err *err)
{
    MT_CLOSED_BY(mt_setup_finish) struct mt_setup setup = {0};
    MT_CLOSED_BY(mt_session_finish) struct mt_session s = {0};
    struct mt_memory memory;
    int rc = mt_setup_open(&setup, ref, MT_RUN_EVAL, err)
          ?: mt_setup_memory(&setup, &memory, err)
          ?: mt_memory_check(&memory, err);
    if (!rc && st->findings)
        mt_setup_adopt_findings(&setup, st->findings); /* what does not fit is told of the run itself */
    rc = rc ?: mt_session_start(&s, &setup, err) ?: mt_session_fill_weights(&s, NULL, err);
    if (!rc && st->step && mt_reference_is_start(in))
        rc = mt_reference_compare(&s, in, of, err);
    return rc ?: mt_reference_fill(&s, 0, in, st->step, of, err);
}

static int take_model(const struct mt_inputs *in, const struct mt_train_state *st, double *of, struct mt_err *err)
{
    MT_CLOSED_BY(mt_config_destroy) struct mt_config *cfg = NULL;
    MT_CLOSED_BY(mt_inputs_finish) struct mt_inputs ref = {0};
    int rc = choose_model(&cfg, in, err) ?: mt_inputs_open_without_data(&ref, cfg, err);
    ref.begins = mt_reference_is_start(in);
    rc = rc ?: check_vocabulary(in, &ref, err) ?: run_model(in, &ref, st, of, err);
    if (rc && mt_reference_is_start(in))
        mt_fail_prefix(err, rc, "the steps that are left need the reference (preference.reference = start) of answers that the "
                       "checkpoint has nothing of, and it is no more: have model.path and adapter.path as they were, or name a "
                       "folder with that model as preference.reference, with --force");
    return rc;
}

int mt_reference_take(const struct mt_setup *setup, size_t learner, struct mt_train_state *st,
                      struct mt_err *err)
{
    const struct mt_inputs *in = &setup->in[learner];
    const char *what = in->cfg->preference.reference;
    bool start = mt_reference_is_start(in), lacks = true;
    if (!mt_objective_of(mt_setup_numerics_of(setup, learner))->reference || (start && !st->reference))
        return 0;
    int rc = mt_reference_lacks(in, st, &lacks, err);
    bool known = st->reference && (!st->reference_of || !strcmp(st->reference_of, what));
    if (rc || !lacks || (start && !known)) /* of another: mt_reference_make() says so */
        return rc;
    size_t n = mt_reference_count(in), left = n;
    double *of = mt_reference_new(n, err);
    for (size_t i = 0; of && known && i < n; i++)
        left -= !isnan(of[i] = st->reference[i]);
    if (!of)
        return -ENOMEM;
    mt_info("log-probabilities of %zu answers under the reference: %s", left, start ? "the model as training began" : what);
    rc = start || mt_is_dir(what) ? take_model(in, st, of, err) : take_file(in, what, of, err);
    return mt_reference_set(in, st, of, rc, err);
}
