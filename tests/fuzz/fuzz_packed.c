/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>

#include "fuzz.h"
#include "weights/packed_files.h"
#include "weights/packer.h"

/* Do all pieces hold what can only be finite? Of experts in one tensor those of all. */
static bool is_finite(const struct mt_st_model *st, const struct mt_packed_source *src, const struct mt_tensor *t)
{
    static char bytes[1 << 16];
    struct mt_packed_piece piece[MT_MAX_PIECES];
    int n = mt_packed_pieces(piece, t);
    bool all = !src->wider_scales;
    for (int i = 0; i < n && all; i++) {
        const struct mt_st_tensor *from = mt_packed_piece_in(src, &piece[i]);
        fuzz_assert(!from || (from->n_bytes % piece[i].bytes == 0 && from->n_bytes <= sizeof(bytes)));
        fuzz_assert(!from || src->rows.step || from->n_bytes == piece[i].bytes);
        if (src->turned && piece[i].kind == MT_PIECE_NOTE) /* which files have not */
            continue;
        all = from && !mt_st_read_raw(st, from, 0, from->n_bytes, bytes, NULL) &&
              mt_packed_is_finite(t->packed, t->scale, piece[i].kind, 0, bytes, from->n_bytes);
    }
    return all;
}

/* The second matrix of the second expert, of four in a tensor. */
static void lay_out_experts(struct mt_layout *l, struct mt_stored *s, struct mt_tensor *t)
{
    size_t cols = (size_t)t->shape[1];
    *s = (struct mt_stored){.name = "w.weight", .n_dims = 3, .shape = {2, 2 * t->shape[0], t->shape[1]}, .n = 4 * t->n, .fused = true};
    *l = (struct mt_layout){.stored = s, .n_stored = 1};
    t->place = (struct mt_tensor_place){.first = 3 * t->n, .row_step = cols, .col_step = 1};
}

/* A matrix w.weight of a safetensors file, in whatever form that has it. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const int64_t shapes[][2] = {{16, 64}, {130, 40}, {3, 16}}; /* in the first each row of int4 is one group or two */
    static float x[130 * 64];
    struct mt_st_model st;
    struct mt_packed_source src = {.codes = NULL};
    struct mt_packed_matrix m = {.codes = NULL};
    struct mt_err err = {0};
    if (!size || mt_st_open_file(&st, fuzz_file(data + 1, size - 1), NULL))
        return 0;
    const int64_t *shape = shapes[data[0] % 3];
    struct mt_tensor t = {.name = "w.weight", .n_dims = 2, .shape = {shape[0], shape[1]}, .n = (size_t)(shape[0] * shape[1])};
    bool experts = data[0] / 3 % 2;
    struct mt_layout l;
    struct mt_stored stored;
    lay_out_experts(&l, &stored, &t);
    int rc = mt_packed_find(&src, &st, experts ? &l : NULL, &t, &err);
    fuzz_assert(!rc || (err.msg[0] && err.code == rc));
    if (!rc && src.format) {
        mt_packing_make(&t, src.format);
        t.scale = src.scale;
        t.note_bytes = src.turned ? t.note_bytes : src.note ? (uint16_t)src.note->n_bytes : 0;
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
