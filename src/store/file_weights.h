/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_STORE_FILE_WEIGHTS_H
#define MT_STORE_FILE_WEIGHTS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "store/block_sum.h"
#include "store/planes.h"

/**
 * Frozen weights that are read in place from the user's own files. Files are opened read-only, and nothing is written
 * anywhere. A part is a range of bytes that is the same in a file and in a plane; a plane in files consists of parts,
 * and host memory has only the blocks being read.
 *
 * Blocks of MT_SUM_BLOCK bytes are read, bypassing the page cache (O_DIRECT) if the file system allows it: the aligned
 * bytes around a block to a buffer, where the block is summed, and from there to their destination. Later reads of a
 * block are compared with its first sum; if it has changed, the request ends with -EBADMSG and names file and tensor.
 *
 * Each drive has its own threads, so that files on several drives are read at once.
 *
 * Thread-safety: requests from any thread; everything else from one thread, with no request under way.
 */
typedef struct mt_file_weights mt_file_weights;

enum { MT_FILE_MAX_DRIVES = 8, MT_FILE_DEPTH = 32 };

/** Bytes of a plane that are contiguous in a file. */
struct mt_file_part {
    size_t unit;
    enum mt_plane_kind plane;
    size_t at, bytes;  /* of the plane: bytes [at, at + bytes) */
    int file;          /* index into paths */
    uint64_t offset;   /* of its first byte in the file */
    const char *name;  /* of the tensor; borrowed */
};

struct mt_file_weights_params {
    size_t n_units;
    const char *const *paths; /* copied */
    size_t n_paths;
    const struct mt_file_part *parts; /* [n_parts] by unit; copied */
    size_t n_parts;
    unsigned depth;  /* blocks being read at a time; 0: MT_FILE_DEPTH */
    bool buffered;   /* through the page cache even where O_DIRECT works */
    /** Checks the values of a block when it is first read: bytes [at, at + n) of the part. NULL: no check. */
    int (*inspect)(const struct mt_file_part *p, const char *path, size_t at, const void *data, size_t n,
                   struct mt_err *err);
};
int mt_file_weights_open(mt_file_weights **out, const struct mt_file_weights_params *p, struct mt_err *err);
/** Accepts NULL. Nothing may be under way. */
void mt_file_weights_close(mt_file_weights **f);
/** Host memory of the buffers for `depth` (0: MT_FILE_DEPTH) blocks being read. */
size_t mt_file_weights_bytes(unsigned depth);

/** All parts of some planes of a unit. The caller owns it and must not change it until done() is called. */
struct mt_file_request {
    size_t unit;
    char *plane[MT_N_PLANES]; /* destination of each plane's first byte; NULL: not needed */
    /** Called once, on a thread of the module; may submit, must not wait. */
    void (*done)(struct mt_file_request *r);
    void *ctx;
    int rc;            /* 0 or a negative errno; err says why */
    struct mt_err err;
    /* used by the module */
    struct mt_file_request *next[MT_FILE_MAX_DRIVES];
    struct {
        size_t part, block;
    } cursor[MT_FILE_MAX_DRIVES];
    size_t left; /* blocks not yet done */
};
void mt_file_weights_submit(mt_file_weights *f, struct mt_file_request *r);
/** Number of bytes that a request reads. */
uint64_t mt_file_weights_wanted(const mt_file_weights *f, const struct mt_file_request *r);
/** Reads and checks bytes [first, first + n) of a plane, block by block. */
int mt_file_weights_read(mt_file_weights *f, size_t unit, enum mt_plane_kind k, size_t first, size_t n, void *dst,
                         struct mt_err *err);

size_t mt_file_weights_n_parts(const mt_file_weights *f);
const struct mt_file_part *mt_file_weights_part(const mt_file_weights *f, size_t i, const char **path);
/** Sum of a part (mt_tensor_sum()); reads the blocks that have not been read yet. */
int mt_file_weights_sum(mt_file_weights *f, size_t i, uint64_t *sum, struct mt_err *err);
/** Sets the expected sum of a part. If it differs, the read of its last unread block fails with -EBADMSG. */
void mt_file_weights_expect(mt_file_weights *f, size_t i, uint64_t sum);

struct mt_file_weights_stats {
    uint64_t bytes;   /* read so far */
    int64_t busy_ns;  /* with at least one request under way */
};
void mt_file_weights_stats(mt_file_weights *f, struct mt_file_weights_stats *out);
/** Whether all files are read with O_DIRECT; *n_drives: on how many drives they are. */
bool mt_file_weights_direct(const mt_file_weights *f, size_t *n_drives);

#endif
