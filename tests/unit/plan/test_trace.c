/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/fs.h"
#include "base/json.h"
#include "base/mem.h"
#include "plan/trace.h"
#include "test.h"

static cJSON *write_and_read(const struct mt_trace_span *spans, size_t n)
{
    struct mt_unit unit = {.name = "layer 0"};
    struct mt_layout layout = {.units = &unit, .n_units = 1};
    struct mt_err err = {0};
    char path[] = "/tmp/mt-trace-XXXXXX";
    cJSON *root = NULL;
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    close(fd);
    if (mt_trace_write(path, spans, n, NULL, &layout, &err) ||
        mt_json_read_file(&root, path, MT_ERR_RUNTIME, &err))
        fail_msg("%s", err.msg);
    unlink(path);
    return root;
}

/* The name of the row that the span of `bytes` bytes is in. */
static const char *row_of(const cJSON *root, double bytes)
{
    const cJSON *events = mt_json_get(root, "traceEvents"), *e, *span = NULL;
    cJSON_ArrayForEach(e, events)
        if (!strcmp(mt_json_get(e, "ph")->valuestring, "X") &&
            mt_json_get(mt_json_get(e, "args"), "bytes")->valuedouble == bytes)
            span = e;
    assert_non_null(span);
    cJSON_ArrayForEach(e, events)
        if (!strcmp(mt_json_get(e, "name")->valuestring, "thread_name") &&
            mt_json_get(e, "tid")->valueint == mt_json_get(span, "tid")->valueint)
            return mt_json_get(mt_json_get(e, "args"), "name")->valuestring;
    return "none";
}

static struct mt_trace_span moved(enum mt_queue q, size_t bytes, int64_t begin, int64_t end)
{
    return (struct mt_trace_span){.queue = q, .op = q == MT_Q_DISK_READ ? MT_OP_READ : MT_OP_WRITE,
                                  .bytes = bytes, .begin_ns = begin, .end_ns = end};
}

TEST(spans_are_in_the_rows_of_their_queues)
{
    const struct mt_trace_span spans[] = {
        {.queue = MT_Q_COMPUTE, .op = MT_OP_FORWARD, .bytes = 1, .begin_ns = 100, .end_ns = 900},
        moved(MT_Q_H2D, 2, 100, 200),
        moved(MT_Q_DISK_READ, 3, 100, 200),
        moved(MT_Q_DISK_WRITE, 4, 100, 200),
    };
    static const char *const rows[] = {"compute", "H2D link", "disk reads", "disk writes"};
    MT_JSON_FREED cJSON *root = write_and_read(spans, 4);
    for (int i = 0; i < 4; i++)
        assert_string_equal(row_of(root, i + 1), rows[i]);
}

TEST(transfers_under_way_at_once_lie_beside_each_other)
{
    const struct mt_trace_span spans[] = {
        moved(MT_Q_DISK_READ, 1, 100, 300),
        moved(MT_Q_DISK_READ, 2, 200, 500),
        moved(MT_Q_DISK_READ, 3, 250, 600),
        moved(MT_Q_DISK_READ, 4, 300, 400), /* the first row is free again */
    };
    static const char *const rows[] = {"disk reads", "disk reads 2", "disk reads 3", "disk reads"};
    MT_JSON_FREED cJSON *root = write_and_read(spans, 4);
    for (int i = 0; i < 4; i++)
        assert_string_equal(row_of(root, i + 1), rows[i]);
}
