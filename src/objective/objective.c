/* SPDX-License-Identifier: Apache-2.0 */
#include "objective/objective.h"

#include <math.h>
#include <string.h>

#include "base/mem.h"

/* Each is defined in a file of its own. A new objective is that file, an entry here and a choice of train.objective. */
#define OBJECTIVES(X)                                                                    \
    X(mt_token_loss) X(mt_es) X(mt_dpo) X(mt_dpo_norm) X(mt_ipo) X(mt_hinge) X(mt_robust) \
    X(mt_apo_zero) X(mt_apo_down) X(mt_apo_zero_unpaired) X(mt_kto) X(mt_simpo) X(mt_cpo) X(mt_orpo) X(mt_distill)    \
    X(mt_dapo) X(mt_grpo) X(mt_bnpo) X(mt_dr_grpo) X(mt_gspo) X(mt_cispo) X(mt_sapo) X(mt_dppo) X(mt_dro) X(mt_opd)

#define DECLARE(name) extern const struct mt_objective name;
OBJECTIVES(DECLARE)
#define ROW(name) &name,
static const struct mt_objective *const objectives[] = {OBJECTIVES(ROW)};

const struct mt_objective *mt_objective_find(const char *name)
{
    for (size_t i = 0; i < MT_ARRAY_LEN(objectives); i++)
        if (!strcmp(objectives[i]->name, name))
            return objectives[i];
    return NULL;
}

const struct mt_objective *mt_objective_of(const struct mt_numerics *n)
{
    return n->objective ? n->objective : &mt_token_loss;
}

size_t mt_objective_few(const struct mt_numerics *n)
{
    return mt_objective_of(n)->teacher ? (size_t)n->objective_keys.top + MT_FEW_BESIDE : 0;
}

bool mt_objective_is_late(const struct mt_numerics *n)
{
    const struct mt_objective *o = mt_objective_of(n);
    return o->late ? o->late(&n->objective_keys) : o->needs_losses;
}

static size_t rows_of(const struct mt_batch *b, size_t d)
{
    return (size_t)(b->doc_rows[d + 1] - b->doc_rows[d]);
}

struct mt_objective_step mt_objective_begin(const struct mt_numerics *n, const struct mt_step_data *data,
                                            const double *reference)
{
    struct mt_objective_step s = {.objective = mt_objective_of(n), .keys = &n->objective_keys, .reference = reference,
                                  .n_loss = data->n_loss};
    const struct mt_batch *b = mt_step_whole(data, &s.n_micro);
    for (size_t i = 0; i < s.n_micro && s.objective->rollouts; i++)
        for (size_t d = 0; d < b[i].n_docs; d++) {
            s.n_items += !b[i].rollout[d].dropped;
            s.n_policy_tokens += b[i].rollout[d].left_out ? 0 : rows_of(&b[i], d);
        }
    for (size_t i = 0; i < s.n_micro && s.objective->answers; i++)
        for (size_t d = 0; d < b[i].n_docs; d++) {
            enum mt_doc_role role = b[i].role[d];
            s.n_items += role == MT_DOC_CHOSEN || (role == MT_DOC_REJECTED && s.objective->rated);
            s.n_chosen_rows += role == MT_DOC_CHOSEN ? rows_of(&b[i], d) : 0;
        }
    return s;
}

/* Of a policy only loss and reward say which of two is better. Rated answers have no pairs; KL is a distance to the
 * reference, of which neither more nor less is better. */
int mt_objective_measure(const struct mt_objective *o, const char *name)
{
    bool apart = !strcmp(name, "kl") || (o->teacher && strcmp(name, o->measures[0])) || (o->rated && !strcmp(name, "rewards/accuracies")) ||
                 (strcmp(o->name, "orpo") && !strncmp(name, "log_odds", 8));
    apart |= o->rollouts && strcmp(name, o->measures[0]) && strcmp(name, "reward");
    for (int i = 0; i < o->n_measures && !apart; i++)
        if (!strcmp(o->measures[i], name))
            return i;
    return -1;
}

const char *mt_measure_of_set(const char *by, const char *name, size_t n)
{
    if (strncmp(by, name, n) != 0 || by[n] != '_')
        return NULL;
    const char *what = by + n + 1;
    return !strcmp(what, "loss") || !strcmp(what, MT_EVAL_ACCURACY) ? what : NULL;
}

bool mt_measure_more_is_better(const char *name)
{
    static const char *const less[] = {"loss", "nll_loss", "rewards/rejected", "logps/rejected"};
    for (size_t i = 0; i < MT_ARRAY_LEN(less); i++)
        if (!strcmp(less[i], name))
            return false;
    return !mt_ends_with(name, "_loss"); /* that of a set of eval.sets */
}

void mt_measure_add(struct mt_measure *m, double value)
{
    if (!(m->n > 0))
        m->origin = value;
    m->sum += value - m->origin;
    m->n++;
}

double mt_measure_mean(const struct mt_measure *m)
{
    return m->n > 0 ? m->origin + m->sum / m->n : NAN;
}
