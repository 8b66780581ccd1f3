/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_STORE_DISK_PRIV_H
#define MT_STORE_DISK_PRIV_H

#include "store/disk.h"

/** A file of the disk, in one folder. */
struct mt_disk_file {
    int fd;
    bool direct;
    size_t align; /* required by the drive */
    uint64_t bytes;
    char path[4096], drive[64];
};

/* disk_file.c */

/** Removes files that killed runs left. */
void mt_disk_remove_stale(const char *dir);
/** Makes the file, locks it and reserves its space. On failure there is no file. */
int mt_disk_file_open(struct mt_disk_file *f, const char *dir, size_t index, uint64_t bytes,
                      bool buffered, struct mt_err *err);
void mt_disk_file_close(struct mt_disk_file *f);

/* disk_stripe.c */

enum { MT_STRIPE_SLOTS = 64 };

/**
 * Which drive has which chunk: a repeated pattern of slots, in which each drive's share is in proportion to its rate.
 */
struct mt_stripe {
    size_t chunk, n_dirs, n_slots;
    uint8_t dir[MT_STRIPE_SLOTS];  /* of each slot */
    uint8_t rank[MT_STRIPE_SLOTS]; /* slots of the same drive before it */
    uint8_t *per_dir;              /* [n_dirs] slots in a pattern */
};
int mt_stripe_init(struct mt_stripe *s, size_t n_dirs, size_t chunk, const double *rates,
                   struct mt_err *err);
void mt_stripe_finish(struct mt_stripe *s);
/** Bytes of the file of drive `dir` for an address space of `bytes`. */
uint64_t mt_stripe_file_bytes(const struct mt_stripe *s, size_t dir, uint64_t bytes);
/** Drive and file offset of `offset`; returns the number of bytes from there that are contiguous in the file. */
uint64_t mt_stripe_find(const struct mt_stripe *s, uint64_t offset, size_t *dir,
                        uint64_t *file_offset);

#endif
