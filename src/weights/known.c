/* SPDX-License-Identifier: Apache-2.0 */
#include "weights/known.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/fs.h"
#include "base/json.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/sum64.h"

enum { HEX = 17 };

void mt_known_sums_path(char *path, size_t size, const struct mt_st_model *st)
{
    char cache[4096];
    MT_FREED char *first = mt_path_canonical(st->files[0].path);
    mt_cache_dir(cache, sizeof(cache));
    *path = '\0';
    if (first)
        mt_path_printf(path, size, "%s/sums/%016" PRIx64 ".json", cache, mt_sum64(first, strlen(first), 0));
}

/* What the files are known by; NULL: one cannot be looked at, or memory is short. Times are text: a double has too few
 * bits for nanoseconds. */
static cJSON *files_of(const struct mt_st_model *st)
{
    cJSON *list = cJSON_CreateArray();
    bool whole = list != NULL;
    for (int i = 0; i < st->n_files && whole; i++) {
        struct stat s;
        char time[48];
        MT_FREED char *path = mt_path_canonical(st->files[i].path);
        cJSON *file = path && !fstat(st->files[i].fd, &s) ? cJSON_CreateObject() : NULL;
        whole = file != NULL;
        if (whole) {
            snprintf(time, sizeof(time), "%lld.%09ld", (long long)s.st_mtim.tv_sec, s.st_mtim.tv_nsec);
            whole = mt_json_add(file, "path", cJSON_CreateString(path)) &&
                    mt_json_add(file, "bytes", cJSON_CreateNumber((double)s.st_size)) &&
                    mt_json_add(file, "changed", cJSON_CreateString(time));
            whole &= mt_json_append(list, file);
        }
    }
    if (!whole)
        cJSON_Delete(list);
    return whole ? list : NULL;
}

/* Sets the sums that `path` has of these very files. */
static void read_record(uint64_t *sum, const struct mt_layout *l, const char *path, const cJSON *files)
{
    MT_JSON_FREED cJSON *record = NULL;
    if (!mt_path_exists(path) || mt_json_read_file(&record, path, MT_ERR_RUNTIME, NULL))
        return;
    if (cJSON_Compare(mt_json_get(record, "files"), files, true)) {
        MT_JSON_INDEX_FREED struct mt_json_index sums = {.object = mt_json_get(record, "sums")};
        for (size_t i = 0; i < l->n_tensors; i++) {
            const cJSON *s = mt_json_index_get(&sums, l->tensors[i].name);
            if (cJSON_IsString(s) && !l->tensors[i].adapter)
                sum[i] = strtoull(s->valuestring, NULL, 16);
        }
    }
}

void mt_known_sums_get(uint64_t *sum, const struct mt_layout *l, const struct mt_st_model *st)
{
    char path[4096];
    MT_JSON_FREED cJSON *files = files_of(st);
    mt_known_sums_path(path, sizeof(path), st);
    if (files)
        read_record(sum, l, path, files);
}

/* Takes `files`. */
static int write_record(const uint64_t *sum, const struct mt_layout *l, const char *path, cJSON *files,
                        struct mt_err *err)
{
    cJSON *record = cJSON_CreateObject(), *sums = cJSON_CreateObject();
    bool whole = mt_json_add(record, "files", files);
    for (size_t i = 0; i < l->n_tensors && whole; i++) {
        char hex[HEX];
        snprintf(hex, sizeof(hex), "%016" PRIx64, sum[i]);
        whole = !sum[i] || mt_json_add(sums, l->tensors[i].name, cJSON_CreateString(hex));
    }
    whole &= mt_json_add(record, "sums", sums);
    MT_FREED char *text = whole ? mt_json_print(record, false) : NULL;
    int rc = text ? mt_write_file(path, text, strlen(text), err) : mt_fail_nomem(err, path, l->n_tensors * HEX);
    cJSON_Delete(record);
    return rc;
}

void mt_known_sums_keep(const uint64_t *sum, const struct mt_layout *l, const struct mt_st_model *st)
{
    char path[4096], dir[4096];
    struct mt_err err = {0};
    MT_JSON_FREED cJSON *files = files_of(st);
    MT_FREED uint64_t *all = mt_calloc(l->n_tensors, sizeof(*all));
    mt_known_sums_path(path, sizeof(path), st);
    snprintf(dir, sizeof(dir), "%s", path);
    if (*dir)
        *strrchr(dir, '/') = '\0';
    int rc = !all ? mt_fail_nomem(&err, "sums", l->n_tensors * sizeof(*all))
             : !files || !*path ? mt_fail(&err, MT_ERR_RUNTIME, -EIO, "its files cannot be looked at, or a path is too long")
                                : mt_mkdir_p(dir, &err);
    if (!rc) {
        read_record(all, l, path, files);
        for (size_t i = 0; i < l->n_tensors; i++)
            all[i] = sum[i] ? sum[i] : all[i];
        rc = write_record(all, l, path, files, &err);
        files = NULL;
    }
    if (rc)
        mt_info("the sums of the model's weights are not kept for later runs: %s", err.msg);
}
