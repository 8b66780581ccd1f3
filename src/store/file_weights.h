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
 * Frozen weights that are read in place, from the user's own files. Files are opened to be read, and nothing is
 * written anywhere. What lies there as it does in a plane is a part; a plane that lives in files is its parts, and
 * nothing of it is in host memory but what is being read.
 *
 * Blocks of MT_SUM_BLOCK bytes are read past the page cache (O_DIRECT) where the file system allows it: the aligned
 * bytes around a block into a buffer, and from there to where they belong. On the way each block is summed. The first
 * pass makes the sums, every later one is held against them; a block that has changed ends the request with -EBADMSG
 * and names file and tensor.
 *
 * Each drive has threads of its own, so that files on several drives are read at once.
 *
 * Thread-safety: requests from any thread; the rest from one, and no request under way.
 */
typedef struct mt_file_weights mt_file_weights;

enum { MT_FILE_MAX_DRIVES = 8, MT_FILE_DEPTH = 32 };

/** Bytes of a plane that lie together in a file. */
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
    /** Looks at a block when it is first read: bytes [at, at + n) of the part. NULL: nothing to look at. */
    int (*inspect)(const struct mt_file_part *p, const char *path, size_t at, const void *data, size_t n,
                   struct mt_err *err);
};
int mt_file_weights_open(mt_file_weights **out, const struct mt_file_weights_params *p, struct mt_err *err);
/** Accepts NULL. Nothing may be under way. */
void mt_file_weights_close(mt_file_weights **f);
/** Host memory of `depth` (0: as above) blocks being read. */
size_t mt_file_weights_bytes(unsigned depth);

/** All parts of some planes of a unit. Owned by the caller, who leaves it unchanged until done() is called. */
struct mt_file_request {
    size_t unit;
    char *plane[MT_N_PLANES]; /* where each plane's first byte goes; NULL: not wanted */
    /** Called once, on a thread of its own; may submit, must not wait. */
    void (*done)(struct mt_file_request *r);
    void *ctx;
    int rc;            /* 0 or a negative errno, and why */
    struct mt_err err;
    /* the module's own */
    struct mt_file_request *next[MT_FILE_MAX_DRIVES];
    struct {
        size_t part, block;
    } cursor[MT_FILE_MAX_DRIVES];
    size_t left; /* blocks */
};
void mt_file_weights_submit(mt_file_weights *f, struct mt_file_request *r);
/** Bytes that a request is for. */
uint64_t mt_file_weights_wanted(const mt_file_weights *f, const struct mt_file_request *r);
/** Bytes [first, first + n) of a plane, read and checked block by block. */
int mt_file_weights_read(mt_file_weights *f, size_t unit, enum mt_plane_kind k, size_t first, size_t n, void *dst,
                         struct mt_err *err);

size_t mt_file_weights_n_parts(const mt_file_weights *f);
const struct mt_file_part *mt_file_weights_part(const mt_file_weights *f, size_t i, const char **path);
/** Sum of a part (mt_tensor_sum()); reads the blocks that no pass has read yet. */
int mt_file_weights_sum(mt_file_weights *f, size_t i, uint64_t *sum, struct mt_err *err);
/** What the sum of a part has to be: -EBADMSG of the read that completes it where it is not. */
void mt_file_weights_expect(mt_file_weights *f, size_t i, uint64_t sum);

struct mt_file_weights_stats {
    uint64_t bytes;   /* of parts, read so far */
    int64_t busy_ns;  /* with at least one request under way */
};
void mt_file_weights_stats(mt_file_weights *f, struct mt_file_weights_stats *out);
/** Are all files read past the page cache? *n_drives: on so many drives. */
bool mt_file_weights_direct(const mt_file_weights *f, size_t *n_drives);

#endif
