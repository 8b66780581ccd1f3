/* SPDX-License-Identifier: Apache-2.0 */
/* Plans of steps that several hosts share. */
#include <errno.h>
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
    return rc || hosts < 2 ? rc : mt_plan_on_hosts(&v->request, v->cfg, 0, err);
}

/* The same step on one of the hosts alone, as it is best placed there; 0: it does not fit. */
static double seconds_alone(const struct plan_view *v)
{
    MT_CLOSED_BY(mt_plan_choice_finish) struct mt_plan_choice c = {0};
    struct mt_plan_request r = v->request;
    r.placement.hosts = 1;
    return mt_resolve(&c, &r, NULL) ? 0 : c.sim.seconds;
}

/* Where the rate of the network is from. */
static const char *net_source(const struct plan_view *v)
{
    return v->request.net.hosts ? "measured by probe net" : v->request.net.gbs > 0 ? "--net" : "assumed, of 10 GbE: --net, or probe net";
}

void plan_print_hosts(const struct plan_view *v)
{
    const int64_t hosts = v->request.placement.hosts;
    const struct mt_sim_result *s = &v->choice.sim;
    char a[32];
    if (hosts < 2)
        return;
    double alone = seconds_alone(v), gbs = v->request.net.gbs > 0 ? v->request.net.gbs : MT_NET_GBS;
    printf("\nHosts      %lld, each with the memory above: %s a step cross the first one's network, at %.3g GB/s (%s)\n",
           (long long)hosts, mt_format_bytes(a, sizeof(a), (uint64_t)s->bytes[MT_SIM_NET]), gbs, net_source(v));
    if (alone > 0)
        printf("           %.3g times as fast as one, which takes %.4g s: %.0f%% of %lld hosts\n", alone / s->seconds, alone,
               100 * alone / s->seconds / (double)hosts, (long long)hosts);
    if (s->busy[MT_SIM_NET] > 0.5 * s->seconds)
        printf("           the network is busy for %.0f%% of the step: the same bytes cross for more tokens a step "
               "(--tokens-per-step)\n", 100 * s->busy[MT_SIM_NET] / s->seconds);
}

void plan_add_hosts(cJSON *o, const struct plan_view *v)
{
    const int64_t hosts = v->request.placement.hosts;
    if (hosts < 2)
        return;
    double alone = seconds_alone(v);
    mt_json_put(o, "hosts=%f, network=%s, step_seconds_of_one_host=%f, efficiency=%f", (double)hosts, net_source(v),
                alone, alone / v->choice.sim.seconds / (double)hosts);
}
