/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>

/**
 * Opens a library of CUDA, such as "libcublasLt.so.13": where the loader looks; in `toolkit`, the folder of the build's
 * libraries ("" for none); then where Python packages have it, nvidia/<part>/lib: in .venv-cuda or an environment's
 * site-packages below a folder above the program, and in the active environment. Never closed, like CUDA itself.
 * NULL: *why says so and where it was looked for, cut to `len`.
 */
void *mt_cuda_library(const char *name, const char *toolkit, char *why, size_t len);
