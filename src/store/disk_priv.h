/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <pthread.h>

#include "store/disk.h"
#include "store/io/drive.h"
#include "store/io/transfer.h"

/** A file of the disk, in one folder. */
struct mt_disk_file {
    int fd;
    bool direct;
    size_t align; /* required by the drive */
    uint64_t bytes;
    char path[4096], drive[MT_DRIVE_NAME];
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

/* disk_open.c */

/** mt_disk_open() with rates as given: NULL only for a single drive. */
int mt_disk_open_rated(struct mt_disk **out, const struct mt_disk_params *p, struct mt_err *err);

/* disk.c */

/** Part of a request: what is transferred at once. */
struct mt_disk_piece {
    struct mt_sum_job job; /* must be the first member */
    struct mt_transfer x;
    struct mt_disk_request *r;
    const struct mt_disk_sums *sums; /* NULL: none */
    uint64_t address; /* on the disk */
    bool reread;
    struct mt_disk_piece *next; /* in the list of free pieces */
};

struct mt_disk_list {
    struct mt_disk_request *first, *last;
};

struct mt_disk {
    struct mt_disk_file *files;
    size_t n_files;
    struct mt_stripe stripe;
    size_t request_bytes;
    unsigned depth;
    mt_transfers *transfers;
    mt_job_pool *sums;
    bool direct, buffers_registered;
    pthread_t thread;
    bool started;

    /* used only by the thread */
    struct mt_disk_list going[2];
    struct mt_disk_piece *pieces, *free_pieces;
    unsigned in_flight[2];
    int64_t busy_since[2];

    pthread_mutex_t lock;
    struct mt_disk_list waiting[2];
    struct mt_disk_stats stats;
    bool quit;
};

/** For mt_transfers_params. */
void mt_disk_transfer_ended(struct mt_transfer *x, void *disk);
/** The thread of a struct mt_disk. It ends after `quit`, once nothing is under way. */
void *mt_disk_main(void *disk);
