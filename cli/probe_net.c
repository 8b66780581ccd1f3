/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The network between hosts, as a run uses it: checked messages. Each pair of hosts by itself, one way and both ways at
 * once; then all hosts together, each to the next, as they are in backward. The others follow the first in the same
 * order of pairs, and send it what they have measured.
 */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/json.h"
#include "base/mem.h"
#include "base/sort.h"
#include "cli.h"
#include "doctor_hosts.h"
#include "hw/hw.h"
#include "machine/network.h"
#include "net/net.h"
#include "report.h"

enum { TRIPS = 200, BYTES = 32 << 20, AT_ONCE = 4 };

struct probe {
    mt_net *net;
    char *out, *in; /* AT_ONCE messages of BYTES */
    int rank, size;
};

struct found {
    double us, gbs, both_gbs;
};

/* Half of the median round trip of 8 bytes. */
static int time_trips(const struct probe *p, int other, bool first, double *us, struct mt_err *err)
{
    double took[TRIPS] = {0};
    uint64_t word = 0;
    int rc = 0;
    for (int i = 0; i < TRIPS && !rc; i++) {
        int64_t begin = mt_now_ns();
        for (int turn = 0; turn < 2 && !rc; turn++)
            rc = (turn == 0) == first ? mt_net_send(p->net, other, &word, sizeof(word), err)
                                      : mt_net_recv(p->net, other, &word, sizeof(word), err);
        took[i] = (double)(mt_now_ns() - begin) * 1e-3 / 2;
    }
    mt_sort_doubles(took, TRIPS);
    *us = took[TRIPS / 2];
    return rc;
}

/* GB/s of each direction that is used, until the last byte has arrived. */
static int time_bytes(const struct probe *p, int to, int from, double *gbs, struct mt_err *err)
{
    struct mt_net_message m[2][AT_ONCE];
    int64_t begin = mt_now_ns();
    int rc = 0;
    for (int i = 0; i < AT_ONCE; i++)
        for (int sends = 0; sends < 2; sends++) {
            m[sends][i] = (struct mt_net_message){.host = sends ? to : from, .sends = sends, .bytes = BYTES,
                                                  .data = (sends ? p->out : p->in) + (size_t)i * BYTES};
            if (m[sends][i].host >= 0)
                mt_net_submit(p->net, &m[sends][i]);
        }
    for (int i = 0; i < AT_ONCE; i++)
        for (int sends = 0; sends < 2; sends++)
            if (m[sends][i].host >= 0) {
                int one = mt_net_wait(p->net, &m[sends][i], rc ? NULL : err);
                rc = rc ? rc : one;
            }
    *gbs = (double)AT_ONCE * BYTES / (double)(mt_now_ns() - begin);
    return rc;
}

/* A host has nothing to do before all have come here. */
static int meet(const struct probe *p, struct mt_err *err)
{
    char word = 0;
    int rc = 0;
    for (int turn = 0; turn < 2; turn++)
        for (int host = 1; host < p->size && !rc; host++)
            if (p->rank == 0 || p->rank == host)
                rc = (p->rank == 0) == (turn == 1) ? mt_net_send(p->net, p->rank ? 0 : host, &word, 1, err)
                                                   : mt_net_recv(p->net, p->rank ? 0 : host, &word, 1, err);
    return rc;
}

/* Hosts a and b; *f is known to a. */
static int probe_pair(const struct probe *p, int a, int b, struct found *f, struct mt_err *err)
{
    const bool first = p->rank == a;
    const int other = first ? b : a;
    return time_trips(p, other, first, &f->us, err)
        ?: time_bytes(p, first ? other : -1, first ? -1 : other, &f->gbs, err)
        ?: time_bytes(p, other, other, &f->both_gbs, err);
}

/* Of all pairs, for the first host: *worst is the slowest of each. */
static int probe_pairs(const struct probe *p, cJSON *list, struct found *worst, struct mt_err *err)
{
    int rc = 0;
    for (int a = 0; a < p->size; a++)
        for (int b = a + 1; b < p->size && !rc; b++) {
            struct found f = {0, 0, 0};
            rc = meet(p, err);
            if (!rc && (p->rank == a || p->rank == b))
                rc = probe_pair(p, a, b, &f, err);
            if (!rc && a && p->rank == a)
                rc = mt_net_send(p->net, 0, &f, sizeof(f), err);
            if (p->rank || rc)
                continue;
            rc = a ? mt_net_recv(p->net, a, &f, sizeof(f), err) : 0;
            cJSON *o = cJSON_CreateObject();
            char name[64];
            snprintf(name, sizeof(name), "%d and %d", a, b);
            mt_json_put(o, "hosts=%s, us=%f, GB/s one way=%f, GB/s each of both ways=%f", name, f.us, f.gbs,
                        f.both_gbs);
            mt_json_append(list, o);
            *worst = (struct found){MT_MAX(worst->us, f.us), worst->gbs > 0 ? MT_MIN(worst->gbs, f.gbs) : f.gbs, 0};
        }
    return rc;
}

/* All at once, each to the next; *gbs: of the slowest, for the first host, and *cores that it takes there. */
static int probe_ring(const struct probe *p, double *gbs, double *cores, struct mt_err *err)
{
    double own = 0;
    int rc = meet(p, err);
    double before = mt_hw_busy_seconds();
    int64_t begin = mt_now_ns();
    rc = rc ?: time_bytes(p, (p->rank + 1) % p->size, (p->rank + p->size - 1) % p->size, &own, err);
    *cores = before > 0 ? (mt_hw_busy_seconds() - before) / mt_seconds_since(begin) : 0;
    *gbs = own;
    if (!rc && p->rank)
        return mt_net_send(p->net, 0, &own, sizeof(own), err);
    for (int host = 1; host < p->size && !rc; host++) {
        double other = 0;
        rc = mt_net_recv(p->net, host, &other, sizeof(other), err);
        *gbs = MT_MIN(*gbs, other);
    }
    return rc;
}

static int measure(const struct probe *p, cJSON *o, struct mt_network *out, struct mt_err *err)
{
    struct found worst = {0, 0, 0};
    cJSON *pairs = cJSON_CreateArray();
    int rc = probe_pairs(p, pairs, &worst, err) ?: probe_ring(p, &out->gbs, &out->cores, err);
    out->us = worst.us;
    out->hosts = p->size;
    mt_json_put(o, "hosts=%f, us of the slowest pair=%f, GB/s one way of the slowest pair=%f", (double)p->size, worst.us,
                worst.gbs);
    cJSON_AddNumberToObject(o, "GB/s each way, all hosts at once", out->gbs);
    cJSON_AddNumberToObject(o, "cores that this takes", out->cores);
    mt_json_add(o, "pairs", pairs);
    return rc;
}

/* Names of all hosts to the first, which adds what it finds: processes of one machine have no network between them. */
static int look_at_names(const struct probe *p, cJSON *o, struct mt_err *err)
{
    char own[CLI_HOST_NAME] = "";
    MT_FREED char (*all)[CLI_HOST_NAME] = NULL;
    gethostname(own, sizeof(own) - 1);
    if (p->rank)
        return mt_net_send(p->net, 0, own, sizeof(own), err);
    int rc = MT_NEW(&all, (size_t)p->size, "names of hosts", err);
    for (int i = 1; i < p->size && !rc; i++) {
        rc = mt_net_recv(p->net, i, all[i], CLI_HOST_NAME, err);
        all[i][CLI_HOST_NAME - 1] = 0;
    }
    if (!rc) {
        cJSON *findings = cJSON_CreateArray();
        memcpy(all[0], own, sizeof(own));
        cli_find_doubled(findings, all[0], CLI_HOST_NAME, p->size, "what is measured between them is no network, so start one on each");
        mt_json_add(o, "findings", findings);
    }
    return rc;
}

/* Prints and keeps it, on the first host; deletes o. */
static int conclude(cJSON *o, const struct mt_network *n, bool json, struct mt_err *err)
{
    char path[4096];
    mt_network_path(path, sizeof(path));
    int rc = mt_network_write(n, path, err);
    if (!rc)
        cJSON_AddStringToObject(o, "kept, for plan --hosts alone, in", path);
    if (json) {
        cli_print_object(o, true);
        return rc;
    }
    const cJSON *pair;
    cJSON_ArrayForEach(pair, mt_json_get(o, "pairs"))
        printf("hosts %s: %.0f us, %.3g GB/s one way, %.3g GB/s each of both ways\n", mt_json_get(pair, "hosts")->valuestring,
               mt_json_get(pair, "us")->valuedouble, mt_json_get(pair, "GB/s one way")->valuedouble,
               mt_json_get(pair, "GB/s each of both ways")->valuedouble);
    MT_JSON_FREED cJSON *findings = cJSON_DetachItemFromObjectCaseSensitive(o, "findings");
    cJSON_DeleteItemFromObjectCaseSensitive(o, "pairs");
    cli_print_object(o, false);
    cJSON_ArrayForEach(pair, findings)
        printf("mind: %s\n", pair->valuestring);
    return rc;
}

int cli_probe_net(const struct cli_args *args)
{
    struct mt_err err = {0};
    struct mt_network found = {0};
    struct probe p = {.net = NULL};
    MT_FREED char *out = NULL, *in = NULL;
    cJSON *o = cJSON_CreateObject();
    int rc = mt_net_open(&p.net, &err);
    if (!rc && !p.net)
        rc = mt_fail(&err, MT_ERR_USAGE, -EINVAL, "probe net measures between hosts: start it by a launcher, as in "
                     "mpirun --map-by ppr:1:node --bind-to none megatrain probe net");
    rc = rc ?: MT_NEW(&out, (size_t)AT_ONCE * BYTES, "messages", &err)
            ?: MT_NEW(&in, (size_t)AT_ONCE * BYTES, "messages", &err);
    if (!rc)
        p = (struct probe){p.net, out, in, mt_net_rank(p.net), mt_net_size(p.net)};
    rc = rc ?: measure(&p, o, &found, &err) ?: look_at_names(&p, o, &err);
    if (rc && p.net)
        mt_net_tell(p.net, &err);
    if (rc || p.rank)
        cJSON_Delete(o);
    else
        rc = conclude(o, &found, cli_arg(args, "json") != NULL, &err);
    int code = rc ? cli_fail(&err) : 0;
    mt_net_close(&p.net, true, code);
    return code;
}
