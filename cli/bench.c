/* SPDX-License-Identifier: Apache-2.0 */
#include "bench.h"

#include <fnmatch.h>
#include <stdio.h>
#include <string.h>

#include "base/fs.h"

bool bench_chosen(const struct bench *b, const struct mt_sweep_job *j)
{
    const char *glob = cli_arg(b->args, "only");
    if (!glob || !fnmatch(glob, j->name, 0))
        return true;
    for (const cJSON *a = j->axes->child; a; a = a->next) {
        char point[600];
        snprintf(point, sizeof(point), "%s=%s", a->string, a->valuestring);
        if (!fnmatch(glob, point, 0))
            return true;
    }
    return false;
}

void bench_describe(char *buf, size_t len, const struct mt_sweep_job *j)
{
    int at = snprintf(buf, len, "%s", j->name);
    for (const cJSON *a = j->axes->child; a && at >= 0 && (size_t)at < len; a = a->next) {
        const char *dot = strchr(a->string, '.');
        at += snprintf(buf + at, len - (size_t)at, "%s%s=%s", at ? " " : "", dot ? dot + 1 : "", a->valuestring);
    }
    if (!buf[0])
        snprintf(buf, len, "%s", j->hash);
}

int bench_write_job(const struct bench *b, const struct mt_sweep_job *j, char *path, size_t len, struct mt_err *err)
{
    snprintf(path, len, "%.3000s/%s.ini", b->dir, j->hash);
    return mt_write_file(path, j->ini, strlen(j->ini), err);
}
