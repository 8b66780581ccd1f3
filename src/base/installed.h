/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "base/strbuf.h"

/**
 * The folder of data of that name ("machines", "models") that belongs to the program: configs/ of the sources from
 * which it was built, or share/megatrain where it is installed. False: there is none.
 */
bool mt_installed_dir(char *buf, size_t len, const char *name);
/**
 * Appends the names of such a folder's files that end in `ending`, without it, sorted, with commas between: those that
 * begin as `like` does, whatever the case, for as many letters as any does, but at least three. like NULL: all.
 */
void mt_installed_names(struct mt_str *out, const char *name, const char *ending, const char *like);
