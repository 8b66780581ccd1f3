/* SPDX-License-Identifier: Apache-2.0 */
#include "report/axis.h"

#include <math.h>
#include <stdio.h>

#include "base/mem.h"

static double scaled(const struct mt_axis *a, double v)
{
    return a->log ? log10(v) : v;
}

bool mt_axis_shows(const struct mt_axis *a, double v)
{
    return isfinite(v) && (!a->log || v > 0);
}

void mt_axis_include(struct mt_axis *a, double v)
{
    if (!mt_axis_shows(a, v))
        return;
    bool empty = !(a->min <= a->max);
    double s = scaled(a, v);
    a->min = empty ? s : fmin(a->min, s);
    a->max = empty ? s : fmax(a->max, s);
}

static double round_step(double span, int n)
{
    double raw = span / n, mag = pow(10, floor(log10(raw))), f = raw / mag;
    return mag * (f < 1.5 ? 1 : f < 3.5 ? 2 : f < 7.5 ? 5 : 10);
}

void mt_axis_round(struct mt_axis *a, bool zero)
{
    if (!(a->min <= a->max)) {
        a->min = a->log ? -1 : 0;
        a->max = 1;
    }
    if (zero && !a->log)
        a->min = fmin(a->min, 0);
    if (a->max - a->min < 1e-12 * fmax(fabs(a->max), 1e-12)) {
        double pad = a->log ? 0.5 : fmax(fabs(a->max) * 0.1, 1e-9);
        a->min -= zero && !a->log ? 0 : pad;
        a->max += pad;
    }
    if (a->log) {
        a->min = floor(a->min * 4) / 4;
        a->max = ceil(a->max * 4) / 4;
        return;
    }
    double step = round_step(a->max - a->min, 5);
    a->min = floor(a->min / step + 1e-9) * step;
    a->max = ceil(a->max / step - 1e-9) * step;
}

double mt_axis_at(const struct mt_axis *a, double v)
{
    return a->from + (scaled(a, v) - a->min) / (a->max - a->min) * (a->to - a->from);
}

size_t mt_axis_ticks(const struct mt_axis *a, double *ticks, size_t max)
{
    size_t n = 0;
    if (a->log) {
        static const double in_decade[] = {1, 2, 5, 3, 7, 1.5};
        double span = a->max - a->min; /* decades */
        size_t per_decade = span > 2.5 ? 1 : span > 0.8 ? 3 : MT_ARRAY_LEN(in_decade);
        for (int d = (int)floor(a->min); d <= (int)ceil(a->max); d++)
            for (size_t k = 0; k < per_decade && n < max; k++) {
                double v = in_decade[k] * pow(10, d);
                if (log10(v) >= a->min - 1e-9 && log10(v) <= a->max + 1e-9)
                    ticks[n++] = v;
            }
        return n;
    }
    double step = round_step(a->max - a->min, 5);
    for (double v = ceil(a->min / step - 1e-9) * step; v <= a->max + step * 1e-9 && n < max; v += step)
        ticks[n++] = fabs(v) < step * 1e-9 ? 0 : v;
    return n;
}

double mt_axis_alike(const struct mt_axis *a, const double *ticks, size_t n)
{
    double v = n ? ticks[0] : 0;
    for (size_t i = 1; i < n; i++)
        if ((fabs(ticks[i]) > fabs(v)) != a->log)
            v = ticks[i];
    return v;
}

const char *mt_axis_label(char *buf, size_t len, double v, double alike)
{
    double m = fabs(alike), of = fabs(v);
    int exponent = of > 0 ? (int)floor(log10(of) + 1e-9) : 0;
    if (m > 0 && m < 0.01 * (1 - 1e-9) && of > 0 && of < 1) /* 1.5e-3 */
        snprintf(buf, len, "%.3ge%d", v * pow(10, -exponent), exponent);
    else if (of > 0 && m >= 1e9)
        snprintf(buf, len, "%.3gG", v * 1e-9);
    else if (of > 0 && m >= 1e6)
        snprintf(buf, len, "%.3gM", v * 1e-6);
    else if (of > 0 && m >= 1e4)
        snprintf(buf, len, "%.3gk", v * 1e-3);
    else
        snprintf(buf, len, "%.4g", v);
    return buf;
}

void mt_xml_escape(struct mt_str *out, const char *text)
{
    for (; *text; text++)
        switch (*text) {
        case '<':
            mt_str_append(out, "&lt;", 4);
            break;
        case '>':
            mt_str_append(out, "&gt;", 4);
            break;
        case '&':
            mt_str_append(out, "&amp;", 5);
            break;
        case '"':
            mt_str_append(out, "&quot;", 6);
            break;
        default:
            if ((unsigned char)*text >= 0x20)
                mt_str_append(out, text, 1);
        }
}

void mt_svg_text(struct mt_str *out, double x, double y, const char *css, const char *anchor,
                 const char *text)
{
    mt_str_printf(out, "<text x=\"%.1f\" y=\"%.1f\" class=\"%s\" text-anchor=\"%s\">", x, y, css, anchor);
    mt_xml_escape(out, text);
    mt_str_printf(out, "</text>\n");
}

void mt_svg_begin(struct mt_str *out, int width, int height, const char *title)
{
    mt_str_printf(out, "<svg class=\"mt-chart\" viewBox=\"0 0 %d %d\" role=\"img\" aria-label=\"", width, height);
    mt_xml_escape(out, title);
    mt_str_printf(out, "\">\n<rect class=\"mt-bg\" width=\"%d\" height=\"%d\"/>\n", width, height);
    mt_svg_text(out, 12, 20, "mt-title", "start", title);
}

void mt_svg_end(struct mt_str *out)
{
    mt_str_printf(out, "</svg>\n");
}

void mt_svg_frame(struct mt_str *out, const struct mt_axis *x, const struct mt_axis *y, const char *x_label,
                  const char *y_label)
{
    double ticks[24];
    char label[32];
    size_t n = mt_axis_ticks(y, ticks, 24);
    double alike = mt_axis_alike(y, ticks, n);
    for (size_t i = 0; i < n; i++) {
        double at = mt_axis_at(y, ticks[i]);
        mt_str_printf(out, "<line class=\"mt-grid\" x1=\"%.1f\" x2=\"%.1f\" y1=\"%.1f\" y2=\"%.1f\"/>\n", x->from,
                      x->to, at, at);
        mt_svg_text(out, x->from - 6, at + 4, "mt-tick", "end", mt_axis_label(label, sizeof(label), ticks[i], alike));
    }
    n = mt_axis_ticks(x, ticks, 24);
    alike = mt_axis_alike(x, ticks, n);
    for (size_t i = 0; i < n; i++) {
        double at = mt_axis_at(x, ticks[i]);
        mt_str_printf(out, "<line class=\"mt-grid\" x1=\"%.1f\" x2=\"%.1f\" y1=\"%.1f\" y2=\"%.1f\"/>\n", at, at,
                      y->to, y->from);
        mt_svg_text(out, at, y->from + 16, "mt-tick", "middle", mt_axis_label(label, sizeof(label), ticks[i], alike));
    }
    mt_svg_text(out, (x->from + x->to) / 2, y->from + 34, "mt-label", "middle", x_label);
    mt_str_printf(out, "<text class=\"mt-label\" text-anchor=\"middle\" transform=\"translate(%.1f,%.1f) rotate(-90)\">",
                  16.0, (y->from + y->to) / 2);
    mt_xml_escape(out, y_label);
    mt_str_printf(out, "</text>\n");
}
