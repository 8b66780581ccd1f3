/* SPDX-License-Identifier: Apache-2.0 */
/* The first byte chooses the kind of file and the tokenizer; the rest is the data file. */
#include "data/samples.h"
#include "fuzz.h"

enum { VOCAB = 300 };
static const char *const endings[] = {".jsonl", ".json", ".txt"};

static void put(const char *path, const uint8_t *data, size_t size)
{
    FILE *f = fopen(path, "we");
    fuzz_assert(f && fwrite(data, 1, size, f) == size && !fclose(f));
}

static void check_shard(const char *path, const struct mt_shard_header *h)
{
    struct mt_shard s;
    struct mt_err err = {0};
    uint64_t trained = 0;
    if (mt_shard_open(&s, path, 0, &err))
        fprintf(stderr, "%s\n", err.msg);
    fuzz_assert(s.map);
    bool plain = h->flags & MT_SHARD_PLAIN_TEXT;
    for (uint64_t i = 0; i < s.header->n_samples; i++) {
        uint64_t at = s.offsets[i], n = s.offsets[i + 1] - at;
        fuzz_assert(n >= 2 && n <= h->max_len);
        fuzz_assert(plain || mt_shard_count_trained(&s, at + 1, n - 1) > 0);
        trained += mt_shard_count_trained(&s, at + 1, n - 1);
        for (uint64_t k = at; k < at + n; k++)
            fuzz_assert(s.tokens[k] < VOCAB);
    }
    fuzz_assert(trained == h->n_trained);
    mt_shard_close(&s);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static char path[3][64], shard[64];
    if (!size)
        return 0;
    uint8_t mode = data[0];
    int kind = mode % 3;
    if (!shard[0]) {
        for (int i = 0; i < 3; i++)
            snprintf(path[i], sizeof(path[i]), "/dev/shm/mt-fuzz-%d%s", (int)getpid(), endings[i]);
        snprintf(shard, sizeof(shard), "/dev/shm/mt-fuzz-%d.tokens", (int)getpid());
        mt_log_set_sink(fuzz_quiet);
    }
    put(path[kind], data + 1, size - 1);
    struct mt_shard_writer w;
    struct mt_err err = {0};
    fuzz_assert(!mt_shard_writer_open(&w, shard, &err));
    struct mt_sample_reader r = {.bytes = !(mode & 64), .vocab = VOCAB, .out = &w,
                                 .header = {.vocab = VOCAB, .source_hash = 1}};
    int rc = mt_samples_read_file(&r, path[kind], &err);
    fuzz_assert(!rc || (err.msg[0] && err.code == rc));
    if (!rc) {
        fuzz_assert(!mt_shard_writer_commit(&w, &r.header, &err));
        check_shard(shard, &r.header);
    }
    mt_samples_finish(&r);
    mt_shard_writer_finish(&w);
    unlink(path[kind]);
    unlink(shard);
    return 0;
}
