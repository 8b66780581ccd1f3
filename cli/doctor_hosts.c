/* SPDX-License-Identifier: Apache-2.0 */
/* What a launcher has started: the hosts of a run, whether they fit each other, and whether messages cross. */
#include "doctor_hosts.h"

#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/fs.h"
#include "base/mem.h"
#include "base/sum64.h"
#include "hw/hw.h"
#include "kinds/kinds.h"
#include "net/net.h"
#include "report.h"

/* Of one host, as it is sent. */
struct host {
    char name[CLI_HOST_NAME], version[32], device[256];
    uint64_t build, memory;
    int32_t may, there; /* processors */
};

enum { CHECK_BYTES = 16 << 20 };

/* Of the program's file: equal builds have equal ones. */
static uint64_t build_of_this(void)
{
    struct stat st;
    uint64_t sum = 0;
    MT_FD_CLOSED int fd = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &st) || st.st_size <= 0)
        return 0;
    void *p = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (p != MAP_FAILED) {
        sum = mt_sum64(p, (size_t)st.st_size, 0);
        munmap(p, (size_t)st.st_size);
    }
    return sum;
}

static void describe(struct host *h)
{
    struct mt_device_info gpu;
    struct mt_hw_memory mem;
    int there = 0;
    *h = (struct host){.build = build_of_this()};
    gethostname(h->name, sizeof(h->name) - 1);
    snprintf(h->version, sizeof(h->version), "%s", MT_VERSION);
    mt_device_probe(&gpu, "cuda", 0);
    snprintf(h->device, sizeof(h->device), "%.200s", gpu.present ? gpu.text : "cpu");
    h->may = mt_hw_allowed(&there);
    h->there = there;
    h->memory = mt_hw_memory(&mem, "", NULL) ? 0 : mem.available;
}

/* All hosts, on the first one. */
static int collect(mt_net *net, struct host *all, struct mt_err *err)
{
    int rank = mt_net_rank(net), rc = 0;
    describe(&all[rank]);
    if (rank)
        return mt_net_send(net, 0, &all[rank], sizeof(*all), err);
    for (int i = 1; i < mt_net_size(net) && !rc; i++) {
        rc = mt_net_recv(net, i, &all[i], sizeof(*all), err);
        all[i].name[sizeof(all->name) - 1] = all[i].version[sizeof(all->version) - 1] = 0;
        all[i].device[sizeof(all->device) - 1] = 0;
    }
    return rc;
}

/* Every host sends to every other at once; checksums are the messages' own. */
static int cross(mt_net *net, double *seconds, struct mt_err *err)
{
    const int n = mt_net_size(net), own = mt_net_rank(net);
    MT_FREED struct mt_net_message *m = mt_calloc(2 * (size_t)n, sizeof(*m));
    MT_FREED char *data = mt_calloc((size_t)n + 1, CHECK_BYTES);
    int rc = m && data ? 0 : mt_fail_nomem(err, "messages", ((size_t)n + 1) * CHECK_BYTES);
    int64_t begin = mt_now_ns();
    for (int k = 0; k < 2 * n && !rc; k++) {
        m[k] = (struct mt_net_message){.host = k / 2, .sends = k % 2, .bytes = CHECK_BYTES,
                                       .data = data + (size_t)(k % 2 ? n : k / 2) * CHECK_BYTES};
        if (k / 2 != own)
            mt_net_submit(net, &m[k]);
    }
    for (int k = 0; k < 2 * n && m && data; k++) {
        int one = k / 2 == own ? 0 : mt_net_wait(net, &m[k], rc ? NULL : err);
        rc = rc ?: one;
    }
    *seconds = mt_seconds_since(begin);
    if (rc)
        mt_net_tell(net, err); /* before their data are freed */
    return rc;
}

static void __attribute__((format(printf, 2, 3))) add_finding(cJSON *list, const char *format, ...)
{
    char text[400];
    va_list ap;
    va_start(ap, format);
    vsnprintf(text, sizeof(text), format, ap);
    va_end(ap);
    mt_json_append(list, cJSON_CreateString(text));
}

void cli_find_doubled(cJSON *list, const char *name, size_t stride, int n, const char *so)
{
    for (int i = 0; i < n; i++) {
        const char *own = name + (size_t)i * stride;
        int k = 0;
        while (strcmp(own, name + (size_t)k * stride))
            k++;
        if (k < i)
            add_finding(list, "hosts %d and %d are one machine, %s: %s (mpirun --map-by ppr:1:node, srun "
                        "--ntasks-per-node=1)", k, i, own, so);
    }
}

static void find_faults(cJSON *list, const struct host *h, int n)
{
    cli_find_doubled(list, h->name, sizeof(*h), n, "one process drives all GPUs of a machine, so start one on each");
    for (int i = 0; i < n; i++) {
        if (2 * h[i].may < h[i].there)
            add_finding(list, "host %d " MT_HW_BOUND, i, h[i].may, h[i].there);
        if (i && h[i].build != h[0].build)
            add_finding(list, "host %d has another build of the program than host 0: a run needs equal ones", i);
        if (i && strcmp(h[i].device, h[0].device))
            add_finding(list, "host %d has another device (%s) than host 0 (%s): results may differ in bits", i, h[i].device,
                        h[0].device);
    }
}

static void print(const struct host *h, int n, double seconds, bool json)
{
    cJSON *o = cJSON_CreateObject(), *hosts = cJSON_CreateArray(), *findings = cJSON_CreateArray(), *x;
    char memory[32];
    for (int i = 0; i < n; i++) {
        mt_json_append(hosts, x = cJSON_CreateObject());
        mt_json_put(x, "name=%s, version=%s, device=%s, processors allowed=%f, processors=%f, memory available=%s",
                    h[i].name, h[i].version, h[i].device, (double)h[i].may, (double)h[i].there,
                    mt_format_bytes(memory, sizeof(memory), h[i].memory));
        if (!json)
            printf("host %-3d %s: megatrain %s, %s, %d of %d processors, %s available\n", i, h[i].name, h[i].version, h[i].device,
                   h[i].may, h[i].there, memory);
    }
    find_faults(findings, h, n);
    mt_json_add(o, "hosts", hosts);
    cJSON_AddNumberToObject(o, "seconds of 16 MiB to every other", seconds);
    mt_json_add(o, "findings", findings);
    if (json) {
        cli_print_object(o, true);
        return;
    }
    printf("network  16 MiB from each host to every other, all at once and checked: %.3g s (megatrain probe net measures it)\n",
           seconds);
    cJSON_ArrayForEach(x, findings)
        printf("mind     %s\n", x->valuestring);
    cJSON_Delete(o);
}

int cli_doctor_hosts(mt_net *net, bool json)
{
    const int n = mt_net_size(net), rank = mt_net_rank(net);
    MT_FREED struct host *all = NULL;
    struct mt_err err = {0};
    double seconds = 0;
    int rc = MT_NEW(&all, (size_t)n, "hosts", &err) ?: collect(net, all, &err) ?: cross(net, &seconds, &err);
    if (rc)
        mt_net_tell(net, &err);
    else if (rank == 0)
        print(all, n, seconds, json);
    int code = rc ? cli_fail(&err) : 0;
    mt_net_close(&net, true, code);
    return code;
}
