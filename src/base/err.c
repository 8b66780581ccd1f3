/* SPDX-License-Identifier: Apache-2.0 */
#include "base/err.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/visible.h"

int mt_fail(struct mt_err *err, enum mt_err_kind kind, int code, const char *fmt, ...)
{
    if (err) {
        va_list ap;
        va_start(ap, fmt);
        char text[sizeof(err->msg)];
        int n = vsnprintf(text, sizeof(text), fmt, ap);
        va_end(ap);
        if (code == -EMFILE && n >= 0 && (size_t)n < sizeof(text))
            snprintf(text + n, sizeof(text) - (size_t)n, ": raise the limit, ulimit -n");
        mt_visible(err->msg, sizeof(err->msg), text);
        err->code = code;
        err->kind = kind;
        err->short_device = err->short_host = 0;
    }
    return code;
}

int mt_fail_prefix(struct mt_err *err, int code, const char *fmt, ...)
{
    if (err) {
        char head[sizeof(err->msg)], tail[sizeof(err->msg)];
        va_list ap;
        va_start(ap, fmt);
        vsnprintf(tail, sizeof(tail), fmt, ap);
        va_end(ap);
        mt_visible(head, sizeof(head), tail);
        memcpy(tail, err->msg, sizeof(tail));
        int n = snprintf(err->msg, sizeof(err->msg), "%s: ", head);
        if (n > 0 && (size_t)n < sizeof(err->msg))
            snprintf(err->msg + n, sizeof(err->msg) - (size_t)n, "%s", tail);
        err->code = code;
    }
    return code;
}

int mt_fail_nomem(struct mt_err *err, const char *what, unsigned long long bytes)
{
    enum { WORTH_SAYING = 1 << 12 }; /* less is a name's length, or not known */
    if (bytes < WORTH_SAYING)
        return mt_fail(err, MT_ERR_NO_FIT, -ENOMEM, "out of memory: there is none for %s", what);
    return mt_fail(err, MT_ERR_NO_FIT, -ENOMEM, "out of memory: %llu bytes for %s", bytes, what);
}
