/* SPDX-License-Identifier: Apache-2.0 */
#include "data/shard.h"
#include "fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct mt_shard s;
    struct mt_err err = {0};
    uint64_t trained = 0, sum = 0;
    if (mt_shard_open(&s, fuzz_file(data, size), 0, &err)) {
        fuzz_assert(err.msg[0] && err.code < 0);
        return 0;
    }
    for (uint64_t i = 0; i < s.header->n_samples; i++) { /* as a data set reads */
        uint64_t at = s.offsets[i], n = s.offsets[i + 1] - at;
        fuzz_assert(n <= s.header->max_len);
        trained += mt_shard_count_trained(&s, at, n);
        for (uint64_t k = at; k < at + n; k++)
            sum += s.tokens[k] + (s.mask[k / 8] >> (k % 8) & 1) * (UINT64_C(1) << 40);
        sum += s.places[i] & 0;
    }
    fuzz_assert(sum >> 40 >= trained);
    fuzz_assert(trained == mt_shard_count_trained(&s, 0, s.header->n_tokens));
    fuzz_assert(memchr(s.header->format, 0, sizeof(s.header->format)));
    fuzz_assert(memchr(s.header->untrained_at, 0, sizeof(s.header->untrained_at)));
    mt_shard_close(&s);
    return 0;
}
