/* SPDX-License-Identifier: Apache-2.0 */
#include "model/part.h"

#include <string.h>

#include "base/mem.h"

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
