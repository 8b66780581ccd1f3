/* SPDX-License-Identifier: Apache-2.0 */
#include "values.h"

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"

enum { NAME = 96, NOTHING = -1 };

/* Bytes [at, end) hold those of `value` from `first` on. */
struct span {
    uint64_t at, end, first;
    int value;
};

struct value {
    char name[NAME];
    uint64_t bytes;
};

struct mt_judge_memory {
    struct span *span; /* sorted, apart */
    size_t n, cap;
    struct value *value;
    size_t n_values, cap_values;
    struct span *run; /* what a description has found: at and end are not used */
    size_t n_runs, cap_runs;
};

static void need(bool ok)
{
    if (!ok)
        abort();
}

struct mt_judge_memory *mt_judge_memory_create(void)
{
    struct mt_judge_memory *m = mt_calloc(1, sizeof(*m));
    need(m);
    return m;
}

void mt_judge_memory_destroy(struct mt_judge_memory *m)
{
    free(m->span);
    free(m->value);
    free(m->run);
    free(m);
}

void mt_judge_memory_clear(struct mt_judge_memory *m)
{
    m->n = m->n_values = 0;
}

/* The first span that ends after `at`. */
static size_t find(const struct mt_judge_memory *m, uint64_t at)
{
    size_t low = 0, high = m->n;
    while (low < high) {
        size_t mid = (low + high) / 2;
        if (m->span[mid].end > at)
            high = mid;
        else
            low = mid + 1;
    }
    return low;
}

bool mt_judge_holds(const struct mt_judge_memory *m, const void *p)
{
    size_t i = find(m, (uintptr_t)p);
    return i < m->n && m->span[i].at <= (uintptr_t)p && m->span[i].value != NOTHING;
}

/* Replaces whatever is there. */
static void set(struct mt_judge_memory *m, struct span s)
{
    size_t i = find(m, s.at), k = i;
    struct span with[3], *w = with;
    if (i < m->n && m->span[i].at < s.at) {
        *w = m->span[i];
        w++->end = s.at;
    }
    while (k < m->n && m->span[k].at < s.end)
        k++;
    bool joins = i && w == with && m->span[i - 1].end == s.at && m->span[i - 1].value == s.value &&
                 m->span[i - 1].first + (s.at - m->span[i - 1].at) == s.first;
    if (joins)
        m->span[i - 1].end = s.end;
    else
        *w++ = s;
    if (k > i && m->span[k - 1].end > s.end) {
        *w = m->span[k - 1];
        w->first += s.end - w->at;
        w++->at = s.end;
    }
    size_t n = (size_t)(w - with);
    need(mt_grow(&m->span, &m->cap, m->n + n, sizeof(*m->span)));
    memmove(m->span + i + n, m->span + k, (m->n - k) * sizeof(*m->span));
    memcpy(m->span + i, with, n * sizeof(*with));
    m->n += n;
    m->n -= k - i;
}

/* Calls fn for each piece; pieces that are end to end are one. */
static void each(const struct mt_judge_array *a, void (*fn)(struct mt_judge_memory *, uint64_t, uint64_t, uint64_t),
                 struct mt_judge_memory *m)
{
    struct mt_judge_array w = *a;
    uint64_t first = 0;
    if (w.inner == 1 || w.stride == w.bytes) {
        w.bytes *= w.inner;
        w.inner = 1;
    }
    if (w.inner == 1 && (w.outer == 1 || w.pitch == w.bytes)) {
        w.bytes *= w.outer;
        w.outer = 1;
    }
    for (size_t i = 0; i < w.outer; i++)
        for (size_t j = 0; j < w.inner; j++, first += w.bytes) {
            uint64_t at = (uintptr_t)w.p + i * w.pitch + j * w.stride;
            fn(m, at, at + w.bytes, first);
        }
}

static void set_piece(struct mt_judge_memory *m, uint64_t at, uint64_t end, uint64_t first)
{
    set(m, (struct span){at, end, first, (int)m->n_values - 1});
}

void mt_judge_write(struct mt_judge_memory *m, const struct mt_judge_array *a, const char *name)
{
    need(mt_grow(&m->value, &m->cap_values, m->n_values + 1, sizeof(*m->value)));
    struct value *v = &m->value[m->n_values++];
    snprintf(v->name, sizeof(v->name), "%s", name);
    v->bytes = (uint64_t)a->bytes * a->inner * a->outer;
    if (v->bytes)
        each(a, set_piece, m);
}

void mt_judge_forget(struct mt_judge_memory *m, const void *p, size_t bytes)
{
    if (bytes)
        set(m, (struct span){(uintptr_t)p, (uintptr_t)p + bytes, 0, NOTHING});
}

static void add_run(struct mt_judge_memory *m, int value, uint64_t first, uint64_t bytes)
{
    struct span *last = m->n_runs ? &m->run[m->n_runs - 1] : NULL;
    if (last && last->value == value && (value == NOTHING || last->first + last->end == first)) {
        last->end += bytes;
        return;
    }
    need(mt_grow(&m->run, &m->cap_runs, m->n_runs + 1, sizeof(*m->run)));
    m->run[m->n_runs++] = (struct span){.first = first, .end = bytes, .value = value};
}

static void look_piece(struct mt_judge_memory *m, uint64_t at, uint64_t end, uint64_t first)
{
    (void)first;
    for (size_t i = find(m, at); at < end; i++) {
        uint64_t from = i < m->n ? MT_MIN(m->span[i].at, end) : end;
        if (from > at)
            add_run(m, NOTHING, 0, from - at);
        at = MT_MAX(at, from);
        if (at >= end)
            return;
        const struct span *s = &m->span[i];
        uint64_t to = MT_MIN(s->end, end);
        add_run(m, s->value, s->first + (at - s->at), to - at);
        at = to;
    }
}

static const char *name_of(const struct mt_judge_memory *m, int value)
{
    return value == NOTHING ? "?" : m->value[value].name;
}

/* Are the runs equal pieces of one value at equal distances? */
static bool is_regular(const struct mt_judge_memory *m)
{
    const struct span *r = m->run;
    for (size_t i = 1; i < m->n_runs; i++)
        if (r[i].value != r[0].value || r[i].end != r[0].end || r[i].first - r[i - 1].first != r[1].first - r[0].first)
            return false;
    return true;
}

static void describe_mixed(const struct mt_judge_memory *m, char *buf, size_t len)
{
    uint64_t hash = UINT64_C(14695981039346656037);
    size_t at = (size_t)snprintf(buf, len, "{");
    for (size_t i = 0; i < m->n_runs; i++) {
        const char *name = name_of(m, m->run[i].value);
        bool seen = false;
        for (size_t k = 0; k < i && !seen; k++)
            seen = m->run[k].value == m->run[i].value;
        if (!seen && at + strlen(name) + 32 < len)
            at += (size_t)snprintf(buf + at, len - at, "%s%s", at > 1 ? " " : "", name);
        char text[NAME + 48];
        snprintf(text, sizeof(text), "%s %llu %llu,", name, (unsigned long long)m->run[i].first,
                 (unsigned long long)m->run[i].end);
        for (const char *c = text; *c; c++)
            hash = (hash ^ (unsigned char)*c) * UINT64_C(1099511628211);
    }
    snprintf(buf + at, len - at, "}#%08llx", (unsigned long long)(hash >> 32 ^ (hash & UINT32_MAX)));
}

bool mt_judge_describe(struct mt_judge_memory *m, const struct mt_judge_array *a, char *buf, size_t len)
{
    bool nothing = false;
    m->n_runs = 0;
    if (a->bytes)
        each(a, look_piece, m);
    for (size_t i = 0; i < m->n_runs; i++)
        nothing |= m->run[i].value == NOTHING;
    const struct span *r = m->run;
    if (!m->n_runs)
        snprintf(buf, len, "-");
    else if (m->n_runs == 1 && (r->value == NOTHING || (!r->first && r->end == m->value[r->value].bytes)))
        snprintf(buf, len, "%s", name_of(m, r->value));
    else if (m->n_runs == 1)
        snprintf(buf, len, "%s[%llu+%llu]", name_of(m, r->value), (unsigned long long)r->first,
                 (unsigned long long)r->end);
    else if (is_regular(m))
        snprintf(buf, len, "%s[%llu+%llu/%llu]*%zu", name_of(m, r->value), (unsigned long long)r->first,
                 (unsigned long long)r->end, (unsigned long long)(r[1].first - r[0].first), m->n_runs);
    else
        describe_mixed(m, buf, len);
    return nothing;
}
