/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>

/**
 * The folder that the Hugging Face hub cache ($HF_HUB_CACHE, $HF_HOME/hub, ~/.cache/huggingface/hub) has for the branch
 * main of a repository: kind "models" or "datasets", name "org/name", of `len` characters. Never downloads. The caller
 * frees it; NULL: it is not there.
 */
char *mt_hub_snapshot(const char *kind, const char *name, size_t len);
