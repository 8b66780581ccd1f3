/* SPDX-License-Identifier: Apache-2.0 */
#include "train/cluster_priv.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "base/fs.h"
#include "base/mem.h"
#include "base/strbuf.h"
#include "train/cluster_facts.h"
#include "weights/adapter_keys.h"

enum { BEAT_S = 2, TEXT = 768 };

struct answer {
    int64_t rc, kind;
    char text[TEXT];
};

mt_net *mt_cluster_net(mt_cluster *c)
{
    return c ? c->net : NULL;
}

bool mt_cluster_leads(const mt_cluster *c)
{
    return mt_net_rank(c->net) == 0;
}

int mt_cluster_note(mt_cluster *c, int rc)
{
    c->broken |= rc != 0;
    return rc;
}

/* --- the first ------------------------------------------------------------------------------------------------- */

/* Call under lock. */
int mt_cluster_tell_all(mt_cluster *c, const void *data, size_t bytes, struct mt_err *err)
{
    int rc = c->rc;
    if (rc && err)
        *err = c->why;
    if (!rc && c->broken)
        rc = mt_fail(err, MT_ERR_RUNTIME, -ECONNABORTED, "the other hosts have ended");
    for (int to = 1; to < mt_net_size(c->net) && !rc; to++)
        rc = mt_net_send(c->net, to, data, bytes, err);
    return mt_cluster_note(c, rc);
}

static int command_all(mt_cluster *c, const struct mt_cluster_command *what, struct mt_err *err)
{
    return mt_cluster_tell_all(c, what, sizeof(*what), err);
}

static void *beat(void *arg)
{
    mt_cluster *c = arg;
    const struct mt_cluster_command here = {.op = MT_CLUSTER_BEAT};
    pthread_mutex_lock(&c->lock);
    while (!c->quit) {
        struct timespec t;
        clock_gettime(CLOCK_REALTIME, &t);
        t.tv_sec += BEAT_S;
        pthread_cond_timedwait(&c->quits, &c->lock, &t);
        if (!c->quit && !c->rc && !c->broken)
            c->rc = command_all(c, &here, &c->why);
    }
    pthread_mutex_unlock(&c->lock);
    return NULL;
}

int mt_cluster_open(mt_cluster **out, struct mt_err *err)
{
    mt_net *net = NULL;
    *out = NULL;
    int rc = mt_net_open(&net, err);
    if (rc || !net)
        return rc;
    mt_cluster *c = mt_calloc(1, sizeof(*c));
    if (!c)
        return mt_fail_nomem(err, "the hosts", sizeof(*c));
    c->net = net;
    pthread_mutex_init(&c->lock, NULL);
    pthread_cond_init(&c->quits, NULL);
    if (mt_net_rank(net) == 0)
        c->beating = !pthread_create(&c->beats, NULL, beat, c);
    *out = c;
    return 0;
}

static void stop_beating(mt_cluster *c)
{
    if (!c->beating)
        return;
    pthread_mutex_lock(&c->lock);
    c->quit = true;
    pthread_cond_signal(&c->quits);
    pthread_mutex_unlock(&c->lock);
    pthread_join(c->beats, NULL);
    c->beating = false;
}

/* A host that has failed waits for the first, which may be saving, and ends all of them then. */
static void linger(const mt_cluster *c)
{
    for (double s = 0; s < c->timeout; s++)
        sleep(1);
}

void mt_cluster_close(mt_cluster **cluster, int code)
{
    mt_cluster *c = *cluster;
    if (!c)
        return;
    const struct mt_cluster_command end = {.op = MT_CLUSTER_END, .at = (uint64_t)code};
    stop_beating(c);
    if (mt_cluster_leads(c) && !c->broken)
        command_all(c, &end, NULL);
    if (c->broken && !mt_cluster_leads(c))
        linger(c);
    mt_net_close(&c->net, !c->broken, code);
    free(c->window);
    cJSON_Delete(c->facts);
    pthread_cond_destroy(&c->quits);
    pthread_mutex_destroy(&c->lock);
    free(c);
    *cluster = NULL;
}

static uint64_t hash_of(const mt_dataset *d)
{
    return d ? mt_dataset_hash(d) : 0;
}

static int read_answers(mt_cluster *c, struct mt_err *err)
{
    int rc = 0;
    for (int from = 1; from < mt_net_size(c->net); from++) { /* of all, so that the hosts stay together */
        struct answer a = {.rc = 0};
        struct mt_err why = {0};
        int lost = mt_cluster_note(c, mt_net_recv(c->net, from, &a, sizeof(a), &why));
        a.text[TEXT - 1] = 0;
        if (lost && !rc && err)
            *err = why;
        if (!lost && a.rc && !rc)
            rc = mt_fail(err, (enum mt_err_kind)a.kind, (int)a.rc, "host %d: %s", from, a.text);
        if (lost)
            return rc ?: lost;
    }
    return rc;
}

/* The configuration for hosts that lack what the first alone need have. */
static int print_config(const struct mt_inputs *in, struct mt_str *out, struct mt_err *err)
{
    MT_CLOSED_BY(mt_config_destroy) struct mt_config *copy = NULL;
    int rc = mt_config_copy(&copy, in->cfg, "", err)
          ?: mt_adapters_spell_out(copy, in->resumed.dir, err);
    if (!rc) /* what a reference says of the data, the first has read */
        rc = mt_config_override(copy, "preference.reference", "start", "the reference of the first host", err);
    if (!rc)
        mt_config_print(copy, false, out);
    return out->failed ? mt_fail_nomem(err, "the configuration", out->len) : rc;
}

int mt_cluster_send_config(mt_cluster *c, const struct mt_setup *s, struct mt_err *err)
{
    const struct mt_inputs *in = s->in;
    struct mt_str text = {0};
    MT_FREED char *facts = NULL;
    int rc = print_config(in, &text, err) ?: mt_cluster_print_facts(&facts, s, err);
    if (rc) {
        mt_str_finish(&text);
        return rc;
    }
    c->timeout = in->cfg->cluster.timeout;
    mt_net_set_deadline(c->net, c->timeout);
    const struct mt_cluster_command config = {.op = MT_CLUSTER_CONFIG, .at = text.len, .lr = c->timeout,
                                   .data = {hash_of(in->data), mt_inputs_eval_hash(in), strlen(facts)}};
    pthread_mutex_lock(&c->lock);
    rc = command_all(c, &config, err)
      ?: mt_cluster_tell_all(c, text.p, text.len, err)
      ?: mt_cluster_tell_all(c, facts, strlen(facts), err)
      ?: read_answers(c, err);
    pthread_mutex_unlock(&c->lock);
    mt_str_finish(&text);
    return rc;
}

int mt_cluster_begin(mt_cluster *c, const struct mt_cluster_do *what, struct mt_err *err)
{
    if (!c)
        return 0;
    const struct mt_cluster_command command = {.op = what->act, .at = what->at, .lr = what->lr, .data = {what->set}};
    pthread_mutex_lock(&c->lock);
    int rc = command_all(c, &command, err);
    if (rc)
        pthread_mutex_unlock(&c->lock);
    return rc;
}

void mt_cluster_end(mt_cluster *c, int rc)
{
    if (!c)
        return;
    mt_cluster_note(c, rc);
    if (rc)
        mt_net_tell(c->net, "a step failed on the first host");
    pthread_mutex_unlock(&c->lock);
}

/* --- the others ------------------------------------------------------------------------------------------------ */

/* The next command that is not a sign of life. */
int mt_cluster_next(mt_cluster *c, struct mt_cluster_command *what, struct mt_err *err)
{
    int rc;
    do
        rc = mt_cluster_note(c, mt_net_recv(c->net, 0, what, sizeof(*what), err));
    while (!rc && what->op == MT_CLUSTER_BEAT);
    c->over = !rc && what->op == MT_CLUSTER_END;
    c->code = c->over ? (int)what->at : 0;
    return rc;
}

/* A text of so many bytes; the caller's. */
static int take_text(mt_cluster *c, char **out, uint64_t bytes, struct mt_err *err)
{
    char *text = mt_calloc(bytes + 1, 1);
    int rc = text ? mt_net_recv(c->net, 0, text, bytes, err) : mt_fail_nomem(err, "what host 0 says", bytes);
    *out = text;
    return mt_cluster_note(c, rc);
}

static int load_config(struct mt_config **cfg, const char *text, struct mt_err *err)
{
    int rc = 0, fd = memfd_create("host 0's configuration", 0);
    if (fd < 0 || write(fd, text, strlen(text)) != (ssize_t)strlen(text))
        rc = mt_fail(err, MT_ERR_RUNTIME, -errno, "the configuration: %s", strerror(errno));
    rc = rc ?: mt_config_load(cfg, MT_PATH("/proc/self/fd/%d", fd), NULL, 0, err);
    if (fd >= 0)
        close(fd);
    return rc;
}

int mt_cluster_take_config(mt_cluster *c, struct mt_config **cfg, struct mt_err *err)
{
    struct mt_cluster_command what;
    MT_FREED char *text = NULL, *facts = NULL;
    int rc = mt_cluster_next(c, &what, err);
    if (rc || c->over)
        return rc ?: 1;
    if (what.op != MT_CLUSTER_CONFIG)
        return mt_cluster_note(c, mt_fail(err, MT_ERR_RUNTIME, -EPROTO, "host 0 is of another build"));
    c->timeout = what.lr;
    mt_net_set_deadline(c->net, c->timeout);
    memcpy(c->data, what.data, sizeof(c->data));
    return take_text(c, &text, what.at, err)
        ?: take_text(c, &facts, what.data[2], err)
        ?: mt_cluster_note(c, mt_json_parse(&c->facts, facts, what.data[2], "what host 0 says", MT_ERR_RUNTIME, err))
        ?: mt_cluster_note(c, load_config(cfg, text, err));
}

int mt_cluster_answer(mt_cluster *c, const struct mt_setup *s, const struct mt_inputs *in, int rc,
                      const struct mt_err *why, struct mt_err *err)
{
    struct mt_err differs = {0};
    int other = mt_cluster_compare_facts(c->facts, s, in, &differs); /* may be the reason of what failed */
    if (other) {
        rc = other;
        why = &differs;
    }
    struct answer a = {.rc = rc, .kind = rc ? (int64_t)why->kind : 0};
    if (rc)
        snprintf(a.text, sizeof(a.text), "%s", why->msg);
    else if (hash_of(in->data) != c->data[0] || mt_inputs_eval_hash(in) != c->data[1]) {
        a = (struct answer){-EINVAL, MT_ERR_USAGE, ""};
        snprintf(a.text, sizeof(a.text), "its data are not those of host 0: each host needs the same files");
    }
    struct mt_cluster_command end;
    int sent = mt_cluster_note(c, mt_net_send(c->net, 0, &a, sizeof(a), err));
    if (sent || !a.rc)
        return sent;
    sent = mt_cluster_next(c, &end, err);
    return sent ?: 1;
}

void mt_cluster_fail(mt_cluster *c, const struct mt_err *why)
{
    c->broken = true;
    mt_net_tell(c->net, why->msg);
}

int mt_cluster_code(const mt_cluster *c)
{
    return c->code;
}
