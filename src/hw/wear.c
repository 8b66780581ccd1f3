/* SPDX-License-Identifier: Apache-2.0 */
#include "hw/wear.h"
#include "base/fs.h"

#include <fcntl.h>
#include <libgen.h>
#include <limits.h>
#include <linux/nvme_ioctl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

enum { PAGE = 512, DATA_UNIT = 512000, GET_LOG_PAGE = 0x02, SMART = 0x02 };

void mt_hw_wear_parse(struct mt_hw_wear *out, const uint8_t page[PAGE])
{
    uint64_t units = 0;
    for (int i = 7; i >= 0; i--) /* the upper half of its 128 bits is always zero in practice */
        units = units << 8 | page[48 + i];
    out->percent_used = page[5];
    out->written_bytes = units > UINT64_MAX / DATA_UNIT ? UINT64_MAX : units * DATA_UNIT;
    out->rated_bytes =
        out->percent_used ? (uint64_t)((double)out->written_bytes * 100 / out->percent_used) : 0;
}

/* Name of the whole drive whose file system or partition holds the path. */
static bool find_drive(const char *path, char *name, size_t len)
{
    struct stat st;
    char link[64], real[PATH_MAX], part[PATH_MAX + 16];
    if (stat(path, &st))
        return false;
    snprintf(link, sizeof(link), "/sys/dev/block/%u:%u", major(st.st_dev), minor(st.st_dev));
    if (!realpath(link, real))
        return false;
    snprintf(part, sizeof(part), "%s/partition", real);
    const char *base = basename(!access(part, F_OK) ? dirname(real) : real);
    snprintf(name, len, "/dev/%.48s", base);
    return !strncmp(base, "nvme", 4);
}

bool mt_hw_wear(struct mt_hw_wear *out, const char *path)
{
    struct mt_hw_wear w = {.percent_used = 0};
    uint8_t page[PAGE] = {0};
    if (!find_drive(path, w.drive, sizeof(w.drive)))
        return false;
    MT_FD_CLOSED int fd = open(w.drive, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    struct nvme_admin_cmd cmd = {
        .opcode = GET_LOG_PAGE,
        .nsid = 0xffffffff,
        .addr = (uint64_t)(uintptr_t)page,
        .data_len = PAGE,
        .cdw10 = SMART | (PAGE / 4 - 1) << 16,
    };
    if (ioctl(fd, NVME_IOCTL_ADMIN_CMD, &cmd))
        return false;
    mt_hw_wear_parse(&w, page);
    *out = w;
    return true;
}
