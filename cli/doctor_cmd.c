/* SPDX-License-Identifier: Apache-2.0 */
#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/mem.h"
#include "cli.h"
#include "data/helper.h"
#include "doctor_hosts.h"
#include "hw/ecc.h"
#include "hw/hw.h"
#include "hw/probe.h"
#include "kinds/kinds.h"
#include "report.h"

static void add_bytes(cJSON *o, const char *name, uint64_t bytes)
{
    char buf[32];
    cJSON_AddStringToObject(o, name,
                            bytes == UINT64_MAX ? "no limit" : mt_format_bytes(buf, sizeof(buf), bytes));
}

/* Adds the GPU's name and memory, and which attention it would use; or why there is none. */
static void add_gpu(cJSON *o, const struct mt_device_info *gpu)
{
    struct mt_err err;
    MT_CLOSED_BY(mt_device_destroy) mt_device *dev = NULL;
    struct mt_device_params p = {.kind = "cuda", .n_threads = 1, .budget_bytes = 64 << 20};
    if (!gpu->present) {
        cJSON_AddStringToObject(o, "device cuda", gpu->text);
        return;
    }
    bool ok = !mt_device_create(&dev, &p, &err);
    mt_json_put(o, "device cuda=%s, GPU=%s", ok ? mt_device_limits(dev)->name : err.msg, gpu->text);
    add_bytes(o, "GPU memory", gpu->total_bytes);
    add_bytes(o, "GPU memory free", gpu->free_bytes);
}

/* Can this Python import the modules? */
static bool can_import(const char *python, const char *modules)
{
    char code[128];
    snprintf(code, sizeof(code), "import %s", modules);
    char *const args[] = {(char *)python, "-I", "-c", code, NULL};
    posix_spawn_file_actions_t quiet;
    pid_t pid = -1;
    int status = -1;
    posix_spawn_file_actions_init(&quiet);
    posix_spawn_file_actions_addopen(&quiet, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
    if (!posix_spawnp(&pid, python, &quiet, NULL, args, environ))
        waitpid(pid, &status, 0);
    posix_spawn_file_actions_destroy(&quiet);
    return !status;
}

/* The Python that reads text, chat templates and columnar files, and whether it can. */
static void add_data_helper(cJSON *o)
{
    MT_FREED char *python = mt_helper_python();
    cJSON_AddStringToObject(o, "data helper's Python", python ? python : "the helper is not found");
    if (python) {
        bool all = can_import(python, "tokenizers, jinja2, pyarrow, numpy");
        cJSON_AddStringToObject(o, "its packages", all ? "complete" : "missing: megatrain setup-data (or scripts/setup --data)");
        cJSON_AddStringToObject(o, "tekken.json, tiktoken.model", can_import(python, "tiktoken") ? "are read, by tiktoken"
                                : "not read: pip install tiktoken regex into that Python");
    }
}

/* Whether memory has ECC, as far as the kernel says, and which errors it had. */
static void add_ecc(cJSON *o)
{
    struct mt_ecc ecc;
    char text[96] = "not reported: memory may have none, or the kernel no driver (EDAC)";
    mt_hw_ecc(&ecc, "");
    if (ecc.known)
        snprintf(text, sizeof(text), "yes; %llu errors corrected, %llu not", (unsigned long long)ecc.corrected,
                 (unsigned long long)ecc.uncorrected);
    cJSON_AddStringToObject(o, "memory has ECC", text);
}

int cli_cmd_doctor(struct cli *, const struct cli_args *args, struct mt_err *err)
{
    struct mt_hw_memory mem;
    MT_FREED int *cpus = NULL;
    int n = 0;
    MT_CLOSED_BY(mt_device_destroy) mt_device *dev = NULL;
    mt_net *net = NULL;
    struct mt_err apart = {0}; /* why this is looked at alone, though a launcher has started several */
    bool joined = !mt_net_open(&net, &apart);
    if (net)
        return cli_doctor_hosts(net, cli_arg(args, "json") != NULL);
    int rc = mt_hw_memory(&mem, "", err)
          ?: mt_hw_cores(&cpus, &n, err)
          ?: mt_device_create(&dev, &(struct mt_device_params){.kind = "cpu", .n_threads = n,
                                                               .budget_bytes = 1 << 20}, err);
    if (rc)
        return rc;
    cJSON *o = cJSON_CreateObject();
    struct mt_device_info gpu;
    mt_device_probe(&gpu, "cuda", 0);
    cJSON_AddStringToObject(o, "version", MT_VERSION);
    if (!joined)
        cJSON_AddStringToObject(o, "hosts", apart.msg);
    cJSON_AddStringToObject(o, "device cpu", mt_device_limits(dev)->name);
    add_gpu(o, &gpu);
    mt_json_put(o, "cores allowed=%f, adam=%s", (double)n, mt_isa_name(mt_isa_best()));
    add_bytes(o, "memory", mem.total);
    add_bytes(o, "memory available", mem.available);
    add_bytes(o, "memory left by cgroup", mem.cgroup_free);
    add_bytes(o, "memory that may be locked", mem.memlock);
    add_ecc(o);
    cJSON_AddStringToObject(o, "io_uring", mt_hw_io_uring_allowed() ? "allowed" : "not allowed");
    add_data_helper(o);
    cli_print_object(o, cli_arg(args, "json") != NULL);
    return 0;
}
