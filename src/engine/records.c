/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/records.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"

enum { MAX_NAME = 40 };
static const char between[] = ", ";

/* Takes the next NAME:NUMBER of the text; false: there is none. *layers is MT_AUTO if it is no number. */
static bool next_entry(const char **text, char name[MAX_NAME], int64_t *layers)
{
    const char *at = *text + strspn(*text, between);
    size_t n = strcspn(at, between), colon = strcspn(at, ":");
    char *end = NULL;
    *text = at + n;
    if (!n)
        return false;
    snprintf(name, MAX_NAME, "%.*s", (int)MT_MIN(colon, n), at);
    *layers = colon < n ? strtoll(at + colon + 1, &end, 10) : MT_AUTO;
    if (end == at + colon + 1 || (end && end != at + n) || *layers < 0)
        *layers = MT_AUTO;
    return true;
}

static size_t find_kind(const struct mt_layout *l, const char *name)
{
    char own[MAX_NAME];
    for (size_t i = 0; i < l->n_segments; i++) {
        mt_segment_name(&l->segment[i], own, sizeof(own));
        if (!strcmp(own, name))
            return i;
    }
    return l->n_segments;
}

/* What the two numbers say of a kind. */
static int64_t usual(const struct mt_layout *l, size_t kind, const struct mt_placement *p)
{
    bool own = mt_segment_attends(&l->segment[kind]) && p->offload_attention != MT_AUTO;
    return own ? p->offload_attention : p->offload_layers;
}

struct mt_records mt_records_of(const struct mt_layout *l, const struct mt_placement *p)
{
    struct mt_records r = {.layout = l};
    const char *text = p->offload;
    char name[MAX_NAME];
    int64_t layers;
    for (size_t i = 0; i < l->n_segments; i++)
        r.layers[i] = usual(l, i, p);
    while (next_entry(&text, name, &layers)) {
        size_t kind = find_kind(l, name);
        if (kind < l->n_segments && layers != MT_AUTO)
            r.layers[kind] = layers;
    }
    return r;
}

bool mt_records_offload(const struct mt_records *r)
{
    bool any = false;
    for (size_t i = 0; i < r->layout->n_segments; i++)
        any |= r->layers[i] > 0;
    return any;
}

void mt_records_place(const struct mt_records *r, struct mt_placement *p)
{
    const struct mt_layout *l = r->layout;
    size_t at = 0;
    for (size_t i = l->n_segments; i-- > 0;) /* the first of each */
        *(mt_segment_attends(&l->segment[i]) ? &p->offload_attention : &p->offload_layers) = r->layers[i];
    p->offload[0] = 0;
    for (size_t i = 0; i < l->n_segments; i++) {
        char name[MAX_NAME];
        if (r->layers[i] == usual(l, i, p))
            continue;
        mt_segment_name(&l->segment[i], name, sizeof(name));
        int n = snprintf(p->offload + at, sizeof(p->offload) - at, "%s%s:%lld", at ? between : "", name,
                         (long long)r->layers[i]);
        at = MT_MIN(at + (size_t)MT_MAX(n, 0), sizeof(p->offload) - 1);
    }
}

int mt_records_check(const struct mt_layout *l, const struct mt_placement *p, struct mt_err *err)
{
    const char *text = p->offload;
    char name[MAX_NAME], known[160] = "", own[MAX_NAME];
    int64_t layers;
    for (size_t i = 0, at = 0; i < l->n_segments && at < sizeof(known); i++) {
        mt_segment_name(&l->segment[i], own, sizeof(own));
        at += (size_t)snprintf(known + at, sizeof(known) - at, "%s%s", i ? between : "", own);
    }
    while (next_entry(&text, name, &layers)) {
        if (find_kind(l, name) == l->n_segments)
            return mt_fail(err, MT_ERR_USAGE, -EINVAL,
                           "memory.offload: no activations are named \"%s\"; this model has %s", name, known);
        if (layers == MT_AUTO)
            return mt_fail(err, MT_ERR_USAGE, -EINVAL,
                           "memory.offload: \"%s\" needs a number of layers, as in \"%s:4\"", name, name);
    }
    return 0;
}
