/* SPDX-License-Identifier: Apache-2.0 */
/* The first byte chooses kind of file, tokenizer and rule; the rest is the data file. */
#include "data/samples.h"
#include "fuzz.h"

static const char *const endings[] = {".jsonl", ".json", ".txt"};

static void put(const char *path, const uint8_t *data, size_t size)
{
    FILE *f = fopen(path, "we");
    fuzz_assert(f && fwrite(data, 1, size, f) == size && !fclose(f));
}

static void check_shard(const char *path, const struct mt_dataset_stats *stats)
{
    struct mt_shard s;
    struct mt_err err = {0};
    uint64_t trained = 0;
    fuzz_assert(!mt_shard_open(&s, path, 0, &err));
    fuzz_assert(s.header->n_samples == stats->n_samples && s.header->n_tokens == stats->n_tokens);
    for (uint64_t i = 0; i < stats->n_samples; i++) {
        fuzz_assert(s.offsets[i + 1] - s.offsets[i] >= 2 && s.offsets[i + 1] - s.offsets[i] <= stats->max_len);
        for (uint64_t k = s.offsets[i] + 1; k < s.offsets[i + 1]; k++)
            trained += s.mask[k / 8] >> (k % 8) & 1;
    }
    fuzz_assert(trained == stats->n_trained);
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
    struct mt_dataset_params p = {.tokenizer = mode & 64 ? "model" : "byte", .seq_len = 2 + mode / 3 % 8 * 5,
                                  .overlong = (enum mt_cfg_overlong)(mode >> 4 & 3), .vocab = 300};
    struct mt_shard_writer w;
    struct mt_err err = {0};
    fuzz_assert(!mt_shard_writer_open(&w, shard, &err));
    struct mt_sample_reader r = {.p = &p, .out = &w};
    int rc = mt_samples_read_file(&r, path[kind], &err);
    if (!rc)
        rc = mt_samples_check(&r, &err);
    fuzz_assert(!rc || (err.msg[0] && err.code == rc));
    if (!rc) {
        struct mt_shard_header h = {.vocab = p.vocab, .source_hash = 1, .stats = r.stats};
        fuzz_assert(!mt_shard_writer_commit(&w, &h, &err));
        check_shard(shard, &r.stats);
    }
    mt_samples_finish(&r);
    mt_shard_writer_finish(&w);
    unlink(path[kind]);
    unlink(shard);
    return 0;
}
