/* SPDX-License-Identifier: Apache-2.0 */
/* The update of each optimizer, type of states and master: nanoseconds a parameter of one thread, and beside AdamW's in
 * FP32 in the same run; from memory, as runs have them, and from a core's cache. CPU time, the best of several. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/mem.h"
#include "base/philox.h"
#include "optim/optimizer.h"

enum { CACHED = 1 << 16, IN_MEMORY = 1 << 24 };

struct planes {
    uint16_t *hi, *lo, *grad;
    char *state[2];
};

static double now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static void *pages(size_t bytes)
{
    void *p = mt_calloc(1, bytes);
    if (!p) {
        fputs("no memory for the planes\n", stderr);
        exit(1);
    }
    return p;
}

/* Weights and gradients of ordinary sizes; states of zeros. */
static void fill(struct planes *p, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        mt_master_split((float)mt_philox_uniform(1, 2, i % CACHED) - 0.5f, &p->hi[i], &p->lo[i]);
        p->grad[i] = mt_f32_to_bf16(((float)mt_philox_uniform(1, 3, i % CACHED) - 0.5f) * 1e-3f);
    }
    for (int k = 0; k < 2; k++)
        memset(p->state[k], 0, n * sizeof(float));
}

static double best_ns(const struct mt_optimizer *o, enum mt_master master, enum mt_isa isa, struct planes *p, size_t n)
{
    double keys[MT_OPTIMIZER_SLOTS] = {0}, best = 1e30;
    for (int i = 0; i < o->n_keys; i++)
        keys[i] = o->keys[i].def > 0 ? o->keys[i].def : o->n_states ? 0.9 : 0;
    struct mt_update u = {.n = n, .master = master, .hi = p->hi, .lo = p->lo, .lo8 = (uint8_t *)p->lo,
                          .state = {p->state[0], p->state[1]}, .grad = p->grad, .grad_dtype = MT_BF16, .keys = keys,
                          .lr = 1e-4, .weight_decay = 0.1, .clip = 1, .seed = 1};
    if (o->n_states && o->state[o->n_states - 1].apart) /* the states of vectors come last */
        memset(u.state + o->n_states / 2, 0, sizeof(*u.state));
    fill(p, n);
    const uint64_t turns = n == CACHED ? 100 : 5;
    for (u.t = 1; u.t <= turns; u.t++) {
        double began = now_ns();
        o->update(o, &u, isa);
        double took = now_ns() - began;
        best = took < best ? took : best;
    }
    return best / (double)n;
}

int main(void)
{
    static const char *const masters[] = {"f32", "24bit", "bf16"};
    struct planes p = {pages(IN_MEMORY * 2), pages(IN_MEMORY * 2), pages(IN_MEMORY * 2),
                       {pages((size_t)IN_MEMORY * 4), pages((size_t)IN_MEMORY * 4)}};
    for (enum mt_isa isa = MT_ISA_AVX2; isa <= MT_ISA_AVX512; isa++) {
        const struct mt_optimizer *o;
        double first[2] = {0, 0};
        if (!mt_isa_available(isa))
            continue;
        printf("%-8s %-12s %-6s %18s %18s\n", mt_isa_name(isa), "states", "master", "from memory", "from cache");
        for (size_t i = 0; (o = mt_optimizer_at(i)); i++)
            for (int m = 0; m < 3; m++) {
                char name[MT_OPTIMIZER_NAME];
                double memory = best_ns(o, (enum mt_master)m, isa, &p, IN_MEMORY);
                double cache = best_ns(o, (enum mt_master)m, isa, &p, CACHED);
                if (!i && !m) {
                    first[0] = memory;
                    first[1] = cache;
                }
                mt_update_form_name(&(struct mt_update_form){.optimizer = o}, name);
                printf("         %-12s %-6s %6.3f ns %6.2f x %6.3f ns %6.2f x\n", name, masters[m], memory,
                       memory / first[0], cache, cache / first[1]);
            }
    }
    puts("targets: adamw/8bit from memory at most 1.45 x (avx2), 1.7 x (avx512)");
    free(p.hi);
    free(p.lo);
    free(p.grad);
    free(p.state[0]);
    free(p.state[1]);
    return 0;
}
