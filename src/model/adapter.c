/* SPDX-License-Identifier: Apache-2.0 */
#include "model/adapter.h"

#include <fnmatch.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"

/* The first place in by_name whose name is not before `name`; `behind`: is behind it. */
static size_t place_of(const struct mt_adapter_list *l, const char *name, bool behind)
{
    size_t low = 0, high = l->n_names;
    while (low < high) {
        size_t mid = low + (high - low) / 2;
        int order = strcmp(l->items[l->by_name[mid]].name, name);
        if (order < 0 || (behind && !order))
            low = mid + 1;
        else
            high = mid;
    }
    return low;
}

bool mt_adapter_list_add(struct mt_adapter_list *l, const char *name, double value)
{
    char *copy = strdup(name);
    if (!copy || !mt_grow(&l->items, &l->cap, l->n + 1, sizeof(*l->items)) ||
        !mt_grow(&l->by_name, &l->cap_names, l->n_names + 1, sizeof(*l->by_name))) {
        free(copy);
        return false;
    }
    bool glob = strpbrk(name, "*?[");
    if (!glob) {
        size_t at = place_of(l, name, true);
        memmove(l->by_name + at + 1, l->by_name + at, (l->n_names - at) * sizeof(*l->by_name));
        l->by_name[at] = l->n;
        l->n_names++;
    }
    l->items[l->n++] = (struct mt_adapter_item){.name = copy, .value = value, .glob = glob};
    return true;
}

static void list_finish(struct mt_adapter_list *l)
{
    for (size_t i = 0; i < l->n; i++)
        free(l->items[i].name);
    free(l->items);
    free(l->by_name);
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

/* The first item that is the name without wildcards; l->n: none. */
static size_t find_name(const struct mt_adapter_list *l, const char *name)
{
    size_t at = place_of(l, name, false);
    return at < l->n_names && !strcmp(l->items[l->by_name[at]].name, name) ? l->by_name[at] : l->n;
}

bool mt_adapter_list_has(const struct mt_adapter_list *l, const char *name)
{
    return find_name(l, name) < l->n;
}

const struct mt_adapter_item *mt_adapter_match(struct mt_adapter_list *l, const char *module)
{
    size_t first = find_name(l, module);
    for (const char *dot = strchr(module, '.'); dot; dot = strchr(dot + 1, '.'))
        first = MT_MIN(first, find_name(l, dot + 1));
    for (size_t i = 0; l->n_names < l->n && i < first; i++)
        if (l->items[i].glob && !fnmatch(l->items[i].name, module, 0))
            first = i;
    if (first == l->n)
        return NULL;
    l->items[first].used = true;
    return &l->items[first];
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
