/* SPDX-License-Identifier: Apache-2.0 */
/* Charts of boxes: heat map, memory, time line. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "report/axis.h"

/* Dark blue through green to yellow: lightness grows evenly, so it is readable in grey. */
static void heat_colour(double t, int rgb[3])
{
    static const double stop[][3] = {{68, 1, 84}, {59, 82, 139}, {33, 145, 140}, {94, 201, 98}, {253, 231, 37}};
    const int n = (int)MT_ARRAY_LEN(stop) - 1;
    t = fmin(fmax(t, 0), 1) * n;
    int i = MT_MIN((int)t, n - 1);
    for (int k = 0; k < 3; k++)
        rgb[k] = (int)lround(stop[i][k] + (t - i) * (stop[i + 1][k] - stop[i][k]));
}

void mt_chart_heat_map(struct mt_str *out, const struct mt_heat_map *m)
{
    enum { CELL_H = 34, LEFT = 110, TOP = 52, BOTTOM = 50 };
    int width = MT_CHART_W, height = TOP + CELL_H * (int)m->n_rows + BOTTOM;
    double w = (double)(width - LEFT - 16) / (double)MT_MAX(m->n_columns, (size_t)1), lo = INFINITY, hi = -INFINITY;
    char label[64], unit[96];
    size_t best = 0;
    for (size_t i = 0; i < m->n_rows * m->n_columns; i++)
        if (isfinite(m->cells[i].value)) {
            lo = fmin(lo, m->cells[i].value);
            best = m->cells[i].value > hi ? i : best;
            hi = fmax(hi, m->cells[i].value);
        }
    mt_svg_begin(out, width, height, m->title);
    mt_str_printf(out, "<defs><pattern id=\"mt-hatch\" width=\"8\" height=\"8\" patternUnits=\"userSpaceOnUse\" "
                       "patternTransform=\"rotate(45)\"><line class=\"mt-hatch\" x1=\"0\" y1=\"0\" x2=\"0\" "
                       "y2=\"8\"/></pattern></defs>\n");
    for (size_t r = 0; r < m->n_rows; r++) {
        double y = TOP + CELL_H * (double)r;
        mt_svg_text(out, LEFT - 8, y + CELL_H / 2.0 + 4, "mt-tick", "end", m->rows[r]);
        for (size_t c = 0; c < m->n_columns; c++) {
            const struct mt_cell *cell = &m->cells[r * m->n_columns + c];
            double x = LEFT + w * (double)c;
            int rgb[3] = {0, 0, 0};
            bool value = isfinite(cell->value);
            double t = hi > lo ? (cell->value - lo) / (hi - lo) : 0.5;
            if (value)
                heat_colour(t, rgb);
            mt_str_printf(out, "<rect class=\"mt-box\" x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%d\" ", x, y, w, CELL_H);
            if (value)
                mt_str_printf(out, "fill=\"rgb(%d,%d,%d)\"/>\n", rgb[0], rgb[1], rgb[2]);
            else
                mt_str_printf(out, "fill=\"%s\"/>\n", cell->text ? "url(#mt-hatch)" : "none");
            if (cell->text && !value) /* a plain background, so that text can be read on the hatching */
                mt_str_printf(out, "<rect class=\"mt-bg\" x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"16\" rx=\"3\"/>\n",
                              x + w / 2 - 3.4 * (double)strlen(cell->text) - 3, y + CELL_H / 2.0 - 8,
                              6.8 * (double)strlen(cell->text) + 6);
            mt_svg_text(out, x + w / 2, y + CELL_H / 2.0 + 4, !value ? "mt-note" : t > 0.55 ? "mt-dark" : "mt-pale",
                        "middle", value ? mt_axis_label(label, sizeof(label), cell->value, cell->value) : cell->text ? cell->text : "");
        }
    }
    for (size_t c = 0; c < m->n_columns; c++)
        mt_svg_text(out, LEFT + w * ((double)c + 0.5), height - BOTTOM + 16, "mt-tick", "middle", m->columns[c]);
    if (hi > lo)
        mt_str_printf(out, "<path class=\"mt-mark mt-best\" d=\"M%.1f %.1fh%.1fv%dh-%.1fz\"><title>the best</title></path>\n",
                      LEFT + w * (double)(best % m->n_columns) + 3, TOP + CELL_H * (double)(best / m->n_columns) + 3,
                      w - 6, CELL_H - 6, w - 6);
    snprintf(unit, sizeof(unit), "%s   (cells: %s; the best is framed)", m->x_label, m->unit);
    mt_svg_text(out, LEFT + (width - LEFT) / 2.0, height - 12, "mt-label", "middle", unit);
    mt_svg_text(out, 12, TOP - 10, "mt-label", "start", m->y_label); /* across: a key is longer than a few rows are high */
    mt_svg_end(out);
}

void mt_chart_memory(struct mt_str *out, const char *title, const struct mt_bar *bars, size_t n)
{
    enum { BAR_H = 26, ROW_H = 17, LEFT = 70, TOP = 36, GAP = 26, LITTLE = 20 };
    size_t lines = 0;
    char text[160], bytes[32];
    for (size_t i = 0; i < n; i++)
        lines += (bars[i].n_parts + 1) / 2;
    int height = TOP + (int)(n * (BAR_H + GAP) + lines * ROW_H) + 8;
    double y = TOP, width = MT_CHART_W - LEFT - 16;
    mt_svg_begin(out, MT_CHART_W, height, title);
    for (size_t i = 0; i < n; i++) {
        double sum = 0, x = LEFT, whole;
        for (size_t k = 0; k < bars[i].n_parts; k++)
            sum += bars[i].parts[k].bytes;
        bool little = bars[i].limit > LITTLE * sum; /* then nothing could be seen of it */
        whole = little ? fmax(sum, 1) / 0.7 : fmax(fmax(sum, bars[i].limit), 1);
        mt_svg_text(out, LEFT - 8, y + BAR_H / 2.0 + 4, "mt-note", "end", bars[i].name);
        for (size_t k = 0; k < bars[i].n_parts; k++) {
            double w = bars[i].parts[k].bytes / whole * width;
            mt_format_bytes(bytes, sizeof(bytes), (uint64_t)bars[i].parts[k].bytes);
            mt_str_printf(out, "<rect class=\"mt-box f%zu\" x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%d\" "
                               "opacity=\"%.2f\"><title>", k % 8, x, y, w, BAR_H, k < 8 ? 1.0 : 0.6);
            mt_xml_escape(out, bars[i].parts[k].name);
            mt_str_printf(out, ": %s</title></rect>\n", bytes);
            x += w;
        }
        if (little) {
            snprintf(text, sizeof(text), "of %s", mt_format_bytes(bytes, sizeof(bytes), (uint64_t)bars[i].limit));
            mt_svg_text(out, x + 8, y + BAR_H / 2.0 + 4, "mt-note", "start", text);
        } else if (bars[i].limit > 0) {
            double at = LEFT + bars[i].limit / whole * width;
            mt_str_printf(out, "<path class=\"mt-mark\" d=\"M%.1f %.1fV%.1f\"/>\n", at, y - 4, y + BAR_H + 4);
        }
        y += BAR_H + 14;
        for (size_t k = 0; k < bars[i].n_parts; k++) {
            double lx = LEFT + (double)(k % 2) * width / 2;
            mt_format_bytes(bytes, sizeof(bytes), (uint64_t)bars[i].parts[k].bytes);
            snprintf(text, sizeof(text), "%.80s  %s", bars[i].parts[k].name, bytes);
            mt_str_printf(out, "<rect class=\"f%zu\" x=\"%.1f\" y=\"%.1f\" width=\"10\" height=\"8\" rx=\"2\" opacity=\"%.2f\"/>\n",
                          k % 8, lx, y - 7, k < 8 ? 1.0 : 0.6);
            mt_svg_text(out, lx + 15, y + 1, "mt-note", "start", text);
            y += k % 2 || k + 1 == bars[i].n_parts ? ROW_H : 0;
        }
        y += GAP - 14;
    }
    mt_svg_end(out);
}

void mt_chart_timeline(struct mt_str *out, const struct mt_timeline *t)
{
    enum { WIDTH = 1000, LANE_H = 22, LEFT = 120, TOP = 52, GAP = 26, BOTTOM = 42 };
    double end = 0, lx = WIDTH - 16;
    for (size_t i = 0; i < t->n; i++)
        end = fmax(end, t->spans[i].end);
    struct mt_axis x = {.min = 0, .max = end > 0 ? end * 1e3 : 1, .from = LEFT, .to = WIDTH - 16};
    int height = TOP + (int)(t->n_groups * (t->n_lanes * LANE_H + GAP)) + BOTTOM - GAP;
    double ticks[24];
    char label[64];
    mt_svg_begin(out, WIDTH, height, t->title);
    for (size_t i = t->n_legend; i-- > 0;) {
        lx -= 6.3 * (double)strlen(t->legend[i]) + 6;
        mt_svg_text(out, lx, 20, "mt-note", "start", t->legend[i]);
        lx -= 14;
        mt_str_printf(out, "<rect class=\"f%d\" x=\"%.1f\" y=\"12\" width=\"10\" height=\"8\" rx=\"2\"/>\n",
                      t->legend_colour[i] & 7, lx);
        lx -= 8;
    }
    size_t n_ticks = mt_axis_ticks(&x, ticks, 24);
    for (size_t i = 0; i < n_ticks; i++) {
        double at = mt_axis_at(&x, ticks[i]);
        mt_str_printf(out, "<line class=\"mt-grid\" x1=\"%.1f\" x2=\"%.1f\" y1=\"%d\" y2=\"%d\"/>\n", at, at, TOP - 8,
                      height - BOTTOM + 4);
        mt_svg_text(out, at, height - BOTTOM + 18, "mt-tick", "middle", mt_axis_label(label, sizeof(label), ticks[i], mt_axis_alike(&x, ticks, n_ticks)));
    }
    mt_svg_text(out, (x.from + x.to) / 2, height - 8, "mt-label", "middle", "milliseconds");
    for (size_t g = 0; g < t->n_groups; g++) {
        double top = TOP + (double)g * (double)(t->n_lanes * LANE_H + GAP);
        mt_svg_text(out, 12, top - 4, "mt-label", "start", t->groups[g]);
        for (size_t l = 0; l < t->n_lanes; l++)
            mt_svg_text(out, LEFT - 8, top + ((double)l + 0.7) * LANE_H, "mt-tick", "end", t->lanes[l]);
    }
    for (size_t i = 0; i < t->n; i++) {
        const struct mt_span *s = &t->spans[i];
        double a = mt_axis_at(&x, s->begin * 1e3), w = mt_axis_at(&x, s->end * 1e3) - a;
        if (!(w >= 0.08) || s->lane < 0 || (size_t)s->lane >= t->n_lanes)
            continue; /* too narrow to see */
        mt_str_printf(out, "<rect class=\"f%d%s\" x=\"%.2f\" y=\"%.1f\" width=\"%.2f\" height=\"%d\"><title>",
                      s->colour & 7, w > 2 ? " mt-box" : "", a,
                      TOP + (double)s->group * (double)(t->n_lanes * LANE_H + GAP) + s->lane * LANE_H + 2, w,
                      LANE_H - 4);
        mt_xml_escape(out, s->name);
        mt_str_printf(out, ": %.3f ms at %.3f</title></rect>\n", (s->end - s->begin) * 1e3, s->begin * 1e3);
    }
    mt_svg_end(out);
}
