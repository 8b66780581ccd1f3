/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>

enum { MT_DRIVE_NAME = 64 };

/** The block device under an open file, as the kernel calls it ("/dev/nvme0n1p1"); else "device 0:35". */
void mt_drive_name(int fd, char name[MT_DRIVE_NAME]);
/** The alignment that direct I/O on the file needs; if the kernel does not say, one that every drive accepts. */
size_t mt_drive_alignment(int fd);
