/* SPDX-License-Identifier: Apache-2.0 */
#include "model/adapter.h"

#include <fnmatch.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"

bool mt_adapter_list_add(struct mt_adapter_list *l, const char *name, double value)
{
    char *copy = strdup(name);
    if (!copy || !mt_grow(&l->items, &l->cap, l->n + 1, sizeof(*l->items))) {
        free(copy);
        return false;
    }
    l->items[l->n++] = (struct mt_adapter_item){.name = copy, .value = value};
    return true;
}

static void list_finish(struct mt_adapter_list *l)
{
    for (size_t i = 0; i < l->n; i++)
        free(l->items[i].name);
    free(l->items);
    *l = (struct mt_adapter_list){0};
}

void mt_adapter_spec_finish(struct mt_adapter_spec *s)
{
    list_finish(&s->targets);
    list_finish(&s->ranks);
    list_finish(&s->alphas);
    list_finish(&s->train_also);
    s->on = false;
}

static bool matches(const char *pattern, const char *module)
{
    size_t n = strlen(module), k = strlen(pattern);
    if (strpbrk(pattern, "*?["))
        return !fnmatch(pattern, module, 0);
    return n >= k && !strcmp(module + n - k, pattern) && (n == k || module[n - k - 1] == '.');
}

const struct mt_adapter_item *mt_adapter_match(struct mt_adapter_list *l, const char *module)
{
    for (size_t i = 0; i < l->n; i++)
        if (matches(l->items[i].name, module)) {
            l->items[i].used = true;
            return &l->items[i];
        }
    return NULL;
}

struct mt_adapter_shape mt_adapter_shape_of(struct mt_adapter_spec *s, const char *module)
{
    const struct mt_adapter_item *rank = mt_adapter_match(&s->ranks, module);
    const struct mt_adapter_item *alpha = mt_adapter_match(&s->alphas, module);
    struct mt_adapter_shape a = {.rank = rank ? (int64_t)rank->value : s->rank,
                                 .alpha = alpha ? alpha->value : s->alpha};
    a.scale = a.alpha / (s->rslora ? sqrt((double)a.rank) : (double)a.rank);
    return a;
}
