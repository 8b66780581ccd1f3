/* SPDX-License-Identifier: Apache-2.0 */
#include "data/shard.h"
#include "fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct mt_shard s;
    struct mt_err err = {0};
    volatile uint64_t sum = 0;
    if (mt_shard_open(&s, fuzz_file(data, size), 0, &err)) {
        fuzz_assert(err.msg[0] && err.code < 0);
        return 0;
    }
    for (uint64_t i = 0; i < s.header->n_samples; i++) { /* as mt_dataset_sample() reads */
        uint64_t at = s.offsets[i], n = s.offsets[i + 1] - at;
        fuzz_assert(n <= s.header->stats.max_len);
        for (uint64_t k = at; k < at + n; k++) {
            fuzz_assert(s.tokens[k] < s.header->vocab);
            sum += s.mask[k / 8] >> (k % 8) & 1;
        }
    }
    fuzz_assert(memchr(s.header->format, 0, sizeof(s.header->format)));
    mt_shard_close(&s);
    return 0;
}
