/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>

#include "fuzz.h"
#include "weights/packed_files.h"
#include "weights/packer.h"

/* Do all pieces hold what can only be finite? */
static bool is_finite(const struct mt_st_model *st, const struct mt_packed_source *src, const struct mt_tensor *t)
{
    static char bytes[1 << 16];
    struct mt_packed_piece piece[MT_MAX_PIECES];
    int n = mt_packed_pieces(piece, t);
    bool all = !src->wider_scales;
    for (int i = 0; i < n && all; i++) {
        const struct mt_st_tensor *from = mt_packed_piece_in(src, &piece[i]);
        fuzz_assert(!from || (from->n_bytes == piece[i].bytes && from->n_bytes <= sizeof(bytes)));
        all = from && !mt_st_read_raw(st, from, 0, from->n_bytes, bytes, NULL) &&
              mt_packed_is_finite(t->packed, t->scale, piece[i].kind, 0, bytes, from->n_bytes);
    }
    return all;
}

/* A matrix w.weight of a safetensors file, in whatever form that has it. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const int64_t shapes[][2] = {{16, 64}, {130, 40}, {3, 16}};
    static float x[130 * 64];
    struct mt_st_model st;
    struct mt_packed_source src = {.codes = NULL};
    struct mt_packed_matrix m;
    struct mt_err err = {0};
    if (!size || mt_st_open_file(&st, fuzz_file(data + 1, size - 1), NULL))
        return 0;
    const int64_t *shape = shapes[data[0] % 3];
    struct mt_tensor t = {.name = "w.weight", .n_dims = 2, .shape = {shape[0], shape[1]}, .n = (size_t)(shape[0] * shape[1])};
    int rc = mt_packed_find(&src, &st, NULL, &t, &err);
    fuzz_assert(!rc || (err.msg[0] && err.code == rc));
    if (!rc && src.format) {
        mt_packing_make(&t, src.format);
        t.scale = src.scale;
        t.note_bytes = src.note ? (uint16_t)src.note->n_bytes : 0;
        t.aux = mt_packed_code_bytes(src.format, (size_t)shape[0], (size_t)shape[1]);
        bool finite = is_finite(&st, &src, &t);
        fuzz_assert(!mt_packed_copy(&st, &src, &t, NULL, NULL, &err) || err.msg[0]);
        rc = mt_packed_file_read(&m, &st, &src, &t, NULL, &err);
        if (!rc)
            mt_packed_matrix_values(&m, 0, t.n, x);
        mt_packed_matrix_finish(&m);
        fuzz_assert(!rc || err.msg[0]);
        for (size_t i = 0; !rc && finite && i < t.n; i++)
            fuzz_assert(isfinite(x[i]));
    }
    mt_st_close(&st);
    return 0;
}
