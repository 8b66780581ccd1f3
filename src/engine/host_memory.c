/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The engine's host memory: spill space and the host pools' buffers. They, and planes that are copied, are registered
 * with the devices; the addresses are the same for all lanes.
 */
#include "base/mem.h"
#include "engine/state.h"

static int register_all(mt_engine *e, void *p, size_t bytes, struct mt_err *err)
{
    int rc = 0;
    for (size_t i = 0; i < e->n_lanes && !rc; i++)
        rc = mt_device_register_host(e->lane[i].b.dev, p, bytes, err);
    return rc;
}

static void unregister_all(mt_engine *e, void *p)
{
    for (size_t i = 0; i < e->n_lanes; i++)
        if (e->lane[i].b.dev)
            mt_device_unregister_host(e->lane[i].b.dev, p);
}

/* Buffers of the host pools, in one mapping that is registered with the devices and the kernel. */
static int alloc_staging(mt_engine *e, struct mt_err *err)
{
    size_t bytes[MT_N_POOLS], at = 0;
    void *base = NULL;
    mt_program_buffer_bytes(&e->plan.program, MT_ALL_LANES, bytes);
    for (int i = 0; i < MT_N_POOLS; i++)
        e->staging_bytes += mt_pools[i].device ? 0 : e->plan.pool_bytes[i];
    int rc = e->staging_bytes ? mt_host_alloc(&base, e->staging_bytes, "staging between device and disk", err) : 0;
    if (rc)
        return rc;
    e->staging = base;
    for (int i = 0; i < MT_N_POOLS; i++) {
        if (mt_pools[i].device)
            continue;
        int n = bytes[i] ? e->plan.program.n_buffers[0][i] : 0;
        e->b.buffers[i] = mt_arrays_add(&e->arrays, (size_t)n + 1, sizeof(void *));
        e->x.disk_ops[i] = mt_arrays_add(&e->arrays, (size_t)n, sizeof(struct mt_disk_op));
        if (e->arrays.failed)
            return mt_fail_nomem(err, "disk transfers", (size_t)n * sizeof(struct mt_disk_op));
        for (int k = 0; k < n; k++, at += bytes[i])
            e->b.buffers[i][k] = e->staging + at;
    }
    if (e->p.disk && e->staging)
        mt_disk_set_buffers(e->p.disk, &(struct iovec){e->staging, e->staging_bytes}, 1);
    return 0;
}

int mt_host_memory_alloc(mt_engine *e, struct mt_err *err)
{
    void *spill = NULL;
    if (e->plan.uses_disk && !e->p.disk)
        return mt_fail(err, MT_ERR_RUNTIME, -EINVAL, "the plan uses a disk, but none is open");
    if (e->plan.uses_files && !e->p.files)
        return mt_fail(err, MT_ERR_RUNTIME, -EINVAL, "the plan reads the model's files, but none are open");
    int rc = e->plan.spill_bytes ? mt_host_alloc(&spill, e->plan.spill_bytes, "boundaries and activations", err) : 0;
    e->b.spill = spill;
    return rc ?: alloc_staging(e, err);
}

/* Whether planes and spill memory are page-locked; else they are copied through the device's staging ring. */
static bool locks_all(const mt_engine *e)
{
    return e->p.placement.pin != MT_PIN_STAGING;
}

/* Locks planes that are copied to or from a device: of states those that it reads. */
static int lock_planes(mt_engine *e, struct mt_err *err)
{
    int rc = 0;
    mt_plane_bits loaded = mt_layout_loaded_planes(e->p.layout, e->p.numerics.dtype);
    for (enum mt_plane_kind k = 0; k < MT_N_PLANES && !rc && locks_all(e); k++) {
        size_t bytes;
        void *p = mt_plane_set_range(e->p.planes, k, &bytes);
        const struct mt_plane_desc *d = mt_plane_desc_of(e->p.planes, k);
        if (!p || !(d->role == MT_ROLE_GRADIENT || d->on_device || loaded >> k & 1))
            continue;
        rc = register_all(e, p, bytes, err);
        if (!rc)
            e->locked_planes[k] = p;
    }
    return rc;
}

int mt_host_memory_lock(mt_engine *e, struct mt_err *err)
{
    int rc = e->b.spill && locks_all(e) ? register_all(e, e->b.spill, e->plan.spill_bytes, err) : 0;
    if (!rc && e->staging)
        rc = register_all(e, e->staging, e->staging_bytes, err);
    return rc ?: lock_planes(e, err);
}

int mt_host_memory_grow_spill(mt_engine *e, size_t bytes, struct mt_err *err)
{
    void *spill = NULL;
    int rc = mt_host_alloc(&spill, bytes, "boundaries and activations", err);
    rc = rc ?: locks_all(e) ? register_all(e, spill, bytes, err) : 0;
    if (rc) {
        if (spill)
            unregister_all(e, spill);
        mt_host_free(spill, bytes);
        return rc;
    }
    if (e->b.spill) {
        unregister_all(e, e->b.spill);
        mt_host_free(e->b.spill, e->plan.spill_bytes);
    }
    e->b.spill = spill;
    e->plan.spill_bytes = bytes;
    for (size_t i = 0; i < e->n_lanes; i++)
        e->lane[i].b.spill = spill;
    return 0;
}

void mt_host_memory_unlock(mt_engine *e)
{
    for (int k = 0; k < MT_N_PLANES; k++)
        if (e->locked_planes[k])
            unregister_all(e, e->locked_planes[k]);
    if (e->b.spill)
        unregister_all(e, e->b.spill);
    if (e->staging)
        unregister_all(e, e->staging);
}

void mt_host_memory_free(mt_engine *e)
{
    if (e->b.spill)
        mt_host_free(e->b.spill, e->plan.spill_bytes);
    if (e->staging) {
        if (e->p.disk)
            mt_disk_set_buffers(e->p.disk, NULL, 0);
        mt_host_free(e->staging, e->staging_bytes);
    }
}
