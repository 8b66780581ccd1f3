/* SPDX-License-Identifier: Apache-2.0 */
#include "optim/adam_probe.h"

#include "base/clock.h"
#include "base/mem.h"

enum { N = 32 << 20, ROUNDS = 7 };

static struct mt_plane_desc plane(enum mt_plane_role role, size_t block, size_t bytes)
{
    return (struct mt_plane_desc){.role = role, .range = MT_RANGE_TRAINED, .dtype = MT_BF16, .block = block,
                                  .block_bytes = bytes};
}

int mt_adam_probe_init(struct mt_adam_probe *a, const struct mt_adam_probe_params *p, struct mt_err *err)
{
    struct mt_plane_elems elems = {{0}};
    struct mt_plane_set_params planes = {.n_units = 1, .elems = &elems, .numa = p->numa};
    struct mt_pool_params pool = {"probe", p->n_threads, p->cpus, NULL};
    const struct mt_optimizer *o = p->form.optimizer ? p->form.optimizer : &mt_adamw;
    *a = (struct mt_adam_probe){.n = p->n, .form = p->form};
    a->form.optimizer = o;
    for (int i = 0; i < o->n_keys; i++)
        a->keys[i] = o->keys[i].def;
    planes.desc[MT_PLANE_HI] = plane(MT_ROLE_WEIGHT, 1, sizeof(uint16_t));
    if (mt_master_lo_bytes(p->form.master))
        planes.desc[MT_PLANE_LO] = plane(MT_ROLE_WEIGHT, 1, mt_master_lo_bytes(p->form.master));
    for (int i = 0; i < o->n_states; i++)
        if (!o->state[i].apart && !o->state[i].on_device)
            planes.desc[MT_PLANE_STATE + i] = plane(MT_ROLE_STATE, o->state[i].block, o->state[i].block_bytes);
    planes.desc[MT_PLANE_GRAD] = plane(MT_ROLE_GRADIENT, 1, sizeof(uint16_t));
    for (int k = 0; k < MT_N_PLANES; k++)
        elems.n[k] = planes.desc[k].block ? p->n : 0;
    int rc = mt_plane_set_create(&a->planes, &planes, err) ?: mt_pool_create(&a->pool, &pool, err);
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

static void *at(const struct mt_adam_probe *p, int k, size_t first)
{
    const struct mt_plane_desc *d = mt_plane_desc_of(p->planes, (enum mt_plane_kind)k);
    return d->block ? (char *)mt_plane(p->planes, 0, (enum mt_plane_kind)k) + mt_plane_desc_bytes(d, first) : NULL;
}

static void run_chunk(void *ctx, size_t first, size_t n)
{
    const struct mt_adam_probe *p = ctx;
    void *lo = at(p, MT_PLANE_LO, first);
    struct mt_update u = {.n = n, .master = p->form.master, .hi = at(p, MT_PLANE_HI, first),
                          .lo = p->form.master == MT_MASTER_F32 ? lo : NULL,
                          .lo8 = p->form.master == MT_MASTER_24BIT ? lo : NULL, .grad = at(p, MT_PLANE_GRAD, first),
                          .grad_dtype = MT_BF16, .keys = p->keys, .lr = 1e-4, .weight_decay = 0.01, .t = p->t,
                          .clip = 1, .stochastic = p->form.stochastic, .first = first};
    const struct mt_along along = {.n = 1, .g = {0.01f}, .limit = MT_NOISE_ALL};
    u.along = p->form.optimizer->zeroth ? &along : NULL;
    float of_device = 1; /* a tensor's number, if any */
    for (int i = 0; i < p->form.optimizer->n_states; i++)
        u.state[i] = p->form.optimizer->state[i].on_device ? &of_device : at(p, MT_PLANE_STATE + i, first);
    p->form.optimizer->update(p->form.optimizer, &u, MT_ISA_AUTO);
}

void mt_adam_probe_run(struct mt_adam_probe *a)
{
    a->t++;
    mt_planes_run(a->planes, 0, 0, a->n, a->pool, run_chunk, a);
}

int mt_probe_adam(const struct mt_adam_probe_params *p, double *ns, struct mt_err *err)
{
    struct mt_adam_probe a;
    struct mt_adam_probe_params params = *p;
    int64_t best = INT64_MAX;
    params.n = p->n ? p->n : N;
    int rc = mt_adam_probe_init(&a, &params, err);
    for (int r = 0; r < ROUNDS && !rc; r++) {
        int64_t t0 = mt_now_ns();
        mt_adam_probe_run(&a);
        best = MT_MIN(best, mt_now_ns() - t0);
    }
    if (!rc)
        *ns = (double)best / (double)params.n;
    mt_adam_probe_finish(&a);
    return rc;
}
