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

int cli_probe_disk(const struct cli_args *args, struct mt_err *err)
{
    struct mt_disk_probe p;
    struct mt_disk_rates r;
    int rc = parse(&p, args, err) ?: mt_disk_measure(&r, &p, err);
    if (rc)
        return rc;
    if (cli_arg(args, "json")) {
        cJSON *o = mt_json_put(NULL, "disk read GB/s=%f, disk write GB/s=%f, disk both GB/s=%f, disk read CPUs=%f",
                               r.read, r.write, r.together, r.cpu_read);
        mt_json_put(o, "disk write CPUs=%f, disk io=%s, disk direct=%d, disk registered buffers=%d", r.cpu_write,
                    r.info.io, r.info.direct, r.info.buffers_registered);
        mt_json_put(o, "disk alignment=%f, disk depth=%f", (double)r.info.align, (double)r.info.depth);
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
