/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "device/kind.h"

/* Defined in device_cuda.c, or in stub.c in a build without nvcc. */
int mt_cuda_device_create(mt_device **out, const struct mt_device_params *p, struct mt_err *err);
void mt_cuda_probe(struct mt_device_info *out, int index);
int mt_cuda_count(void);
void mt_cuda_identify(char *out, size_t len, int index);

extern const struct mt_device_kind mt_cuda_kind;
