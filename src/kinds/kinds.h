/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "device/kind.h"

/** Finds a kind by name; NULL: there is none. */
const struct mt_device_kind *mt_device_kind(const char *name);

/** Looks for a device of that kind; an unknown kind is not present. Thread-safety: any thread. */
void mt_device_probe(struct mt_device_info *out, const char *kind, int index);

/** Resolves "auto" to "cuda" if that GPU is present, else to "cpu", with a warning if the machine has one that this build
 * cannot use; returns other kinds unchanged. *gpu describes the
 * GPU that was found; not present if `kind` is "cpu". */
const char *mt_device_choose(const char *kind, int index, struct mt_device_info *gpu);

/** Opens a device of the kind params->kind. */
int mt_device_create(mt_device **out, const struct mt_device_params *params, struct mt_err *err);
