/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "checkpoint/state.h"

/* The model card of an export: README.md with the metadata that the Hugging Face Hub reads, and what the run was. */
#define MT_CARD_NAME "README.md"

struct mt_card {
    const char *name;   /* of the export */
    bool adapters;      /* adapters alone */
    bool merged;        /* adapters that were merged into the model */
    const char *packed; /* the format of packed matrices, or NULL */
};
/** The text, to be freed; NULL: no memory. Of paths it has the last part alone: folders are nobody else's business. */
char *mt_card_text(const struct mt_card *c, const struct mt_train_state *s);
