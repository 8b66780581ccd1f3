/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_HF_MIXER_H
#define MT_HF_MIXER_H

#include "hf/hf_config.h"
#include "hf/keys.h"

/** Layers whose mixer is another than attention (mt_family.mixer). */

/** Reads the numbers of the mixer, and refuses those that it does not have. */
void mt_mixer_read(struct mt_keys *r, const struct mt_mixer_family *f, struct mt_layer_spec *s);
/** Sets of[i] for the layers that have it; leaves `of` alone in families without one. */
void mt_mixer_layers(struct mt_keys *r, const struct mt_hf_config *c, bool *of);

#endif
