/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <pthread.h>

#include "store/files/direct_file.h"
#include "store/files/file_weights.h"
#include "store/io/job_pool.h"
#include "store/io/transfer.h"

enum { MT_FILE_BUFFER = MT_SUM_BLOCK + 2 * MT_DISK_ALIGN }; /* the aligned bytes around a block */

struct mt_file_source {
    struct mt_direct_file f;
    size_t drive;
};

/** A part, and what is known of its sums. */
struct mt_summed_part {
    struct mt_file_part p;
    size_t bytes; /* of a lane */
    size_t first_sum, n_blocks, n_known; /* of lane l's block b: sum[first_sum + l * n_blocks + b] */
    bool expects[MT_FILE_LANES];         /* by tensor */
    uint64_t expected[MT_FILE_LANES];
};

/* file_block.c */

/** A block of a part that is being read: run by run, each of neighbouring bytes of a file. */
struct mt_file_block {
    mt_file_weights *f;
    struct XXH3_state_s *state[MT_FILE_LANES];
    struct mt_summed_part *p;
    size_t index;
    struct mt_file_target to;
    bool put;          /* its bytes go to `to`; else only the sums are wanted */
    size_t first, end; /* bytes of each lane */
    size_t at;         /* where the next run begins */
    bool inspect, summed; /* summed: sum[0] is that of all its bytes */
    bool changed;      /* its sums are not those of the first read */
    uint64_t sum[MT_FILE_LANES];
    struct mt_file_run {
        size_t piece, before;  /* bytes of a lane in the pieces before that one */
        size_t from, end;      /* bytes of each lane of the piece */
        int file;
        uint64_t offset;       /* the bytes in the file, those of all lanes */
        size_t bytes;          /* at most MT_SUM_BLOCK */
    } run;
};

int mt_file_block_init(struct mt_file_block *b, mt_file_weights *f, struct mt_err *err);
/** Accepts an all-zero struct. */
void mt_file_block_finish(struct mt_file_block *b);
/** to: NULL if only the sums are wanted. */
void mt_file_block_begin(struct mt_file_block *b, struct mt_summed_part *p, size_t index,
                         const struct mt_file_target *to);
/** Sets `run` to the next run; false: there is no more. */
bool mt_file_block_next(struct mt_file_block *b);
/** Sums the run's bytes, and puts them to their place, whatever they are. */
int mt_file_block_take(struct mt_file_block *b, const char *data, struct mt_err *err);
/** Keeps the block's sums, or compares them with those kept. */
int mt_file_block_end(struct mt_file_block *b, struct mt_err *err);

/** Whether the part's block has bytes [first, end) of the plane. */
bool mt_file_block_has(const struct mt_summed_part *p, size_t index, enum mt_plane_kind k, size_t first, size_t end);
uint64_t mt_file_sum_of(const mt_file_weights *f, const struct mt_summed_part *p, int tensor);

/* file_reader.c */

/** A buffer, and the block that is read through it. */
struct mt_file_slot {
    struct mt_job job; /* must be the first member */
    struct mt_transfer x;
    struct mt_file_block b;
    struct mt_file_request *r;
    size_t drive;
    char *buf;         /* [MT_FILE_BUFFER], aligned */
    bool more;         /* the block has another run */
    bool reread;       /* it is read for the second time, since its first sums were wrong */
    int rc;
    struct mt_err err;
    struct mt_file_slot *next; /* of those that are free */
};

struct mt_file_drive {
    dev_t dev;
    struct mt_file_request *first, *last; /* requests with blocks that are not being read yet; under lock */
    struct mt_file_slot *free; /* this and what follows: used only by the thread */
    size_t n_reading, most_reading; /* reads under way */
};

struct mt_file_weights {
    struct mt_file_source *files;
    size_t n_files;
    struct mt_summed_part *parts;
    size_t n_parts;
    struct mt_file_piece *pieces;
    struct mt_file_tensor {
        size_t part;
        int i; /* of the part's tensors */
    } *tensors;
    size_t n_tensors;
    size_t *unit_first; /* [n_units + 1] parts of a unit */
    uint64_t *sum;
    bool *known; /* by first_sum + block: all lanes are read together */
    struct mt_file_weights_params params; /* only its functions and forms */
    struct mt_file_drive drive[MT_FILE_MAX_DRIVES];
    size_t n_drives;

    struct mt_file_slot *slots;
    size_t n_slots, n_busy; /* busy: used only by the thread */
    char *buffers;
    size_t buffer_bytes;
    mt_transfers *transfers;
    mt_job_pool *jobs;
    pthread_t thread;
    bool started;

    pthread_mutex_t lock;
    struct mt_file_weights_stats stats;
    size_t n_under_way;
    int64_t busy_since;
    bool quit;
};

/** Makes the slots, the backend and the threads; mt_file_reader_stop() also after a failure. */
int mt_file_reader_start(mt_file_weights *f, const struct mt_file_weights_params *p, unsigned depth,
                         struct mt_err *err);
/** Returns false if a drive did not answer or the backend failed: then nothing of `f` may be freed. */
bool mt_file_reader_stop(mt_file_weights *f);
/** Reads the blocks that the request wants, and waits. */
int mt_file_reader_run(mt_file_weights *f, struct mt_file_request *r, struct mt_err *err);

static inline uint64_t mt_file_part_bytes(const struct mt_summed_part *p)
{
    return (uint64_t)p->bytes * (uint64_t)p->p.n_lanes;
}
