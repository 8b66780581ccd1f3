/* SPDX-License-Identifier: Apache-2.0 */
#include "checkpoint/manifest.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

#include "base/fs.h"
#include "base/json.h"
#include "base/mem.h"

void mt_sum_format(char text[MT_SUM_TEXT], uint64_t sum)
{
    snprintf(text, MT_SUM_TEXT, "%016llx", (unsigned long long)sum);
}

char *mt_seal_text(const char *name, uint64_t sealed)
{
    char *text = NULL, sum[MT_SUM_TEXT], own[MT_SUM_TEXT];
    mt_sum_format(sum, sealed);
    mt_sum_format(own, XXH3_64bits(sum, MT_SUM_TEXT - 1)); /* distinguishes a damaged seal from a damaged sealed file */
    if (asprintf(&text, "{\n\t\"%s\":\t\"%s\",\n\t\"seal.json\":\t\"%s\"\n}\n", name, sum, own) < 0)
        return NULL;
    return text;
}

void mt_manifest_add_file(cJSON *files, const char *name, const struct mt_out_file *f, cJSON *tensors)
{
    char sum[MT_SUM_TEXT];
    cJSON *o = cJSON_AddObjectToObject(files, name);
    mt_sum_format(sum, f->sum);
    mt_json_put(o, "size=%f, xxh3=%s", (double)f->bytes, sum);
    if (!tensors)
        return;
    mt_sum_format(sum, f->header);
    cJSON_AddStringToObject(o, "header", sum);
    mt_json_add(o, "tensors", tensors);
}

int mt_sum_file(const char *path, uint64_t first, uint64_t n, uint64_t *sum, uint64_t *size,
                struct mt_err *err)
{
    XXH3_state_t *state = XXH3_createState();
    enum { PIECE = 1 << 20 };
    MT_FREED char *buf = malloc(PIECE);
    struct mt_err why = {0};
    MT_FD_CLOSED int fd = mt_open_regular(path, &why);
    int rc = 0;
    uint64_t at = 0;
    if (fd == -ENOENT)
        rc = mt_fail(err, MT_ERR_CHECKPOINT, fd, "%s is missing: %s", path, strerror(-fd));
    else if (fd < 0)
        rc = mt_fail(err, MT_ERR_CHECKPOINT, fd, "%s", why.msg);
    else if (!state || !buf)
        rc = mt_fail_nomem(err, path, PIECE);
    else
        XXH3_64bits_reset(state);
    if (!rc && !first)
        posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED); /* what the drive has is to be read, not what was written */
    while (!rc && at < n) {
        ssize_t got = pread(fd, buf, MT_MIN((uint64_t)PIECE, n - at), (off_t)(first + at));
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            rc = mt_fail(err, MT_ERR_CHECKPOINT, -errno, "cannot read %s: %s", path, strerror(errno));
        if (got <= 0)
            break;
        XXH3_64bits_update(state, buf, (size_t)got);
        at += (uint64_t)got;
    }
    if (!rc) {
        *sum = XXH3_64bits_digest(state);
        *size = at;
    }
    XXH3_freeState(state);
    return rc;
}

static int newest_first(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x < y) - (x > y);
}

bool mt_checkpoint_parse_name(const char *name, const char *suffix, uint64_t *step)
{
    static const char head[] = "checkpoint-";
    const char *p = name + sizeof(head) - 1;
    if (strncmp(name, head, sizeof(head) - 1))
        return false;
    size_t digits = strspn(p, "0123456789");
    if (!digits || (digits > 1 && *p == '0') || strcmp(p + digits, suffix))
        return false;
    errno = 0;
    *step = strtoull(p, NULL, 10);
    return !errno;
}

int mt_checkpoint_list(const char *dir, uint64_t **steps, size_t *n, struct mt_err *err)
{
    MT_DIR_CLOSED DIR *d = opendir(dir);
    size_t cap = 0;
    int rc = 0;
    *steps = NULL;
    *n = 0;
    if (!d)
        return errno == ENOENT ? 0
                               : mt_fail(err, MT_ERR_RUNTIME, -errno, "cannot open %s: %s", dir,
                                         strerror(errno));
    while (!rc) {
        uint64_t step;
        errno = 0;
        const struct dirent *e = readdir(d);
        if (!e && errno)
            rc = mt_fail(err, MT_ERR_RUNTIME, -errno, "cannot list %s: %s", dir, strerror(errno));
        if (!e)
            break;
        if (!mt_checkpoint_parse_name(e->d_name, "", &step))
            continue;
        if (mt_grow(steps, &cap, *n + 1, sizeof(uint64_t)))
            (*steps)[(*n)++] = step;
        else
            rc = mt_fail_nomem(err, dir, (*n + 1) * sizeof(uint64_t));
    }
    if (rc) {
        free(*steps);
        *steps = NULL;
        *n = 0;
    } else if (*n) {
        qsort(*steps, *n, sizeof(uint64_t), newest_first);
    }
    return rc;
}
