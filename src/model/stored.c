/* SPDX-License-Identifier: Apache-2.0 */
#include "model/stored.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "model/layout_builder.h"
#include "model/peft_names.h"

/* --- places of tensors in files -------------------------------------------------------------------- */

struct placing {
    struct mt_layout *l;
    size_t cap, first_of_layer; /* of l->stored: its capacity, and the layer's first entry */
};

/* "model.layers.N." and the name; `*` in it becomes the expert's number. */
static void make_name(char dst[128], const struct mt_layout *l, int layer, const char *name, int expert)
{
    const size_t len = 128;
    const char *star = strchr(name, '*');
    size_t at = layer < 0 ? 0 : (size_t)snprintf(dst, len, "%slayers.%d.", l->cfg.names->modules, layer);
    if (layer < 0 && !strncmp(name, "model.", 6)) {
        at = (size_t)snprintf(dst, len, "%s", l->cfg.names->modules);
        name += 6;
    }
    if (star)
        snprintf(dst + at, len - at, "%.*s%d%s", (int)(star - name), name, expert, star + 1);
    else
        snprintf(dst + at, len - at, "%s", name);
}

void mt_stored_name(struct mt_tensor *t, const struct mt_layout *l, int layer, const char *usual)
{
    const struct mt_tensor_on_disk *d = mt_family_on_disk(l->cfg.family, usual);
    make_name(t->name, l, layer, d ? d->name : usual, t->expert);
}

struct mt_tensor mt_stored_as_shared(const struct mt_layout *l, const struct mt_tensor *t, int share)
{
    struct mt_tensor as = *t;
    int layer = l->units[t->unit].layer, first = mt_layer_sharing(layer, share);
    if (first != layer)
        mt_stored_name(&as, l, first, t->usual);
    return as;
}

/* The tensor of all experts in the model's files that has this one. */
static const struct mt_fused_tensor *fused_of(const struct mt_layout *l, const char *usual, int *part)
{
    return l->cfg.experts_fused ? mt_family_joined(l->cfg.family, usual, part)
                                : mt_family_fused(l->cfg.family, usual, part);
}

const struct mt_fused_tensor *mt_stored_fused(const struct mt_layout *l, const struct mt_tensor *t)
{
    int part;
    return t->expert >= 0 && t->n_dims == 2 ? fused_of(l, t->usual, &part) : NULL;
}

void mt_stored_module(char module[MT_TENSOR_NAME], const struct mt_layout *l, const struct mt_tensor *t)
{
    const struct mt_fused_tensor *f = mt_stored_fused(l, t);
    if (f)
        mt_stored_joined_name(module, l, t, f);
    else
        mt_family_module(module, MT_TENSOR_NAME, l->cfg.family, t->name);
}

void mt_stored_joined_name(char name[MT_TENSOR_NAME], const struct mt_layout *l, const struct mt_tensor *t,
                           const struct mt_fused_tensor *joined)
{
    make_name(name, l, l->units[t->unit].layer, mt_fused_parameter(joined), 0);
}

static struct mt_stored *add_stored(struct placing *p, const char *name)
{
    struct mt_layout *l = p->l;
    if (!mt_grow(&l->stored, &p->cap, l->n_stored + 1, sizeof(*l->stored)))
        return NULL;
    struct mt_stored *s = &l->stored[l->n_stored++];
    *s = (struct mt_stored){.source = l->n_stored - 1};
    const struct mt_text_names *names = l->cfg.names;
    size_t n = strlen(names->modules), of_head = strlen("lm_head.");
    if (!strncmp(name, names->modules, n))
        snprintf(s->name, sizeof(s->name), "%s%s", names->in_files, name + n);
    else if (!strncmp(name, "lm_head.", of_head))
        snprintf(s->name, sizeof(s->name), "%s%s", names->head_in_files, name + of_head);
    else
        snprintf(s->name, sizeof(s->name), "%s", name);
    return s;
}

/* The rotary embedding rotates pairs of the file's rows of a head: of the first ones, if it rotates a part of a head. */
static void pair_rows(const struct mt_layout *l, struct mt_tensor *t, size_t head_rows)
{
    t->place.paired_rows = head_rows ? l->cfg.rope[0].dims : 0;
    t->place.group_rows = head_rows;
}

/* Stored as a tensor of its own, in the layout's order. */
static bool store_plain(struct placing *p, struct mt_tensor *t, const char *name, const struct mt_tensor_on_disk *d)
{
    struct mt_stored *s = add_stored(p, name);
    if (!s)
        return false;
    size_t cols = t->n_dims == 2 ? (size_t)t->shape[1] : 1;
    bool row = d && d->is_row;
    s->n_dims = row ? 2 : t->n_dims;
    s->shape[0] = row ? 1 : t->shape[0];
    s->shape[1] = row ? t->shape[0] : t->shape[1];
    if (d && d->is_conv) {
        s->n_dims = 3;
        s->shape[1] = 1;
        s->shape[2] = t->shape[1];
    }
    if (d && d->is_scalar)
        s->n_dims = 0;
    s->is_f32 = d && d->is_f32;
    s->n = t->n;
    t->place = (struct mt_tensor_place){.stored = p->l->n_stored - 1, .row_step = cols, .col_step = 1};
    if (p->l->cfg.family->rope_pairs && !t->adapter)
        pair_rows(p->l, t, (size_t)t->head_rows);
    return true;
}

static struct mt_stored *find_in_layer(const struct placing *p, const char *name)
{
    for (size_t i = p->first_of_layer; i < p->l->n_stored; i++)
        if (!strcmp(p->l->stored[i].name, name))
            return &p->l->stored[i];
    return NULL;
}

/* Stored in a fused tensor of all experts, which is added with its first part. */
static bool store_fused(struct placing *p, struct mt_tensor *t, int layer, const struct mt_fused_tensor *f,
                        int part)
{
    char name[128];
    make_name(name, p->l, layer, f->name, 0);
    struct mt_stored *s = find_in_layer(p, name);
    size_t rows = (size_t)t->shape[0], cols = t->n_dims == 2 ? (size_t)t->shape[1] : 1, parts = f->usual[1] ? 2 : 1;
    if (!s && !(s = add_stored(p, name)))
        return false;
    s->fused = true;
    s->n_dims = t->n_dims + 1;
    s->n = (size_t)p->l->cfg.moe.n_experts * parts * t->n;
    s->shape[0] = p->l->cfg.moe.n_experts;
    s->shape[f->is_transposed ? 2 : 1] = (int64_t)(parts * rows);
    if (t->n_dims == 2)
        s->shape[f->is_transposed ? 1 : 2] = t->shape[1];
    size_t row = f->is_transposed ? 1 : cols, before = (size_t)part * (f->alternate ? 1 : rows);
    t->place = (struct mt_tensor_place){
        .stored = (size_t)(s - p->l->stored),
        .first = (size_t)t->expert * parts * t->n + before * row,
        .row_step = row * (f->alternate ? parts : 1),
        .col_step = f->is_transposed ? parts * rows : 1,
    };
    return true;
}

/* "base_model.model.model.layers.N.mlp.experts.base_layer.lora_A.weight" */
static void name_of_whole(char name[MT_STORED_NAME], const struct mt_layout *l, const struct mt_tensor *t)
{
    char module[MT_TENSOR_NAME];
    const struct mt_adapter *ad = t->adapter;
    mt_stored_joined_name(module, l, t, ad->whole);
    *strrchr(module, '.') = 0;
    mt_peft_tensor_name(name, module);
    size_t n = strlen(name), len = MT_STORED_NAME;
    for (size_t i = 0; i < ad->n_outer && n < len; i++)
        n += (size_t)snprintf(name + n, len - n, ".base_layer");
    if (n < len)
        snprintf(name + n, len - n, ".%s.weight", t->param == &ad->a ? MT_LORA_A : MT_LORA_B);
}

/* PEFT has A of all experts as [expert * rank, in], B as [out, rank * expert]: an expert's columns are far apart, and its
 * rows are in the order of the tensor that it adapts. */
static bool store_whole(struct placing *p, struct mt_tensor *t)
{
    const struct mt_adapter *ad = t->adapter;
    char name[MT_STORED_NAME];
    name_of_whole(name, p->l, t);
    struct mt_stored *s = find_in_layer(p, name);
    size_t experts = (size_t)p->l->cfg.moe.n_experts, rows = (size_t)t->shape[0], cols = (size_t)t->shape[1];
    bool a = t->param == &ad->a;
    if (!s && !(s = add_stored(p, name)))
        return false;
    s->fused = a;
    s->n_dims = 2;
    s->n = experts * t->n;
    s->shape[0] = (int64_t)(a ? experts * rows : rows);
    s->shape[1] = (int64_t)(a ? cols : cols * experts);
    t->place = (struct mt_tensor_place){
        .stored = (size_t)(s - p->l->stored),
        .first = (size_t)t->expert * (a ? t->n : 1),
        .row_step = cols * (a ? 1 : experts),
        .col_step = a ? 1 : experts,
        .paired_rows = !a && ad->whole->alternate && ad->whole->usual[1] ? rows : 0,
    };
    return true;
}

/* Rows of the heads of the matrix that a B, or a vector of magnitudes, is for; 0: it has no heads. */
static size_t adapted_head_rows(const struct mt_layout *l, const struct mt_tensor *t)
{
    for (size_t i = 0; i < t->adapter->n_targets; i++) {
        const struct mt_adapter_target *target = &t->adapter->target[i];
        if (t->param == &target->b || t->param == &target->magnitude)
            return (size_t)l->tensors[target->tensor].head_rows;
    }
    return 0;
}

static bool store_factor(struct placing *p, struct mt_tensor *t)
{
    char name[MT_STORED_NAME];
    if (t->adapter->whole)
        return store_whole(p, t);
    mt_peft_tensor_name(name, t->name);
    if (!store_plain(p, t, name, NULL))
        return false;
    if (p->l->cfg.family->rope_pairs) /* rows of B are in the order of the files' rows */
        pair_rows(p->l, t, adapted_head_rows(p->l, t));
    return true;
}

/* Lists the tensors of the layout that each stored tensor holds, in the layout's order. */
static int list_pieces(struct mt_layout *l, struct mt_err *err)
{
    l->pieces = mt_calloc(l->n_tensors, sizeof(*l->pieces));
    if (!l->pieces)
        return mt_fail_nomem(err, "the model's layout", l->n_tensors * sizeof(*l->pieces));
    for (size_t i = 0; i < l->n_tensors; i++)
        l->stored[l->tensors[i].place.stored].n_pieces++;
    size_t at = 0;
    for (size_t i = 0; i < l->n_stored + l->n_adapter_stored; i++) {
        l->stored[i].first_piece = at;
        at += l->stored[i].n_pieces;
        l->stored[i].n_pieces = 0;
    }
    for (size_t i = 0; i < l->n_tensors; i++) {
        struct mt_stored *s = &l->stored[l->tensors[i].place.stored];
        l->pieces[s->first_piece + s->n_pieces++] = i;
    }
    for (struct mt_stored *s = l->stored; s < l->stored + l->n_stored; s++) {
        s->first_piece = l->stored[s->source].first_piece;
        s->n_pieces = l->stored[s->source].n_pieces;
    }
    return 0;
}

static bool store_tensor(struct placing *p, struct mt_tensor *t)
{
    const struct mt_family *family = p->l->cfg.family;
    int layer = p->l->units[t->unit].layer, part = 0;
    if (t->adapter)
        return store_factor(p, t);
    const struct mt_fused_tensor *f = layer >= 0 ? fused_of(p->l, t->usual, &part) : NULL;
    return f ? store_fused(p, t, layer, f, part)
             : store_plain(p, t, t->name, layer >= 0 ? mt_family_on_disk(family, t->usual) : NULL);
}

/* The layer's tensors once more, for each later layer that has its weights. */
static bool store_copies(struct placing *p, int layer)
{
    struct mt_layout *l = p->l;
    size_t end = l->n_stored;
    for (int to = layer + 1; to < l->cfg.n_layers && mt_layer_sharing(to, l->share) == layer; to++)
        for (size_t i = p->first_of_layer; i < end; i++) {
            if (!mt_grow(&l->stored, &p->cap, l->n_stored + 1, sizeof(*l->stored)))
                return false;
            const struct mt_stored from = l->stored[i];
            struct mt_stored *s = &l->stored[l->n_stored++];
            const char *at = strstr(from.name, "layers."), *rest = strchr(at + strlen("layers."), '.');
            *s = from;
            snprintf(s->name, sizeof(s->name), "%.*slayers.%d%s", (int)(at - from.name), from.name, to, rest);
        }
    return true;
}

/* Those of adapters, or of the model. */
static int store_tensors(struct placing *p, bool adapters, struct mt_err *err)
{
    struct mt_layout *l = p->l;
    bool stored = true;
    int last = -2;
    for (struct mt_tensor *t = l->tensors; t < l->tensors + l->n_tensors && stored; t++) {
        if (!t->adapter == adapters)
            continue;
        bool begins = l->units[t->unit].layer != last;
        stored = !begins || store_copies(p, last);
        p->first_of_layer = begins ? l->n_stored : p->first_of_layer;
        last = l->units[t->unit].layer;
        stored = stored && store_tensor(p, t);
    }
    return stored ? 0 : mt_fail_nomem(err, "the model's layout", l->n_stored * sizeof(*l->stored));
}

int mt_stored_place(struct mt_layout *l, struct mt_err *err)
{
    struct placing p = {.l = l};
    int rc = store_tensors(&p, false, err);
    size_t n = l->n_stored;
    rc = rc ?: store_tensors(&p, true, err);
    l->n_adapter_stored = l->n_stored - n;
    l->n_stored = n;
    return rc ?: list_pieces(l, err);
}

/* --- reading --------------------------------------------------------------------------------------- */

static size_t n_cols(const struct mt_tensor *t)
{
    return t->n_dims == 2 ? (size_t)t->shape[1] : 1;
}

size_t mt_stored_row(const struct mt_tensor *t, size_t r)
{
    const struct mt_tensor_place *p = &t->place;
    size_t group = p->group_rows ? p->group_rows : p->paired_rows, half = p->paired_rows / 2;
    size_t in = group ? r % group : 0;
    if (in >= p->paired_rows)
        return r;
    return r - in + (in < half ? 2 * in : 2 * (in - half) + 1);
}

static size_t place_of(const struct mt_tensor *t, size_t r, size_t c)
{
    return t->place.first + mt_stored_row(t, r) * t->place.row_step + c * t->place.col_step;
}

/* n values of `size` bytes, 2 or 4, each so many values after the last. */
static void copy_values(char *to, size_t to_step, const char *from, size_t from_step, size_t n, size_t size)
{
    if (to_step == 1 && from_step == 1)
        memcpy(to, from, n * size);
    else if (size == sizeof(float))
        for (size_t i = 0; i < n; i++)
            memcpy(to + i * to_step * sizeof(float), from + i * from_step * sizeof(float), sizeof(float));
    else
        for (size_t i = 0; i < n; i++)
            memcpy(to + i * to_step * sizeof(uint16_t), from + i * from_step * sizeof(uint16_t), sizeof(uint16_t));
}

/* Copies values of a tensor to their places in a share, which begins with value share_at of the stored tensor; or,
 * unless `in`, from there. Of columns that lie apart it takes a few at a time, whose neighbours of the next rows are then
 * in the cache. */
static void copy_elements(const struct mt_values *v, char *elems, char *share, size_t share_at, bool in)
{
    size_t cols = n_cols(v->t), step = v->t->place.col_step, few = step == 1 ? cols : 64, end = v->first + v->n;
    for (size_t col = 0; col < cols; col += few)
        for (size_t row = v->first / cols; row * cols < end; row++) {
            size_t a = MT_MAX(row * cols + col, v->first), b = MT_MIN(row * cols + MT_MIN(col + few, cols), end);
            if (a >= b)
                continue;
            char *own = elems + (a - v->first) * v->size;
            char *there = share + (place_of(v->t, row, a - row * cols) - share_at) * v->size;
            copy_values(in ? there : own, in ? step : 1, in ? own : there, in ? 1 : step, b - a, v->size);
        }
}

bool mt_stored_is_in_order(const struct mt_tensor *t)
{
    return !t->place.paired_rows && t->place.col_step == 1 && t->place.row_step == n_cols(t);
}

size_t mt_stored_share(const struct mt_layout *l, const struct mt_tensor *t)
{
    const struct mt_stored *s = &l->stored[t->place.stored];
    return s->fused ? s->n / (size_t)l->cfg.moe.n_experts : s->n;
}

/* The name in the file may have one of the prefixes that exporters add, or lack "model.". */
const struct mt_st_tensor *mt_stored_find(const struct mt_st_model *st, const char *name)
{
    static const struct {
        const char *ours, *theirs;
    } prefix[] = {{"model.", "model."},
                  {"model.", "language_model.model."},
                  {"model.", "model.language_model."},
                  {"lm_head.", "language_model.lm_head."},
                  {"model.", ""}};
    const struct mt_st_tensor *t = mt_st_find(st, name);
    char other[256];
    for (size_t i = 0; !t && i < MT_ARRAY_LEN(prefix); i++) {
        size_t n = strlen(prefix[i].ours);
        if (strncmp(name, prefix[i].ours, n))
            continue;
        snprintf(other, sizeof(other), "%s%s", prefix[i].theirs, name + n);
        t = mt_st_find(st, other);
    }
    return t;
}

bool mt_stored_goes_along(const struct mt_layout *l, const char *name)
{
    static const char layers[] = "layers.";
    const char *at = strstr(name, layers), *number = at ? at + sizeof(layers) - 1 : NULL;
    bool beyond = number && *number >= '0' && *number <= '9' && strtoll(number, NULL, 10) >= l->cfg.n_layers;
    if (l->cfg.nested && strncmp(name, l->cfg.names->in_files, strlen(l->cfg.names->in_files)) &&
        strncmp(name, l->cfg.names->head_in_files, strlen(l->cfg.names->head_in_files)))
        return true;
    const char *uncomputed = l->cfg.family->uncomputed;
    return (l->cfg.moe.n_experts && (beyond || strstr(name, "mtp"))) ||
           (uncomputed && !strncmp(name, uncomputed, strlen(uncomputed))) ||
           (l->cfg.family->uncomputed_within && strstr(name, l->cfg.family->uncomputed_within));
}

void mt_stored_reader_finish(struct mt_stored_reader *r)
{
    free(r->share);
    r->share = NULL;
}

static int load_share(struct mt_stored_reader *r, const struct mt_st_tensor *src, const struct mt_tensor *t,
                      struct mt_err *err)
{
    size_t n = mt_stored_share(r->l, t), at = t->place.first / n * n;
    if (r->share_n && r->share_of == t->place.stored && r->share_at == at)
        return 0;
    r->share_n = 0;
    if (!mt_grow(&r->share, &r->share_cap, n, sizeof(*r->share)))
        return mt_fail_nomem(err, "loading weights", n * sizeof(*r->share));
    if (r->summer)
        mt_summer_begin(r->summer);
    int rc = mt_st_read_f32_summed(r->st, src, at, n, r->share, r->summer, err);
    if (rc)
        return rc;
    r->share_sum = r->summer ? mt_summer_end(r->summer) : 0;
    r->share_of = t->place.stored;
    r->share_at = at;
    r->share_n = n;
    return 0;
}

const struct mt_st_tensor *mt_stored_source(const struct mt_stored_reader *r, const struct mt_tensor *t)
{
    return mt_stored_find(r->st, r->l->stored[t->place.stored].name);
}

int mt_stored_read_f32(struct mt_stored_reader *r, const struct mt_st_tensor *src, const struct mt_tensor *t,
                       size_t first, size_t n, float *dst, struct mt_err *err)
{
    if (!src)
        return mt_fail(err, MT_ERR_INPUT, -ENOENT, "%s: tensor \"%.200s\" is missing", r->st->files[0].path,
                       r->l->stored[t->place.stored].name);
    if (mt_stored_is_in_order(t))
        return mt_st_read_f32_summed(r->st, src, t->place.first + first, n, dst, r->summer, err);
    int rc = load_share(r, src, t, err);
    const struct mt_values v = {.t = t, .first = first, .n = n, .size = sizeof(*dst)};
    if (!rc)
        copy_elements(&v, (char *)dst, (char *)r->share, r->share_at, false);
    return rc;
}

struct mt_st_decl mt_stored_decl(const struct mt_stored *s)
{
    return (struct mt_st_decl){.name = s->name, .dtype = s->is_f32 ? MT_ST_F32 : MT_ST_BF16, .n_dims = s->n_dims,
                               .shape = {s->shape[0], s->shape[1], s->shape[2]}};
}

void mt_stored_writer_finish(struct mt_stored_writer *w)
{
    free(w->share);
    free(w->tensor);
    *w = (struct mt_stored_writer){.l = w->l};
}

/* Of a tensor, elements or its packed piece's bytes; from the first of them on. */
static struct mt_values values_of(const struct mt_tensor *t, const struct mt_stored_part *of,
                                  struct mt_packed_piece piece[MT_MAX_PIECES])
{
    struct mt_values v = {.t = t, .n = t->n, .size = of->size};
    if (of->piece) {
        mt_packed_pieces(piece, t);
        v.piece = &piece[of->piece - 1];
        v.n = v.piece->bytes / of->size;
    }
    return v;
}

/* Copies a tensor to its place in the share: a packed one in rows, which are not divided. */
static int scatter(struct mt_stored_writer *w, const struct mt_tensor *t, const struct mt_stored_part *of,
                   struct mt_err *err)
{
    struct mt_packed_piece piece[MT_MAX_PIECES];
    struct mt_values v = values_of(t, of, piece), as = v;
    struct mt_tensor rows = *t;
    if (v.piece) {
        struct mt_packed_rows at = mt_packing_rows(w->l, t, v.piece);
        size_t n = mt_packed_piece_rows(v.piece);
        rows.n_dims = 1;
        rows.place = (struct mt_tensor_place){.first = at.first, .row_step = at.step, .col_step = 1};
        as = (struct mt_values){.t = &rows, .n = n, .size = v.piece->bytes / n};
    }
    if (!mt_grow(&w->tensor, &w->tensor_bytes, v.n * v.size, 1))
        return mt_fail_nomem(err, t->name, v.n * v.size);
    int rc = w->read(w->ctx, &v, w->tensor, err);
    if (!rc)
        copy_elements(&as, w->tensor, w->share, w->share_at * v.size / as.size, true);
    return rc;
}

/* n values from `at` on: a whole share. */
static int make_share(struct mt_stored_writer *w, const struct mt_stored_part *of, size_t at, size_t n,
                      struct mt_err *err)
{
    const struct mt_stored *s = &w->l->stored[of->stored];
    const struct mt_stored_part *has = &w->share_of;
    if (has->size == of->size && has->stored == of->stored && has->piece == of->piece && w->share_at == at)
        return 0;
    w->share_of.size = 0;
    if (!mt_grow(&w->share, &w->share_bytes, n * of->size, 1))
        return mt_fail_nomem(err, s->name, n * of->size);
    w->share_at = at;
    int rc = 0;
    for (size_t i = s->first_piece; i < s->first_piece + s->n_pieces && !rc; i++) {
        const struct mt_tensor *t = &w->l->tensors[w->l->pieces[i]];
        if (t->place.first / mt_stored_share(w->l, t) == at / n)
            rc = scatter(w, t, of, err);
    }
    if (!rc)
        w->share_of = *of;
    return rc;
}

int mt_stored_gather(struct mt_stored_writer *w, struct mt_stored_part of, size_t first, size_t n, void *dst,
                     struct mt_err *err)
{
    const struct mt_stored *s = &w->l->stored[of.stored];
    const struct mt_tensor *t = &w->l->tensors[w->l->pieces[s->first_piece]];
    struct mt_packed_piece piece[MT_MAX_PIECES];
    struct mt_values v = values_of(t, &of, piece);
    size_t share = mt_stored_share(w->l, t) / t->n * v.n;
    char *to = dst;
    if (s->n_pieces == 1 && (v.piece || mt_stored_is_in_order(t))) {
        v.first = first;
        v.n = n;
        return w->read(w->ctx, &v, dst, err);
    }
    for (size_t end = first + n, take; first < end; first += take, to += take * of.size) {
        size_t in = first % share;
        take = MT_MIN(end - first, share - in);
        int rc = make_share(w, &of, first - in, share, err);
        if (rc)
            return rc;
        memcpy(to, w->share + in * of.size, take * of.size);
    }
    return 0;
}
