/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/fs.h"
#include "base/json.h"
#include "base/mem.h"
#include "test.h"

static void refuse(const char *text, size_t len, const char *where)
{
    cJSON *v = NULL;
    struct mt_err err = {0};
    assert_int_equal(mt_json_parse(&v, text, len, "x.json", MT_ERR_INPUT, &err), -EINVAL);
    assert_null(v);
    assert_int_equal(err.kind, MT_ERR_INPUT);
    if (strncmp(err.msg, where, strlen(where)))
        fail_msg("\"%s\" does not begin with \"%s\"", err.msg, where);
}

TEST(an_error_has_its_line_and_column)
{
    refuse("{\"a\": 1,\n \"b\": }", 17, "x.json:2:");
    refuse("", 0, "x.json:1:1");
    refuse("{\n\n\n", 4, "x.json:");
    refuse("[1, 2", 5, "x.json:1:");
}

TEST(exactly_one_value_is_read)
{
    cJSON *v = NULL;
    assert_int_equal(mt_json_parse(&v, " {\"a\": [1, 2]} \r\n\t", 18, "x", MT_ERR_INPUT, NULL), 0);
    assert_int_equal(cJSON_GetArraySize(mt_json_get(v, "a")), 2);
    cJSON_Delete(v);
    refuse("{} {}", 5, "x.json:1:4");
    refuse("{}x", 3, "x.json:1:3");
}

TEST(bytes_past_the_length_are_not_looked_at)
{
    cJSON *v = NULL;
    char text[] = {'4', '2', '7', '7'};
    assert_int_equal(mt_json_parse(&v, text, 2, "x", MT_ERR_INPUT, NULL), 0);
    assert_int_equal(v->valueint, 42);
    cJSON_Delete(v);
    refuse("[1]", 2, "x.json:1:");
}

TEST(members_are_found_by_case)
{
    MT_JSON_FREED cJSON *v = NULL;
    assert_int_equal(mt_json_parse(&v, "{\"Key\": 1, \"key\": 2}", 20, "x", MT_ERR_INPUT, NULL), 0);
    assert_int_equal(mt_json_get(v, "key")->valueint, 2);
    assert_null(mt_json_get(v, "KEY"));
}

TEST(depth_has_an_end)
{
    static char deep[200000];
    memset(deep, '[', sizeof(deep));
    refuse(deep, sizeof(deep), "x.json:1:");
}

TEST(numbers_are_short_and_exact)
{
    static const struct {
        double v;
        const char *text;
    } cases[] = {{0.1, "0.1"}, {0, "0"}, {-3, "-3"}, {1e15, "1e+15"}, {123456789012345, "123456789012345"}, {1e300, "1e+300"}, {100, "100"}, {5e-324, "5e-324"}, {1.0 / 3, "0.3333333333333333"},
                 {-2.5, "-2.5"}, {0x1.fffffffffffffp1023, "1.7976931348623157e+308"}, {NAN, "null"}, {-INFINITY, "null"}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char want[64], *text;
        cJSON *o = cJSON_CreateObject();
        snprintf(want, sizeof(want), "{\"x\":%s}", cases[i].text);
        cJSON_AddNumberToObject(o, "x", cases[i].v);
        text = mt_json_print(o, false);
        assert_string_equal(text, want);
        free(text);
        cJSON_Delete(o);
    }
}

TEST(a_missing_file_has_the_callers_kind)
{
    cJSON *v = NULL;
    struct mt_err err = {0};
    char path[64];
    snprintf(path, sizeof(path), "/tmp/mt-json-%d.json", (int)getpid());
    assert_int_equal(mt_json_read_file(&v, path, MT_ERR_CHECKPOINT, &err), -ENOENT);
    assert_int_equal(err.kind, MT_ERR_CHECKPOINT);
    assert_non_null(strstr(err.msg, path));
    assert_int_equal(mt_write_file(path, "[1,\n}", 5, NULL), 0);
    assert_int_equal(mt_json_read_file(&v, path, MT_ERR_CHECKPOINT, &err), -EINVAL);
    assert_non_null(strstr(err.msg, ".json:2:"));
    unlink(path);
}

TEST(a_line_that_is_no_json_is_a_null_among_lines)
{
    static const char text[] = "{\"step\":1}\n\n[2]\n{\"step\":";
    cJSON *v = NULL;
    struct mt_err err = {0};
    char path[64];
    snprintf(path, sizeof(path), "/tmp/mt-json-%d.jsonl", (int)getpid());
    assert_int_equal(mt_json_read_lines(&v, path, &err), -ENOENT);
    assert_non_null(strstr(err.msg, path));
    assert_int_equal(mt_write_file(path, text, sizeof(text) - 1, NULL), 0);
    assert_int_equal(mt_json_read_lines(&v, path, &err), 0);
    assert_int_equal(cJSON_GetArraySize(v), 3);
    assert_int_equal(mt_json_get(cJSON_GetArrayItem(v, 0), "step")->valueint, 1);
    assert_true(cJSON_IsArray(cJSON_GetArrayItem(v, 1)));
    assert_true(cJSON_IsNull(cJSON_GetArrayItem(v, 2)));
    cJSON_Delete(v);
    unlink(path);
}

TEST(members_are_found_in_any_order)
{
    static const char text[] = "{\"a\": 1, \"b\": 2, \"c\": 3}";
    static const struct {
        const char *key;
        int value; /* 0: there is none */
    } asked[] = {{"a", 1}, {"b", 2}, {"B", 0}, {"c", 3}, {"d", 0}, {"a", 1}, {"c", 3}, {"b", 2}};
    MT_JSON_FREED cJSON *v = NULL;
    assert_int_equal(mt_json_parse(&v, text, strlen(text), "x", MT_ERR_INPUT, NULL), 0);
    MT_JSON_INDEX_FREED struct mt_json_index x = {.object = v};
    for (size_t i = 0; i < sizeof(asked) / sizeof(asked[0]); i++) {
        const cJSON *m = mt_json_index_get(&x, asked[i].key);
        assert_int_equal(m ? m->valueint : 0, asked[i].value);
    }
    assert_null(mt_json_index_get(&(struct mt_json_index){.object = NULL}, "a"));
}

/* As many as a model of a trillion parameters has tensors, in another order than they are asked for: a look-up that
 * passes over all of them would take minutes here. */
TEST(members_are_found_among_very_many)
{
    enum { N = 200000 };
    MT_JSON_FREED cJSON *v = cJSON_CreateObject();
    char key[32];
    for (int i = 0; i < N; i++) {
        snprintf(key, sizeof(key), "%d", i);
        mt_json_add(v, key, cJSON_CreateNumber(i));
    }
    mt_json_add(v, "7", cJSON_CreateNumber(-1)); /* the first of equal keys is found, as by mt_json_get() */
    MT_JSON_INDEX_FREED struct mt_json_index x = {.object = v};
    for (int i = N; i-- > 0;) {
        snprintf(key, sizeof(key), "%d", i);
        assert_int_equal(mt_json_index_get(&x, key)->valueint, i);
        snprintf(key, sizeof(key), "no %d", i);
        assert_null(mt_json_index_get(&x, key));
    }
}

TEST(items_are_listed_in_their_order)
{
    MT_JSON_FREED cJSON *v = cJSON_CreateArray();
    MT_FREED const cJSON **item = NULL;
    size_t n = 0;
    for (int i = 0; i < 3; i++)
        mt_json_append(v, cJSON_CreateNumber(i));
    MUST(mt_json_items, &item, &n, v);
    assert_int_equal(n, 3);
    for (int i = 0; i < 3; i++)
        assert_int_equal(item[i]->valueint, i);
}

static size_t live, left; /* blocks in use; allocations that still succeed */

static void *counted_malloc(size_t n)
{
    void *p = left ? malloc(n) : NULL;
    left -= left > 0;
    live += p != NULL;
    return p;
}

static void counted_free(void *p)
{
    live -= p != NULL;
    free(p);
}

TEST(what_cannot_be_added_does_not_leak)
{
    cJSON_InitHooks(&(cJSON_Hooks){.malloc_fn = counted_malloc, .free_fn = counted_free});
    for (size_t memory = 0; memory < 8; memory++) {
        left = memory;
        cJSON *o = cJSON_CreateObject(), *list = cJSON_CreateArray();
        bool in_list = mt_json_append(list, cJSON_CreateString("item"));
        bool in_object = mt_json_add(o, "key", list);
        assert_true(in_list == (memory > 3) && in_object == (memory > 4));
        cJSON_Delete(o);
        assert_int_equal(live, 0);
    }
    cJSON_InitHooks(NULL);
}
