/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reading weights in place against reading as the probe of a drive does: the same file, as many blocks under way, in
 * turns, so that what else the drive does meets both. The goal is 95%.
 *
 *   bench_files [DIR [MIB]]      a folder on the drive (.), the size of the file (1024)
 */
#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bench.h"

#include "base/clock.h"
#include "base/mem.h"
#include "base/philox.h"
#include "store/disk.h"
#include "store/files/file_weights.h"
#include "store/io/waiter.h"

enum { PAIRS = 9, SPAN = 64 << 20, SHIFT = 1000 /* parts begin anywhere in a file */ };

struct bench {
    mt_disk *disk;
    mt_file_weights *files;
    size_t bytes;
    char *memory;
};

static void through_disk(struct bench *b, bool write)
{
    for (size_t at = 0; at < b->bytes;) {
        struct mt_disk_request r = {.write = write};
        for (; at < b->bytes && r.n_spans < MT_DISK_MAX_SPANS; at += SPAN)
            r.span[r.n_spans++] = (struct mt_disk_span){.offset = at, .buf = b->memory + at, .bytes = SPAN};
        RUN(mt_disk_run, b->disk, &r);
    }
}

static void ended(struct mt_file_request *r)
{
    mt_waiter_end(r->ctx);
}

static void through_files(struct bench *b)
{
    struct mt_waiter w = mt_waiter_for(1);
    struct mt_file_request r = {.plane = {[MT_PLANE_IN_FILE] = b->memory}, .done = ended, .ctx = &w};
    mt_file_weights_submit(b->files, &r);
    mt_waiter_wait(&w);
    bench_must(r.rc, &r.err);
}

static void open_files(struct bench *b, const char *dir)
{
    char pattern[4096];
    glob_t g;
    size_t n = b->bytes / SPAN;
    struct mt_file_part *parts = mt_calloc(n, sizeof(*parts));
    MT_FREED struct mt_file_piece *pieces = mt_calloc(n, sizeof(*pieces));
    snprintf(pattern, sizeof(pattern), "%.4000s/megatrain-scratch-%d-*", dir, (int)getpid());
    if (!parts || !pieces || glob(pattern, 0, NULL, &g) || g.gl_pathc != 1) {
        fprintf(stderr, "bench_files: no %s\n", pattern);
        exit(1);
    }
    for (size_t i = 0; i < n; i++) {
        pieces[i] = (struct mt_file_piece){.offset = i * SPAN + SHIFT, .bytes = SPAN - SHIFT, .at = {i * SPAN}};
        parts[i] = (struct mt_file_part){.plane = MT_PLANE_IN_FILE, .piece = &pieces[i], .n_pieces = 1, .n_lanes = 1,
                                         .n_tensors = 1, .tensor = {"bench"}, .name = "bench"};
    }
    RUN(mt_file_weights_open, &b->files,
        &(struct mt_file_weights_params){.n_units = 1, .paths = (const char *const *)g.gl_pathv, .n_paths = 1,
                                         .parts = parts, .n_parts = n});
    globfree(&g);
    free(parts);
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv)
{
    const char *dir = argc > 1 ? argv[1] : ".";
    struct bench b = {.bytes = mt_align_up((size_t)(argc > 2 ? atoi(argv[2]) : 1024) << 20, SPAN)};
    double share[PAIRS], disk[PAIRS], files[PAIRS];
    void *memory = NULL;
    RUN(mt_host_alloc, &memory, b.bytes, "bench");
    b.memory = memory;
    for (size_t i = 0; i + 4 <= b.bytes / 4; i += 4)
        memcpy(b.memory + 4 * i, mt_philox(1, 2, i).v, 16);
    RUN(mt_disk_open, &b.disk, &(struct mt_disk_params){.dirs = &dir, .n_dirs = 1, .bytes = b.bytes,
                                                        .depth = MT_FILE_DEPTH});
    through_disk(&b, true);
    open_files(&b, dir);
    size_t drives;
    bool direct = mt_file_weights_direct(b.files, &drives);
    through_files(&b); /* makes the sums */
    for (int i = 0; i < PAIRS; i++) {
        int64_t t0 = mt_now_ns();
        through_disk(&b, false);
        int64_t t1 = mt_now_ns();
        through_files(&b);
        int64_t t2 = mt_now_ns();
        disk[i] = (double)b.bytes / (double)(t1 - t0);
        files[i] = (double)b.bytes / (double)(t2 - t1);
        share[i] = files[i] / disk[i];
    }
    qsort(share, PAIRS, sizeof(*share), by_value);
    qsort(disk, PAIRS, sizeof(*disk), by_value);
    qsort(files, PAIRS, sizeof(*files), by_value);
    printf("reading %zu MiB %s, medians of %d pairs: probe %.2f GB/s, in place %.2f GB/s: %.1f%% (%.1f to %.1f; goal 95%%)\n",
           b.bytes >> 20, direct ? "past the page cache" : "through the page cache", PAIRS, disk[PAIRS / 2],
           files[PAIRS / 2], 100 * share[PAIRS / 2], 100 * share[PAIRS / 4], 100 * share[PAIRS - 1 - PAIRS / 4]);
    mt_file_weights_close(&b.files);
    mt_disk_close(&b.disk);
    mt_host_free(b.memory, b.bytes);
    return 0;
}
