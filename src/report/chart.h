/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/strbuf.h"

/**
 * Charts as SVG, without script or library. Colours are CSS classes, so that a picture fits dark and light pages
 * (mt_chart_style). All functions append one <svg> element; text is escaped; NaN and infinite values are left out.
 */

/** The style sheet of the classes used. */
void mt_chart_style(struct mt_str *out);
/** An SVG as a file of its own: the element, with name space and style sheet added. */
void mt_chart_standalone(struct mt_str *out, const char *svg);

struct mt_series {
    const char *name;
    const double *x, *y;
    size_t n;
    int colour;    /* 0..7 */
    bool points, faint, dashed;
};
struct mt_chart {
    const char *title, *x_label, *y_label;
    bool log_y, zero; /* the axis begins at zero */
    const struct mt_series *series;
    size_t n_series;
};
void mt_chart_lines(struct mt_str *out, const struct mt_chart *c);

/** Stacked layers: y of series k is drawn on the sum of those before. Dashed series are lines, not stacked. */
void mt_chart_stack(struct mt_str *out, const struct mt_chart *c);

/** Points, and the line on which both are equal; both axes logarithmic. labels[i] is shown on hovering. */
struct mt_points {
    const double *x, *y;
    const char *const *labels;
    size_t n;
};
void mt_chart_scatter(struct mt_str *out, const char *title, const char *x_label, const char *y_label,
                      const struct mt_points *p);

struct mt_cell {
    double value;     /* NaN: none */
    const char *text; /* instead of a value: "does not fit"; then hatched */
};
struct mt_heat_map {
    const char *title, *x_label, *y_label, *unit;
    const char *const *columns, *const *rows;
    size_t n_columns, n_rows;
    const struct mt_cell *cells; /* [n_rows * n_columns] */
};
void mt_chart_heat_map(struct mt_str *out, const struct mt_heat_map *m);

struct mt_bar_part {
    const char *name;
    double bytes;
};
struct mt_bar {
    const char *name;
    const struct mt_bar_part *parts;
    size_t n_parts;
    double limit; /* a mark; 0: none */
};
/** Memory: one bar for each tier, divided by use; each bar has its own scale. */
void mt_chart_memory(struct mt_str *out, const char *title, const struct mt_bar *bars, size_t n);

struct mt_span {
    int group, lane; /* group 0 is drawn above group 1 */
    int colour;
    double begin, end; /* seconds */
    const char *name;
};
/** A step's time line: groups of lanes, one above the other, on one time scale. */
struct mt_timeline {
    const char *title;
    const char *const *groups, *const *lanes, *const *legend;
    size_t n_groups, n_lanes, n_legend;
    const int *legend_colour; /* [n_legend] */
    const struct mt_span *spans;
    size_t n;
};
void mt_chart_timeline(struct mt_str *out, const struct mt_timeline *t);

void mt_xml_escape(struct mt_str *out, const char *text);
