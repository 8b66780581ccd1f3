/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/**
 * From here on standard output and standard error, where they are terminals, show what would steer a terminal instead
 * of sending it (base/visible.h), except for what this program itself sends: two colours, and lines written over. So
 * text from files cannot, whichever command prints it and how. Files and pipes get every byte as it is. Once, at start.
 */
void cli_guard_terminals(void);
