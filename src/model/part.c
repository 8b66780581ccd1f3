/* SPDX-License-Identifier: Apache-2.0 */
#include "model/part.h"

#include <string.h>

#include "base/mem.h"

void *mt_record_take(struct mt_part_record *r, int segment, size_t bytes)
{
    void *base = r->base[segment], *p = base ? (char *)base + r->bytes[segment] : NULL;
    r->bytes[segment] += mt_align_up(bytes, MT_RECORD_ALIGN);
    return p;
}

size_t mt_part_n_segments(const struct mt_part_kind *kind)
{
    size_t n = 0;
    while (n < MT_PART_MAX_SEGMENTS && kind->segment[n])
        n++;
    return MT_MAX(n, (size_t)1);
}

const struct mt_part_kind *mt_part_find(const char *name)
{
#define ADDRESS_OF_PART(part) &mt_part_##part,
    static const struct mt_part_kind *const kinds[] = {MT_PARTS(ADDRESS_OF_PART)};
#undef ADDRESS_OF_PART
    for (size_t i = 0; i < MT_ARRAY_LEN(kinds); i++)
        if (!strcmp(kinds[i]->name, name))
            return kinds[i];
    return NULL;
}
