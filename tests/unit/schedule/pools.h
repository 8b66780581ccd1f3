/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_TEST_POOLS_H
#define MT_TEST_POOLS_H

#include "schedule/program.h"

/** Fewest buffers of each pool with which a program can be built. */
static inline void take_fewest_buffers(const struct mt_program_params *p, int n[MT_N_POOLS])
{
    size_t bytes[MT_N_POOLS];
    int most[MT_N_POOLS];
    mt_program_size_pools(p, 0, bytes, n, most);
}

/** A unit's ports, up to the first without a role; returns how many. */
static inline uint8_t take_ports(struct mt_port to[MT_MAX_PORTS], const struct mt_port *ports)
{
    uint8_t n = 0;
    for (; ports[n].role != MT_ROLE_NONE; n++)
        to[n] = ports[n];
    return n;
}

enum { HIDDEN_BYTES = 64 };
static const struct mt_port embedding_ports[] = {{MT_ROLE_TABLE, MT_READ, MT_NO_ACCESS},
                                                 {MT_ROLE_Y, MT_WRITE, MT_NO_ACCESS, HIDDEN_BYTES},
                                                 {MT_ROLE_DX, MT_NO_ACCESS, MT_READ, HIDDEN_BYTES},
                                                 {MT_ROLE_TABLE_GRAD, MT_NO_ACCESS, MT_ADD},
                                                 {MT_ROLE_NONE}};
static const struct mt_port layer_ports[] = {{MT_ROLE_WEIGHTS, MT_READ, MT_READ},
                                             {MT_ROLE_X, MT_READ, MT_READ},
                                             {MT_ROLE_Y, MT_WRITE, MT_NO_ACCESS, HIDDEN_BYTES},
                                             {MT_ROLE_DX, MT_NO_ACCESS, MT_UPDATE, HIDDEN_BYTES},
                                             {MT_ROLE_GRAD, MT_NO_ACCESS, MT_SUM},
                                             {MT_ROLE_NONE}};
static const struct mt_port head_ports[] = {{MT_ROLE_WEIGHTS, MT_READ, MT_NO_ACCESS},
                                            {MT_ROLE_X, MT_READ, MT_NO_ACCESS},
                                            {MT_ROLE_DX, MT_WRITE, MT_NO_ACCESS, HIDDEN_BYTES},
                                            {MT_ROLE_GRAD, MT_SUM, MT_NO_ACCESS},
                                            {MT_ROLE_NONE}};
static const struct mt_port tied_head_ports[] = {{MT_ROLE_WEIGHTS, MT_READ, MT_NO_ACCESS},
                                                 {MT_ROLE_TABLE, MT_READ, MT_NO_ACCESS},
                                                 {MT_ROLE_X, MT_READ, MT_NO_ACCESS},
                                                 {MT_ROLE_DX, MT_WRITE, MT_NO_ACCESS, HIDDEN_BYTES},
                                                 {MT_ROLE_GRAD, MT_SUM, MT_NO_ACCESS},
                                                 {MT_ROLE_TABLE_GRAD, MT_SUM, MT_NO_ACCESS},
                                                 {MT_ROLE_NONE}};

#endif
