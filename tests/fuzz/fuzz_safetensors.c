/* SPDX-License-Identifier: Apache-2.0 */
#include "fuzz.h"
#include "hf/safetensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct mt_st_model m;
    struct mt_err err = {0};
    float x[64];
    if (mt_st_open_file(&m, fuzz_file(data, size), &err)) {
        fuzz_assert(err.msg[0] && err.code < 0);
        return 0;
    }
    uint64_t sum = 0;
    for (size_t i = 0; i < m.n_tensors; i++) {
        const struct mt_st_tensor *t = &m.tensors[i];
        size_t n = t->n_elems < 64 ? t->n_elems : 64;
        fuzz_assert(t->offset + t->n_bytes <= size && mt_st_find(&m, t->name) == t);
        fuzz_assert(!i || strcmp(m.tensors[i - 1].name, t->name) < 0);
        fuzz_assert(!mt_st_read_raw(&m, t, 0, n, x, NULL)); /* n bytes */
        if (t->dtype <= MT_ST_F64)
            fuzz_assert(!mt_st_read_f32(&m, t, t->n_elems - n, n, x, NULL));
        sum += t->n_bytes;
    }
    fuzz_assert(sum < size);
    mt_st_close(&m);
    return 0;
}
