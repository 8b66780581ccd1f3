/* SPDX-License-Identifier: Apache-2.0 */
/* Packed formats as their reference codes have them: scripts/reference/packed_fixtures.py. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/pack.h"
#include "kinds/kinds.h"
#include "test.h"
#include "weights/packed_files.h"

static const struct {
    const char *name;
    enum mt_packed format;
    int64_t rows, cols;
} cases[] = {{"nf4", MT_PACKED_NF4, 24, 72}, {"nested", MT_PACKED_NF4, 260, 64}, {"fp8", MT_PACKED_FP8, 136, 40},
             {"mxfp4", MT_PACKED_MXFP4, 24, 96}, {"e8m0", MT_PACKED_FP8, 256, 16}, {"one", MT_PACKED_FP8T, 40, 72},
             {"int4", MT_PACKED_INT4, 24, 96}};

static struct mt_st_model st;

static int open_fixture(void **)
{
    return mt_st_open_file(&st, getenv("MEGATRAIN_TEST_PACKED"), NULL);
}

static int close_fixture(void **)
{
    mt_st_close(&st);
    return 0;
}

static const struct mt_st_tensor *tensor(const char *name, const char *what)
{
    char full[64];
    snprintf(full, sizeof(full), "%s.%s", name, what);
    return mt_st_find(&st, full);
}

static void *raw(const char *name, const char *what)
{
    const struct mt_st_tensor *t = tensor(name, what);
    assert_non_null(t);
    void *p = mt_alloc_aligned(t->n_bytes + 64);
    assert_int_equal(mt_st_read_raw(&st, t, 0, t->n_bytes, p, NULL), 0);
    return p;
}

static struct mt_tensor matrix(size_t i)
{
    struct mt_tensor t = {.n_dims = 2, .shape = {cases[i].rows, cases[i].cols}, .packed = cases[i].format};
    snprintf(t.name, sizeof(t.name), "%s.weight", cases[i].name);
    t.n = (size_t)(cases[i].rows * cases[i].cols);
    return t;
}

/* To the bit. */
static void expect_decoded(const char *name, const float *got, size_t n)
{
    float *want = raw(name, "f32");
    MT_FREED uint16_t *half = raw(name, "bf16");
    for (size_t i = 0; i < n; i++) {
        if (mt_f32_bits(got[i]) != mt_f32_bits(want[i]) || mt_f32_to_bf16(got[i]) != half[i])
            fail_msg("%s: element %zu is %a, not %a", name, i, (double)got[i], (double)want[i]);
    }
    free(want);
}

TEST(files_are_read_as_their_reference_code_does)
{
    for (size_t i = 0; i < MT_ARRAY_LEN(cases); i++) {
        struct mt_tensor t = matrix(i);
        struct mt_packed_source src;
        struct mt_packed_matrix m = {.codes = NULL};
        float *got = mt_calloc(t.n, sizeof(*got));
        MUST(mt_packed_find, &src, &st, NULL, &t);
        assert_int_equal(src.format, cases[i].format);
        assert_int_equal(src.scale == MT_SCALE_NESTED, !strcmp(cases[i].name, "nested"));
        assert_int_equal(mt_packed_file_read(&m, &st, &src, &t, NULL, NULL), 0);
        mt_packed_matrix_values(&m, 0, t.n, got);
        expect_decoded(cases[i].name, got, t.n);
        mt_packed_matrix_finish(&m);
        free(got);
    }
}

static void *upload(mt_device *dev, const char *name, const char *what)
{
    void *p = NULL, *host = raw(name, what);
    size_t n = tensor(name, what)->n_bytes;
    assert_int_equal(mt_device_alloc(dev, n, what, &p, NULL), 0);
    assert_int_equal(mt_device_copy(dev, MT_STREAM_COMPUTE, &(struct mt_copy){p, n, host, n, n, 1}, NULL), 0);
    assert_int_equal(mt_device_sync(dev, NULL), 0);
    free(host);
    return p;
}

/* The device's operation, in both dtypes, on the file's own bytes. */
static void device_check(mt_device *dev, size_t i, enum mt_dtype dtype)
{
    static const char *const codes[] = {"", "weight", "weight_blocks", "weight", "weight_packed", "", "weight"},
                             *const scales[] = {"", "weight.absmax", "weight_scales", "weight_scale_inv",
                                                "weight_scale", "", "weight_scale_inv"};
    const char *name = cases[i].name;
    size_t n = (size_t)(cases[i].rows * cases[i].cols), size = mt_dtype_size(dtype);
    void *out = NULL, *got = mt_calloc(n, 4), *want = raw(name, dtype == MT_F32 ? "f32" : "bf16");
    assert_int_equal(mt_device_alloc(dev, n * size, "out", &out, NULL), 0);
    struct mt_decode a = {.rows = (size_t)cases[i].rows, .cols = (size_t)cases[i].cols, .dtype = dtype,
                          .format = cases[i].format, .codes = upload(dev, name, codes[cases[i].format]),
                          .scales = upload(dev, name, scales[cases[i].format]), .out = out};
    struct mt_tensor of = matrix(i);
    struct mt_packed_source source;
    assert_int_equal(mt_packed_find(&source, &st, NULL, &of, NULL), 0);
    a.scale = source.scale;
    if (!strcmp(name, "nested")) {
        void *p = NULL;
        assert_int_equal(mt_device_alloc(dev, 4, "offset", &p, NULL), 0);
        assert_int_equal(mt_device_copy(dev, MT_STREAM_COMPUTE, &(struct mt_copy){p, 4, &source.offset, 4, 4, 1}, NULL), 0);
        a.nested_scales = upload(dev, name, "weight.nested_absmax");
        a.nested_map = upload(dev, name, "weight.nested_quant_map");
        a.nested_offset = p;
    }
    assert_int_equal(mt_op_decode(dev, &a, NULL), 0);
    assert_int_equal(mt_device_copy(dev, MT_STREAM_COMPUTE,
                                    &(struct mt_copy){got, n * size, out, n * size, n * size, 1}, NULL), 0);
    assert_int_equal(mt_device_sync(dev, NULL), 0);
    assert_memory_equal(got, want, n * size);
    free(got);
    free(want);
}

TEST(the_device_decodes_as_their_reference_code_does)
{
    mt_device *dev;
    struct mt_device_params p = {.kind = "cpu", .budget_bytes = 16 << 20, .n_threads = 2};
    assert_int_equal(mt_device_create(&dev, &p, NULL), 0);
    for (size_t i = 0; i < MT_ARRAY_LEN(cases); i++)
        for (int t = MT_F32; t <= MT_BF16; t++)
            device_check(dev, i, (enum mt_dtype)t);
    mt_device_destroy(&dev);
}

TEST(weights_are_packed_as_their_reference_code_does)
{
    for (size_t i = 0; i < MT_ARRAY_LEN(cases); i++) {
        enum mt_packed f = cases[i].format;
        const char *name = cases[i].name;
        size_t rows = (size_t)cases[i].rows, cols = (size_t)cases[i].cols;
        if (f == MT_PACKED_MXFP4 || !tensor(name, "wide"))
            continue; /* its reference packs on GPUs alone, or it is only read */
        float *wide = raw(name, "wide"), *scales = mt_calloc(mt_packed_n_scales(f, rows, cols), sizeof(float));
        uint8_t *codes = mt_calloc(mt_packed_code_bytes(f, rows, cols), 1), *want = raw(name, "weight");
        for (size_t k = 0; k < mt_pack_n_jobs(f, rows, cols); k++)
            mt_pack_job(&(struct mt_pack){f, 1, rows, cols}, wide, k, codes, scales);
        assert_memory_equal(codes, want, mt_packed_code_bytes(f, rows, cols));
        if (strcmp(name, "nested")) {
            float *s = raw(name, f == MT_PACKED_FP8 ? "weight_scale_inv" : "weight.absmax");
            assert_memory_equal(scales, s, mt_packed_n_scales(f, rows, cols) * sizeof(float));
            free(s);
        } else {
            size_t n = mt_packed_n_scales(f, rows, cols);
            float map[256], nested[2], offset, *file_map = raw(name, "weight.nested_quant_map");
            uint8_t *bytes = mt_calloc(n, 1), *absmax = raw(name, "weight.absmax");
            mt_pack_nested_map(map);
            assert_memory_equal(map, file_map, sizeof(map));
            mt_pack_nest(scales, n, map, bytes, nested, &offset);
            assert_memory_equal(bytes, absmax, n);
            free(file_map);
            free(bytes);
            free(absmax);
        }
        free(wide);
        free(scales);
        free(codes);
        free(want);
    }
}

/* A block of 32 whose largest is 5.9 takes a scale of 1, halves go away from zero; zeros stay zeros. */
TEST(mxfp4_rounds_its_scale_up)
{
    float w[64] = {5.9f, -0.25f, 0.74f, 2.5f, -3.5f, 0.1f}, scales[2];
    uint8_t codes[32] = {0};
    mt_pack_job(&(struct mt_pack){MT_PACKED_MXFP4, 1, 1, 64}, w, 0, codes, scales);
    assert_true(scales[0] == 1 && mt_f32_to_e8m0(scales[0]) == 127 && mt_f32_to_e8m0(scales[1]) == 0);
    assert_int_equal(codes[0], 7 | 9 << 4);  /* 6, -0.5 */
    assert_int_equal(codes[1], 1 | 5 << 4);  /* 0.5, 3 */
    assert_int_equal(codes[2], 14 | 0 << 4); /* -4, 0 */
    for (int i = 3; i < 32; i++)
        assert_int_equal(codes[i], 0);
}

TEST_GROUP(open_fixture, close_fixture)
