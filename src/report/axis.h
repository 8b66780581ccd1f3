/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "report/chart.h"

/** A scale from data to coordinates of the picture. */
struct mt_axis {
    double min, max; /* range of the data, or of its logarithm if `log` */
    bool log;
    double from, to; /* picture */
};
/** Grows the range to hold v; NaN, infinite and (log) v <= 0 are ignored. */
void mt_axis_include(struct mt_axis *a, double v);
/** Extends the range to round numbers (and to 0 if `zero`); an empty range becomes [0, 1]. */
void mt_axis_round(struct mt_axis *a, bool zero);
double mt_axis_at(const struct mt_axis *a, double v);
bool mt_axis_shows(const struct mt_axis *a, double v);
/** Fills in round values between the ends; returns their number, at most `max`. */
size_t mt_axis_ticks(const struct mt_axis *a, double *ticks, size_t max);
/** "12k", "1e-5", "0.25": in the form that suits `alike`, so that the labels of an axis are written alike. */
const char *mt_axis_label(char *buf, size_t len, double v, double alike);
/** The tick whose form suits all: of a logarithmic axis the smallest, else the largest. */
double mt_axis_alike(const struct mt_axis *a, const double *ticks, size_t n);

enum { MT_CHART_W = 640, MT_CHART_H = 300, MT_CHART_LEFT = 64, MT_CHART_RIGHT = 16, MT_CHART_TOP = 34,
       MT_CHART_BOTTOM = 44 };
/** mt_svg_begin() opens the element with its title; mt_svg_frame() draws frame, grid, tick labels and axis titles. */
void mt_svg_begin(struct mt_str *out, int width, int height, const char *title);
void mt_svg_frame(struct mt_str *out, const struct mt_axis *x, const struct mt_axis *y, const char *x_label,
                  const char *y_label);
void mt_svg_text(struct mt_str *out, double x, double y, const char *css, const char *anchor,
                 const char *text);
void mt_svg_end(struct mt_str *out);
