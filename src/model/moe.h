/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "model/part.h"
#include "model/recipe.h"
#include "model/state.h"

/* Shared by the parts of a mixture of experts. */

/** Rows of the micro-batch's group in this step, including those of padding, which go to no expert. */
size_t mt_model_rows_in_use(const mt_model *m, size_t mb);

/** Bytes of values of a group: the router's norm of x, the sums in FP32, the routing, its weights. */
struct mt_part_shape;
size_t mt_rows_bytes(const struct mt_part_shape *s);     /* [rows, mt_moe_row()] */
size_t mt_sum_bytes(const struct mt_part_shape *s);      /* [rows, mt_moe_row()] */
size_t mt_residual_bytes(const struct mt_part_shape *s); /* [rows, hidden] */
size_t mt_routing_bytes(const struct mt_part_shape *s);
size_t mt_routing_weights_bytes(const struct mt_part_shape *s); /* [rows, top_k] */

/** The routing of a layer (device/ops_moe.h). */
struct mt_routing {
    uint16_t *ids;  /* [rows, top_k] */
    float *weights; /* [rows, top_k] */
    int32_t *counts, *starts, *list;
    int32_t *places; /* [rows, top_k] */
};
/** Its arrays from `base` on (NULL: sizes alone); returns its bytes. */
size_t mt_routing_layout(struct mt_routing *out, const struct mt_moe *moe, size_t rows, void *base);

size_t mt_model_counts_bytes(const struct mt_model_params *p);
/** Copies the counts of a layer's lists, of the micro-batch's group, to the host and waits for them: they are the row counts of products. */
int mt_model_take_counts(mt_model *m, int layer, size_t mb, const struct mt_routing *t, struct mt_err *err);
/** All counts of a group, in host memory; 0 bytes without experts. */
void *mt_model_group_counts(const mt_model *m, size_t group, size_t *bytes);
/** An expert's entries of the layer's list, of the micro-batch's group. */
struct mt_expert_list {
    size_t first, n;
    size_t place; /* of the first (mt_route_lists.places) */
};
struct mt_expert_list mt_model_expert_list(const mt_model *m, int layer, int expert, size_t mb);
/** Whether any of these experts of the layer, from `first` to before `end`, has rows in the micro-batch's group. */
bool mt_model_experts_have_rows(const mt_model *m, int layer, int first, int end, size_t mb);

/** The micro-batch's rows of a part's value that is kept for its whole group, of elements of `elem` bytes: the hidden
 * state for RESIDUAL, else the experts' rows. NULL if it is not kept. */
static inline void *mt_moe_own_rows(const struct mt_part_run *r, enum mt_role role, size_t elem)
{
    char *rows = mt_value(r, role);
    size_t width = role == MT_ROLE_RESIDUAL ? r->m->c : mt_moe_row(&r->m->layout->cfg);
    return rows ? rows + mt_model_first_row(r->m, r->of->mb) * width * elem : NULL;
}

/** Rows of a tile of an expert: part of the numerics, since the gradient of a weight is summed tile by tile. */
enum { MT_EXPERT_TILE = 16384 };
/** Rows of an expert that run at once, at most, with padding. */
size_t mt_expert_tile_rows(const struct mt_model_params *p, mt_device *dev);
/** Elements of an expert's gradient, with those of its adapters: all experts of a model have the same shapes, those of a
 * layer the same adapters, so that this is the most that any layer has. Passes over all parts. */
size_t mt_expert_gradient_elems(const struct mt_layout *l);

/** The factor of a row's contribution to that loss's gradient. */
float mt_model_balance_scale(const mt_model *m);
/** Bytes of the sums of a group; of all groups, they come after all other statistics. */
size_t mt_model_prob_sum_bytes(const struct mt_model_params *p);
/** [n_experts] sums of the routers' probabilities over a group's rows and all layers, in the statistics at `base`. */
float *mt_model_prob_sum(const mt_model *m, char *base, size_t group);
