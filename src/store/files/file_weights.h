/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/block_sum.h"
#include "base/err.h"
#include "store/files/file_target.h"
#include "store/io/io.h"
#include "store/planes.h"

/**
 * Frozen weights that are read in place from the user's own files. Files are opened read-only, and nothing is written
 * anywhere. A part is what is read together: the bytes of a tensor, or of two that lie between each other in the files.
 * They go to planes as they are, or through place(), which converts and reorders them. Planes in files consist of
 * parts, and host memory has only the blocks being read.
 *
 * A part's pieces, end to end, are read in blocks of MT_SUM_BLOCK bytes, bypassing the page cache (O_DIRECT) if the file
 * system allows it: the aligned bytes around a run of them to a buffer, where they are summed, and from there to their
 * destination. Later reads of a block are compared with its first sum; if it has changed, it is read once more, and if
 * it is still wrong, the request ends with -EBADMSG and names file and tensor. Reads are continued, retried and
 * given up like those of the disk (transfer.h).
 *
 * Each drive has its own share of the buffers, so that files on several drives are read at once.
 *
 * Thread-safety: requests from any thread; everything else from one thread, with no request under way.
 */
typedef struct mt_file_weights mt_file_weights;

enum { MT_FILE_MAX_DRIVES = 8, MT_FILE_DEPTH = 32, MT_FILE_LANES = 2 };

/** A contiguous run of bytes in a file. With two lanes its rows alternate between them, as those of two interleaved
 * tensors do. */
struct mt_file_piece {
    int file;             /* index into paths; -1: the bytes are those of `offset` itself, and not part of any sum */
    uint64_t offset;      /* of its first byte in the file */
    size_t bytes;         /* of each lane */
    size_t row;           /* bytes of a row, at most half a block; 0: there is one lane */
    size_t at[MT_FILE_LANES]; /* in the plane, where each lane's bytes go; not used by parts that place() handles */
};

struct mt_file_part {
    size_t unit;
    enum mt_plane_kind plane;    /* it is read if this plane is needed */
    const struct mt_file_piece *piece; /* [n_pieces], one of a file first; copied */
    size_t n_pieces;
    int n_lanes;                 /* each has its own sum */
    int n_tensors;               /* lanes, or with one lane all tensors that it has */
    const char *tensor[MT_FILE_LANES]; /* their names; borrowed */
    const char *name;            /* for messages; borrowed */
    const void *form;            /* for inspect() and place(); borrowed */
    bool placed;                 /* it goes through place(), and has one lane and one piece. Then also: */
    enum mt_plane_kind low;      /* another plane that gets of it, or MT_NO_PLANE */
    size_t at, bytes;            /* where all of it goes, in each plane */
    size_t elem;                 /* bytes of an element in the file, two in a plane, in the plane's order; 0: in another */
};

struct mt_file_weights_params {
    size_t n_units;
    const char *const *paths; /* copied */
    size_t n_paths;
    const struct mt_file_part *parts; /* [n_parts] by unit; copied */
    size_t n_parts;
    void *forms;     /* freed when closed; may be NULL */
    unsigned depth;  /* blocks being read at a time; 0: MT_FILE_DEPTH */
    bool buffered;   /* through the page cache even where O_DIRECT works */
    enum mt_io_kind io;
    double deadline_s; /* for a drive to answer; 0: MT_TRANSFER_DEADLINE_S (transfer.h) */
    const struct mt_io_fault *fault; /* for tests; NULL: none */
    /** Checks the values of bytes that are first read: bytes [at, at + n) of a lane of a piece. NULL: no check. */
    int (*inspect)(const struct mt_file_part *p, size_t piece, const char *path, size_t at, const void *data, size_t n,
                   struct mt_err *err);
    /** Puts bytes [at, at + n) of a part that is `placed` to its planes. Called by several threads at once. */
    void (*place)(const struct mt_file_part *p, size_t at, const void *data, size_t n, const struct mt_file_target *to);
};
int mt_file_weights_open(mt_file_weights **out, const struct mt_file_weights_params *p, struct mt_err *err);
/** Accepts NULL. Nothing may be under way. If a drive did not answer or the backend failed, late reads are possible:
 * the module's memory and the descriptors are then kept until the process exits. */
void mt_file_weights_close(mt_file_weights **f);
/** Host memory of the buffers for `depth` (0: MT_FILE_DEPTH) blocks being read. */
size_t mt_file_weights_bytes(unsigned depth);

/** All parts of some planes of a unit. The caller owns it and must not change it until done() is called. */
struct mt_file_request {
    size_t unit;
    char *plane[MT_N_PLANES]; /* destination of each plane's first byte; NULL: not needed */
    /** Called once, on the module's thread, or in mt_file_weights_submit() if nothing is wanted; may submit, must not
     * wait. */
    void (*done)(struct mt_file_request *r);
    void *ctx;
    int rc;            /* 0 or a negative errno; err says why */
    struct mt_err err;
    /* used by the module */
    struct mt_file_request *next[MT_FILE_MAX_DRIVES];
    struct {
        size_t part, block;
    } cursor[MT_FILE_MAX_DRIVES];
    size_t left;        /* blocks not yet done */
    enum mt_plane_kind of; /* only what has bytes [first, end) of this plane; end 0: all */
    size_t first, end;
    bool sum_only;      /* only what has not been read yet of a part, for its sum */
    size_t part;
};
void mt_file_weights_submit(mt_file_weights *f, struct mt_file_request *r);
/** Number of bytes that a request reads. */
uint64_t mt_file_weights_wanted(const mt_file_weights *f, const struct mt_file_request *r);
/** Reads and checks bytes [first, first + n) of a plane, block by block. */
int mt_file_weights_read(mt_file_weights *f, size_t unit, enum mt_plane_kind k, size_t first, size_t n, void *dst,
                         struct mt_err *err);

/** Bytes of all parts in the files. */
uint64_t mt_file_weights_total(const mt_file_weights *f);
/** All tensors of all parts, in order. */
size_t mt_file_weights_n_tensors(const mt_file_weights *f);
const char *mt_file_weights_tensor(const mt_file_weights *f, size_t i);
/** Sum of a tensor's lane (mt_tensor_sum()); reads the blocks that have not been read yet. */
int mt_file_weights_sum(mt_file_weights *f, size_t i, uint64_t *sum, struct mt_err *err);
/** Sets the expected sum of a tensor. If it differs, the read of its last unread block fails with -EBADMSG. */
void mt_file_weights_expect(mt_file_weights *f, size_t i, uint64_t sum);

struct mt_file_weights_stats {
    uint64_t bytes;   /* read so far */
    int64_t busy_ns;  /* with at least one request under way */
    uint64_t n_reread; /* blocks whose sums were wrong at first */
};
void mt_file_weights_stats(mt_file_weights *f, struct mt_file_weights_stats *out);
/** Whether all files are read with O_DIRECT; *n_drives: on how many drives they are. */
bool mt_file_weights_direct(const mt_file_weights *f, size_t *n_drives);
