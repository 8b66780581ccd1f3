/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/dtype.h"
#include "base/fs.h"
#include "base/mem.h"
#include "hf/safetensors.h"
#include "test.h"

static char dir[64];

static int set_up(void **)
{
    snprintf(dir, sizeof(dir), "/tmp/mt-st-XXXXXX");
    return mkdtemp(dir) ? 0 : -1;
}

static int tear_down(void **)
{
    return mt_remove_tree(dir, NULL);
}

static const char *at(const char *name)
{
    static char path[2][256];
    static int k;
    snprintf(path[k ^= 1], 256, "%s/%s", dir, name);
    return path[k];
}

/* A file of the header and `data` zero bytes, whose length field says `claim` (-1: the truth). */
static void put(const char *name, const char *header, size_t data, int64_t claim)
{
    size_t n = strlen(header), len = 8 + n + data;
    uint64_t says = claim < 0 ? n : (uint64_t)claim;
    MT_FREED char *raw = calloc(1, len);
    for (int i = 0; i < 8; i++)
        raw[i] = (char)(says >> (8 * i));
    memcpy(raw + 8, header, n);
    assert_int_equal(mt_write_file(at(name), raw, len, NULL), 0);
}

#define T(name, dtype, shape, from, to)                                                            \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":[" #from "," #to "]}"

TEST_WITH(headers_that_lie_are_refused, set_up, tear_down)
{
    static const struct {
        const char *header;
        size_t data;
        int64_t claim;
        const char *word;
    } cases[] = {
        {"{" T("a", "F32", "[2]", 0, 8) "}", 8, 7, "JSON"},
        {"{" T("a", "F32", "[2]", 0, 8) "}", 8, 1 << 30, "truncated"},
        {"{" T("a", "F32", "[2]", 0, 8) "}", 8, INT64_MAX, "truncated"},
        {"{" T("a", "F32", "[2]", 0, 8) "}", 8, 0, "not a safetensors"},
        {"{" T("a", "F32", "[2]", 0, 8) "}", 8, 1, "not a safetensors"},
        {"{" T("a", "F32", "[2]", 0, 8) "}", 7, -1, "truncated"},
        {"{" T("a", "F32", "[2]", 0, 8) "}", 9, -1, "1 bytes after"},
        {"{" T("a", "F32", "[2]", 0, 8) "," T("b", "F32", "[2]", 4, 12) "}", 12, -1, "overlaps"},
        {"{" T("a", "F32", "[2]", 0, 8) "," T("b", "F32", "[2]", 0, 8) "}", 8, -1, "overlaps"},
        {"{" T("a", "F32", "[2]", 0, 8) "," T("b", "F32", "[2]", 12, 20) "}", 20, -1, "hole"},
        {"{" T("a", "F32", "[2]", 4, 12) "}", 12, -1, "hole"},
        {"{" T("a", "F32", "[3]", 0, 8) "}", 8, -1, "do not fit"},
        {"{" T("a", "F32", "[2]", 8, 0) "}", 8, -1, "data_offsets"},
        {"{" T("a", "F32", "[2]", -8, 0) "}", 8, -1, "data_offsets"},
        {"{" T("a", "F32", "[2]", 0.5, 8.5) "}", 8, -1, "data_offsets"},
        {"{" T("a", "F32", "[2]", 0, 1e400) "}", 8, -1, "data_offsets"},
        {"{" T("a", "F32", "[2]", 9007199254740984, 9007199254740992) "}", 8, -1, "hole"},
        {"{" T("a", "F32", "[-2]", 0, 8) "}", 8, -1, "shape"},
        {"{" T("a", "F32", "[2.5]", 0, 8) "}", 8, -1, "shape"},
        {"{" T("a", "F32", "[4294967296,4294967296,2]", 0, 8) "}", 8, -1, "shape"},
        {"{" T("a", "F32", "[4503599627370496,1024]", 0, 8) "}", 8, -1, "larger than memory"},
        {"{" T("a", "F32", "[1,1,1,1,1,1,1,1,2]", 0, 8) "}", 8, -1, "8 dimensions"},
        {"{" T("a", "F32", "2", 0, 8) "}", 8, -1, "shape"},
        {"{" T("a", "F4", "[2]", 0, 8) "}", 8, -1, "F4"},
        {"{" T("a", "f32", "[2]", 0, 8) "}", 8, -1, "f32"},
        {"{\"a\":{\"dtype\":7,\"shape\":[2],\"data_offsets\":[0,8]}}", 8, -1, "no dtype"},
        {"{\"a\":{\"shape\":[2],\"data_offsets\":[0,8]}}", 8, -1, "no dtype"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2]}}", 8, -1, "data_offsets"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8,8]}}", 8, -1, "data_offsets"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[\"0\",8]}}", 8, -1, "data_offsets"},
        {"{\"a\":[]}", 8, -1, "no dtype"},
        {"{\"a\":null}", 8, -1, "no dtype"},
        {"{" T("a", "U8", "[0]", 0, 0) "," T("a", "U8", "[0]", 0, 0) "}", 0, -1, "twice"},
        {"{" T("a", "U8", "[4]", 0, 4) "," T("a", "U8", "[4]", 4, 8) "}", 8, -1, "twice"},
        {"{}", 8, -1, "no tensors"},
        {"{nonsense}", 0, -1, "JSON"},
        {"[]", 0, -1, "not a safetensors"},
        {" {}", 0, -1, "not a safetensors"},
        {"{} {}", 0, -1, "JSON"},
    };
    for (size_t i = 0; i < MT_ARRAY_LEN(cases); i++) {
        struct mt_st_model m;
        struct mt_err err = {0};
        put("x.safetensors", cases[i].header, cases[i].data, cases[i].claim);
        if (!mt_st_open_file(&m, at("x.safetensors"), &err))
            fail_msg("accepted: %s", cases[i].header);
        assert_int_equal(err.kind, MT_ERR_INPUT);
        assert_non_null(strstr(err.msg, "x.safetensors"));
        if (!strstr(err.msg, cases[i].word))
            fail_msg("%s: \"%s\" does not say \"%s\"", cases[i].header, err.msg, cases[i].word);
    }
}

TEST_WITH(files_too_short_are_refused, set_up, tear_down)
{
    for (size_t n = 0; n < 10; n++) {
        struct mt_st_model m;
        struct mt_err err = {0};
        assert_int_equal(mt_write_file(at("s"), "\2\0\0\0\0\0\0\0{}", n, NULL), 0);
        assert_int_equal(mt_st_open_file(&m, at("s"), &err), -EINVAL);
    }
    struct mt_st_model m;
    assert_int_equal(mt_write_file(at("s"), "\2\0\0\0\0\0\0\0{}", 10, NULL), 0);
    assert_int_equal(mt_st_open_file(&m, at("s"), NULL), 0); /* empty, and whole */
    assert_int_equal(m.n_tensors, 0);
    assert_null(mt_st_find(&m, "a"));
    mt_st_close(&m);
    assert_int_equal(mt_st_open_file(&m, at("none"), NULL), -ENOENT);
}

TEST_WITH(unusual_files_are_read, set_up, tear_down)
{
    struct mt_st_model m;
    struct mt_err err = {0};
    /* spaces at the end, no metadata first, scalars, empty tensors at one offset, tensors out of order */
    put("u", "{" T("c", "U8", "[]", 8, 9) "," T("z", "F32", "[0,5]", 8, 8) ",\"__metadata__\":{\"format\":\"pt\"},"
        T("a", "BF16", "[2,2]", 0, 8) "," T("y", "I64", "[0]", 0, 0) "}      ", 9, -1);
    MUST(mt_st_open_file, &m, at("u"));
    assert_int_equal(m.n_tensors, 4);
    assert_string_equal(m.tensors[0].name, "a");
    assert_int_equal(mt_st_find(&m, "c")->n_dims, 0);
    assert_int_equal(mt_st_find(&m, "c")->n_elems, 1);
    assert_int_equal(mt_st_find(&m, "z")->n_bytes, 0);
    assert_null(mt_st_find(&m, "b"));
    float x;
    assert_int_equal(mt_st_read_f32(&m, mt_st_find(&m, "c"), 0, 1, &x, &err), -EINVAL);
    assert_non_null(strstr(err.msg, "U8"));
    mt_st_close(&m);
}

TEST_WITH(each_float_type_is_converted, set_up, tear_down)
{
    enum { N = 20000 }; /* more than a piece of the reader */
    static const enum mt_st_dtype types[] = {MT_ST_BF16, MT_ST_F16, MT_ST_F32, MT_ST_F64};
    struct mt_st_decl d[4];
    static const char *const names[] = {"w.bf16", "w.f16", "w.f32", "w.f64"};
    MT_FREED char *header = NULL;
    size_t len = 0, total = 0;
    for (int i = 0; i < 4; i++) {
        d[i] = (struct mt_st_decl){.name = names[i], .dtype = types[i], .n_dims = 2, .shape = {N / 10, 10}};
        total += mt_st_decl_bytes(&d[i]);
    }
    qsort(d, 4, sizeof(*d), mt_st_file_order);
    assert_string_equal(d[0].name, "w.f64"); /* widest first, then by name */
    assert_string_equal(d[2].name, "w.bf16");
    assert_int_equal(mt_st_build_header(&header, &len, d, 4, NULL), 0);
    assert_int_equal(len % 8, 0);
    char *raw = calloc(1, len + total), *p = raw + len;
    memcpy(raw, header, len);
    for (int k = 0; k < 4; k++)
        for (size_t i = 0; i < N; i++, p += mt_st_dtype_size(d[k].dtype)) {
            double v = (double)i * 0.25;
            float f = (float)v;
            uint16_t b = mt_f32_to_bf16(f), h = (uint16_t)i;
            const void *src = d[k].dtype == MT_ST_F64 ? (void *)&v : d[k].dtype == MT_ST_F32 ? (void *)&f
                              : d[k].dtype == MT_ST_BF16 ? (void *)&b : (void *)&h;
            memcpy(p, src, mt_st_dtype_size(d[k].dtype));
        }
    assert_int_equal(mt_write_file(at("model.safetensors"), raw, len + total, NULL), 0);
    struct mt_st_model m;
    float *got = malloc(N * sizeof(float));
    assert_int_equal(mt_st_open_dir(&m, dir, NULL), 0);
    for (int k = 0; k < 4; k++) {
        const struct mt_st_tensor *t = mt_st_find(&m, names[k]);
        assert_int_equal(mt_st_read_f32(&m, t, 3, N - 3, got, NULL), 0);
        for (size_t i = 3; i < N; i++) {
            float want = (float)i * 0.25f;
            want = k == 0 ? mt_bf16_to_f32(mt_f32_to_bf16(want)) : k == 1 ? mt_f16_to_f32((uint16_t)i) : want;
            assert_memory_equal(&got[i - 3], &want, 4);
        }
    }
    struct mt_err err = {0};
    struct mt_st_tensor beyond = *mt_st_find(&m, "w.f16"); /* as if the file had shrunk meanwhile */
    beyond.offset = len + total - 2;
    assert_int_equal(mt_st_read_raw(&m, &beyond, 0, 4, got, &err), -ENODATA);
    mt_st_close(&m);
    free(got);
    free(raw);
}

static void put_text(const char *name, const char *text)
{
    assert_int_equal(mt_write_file(at(name), text, strlen(text), NULL), 0);
}

TEST_WITH(an_index_is_not_trusted, set_up, tear_down)
{
    static const struct {
        const char *index, *word;
    } cases[] = {
        {"[]", "weight_map"},
        {"{}", "weight_map"},
        {"{\"weight_map\": []}", "weight_map"},
        {"{\"weight_map\": {\"a\": 3}}", "names no file"},
        {"{\"weight_map\": {\"a\": \"\"}}", "names no file"},
        {"{\"weight_map\": {\"a\": \"../p.safetensors\"}}", "names no file"},
        {"{\"weight_map\": {\"a\": \"/etc/passwd\"}}", "names no file"},
        {"{\"weight_map\": {\"a\": \"..\"}}", "names no file"},
        {"{\"weight_map\": {\"a\": \"none.safetensors\"}}", "none.safetensors"},
        {"{\"weight_map\": {\"b\": \"p.safetensors\"}}", "\"b\" is not in"},
        {"{\"weight_map\": {\"a\": \"p.safetensors\", \"c\": \"p.safetensors\"}}", "\"c\""},
        {"{\"weight_map\": {\"a\": \"p.safetensors\", \"c\": \"q.safetensors\", \"d\": \"r.safetensors\"}}", "\"a\" is in"},
        {"{\"weight_map\": {\"a\":", "JSON"},
    };
    put("p.safetensors", "{" T("a", "U8", "[4]", 0, 4) "}", 4, -1);
    put("q.safetensors", "{" T("c", "U8", "[4]", 0, 4) "}", 4, -1);
    put("r.safetensors", "{" T("d", "U8", "[4]", 0, 4) "," T("a", "U8", "[4]", 4, 8) "}", 8, -1);
    for (size_t i = 0; i < MT_ARRAY_LEN(cases); i++) {
        struct mt_st_model m;
        struct mt_err err = {0};
        put_text("model.safetensors.index.json", cases[i].index);
        if (!mt_st_open_dir(&m, dir, &err))
            fail_msg("accepted: %s", cases[i].index);
        assert_int_equal(err.kind, MT_ERR_INPUT);
        if (!strstr(err.msg, cases[i].word))
            fail_msg("%s: \"%s\" does not say \"%s\"", cases[i].index, err.msg, cases[i].word);
    }
    struct mt_st_model m;
    put_text("model.safetensors.index.json",
             "{\"metadata\": {}, \"weight_map\": {\"c\": \"q.safetensors\", \"a\": \"p.safetensors\"}}");
    assert_int_equal(mt_st_open_dir(&m, dir, NULL), 0);
    assert_int_equal(m.n_files, 2);
    assert_string_equal(m.files[mt_st_find(&m, "a")->file].name, "p.safetensors");
    mt_st_close(&m);
}

TEST_WITH(folders_without_weights_say_so, set_up, tear_down)
{
    struct mt_st_model m;
    struct mt_err err = {0};
    assert_int_equal(mt_st_open_dir(&m, dir, &err), -ENOENT);
    assert_non_null(strstr(err.msg, "no model.safetensors"));
    put_text("pytorch_model.bin", "x");
    assert_int_equal(mt_st_open_dir(&m, dir, &err), -ENOENT);
    assert_non_null(strstr(err.msg, "convert"));
}
