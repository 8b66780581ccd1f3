/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>

/** A page of `megatrain help` that is about no command; also a section of the manual page. */
struct cli_topic {
    const char *name;  /* "models" */
    const char *title; /* what it tells, in a few words */
    /** Writes the page. roff: for the manual page. */
    void (*print)(int roff);
};
extern const struct cli_topic cli_topics[];
extern const size_t cli_n_topics;
