/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What hosts that share a step send each other: the messages of its program, and after it the statistics that decide
 * what is done with the gradient, so that each host decides the same.
 */
#include <errno.h>
#include <string.h>

#include "base/mem.h"
#include "engine/state.h"
#include "model/direct.h"
#include "model/ranges.h"

static size_t states_of(const mt_engine *e, size_t unit, struct mt_net_part part[MT_NET_PARTS])
{
    struct mt_moment_plane plane[MT_MAX_STATES];
    size_t n = mt_unit_moment_planes(e->p.layout, unit, plane);
    for (size_t i = 0; i < n; i++)
        part[i] = (struct mt_net_part){mt_plane(e->p.planes, unit, plane[i].kind), plane[i].bytes};
    return n;
}

/* What of a unit's update all hosts need; staged: the buffer in which those of its planes are that are on a drive. */
static size_t weights_of(const mt_engine *e, size_t unit, char *staged, struct mt_net_part part[MT_NET_PARTS])
{
    const mt_plane_bits loaded = mt_unit_loaded_planes(e->p.layout, unit, e->p.numerics.dtype);
    size_t n = 0;
    for (enum mt_plane_kind k = 0; k < MT_N_PLANES; k++) {
        const struct mt_plane_desc *d = mt_plane_desc_of(e->p.planes, k);
        if (loaded >> k & 1 && d->range == MT_RANGE_TRAINED && mt_plane_elems(e->p.planes, unit, k))
            part[n++] = (struct mt_net_part){mt_plane_view(&e->b, unit, k, 0, NULL, staged).data,
                                             mt_plane_desc_bytes(d, mt_plane_elems(e->p.planes, unit, k))};
    }
    return n;
}

int mt_hosts_create(mt_engine *e, struct mt_err *err)
{
    size_t each = (size_t)(mt_net_size(e->p.net) - 1) * MT_NET_PARTS, groups = mt_groups_n(mt_engine_groups(&e->p));
    struct mt_hosts *h = &e->hosts;
    h->ops = mt_arrays_add(&e->arrays, MT_NET_UNDER_WAY, sizeof(*h->ops));
    for (size_t i = 0; i < MT_NET_UNDER_WAY && h->ops; i++)
        h->ops[i].m = mt_arrays_add(&e->arrays, each + 1, sizeof(*h->ops[i].m));
    h->routed = mt_arrays_add(&e->arrays, groups * (size_t)e->p.layout->cfg.moe.n_experts + 1, sizeof(*h->routed));
    return e->arrays.failed ? mt_fail_nomem(err, "messages of hosts", MT_NET_UNDER_WAY * each * sizeof(*h->ops->m)) : 0;
}

int64_t *mt_hosts_routed(const mt_engine *e, size_t group)
{
    return e->hosts.routed + group * (size_t)e->p.layout->cfg.moe.n_experts;
}

/* The rows of experts in a group: what is sent is counted here. */
static struct mt_net_part counts_of(const mt_engine *e, const struct mt_instr *in)
{
    const struct mt_program_params *p = &e->plan.program;
    size_t group = mt_group_of(p->groups, (size_t)in->mb);
    int64_t *rows = mt_hosts_routed(e, group);
    if (in->sends) {
        memset(rows, 0, in->bytes);
        mt_model_add_routed(mt_engine_model_on(e, (size_t)mt_micro_lane(p, (size_t)in->mb)), group, rows);
    }
    return (struct mt_net_part){rows, in->bytes};
}

size_t mt_hosts_content(const mt_engine *e, const struct mt_program *prog, const struct mt_instr *in,
                        struct mt_net_part part[MT_NET_PARTS])
{
    if (in->op == MT_OP_COUNTS) {
        part[0] = counts_of(e, in);
        return 1;
    }
    const struct mt_object *o = &prog->objects[in->operand[0].object];
    if (in->op == MT_OP_RENEW)
        return weights_of(e, (size_t)in->unit,
                          in->n_operands ? e->b.buffers[o->pool][in->operand[0].buffer] : NULL, part);
    if (mt_kinds[o->kind].returns)
        return states_of(e, (size_t)in->unit, part);
    if (in->op == MT_OP_PASS)
        part[0] = (struct mt_net_part){e->b.spill + o->spill, in->bytes};
    else
        part[0] = (struct mt_net_part){mt_plane(e->p.planes, (size_t)in->unit, MT_PLANE_GRAD), in->bytes};
    if (in->row_bytes) /* as many as the step's tokens have, which all hosts know */
        part[0].bytes = mt_model_used_rows(mt_engine_inputs(e)).n * in->row_bytes;
    return 1;
}

/* --- statistics ---------------------------------------------------------------------------------------------- */

struct copying {
    mt_engine *e;
    int host;      /* whose statistics they are */
    size_t at;     /* bytes so far */
    bool measures; /* only counts them */
    bool in;       /* out of the buffer */
};

static void copy(struct copying *c, void *part, size_t bytes)
{
    if (!c->measures && bytes) {
        char *buf = c->e->hosts.buf + c->at;
        memcpy(c->in ? (char *)part : buf, c->in ? buf : (char *)part, bytes);
    }
    c->at += bytes;
}

static void copy_stats(struct copying *c, mt_model *m, enum mt_stats_part part, size_t i)
{
    size_t bytes;
    void *at = mt_model_stats_of(m, part, i, &bytes);
    copy(c, at, bytes);
}

/* Losses of the micro-batches that the host's lanes compute, and what measures need beside them, rows of experts and sums
 * of routers' probabilities of their groups, sums of squares of gradients that are cast there. */
static void copy_all(struct copying *c, const struct mt_runnable *r)
{
    const struct mt_program_params *p = &c->e->plan.program;
    for (size_t mb = 0; mb < r->prog.n_micro; mb++) {
        int lane = mt_micro_lane(p, mb);
        if (mt_program_host_of(p, lane) != c->host)
            continue;
        copy_stats(c, mt_engine_model_on(c->e, (size_t)lane), MT_STATS_OF_MICRO, mb);
        copy_stats(c, mt_engine_model_on(c->e, (size_t)lane), MT_STATS_OF_FEW, mb);
    }
    for (size_t group = 0; group < mt_groups_in_use(p->groups, r->prog.n_micro); group++) {
        int lane = mt_group_lane(p, group);
        if (mt_program_host_of(p, lane) != c->host)
            continue;
        copy_stats(c, mt_engine_model_on(c->e, (size_t)lane), MT_STATS_OF_GROUP, group);
        copy_stats(c, mt_engine_model_on(c->e, (size_t)lane), MT_STATS_PROBABILITIES, group);
    }
    for (size_t u = 0; u < p->n_units && r->prog.backward; u++)
        if (mt_program_host_of(p, p->units[u].lane_back) == c->host)
            copy_stats(c, mt_engine_gradient_model_of(c->e, u), MT_STATS_OF_UNIT, u);
}

static int reserve(mt_engine *e, const struct mt_runnable *r, int host, size_t *bytes, struct mt_err *err)
{
    int32_t asked = 0;
    struct copying c = {.e = e, .host = host, .measures = true};
    copy(&c, &asked, sizeof(asked));
    copy_all(&c, r);
    *bytes = c.at;
    return mt_grow(&e->hosts.buf, &e->hosts.cap, c.at, 1) ? 0 : mt_fail_nomem(err, "statistics of hosts", c.at);
}

/* One host's to all others. */
static int share_of(mt_engine *e, const struct mt_runnable *r, int host, struct mt_err *err)
{
    const int own = mt_net_rank(e->p.net), n = mt_net_size(e->p.net);
    size_t bytes;
    int32_t asked = atomic_load(&e->hosts.asked);
    struct copying c = {.e = e, .host = host, .in = host != own};
    int rc = reserve(e, r, host, &bytes, err);
    if (!rc && c.in)
        rc = mt_net_recv(e->p.net, host, e->hosts.buf, bytes, err);
    if (rc)
        return rc;
    copy(&c, &asked, sizeof(asked));
    copy_all(&c, r);
    e->hosts.stop |= asked != 0;
    for (int to = 0; to < n && !c.in && !rc; to++)
        if (to != own)
            rc = mt_net_send(e->p.net, to, e->hosts.buf, bytes, err);
    return rc;
}

int mt_hosts_share_stats(mt_engine *e, const struct mt_runnable *r, struct mt_err *err)
{
    int rc = 0;
    e->hosts.stop = false;
    for (int host = 0; host < mt_net_size(e->p.net) && !rc; host++)
        rc = share_of(e, r, host, err);
    return !rc ? 0 : mt_fail_prefix(err, rc, "statistics of a step");
}

int mt_hosts_agree(const mt_engine *e, uint64_t number, const char *what, struct mt_err *err)
{
    const int n = mt_net_size(e->p.net), own = mt_net_rank(e->p.net);
    int rc = 0, other = -1;
    for (int host = 0; host < n && !rc; host++) { /* one after the other sends its own */
        uint64_t theirs = number;
        for (int to = 0; to < n && host == own && !rc; to++)
            rc = to == own ? 0 : mt_net_send(e->p.net, to, &number, sizeof(number), err);
        if (host != own)
            rc = mt_net_recv(e->p.net, host, &theirs, sizeof(theirs), err);
        if (!rc && theirs != number)
            other = other < 0 ? host : other;
    }
    return rc || other < 0
               ? rc
               : mt_fail(err, MT_ERR_USAGE, -EPROTO, "hosts %d and %d differ in %s: they need the same build, configuration, "
                         "model and data", own, other, what);
}
