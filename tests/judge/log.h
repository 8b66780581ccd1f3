/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "base/strbuf.h"
#include "device/meter.h"
#include "values.h"

/** Tokens of the micro-batch whose operations are told; some operations do not say how many there are. */
enum { MT_JUDGE_TOKENS = 24 };

/** Device operations as lines of text: number, name, numbers, what is read, what is written. */
struct mt_judge_log {
    struct mt_judge_memory *memory; /* owned by the caller, as is the text */
    struct mt_str *out;
    size_t n_ops;       /* the next one's number, which names its results: "12.dx" */
    size_t n_unwritten; /* arrays that were read where nothing had been written */
};

/** For struct mt_meter_params: ctx is the log. Copies are told if they are of memory that the log knows. */
void mt_judge_operation(void *ctx, const struct mt_metered *op, const void *args);
void mt_judge_copy(void *ctx, enum mt_stream stream, const struct mt_copy *c);
/** Gives memory a name; with p NULL or no bytes nothing. */
void mt_judge_known(struct mt_judge_log *log, const void *p, size_t bytes, const char *name);
/** A line that says what the memory holds. */
void mt_judge_told(struct mt_judge_log *log, const void *p, size_t bytes, const char *name);
void mt_judge_say(struct mt_judge_log *log, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
