/* SPDX-License-Identifier: Apache-2.0 */
#include "store/io/drive.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include "base/fs.h"
#include "base/mem.h"
#include "store/disk.h"

void mt_drive_name(int fd, char name[MT_DRIVE_NAME])
{
    struct stat st;
    char path[64], line[256];
    snprintf(name, MT_DRIVE_NAME, "unknown drive");
    if (fstat(fd, &st))
        return;
    snprintf(name, MT_DRIVE_NAME, "device %u:%u", major(st.st_dev), minor(st.st_dev));
    snprintf(path, sizeof(path), "/sys/dev/block/%u:%u/uevent", major(st.st_dev), minor(st.st_dev));
    MT_STREAM_CLOSED FILE *u = fopen(path, "re");
    while (u && fgets(line, sizeof(line), u))
        if (!strncmp(line, "DEVNAME=", 8)) {
            line[strcspn(line, "\n")] = 0;
            snprintf(name, MT_DRIVE_NAME, "/dev/%.50s", line + 8);
        }
}

size_t mt_drive_alignment(int fd)
{
    struct statx x = {0};
#ifdef STATX_DIOALIGN
    if (!statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &x) && (x.stx_mask & STATX_DIOALIGN) &&
        x.stx_dio_offset_align)
        return MT_MAX(x.stx_dio_offset_align, x.stx_dio_mem_align);
#endif
    (void)x;
    (void)fd;
    return MT_DISK_ALIGN;
}
