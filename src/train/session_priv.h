/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_TRAIN_SESSION_PRIV_H
#define MT_TRAIN_SESSION_PRIV_H

#include "hw/hw.h"
#include "train/session.h"

/* inputs.c */
int mt_session_open_model(struct mt_session *s, struct mt_err *err);
/** Clears the session; opens model and data. */
int mt_session_open_inputs(struct mt_session *s, struct mt_config *cfg, const cJSON *from_files,
                           struct mt_err *err);
/** Micro-batches, samplers, the number of steps. */
int mt_session_lay_out_steps(struct mt_session *s, struct mt_err *err);

/* session.c */
/** The planes' parameters; their elems are allocated, the caller's to free. */
int mt_session_plane_params(const struct mt_session *s, struct mt_plane_set_params *p, struct mt_err *err);

#endif
