/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>

/** A page of `megatrain help` that is about no command; also a section of the manual page. */
struct cli_topic {
    const char *name;  /* "models" */
    const char *title; /* what it tells, in a few words */
    const char *const *text; /* paragraphs, of help/<name>.txt; ends with NULL */
};
extern const struct cli_topic cli_topics[];
extern const size_t cli_n_topics;
/** Writes the page. roff: for the manual page. */
void cli_topic_print(const struct cli_topic *t, bool roff);
/** Prints the topic policy as the manual page megatrain-policy(7). */
void cli_print_policy_manual(void);
/** Prints the manual page megatrain-cluster(7). */
void cli_print_cluster_manual(void);
