/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <string.h>

#include "model/part.h"

/** A parameter of the unit's part of that kind ("attention"), by its role in that kind; n = 0: none. */
static inline struct mt_param param_of(const struct mt_layout *l, size_t unit, const char *part, int role)
{
    const struct mt_unit *u = &l->units[unit];
    for (size_t i = u->first_part; i < u->first_part + u->n_parts; i++)
        if (!strcmp(l->parts[i].kind->name, part))
            return l->parts[i].param[role];
    return (struct mt_param){0};
}
