/* SPDX-License-Identifier: Apache-2.0 */
#ifndef CLI_MANUAL_CLUSTER_H
#define CLI_MANUAL_CLUSTER_H

/** Prints the manual page megatrain-cluster(7). */
void cli_print_cluster_manual(void);

#endif
