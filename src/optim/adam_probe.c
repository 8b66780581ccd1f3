/* SPDX-License-Identifier: Apache-2.0 */
#include "optim/adam_probe.h"

#include "base/clock.h"
#include "base/mem.h"
#include "optim/adam.h"

enum { N = 32 << 20, ROUNDS = 7 };
static const enum mt_plane_kind M = MT_PLANE_STATE, V = MT_PLANE_STATE + 1;

static struct mt_plane_desc plane(enum mt_plane_role role, enum mt_dtype dtype)
{
    return (struct mt_plane_desc){.role = role, .range = MT_RANGE_TRAINED, .dtype = dtype, .block = 1,
                                  .block_bytes = mt_dtype_size(dtype)};
}

int mt_adam_probe_init(struct mt_adam_probe *a, const struct mt_adam_probe_params *p, struct mt_err *err)
{
    struct mt_plane_elems elems = {{0}};
    struct mt_plane_set_params planes = {.n_units = 1, .elems = &elems, .numa = p->numa};
    struct mt_pool_params pool = {"probe", p->n_threads, p->cpus, NULL};
    *a = (struct mt_adam_probe){.n = p->n};
    planes.desc[MT_PLANE_HI] = planes.desc[MT_PLANE_LO] = plane(MT_ROLE_WEIGHT, MT_BF16);
    planes.desc[M] = planes.desc[V] = plane(MT_ROLE_STATE, MT_F32);
    planes.desc[MT_PLANE_GRAD] = plane(MT_ROLE_GRADIENT, MT_BF16);
    for (int k = 0; k < MT_N_PLANES; k++)
        elems.n[k] = planes.desc[k].block ? p->n : 0;
    int rc = mt_plane_set_create(&a->planes, &planes, err);
    if (!rc)
        rc = mt_pool_create(&a->pool, &pool, err);
    if (rc)
        return rc;
    if (p->numa)
        mt_numa_lanes(p->numa, a->pool, p->cpus);
    uint16_t *grad = mt_plane(a->planes, 0, MT_PLANE_GRAD);
    for (size_t i = 0; i < p->n; i++) /* of different values */
        grad[i] = (uint16_t)(0x3c00 + i * 2654435761u % 512);
    return 0;
}

void mt_adam_probe_finish(struct mt_adam_probe *a)
{
    mt_pool_destroy(&a->pool);
    mt_plane_set_destroy(&a->planes);
}

static void run_chunk(void *ctx, size_t first, size_t n)
{
    const struct mt_adam_probe *p = ctx;
    struct mt_adam a = {.n = n,
                        .hi = (uint16_t *)mt_plane(p->planes, 0, MT_PLANE_HI) + first,
                        .lo = (uint16_t *)mt_plane(p->planes, 0, MT_PLANE_LO) + first,
                        .m = (float *)mt_plane(p->planes, 0, M) + first,
                        .v = (float *)mt_plane(p->planes, 0, V) + first,
                        .grad = (const uint16_t *)mt_plane(p->planes, 0, MT_PLANE_GRAD) + first,
                        .state_dtype = MT_F32, .grad_dtype = MT_BF16, .lr = 1e-4, .beta1 = 0.9, .beta2 = 0.999,
                        .eps = 1e-8, .weight_decay = 0.01, .t = p->t, .clip = 1};
    mt_adam_run(&a, MT_ISA_AUTO);
}

void mt_adam_probe_run(struct mt_adam_probe *a)
{
    a->t++;
    mt_planes_run(a->planes, 0, MT_PLANE_HI, 0, a->n, a->pool, run_chunk, a);
}

int mt_probe_adam(const struct mt_adam_probe_params *p, double *ns, struct mt_err *err)
{
    struct mt_adam_probe a;
    struct mt_adam_probe_params params = *p;
    int64_t best = INT64_MAX;
    params.n = N;
    int rc = mt_adam_probe_init(&a, &params, err);
    for (int r = 0; r < ROUNDS && !rc; r++) {
        int64_t t0 = mt_now_ns();
        mt_adam_probe_run(&a);
        best = MT_MIN(best, mt_now_ns() - t0);
    }
    if (!rc)
        *ns = (double)best / N;
    mt_adam_probe_finish(&a);
    return rc;
}
