/* SPDX-License-Identifier: Apache-2.0 */
/* Plans of steps that several hosts share. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "machine/network.h"
#include "plan_print.h"

/* Of what a network is named by, TCP leaves so much: measured on 10, 25 and 100 GbE by others. */
static const double USABLE = 0.92;

/* Bytes a second, in GB, of "25Gb/s", "100GbE" or "2.9GB/s". */
static int read_rate(double *gbs, const char *text, struct mt_err *err)
{
    char *end;
    double n = strtod(text, &end);
    bool bits = !strcmp(end, "Gb/s") || !strcmp(end, "Gbit/s") || !strcmp(end, "GbE"), bytes = !strcmp(end, "GB/s");
    if (!(n > 0) || n > 1e6 || (!bits && !bytes))
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "--net %s: no rate: give it as 25Gb/s, 100GbE or 2.9GB/s", text);
    *gbs = bits ? n / 8 * USABLE : n;
    return 0;
}

/* As probe net has measured it, if it has. */
static int take_measured(struct plan_view *v, struct mt_err *err)
{
    char path[4096];
    mt_network_path(path, sizeof(path));
    int rc = mt_network_read(&v->request.net, path, err);
    return rc == -ENOENT ? 0 : rc;
}

int plan_view_share(struct plan_view *v, const struct cli_args *args, struct mt_err *err)
{
    const char *net = cli_arg(args, "net");
    int64_t hosts = cli_whole(args, "hosts", 1);
    if (net && hosts < 2)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "--net is the network between hosts: give --hosts, too");
    v->request.placement.hosts = hosts;
    int rc = net ? read_rate(&v->request.net.gbs, net, err) : hosts > 1 ? take_measured(v, err) : 0;
    if (!rc && hosts > 1 && !v->request.train)
        rc = mt_fail(err, MT_ERR_USAGE, -EINVAL, "--score is a pass of one host: leave --hosts out");
    int planned = 0; /* one that may own most, and has most to do */
    const uint64_t *more = v->request.more, *drives = v->request.drive_room;
    for (int i = 1; i < MT_MAX_LANES; i++)
        planned = more[i] > more[planned] || (more[i] == more[planned] && drives[i] > drives[planned]) ? i : planned;
    return rc || hosts < 2 ? rc : mt_plan_on_hosts(&v->request, v->cfg, planned, err);
}

/* The same step on one of the hosts alone, as it is best placed there; 0: it does not fit. */
static double seconds_alone(const struct plan_view *v)
{
    MT_CLOSED_BY(mt_plan_choice_finish) struct mt_plan_choice c = {0};
    struct mt_plan_request r = v->request;
    r.placement.hosts = 1;
    r.placement.host_budget.bytes = mt_plan_host_limit(&r);
    r.placement.host = 0;
    memset(r.more, 0, sizeof(r.more));
    r.drive_room[0] = v->request.drive_room[v->request.placement.host];
    return mt_resolve(&c, &r, NULL) ? 0 : c.sim.seconds;
}

int plan_compare_hosts(struct plan_view *v, struct mt_err *err)
{
    const struct mt_sim_result *s = &v->choice.sim;
    const int64_t hosts = v->request.placement.hosts;
    if (hosts < 2 || v->unmeasured.code)
        return 0;
    v->alone = seconds_alone(v);
    return !(v->alone > 0 && v->alone < s->seconds)
               ? 0
               : mt_fail(err, MT_ERR_NO_FIT, -ENOSPC, "refused: %lld hosts take %.4g s for a step, and one of them alone %.4g s: their "
                         "network is busy for %.4g s with what crosses, however many tokens a step has: take a larger step "
                         "(--tokens-per-step), fewer hosts, a faster network, or adapters (adapter.kind = lora)",
                         (long long)hosts, s->seconds, v->alone, s->busy[MT_Q_NET]);
}

/* Where the rate of the network is from. */
static const char *net_source(const struct plan_view *v)
{
    return v->request.net.hosts ? "measured by probe net" : v->request.net.gbs > 0 ? "--net" : "assumed, of 10 GbE: --net, or probe net";
}

/* What a host owns of the units, and needs of its memory. */
struct part {
    double share; /* of what is updated */
    double needs, may; /* bytes of host memory; needs 0: not known without rates */
    double disk;       /* bytes on its drives */
};

static void find_part(struct part *out, const struct plan_view *v, int host)
{
    MT_CLOSED_BY(mt_plan_choice_finish) struct mt_plan_choice c = {0};
    const struct mt_program_params *p = &v->choice.engine.program;
    struct mt_plan_request r = mt_plan_request_as(&v->request, &v->choice);
    double all = 0;
    r.placement.host = host;
    *out = (struct part){.may = (double)mt_plan_host_limit(&r)};
    out->needs = mt_plan_evaluate(&c, &r, NULL, NULL) ? 0 : (double)c.host_bytes;
    out->disk = out->needs > 0 ? (double)c.disk_bytes : 0;
    for (size_t u = 0; u < p->n_units; u++) {
        out->share += mt_program_owner(p, u) == host ? (double)p->units[u].update_elems : 0;
        all += (double)p->units[u].update_elems;
    }
    out->share /= MT_MAX(all, 1.0);
}

static void print_parts(const struct plan_view *v)
{
    const struct mt_program_params *of = &v->choice.engine.program;
    char a[32], b[32], d[32];
    for (int i = 0; i < v->request.placement.hosts && of->owned; i++) {
        struct part p;
        find_part(&p, v, i);
        printf("           host %d owns %zu of %zu parts, %.0f%% of what is updated, and needs %s of its %s%s%s\n", i,
               mt_program_n_owned(of, i), of->n_units, 100 * p.share,
               p.needs > 0 ? mt_format_bytes(a, sizeof(a), (uint64_t)p.needs) : "an unknown part",
               mt_format_bytes(b, sizeof(b), (uint64_t)p.may), p.disk > 0 ? ", on drives " : "",
               p.disk > 0 ? mt_format_bytes(d, sizeof(d), (uint64_t)p.disk) : "");
    }
}

void plan_print_hosts(const struct plan_view *v)
{
    const int64_t hosts = v->request.placement.hosts;
    const struct mt_sim_result *s = &v->choice.sim;
    char a[32];
    if (hosts < 2)
        return;
    double alone = v->alone, gbs = v->request.net.gbs > 0 ? v->request.net.gbs : MT_NET_GBS;
    printf("\nHosts      %lld, host %lld with the memory above: %s a step cross its network, at %.3g GB/s (%s)\n",
           (long long)hosts, (long long)v->request.placement.host,
           mt_format_bytes(a, sizeof(a), (uint64_t)s->bytes[MT_Q_NET]), gbs, net_source(v));
    print_parts(v);
    if (alone > 0)
        printf("           %.3g times as fast as one, which takes %.4g s: %.0f%% of %lld hosts\n", alone / s->seconds, alone,
               100 * alone / s->seconds / (double)hosts, (long long)hosts);
    if (s->busy[MT_Q_NET] > 0.5 * s->seconds)
        printf("           the network is busy for %.0f%% of the step: the same bytes cross for more tokens a step "
               "(--tokens-per-step)\n", 100 * s->busy[MT_Q_NET] / s->seconds);
}

void plan_add_hosts(cJSON *o, const struct plan_view *v)
{
    const int64_t hosts = v->request.placement.hosts;
    if (hosts < 2)
        return;
    cJSON *owners = cJSON_AddArrayToObject(o, "owners");
    for (int i = 0; i < hosts && v->choice.engine.program.owned; i++) {
        struct part p;
        find_part(&p, v, i);
        mt_json_append(owners, mt_json_put(NULL, "share=%f, host_bytes=%f, host_budget=%f, disk_bytes=%f", p.share, p.needs, p.may, p.disk));
    }
    mt_json_put(o, "hosts=%f, network=%s, step_seconds_of_one_host=%f, efficiency=%f", (double)hosts, net_source(v),
                v->alone, v->alone / v->choice.sim.seconds / (double)hosts);
}
