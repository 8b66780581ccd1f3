/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "base/fs.h"
#include "base/json.h"
#include "base/mem.h"
#include "base/strbuf.h"
#include "hw/hw.h"
#include "train/cluster_priv.h"
#include "train/setup.h"
#include "weights/adapter_keys.h"

/* What hosts that share a run have to have in common, beside data and weights: the version of the program, the model's
 * config.json, the GPU, and how a CPU computes; and the checkpoint that the first host resumes from. */

/* A row: what a host says of itself, and what to do if another says something else. */
static const struct {
    const char *name, *what, *mend;
} compared[] = {
    {"version", "its version of megatrain", "install the same on all hosts"},
    {"model", "in its config.json of the model", "each host needs the same files"},
    {"product", "its GPU", "results would differ in bits: hosts need GPUs of one product"},
    {"arithmetic", "what its CPU computes products by", "results would differ in bits: hosts need CPUs with the same instructions and "
                                                        "the same oneDNN, and the same MEGATRAIN_CPU_GEMM"},
};

/* Keys of config.json that say only where it comes from. */
static bool is_of_origin(const char *key)
{
    return !strcmp(key, "_name_or_path") || !strcmp(key, "transformers_version");
}

/* Of this host, as far as inputs and setup are open. */
static int describe(cJSON **out, const struct mt_setup *s, const struct mt_inputs *in, struct mt_err *err)
{
    cJSON *model = NULL, *o;
    int rc = in->model_dir ? mt_json_read_file(&model, MT_PATH("%s/config.json", in->model_dir), MT_ERR_INPUT, err) : 0;
    if (rc)
        return rc;
    mt_json_begin();
    o = cJSON_CreateObject();
    cJSON_AddStringToObject(o, compared[0].name, MT_VERSION);
    mt_json_add(o, compared[1].name, model ? model : cJSON_CreateNull());
    if (s->dev[0]) {
        const struct mt_device_limits *l = mt_device_limits(s->dev[0]);
        cJSON_AddStringToObject(o, compared[2].name, l->product);
        cJSON_AddStringToObject(o, compared[3].name, l->arithmetic[s->request.numerics.dtype == MT_BF16]);
    }
    *out = o;
    return o && mt_json_complete() ? 0 : mt_fail_nomem(err, "what the hosts have in common", 1);
}

/* What this host plans with, and all others have to. */
static void add_limits(cJSON *o, const struct mt_setup *s)
{
    const struct mt_plan_request *r = &s->request;
    cJSON *more = cJSON_CreateArray(), *drives = cJSON_CreateArray();
    for (int i = 0; i < r->placement.hosts; i++) {
        mt_json_append(more, cJSON_CreateNumber((double)r->more[i]));
        mt_json_append(drives, cJSON_CreateNumber((double)r->drive_room[i]));
    }
    mt_json_add(o, "more", more);
    mt_json_add(o, "drives", drives);
    mt_json_put(o, "host=%f, device=%f, process=%f", (double)r->placement.host_budget.bytes,
                (double)r->placement.device_budget.bytes, (double)r->process);
}

/* Frozen tensors that the first host has unpacked, by what it has trained before in files of its own. */
static void add_unpacked(cJSON *facts, const struct mt_inputs *in)
{
    cJSON *o = in->resumed.overlay ? cJSON_AddObjectToObject(facts, "unpacked") : NULL;
    for (const struct mt_tensor *t = in->layout->tensors; o && t < in->layout->tensors + in->layout->n_tensors; t++)
        if (!t->trainable && !t->packed)
            cJSON_AddTrueToObject(o, t->name);
}

/* Of this host, as JSON; *out is the caller's. */
static int mt_cluster_print_facts(char **out, const struct mt_setup *s, struct mt_err *err)
{
    MT_JSON_FREED cJSON *o = NULL;
    int rc = describe(&o, s, s->in, err);
    const struct mt_resumed *r = &s->in->resumed;
    if (!rc && r->from_files)
        mt_json_add(o, "from_files", cJSON_Duplicate(r->from_files, true));
    if (!rc) {
        mt_json_put(o, "rounds=%f, phase=%f, step=%f, rows=%f, rows_per_epoch=%f", (double)r->rounds, (double)r->phase,
                    (double)r->step, (double)r->rows, (double)r->rows_per_epoch);
        add_limits(o, s);
        add_unpacked(o, s->in);
    }
    *out = rc ? NULL : mt_json_print(o, false);
    return rc ? rc : *out ? 0 : mt_fail_nomem(err, "what the hosts have in common", 1);
}

static uint64_t number(const cJSON *o, const char *name)
{
    const cJSON *v = mt_json_get(o, name);
    return cJSON_IsNumber(v) && v->valuedouble >= 0 ? (uint64_t)v->valuedouble : 0;
}

/* Bytes free in folders, one a line, on all their drives; at least 1. */
static uint64_t free_in(char *folders)
{
    uint64_t sum = 1, n;
    const char *drive[MT_MAX_LANES];
    int n_drives = 0;
    for (char *rest, *dir = strtok_r(folders, "\n", &rest); dir && n_drives < MT_MAX_LANES; dir = strtok_r(NULL, "\n", &rest)) {
        bool seen = false;
        for (int i = 0; i < n_drives; i++)
            seen |= mt_hw_same_file_system(drive[i], dir);
        sum += seen || mt_hw_disk_free(dir, &n, NULL) ? 0 : n;
        drive[n_drives++] = dir;
    }
    return sum;
}

/* Of all hosts, this one first. */
static int ask_for_drives(mt_cluster *c, uint64_t *room, const struct mt_cfg_list *dirs, struct mt_err *err)
{
    MT_STR_FREED struct mt_str text = {0};
    for (int i = 0; i < dirs->n; i++)
        mt_str_printf(&text, "%s\n", dirs->items[i]);
    if (!dirs->n || text.failed)
        return text.failed ? mt_fail_nomem(err, "the folders of drives", text.len) : 0;
    const struct mt_cluster_command what = {.op = MT_CLUSTER_DRIVES, .at = text.len};
    MT_LOCKED(&c->lock);
    int rc = mt_cluster_tell_all(c, &what, sizeof(what), err) ?: mt_cluster_tell_all(c, text.p, text.len, err);
    for (int from = 1; from < MT_MIN(mt_net_size(c->net), MT_MAX_LANES) && !rc; from++)
        rc = mt_cluster_note(c, mt_net_recv(c->net, from, &room[from], sizeof(*room), err));
    room[0] = free_in(text.p);
    return rc;
}

int mt_cluster_set_limits(mt_cluster *c, struct mt_plan_limits *limits, const struct mt_config *cfg, struct mt_err *err)
{
    if (!c || !mt_cluster_leads(c))
        return 0;
    limits->n_hosts = mt_net_size(c->net);
    memcpy(limits->each, c->memory, sizeof(limits->each));
    return ask_for_drives(c, limits->drive_room, &cfg->memory.nvme_paths, err);
}

void mt_cluster_take_limits(const mt_cluster *c, struct mt_plan_request *r)
{
    if (!c || mt_cluster_leads(c))
        return;
    const cJSON *of = cJSON_GetObjectItem(c->facts, "more"), *drives = cJSON_GetObjectItem(c->facts, "drives");
    r->placement.host_budget.bytes = number(c->facts, "host");
    r->placement.device_budget.bytes = number(c->facts, "device");
    r->process = number(c->facts, "process");
    for (int i = 0; i < MT_MIN(MT_MIN(cJSON_GetArraySize(of), cJSON_GetArraySize(drives)), MT_MAX_LANES); i++) {
        r->more[i] = (uint64_t)cJSON_GetArrayItem(of, i)->valuedouble;
        r->drive_room[i] = (uint64_t)cJSON_GetArrayItem(drives, i)->valuedouble;
    }
}

struct mt_resumed mt_cluster_resumed(const mt_cluster *c)
{
    return (struct mt_resumed){.from_files = mt_json_get(c->facts, "from_files"),
                               .rounds = number(c->facts, "rounds"),
                               .unpacked = mt_json_get(c->facts, "unpacked"),
                               .phase = number(c->facts, "phase"),
                               .step = number(c->facts, "step"),
                               .rows = number(c->facts, "rows"),
                               .rows_per_epoch = number(c->facts, "rows_per_epoch")};
}

/* Where two values differ, "rope_scaling.factor", and what they are there. */
struct difference {
    char key[256];
    const cJSON *own, *first;
};

static bool differs(struct difference *d, const char *key, const cJSON *own, const cJSON *first)
{
    char path[sizeof(d->key)];
    *d = (struct difference){.own = own, .first = first};
    snprintf(d->key, sizeof(d->key), "%s", key);
    if (!cJSON_IsObject(own) || !cJSON_IsObject(first))
        return !cJSON_Compare(own, first, true);
    for (int pass = 0; pass < 2; pass++) /* keys of either */
        for (const cJSON *v = pass ? own->child : first->child; v; v = v->next) {
            snprintf(path, sizeof(path), "%.120s%s%.120s", key, *key ? "." : "", v->string);
            bool also = *key || !is_of_origin(v->string);
            if (also && differs(d, path, mt_json_get(own, v->string), mt_json_get(first, v->string)))
                return true;
        }
    return false;
}

static void print_value(char *buf, size_t len, const cJSON *v)
{
    char *text = v ? cJSON_PrintUnformatted(v) : NULL;
    snprintf(buf, len, "%.60s", text ? text : "nothing");
    cJSON_free(text);
}

/* Names the first thing in which this host is not what the first has printed, as far as it has opened inputs and
 * setup: -EINVAL (MT_ERR_USAGE). */
static int mt_cluster_compare_facts(const cJSON *first, const struct mt_setup *s, const struct mt_inputs *in,
                                    struct mt_err *err)
{
    MT_JSON_FREED cJSON *own = NULL;
    int rc = describe(&own, s, in, err);
    for (size_t i = 0; i < MT_ARRAY_LEN(compared) && !rc; i++) {
        struct difference d;
        char a[64], b[64];
        const cJSON *mine = mt_json_get(own, compared[i].name);
        if (!mine || cJSON_IsNull(mine) || !differs(&d, "", mine, mt_json_get(first, compared[i].name)))
            continue;
        print_value(a, sizeof(a), d.own);
        print_value(b, sizeof(b), d.first);
        rc = mt_fail(err, MT_ERR_USAGE, -EINVAL, "%s%s%s is %s, host 0's %s: %s", compared[i].what, *d.key ? " " : "", d.key, a, b,
                     compared[i].mend);
    }
    return rc;
}

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

int mt_cluster_ready(mt_cluster *c, struct mt_err *err)
{
    int rc = c->rc;
    if (rc && err)
        *err = c->why;
    if (!rc && c->broken)
        rc = mt_fail(err, MT_ERR_RUNTIME, -ECONNABORTED, "the other hosts have ended");
    return rc;
}

int mt_cluster_tell_all(mt_cluster *c, const void *data, size_t bytes, struct mt_err *err)
{
    int rc = mt_cluster_ready(c, err);
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
    MT_LOCKED(&c->lock);
    while (!c->quit) {
        struct timespec t;
        clock_gettime(CLOCK_REALTIME, &t);
        t.tv_sec += BEAT_S;
        pthread_cond_timedwait(&c->quits, &c->lock, &t);
        if (!c->quit && !c->rc && !c->broken)
            c->rc = command_all(c, &here, &c->why);
    }
    return NULL;
}

/* The first hears what memory the others may use. */
static int hear_memory(mt_cluster *c, struct mt_err *err)
{
    struct mt_hw_memory hw;
    int rc = 0, rank = mt_net_rank(c->net), n = MT_MIN(mt_net_size(c->net), MT_MAX_LANES);
    uint64_t own = mt_hw_memory(&hw, "", NULL) ? 0 : mt_hw_memory_usable(&hw);
    for (int from = 1; from < n && !rank && !rc; from++)
        rc = mt_net_recv(c->net, from, &c->memory[from], sizeof(own), err);
    return rank && rank < n ? mt_net_send(c->net, 0, &own, sizeof(own), err) : rc;
}

int mt_cluster_open(mt_cluster **out, struct mt_err *err)
{
    mt_net *net = NULL;
    mt_cluster *c = NULL;
    *out = NULL;
    int rc = mt_net_open(&net, err) ?: net ? MT_NEW(&c, 1, "the hosts", err) : 0;
    if (rc || !net)
        return rc;
    c->net = net;
    rc = mt_cluster_note(c, hear_memory(c, err));
    pthread_mutex_init(&c->lock, NULL);
    pthread_cond_init(&c->quits, NULL);
    if (mt_net_rank(net) == 0)
        c->beating = !pthread_create(&c->beats, NULL, beat, c);
    *out = c;
    return rc;
}

static void stop_beating(mt_cluster *c)
{
    if (!c->beating)
        return;
    mt_raise(&c->lock, &c->quits, &c->quit);
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
            rc = mt_fail(err, mt_net_err_kind(a.kind), (int)a.rc, "host %d: %s", from, a.text);
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
    MT_STR_FREED struct mt_str text = {0};
    MT_FREED char *facts = NULL;
    int rc = print_config(in, &text, err) ?: mt_cluster_print_facts(&facts, s, err);
    if (rc)
        return rc;
    c->timeout = in->cfg->cluster.timeout;
    mt_net_set_deadline(c->net, c->timeout);
    const struct mt_cluster_command config = {.op = MT_CLUSTER_CONFIG, .at = text.len, .lr = c->timeout,
                                   .data = {mt_dataset_hash(in->data), mt_inputs_eval_hash(in), strlen(facts)}};
    MT_LOCKED(&c->lock);
    return command_all(c, &config, err)
        ?: mt_cluster_tell_all(c, text.p, text.len, err)
        ?: mt_cluster_tell_all(c, facts, strlen(facts), err)
        ?: read_answers(c, err);
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

void mt_cluster_end(mt_cluster *c, int rc, const struct mt_err *err)
{
    if (!c)
        return;
    static const struct mt_err unknown = {.kind = MT_ERR_RUNTIME, .msg = "a step failed on the first host"};
    mt_cluster_note(c, rc);
    if (rc)
        mt_net_tell(c->net, err ? err : &unknown);
    pthread_mutex_unlock(&c->lock);
}

/* --- the others ------------------------------------------------------------------------------------------------ */

/* A text of so many bytes; the caller's. */
static int take_text(mt_cluster *c, char **out, uint64_t bytes, struct mt_err *err)
{
    char *text = mt_calloc(bytes + 1, 1);
    int rc = text ? mt_net_recv(c->net, 0, text, bytes, err) : mt_fail_nomem(err, "what host 0 says", bytes);
    *out = text;
    return mt_cluster_note(c, rc);
}

static int tell_drives(mt_cluster *c, uint64_t bytes, struct mt_err *err)
{
    MT_FREED char *folders = NULL;
    int rc = take_text(c, &folders, bytes, err);
    const uint64_t room = rc ? 0 : free_in(folders);
    return rc ?: mt_cluster_note(c, mt_net_send(c->net, 0, &room, sizeof(room), err));
}

/* The next command that is no sign of life and no such question. The first may be waiting for another host, which it
 * would name. */
int mt_cluster_next(mt_cluster *c, struct mt_cluster_command *what, struct mt_err *err)
{
    int rc;
    if (c->timeout > 0)
        mt_net_set_deadline(c->net, 2 * c->timeout);
    do
        rc = mt_cluster_note(c, mt_net_recv(c->net, 0, what, sizeof(*what), err));
    while (!rc && (what->op == MT_CLUSTER_BEAT ||
                   (what->op == MT_CLUSTER_DRIVES && !(rc = tell_drives(c, what->at, err)))));
    if (c->timeout > 0)
        mt_net_set_deadline(c->net, c->timeout);
    c->over = !rc && what->op == MT_CLUSTER_END;
    c->code = c->over ? (int)what->at : 0;
    return rc;
}

static int load_config(struct mt_config **cfg, const char *text, struct mt_err *err)
{
    MT_FD_CLOSED int fd = memfd_create("host 0's configuration", 0);
    int rc = 0;
    if (fd < 0 || write(fd, text, strlen(text)) != (ssize_t)strlen(text))
        rc = mt_fail(err, MT_ERR_RUNTIME, -errno, "the configuration: %s", strerror(errno));
    return rc ?: mt_config_load(cfg, MT_PATH("/proc/self/fd/%d", fd), NULL, 0, err);
}

int mt_cluster_take_config(mt_cluster *c, struct mt_config **cfg, struct mt_err *err)
{
    struct mt_cluster_command what = c->phase;
    MT_FREED char *text = NULL, *facts = NULL;
    int rc = what.op ? 0 : mt_cluster_next(c, &what, err);
    if (rc || c->over)
        return rc ?: 1;
    if (what.op != MT_CLUSTER_CONFIG)
        return mt_cluster_note(c, mt_fail(err, MT_ERR_RUNTIME, -EPROTO, "host 0 is of another build"));
    c->phase.op = 0;
    cJSON_Delete(c->facts);
    c->facts = NULL;
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
    else if (mt_dataset_hash(in->data) != c->data[0] || mt_inputs_eval_hash(in) != c->data[1]) {
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
    mt_net_tell(c->net, why);
}

int mt_cluster_code(const mt_cluster *c)
{
    return c->code;
}
