/* SPDX-License-Identifier: Apache-2.0 */
#include "plan/trace.h"

#include <stdio.h>

#include "base/fs.h"
#include "base/mem.h"
#include "base/strbuf.h"

/* A disk queue has many requests under way at once: it gets up to MAX_ROWS rows, so that they do not overlap. */
enum { MEASURED = 1, PREDICTED = 2, MAX_ROWS = 8 };

static void add_name(struct mt_str *s, const char *what, int pid, int tid, const char *name)
{
    mt_str_printf(s, "{\"ph\":\"M\",\"name\":\"%s\",\"pid\":%d,\"tid\":%d,\"args\":{\"name\":\"%s\"}},\n",
                  what, pid, tid, name);
}

struct span {
    int pid, row, op, mb, piece, unit;
    double begin_us, length_us, bytes;
};

static void add_span(struct mt_str *s, const struct span *p, const struct mt_layout *l)
{
    mt_str_printf(s,
                  "{\"ph\":\"X\",\"name\":\"%s %s\",\"cat\":\"%s\",\"pid\":%d,\"tid\":%d,\"ts\":%.3f,"
                  "\"dur\":%.3f,\"args\":{\"unit\":%d,\"micro_batch\":%d,\"piece\":%d,\"bytes\":%.0f}},\n",
                  mt_opcodes[p->op].name, l->units[p->unit].name,
                  mt_opcodes[p->op].name, p->pid, p->row, p->begin_us, p->length_us,
                  p->unit, p->mb, p->piece, p->bytes);
}

/* "compute", and of other lanes than the first "compute of GPU 2". */
static const char *title(char *buf, size_t len, int q)
{
    int lane = mt_queue_lane(q), n = snprintf(buf, len, "%s", mt_queues[mt_queue_kind(q)].title);
    if (lane)
        snprintf(buf + n, len - (size_t)n, " of GPU %d", lane + 1);
    return buf;
}

static void add_names(struct mt_str *s, int pid, int n_queues, const char *process)
{
    add_name(s, "process_name", pid, 0, process);
    for (int q = 0; q < n_queues; q++) {
        char name[64];
        add_name(s, "thread_name", pid, q, title(name, sizeof(name), q));
    }
}

/* End of the last span in each row of each queue. */
struct rows {
    int64_t free_at[MAX_ROWS][MT_MAX_QUEUES];
};

/* The first row of the queue in which the span overlaps with no other; names the row on first use. */
static int find_row(struct rows *rows, struct mt_str *s, const struct mt_trace_span *t)
{
    int q = t->queue, k = 0, id;
    char name[64];
    while (!mt_queues[mt_queue_kind(q)].ends_in_order && k < MAX_ROWS - 1 && rows->free_at[k][q] > t->begin_ns)
        k++;
    id = k * MT_MAX_QUEUES + q;
    if (k && !rows->free_at[k][q]) {
        snprintf(name, sizeof(name), "%s %d", mt_queues[mt_queue_kind(q)].title, k + 1);
        add_name(s, "thread_name", MEASURED, id, name);
    }
    rows->free_at[k][q] = t->end_ns;
    return id;
}

static void add_measured(struct mt_str *s, const struct mt_trace_span *spans, size_t n,
                         const struct mt_layout *l)
{
    int64_t first = INT64_MAX;
    struct rows rows = {{{0}}};
    int n_queues = MT_N_QUEUES;
    for (size_t i = 0; i < n; i++) {
        if (spans[i].begin_ns)
            first = MT_MIN(first, spans[i].begin_ns);
        n_queues = MT_MAX(n_queues, mt_n_queues(mt_queue_lane(spans[i].queue) + 1));
    }
    add_names(s, MEASURED, n_queues, "measured");
    for (const struct mt_trace_span *t = spans; t < spans + n; t++) {
        if (!t->begin_ns)
            continue;
        struct span p = {MEASURED, find_row(&rows, s, t), t->op, t->mb, t->piece, t->unit,
                         (double)(t->begin_ns - first) * 1e-3, (double)(t->end_ns - t->begin_ns) * 1e-3,
                         (double)t->bytes};
        add_span(s, &p, l);
    }
}

static void add_predicted(struct mt_str *s, const struct mt_sim_graph *g, const struct mt_layout *l)
{
    const int n_lanes = MT_MAX(g->n_lanes, 1), n_queues = mt_n_queues(n_lanes);
    bool comes_in = false;
    add_names(s, PREDICTED, n_queues, "predicted");
    for (size_t i = 0; i < g->n; i++)
        comes_in |= g->tasks[i].queue == mt_sim_net_in(n_lanes);
    if (comes_in)
        add_name(s, "thread_name", PREDICTED, mt_sim_net_in(n_lanes), "network, in");
    for (const struct mt_sim_task *t = g->tasks; t < g->tasks + g->n; t++) {
        struct span p = {PREDICTED, t->queue, t->op, t->mb, t->piece, t->unit, t->start * 1e6,
                         (t->end - t->start) * 1e6,
                         mt_sim_queue_kind(t->queue, n_lanes) == MT_Q_COMPUTE ? 0 : t->bytes};
        add_span(s, &p, l);
    }
}

int mt_trace_write(const char *path, const struct mt_trace_span *spans, size_t n,
                   const struct mt_sim_graph *graph, const struct mt_layout *layout, struct mt_err *err)
{
    MT_STR_FREED struct mt_str s = {0};
    mt_str_printf(&s, "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n");
    add_measured(&s, spans, n, layout);
    if (graph && graph->n)
        add_predicted(&s, graph, layout);
    if (s.len > 2 && s.p[s.len - 2] == ',') /* JSON allows no comma after the last element */
        s.len -= 2;
    mt_str_printf(&s, "\n]}\n");
    return s.failed ? mt_fail_nomem(err, path, s.len) : mt_write_file(path, s.p, s.len, err);
}
