/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

/** What the kernel knows of errors of the machine's memory (EDAC: Documentation/admin-guide/ras.rst). */
struct mt_ecc {
    bool known;         /* a driver reports them: the memory has ECC. Else it may have it all the same */
    uint64_t corrected, uncorrected; /* since the machine started, or the driver was loaded */
};
/** `root`: a folder in the place of /, for tests; "" for the machine. */
void mt_hw_ecc(struct mt_ecc *out, const char *root);
