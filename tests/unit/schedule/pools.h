/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <errno.h>

#include "schedule/program.h"
#include "test.h"

/** Fewest buffers of each pool with which a program can be built. */
static inline void take_fewest_buffers(const struct mt_program_params *p, int n[MT_N_POOLS])
{
    size_t bytes[MT_N_POOLS];
    int most[MT_N_POOLS];
    mt_program_size_pools(p, 0, bytes, n, most);
}

/** Whether to count a wait of an instruction for queue q. */
typedef bool counts_wait(const struct mt_instr *in, int q);

/** A program has no redundant waits: fails the test unless the checker refuses it without each of them, one at a time. Returns how
 * many of them `counts` (NULL: none). `what` says which program it is. */
static inline size_t drop_each_wait(struct mt_program *p, counts_wait *counts, const char *what, unsigned number)
{
    size_t tried = 0, found = 0, counted = 0;
    for (size_t i = 0; i < p->n_instrs; i++)
        for (int q = 0; q < MT_MAX_QUEUES; q++) {
            int32_t w = p->instrs[i].wait[q];
            if (w < 0)
                continue;
            p->instrs[i].wait[q] = MT_NO_WAIT;
            tried++;
            counted += counts && counts(&p->instrs[i], q);
            found += mt_program_check(p, NULL) == -EPROTO;
            p->instrs[i].wait[q] = w;
        }
    assert_true(tried > 50);
    if (found != tried)
        fail_msg("%s %u: only %zu of %zu dropped waits were noticed", what, number, found, tried);
    return counted;
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
