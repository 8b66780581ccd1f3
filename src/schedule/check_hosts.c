/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Checks the programs of all hosts together. Each is checked by itself (check.c) up to its next message; then a message
 * takes place whose sender and receivers have all come to it: each host starts its messages in order. That several are
 * under way when they run changes nothing: each starts when what it waits for has ended. What was in the sender's home is
 * in the receivers' then. Where no message can take place any more, all programs have ended, or hosts would wait for
 * each other for ever.
 */

#include "schedule/check_priv.h"

enum { NONE = MT_CHECK_NONE, MAX_HOSTS = MT_MAX_LANES };

struct hosts {
    struct mt_checker c[MAX_HOSTS];
    size_t at[MAX_HOSTS]; /* the next instruction of each */
    int n;
};

static const struct mt_instr *next_of(const struct hosts *h, int host)
{
    const struct mt_program *p = h->c[host].p;
    return h->at[host] < p->n_instrs ? &p->instrs[h->at[host]] : NULL;
}

/* Up to the host's next message, its waits included. */
static int advance(struct hosts *h, int host)
{
    int rc = 0;
    for (const struct mt_instr *in = next_of(h, host); in && !rc; in = next_of(h, host)) {
        rc = mt_check_instr(&h->c[host], h->at[host]);
        if (in->queue == MT_Q_NET)
            break;
        h->at[host]++;
    }
    return rc;
}

/* Whether it is of the unit's planes in host staging. */
static bool is_staged(const struct mt_program *p, const struct mt_instr *in)
{
    const struct mt_object *o = &p->objects[in->operand[0].object];
    return in->n_operands == 1 && in->operand[0].object >= 0 && (size_t)in->operand[0].object < p->n_objects &&
           o->kind == MT_OBJ_STAGED && o->unit == in->unit;
}

/* Whether the message is of an object with a home, or of the counts of a group. */
static bool has_content(const struct mt_program *p, const struct mt_instr *in)
{
    if (in->op == MT_OP_COUNTS)
        return p->balances && !in->n_operands && in->bytes && in->mb >= 0 && (size_t)in->mb < p->n_micro;
    if (in->op == MT_OP_RENEW)
        return p->owned && in->bytes && (!in->n_operands || is_staged(p, in));
    if (in->n_operands != 1 || in->operand[0].object < 0 || (size_t)in->operand[0].object >= p->n_objects)
        return false;
    const struct mt_object *o = &p->objects[in->operand[0].object];
    bool home = o->kind == MT_OBJ_GRAD && o->spill >= 0 && (size_t)o->spill + o->bytes <= p->spill_bytes;
    return in->op == MT_OP_SHARE || (home && in->bytes == o->bytes);
}

static int check_message(struct mt_checker *c, size_t i, int host, int n_hosts)
{
    const struct mt_instr *in = &c->p->instrs[i];
    const unsigned all = (1u << n_hosts) - 1, own = 1u << host;
    if (!in->hosts || in->hosts & ~all || in->hosts & own || !has_content(c->p, in) || in->unit < 0 ||
        (size_t)in->unit >= c->p->n_units)
        return mt_check_fault(c, i, NONE, "a message to no other host, or of nothing that has a home");
    if (in->sends && (in->op == MT_OP_SHARE || in->op == MT_OP_RENEW) && in->hosts != (all & ~own))
        return mt_check_fault(c, i, NONE, "a plane that does not go to all hosts");
    if ((!in->sends || in->op == MT_OP_PASS) && in->hosts & (in->hosts - 1))
        return mt_check_fault(c, i, NONE, "a message of several hosts, or a sum for several");
    return 0;
}

static int send_sum(struct mt_checker *c, size_t i)
{
    const int o = c->p->instrs[i].operand[0].object;
    struct mt_check_place *home = mt_check_home(c, o);
    struct mt_check_object *x = &c->objects[o];
    bool newest = home->object == o && home->version == x->latest, complete = x->parts == c->p->objects[o].parts;
    int rc = mt_check_that(c, i, newest, home->writer, "passes on a sum whose newest content was not stored")
          ?: mt_check_that(c, i, complete, home->writer, "passes on a sum that is not complete")
          ?: mt_check_none(c, i, x->went, "passes on a sum that was taken on already");
    x->went = (int)i;
    return rc ?: mt_check_read_place(c, i, home, "passes on a sum before it is stored");
}

static int receive_sum(struct mt_checker *c, size_t i, int level)
{
    const int o = c->p->instrs[i].operand[0].object;
    struct mt_check_object *x = &c->objects[o];
    if (x->parts && x->went == NONE)
        return mt_check_fault(c, i, mt_check_home(c, o)->writer, "receives a sum over one that was not taken on");
    *x = (struct mt_check_object){x->latest + 1, c->p->objects[o].parts, level, NONE, x->routed};
    return mt_check_write_place(c, i, mt_check_home(c, o), o, x->latest, "receives over a home in use");
}

/* States that a direction has changed. */
static bool has_states(const struct mt_checker *c, size_t i)
{
    return mt_kinds[c->p->objects[c->p->instrs[i].operand[0].object].kind].returns;
}

static int send_states(struct mt_checker *c, size_t i)
{
    const int o = c->p->instrs[i].operand[0].object;
    struct mt_check_place *home = mt_check_home(c, o);
    bool newest = c->objects[o].latest && home->version == c->objects[o].latest;
    return mt_check_that(c, i, newest, home->writer, "shares states whose newest content was not stored")
        ?: mt_check_read_place(c, i, home, "shares states before they are stored");
}

static int receive_states(struct mt_checker *c, size_t i)
{
    const int o = c->p->instrs[i].operand[0].object, update = c->units[c->p->instrs[i].unit].updated;
    return mt_check_that(c, i, !c->objects[o].latest, mt_check_home(c, o)->writer, "receives states that have changed here")
        ?: mt_check_after(c, i, update, "receives over states before the update that needs them")
        ?: mt_check_write_place(c, i, mt_check_home(c, o), o, ++c->objects[o].latest, "receives over states in use");
}

static int send_gradient(struct mt_checker *c, size_t i)
{
    const int stored = c->units[c->p->instrs[i].unit].stored;
    return mt_check_that(c, i, stored != NONE && mt_check_ordered(c, stored, i), stored,
                         "shares a gradient before it is stored");
}

static int receive_gradient(struct mt_checker *c, size_t i)
{
    const struct mt_instr *in = &c->p->instrs[i];
    struct mt_check_unit *unit = &c->units[in->unit];
    int rows = in->row_bytes ? unit->scattered : NONE;
    int rc = mt_check_none(c, i, unit->taken, "receives a gradient that is here already")
          ?: mt_check_after(c, i, unit->updated, "receives over a gradient before its update")
          ?: mt_check_after(c, i, rows, "receives rows of a gradient before others were scattered");
    unit->taken = unit->stored = (int)i;
    return rc;
}

/* Weights, from the host that has updated them. */
static int exchange_weights(struct hosts *h, int from)
{
    const struct mt_instr *in = next_of(h, from);
    struct mt_check_unit *unit = &h->c[from].units[in->unit];
    bool own = unit->updated != NONE && h->c[from].p->instrs[unit->updated].op == MT_OP_UPDATE;
    int rc = mt_check_that(&h->c[from], h->at[from], own && mt_check_ordered(&h->c[from], unit->updated, h->at[from]),
                           unit->updated, "sends weights before their update")
          ?: mt_check_none(&h->c[from], h->at[from], unit->renewed, "sends weights for the second time");
    unit->renewed = (int)h->at[from];
    for (int host = 0; host < h->n && !rc; host++) {
        struct mt_checker *c = &h->c[host];
        const size_t i = h->at[host];
        if (host != from && !(in->hosts & 1u << host))
            continue;
        if (host != from)
            rc = mt_check_none(c, i, c->units[in->unit].updated, "receives weights that are updated here already")
              ?: mt_check_renews(c, i);
        if (in->n_operands)
            rc = rc ?: mt_check_operand(c, i, &c->p->instrs[i].operand[0]);
        h->at[host]++;
    }
    return rc;
}

static bool same(const struct mt_instr *a, const struct mt_instr *b)
{
    return a->op == b->op && a->unit == b->unit && a->mb == b->mb && a->operand[0].object == b->operand[0].object &&
           a->bytes == b->bytes && a->row_bytes == b->row_bytes;
}

/* Whether all receivers of the host's next message, if it sends one, are at it. */
static int meets(struct hosts *h, int from, bool *all)
{
    const struct mt_instr *in = next_of(h, from);
    *all = in && in->sends;
    for (int to = 0; to < h->n && *all; to++) {
        const struct mt_instr *other = next_of(h, to);
        if (!(in->hosts & 1u << to))
            continue;
        *all = other && !other->sends && other->hosts == 1u << from;
        if (*all && !same(in, other))
            return mt_check_fault(&h->c[to], h->at[to], NONE, "receives another message than is sent");
    }
    return 0;
}

/* What a host must have received has no fault here: its BALANCE needs the counts of all groups. */
static int exchange_counts(struct hosts *h, int from)
{
    const struct mt_instr *in = next_of(h, from);
    int rc = mt_check_counts(&h->c[from], h->at[from]++);
    for (int to = 0; to < h->n && !rc; to++)
        if (in->hosts & 1u << to)
            rc = mt_check_counts(&h->c[to], h->at[to]++);
    return rc;
}

static int exchange(struct hosts *h, int from)
{
    const struct mt_instr *in = next_of(h, from);
    if (in->op == MT_OP_COUNTS)
        return exchange_counts(h, from);
    if (in->op == MT_OP_RENEW)
        return exchange_weights(h, from);
    const bool sum = in->op == MT_OP_PASS;
    const int level = h->c[from].objects[in->operand[0].object].level;
    const bool states = !sum && has_states(&h->c[from], h->at[from]);
    int rc = (sum ? send_sum : states ? send_states : send_gradient)(&h->c[from], h->at[from]);
    for (int to = 0; to < h->n && !rc; to++)
        if (in->hosts & 1u << to) {
            rc = sum      ? receive_sum(&h->c[to], h->at[to], level)
                 : states ? receive_states(&h->c[to], h->at[to])
                          : receive_gradient(&h->c[to], h->at[to]);
            h->at[to]++;
        }
    h->at[from]++;
    return rc;
}

/* Every host to its next message; *left: there is one. */
static int advance_all(struct hosts *h, bool arrived[MAX_HOSTS], bool *left)
{
    int rc = 0;
    *left = false;
    for (int host = 0; host < h->n && !rc; host++) {
        if (!arrived[host])
            rc = advance(h, host);
        arrived[host] = true;
        if (!rc && next_of(h, host)) {
            rc = check_message(&h->c[host], h->at[host], host, h->n);
            *left = true;
        }
    }
    return rc;
}

static int run_together(struct hosts *h)
{
    bool arrived[MAX_HOSTS] = {false}, left = true;
    int rc = advance_all(h, arrived, &left);
    while (!rc && left) {
        bool met = false;
        int from = -1, waits = 0;
        while (!rc && !met && ++from < h->n)
            rc = meets(h, from, &met);
        while (!next_of(h, waits))
            waits++;
        if (!rc && !met)
            return mt_check_fault(&h->c[waits], h->at[waits], NONE, "a message that its other side does not come to");
        for (int host = 0; host < h->n && !rc; host++) /* those that take part go on */
            arrived[host] = host != from && !(next_of(h, from)->hosts & 1u << host);
        rc = rc ?: exchange(h, from) ?: advance_all(h, arrived, &left);
    }
    return rc;
}

/* Each gradient is where its unit is updated, and the weights of every update everywhere. */
static int check_owned(struct hosts *h)
{
    for (size_t u = 0; u < h->c[0].p->n_units; u++)
        for (int host = 0, other = h->n - 1; host < h->n; other = host++) {
            const struct mt_check_unit *a = &h->c[host].units[u], *b = &h->c[other].units[u];
            if (a->updated != NONE && b->updated == NONE)
                return mt_check_fault(&h->c[host], (size_t)a->updated, NONE, "weights that do not reach all hosts");
            if (a->stored != NONE && (a->updated == NONE || h->c[host].p->instrs[a->updated].op != MT_OP_UPDATE))
                return mt_check_fault(&h->c[host], (size_t)a->stored, a->updated, "a gradient of a unit that another host updates");
        }
    return 0;
}

static int check_shared(struct hosts *h)
{
    if (h->c[0].p->owned)
        return check_owned(h);
    for (size_t u = 0; u < h->c[0].p->n_units; u++)
        for (int host = 0; host < h->n; host++)
            for (int other = 0; other < h->n; other++)
                if (h->c[host].units[u].stored != NONE && h->c[other].units[u].stored == NONE)
                    return mt_check_fault(&h->c[host], (size_t)h->c[host].units[u].stored, NONE,
                                          "a gradient that does not reach all hosts");
    for (size_t o = 0; o < h->c[0].p->n_objects; o++)
        for (int host = 0; host < h->n && mt_kinds[h->c[0].p->objects[o].kind].returns; host++)
            if (h->c[host].objects[o].latest != h->c[(host + 1) % h->n].objects[o].latest)
                return mt_check_fault(&h->c[host], h->c[host].p->n_instrs - 1, NONE, "states that do not reach all hosts");
    return 0;
}

int mt_program_check_hosts(const struct mt_program *const *p, int n, struct mt_err *err)
{
    struct hosts h = {.n = n};
    int rc = n >= 1 && n <= MAX_HOSTS ? 0 : mt_fail(err, MT_ERR_RUNTIME, -EPROTO, "step program: of %d hosts", n);
    for (int i = 0; i < n && !rc; i++) {
        h.c[i].p = p[i];
        h.c[i].err = err;
        rc = mt_check_begin(&h.c[i]);
        if (!rc && (p[i]->n_units != p[0]->n_units || p[i]->n_objects != p[0]->n_objects))
            rc = mt_fail(err, MT_ERR_RUNTIME, -EPROTO, "step program: that of host %d is of another step", i);
    }
    rc = rc ?: run_together(&h);
    for (int i = 0; i < n && !rc; i++)
        rc = mt_check_end(&h.c[i]);
    rc = rc ?: check_shared(&h);
    for (int i = 0; i < n; i++)
        mt_arrays_finish(&h.c[i].arrays);
    return rc;
}

int mt_program_check(const struct mt_program *p, struct mt_err *err)
{
    return mt_program_check_hosts(&p, 1, err);
}
