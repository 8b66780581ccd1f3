/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_BASE_INSTALLED_H
#define MT_BASE_INSTALLED_H

#include <stdbool.h>
#include <stddef.h>

/**
 * The folder of data of that name ("machines", "models") that belongs to the program: configs/ of the sources from
 * which it was built, or share/megatrain where it is installed. False: there is none.
 */
bool mt_installed_dir(char *buf, size_t len, const char *name);

#endif
