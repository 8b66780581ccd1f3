/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "hf/hf_config.h"
#include "hf/keys.h"

/** Layers whose mixer is another than attention (mt_family.mixer). */

/** Reads the numbers of the mixer, if any layer has it, and refuses those that it does not have; after c->hidden and
 * c->n_layers are known. Does nothing in families without a mixer. */
void mt_mixer_read(struct mt_keys *r, const struct mt_hf_config *c, struct mt_layer_spec *s);
/** How many layers a list or a pattern names, in families that have such; 0: neither is there. */
int64_t mt_mixer_count(struct mt_keys *r, const struct mt_family *f);
/** kind[n_layers], by layer: an index of mt_mixer_family.kinds, of which 0 has the mixer. Leaves `kind` alone in
 * families without a mixer; refuses kinds that are not known or not supported. */
void mt_mixer_layers(struct mt_keys *r, const struct mt_hf_config *c, uint8_t *kind);
