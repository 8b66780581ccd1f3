/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <string.h>

#include "base/fs.h"
#include "base/json.h"
#include "cli.h"
#include "report.h"
#include "store/disk.h"

static int parse(struct mt_disk_probe *p, const struct cli_args *args, struct mt_err *err)
{
    const char *io = cli_arg(args, "io");
    *p = (struct mt_disk_probe){.dir = args->n_operands > 1 ? args->operands[1] : ".",
                                .bytes = cli_size(args, "size", 0),
                                .request_bytes = (size_t)cli_size(args, "request", 0),
                                .depth = (unsigned)cli_whole(args, "depth", 0),
                                .seconds = cli_real(args, "seconds", 3),
                                .both = true};
    if (io && strcmp(io, "io_uring") && strcmp(io, "threads"))
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "--io must be io_uring or threads, not \"%s\"", io);
    p->io = !io ? MT_IO_AUTO : !strcmp(io, "threads") ? MT_IO_THREADS : MT_IO_URING;
    if (p->request_bytes % MT_DISK_ALIGN)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "--request must be a multiple of %d bytes", MT_DISK_ALIGN);
    if (!mt_is_dir(p->dir))
        return mt_fail(err, MT_ERR_USAGE, -ENOTDIR, "probe disk: %s is not a folder", p->dir);
    return 0;
}

int cli_probe_disk(struct cli *, const struct cli_args *args)
{
    struct mt_disk_probe p;
    struct mt_disk_rates r;
    struct mt_err err;
    int rc = parse(&p, args, &err) ?: mt_disk_measure(&r, &p, &err);
    if (rc)
        return cli_fail(&err);
    if (cli_arg(args, "json")) {
        cJSON *o = cJSON_CreateObject();
        cJSON_AddNumberToObject(o, "disk read GB/s", r.read);
        cJSON_AddNumberToObject(o, "disk write GB/s", r.write);
        cJSON_AddNumberToObject(o, "disk both GB/s", r.together);
        cJSON_AddNumberToObject(o, "disk read CPUs", r.cpu_read);
        cJSON_AddNumberToObject(o, "disk write CPUs", r.cpu_write);
        cJSON_AddStringToObject(o, "disk io", r.info.io);
        cJSON_AddBoolToObject(o, "disk direct", r.info.direct);
        cJSON_AddBoolToObject(o, "disk registered buffers", r.info.buffers_registered);
        cJSON_AddNumberToObject(o, "disk alignment", (double)r.info.align);
        cJSON_AddNumberToObject(o, "disk depth", r.info.depth);
        return cli_print_object(o, true);
    }
    printf("%s: %s, %s, %s buffers, alignment %zu, depth %u\n", p.dir, r.info.io,
           r.info.direct ? "direct" : "through the page cache",
           r.info.buffers_registered ? "registered" : "plain", r.info.align, r.info.depth);
    printf("read   %6.2f GB/s  %.2f CPUs\n", r.read, r.cpu_read);
    printf("write  %6.2f GB/s  %.2f CPUs\n", r.write, r.cpu_write);
    printf("both   %6.2f GB/s  together\n", r.together);
    return 0;
}
