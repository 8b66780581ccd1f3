/* SPDX-License-Identifier: Apache-2.0 */
/* Weights and states on their way to the other hosts, and the steps that these make. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/strbuf.h"
#include "train/cluster_priv.h"
#include "train/reference.h"

/* All planes of a session but gradients, one after the other. */
static int pass_planes(mt_cluster *c, const struct mt_session *s, bool sends, struct mt_err *err)
{
    int rc = 0;
    for (size_t u = 0; u < s->setup->choice.layout->n_units && !rc; u++)
        for (int k = 0; k < MT_N_PLANES && !rc; k++) {
            void *p = mt_plane(s->planes, u, (enum mt_plane_kind)k);
            size_t bytes = mt_plane_desc_bytes(mt_plane_desc_of(s->planes, (enum mt_plane_kind)k),
                                               mt_plane_elems(s->planes, u, (enum mt_plane_kind)k));
            if (p && bytes && k != MT_PLANE_GRAD)
                rc = sends ? mt_cluster_tell_all(c, p, bytes, err)
                           : mt_cluster_note(c, mt_net_recv(c->net, 0, p, bytes, err));
        }
    return rc;
}

/* What bits depend on beside numbers: the product, and what was found out about it and its libraries. */
static int describe_device(struct mt_str *out, const struct mt_setup *s, struct mt_err *err)
{
    mt_str_printf(out, "%s\n", mt_device_limits(s->dev)->product);
    int rc = mt_setup_findings(s, out);
    return rc || out->failed ? mt_fail_nomem(err, "findings of the devices", out->len) : 0;
}

/* Acts on what the first has found. */
static int adopt_device(struct mt_setup *s, const char *first, struct mt_err *err)
{
    struct mt_str own = {0};
    int rc = describe_device(&own, s, err);
    bool same = !rc && !strcmp(own.p, first);
    const char *found = strchr(first, '\n');
    bool product = !rc && found && !strncmp(own.p, first, (size_t)(found + 1 - first));
    if (!rc && !same && !(product && mt_setup_adopt_findings(s, found + 1)))
        rc = mt_fail(err, MT_ERR_USAGE, -EINVAL, "its GPU or a library of it is another than the first host's, so that results may "
                     "differ in bits: hosts need GPUs of one product and equal libraries");
    mt_str_finish(&own);
    return rc;
}

int mt_cluster_send_state(mt_cluster *c, const struct mt_session *s, const struct mt_train_state *st,
                          struct mt_err *err)
{
    struct mt_str device = {0};
    int rc = describe_device(&device, s->setup, err);
    const struct mt_cluster_command state = {.op = MT_CLUSTER_STATE, .at = device.len + 1,
                                             .data = {st->updates, st->blocks.updates}};
    pthread_mutex_lock(&c->lock);
    if (!rc)
        rc = mt_cluster_tell_all(c, &state, sizeof(state), err);
    if (!rc)
        rc = mt_cluster_tell_all(c, device.p, device.len + 1, err);
    if (!rc)
        rc = pass_planes(c, s, true, err);
    pthread_mutex_unlock(&c->lock);
    mt_str_finish(&device);
    return rc;
}

int mt_cluster_send_reference(mt_cluster *c, const struct mt_train_state *st, struct mt_err *err)
{
    if (!c || !st->reference)
        return 0;
    const struct mt_cluster_command what = {.op = MT_CLUSTER_REFERENCE, .at = st->n_reference};
    pthread_mutex_lock(&c->lock);
    int rc = mt_cluster_tell_all(c, &what, sizeof(what), err);
    if (!rc)
        rc = mt_cluster_tell_all(c, st->reference, st->n_reference * sizeof(*st->reference), err);
    pthread_mutex_unlock(&c->lock);
    return rc;
}

static int take_reference(mt_cluster *c, const struct mt_session *s, uint64_t n, struct mt_err *err)
{
    if (n != mt_reference_count(s->setup->in))
        return mt_fail(err, MT_ERR_RUNTIME, -EPROTO, "host 0 has a reference of %llu answers, and its data here have %zu",
                       (unsigned long long)n, mt_reference_count(s->setup->in));
    free(c->reference);
    c->reference = mt_calloc(n, sizeof(*c->reference));
    if (!c->reference)
        return mt_fail_nomem(err, "log-probabilities of the reference", n * sizeof(*c->reference));
    return mt_net_recv(c->net, 0, c->reference, n * sizeof(*c->reference), err);
}

/* Makes a step or an evaluation with own data of the same place. */
static int act(const mt_cluster *c, struct mt_session *s, const struct mt_cluster_command *what, struct mt_err *err)
{
    const struct mt_inputs *in = s->setup->in;
    bool step = what->op == MT_CLUSTER_STEP;
    mt_sampler *sampler = what->op == MT_CLUSTER_EVAL ? in->eval_sampler : in->sampler;
    struct mt_step_data data;
    struct mt_step_result res = {0};
    struct mt_eval_result eval = {.n_loss = 0};
    int rc = mt_step_data_init(&data, sampler, err);
    if (rc)
        return rc;
    const struct mt_learner_step of = {.data = &data, .lr = what->lr, .reference = c->reference};
    rc = mt_sampler_fill(sampler, what->at, &data, err);
    if (!rc && step && mt_is_doubtful(what->at + 1))
        mt_setup_doubt(s->setup);
    if (!rc)
        rc = step ? mt_engine_step(s->engine, &of, &res, err) : mt_engine_flush(s->engine, err);
    if (!rc && !step)
        rc = mt_engine_eval(s->engine, 0, &data, &eval, err);
    if (!rc && step)
        rc = mt_session_guard(s, err);
    mt_step_data_finish(&data);
    return rc;
}

static int take_state(mt_cluster *c, struct mt_session *s, struct mt_setup *setup, struct mt_err *err)
{
    struct mt_cluster_command what;
    int rc = mt_cluster_next(c, &what, err);
    if (rc || c->over)
        return rc;
    if (what.op != MT_CLUSTER_STATE)
        return mt_cluster_note(c, mt_fail(err, MT_ERR_RUNTIME, -EPROTO, "host 0 is of another build"));
    char *device = mt_calloc(what.at, 1);
    rc = device ? mt_cluster_note(c, mt_net_recv(c->net, 0, device, what.at, err))
                : mt_cluster_note(c, mt_fail_nomem(err, "findings of the devices", what.at));
    if (!rc)
        rc = mt_cluster_note(c, adopt_device(setup, device, err));
    free(device);
    if (!rc)
        rc = pass_planes(c, s, false, err);
    mt_engine_set_updates(s->engine, 0, what.data[0], what.data[1]);
    return rc ? rc : mt_session_start_guard(s, err);
}

int mt_cluster_follow(mt_cluster *c, struct mt_session *s, struct mt_setup *setup, struct mt_train_control *control,
                      struct mt_err *err)
{
    int rc = take_state(c, s, setup, err);
    atomic_store(&control->engine, s->engine);
    atomic_store(&control->begun, true);
    while (!rc && !c->over) {
        struct mt_cluster_command what;
        rc = mt_cluster_next(c, &what, err);
        if (!rc && !c->over)
            rc = mt_cluster_note(c, what.op == MT_CLUSTER_REFERENCE ? take_reference(c, s, what.at, err)
                                                                    : act(c, s, &what, err));
    }
    atomic_store(&control->engine, NULL);
    if (rc) /* the first hears of it, and saves */
        mt_cluster_fail(c, err);
    free(c->reference); /* a message may be on its way to it until the others have heard */
    c->reference = NULL;
    return rc;
}
