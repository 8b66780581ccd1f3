/* SPDX-License-Identifier: Apache-2.0 */
#include "train/tensorboard.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/fs.h"
#include "base/mem.h"
#include "base/strbuf.h"
#include "train/append.h"

struct mt_tensorboard {
    struct mt_append file;
    uint32_t crc_table[256];
};

/* Field tags of the messages: number << 3 | wire type. */
enum {
    EVENT_WALL_TIME = 1 << 3 | 1,
    EVENT_STEP = 2 << 3 | 0,
    EVENT_FILE_VERSION = 3 << 3 | 2,
    EVENT_SUMMARY = 5 << 3 | 2,
    EVENT_SESSION_LOG = 7 << 3 | 2,
    SUMMARY_VALUE = 1 << 3 | 2,
    VALUE_TAG = 1 << 3 | 2,
    VALUE_SIMPLE = 2 << 3 | 5,
    SESSION_STATUS = 1 << 3 | 0,
    SESSION_START = 1,
};

static void make_crc_table(uint32_t table[256])
{
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t c = i;
        for (int k = 0; k < 8; k++)
            c = c & 1 ? c >> 1 ^ 0x82f63b78u : c >> 1; /* Castagnoli, reflected */
        table[i] = c;
    }
}

static uint32_t masked_crc(const struct mt_tensorboard *t, const void *data, size_t len)
{
    const uint8_t *p = data;
    uint32_t c = 0xffffffffu;
    for (size_t i = 0; i < len; i++)
        c = t->crc_table[(c ^ p[i]) & 0xff] ^ c >> 8;
    c = ~c;
    return (c >> 15 | c << 17) + 0xa282ead8u;
}

static void put_varint(struct mt_str *s, uint64_t v)
{
    for (; v >= 0x80; v >>= 7)
        mt_str_append(s, (char[]){(char)(v | 0x80)}, 1);
    mt_str_append(s, (char[]){(char)v}, 1);
}

static void put_bytes(struct mt_str *s, unsigned tag, const char *data, size_t len)
{
    put_varint(s, tag);
    put_varint(s, len);
    mt_str_append(s, data, len);
}

static void put_event_head(struct mt_str *s, uint64_t step)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    double seconds = (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
    put_varint(s, EVENT_WALL_TIME);
    mt_str_append(s, (const char *)&seconds, sizeof(seconds));
    put_varint(s, EVENT_STEP);
    put_varint(s, step);
}

static void write_record(struct mt_tensorboard *t, const struct mt_str *event)
{
    MT_STR_FREED struct mt_str record = {0};
    uint64_t len = event->len;
    uint32_t len_crc = masked_crc(t, &len, sizeof(len));
    uint32_t crc = masked_crc(t, event->p, event->len);
    mt_str_append(&record, (const char *)&len, sizeof(len));
    mt_str_append(&record, (const char *)&len_crc, sizeof(len_crc));
    mt_str_append(&record, event->p, event->len);
    mt_str_append(&record, (const char *)&crc, sizeof(crc));
    if (!record.failed && !event->failed)
        mt_append_put(&t->file, record.p, record.len);
}

static void write_start(struct mt_tensorboard *t, uint64_t step)
{
    static const char version[] = "brain.Event:2";
    MT_STR_FREED struct mt_str event = {0};
    put_event_head(&event, 0);
    put_bytes(&event, EVENT_FILE_VERSION, version, sizeof(version) - 1);
    write_record(t, &event);
    if (step) {
        event.len = 0;
        put_event_head(&event, step + 1);
        put_bytes(&event, EVENT_SESSION_LOG, (char[]){SESSION_STATUS, SESSION_START}, 2);
        write_record(t, &event);
    }
}

int mt_tensorboard_open(struct mt_tensorboard **out, const char *dir, uint64_t step,
                        struct mt_err *err)
{
    MT_CLOSED_BY(mt_tensorboard_close) struct mt_tensorboard *t = NULL;
    char host[128] = "host";
    int rc = MT_NEW(&t, 1, "TensorBoard events", err);
    if (rc)
        return rc;
    gethostname(host, sizeof(host) - 1);
    make_crc_table(t->crc_table);
    t->file.fd = -1;
    const char *path = MT_PATH("%.3800s/tensorboard/events.out.tfevents.%010lld.%s.%ld.0", dir, (long long)time(NULL), host,
                               (long)getpid());
    rc = mt_make_parent(path, err) ?: mt_append_open(&t->file, path, false, err);
    if (rc)
        return rc;
    write_start(t, step);
    *out = MT_GIVE(t);
    return 0;
}

void mt_tensorboard_close(struct mt_tensorboard **t)
{
    if (*t)
        mt_append_close(&(*t)->file);
    free(*t);
    *t = NULL;
}

static void put_scalar(struct mt_str *summary, const char *name, double v)
{
    MT_STR_FREED struct mt_str value = {0};
    float f = (float)v;
    put_bytes(&value, VALUE_TAG, name, strlen(name));
    put_varint(&value, VALUE_SIMPLE);
    mt_str_append(&value, (const char *)&f, sizeof(f));
    put_bytes(summary, SUMMARY_VALUE, value.p, value.len);
}

void mt_tensorboard_write(struct mt_tensorboard *t, const cJSON *record)
{
    MT_STR_FREED struct mt_str summary = {0}, event = {0};
    const cJSON *step = mt_json_get(record, "step"), *layer = mt_json_get(record, "layer");
    char name[96];
    for (const cJSON *v = record->child; v; v = v->next) {
        if (!cJSON_IsNumber(v) || v == step || v == layer)
            continue;
        snprintf(name, sizeof(name), layer ? "%.60s/layer %d" : "%.60s", v->string, layer ? layer->valueint : 0);
        put_scalar(&summary, name, v->valuedouble);
    }
    put_event_head(&event, step ? (uint64_t)step->valuedouble : 0);
    put_bytes(&event, EVENT_SUMMARY, summary.p, summary.len);
    write_record(t, &event);
}
