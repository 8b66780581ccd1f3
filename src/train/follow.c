/* SPDX-License-Identifier: Apache-2.0 */
/* Weights and states on their way to the other hosts, and the steps that these make. */
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/mem.h"
#include "base/sum64.h"
#include "base/strbuf.h"
#include "store/files/file_weights.h"
#include "train/cluster_priv.h"
#include "train/reference.h"

static int pass(mt_cluster *c, void *p, size_t bytes, bool sends, struct mt_err *err)
{
    return sends ? mt_cluster_tell_all(c, p, bytes, err) : mt_cluster_note(c, mt_net_recv(c->net, 0, p, bytes, err));
}

/* A plane, whose homes may differ by host: what is in no memory goes through a window. sum: instead of passing it, its
 * sum onto *sum. */
static int pass_plane(mt_cluster *c, const struct mt_session *s, size_t unit, enum mt_plane_kind k, bool sends,
                      uint64_t *sum, struct mt_err *err)
{
    bool here = sum || !mt_plane_in_files(s->planes, unit, k), reads = sends || sum;
    size_t bytes = here ? mt_plane_desc_bytes(mt_plane_desc_of(s->planes, k), mt_plane_elems(s->planes, unit, k)) : 0;
    char *home = mt_plane(s->planes, unit, k);
    int rc = home || c->window || !bytes ? 0 : MT_NEW(&c->window, MT_PLANE_WINDOW, "a plane on its way", err);
    for (size_t at = 0, n; at < bytes && !rc; at += n) {
        n = MT_MIN(bytes - at, (size_t)MT_PLANE_WINDOW);
        char *data = home ? home + at : c->window;
        rc = home || !reads ? 0 : mt_planes_read_bytes(s->planes, unit, k, at, n, data, err);
        if (!rc && sum)
            *sum = mt_sum64(data, n, *sum);
        else
            rc = rc ?: pass(c, data, n, sends, err);
        if (!rc && !home && !reads)
            rc = mt_planes_write_bytes(s->planes, unit, k, at, n, data, err);
    }
    return rc;
}

/* Of each unit's planes those that all hosts have. */
static bool is_common(const struct mt_session *s, size_t unit, int k)
{
    return !(s->setup->choice.engine.owned[unit] >> k & 1);
}

/* These of a session but gradients, one after the other. */
static int pass_planes(mt_cluster *c, const struct mt_session *s, bool sends, struct mt_err *err)
{
    int rc = 0;
    for (size_t u = 0; u < s->setup->choice.layout->n_units && !rc; u++)
        for (int k = 0; k < MT_N_PLANES && !rc; k++)
            if (k != MT_PLANE_GRAD && is_common(s, u, k))
                rc = mt_cluster_note(c, pass_plane(c, s, u, (enum mt_plane_kind)k, sends, NULL, err));
    return rc ?: mt_cluster_note(c, mt_planes_settle(s->planes, err));
}

int mt_cluster_move(void *setup, const struct mt_plane_part *part, struct mt_err *err)
{
    const struct mt_setup *s = setup;
    mt_cluster *c = s->cluster;
    const int owner = mt_program_owner(&s->choice.engine.program, part->unit);
    struct mt_cluster_command what = {.op = part->write ? MT_CLUSTER_PUT : MT_CLUSTER_GET,
                                      .data = {part->unit, part->kind}};
    MT_LOCKED(&c->lock);
    int rc = mt_cluster_ready(c, err);
    for (size_t done = 0; done < part->n && !rc; done += what.data[2]) {
        char *p = (char *)part->mem + done;
        what.at = part->at + done;
        what.data[2] = MT_MIN(part->n - done, (size_t)MT_PLANE_WINDOW);
        rc = mt_net_send(c->net, owner, &what, sizeof(what), err)
          ?: part->write ? mt_net_send(c->net, owner, p, what.data[2], err)
                         : mt_net_recv(c->net, owner, p, what.data[2], err);
    }
    return mt_cluster_note(c, rc);
}

/* GET or PUT, on the host that has the plane. */
static int serve(mt_cluster *c, const struct mt_session *s, const struct mt_cluster_command *what, struct mt_err *err)
{
    const size_t unit = what->data[0], at = what->at, n = what->data[2];
    const enum mt_plane_kind k = (enum mt_plane_kind)what->data[1];
    int rc = c->window ? 0 : MT_NEW(&c->window, MT_PLANE_WINDOW, "a plane on its way", err);
    if (what->op == MT_CLUSTER_GET)
        return rc ?: mt_planes_read_bytes(s->planes, unit, k, at, n, c->window, err)
                  ?: mt_net_send(c->net, 0, c->window, n, err);
    return rc ?: mt_net_recv(c->net, 0, c->window, n, err)
              ?: mt_planes_write_bytes(s->planes, unit, k, at, n, c->window, err);
}

/* The next command but those for planes, which are obeyed. */
static int next_act(mt_cluster *c, const struct mt_session *s, struct mt_cluster_command *what, struct mt_err *err)
{
    int rc;
    do
        rc = mt_cluster_next(c, what, err);
    while (!rc && (what->op == MT_CLUSTER_GET || what->op == MT_CLUSTER_PUT) &&
           !(rc = mt_cluster_note(c, serve(c, s, what, err))));
    return rc;
}

/* What is read in place has to be the same on all hosts, tensor by tensor. */
static int compare_files(mt_cluster *c, const struct mt_session *s, bool sends, struct mt_err *err)
{
    int rc = 0;
    for (size_t i = 0; s->files && i < mt_file_weights_n_tensors(s->files) && !rc; i++) {
        uint64_t own = 0, first;
        rc = mt_cluster_note(c, mt_file_weights_sum(s->files, i, &own, err));
        first = own;
        rc = rc ?: pass(c, &first, sizeof(first), sends, err);
        if (!rc && first != own)
            rc = mt_fail(err, MT_ERR_INPUT, -EBADMSG, "%s: %s is not that of host 0, and memory.base = files reads it in place: each host "
                         "needs the same files", s->setup->in->weights_dir, mt_file_weights_tensor(s->files, i));
    }
    return rc;
}

static int pass_weights(mt_cluster *c, const struct mt_session *s, bool sends, struct mt_err *err)
{
    return pass_planes(c, s, sends, err) ?: compare_files(c, s, sends, err);
}

/* What is found out about a device's libraries, and bits depend on. */
static int find_out(struct mt_str *out, const struct mt_setup *s, struct mt_err *err)
{
    int rc = mt_setup_findings(s, out);
    mt_str_append(out, "", 0); /* "" rather than NULL */
    return rc || out->failed ? mt_fail_nomem(err, "findings of the devices", out->len) : 0;
}

/* Acts on what the first has found. */
static int adopt_findings(struct mt_setup *s, const char *first, struct mt_err *err)
{
    MT_STR_FREED struct mt_str own = {0};
    int rc = find_out(&own, s, err);
    if (!rc && strcmp(own.p, first) && !mt_setup_adopt_findings(s, first))
        rc = mt_fail(err, MT_ERR_USAGE, -EINVAL, "its GPU or a library of it is another than the first host's, so that results may "
                     "differ in bits: hosts need GPUs of one product and equal libraries");
    return rc;
}

int mt_cluster_send_state(mt_cluster *c, const struct mt_session *s, const struct mt_train_state *st,
                          struct mt_err *err)
{
    MT_STR_FREED struct mt_str found = {0};
    int rc = find_out(&found, s->setup, err);
    const struct mt_cluster_command state = {.op = MT_CLUSTER_STATE, .at = found.len + 1,
                                             .data = {st->updates, st->blocks.updates}};
    MT_LOCKED(&c->lock);
    return rc ?: mt_cluster_tell_all(c, &state, sizeof(state), err)
              ?: mt_cluster_tell_all(c, found.p, found.len + 1, err)
              ?: pass_weights(c, s, true, err);
}

/* --- the weights, at each save -------------------------------------------------------------------------------- */

/* Of a unit's masters: what differs may be below the half that devices read in bf16, if all have that. */
static int sum_unit(mt_cluster *c, const struct mt_session *s, size_t unit, uint64_t *sum, struct mt_err *err)
{
    *sum = 0;
    int rc = pass_plane(c, s, unit, MT_PLANE_HI, false, sum, err);
    return rc || !is_common(s, unit, MT_PLANE_LO) ? rc : pass_plane(c, s, unit, MT_PLANE_LO, false, sum, err);
}

static int tell_weights(mt_cluster *c, struct mt_session *s, bool frozen, struct mt_err *err)
{
    int rc = mt_engine_flush(s->engine, err);
    if (!rc && frozen)
        rc = mt_session_check_frozen(s, err);
    rc = rc ?: mt_guard_check_trained(s->guard, err);
    for (size_t u = 0; u < s->setup->choice.layout->n_units && !rc; u++) {
        uint64_t sum;
        rc = sum_unit(c, s, u, &sum, err) ?: mt_net_send(c->net, 0, &sum, sizeof(sum), err);
    }
    return rc ?: mt_planes_settle(s->planes, err);
}

/* Of a unit, from all hosts: *other is the first that has other weights; 0: none. */
static int compare_unit(mt_cluster *c, const struct mt_session *s, size_t unit, int *other, struct mt_err *err)
{
    uint64_t own, sum;
    int rc = sum_unit(c, s, unit, &own, err);
    *other = 0;
    for (int host = mt_net_size(c->net) - 1; host > 0 && !rc; host--) {
        rc = mt_net_recv(c->net, host, &sum, sizeof(sum), err);
        *other = !rc && sum != own ? host : *other;
    }
    return rc;
}

int mt_cluster_compare_weights(mt_cluster *c, const struct mt_session *s, bool frozen, struct mt_err *err)
{
    const struct mt_layout *l = s->setup->choice.layout;
    const struct mt_cluster_do what = {.act = (enum mt_cluster_act)MT_CLUSTER_WEIGHTS, .at = frozen};
    struct mt_err unreached;
    int host = 0;
    size_t unit = 0;
    if (!c || mt_cluster_begin(c, &what, &unreached))
        return 0;
    int rc = 0;
    for (size_t u = 0; u < l->n_units && !rc; u++) { /* all of them, so that the hosts stay together */
        int other;
        rc = compare_unit(c, s, u, &other, &unreached);
        unit = other && !host ? u : unit;
        host = host ? host : other;
    }
    rc = rc ?: mt_planes_settle(s->planes, &unreached);
    mt_cluster_end(c, rc, &unreached);
    if (rc && !host)
        mt_warn("the weights of the hosts were not compared: %s", unreached.msg);
    if (!host)
        return 0;
    return mt_fail(err, MT_ERR_RUNTIME, -EBADMSG, "host %d has other weights than host 0 in the unit that begins with %s, though "
                   "both made the same updates: the memory or the processor of one of them is at fault (see megatrain doctor); "
                   "nothing of this step is saved: go on from the last checkpoint with --resume, without that host", host,
                   l->tensors[l->units[unit].first_tensor].name);
}

int mt_cluster_send_reference(mt_cluster *c, const struct mt_train_state *st, struct mt_err *err)
{
    if (!c || !st->reference)
        return 0;
    const struct mt_cluster_command what = {.op = MT_CLUSTER_REFERENCE, .at = st->n_reference};
    MT_LOCKED(&c->lock);
    return mt_cluster_tell_all(c, &what, sizeof(what), err)
        ?: mt_cluster_tell_all(c, st->reference, st->n_reference * sizeof(*st->reference), err);
}

static int take_reference(mt_cluster *c, const struct mt_session *s, uint64_t n, struct mt_err *err)
{
    if (n != mt_reference_count(s->setup->in))
        return mt_fail(err, MT_ERR_RUNTIME, -EPROTO, "host 0 has a reference of %llu answers, and its data here have %zu",
                       (unsigned long long)n, mt_reference_count(s->setup->in));
    free(c->reference);
    return MT_NEW(&c->reference, n, "log-probabilities of the reference", err)
               ?: mt_net_recv(c->net, 0, c->reference, n * sizeof(*c->reference), err);
}

/* That of the data which the command names; NULL: this host has no such data. */
static mt_sampler *sampler_of(const struct mt_inputs *in, const struct mt_cluster_command *what)
{
    if (what->op == MT_CLUSTER_EVAL)
        return in->eval_sampler;
    if (what->op == MT_CLUSTER_EVAL_SET)
        return what->data[0] < in->n_sets ? in->sets[what->data[0]].sampler : NULL;
    return in->sampler;
}

/* Makes a step or an evaluation with own data of the same place. */
static int act(const mt_cluster *c, struct mt_session *s, const struct mt_cluster_command *what, struct mt_err *err)
{
    const struct mt_inputs *in = s->setup->in;
    bool step = what->op == MT_CLUSTER_STEP;
    mt_sampler *sampler = sampler_of(in, what);
    MT_CLOSED_BY(mt_step_data_finish) struct mt_step_data data = {.n = 0};
    struct mt_step_result res = {0};
    struct mt_eval_result eval = {.n_loss = 0};
    if (!sampler)
        return mt_fail(err, MT_ERR_RUNTIME, -EPROTO, "host 0 evaluates on data that this host does not have");
    int rc = mt_step_data_init(&data, sampler, err);
    if (rc)
        return rc;
    const struct mt_learner_step of = {.data = &data, .lr = what->lr, .reference = c->reference};
    rc = mt_sampler_fill(sampler, what->at, &data, err);
    if (!rc && step && mt_is_doubtful(what->at + 1))
        mt_setup_doubt(s->setup);
    rc = rc ?: step ? mt_engine_step(s->engine, &of, &res, err) : mt_engine_flush(s->engine, err);
    if (!rc && !step)
        rc = mt_engine_eval(s->engine, 0, &data, &eval, err);
    if (!rc && step)
        rc = mt_session_guard(s, err);
    return rc;
}

static int take_state(mt_cluster *c, struct mt_session *s, struct mt_setup *setup, struct mt_err *err)
{
    struct mt_cluster_command what;
    int rc = next_act(c, s, &what, err);
    if (rc || c->over)
        return rc;
    if (what.op != MT_CLUSTER_STATE)
        return mt_cluster_note(c, mt_fail(err, MT_ERR_RUNTIME, -EPROTO, "host 0 is of another build"));
    MT_FREED char *found = mt_calloc(what.at, 1);
    rc = found ? mt_cluster_note(c, mt_net_recv(c->net, 0, found, what.at, err))
               : mt_cluster_note(c, mt_fail_nomem(err, "findings of the devices", what.at));
    rc = rc ?: mt_cluster_note(c, adopt_findings(setup, found, err))
            ?: pass_weights(c, s, false, err);
    mt_engine_set_updates(s->engine, 0, what.data[0], what.data[1]);
    return rc ?: mt_session_start_guard(s, err);
}

int mt_cluster_follow(mt_cluster *c, struct mt_session *s, struct mt_setup *setup, struct mt_train_control *control,
                      struct mt_err *err)
{
    int rc = take_state(c, s, setup, err);
    atomic_store(&control->engine, s->engine);
    atomic_store(&control->begun, true);
    if (atomic_load(&control->stop)) /* asked while there was no engine to interrupt */
        mt_engine_interrupt(s->engine);
    while (!rc && !c->over && !c->phase.op) {
        struct mt_cluster_command what;
        rc = next_act(c, s, &what, err);
        if (!rc && what.op == MT_CLUSTER_CONFIG)
            c->phase = what;
        else if (!rc && !c->over)
            rc = mt_cluster_note(c, what.op == MT_CLUSTER_REFERENCE ? take_reference(c, s, what.at, err)
                                    : what.op == MT_CLUSTER_WEIGHTS ? tell_weights(c, s, what.at, err)
                                    : what.op == MT_CLUSTER_FLUSH   ? mt_engine_flush(s->engine, err)
                                                                    : act(c, s, &what, err));
    }
    atomic_store(&control->engine, NULL);
    if (rc) /* the first hears of it, and saves */
        mt_cluster_fail(c, err);
    free(c->reference); /* a message may be on its way to it until the others have heard */
    c->reference = NULL;
    return rc ? rc : c->phase.op ? MT_AGAIN : 0;
}
