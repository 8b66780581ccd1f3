/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "base/strbuf.h"
#include "device/ops.h"

/**
 * Which of cuBLASLt's algorithms does products of a shape, where several were timed: a table that a run reads before
 * its first product, so that its bits do not depend on how long something takes while it runs. Algorithms differ in
 * bits. A shape that is not in the table has the heuristic's first that starts.
 */
struct mt_choice_shape {
    uint64_t m, n, k;
    uint8_t dtype, d_dtype; /* enum mt_dtype */
    uint8_t trans_a, trans_b, bias, adds, unused[2]; /* compared as bytes: unused must be zero */
};
/* cuBLASLt's algorithm, tile, stages, parts of K, reduction, swizzling, option, inner shape, cluster shape. */
enum { MT_CHOICE_PARTS = 9 };
struct mt_choice {
    struct mt_choice_shape shape;
    uint32_t config[MT_CHOICE_PARTS];
};
enum { MT_MAX_CHOICES = 1024 };
struct mt_choices {
    struct mt_choice of[MT_MAX_CHOICES];
    size_t n;
};

/** NULL: there is none for the shape. */
const struct mt_choice *mt_choices_find(const struct mt_choices *t, const struct mt_choice_shape *s);
/** Adds one of a new shape; false: the table is full. */
bool mt_choices_add(struct mt_choices *t, const struct mt_choice *c);
/** Prints "nt bf16 bf16 4096x2048x512 66/20/36/1/0/0/0/0/1; tn bf16 f32 add 512x512x4096 ...". */
void mt_choices_print(const struct mt_choices *t, struct mt_str *out);
/** Takes a table in that form, with blanks around it, instead of what is there; false if the text is invalid, and
 * nothing changes. "": an empty table. */
bool mt_choices_read(struct mt_choices *t, const char *text, bool *changed);
