/* SPDX-License-Identifier: Apache-2.0 */
#include "kinds/select.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "kinds/kinds.h"

static const char by_index[] = "index:", by_id[] = "GPU-";

static bool begins(const char *s, const char *with)
{
    return !strncmp(s, with, strlen(with));
}

bool mt_device_list_named(const char *gpus)
{
    return begins(gpus, by_index) || begins(gpus, by_id);
}

static int fail_form(const char *gpus, int most, struct mt_err *err)
{
    return mt_fail(err, MT_ERR_USAGE, -EINVAL,
                   "device.gpus = \"%.200s\": give a number from 1 to %d, all, index:0,2, or "
                   "identifiers GPU-...,GPU-... as nvidia-smi -L prints them",
                   gpus, most);
}

/* A decimal number in [0, 1024]; *end: what follows. -1: none. */
static int number(const char *s, const char **end)
{
    char *e;
    long v = *s >= '0' && *s <= '9' ? strtol(s, &e, 10) : -1;
    *end = v < 0 ? s : e;
    return v > 1024 ? -1 : (int)v;
}

static int count_list(const char *gpus)
{
    int n = 1;
    for (const char *p = gpus; (p = strchr(p, ',')); p++)
        n++;
    return n;
}

int mt_device_count_named(int *n, const char *gpus, int most, struct mt_err *err)
{
    const char *end;
    *n = 0;
    if (!strcmp(gpus, "all"))
        return 0;
    if (mt_device_list_named(gpus))
        *n = count_list(gpus);
    else if ((*n = number(gpus, &end)) > 0 && *end)
        *n = -1;
    return *n >= 1 && *n <= most ? 0 : fail_form(gpus, most, err);
}

/* The device whose identifier begins with id[0 .. len). */
static int find(const struct mt_device_kind *k, const char *id, int len, int *index,
                struct mt_err *err)
{
    int n = k->count(), found = 0;
    char of[64];
    for (int i = 0; i < n; i++) {
        k->identify(of, sizeof(of), i);
        if (!strncmp(of, id, (size_t)len)) {
            *index = i;
            found++;
        }
    }
    if (found == 1)
        return 0;
    return mt_fail(
        err, MT_ERR_USAGE, -ENODEV,
        "device.gpus: %s GPU has an identifier that begins with %.*s: nvidia-smi -L lists "
        "them",
        found ? "more than one" : "no", len, id);
}

static int list(int index[], const struct mt_device_kind *k, const char *gpus, int most,
                struct mt_err *err)
{
    bool numbers = begins(gpus, by_index);
    const char *at = gpus + (numbers ? strlen(by_index) : 0);
    int rc = 0, n = 0;
    for (; !rc; at++) {
        int len = (int)strcspn(at, ",");
        const char *end = at + len;
        if (numbers)
            index[n] = number(at, &end);
        if ((numbers && index[n] < 0) || end != at + len || (!numbers && !begins(at, by_id)))
            return fail_form(gpus, most, err);
        rc = numbers ? 0 : find(k, at, len, &index[n], err);
        for (int i = 0; i < n && !rc; i++)
            if (index[i] == index[n])
                rc = mt_fail(err, MT_ERR_USAGE, -EINVAL,
                             "device.gpus = \"%.200s\" names GPU %d twice", gpus, index[n]);
        n++;
        at = end;
        if (!*at)
            break;
    }
    return rc;
}

int mt_device_select(int index[], int *n, int most, const char *kind, const char *gpus, int first,
                     struct mt_err *err)
{
    const struct mt_device_kind *k = mt_device_kind(kind);
    bool counted = k && k->count; /* else a run makes as many as it wants */
    int rc = mt_device_count_named(n, gpus, most, err);
    if (rc)
        return rc;
    if (mt_device_list_named(gpus))
        return counted ? list(index, k, gpus, most, err)
                       : mt_fail(err, MT_ERR_USAGE, -EINVAL,
                                 "device.gpus = \"%.200s\" names GPUs, and the run is on the %s "
                                 "device: give a number, or set device.kind = cuda",
                                 gpus, kind);
    if (!*n) {
        int there = counted ? k->count() - first : 1;
        *n = there < 1 ? 1 : there > most ? most : there;
    }
    for (int i = 0; i < *n; i++)
        index[i] = first + i;
    return 0;
}
