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

enum { CACHED = 1 << 14, IN_MEMORY = 1 << 23 };

struct planes {
    uint16_t *hi, *lo, *grad;
    char *state[4]; /* two of the update that is timed, two of AdamW in FP32 beside it */
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
    for (int k = 0; k < 4; k++)
        memset(p->state[k], 0, n * sizeof(float));
}

/* An update of some form, whose states and scalars are set. */
struct timed {
    const struct mt_optimizer *o;
    struct mt_update u;
    double keys[MT_OPTIMIZER_SLOTS], best;
};

static void prepare(struct timed *t, const struct mt_update_form *f, struct planes *p, size_t n)
{
    static float of_device = 1; /* a tensor's number, if any */
    const struct mt_optimizer *o = f->optimizer;
    int planes = 0;
    *t = (struct timed){.o = o, .best = 1e30};
    for (int i = 0; i < o->n_keys; i++)
        t->keys[i] = o->keys[i].def > 0 ? o->keys[i].def : o->n_states ? 0.9 : 0;
    t->u = (struct mt_update){.n = n, .master = f->master, .hi = p->hi, .lo = p->lo, .lo8 = (uint8_t *)p->lo,
                              .grad = p->grad, .grad_dtype = MT_BF16, .keys = t->keys, .lr = 1e-4, .weight_decay = 0.1,
                              .clip = 1, .stochastic = f->stochastic, .seed = 1};
    for (int i = 0; i < o->n_states; i++) /* not those of vectors */
        t->u.state[i] = o->state[i].on_device ? (void *)&of_device : o->state[i].apart ? NULL : p->state[planes++];
}

static void run(struct timed *t, enum mt_isa isa)
{
    double began = now_ns();
    t->u.t++;
    t->o->update(t->o, &t->u, isa);
    double took = now_ns() - began;
    t->best = took < t->best ? took : t->best;
}

/* In turns with AdamW in FP32, so that both have the same machine. */
static void time_form(const struct mt_update_form *f, enum mt_isa isa, struct planes *p, size_t n, double ns[2])
{
    struct timed form, f32;
    struct planes other = *p;
    other.state[0] = p->state[2];
    other.state[1] = p->state[3];
    prepare(&form, f, p, n);
    prepare(&f32, &(struct mt_update_form){.optimizer = &mt_adamw}, &other, n);
    fill(p, n);
    for (int turn = 0; turn < (n == CACHED ? 100 : 7); turn++) {
        run(&f32, isa);
        run(&form, isa);
    }
    ns[0] = form.best / (double)n;
    ns[1] = f32.best / (double)n;
}

int main(void)
{
    struct planes p = {pages(IN_MEMORY * 2), pages(IN_MEMORY * 2), pages(IN_MEMORY * 2), {NULL}};
    for (int k = 0; k < 4; k++)
        p.state[k] = pages((size_t)IN_MEMORY * 4);
    for (enum mt_isa isa = MT_ISA_AVX2; isa <= MT_ISA_AVX512; isa++) {
        struct mt_update_form f;
        if (!mt_isa_available(isa))
            continue;
        printf("%-8s %-28s %20s %20s\n", mt_isa_name(isa), "update", "from memory", "from cache");
        for (size_t i = 0; mt_update_form_at(i, &f); i++) {
            char name[MT_OPTIMIZER_NAME];
            double memory[2], cache[2];
            time_form(&f, isa, &p, IN_MEMORY, memory);
            time_form(&f, isa, &p, CACHED, cache);
            mt_update_form_name(&f, name);
            printf("         %-28s %6.3f ns %6.2f x %8.3f ns %6.2f x\n", name, memory[0], memory[0] / memory[1],
                   cache[0], cache[0] / cache[1]);
            fflush(stdout);
        }
    }
    puts("targets: adamw/8bit from memory at most 1.45 x (avx2), 1.7 x (avx512)");
    free(p.hi);
    free(p.lo);
    free(p.grad);
    for (int k = 0; k < 4; k++)
        free(p.state[k]);
    return 0;
}
