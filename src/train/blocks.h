/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "config/blocks.h"
#include "train/control.h"

/**
 * Training by blocks of layers (config/blocks.h): a chain of ordinary runs in one process. A phase is a setup and a
 * session whose layout freezes all but a block; its base is the model with an overlay (checkpoint/overlay.h) of what
 * was trained before; or it trains adapters, which are new in each phase (adapter.merge_every; ReLoRA, Lialin et al.
 * 2023), and the overlay has what they were added to. At its end what it trained goes into the next overlay, and the
 * next phase begins from that as a new run does, but for its step, its updates and the sums that its base must have.
 */

/** The step at which the phase of a state is over; 0: the run has one phase. */
uint64_t mt_blocks_end_of(const struct mt_inputs *in, const struct mt_train_state *st);
/**
 * After a phase's last step: makes the pending update, writes the overlay, and turns the state into that of the next
 * phase before its first step. Session and setup are then only to be finished. After an error the state is as it was.
 * -ECANCELED: a request to stop came before the overlay was begun; this phase's state is to be saved, and a run that goes
 * on from it ends the phase.
 */
int mt_blocks_finish(const struct mt_train_params *p, struct mt_err *err);
