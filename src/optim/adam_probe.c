/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "optim/adam.h"

enum { N = 32 << 20, ROUNDS = 7 };

int mt_probe_adam(int n_threads, const int *cpus, double *ns, struct mt_err *err)
{
    struct mt_pool_params p = {"probe", n_threads, cpus, NULL};
    mt_pool *pool = NULL;
    char *mem = mt_alloc_aligned((size_t)N * 14);
    int64_t best = INT64_MAX;
    int rc = mem ? mt_pool_create(&pool, &p, err)
                 : mt_fail_nomem(err, "the Adam probe", (unsigned long long)N * 14);
    if (!rc) {
        struct mt_adam a = {.n = N, .hi = (uint16_t *)(void *)mem,
                            .lo = (uint16_t *)(void *)(mem + (size_t)N * 2), .m = mem + (size_t)N * 4,
                            .v = mem + (size_t)N * 8, .grad = mem + (size_t)N * 12,
                            .state_dtype = MT_F32, .grad_dtype = MT_BF16, .lr = 1e-4, .beta1 = 0.9,
                            .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.01, .clip = 1};
        memset(mem, 0, (size_t)N * 12);
        for (size_t i = 0; i < N; i++) /* gradients of different values */
            ((uint16_t *)(void *)(mem + (size_t)N * 12))[i] = (uint16_t)(0x3c00 + i * 2654435761u % 512);
        for (int r = 0; r < ROUNDS; r++) {
            int64_t t0 = mt_now_ns();
            a.t = (uint64_t)r + 1;
            mt_adam_run_pool(&a, MT_ADAM_AUTO, pool);
            best = MT_MIN(best, mt_now_ns() - t0);
        }
        *ns = (double)best / N;
    }
    mt_pool_destroy(&pool);
    free(mem);
    return rc;
}
