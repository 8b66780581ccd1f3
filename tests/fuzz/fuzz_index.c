/* SPDX-License-Identifier: Apache-2.0 */
/* The input is model.safetensors.index.json of a folder with two files; they lie where nothing else does. */
#include "fuzz.h"
#include "hf/safetensors.h"

static void put_file(const char *name, const char *header, size_t bytes)
{
    char text[512] = {0};
    size_t n = strlen(header);
    text[0] = (char)n; /* of its length, which is under 128 */
    memcpy(text + 8, header, n);
    fuzz_put(name, text, 8 + n + bytes);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct mt_st_model m = {0};
    struct mt_err err = {0};
    uint8_t raw[8];
    put_file("a.safetensors", "{\"w\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4);
    put_file("b.safetensors", "{\"x\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]}}", 2);
    fuzz_put("model.safetensors.index.json", data, size);
    if (mt_st_open_dir(&m, fuzz_folder(), &err)) {
        fuzz_assert(err.msg[0]);
        return 0;
    }
    for (size_t i = 0; i < m.n_tensors; i++) {
        fuzz_assert(mt_st_find(&m, m.tensors[i].name) == &m.tensors[i] && m.tensors[i].file < m.n_files);
        fuzz_assert(!mt_st_read_raw(&m, &m.tensors[i], 0, 1, raw, &err));
    }
    for (int i = 0; i < m.n_files; i++)
        fuzz_assert(!strchr(m.files[i].name, '/') || strstr((const char *)data, MT_ST_IN_BASE));
    mt_st_close(&m);
    return 0;
}
