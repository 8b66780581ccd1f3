/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "plan/sim.h"

/**
 * Writes a step as a Chrome trace (JSON of complete events, for Perfetto and chrome://tracing): one process
 * for the measured step and one for the predicted one, with a thread per queue. `graph` may be NULL: no prediction.
 * Times start at the first instruction's begin.
 */
int mt_trace_write(const char *path, const struct mt_trace_span *spans, size_t n,
                   const struct mt_sim_graph *graph, const struct mt_layout *layout, struct mt_err *err);
