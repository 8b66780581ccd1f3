/* SPDX-License-Identifier: Apache-2.0 */
#include "checkpoint/lineage.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "base/json.h"
#include "base/mem.h"

static int draw_id(char id[MT_RUN_ID], struct mt_err *err)
{
    uint64_t v;
    ssize_t n;
    while ((n = getrandom(&v, sizeof(v), 0)) < 0 && errno == EINTR)
        ;
    if (n != sizeof(v))
        return mt_fail(err, MT_ERR_RUNTIME, -EIO, "cannot draw a run id: %s", strerror(errno));
    snprintf(id, MT_RUN_ID, "%016llx", (unsigned long long)v);
    return 0;
}

int mt_lineage_begin(struct mt_lineage *l, struct mt_err *err)
{
    mt_lineage_finish(l);
    return draw_id(l->run, err);
}

int mt_lineage_go_on(struct mt_lineage *l, uint64_t step, const char *state_sum, struct mt_err *err)
{
    struct mt_ancestor *a = mt_calloc(l->n + 1, sizeof(*a));
    if (!a)
        return mt_fail_nomem(err, "the run's history", (l->n + 1) * sizeof(*a));
    memcpy(a[0].run, l->run, MT_RUN_ID);
    a[0].step = step;
    snprintf(a[0].sum, sizeof(a[0].sum), "%s", state_sum);
    for (size_t i = 0; i < l->n; i++)
        a[i + 1] = l->ancestors[i];
    free(l->ancestors);
    l->ancestors = a;
    l->n++;
    return draw_id(l->run, err);
}

void mt_lineage_finish(struct mt_lineage *l)
{
    free(l->ancestors);
    *l = (struct mt_lineage){0};
}

bool mt_lineage_has(const struct mt_lineage *l, const char *run, uint64_t step)
{
    bool has = !strcmp(l->run, run);
    for (size_t i = 0; i < l->n && !has; i++)
        has = !strcmp(l->ancestors[i].run, run) && step <= l->ancestors[i].step;
    return has;
}

bool mt_lineage_gave_up(const struct mt_lineage *l, const char *run, uint64_t step)
{
    bool known = false;
    for (size_t i = 0; i < l->n && !known; i++)
        known = !strcmp(l->ancestors[i].run, run);
    return known && !mt_lineage_has(l, run, step);
}

void mt_lineage_to_json(const struct mt_lineage *l, cJSON *o)
{
    char step[32];
    if (!l->run[0])
        return;
    cJSON_AddStringToObject(o, "run", l->run);
    cJSON *list = cJSON_AddArrayToObject(o, "ancestors");
    for (size_t i = 0; i < l->n; i++) {
        cJSON *a = cJSON_CreateObject();
        snprintf(step, sizeof(step), "%llu", (unsigned long long)l->ancestors[i].step);
        mt_json_put(a, "run=%s, step=%s, state.json=%s", l->ancestors[i].run, step, l->ancestors[i].sum);
        mt_json_append(list, a);
    }
}

static bool take_id(char out[MT_RUN_ID], const cJSON *v)
{
    if (!cJSON_IsString(v))
        return false;
    size_t n = strlen(v->valuestring);
    if ((n && n != MT_RUN_ID - 1) || strspn(v->valuestring, "0123456789abcdef") != n)
        return false;
    memcpy(out, v->valuestring, n + 1);
    return true;
}

int mt_lineage_from_json(struct mt_lineage *out, const cJSON *o, const char *name, struct mt_err *err)
{
    struct mt_lineage l = {0};
    const cJSON *run = mt_json_get(o, "run"), *list = mt_json_get(o, "ancestors"), *a;
    bool ok = !run || (take_id(l.run, run) && cJSON_IsArray(list));
    if (run && ok && !(l.ancestors = mt_calloc((size_t)cJSON_GetArraySize(list), sizeof(*l.ancestors))))
        return mt_fail_nomem(err, name, 1);
    if (run && ok)
        cJSON_ArrayForEach(a, list) {
            struct mt_ancestor *to = &l.ancestors[l.n++];
            const cJSON *step = mt_json_get(a, "step");
            char *end = NULL;
            to->step = cJSON_IsString(step) ? strtoull(step->valuestring, &end, 10) : 0;
            ok &= end && !*end && end != step->valuestring && take_id(to->run, mt_json_get(a, "run")) &&
                  take_id(to->sum, mt_json_get(a, "state.json"));
        }
    if (!ok) {
        mt_lineage_finish(&l);
        return mt_fail(err, MT_ERR_CHECKPOINT, -EINVAL, "%s: \"run\" or \"ancestors\" is not a run's history", name);
    }
    *out = l;
    return 0;
}
