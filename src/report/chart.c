/* SPDX-License-Identifier: Apache-2.0 */
/* Charts with two axes: lines, stacks, scatter. */
#include "report/chart.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/sort.h"
#include "report/axis.h"

enum { MAX_POINTS = 1200 };

void mt_chart_style(struct mt_str *out)
{
    /* Okabe and Ito's colours, which colour-blind readers can distinguish; lightened for the dark page */
    static const char *const light[] = {"#0072b2", "#d55e00", "#009e73", "#b8860b",
                                        "#a2488a", "#2f8fc9", "#6b6b6b", "#7a5c00"};
    static const char *const dark[] = {"#4db3ea", "#ff8a3d", "#2fcf9f", "#e8c547",
                                       "#e08bc6", "#8fd0f5", "#b3b3b3", "#cfae4a"};
    mt_str_printf(out, ":root{color-scheme:light dark;--bg:#ffffff;--fg:#1b1f24;--dim:#57606a;--grid:#e2e6ea");
    for (int i = 0; i < 8; i++)
        mt_str_printf(out, ";--c%d:%s", i, light[i]);
    mt_str_printf(out, "}\n@media (prefers-color-scheme:dark){:root{--bg:#15191e;--fg:#e6e9ec;--dim:#9aa4ae;"
                       "--grid:#2b323a");
    for (int i = 0; i < 8; i++)
        mt_str_printf(out, ";--c%d:%s", i, dark[i]);
    mt_str_printf(out, "}}\n.mt-chart{font-family:system-ui,'DejaVu Sans',sans-serif;max-width:100%%}"
                       ".mt-bg{fill:var(--bg)}.mt-title{fill:var(--fg);font-size:14px;font-weight:600}"
                       ".mt-tick{fill:var(--dim);font-size:11px}.mt-label{fill:var(--dim);font-size:12px}"
                       ".mt-grid{stroke:var(--grid);stroke-width:1}.mt-note{fill:var(--fg);font-size:11px}"
                       ".mt-dark{fill:#111;font-size:11px}.mt-pale{fill:#fff;font-size:11px}"
                       ".mt-best{stroke:#fff!important;stroke-dasharray:none!important}.mt-mark{stroke:var(--fg);stroke-width:1.5;stroke-dasharray:4 3;fill:none}"
                       ".mt-box{stroke:var(--bg);stroke-width:.6}.mt-hatch{stroke:var(--dim);stroke-width:2}\n");
    for (int i = 0; i < 8; i++)
        mt_str_printf(out, ".l%d{stroke:var(--c%d);fill:none;stroke-width:1.8;stroke-linejoin:round}"
                           ".f%d{fill:var(--c%d)}\n", i, i, i, i);
    mt_str_printf(out, ".faint{opacity:.4;stroke-width:1.2}.dashed{stroke-dasharray:6 4;stroke-width:2.4}\n");
}

void mt_chart_standalone(struct mt_str *out, const char *svg)
{
    const char *head = "<svg ";
    mt_str_printf(out, "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<svg xmlns=\"http://www.w3.org/2000/svg\" ");
    const char *rest = !strncmp(svg, head, strlen(head)) ? svg + strlen(head) : svg;
    const char *end = strchr(rest, '>');
    if (!end)
        return;
    mt_str_append(out, rest, (size_t)(end - rest) + 1);
    mt_str_printf(out, "<style>");
    mt_chart_style(out);
    mt_str_printf(out, "</style>");
    mt_str_append(out, end + 1, strlen(end + 1));
}

static struct mt_axis plot_x(void)
{
    return (struct mt_axis){.min = 1, .max = 0, .from = MT_CHART_LEFT, .to = MT_CHART_W - MT_CHART_RIGHT};
}

static struct mt_axis plot_y(bool log)
{
    return (struct mt_axis){.min = 1, .max = 0, .log = log, .from = MT_CHART_H - MT_CHART_BOTTOM,
                            .to = MT_CHART_TOP};
}

static void legend(struct mt_str *out, const struct mt_series *s, size_t n)
{
    double x = MT_CHART_W - MT_CHART_RIGHT;
    for (size_t i = n; i-- > 0;) {
        if (!s[i].name)
            continue;
        x -= 6.3 * (double)strlen(s[i].name) + 6;
        mt_svg_text(out, x, 20, "mt-note", "start", s[i].name);
        x -= 14;
        mt_str_printf(out, "<rect class=\"f%d\" x=\"%.1f\" y=\"12\" width=\"10\" height=\"8\" rx=\"2\"/>\n",
                      s[i].colour & 7, x);
        x -= 8;
    }
}

static void no_data(struct mt_str *out)
{
    mt_svg_text(out, MT_CHART_W / 2.0, MT_CHART_H / 2.0, "mt-label", "middle", "no data");
}

/* Draws every stride-th point, and the extremes of each stride: spikes must not vanish. */
static void draw_line(struct mt_str *out, const struct mt_series *s, const struct mt_axis *x,
                      const struct mt_axis *y)
{
    size_t stride = s->n / MAX_POINTS + 1;
    bool open = false;
    mt_str_printf(out, "<path class=\"l%d%s%s\" d=\"", s->colour & 7, s->faint ? " faint" : "",
                  s->dashed ? " dashed" : "");
    for (size_t i = 0; i < s->n; i += stride) {
        size_t end = MT_MIN(i + stride, s->n), lo = i, hi = i;
        for (size_t k = i; k < end; k++) {
            lo = s->y[k] < s->y[lo] ? k : lo;
            hi = s->y[k] > s->y[hi] ? k : hi;
        }
        size_t pick[2] = {MT_MIN(lo, hi), MT_MAX(lo, hi)};
        for (int k = 0; k < (lo == hi ? 1 : 2); k++) {
            size_t at = pick[k];
            if (!mt_axis_shows(y, s->y[at]) || !isfinite(s->x[at])) {
                open = false;
                continue;
            }
            mt_str_printf(out, "%c%.1f %.1f", open ? 'L' : 'M', mt_axis_at(x, s->x[at]),
                          mt_axis_at(y, s->y[at]));
            open = true;
        }
    }
    mt_str_printf(out, "\"/>\n");
}

static void draw_points(struct mt_str *out, const struct mt_series *s, const struct mt_axis *x,
                        const struct mt_axis *y)
{
    char a[32], b[32];
    for (size_t i = 0; i < s->n; i++)
        if (mt_axis_shows(y, s->y[i]) && isfinite(s->x[i]))
            mt_str_printf(out,
                          "<circle class=\"f%d\" cx=\"%.1f\" cy=\"%.1f\" r=\"3.5\"><title>%s: %s</title></circle>\n",
                          s->colour & 7, mt_axis_at(x, s->x[i]), mt_axis_at(y, s->y[i]),
                          mt_axis_label(a, sizeof(a), s->x[i], s->x[i]), mt_axis_label(b, sizeof(b), s->y[i], s->y[i]));
}

void mt_chart_lines(struct mt_str *out, const struct mt_chart *c)
{
    struct mt_axis x = plot_x(), y = plot_y(c->log_y);
    bool any = false;
    for (size_t s = 0; s < c->n_series; s++)
        for (size_t i = 0; i < c->series[s].n; i++) {
            mt_axis_include(&y, c->series[s].y[i]);
            if (mt_axis_shows(&y, c->series[s].y[i])) {
                mt_axis_include(&x, c->series[s].x[i]);
                any = true;
            }
        }
    if (!(x.max > x.min))
        x.max = (x.min = any ? x.min - 0.5 : 0) + 1;
    mt_axis_round(&y, c->zero);
    mt_svg_begin(out, MT_CHART_W, MT_CHART_H, c->title);
    mt_svg_frame(out, &x, &y, c->x_label, c->y_label);
    for (size_t s = 0; s < c->n_series; s++)
        if (c->series[s].points)
            draw_points(out, &c->series[s], &x, &y);
        else
            draw_line(out, &c->series[s], &x, &y);
    legend(out, c->series, c->n_series);
    if (!any)
        no_data(out);
    mt_svg_end(out);
}

static double finite_or_0(double v)
{
    return isfinite(v) && v > 0 ? v : 0;
}

/* A layer of a stack, between two sums, one bar a step. */
static void draw_layer(struct mt_str *out, const struct mt_series *s, double *base, const struct mt_axis *x,
                       const struct mt_axis *y)
{
    size_t stride = s->n / MAX_POINTS + 1;
    mt_str_printf(out, "<path class=\"f%d\" d=\"", s->colour & 7);
    for (size_t i = 0; i < s->n; i += stride)
        mt_str_printf(out, "%c%.1f %.1f", i ? 'L' : 'M', mt_axis_at(x, s->x[i]), mt_axis_at(y, base[i]));
    for (size_t i = (s->n - 1) / stride * stride + stride; i >= stride;) {
        i -= stride;
        mt_str_printf(out, "L%.1f %.1f", mt_axis_at(x, s->x[i]),
                      mt_axis_at(y, base[i] + finite_or_0(s->y[i])));
    }
    mt_str_printf(out, "Z\"/>\n");
    for (size_t i = 0; i < s->n; i++)
        base[i] += finite_or_0(s->y[i]);
}

/* The end of the axis: a few steps that are far longer than the rest, such as the first, are cut off. */
static double usual_top(const double *v, size_t n)
{
    double *sorted = mt_calloc(n, sizeof(double)), top = INFINITY;
    if (sorted) {
        memcpy(sorted, v, n * sizeof(double));
        mt_sort_doubles(sorted, n);
        top = 1.6 * sorted[(n - 1) * 95 / 100];
    }
    free(sorted);
    return top;
}

void mt_chart_stack(struct mt_str *out, const struct mt_chart *c)
{
    struct mt_axis x = plot_x(), y = plot_y(false);
    size_t n = c->n_series ? c->series[0].n : 0;
    double *sum = mt_calloc(n + 1, sizeof(double));
    mt_svg_begin(out, MT_CHART_W, MT_CHART_H, c->title);
    if (!sum || !n) {
        no_data(out);
        mt_svg_end(out);
        free(sum);
        return;
    }
    for (size_t s = 0; s < c->n_series; s++)
        for (size_t i = 0; i < n; i++) {
            mt_axis_include(&x, c->series[s].x[i]);
            if (c->series[s].dashed)
                mt_axis_include(&y, c->series[s].y[i]);
            else
                sum[i] += finite_or_0(c->series[s].y[i]);
        }
    double top = usual_top(sum, n);
    for (size_t i = 0; i < n; i++)
        mt_axis_include(&y, fmin(sum[i], top));
    if (!(x.max > x.min))
        x.max = (x.min -= 0.5) + 1;
    mt_axis_round(&y, true);
    memset(sum, 0, n * sizeof(double));
    mt_svg_frame(out, &x, &y, c->x_label, c->y_label);
    mt_str_printf(out, "<clipPath id=\"mt-plot\"><rect x=\"%.0f\" y=\"%.0f\" width=\"%.0f\" height=\"%.0f\"/>"
                       "</clipPath><g clip-path=\"url(#mt-plot)\">\n",
                  x.from, y.to, x.to - x.from, y.from - y.to);
    for (size_t s = 0; s < c->n_series; s++)
        if (!c->series[s].dashed)
            draw_layer(out, &c->series[s], sum, &x, &y);
    for (size_t s = 0; s < c->n_series; s++)
        if (c->series[s].dashed)
            draw_line(out, &c->series[s], &x, &y);
    mt_str_printf(out, "</g>\n");
    legend(out, c->series, c->n_series);
    mt_svg_end(out);
    free(sum);
}

void mt_chart_scatter(struct mt_str *out, const char *title, const char *x_label, const char *y_label,
                      const struct mt_points *p)
{
    const double *x = p->x, *y = p->y;
    struct mt_axis ax = plot_x(), ay = plot_y(true);
    ax.log = true;
    ax.to = MT_CHART_LEFT + (MT_CHART_H - MT_CHART_BOTTOM - MT_CHART_TOP) * 2.0;
    for (size_t i = 0; i < p->n; i++)
        if (mt_axis_shows(&ax, x[i]) && mt_axis_shows(&ay, y[i])) {
            mt_axis_include(&ax, x[i]);
            mt_axis_include(&ax, y[i]);
        }
    mt_axis_round(&ax, false);
    ay.min = ax.min; /* one scale, so that the line of equality is a diagonal */
    ay.max = ax.max;
    mt_svg_begin(out, MT_CHART_W, MT_CHART_H, title);
    mt_svg_frame(out, &ax, &ay, x_label, y_label);
    mt_str_printf(out, "<path class=\"mt-mark\" d=\"M%.1f %.1fL%.1f %.1f\"/>\n", ax.from, ay.from, ax.to, ay.to);
    for (size_t i = 0; i < p->n; i++) {
        if (!mt_axis_shows(&ax, x[i]) || !mt_axis_shows(&ay, y[i]))
            continue;
        mt_str_printf(out, "<circle class=\"f0\" cx=\"%.1f\" cy=\"%.1f\" r=\"4\" opacity=\".75\"><title>",
                      mt_axis_at(&ax, x[i]), mt_axis_at(&ay, y[i]));
        mt_xml_escape(out, p->labels[i]);
        mt_str_printf(out, ": %.4g against %.4g (%.2f)</title></circle>\n", y[i], x[i], y[i] / x[i]);
    }
    mt_svg_end(out);
}
