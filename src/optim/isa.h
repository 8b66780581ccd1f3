/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>

/** Which instruction set updates run with; AUTO picks the best the CPU has. All give the same bits. */
enum mt_isa { MT_ISA_AUTO, MT_ISA_SCALAR, MT_ISA_AVX2, MT_ISA_AVX512 };
const char *mt_isa_name(enum mt_isa isa);
/** The set that AUTO picks on this CPU. */
enum mt_isa mt_isa_best(void);
bool mt_isa_available(enum mt_isa isa);
