/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "base/mem.h"
#include "base/strbuf.h"
#include "hf/safetensors.h"

int mt_st_file_order(const void *a, const void *b)
{
    const struct mt_st_decl *x = a, *y = b;
    size_t sx = mt_st_dtype_size(x->dtype), sy = mt_st_dtype_size(y->dtype);
    if (sx != sy)
        return sx > sy ? -1 : 1;
    return strcmp(x->name, y->name);
}

size_t mt_st_decl_bytes(const struct mt_st_decl *d)
{
    size_t n = mt_st_dtype_size(d->dtype);
    for (int i = 0; i < d->n_dims; i++)
        n *= (size_t)d->shape[i];
    return n;
}

int mt_st_build_header(char **out, size_t *len, const struct mt_st_decl *decls, size_t n,
                       struct mt_err *err)
{
    static const char spaces[] = "       ";
    struct mt_str s = {0};
    size_t at = 0;
    mt_str_append(&s, "\0\0\0\0\0\0\0\0", 8);
    mt_str_printf(&s, "{\"__metadata__\":{\"format\":\"pt\"}");
    for (size_t i = 0; i < n; i++) {
        size_t bytes = mt_st_decl_bytes(&decls[i]);
        mt_str_printf(&s, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[", decls[i].name,
                      mt_st_dtype_name(decls[i].dtype));
        for (int k = 0; k < decls[i].n_dims; k++)
            mt_str_printf(&s, "%s%lld", k ? "," : "", (long long)decls[i].shape[k]);
        mt_str_printf(&s, "],\"data_offsets\":[%zu,%zu]}", at, at + bytes);
        at += bytes;
    }
    mt_str_printf(&s, "}");
    mt_str_append(&s, spaces, mt_align_up(s.len, 8) - s.len);
    if (s.failed) {
        mt_str_finish(&s);
        return mt_fail_nomem(err, "a safetensors header", s.len);
    }
    uint64_t json = s.len - 8;
    for (int i = 0; i < 8; i++)
        s.p[i] = (char)(json >> (8 * i));
    *out = s.p;
    *len = s.len;
    return 0;
}
