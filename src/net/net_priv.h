/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "net/net.h"
#include "net/wire.h"

/** Messages over a wire, which it closes with mt_net_close(), or if this fails. */
int mt_net_create(mt_net **out, mt_wire *wire, double deadline_s, struct mt_err *err);
