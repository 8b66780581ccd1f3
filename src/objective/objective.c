/* SPDX-License-Identifier: Apache-2.0 */
#include "objective/objective.h"

#include <math.h>
#include <string.h>

#include "base/mem.h"

/* Each is defined in a file of its own. A new objective is that file, an entry here and a choice of train.objective. */
#define OBJECTIVES(X) X(mt_token_loss)

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
