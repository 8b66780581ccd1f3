/* SPDX-License-Identifier: Apache-2.0 */
/* The turn of the step on stored machines: how long nothing computes between backward and the next forward. */
#include <string.h>

#include "shapes.h"
#include "base/mem.h"
#include "test.h"

static char **machines;

struct turn {
    double idle, step;
    double end; /* of idle: after the last instruction of backward */
};

/* Idle time of compute before the first layer's forward and after the last instruction of backward. */
static struct turn measure(const struct mt_sim_graph *g, const struct mt_sim_result *r)
{
    double busy = 0, end = 0;
    bool first = true;
    for (size_t i = 0; i < g->n; i++) {
        const struct mt_sim_task *t = &g->tasks[i];
        if (t->queue != MT_Q_COMPUTE)
            continue;
        if (first && t->op == MT_OP_FORWARD) {
            busy = t->start - busy; /* what ran before it was the embedding */
            first = false;
        }
        busy += first ? t->end - t->start : 0;
        end = t->end;
    }
    return (struct turn){busy + r->makespan - end, r->seconds, r->makespan - end};
}

static struct turn simulate(const char *path, enum mt_embedding_place home, size_t rows)
{
    static const struct shape qwen7b = {3584, 18944, 28, 28, 4, 152064};
    MT_CLOSED_BY(mt_layout_destroy) struct mt_layout *l = make_layout(&qwen7b);
    struct mt_machine m;
    struct mt_plan_choice c;
    struct mt_sim_graph g;
    MUST(mt_machine_read, &m, path);
    MUST(mt_machine_complete, &m, path);
    struct mt_plan_request r = make_request(l, &m, 2048, rows);
    r.placement.embedding = home;
    r.placement.host_budget.bytes = (uint64_t)256 << 30;
    r.placement.activations = MT_ACT_RECOMPUTE;
    r.placement.keep_layers = r.placement.offload_layers = 0;
    r.placement.slots = 3;
    r.placement.threads = (int64_t)m.rate[MT_RATE_CORES].value;
    r.numerics.micro_batch = 8;
    r.numerics.logits_chunk = 2048;
    MUST(mt_plan_evaluate, &c, &r, &g);
    assert_int_equal(c.engine.program.gather, home == MT_EMBEDDING_HOST);
    struct turn t = measure(&g, &c.sim);
    mt_sim_graph_finish(&g);
    mt_plan_choice_finish(&c);
    return t;
}

TEST(the_turn_does_not_wait_for_the_embedding)
{
    for (char **path = machines; *path; path++)
        for (size_t rows = 8; rows <= 32; rows *= 4) {
            struct turn all = simulate(*path, MT_EMBEDDING_DEVICE, rows), few = simulate(*path, MT_EMBEDDING_HOST, rows);
            printf("%s, %zu tokens: nothing computes for %.0f ms (%.0f at the end), gathered %.0f ms (%.0f): %.3f; "
                   "a step %.2f s, %.2f s\n",
                   strrchr(*path, '/') + 1, rows * 2048, 1e3 * all.idle, 1e3 * all.end, 1e3 * few.idle, 1e3 * few.end,
                   few.idle / all.idle, all.step, few.step);
            assert_true(few.idle < 0.3 * all.idle);
            assert_true(few.step < all.step - 0.8 * (all.idle - few.idle)); /* the time is not lost elsewhere */
        }
}

int main(int argc, char **argv)
{
    if (argc < 2)
        return 77;
    machines = argv + 1;
    return test_run();
}
