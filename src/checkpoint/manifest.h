/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "checkpoint/vfs.h"

/**
 * The format that saving and loading share.
 *
 * megatrain/state.json has, under "files", for every file its "size", its "xxh3", and for a safetensors file
 * the "tensors" with the XXH3 of each one's bytes, and that of the "header" before them (files of version 0.1.0~rc1
 * may lack it). Sums are 16 hexadecimal digits. megatrain/seal.json
 * seals state.json. A checkpoint of weights alone has manifest.json instead of state.json.
 */
#define MT_STATE_NAME "state.json"
#define MT_MANIFEST_NAME "manifest.json"
/** Beside megatrain/: where transformers has templates other than the default, tool_use or rag. */
#define MT_MORE_TEMPLATES "additional_chat_templates/"
enum { MT_SUM_TEXT = 17 };
void mt_sum_format(char text[MT_SUM_TEXT], uint64_t sum);

/** The text of seal.json for a file `name` with that sum. It has a sum of itself, too. To be freed with free(). */
char *mt_seal_text(const char *name, uint64_t sum);

/** Adds a complete file to the list of files. tensors: their sums, which it takes over; NULL: it has no tensors. */
void mt_manifest_add_file(cJSON *files, const char *name, const struct mt_out_file *f, cJSON *tensors);

/** XXH3 and size of a file's bytes [first, first + n); n = UINT64_MAX: to its end. */
int mt_sum_file(const char *path, uint64_t first, uint64_t n, uint64_t *sum, uint64_t *size,
                struct mt_err *err);

/** The step of "checkpoint-<step>" or, with suffix ".tmp", of "checkpoint-<step>.tmp"; false for any other name. */
bool mt_checkpoint_parse_name(const char *name, const char *suffix, uint64_t *step);
/** Steps of DIR's checkpoints by their names, newest first; the caller frees *steps. A missing folder has none. */
int mt_checkpoint_list(const char *dir, uint64_t **steps, size_t *n, struct mt_err *err);
