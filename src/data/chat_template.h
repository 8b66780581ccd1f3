/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>

#include "base/err.h"

/** Whether data.template is a file: neither "model" nor a built-in template, whatever the working folder has. */
bool mt_chat_template_is_file(const char *name);
/**
 * The text of the chat template that data.template = `name` means. "model": *text is NULL, since the model has it.
 * MT_ERR_RUNTIME: it cannot be read. The caller frees *text.
 */
int mt_chat_template_read(char **text, const char *name, struct mt_err *err);
