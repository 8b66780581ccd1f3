/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "plan/search.h"
#include "base/mem.h"
#include "shapes.h"
#include "test.h"

enum { MAX = 16 };

struct graph {
    struct mt_sim_graph g;
    struct mt_sim_task task[MAX];
};

static int32_t task(struct graph *g, enum mt_queue q, double seconds, double bytes)
{
    struct mt_sim_task *t = &g->task[g->g.n];
    *t = (struct mt_sim_task){.queue = (uint8_t)q, .seconds = seconds, .bytes = bytes, .cause = -1};
    for (int k = 0; k < MT_MAX_QUEUES; k++)
        t->wait[k] = -1;
    g->g.tasks = g->task;
    return (int32_t)g->g.n++;
}

static void after(struct graph *g, int32_t t, int32_t other)
{
    g->task[t].wait[g->task[other].queue] = other;
}

static struct mt_sim_result run(struct graph *g, const struct mt_machine *m, double link_gbps)
{
    struct mt_sim_result r;
    struct mt_sim_params p = {.machine = m, .link_gbps = link_gbps};
    g->g.turn = g->g.n - 1;
    MUST(mt_sim_run, &r, &g->g, &p);
    return r;
}

#define NEAR(a, b) assert_true(fabs((a) - (b)) <= 1e-9 * (1 + fabs(b)))

TEST(queues_run_in_order_and_wait_for_each_other)
{
    struct mt_machine m = make_machine(24, 64, 0);
    struct graph g = {0};
    int32_t load = task(&g, MT_Q_H2D, 2, 0), load2 = task(&g, MT_Q_H2D, 1, 0);
    int32_t first = task(&g, MT_Q_COMPUTE, 5, 0), second = task(&g, MT_Q_COMPUTE, 1, 0);
    int32_t store = task(&g, MT_Q_D2H, 3, 0);
    after(&g, first, load);
    after(&g, second, load2);
    after(&g, store, second);
    struct mt_sim_result r = run(&g, &m, 0);
    NEAR(g.task[load2].start, 2.0);
    NEAR(g.task[first].start, 2.0);
    NEAR(g.task[second].start, 7.0); /* its load ended at 3, the compute queue was busy */
    NEAR(r.makespan, 11.0);
    NEAR(r.idle[MT_Q_H2D], 2.0);  /* before the first */
    NEAR(r.idle[MT_Q_D2H], 3.0);  /* after the last */
    NEAR(r.critical[MT_Q_COMPUTE], 6.0);
    NEAR(r.critical[MT_Q_H2D], 2.0);
    NEAR(r.critical[MT_Q_D2H], 3.0);
}

TEST(both_directions_of_a_link_slow_each_other)
{
    struct mt_machine m = make_machine(24, 64, 0);
    struct graph g = {0};
    m.rate[MT_RATE_H2D_BOTH].value = 12.5; /* of 25 */
    int32_t in = task(&g, MT_Q_H2D, 4, 0), out = task(&g, MT_Q_D2H, 1, 0);
    run(&g, &m, 0);
    NEAR(g.task[out].end, 1.0);
    NEAR(g.task[in].end, 4.5); /* half speed for one second */
}

TEST(reads_and_writes_share_the_drives)
{
    struct mt_machine m = make_machine(24, 64, 2);
    struct graph g = {0};
    m.rate[MT_RATE_READ_BOTH].value = 3.5; /* of 7 */
    int32_t read = task(&g, MT_Q_DISK_READ, 2, 0);
    task(&g, MT_Q_DISK_WRITE, 10, 0);
    run(&g, &m, 0);
    NEAR(g.task[read].end, 4.0); /* half speed beside a write */
}

TEST(the_latency_of_a_request_shows_only_where_nothing_is_under_way)
{
    struct mt_machine m = make_machine(24, 64, 1);
    struct graph g = {0};
    m.rate[MT_RATE_DISK_US].value = 1e5; /* a tenth of a second */
    int32_t a = task(&g, MT_Q_DISK_READ, 1, 0), b = task(&g, MT_Q_DISK_READ, 1, 0);
    int32_t use = task(&g, MT_Q_COMPUTE, 5, 0), c = task(&g, MT_Q_DISK_READ, 1, 0);
    after(&g, use, b);
    after(&g, c, use);
    run(&g, &m, 0);
    NEAR(g.task[a].end, 1.1);
    NEAR(g.task[b].end, 2.1);
    NEAR(g.task[c].end, 8.2);
}

TEST(on_the_cpu_device_updates_take_cores_from_compute)
{
    struct mt_machine m = make_machine(24, 64, 0);
    struct graph g = {0};
    m.cpu = true;
    m.rate[MT_RATE_SHARE_UPDATE] = (struct mt_rate){0.5, MT_RATE_MEASURED};
    m.rate[MT_RATE_UPDATE_SHARE] = (struct mt_rate){0.25, MT_RATE_MEASURED};
    int32_t c = task(&g, MT_Q_COMPUTE, 2, 0), a = task(&g, MT_Q_HOST, 2, 0);
    run(&g, &m, 0);
    NEAR(g.task[c].end, 4.0);
    NEAR(g.task[a].end, 5.0); /* a quarter of four seconds, then alone */
    /* a copy throttled to a tenth of what a thread copies costs compute a tenth of what a full one does */
    struct graph h = {0};
    m.rate[MT_RATE_COPY].value = 10;
    m.rate[MT_RATE_SHARE_COPY] = (struct mt_rate){0.5, MT_RATE_MEASURED};
    c = task(&h, MT_Q_COMPUTE, 0.95, 0);
    task(&h, MT_Q_H2D, 100, 0);
    run(&h, &m, 1);
    NEAR(h.task[c].end, 1.0);
}

TEST(on_the_cpu_device_messages_take_cores_that_are_not_idle)
{
    struct mt_machine m = make_machine(24, 64, 0);
    struct mt_sim_params p = {.machine = &m, .net = {.gbs = 1, .cores = 0.5}};
    m.cpu = true;
    m.rate[MT_RATE_CORES] = (struct mt_rate){4, MT_RATE_MEASURED};
    for (p.update_threads = 2; p.update_threads <= 4; p.update_threads++) {
        struct graph g = {0};
        struct mt_sim_result r;
        int32_t c = task(&g, MT_Q_COMPUTE, 0.875, 0), u = task(&g, MT_Q_HOST, 0.875, 0);
        task(&g, MT_Q_NET, 8, 8e9);
        g.g.turn = g.g.n - 1;
        MUST(mt_sim_run, &r, &g.g, &p);
        NEAR(g.task[c].end, p.update_threads < 4 ? 0.875 : 1.0); /* half a core of four */
        NEAR(g.task[u].end, g.task[c].end);
    }
}

TEST(on_the_cpu_device_a_thread_that_waited_goes_on_a_little_later)
{
    struct mt_machine m = make_machine(24, 64, 0);
    struct graph g = {0};
    m.cpu = true;
    m.rate[MT_RATE_COPY_US].value = 1e5; /* a tenth of a second */
    m.rate[MT_RATE_SHARE_COPY] = (struct mt_rate){0.5, MT_RATE_MEASURED};
    int32_t a = task(&g, MT_Q_COMPUTE, 1, 0), b = task(&g, MT_Q_COMPUTE, 1, 0), out = task(&g, MT_Q_D2H, 1, 0);
    int32_t last = task(&g, MT_Q_D2H, 1, 0), use = task(&g, MT_Q_COMPUTE, 1, 0);
    after(&g, out, a);
    after(&g, use, last);
    run(&g, &m, 0);
    NEAR(g.task[b].start, 1.0); /* waited for nobody */
    NEAR(g.task[out].end, 2.1);
    NEAR(g.task[b].end, 2.9);  /* at half the speed beside the copies, and at full speed before they begin */
    NEAR(g.task[last].end, 3.1);
    NEAR(g.task[use].end, 4.2);
    m.cpu = false; /* a GPU's queues wait for each other themselves */
    run(&g, &m, 0);
    NEAR(g.task[use].end, 4.0);
}

/* Copies of two sizes are measured; those of the larger model are between these. */
TEST(on_the_cpu_device_short_copies_are_in_the_caches)
{
    struct mt_machine m = make_machine(1, 64, 0);
    m.cpu = true;
    m.rate[MT_RATE_H2D].value = m.rate[MT_RATE_D2H].value = 10;
    m.rate[MT_RATE_H2D_SHORT].value = m.rate[MT_RATE_D2H_SHORT].value = 20;
    for (int large = 0; large < 2; large++) {
        MT_CLOSED_BY(mt_layout_destroy) struct mt_layout *l = make_layout(large ? &small : &tiny);
        struct mt_plan_request r = make_request(l, &m, 128, 6);
        MT_CLOSED_BY(mt_plan_choice_finish) struct mt_plan_choice c = {0};
        MT_CLOSED_BY(mt_sim_graph_finish) struct mt_sim_graph g = {0};
        size_t n = 0;
        assert_int_equal(mt_plan_evaluate(&c, &r, &g, NULL), 0);
        for (size_t i = 0; i < g.n; i++) {
            const struct mt_sim_task *t = &g.tasks[i];
            double gbs = 1e-9 * t->bytes / t->seconds;
            if ((t->queue != MT_Q_H2D && t->queue != MT_Q_D2H) || !(t->bytes > 0))
                continue;
            n++;
            assert_true(large ? gbs < 19.99 && gbs > 10.01 : fabs(gbs - 20) < 1e-6);
        }
        assert_true(n > 0);
    }
}

TEST(updates_get_what_copies_leave_of_the_host_memory)
{
    struct mt_machine m = make_machine(24, 64, 0);
    struct graph g = {0};
    m.rate[MT_RATE_DRAM].value = 100;
    int32_t adam = task(&g, MT_Q_HOST, 2, 160e9); /* wants 80 GB/s */
    task(&g, MT_Q_H2D, 100, 6000e9);              /* takes 60 */
    run(&g, &m, 0);
    NEAR(g.task[adam].end, 4.0);
}

TEST(a_circle_is_an_error_that_names_the_task)
{
    struct mt_machine m = make_machine(24, 64, 0);
    struct graph g = {0};
    struct mt_sim_result r;
    struct mt_err err = {0};
    struct mt_sim_params p = {.machine = &m};
    int32_t a = task(&g, MT_Q_COMPUTE, 1, 0), b = task(&g, MT_Q_H2D, 1, 0);
    after(&g, a, b);
    after(&g, b, a);
    assert_int_equal(mt_sim_run(&r, &g.g, &p, &err), -EDEADLK);
    assert_non_null(strstr(err.msg, "never starts"));
}

/* The simulated step of a real program never beats its bounds: compute alone, a link's direction, a drive's. */
TEST(a_step_takes_at_least_what_each_resource_takes)
{
    struct mt_machine m = make_machine(1, 64, 1);
    MT_CLOSED_BY(mt_layout_destroy) struct mt_layout *l = make_layout(&small);
    for (int act = MT_ACT_KEEP; act <= MT_ACT_RECOMPUTE; act++)
        for (int slots = 2; slots <= 8; slots += 3) {
            struct mt_plan_request r = make_request(l, &m, 128, 6);
            MT_CLOSED_BY(mt_plan_choice_finish) struct mt_plan_choice c = {0};
            MT_CLOSED_BY(mt_sim_graph_finish) struct mt_sim_graph g = {0};
            r.placement.states = slots == 5 ? MT_STATES_HOST : MT_STATES_DISK;
            r.placement.activations = (enum mt_activations)act;
            r.placement.slots = slots;
            r.numerics.micro_batch = 4; /* 6 rows: the second micro-batch is smaller */
            MUST(mt_plan_evaluate, &c, &r, &g);
            assert_int_equal(c.n_micro, 2);
            double most = 0;
            for (int k = 0; k < MT_N_QUEUES; k++)
                most = fmax(most, c.sim.busy[k]);
            assert_true(c.sim.makespan >= most * (1 - 1e-9));
            double sum = 0;
            for (int k = 0; k < MT_N_QUEUES; k++)
                sum += c.sim.critical[k];
            NEAR(sum, c.sim.makespan); /* the critical path has no gaps */
            assert_true(fabs(c.sim.bytes[MT_Q_H2D] - (double)c.engine.h2d_bytes) < 1);
            double disk[2] = {0}; /* the engine's own numbers for the step */
            for (int k = 0; k < MT_N_DISK_USES; k++) {
                disk[0] += (double)c.engine.traffic.read[k];
                disk[1] += (double)c.engine.traffic.written[k];
            }
            NEAR(c.sim.bytes[MT_Q_DISK_READ], disk[0]);
            NEAR(c.sim.bytes[MT_Q_DISK_WRITE], disk[1]);
            assert_true(slots == 5 || disk[1] > 0);
            for (size_t i = 0; i < g.n; i++)
                for (int q = 0; q < MT_N_QUEUES; q++)
                    assert_true(g.tasks[i].wait[q] < 0 ||
                                g.tasks[g.tasks[i].wait[q]].end <= g.tasks[i].start + 1e-12);
        }
}
