/* SPDX-License-Identifier: Apache-2.0 */
/* Before backward each lane of each host knows the rows that experts have in the whole step. */
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "made_experts.h"
#include "made_hosts.h"
#include "made_program.h"
#include "test.h"

enum { MOST_HOSTS = 3, GROUPS = 8, COUNT_BYTES = 64 };

/* Eight groups, of which a short step uses only the first. */
static void build(struct step *s, int hosts, int own, size_t n_micro, int more)
{
    struct experts e;
    make_mixture(&e, GROUPS, GROUPS);
    e.p.n_micro = n_micro;
    e.p.n_hosts = hosts;
    e.p.n_lanes = hosts * own;
    e.p.by_data = e.p.n_lanes > 1;
    e.p.count_bytes = COUNT_BYTES;
    e.p.poison = more & 1;
    for (size_t u = 0; u < e.p.n_units; u++)
        e.units[u].lane = e.units[u].lane_back = (uint8_t)(u % (size_t)e.p.n_lanes);
    take_lane_buffers(&e.p, more);
    build_hosts(s, e.p);
}

static size_t count_all(const struct step *s, enum mt_opcode op, bool sends)
{
    size_t n = 0;
    for (int i = 0; i < s->n; i++)
        for (size_t k = 0; k < s->of[i].n_instrs; k++)
            n += s->of[i].instrs[k].op == op && s->of[i].instrs[k].sends == sends;
    return n;
}

TEST(each_lane_adds_up_what_all_have_counted)
{
    for (int hosts = 1; hosts <= MOST_HOSTS; hosts++)
        for (int own = 1; own <= 3 && hosts * own <= GROUPS; own++)
            for (size_t n_micro = 1; n_micro <= GROUPS; n_micro++) {
                struct step s;
                size_t lanes = 0, used = 0;
                build(&s, hosts, own, n_micro, (int)n_micro % 4);
                for (size_t lane = 0, all = (size_t)(hosts * own); lane < all; lane++)
                    lanes += n_micro > (lane * GROUPS + all - 1) / all; /* its first group is in the step */
                for (int i = 0; i < hosts; i++)
                    used += count(&s.of[i], MT_OP_BALANCE) > 0;
                assert_int_equal(count_all(&s, MT_OP_BALANCE, false), lanes);
                assert_int_equal(count_all(&s, MT_OP_COUNTS, true), used > 1 ? n_micro : 0);
                assert_int_equal(count_all(&s, MT_OP_COUNTS, false), n_micro * (used - 1));
                finish(&s);
            }
}

TEST(nothing_is_added_up_where_nothing_needs_it)
{
    struct experts e;
    struct mt_program p;
    make_mixture(&e, GROUPS, GROUPS);
    take_lane_buffers(&e.p, 3);
    for (int mode = 0; mode < 2; mode++) {
        e.p.mode = mode ? MT_MODE_EVAL : MT_MODE_TRAIN;
        e.p.count_bytes = mode ? COUNT_BYTES : 0;
        assert_int_equal(mt_program_build(&p, &e.p, NULL), 0);
        assert_int_equal(count(&p, MT_OP_BALANCE), 0);
        mt_program_finish(&p);
    }
    e.p.n_lanes = 2; /* which would share the layers */
    e.p.mode = MT_MODE_TRAIN;
    assert_int_equal(mt_program_build(&p, &e.p, NULL), -EINVAL);
}

/* The other side of a message that goes to one host. */
static size_t find_received(const struct mt_program *p, const struct mt_instr *message)
{
    size_t i = 0;
    while (p->instrs[i].op != MT_OP_COUNTS || p->instrs[i].sends || p->instrs[i].mb != message->mb)
        i++;
    return i;
}

/* Exchanges two instructions of a queue, a before b, without what they wait for. */
static void exchange(struct mt_program *p, size_t a, size_t b)
{
    struct mt_instr x = p->instrs[a], y = p->instrs[b];
    p->instrs[a] = y;
    p->instrs[b] = x;
    p->instrs[a].signals = p->instrs[b].signals = true;
    for (int q = 0; q < MT_MAX_QUEUES; q++)
        if (p->instrs[a].wait[q] >= (int32_t)a)
            p->instrs[a].wait[q] = MT_NO_WAIT;
}

/* The newest lists of the BALANCE's lane. */
static size_t find_lists(const struct mt_program *p, size_t balance)
{
    size_t i = balance;
    while (!mt_instr_makes_lists(&p->instrs[i]) || p->instrs[i].lane != p->instrs[balance].lane)
        i--;
    return i;
}

enum fault { NO_SUM, EARLY_SUM, LOST, OTHER_GROUP, NO_WAIT, N_FAULTS = NO_WAIT + MT_MAX_QUEUES };

/* Makes the fault at instruction i of the host; NULL: it cannot be made there; else a part of what is said of it. */
static const char *seed_fault(struct step *s, int host, size_t i, int what)
{
    struct mt_program *p = &s->of[host];
    struct mt_instr *in = &p->instrs[i];
    bool sum = in->op == MT_OP_BALANCE, message = in->op == MT_OP_COUNTS;
    switch (what) {
    case NO_SUM:
        if (sum)
            take_out(p, i);
        return sum ? "runs backward before" : NULL;
    case EARLY_SUM:
        if (sum)
            exchange(p, find_lists(p, i), i);
        return sum ? "rows" : NULL;
    case LOST: /* by both sides */
        if (!message || !in->sends || s->n != 2)
            return NULL;
        take_out(&s->of[!host], find_received(&s->of[!host], in));
        take_out(p, i);
        return "before those of all groups are known";
    case OTHER_GROUP:
        in->mb ^= message;
        return message ? "" : NULL;
    default:
        if ((!sum && !message) || in->wait[what - NO_WAIT] < 0)
            return NULL;
        in->wait[what - NO_WAIT] = MT_NO_WAIT;
        return "known";
    }
}

static void seed_faults(const struct step *s, int host, size_t i, size_t n[NO_WAIT + 1])
{
    for (int what = 0; what < N_FAULTS; what++) {
        struct step bad = {.n = s->n};
        struct mt_err err = {0};
        for (int k = 0; k < s->n; k++)
            bad.of[k] = copy_of(&s->of[k]);
        const char *say = seed_fault(&bad, host, i, what);
        if (say && (check(&bad, &err) != -EPROTO || !strstr(err.msg, say)))
            fail_msg("host %d, instruction %zu: fault %d was not noticed: %s", host, i, what, err.msg);
        n[MT_MIN(what, (int)NO_WAIT)] += say != NULL;
        finish(&bad);
    }
}

TEST(what_is_not_known_is_not_added_up)
{
    size_t n[NO_WAIT + 1] = {0};
    for (int hosts = 1; hosts <= MOST_HOSTS; hosts++)
        for (int own = 1; own <= 2; own++) {
            struct step s;
            build(&s, hosts, own, GROUPS, 3);
            for (int host = 0; host < hosts; host++)
                for (size_t i = 0; i < s.of[host].n_instrs; i++)
                    if (s.of[host].instrs[i].op == MT_OP_BALANCE || s.of[host].instrs[i].op == MT_OP_COUNTS)
                        seed_faults(&s, host, i, n);
            finish(&s);
        }
    for (size_t i = 0; i < MT_ARRAY_LEN(n); i++)
        assert_true(n[i] >= 10);
}
