/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "config/config.h"
#include "model/adapter.h"

/**
 * The adapters that the keys of [adapter] ask for, or those of the folder adapter.path. `resumed`: the folder of a
 * checkpoint's adapters, which has the latter; NULL: none. {0} if adapter.kind = none. Refuses keys that the folder
 * says, and patterns that are not NAME:VALUE (MT_ERR_USAGE, -EINVAL). The caller finishes *out, on failure too.
 */
int mt_adapters_by_config(struct mt_adapter_spec *out, const struct mt_config *c, const char *resumed,
                          struct mt_err *err);

/** Replaces adapter.path by keys that say the same of the adapters, for a process that does not have the folder.
 * resumed: as above. */
int mt_adapters_spell_out(struct mt_config *c, const char *resumed, struct mt_err *err);
