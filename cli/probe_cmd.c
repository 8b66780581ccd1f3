/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/json.h"
#include "base/mem.h"
#include "cli.h"
#include "device/ops.h"
#include "hw/hw.h"
#include "hw/homes.h"
#include "hw/probe.h"
#include "kinds/kinds.h"
#include "machine/measure.h"
#include "optim/adam_probe.h"
#include "optim/optimizer.h"
#include "report.h"

/* Finds the device of --device and --index. */
static int find_device(struct mt_measure_params *p, const struct cli_args *args, struct mt_err *err)
{
    const char *kind = cli_arg(args, "device");
    struct mt_device_info gpu;
    kind = kind ? kind : "auto";
    if (strcmp(kind, "auto") && !mt_device_kind(kind))
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "--device must be cpu, cuda or auto, not \"%s\"", kind);
    p->device_index = (int)cli_whole(args, "index", 0);
    p->device_kind = mt_device_choose(kind, p->device_index, &gpu);
    return 0;
}

static int probe_gemm(cJSON *o, const struct mt_measure_params *p, struct mt_err *err)
{
    enum { N = 1024 };
    MT_CLOSED_BY(mt_device_destroy) mt_device *dev = NULL;
    void *buf[3] = {NULL};
    int rc = mt_measure_device(&dev, p, 3 * (size_t)N * N * 4, err);
    for (int i = 0; i < 3 && !rc; i++)
        rc = mt_device_alloc(dev, (size_t)N * N * 4, "probe", &buf[i], err);
    for (int t = 0; t < 2 && !rc; t++) {
        enum mt_dtype dt = t ? MT_BF16 : MT_F32;
        struct mt_gemm g = {.m = N, .n = N, .k = N, .dtype = dt, .d_dtype = dt, .trans_b = true,
                            .a = buf[0], .b = buf[1], .d = buf[2], .lda = N, .ldb = N, .ldd = N};
        int64_t best = INT64_MAX;
        rc = mt_op_zero(dev, &(struct mt_zero){buf[0], (size_t)N * N * 4}, err)
          ?: mt_op_zero(dev, &(struct mt_zero){buf[1], (size_t)N * N * 4}, err);
        for (int r = 0; r < 10 && !rc; r++) {
            mt_device_sync(dev, NULL);
            int64_t t0 = mt_now_ns();
            rc = mt_op_gemm(dev, &g, err);
            mt_device_sync(dev, NULL);
            best = MT_MIN(best, mt_now_ns() - t0);
        }
        cJSON_AddNumberToObject(o, t ? "gemm bf16 GFLOP/s" : "gemm f32 GFLOP/s",
                                2.0 * N * N * N / (double)best);
    }
    return rc;
}

/* Each form of updates; p: with which threads. *adam_ns: of the first, which is mt_adamw. */
static int probe_updates(cJSON *to, const struct mt_adam_probe_params *p, double *adam_ns, struct mt_err *err)
{
    struct mt_adam_probe_params one = *p;
    int rc = 0;
    for (size_t i = 0; mt_update_form_at(i, &one.form) && !rc; i++) {
        char name[MT_OPTIMIZER_NAME];
        double ns = 0;
        mt_update_form_name(&one.form, name);
        rc = mt_probe_adam(&one, &ns, err);
        cJSON_AddNumberToObject(to, name, ns);
        if (!i)
            *adam_ns = ns;
    }
    return rc;
}

static void show_progress(void *ctx, const char *what)
{
    const struct cli *cli = ctx;
    if (!cli->quiet && !cli->no_progress)
        fprintf(stderr, "measuring %s\n", what);
}

/* Measures the whole profile and keeps it for plan, run and bench. */
static int probe_all(struct cli *cli, const struct cli_args *args, const struct mt_numa *numa, struct mt_err *err)
{
    char path[4096];
    struct mt_machine m;
    MT_STR_FREED struct mt_str text = {0};
    MT_FREED int *cpus = NULL;
    int n = 0, rc = mt_hw_cores(&cpus, &n, err);
    int use = (int)cli_whole(args, "threads", n);
    double share = 1;
    struct mt_measure_params p = {.n_threads = use, .cpus = use <= n ? cpus : NULL, .numa = numa,
                                  .disk_dir = cli_arg(args, "dir"), .brief = cli_arg(args, "brief") != NULL,
                                  .small = getenv("MEGATRAIN_PROBE_SMALL") != NULL,
                                  .cores_share = cli_arg(args, "force") || use > n ? NULL : &share,
                                  .least_share = 0.9, /* runs differ by less */
                                  .progress = show_progress, .ctx = cli};
    rc = rc ?: find_device(&p, args, err) ?: mt_measure_machine(&m, &p, err);
    struct mt_err why = *err;
    if (rc == -EBUSY)
        mt_fail(err, MT_ERR_RUNTIME, rc, "%s, so that nothing is kept. End that work, measure with fewer cores (--threads N), or "
                "keep what is measured all the same (--force)", why.msg);
    if (rc)
        return rc;
    mt_machine_cache_path(path, sizeof(path), p.device_kind, p.n_threads);
    rc = mt_machine_write(&m, path, err);
    if (cli_arg(args, "json")) {
        cJSON *o = cJSON_CreateObject();
        cJSON_AddStringToObject(o, "profile", path);
        mt_machine_to_json(&m, o);
        cli_print_object(o, true);
    } else {
        mt_machine_print(&m, &text);
        printf("; %s\n%s", path, text.p ? text.p : "");
    }
    mt_machine_finish(&m);
    return rc;
}

int cli_cmd_probe(struct cli *cli, const struct cli_args *args, struct mt_err *err)
{
    const char *what = args->n_operands ? args->operands[0] : "all";
    bool all = !strcmp(what, "all");
    MT_FREED int *cpus = NULL;
    int n = 0;
    struct mt_numa numa;
    mt_numa_choose(&numa, "auto"); /* as a run does */
    if (all)
        return probe_all(cli, args, &numa, err);
    if (!strcmp(what, "disk"))
        return cli_probe_disk(args, err);
    if (!strcmp(what, "net"))
        return cli_probe_net(args);
    if (strcmp(what, "copy") && strcmp(what, "adam") && strcmp(what, "gemm"))
        return cli_usage("probe: \"%s\" must be all, copy, gemm, adam, disk or net", what);
    cJSON *o = cJSON_CreateObject();
    int rc = mt_hw_cores(&cpus, &n, err);
    double gbs = 0, adam_ns = 0;
    if (!rc && strcmp(what, "gemm"))
        rc = mt_probe_copy(n, cpus, &numa, &gbs, err);
    if (!rc && gbs > 0)
        cJSON_AddNumberToObject(o, "copy GB/s (read + written)", gbs);
    if (!rc && !strcmp(what, "adam")) {
        const struct mt_adam_probe_params adam = {.n_threads = n, .cpus = cpus, .numa = &numa};
        cJSON *forms = cJSON_CreateObject();
        rc = probe_updates(forms, &adam, &adam_ns, err);
        cJSON_AddNumberToObject(o, "adam ns a parameter", adam_ns);
        mt_json_add(o, "ns a parameter", forms);
        cJSON_AddNumberToObject(o, "adam over copy bound",
                                adam_ns / (mt_optimizer_bytes(&mt_adamw, MT_MASTER_F32, MT_BF16) / gbs));
    }
    struct mt_measure_params p = {.n_threads = n, .cpus = cpus};
    if (!rc && !strcmp(what, "gemm"))
        rc = find_device(&p, args, err);
    if (!rc && !strcmp(what, "gemm"))
        rc = probe_gemm(o, &p, err);
    if (rc) {
        cJSON_Delete(o);
        return rc;
    }
    cli_print_object(o, cli_arg(args, "json") != NULL);
    return 0;
}
