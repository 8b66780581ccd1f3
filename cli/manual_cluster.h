/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/** Prints the manual page megatrain-cluster(7). */
void cli_print_cluster_manual(void);
