/* SPDX-License-Identifier: Apache-2.0 */
/* The pictures of a report, as SVG and without a library. panelsOf() makes them of the data that report.c has
 * collected; in a browser show() puts them into the page. Numbers that are missing are null. Text is escaped. */
"use strict";

const W = 640, H = 300, LEFT = 64, RIGHT = 16, TOP = 34, BOTTOM = 44, MOST_POINTS = 1200;

/* Okabe and Ito's colours, which colour-blind readers can distinguish; lightened for the dark page. */
const LIGHT = ["#0072b2", "#d55e00", "#009e73", "#b8860b", "#a2488a", "#2f8fc9", "#6b6b6b", "#7a5c00"];
const DARK = ["#4db3ea", "#ff8a3d", "#2fcf9f", "#e8c547", "#e08bc6", "#8fd0f5", "#b3b3b3", "#cfae4a"];
const variables = (colours) => colours.map((c, i) => `;--c${i}:${c}`).join("");
const STYLE = `
:root{color-scheme:light dark;--bg:#ffffff;--fg:#1b1f24;--dim:#57606a;--grid:#e2e6ea${variables(LIGHT)}}
@media (prefers-color-scheme:dark){:root{--bg:#15191e;--fg:#e6e9ec;--dim:#9aa4ae;--grid:#2b323a${variables(DARK)}}}
.mt-chart{font-family:system-ui,'DejaVu Sans',sans-serif;max-width:100%}
.mt-bg{fill:var(--bg)}.mt-title{fill:var(--fg);font-size:14px;font-weight:600}
.mt-tick{fill:var(--dim);font-size:11px}.mt-label{fill:var(--dim);font-size:12px}
.mt-grid{stroke:var(--grid);stroke-width:1}.mt-note{fill:var(--fg);font-size:11px}
.mt-dark{fill:#111;font-size:11px}.mt-pale{fill:#fff;font-size:11px}
.mt-mark{stroke:var(--fg);stroke-width:1.5;stroke-dasharray:4 3;fill:none}
.mt-best{stroke:#fff!important;stroke-dasharray:none!important}
.mt-box{stroke:var(--bg);stroke-width:.6}.mt-hatch{stroke:var(--dim);stroke-width:2}
${LIGHT.map((_, i) => `.l${i}{stroke:var(--c${i});fill:none;stroke-width:1.8;stroke-linejoin:round}.f${i}{fill:var(--c${i})}`).join("")}
.faint{opacity:.4;stroke-width:1.2}.dashed{stroke-dasharray:6 4;stroke-width:2.4}
`;
const PAGE_STYLE = `
body{background:var(--bg);color:var(--fg);font-family:system-ui,'DejaVu Sans',sans-serif;margin:24px;max-width:1360px}
h1{font-size:20px}h2{font-size:16px;margin:28px 0 8px}
.panels{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,560px),1fr));gap:16px}
figure{margin:0;border:1px solid var(--grid);border-radius:8px;padding:6px;position:relative}
figure.wide,.table{grid-column:1/-1}
figure a{position:absolute;right:8px;bottom:6px;font-size:11px;color:var(--dim)}
.table{overflow-x:auto}table{border-collapse:collapse;font-size:12px}
th,td{border-bottom:1px solid var(--grid);padding:3px 9px;text-align:right;white-space:nowrap}
th{color:var(--dim);font-weight:600}
`;

/* --- text ------------------------------------------------------------------------------------------ */

const known = Number.isFinite;
const at = (v) => v.toFixed(1);
/* The number in at most `digits` digits. */
const short = (v, digits = 4) => String(Number(v.toPrecision(digits)));
const ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"};
const escaped = (text) => String(text).replace(/[\0-\x1f]/g, "").replace(/[&<>"]/g, (c) => ENTITIES[c]);
const string = (v) => typeof v === "string" ? v : "";

function bytesText(bytes) {
    const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let i = 0;
    for (; bytes >= 1024 && i < 6; i++)
        bytes /= 1024;
    return (i ? bytes.toFixed(2) : bytes) + " " + units[i];
}

/* "12k", "1e-5", "0.25": in the form that suits `alike`, so that the labels of an axis are written alike. */
function label(v, alike = v) {
    const m = Math.abs(alike), of = Math.abs(v), power = of > 0 ? Math.floor(Math.log10(of) + 1e-9) : 0;
    if (m > 0 && m < 0.01 * (1 - 1e-9) && of > 0 && of < 1)
        return `${short(v * 10 ** -power, 3)}e${power}`; /* 1.5e-3 */
    for (const [least, scale, unit] of [[1e9, 1e9, "G"], [1e6, 1e6, "M"], [1e4, 1e3, "k"]])
        if (of > 0 && m >= least)
            return short(v / scale, 3) + unit;
    return short(v);
}

/* --- axes ------------------------------------------------------------------------------------------ */

function roundStep(span, n) {
    const raw = span / n, power = 10 ** Math.floor(Math.log10(raw)), f = raw / power;
    return power * (f < 1.5 ? 1 : f < 3.5 ? 2 : f < 7.5 ? 5 : 10);
}

/* A scale from data (or their logarithm) to coordinates of the picture. */
class Axis {
    constructor(from, to, log = false) {
        Object.assign(this, {from, to, log, min: Infinity, max: -Infinity});
    }
    shows(v) {
        return known(v) && (!this.log || v > 0);
    }
    scaled(v) {
        return this.log ? Math.log10(v) : v;
    }
    /* Grows the range to hold v. */
    include(v) {
        if (!this.shows(v))
            return;
        this.min = Math.min(this.min, this.scaled(v));
        this.max = Math.max(this.max, this.scaled(v));
    }
    /* A range that is empty, or one value, becomes one that can be drawn. */
    widen() {
        if (!(this.max > this.min)) {
            this.min = this.min < Infinity ? this.min - 0.5 : 0;
            this.max = this.min + 1;
        }
    }
    /* Extends the range to round numbers (and to 0 if `zero`). */
    round(zero) {
        if (!(this.min <= this.max))
            [this.min, this.max] = [this.log ? -1 : 0, 1];
        if (zero && !this.log)
            this.min = Math.min(this.min, 0);
        if (this.max - this.min < 1e-12 * Math.max(Math.abs(this.max), 1e-12)) {
            const pad = this.log ? 0.5 : Math.max(Math.abs(this.max) * 0.1, 1e-9);
            this.min -= zero && !this.log ? 0 : pad;
            this.max += pad;
        }
        const step = this.log ? 0.25 : roundStep(this.max - this.min, 5);
        this.min = Math.floor(this.min / step + 1e-9) * step;
        this.max = Math.ceil(this.max / step - 1e-9) * step;
    }
    at(v) {
        return this.from + (this.scaled(v) - this.min) / (this.max - this.min) * (this.to - this.from);
    }
    ticks() {
        const out = [], span = this.max - this.min;
        if (this.log) {
            const inDecade = [1, 2, 5, 3, 7, 1.5].slice(0, span > 2.5 ? 1 : span > 0.8 ? 3 : 6);
            for (let d = Math.floor(this.min); d <= Math.ceil(this.max); d++)
                out.push(...inDecade.map((v) => v * 10 ** d));
            return out.filter((v) => Math.log10(v) >= this.min - 1e-9 && Math.log10(v) <= this.max + 1e-9);
        }
        const step = roundStep(span, 5);
        for (let v = Math.ceil(this.min / step - 1e-9) * step; v <= this.max + step * 1e-9; v += step)
            out.push(Math.abs(v) < step * 1e-9 ? 0 : v);
        return out;
    }
    /* [[tick, label]], in the form of the smallest tick of a logarithmic axis, else of the largest. */
    labels() {
        const ticks = this.ticks(), sizes = ticks.map(Math.abs);
        const alike = this.log ? Math.min(...sizes) : Math.max(...sizes);
        return ticks.map((v) => [v, label(v, alike)]);
    }
}

/* --- pieces of a picture --------------------------------------------------------------------------- */

const text = (x, y, css, anchor, words) =>
    `<text x="${at(x)}" y="${at(y)}" class="${css}" text-anchor="${anchor}">${escaped(words)}</text>\n`;
const rect = (css, x, y, w, h, more = "") => `<rect class="${css}" x="${at(x)}" y="${at(y)}" width="${at(w)}" height="${at(h)}"${more}`;
const titled = (words) => `<title>${escaped(words)}</title>`;
const line = (x1, x2, y1, y2) => `<line class="mt-grid" x1="${at(x1)}" x2="${at(x2)}" y1="${at(y1)}" y2="${at(y2)}"/>\n`;
const picture = (width, height, title, body) =>
    `<svg class="mt-chart" viewBox="0 0 ${width} ${height}" role="img" aria-label="${escaped(title)}">\n` +
    `<rect class="mt-bg" width="${width}" height="${height}"/>\n${text(12, 20, "mt-title", "start", title)}${body}</svg>\n`;
/* A picture as a file of its own. */
const standalone = (svg) => `<?xml version="1.0" encoding="UTF-8"?>\n` +
    svg.replace("<svg ", `<svg xmlns="http://www.w3.org/2000/svg" `).replace(">", `><style>${STYLE}</style>`);

/* Frame, grid, labels of ticks, and what the axes are. */
function frame(x, y, xLabel, yLabel) {
    let out = "";
    for (const [v, name] of y.labels())
        out += line(x.from, x.to, y.at(v), y.at(v)) + text(x.from - 6, y.at(v) + 4, "mt-tick", "end", name);
    for (const [v, name] of x.labels())
        out += line(x.at(v), x.at(v), y.to, y.from) + text(x.at(v), y.from + 16, "mt-tick", "middle", name);
    return out + text((x.from + x.to) / 2, y.from + 34, "mt-label", "middle", xLabel) +
        `<text class="mt-label" text-anchor="middle" transform="translate(16,${at((y.from + y.to) / 2)}) rotate(-90)">` +
        `${escaped(yLabel)}</text>\n`;
}

/* Names and their colours, from the right. */
function legend(names, width = W) {
    let out = "", x = width - RIGHT;
    for (const {name, colour} of names.filter((s) => s.name).reverse()) {
        x -= 6.3 * name.length + 6;
        out += text(x, 20, "mt-note", "start", name);
        out += rect(`f${colour & 7}`, x - 14, 12, 10, 8, ` rx="2"/>\n`);
        x -= 22;
    }
    return out;
}

/* Every stride-th point, and the extremes of each stride: spikes must not vanish. */
function drawLine(s, x, y) {
    const stride = Math.floor(s.y.length / MOST_POINTS) + 1;
    let path = "", open = false;
    for (let i = 0; i < s.y.length; i += stride) {
        let low = i, high = i;
        for (let k = i; k < Math.min(i + stride, s.y.length); k++) {
            low = s.y[k] < s.y[low] ? k : low;
            high = s.y[k] > s.y[high] ? k : high;
        }
        for (const k of new Set([Math.min(low, high), Math.max(low, high)])) {
            const shown = y.shows(s.y[k]) && known(s.x[k]);
            path += shown ? `${open ? "L" : "M"}${at(x.at(s.x[k]))} ${at(y.at(s.y[k]))}` : "";
            open = shown;
        }
    }
    return `<path class="l${s.colour & 7}${s.faint ? " faint" : ""}${s.dashed ? " dashed" : ""}" d="${path}"/>\n`;
}

function drawPoints(s, x, y) {
    return s.x.map((v, i) => y.shows(s.y[i]) && known(v) ?
        `<circle class="f${s.colour & 7}" cx="${at(x.at(v))}" cy="${at(y.at(s.y[i]))}" r="3.5">` +
        `${titled(`${label(v)}: ${label(s.y[i])}`)}</circle>\n` : "").join("");
}

/* --- charts: functions of the range [from, to] of x that is looked at, or of nothing: all ------------ */

/* Series are {name, x, y, colour, points, faint, dashed}; those of a range. */
const within = (series, range) => !range ? series : series.map((s) => {
    const inside = (_, i) => s.x[i] >= range[0] && s.x[i] <= range[1];
    return {...s, x: s.x.filter(inside), y: s.y.filter(inside)};
});

/* c: {title, xLabel, yLabel, log, zero, series}. */
const lineChart = (c) => (range) => {
    const x = new Axis(LEFT, W - RIGHT), y = new Axis(H - BOTTOM, TOP, c.log), series = within(c.series, range);
    for (const s of series)
        s.y.forEach((v, i) => {
            y.include(v);
            x.include(y.shows(v) ? s.x[i] : null);
        });
    const any = x.min < Infinity;
    x.widen();
    y.round(c.zero);
    const body = frame(x, y, c.xLabel, c.yLabel) + series.map((s) => (s.points ? drawPoints : drawLine)(s, x, y)).join("") +
        legend(series) + (any ? "" : text(W / 2, H / 2, "mt-label", "middle", "no data"));
    return {svg: picture(W, H, c.title, body), x};
};

/* Layers, each on the sum of those before; dashed series are lines. */
const stackChart = (c) => (range) => {
    const x = new Axis(LEFT, W - RIGHT), y = new Axis(H - BOTTOM, TOP), series = within(c.series, range);
    const steps = series[0].x, size = (v) => known(v) && v > 0 ? v : 0;
    const layers = series.filter((s) => !s.dashed), lines = series.filter((s) => s.dashed);
    if (!steps.length)
        return {svg: picture(W, H, c.title, text(W / 2, H / 2, "mt-label", "middle", "no data")), x: null};
    const sums = steps.map((_, i) => layers.reduce((sum, s) => sum + size(s.y[i]), 0));
    /* a few steps that are far longer than the rest, such as the first, are cut off */
    const top = 1.6 * [...sums].sort((a, b) => a - b)[Math.floor((sums.length - 1) * 0.95)];
    steps.forEach((v) => x.include(v));
    lines.forEach((s) => s.y.forEach((v) => y.include(v)));
    sums.forEach((v) => y.include(Math.min(v, top)));
    x.widen();
    y.round(true);
    const stride = Math.floor(steps.length / MOST_POINTS) + 1;
    const kept = steps.map((_, i) => i).filter((i) => i % stride === 0);
    const base = steps.map(() => 0), corner = (i) => `${at(x.at(steps[i]))} ${at(y.at(base[i]))}`;
    let body = frame(x, y, c.xLabel, c.yLabel) + `<clipPath id="mt-plot">${rect("", x.from, y.to, x.to - x.from, y.from - y.to, "/>")}` +
        `</clipPath><g clip-path="url(#mt-plot)">\n`;
    for (const s of layers) {
        const below = kept.map(corner);
        s.y.forEach((v, i) => base[i] += size(v));
        body += `<path class="f${s.colour & 7}" d="M${[...below, ...kept.map(corner).reverse()].join("L")}Z"/>\n`;
    }
    body += lines.map((s) => drawLine(s, x, y)).join("") + "</g>\n" + legend(series);
    return {svg: picture(W, H, c.title, body), x};
};

/* Points {x, y, name}, and the line on which both are equal; both axes logarithmic, and one scale: a diagonal. */
const scatterChart = (title, xLabel, yLabel, points) => () => {
    const x = new Axis(LEFT, LEFT + (H - BOTTOM - TOP) * 2, true), y = new Axis(H - BOTTOM, TOP, true);
    const shown = points.filter((p) => x.shows(p.x) && y.shows(p.y));
    shown.forEach((p) => (x.include(p.x), x.include(p.y)));
    x.round(false);
    [y.min, y.max] = [x.min, x.max];
    const dots = shown.map((p) => `<circle class="f0" cx="${at(x.at(p.x))}" cy="${at(y.at(p.y))}" r="4" opacity=".75">` +
        titled(`${p.name}: ${short(p.y)} against ${short(p.x)} (${(p.y / p.x).toFixed(2)})`) + "</circle>\n");
    return {svg: picture(W, H, title, frame(x, y, xLabel, yLabel) +
        `<path class="mt-mark" d="M${at(x.from)} ${at(y.from)}L${at(x.to)} ${at(y.to)}"/>\n` + dots.join(""))};
};

/* Dark blue through green to yellow: lightness grows evenly, so it is readable in grey. */
function heatColour(t) {
    const stops = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
    t = Math.min(Math.max(t, 0), 1) * 4;
    const i = Math.min(Math.floor(t), 3);
    return `rgb(${stops[i].map((v, k) => Math.round(v + (t - i) * (stops[i + 1][k] - v))).join(",")})`;
}

/* m: {title, xLabel, yLabel, unit, columns, rows, cells}; cells[row][column] is {value, words}: words where there is no
 * value, on hatching. */
const heatMap = (m) => () => {
    const CELL = 34, L = 110, T = 52, B = 50, height = T + CELL * m.rows.length + B;
    const w = (W - L - 16) / Math.max(m.columns.length, 1);
    const values = m.cells.flat().map((c) => c && c.value).filter(known);
    const low = Math.min(...values), high = Math.max(...values);
    let best = "", body = `<defs><pattern id="mt-hatch" width="8" height="8" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">` +
        `<line class="mt-hatch" x1="0" y1="0" x2="0" y2="8"/></pattern></defs>\n`;
    m.rows.forEach((name, r) => {
        const y = T + CELL * r, middle = y + CELL / 2;
        body += text(L - 8, middle + 4, "mt-tick", "end", name);
        m.columns.forEach((_, c) => {
            const {value, words} = m.cells[r][c] || {}, x = L + w * c;
            const t = high > low ? (value - low) / (high - low) : 0.5;
            if (known(value)) {
                body += rect("mt-box", x, y, w, CELL, ` fill="${heatColour(t)}"/>\n`);
                body += text(x + w / 2, middle + 4, t > 0.55 ? "mt-dark" : "mt-pale", "middle", label(value));
            } else {
                body += rect("mt-box", x, y, w, CELL, ` fill="${words ? "url(#mt-hatch)" : "none"}"/>\n`);
                if (words) /* a plain background, so that text can be read on the hatching */
                    body += rect("mt-bg", x + w / 2 - 3.4 * words.length - 3, middle - 8, 6.8 * words.length + 6, 16, ` rx="3"/>\n`) +
                        text(x + w / 2, middle + 4, "mt-note", "middle", words);
            }
            if (value === high && high > low && !best)
                best = `<path class="mt-mark mt-best" d="M${at(x + 3)} ${at(y + 3)}h${at(w - 6)}v${CELL - 6}h-${at(w - 6)}z">` +
                    `${titled("the best")}</path>\n`;
        });
    });
    m.columns.forEach((name, c) => body += text(L + w * (c + 0.5), height - B + 16, "mt-tick", "middle", name));
    body += best + text(L + (W - L) / 2, height - 12, "mt-label", "middle", `${m.xLabel}   (cells: ${m.unit}; the best is framed)`) +
        text(12, T - 10, "mt-label", "start", m.yLabel); /* across: a key is longer than a few rows are high */
    return {svg: picture(W, height, m.title, body)};
};

/* A bar for each tier, divided by use, each with its own scale; bars are {name, parts: [{name, bytes}], limit}. */
const memoryChart = (title, bars) => () => {
    const BAR = 26, ROW = 17, L = 70, GAP = 26, LITTLE = 20, width = W - L - 16;
    let y = 36, body = "";
    for (const bar of bars) {
        const sum = bar.parts.reduce((total, p) => total + p.bytes, 0), shade = (k) => ` opacity="${k < 8 ? "1.00" : "0.60"}"`;
        const little = bar.limit > LITTLE * sum; /* then nothing could be seen of it */
        const whole = little ? Math.max(sum, 1) / 0.7 : Math.max(sum, bar.limit || 0, 1);
        let x = L;
        body += text(L - 8, y + BAR / 2 + 4, "mt-note", "end", bar.name);
        bar.parts.forEach((p, k) => {
            const w = p.bytes / whole * width;
            body += rect(`mt-box f${k % 8}`, x, y, w, BAR, shade(k) + ">") + titled(`${p.name}: ${bytesText(p.bytes)}`) + "</rect>\n";
            x += w;
        });
        if (little)
            body += text(x + 8, y + BAR / 2 + 4, "mt-note", "start", `of ${bytesText(bar.limit)}`);
        else if (bar.limit > 0)
            body += `<path class="mt-mark" d="M${at(L + bar.limit / whole * width)} ${at(y - 4)}V${at(y + BAR + 4)}"/>\n`;
        y += BAR + 14;
        bar.parts.forEach((p, k) => {
            const left = L + (k % 2) * width / 2, row = y + Math.floor(k / 2) * ROW;
            body += rect(`f${k % 8}`, left, row - 7, 10, 8, ` rx="2"${shade(k)}/>\n`);
            body += text(left + 15, row + 1, "mt-note", "start", `${p.name}  ${bytesText(p.bytes)}`);
        });
        y += Math.ceil(bar.parts.length / 2) * ROW + GAP - 14;
    }
    return {svg: picture(W, y + 8, title, body)};
};

/* Groups of lanes, one above the other, on one scale of time: t is {title, groups, lanes, kinds, spans}; spans are
 * {group, lane, colour, begin, end (ms), name}. */
const timeline = (t) => (range) => {
    const WIDTH = 1000, LANE = 22, L = 120, T = 52, GAP = 26, B = 42, tall = t.lanes.length * LANE + GAP;
    const height = T + t.groups.length * tall + B - GAP, x = new Axis(L, WIDTH - 16);
    [x.min, x.max] = range || [0, t.spans.reduce((end, s) => Math.max(end, s.end), 0) || 1];
    let body = legend(t.kinds, WIDTH);
    for (const [v, name] of x.labels())
        body += line(x.at(v), x.at(v), T - 8, height - B + 4) + text(x.at(v), height - B + 18, "mt-tick", "middle", name);
    body += text((x.from + x.to) / 2, height - 8, "mt-label", "middle", "milliseconds");
    t.groups.forEach((name, g) => {
        body += text(12, T + g * tall - 4, "mt-label", "start", name);
        t.lanes.forEach((lane, l) => body += text(L - 8, T + g * tall + (l + 0.7) * LANE, "mt-tick", "end", lane));
    });
    for (const s of t.spans) {
        const from = x.at(Math.max(s.begin, x.min)), w = x.at(Math.min(s.end, x.max)) - from;
        if (!(w >= 0.08) || s.lane < 0)
            continue; /* too narrow to see */
        body += `<rect class="f${s.colour}${w > 2 ? " mt-box" : ""}" x="${from.toFixed(2)}" y="${at(T + s.group * tall + s.lane * LANE + 2)}" ` +
            `width="${w.toFixed(2)}" height="${LANE - 4}">` +
            `${titled(`${s.name}: ${(s.end - s.begin).toFixed(3)} ms at ${s.begin.toFixed(3)}`)}</rect>\n`;
    }
    return {svg: picture(WIDTH, height, t.title, body), x};
};

/* --- runs ------------------------------------------------------------------------------------------ */

const column = (table, key) => table[key] || (table.step || []).map(() => null);
const hasValue = (v) => v.some(known);
const panel = (section, name, draw) => ({section, name, draw});

/* Each value replaced by that of a straight line fitted to its neighbours on both sides (local linear regression:
 * Cleveland, 1979), which does not lag behind a falling loss as a moving average does. */
function smooth(v) {
    const WIDEST = 50, SHARE = 20, EARLIER = 4; /* neighbours on a side; at most this part of all, of those before */
    return v.map((value, i) => {
        const half = Math.floor(Math.min(WIDEST, 1 + v.length / SHARE, 1 + i / EARLIER));
        let n = 0, x = 0, y = 0, xx = 0, xy = 0;
        for (let k = Math.max(i - half, 0); k <= Math.min(i + half, v.length - 1); k++)
            if (known(v[k])) {
                const d = k - i;
                n++;
                x += d;
                y += v[k];
                xx += d * d;
                xy += d * v[k];
            }
        const det = n * xx - x * x;
        return !known(value) ? null : det > 0 ? (y * xx - x * xy) / det : y / n;
    });
}

/* Loss over steps, or over tokens: each step (faint), the smoothed line, and the evaluations. */
function lossPanel(section, runs, key) {
    const many = runs.length > 1, tokens = key === "tokens", evaluated = runs.some((r) => (r.evals.step || []).length);
    const series = runs.flatMap((r, i) => {
        const x = column(r.steps, key), y = column(r.steps, "loss");
        const evals = {name: many ? "" : "evaluation", x: column(r.evals, "step"), y: column(r.evals, "eval_loss"), colour: 2 * i + 1,
                       points: true};
        return [{x, y, colour: 2 * i, faint: true}, {name: many ? r.name : "loss", x, y: smooth(y), colour: 2 * i},
                ...(tokens ? [] : [evals])];
    });
    return panel(section, tokens ? "loss-tokens" : "loss",
                 lineChart({title: tokens ? "Loss over tokens" : "Loss", yLabel: "nats a token", series,
                            xLabel: tokens ? "tokens" : many && evaluated ? "step (points: evaluations)" : "step"}));
}

const COLUMNS = [["learning-rate", "Learning rate", "rate", "lr", false],
                 ["gradient-norm", "Gradient norm before clipping", "norm", "grad_norm", true],
                 ["speed", "Speed", "tokens a second", "tok_s", false]];

/* What objectives measure beside the loss: each key is a line, each evaluation a point. */
const MEASURES = [
    ["rewards", "Rewards of answers", "beta times log-ratio to the reference", false,
     {"rewards/chosen": "chosen", "rewards/rejected": "rejected", "rewards/margins": "margin"}],
    ["preferred", "Share of pairs preferred, of tokens foreseen", "1: all", true,
     {"rewards/accuracies": "pairs", "mean_token_accuracy": "tokens"}],
    ["log-probabilities", "Log-probabilities of answers", "nats", false, {"logps/chosen": "chosen", "logps/rejected": "rejected"}],
    ["distance", "Distance to the reference", "nats", true, {"kl": "distance to the reference"}],
    ["reward", "Rewards of rollouts", "reward", false, {"reward": "mean", "reward_std": "deviation in a group"}],
    ["signal", "Shares without a gradient, or cut off", "1: all", true,
     {"clip_ratio/region_mean": "tokens clipped", "frac_reward_zero_std": "rollouts of groups of equal rewards",
      "completions/clipped_ratio": "rollouts cut off"}],
    ["entropy", "Entropy of the policy", "nats", true, {"entropy": "entropy"}],
    ["length", "Length of completions", "tokens", true, {"completions/mean_length": "tokens"}],
];

function measurePanels(r) {
    return MEASURES.flatMap(([name, title, yLabel, zero, keys]) => {
        const series = [];
        let colour = 0;
        for (const [key, words] of Object.entries(keys)) {
            const steps = column(r.steps, key), evals = column(r.evals, "eval_" + key), before = series.length;
            if (hasValue(steps))
                series.push({name: words, x: r.steps.step, y: steps, colour});
            if (hasValue(evals))
                series.push({name: series.length > before ? "" : words, x: r.evals.step, y: evals, colour, points: true});
            colour += series.length > before;
        }
        return series.length ? [panel(r.name, name, lineChart({title, xLabel: "step (points: evaluations)", yLabel, zero, series}))] : [];
    });
}

/* eval_NAME_loss of the sets of eval.sets, a line a name: their tokens tell them from measures such as nll_loss. */
function setPanels(r) {
    const names = Object.keys(r.evals).map((key) => (key.match(/^eval_(.+)_loss$/) || [])[1]);
    const series = names.filter((name) => name && r.evals[`eval_${name}_tokens`]).slice(0, 16)
        .map((name, i) => ({name, x: r.evals.step, y: r.evals[`eval_${name}_loss`], colour: i, points: true}));
    return series.length ? [panel(r.name, "sets", lineChart({title: "Loss of evaluation sets", xLabel: "step", yLabel: "nats a token",
                                                             series}))] : [];
}

/* The parts of a step's time. Waits for the link are within forward and backward, and are subtracted from them. */
function stepTimePanel(r) {
    const of = (key) => column(r.steps, key), fwd = of("t_fwd"), bwd = of("t_bwd"), wait = of("t_wait_h2d");
    const predicted = ((r.info || {}).predicted || {}).t_step;
    const timed = fwd.map((_, i) => i).filter((i) => known(fwd[i]) && known(bwd[i]) && fwd[i] + bwd[i] > 0);
    const waited = (i) => known(wait[i]) ? Math.min(wait[i], fwd[i] + bwd[i]) : 0;
    const rest = (i) => 1 - waited(i) / (fwd[i] + bwd[i]);
    const series = [["data", (i) => of("t_data")[i], 6], ["wait for H2D", waited, 1], ["forward", (i) => fwd[i] * rest(i), 0],
                    ["backward", (i) => bwd[i] * rest(i), 2], ["update", (i) => of("t_opt")[i], 4, true]];
    if (known(predicted))
        series.push(["predicted", () => predicted, 3, true]);
    return panel(r.name, "step-time", stackChart({
        title: "Time of a step", xLabel: "step", yLabel: "seconds",
        series: series.map(([name, value, colour, dashed]) => (
            {name, x: timed.map((i) => r.steps.step[i]), y: timed.map(value), colour, dashed}))}));
}

function linkPanel(r) {
    const seconds = column(r.steps, "t_step"), rate = (key) => column(r.steps, key).map((v, i) => known(v) ? v / seconds[i] * 1e-9 : null);
    const series = [["host to device", "h2d_bytes"], ["device to host", "d2h_bytes"]];
    return panel(r.name, "link", lineChart({
        title: "Link, mean over a step", xLabel: "step", yLabel: "GB/s", zero: true,
        series: series.map(([name, key], colour) => ({name, x: column(r.steps, "step"), y: rate(key), colour}))}));
}

function memoryPanels(r) {
    const isSize = (bytes) => known(bytes) && bytes >= 0 && bytes < 2 ** 63, rows = (r.info || {}).memory;
    const sound = (Array.isArray(rows) ? rows : []).filter(
        (row) => row && string(row.tier) && string(row.use) && isSize(row.bytes));
    const budget = (r.info || {}).device_budget;
    const bars = ["device", "host", "nvme", "disk"].map((name) => ({
        name, parts: sound.filter((row) => row.tier === name).slice(0, 24).map(({use, bytes}) => ({name: use, bytes})),
        limit: name === "device" && isSize(budget) ? budget : 0})).filter((bar) => bar.parts.length);
    return bars.length ? [panel(r.name, "memory", memoryChart("Memory by use (dashed mark: the device's budget)", bars))] : [];
}

/* Kinds of work, in the order of the legend, with what a trace calls them. */
const KINDS = [{name: "forward", colour: 0, of: ["forward", "embed", "head"]}, {name: "backward", colour: 2, of: ["backward", "embed_bwd", "grad_cast"]},
               {name: "update", colour: 4, of: ["update"]}, {name: "loads", colour: 1, of: ["load"]},
               {name: "stores", colour: 5, of: ["store", "store_grad"]}, {name: "disk", colour: 3, of: ["read", "write"]},
               {name: "other", colour: 6, of: []}];

/* Lanes are the first GPU's queues, the host's, and of the drives' and the other GPUs' those that have spans. A queue whose
 * spans overlap has further rows in the trace, which are drawn as one. */
function timelinePanels(r) {
    const QUEUES = 27 /* of eight GPUs */, events = (r.trace || {}).traceEvents;
    if (!r.trace)
        return [];
    const sound = (Array.isArray(events) ? events : []).filter((e) => e && typeof e.name === "string");
    const queue = (e) => e.tid >= 0 && e.tid < 16 * QUEUES ? Math.floor(e.tid) % QUEUES : -1;
    const names = ["compute", "H2D", "D2H", "host optimizer", "disk reads", "disk writes"], seen = new Set([0, 1, 2, 3]);
    for (const e of sound)
        if (e.name === "thread_name" && e.tid >= 0 && e.tid < QUEUES && e.args && typeof e.args.name === "string")
            names[e.tid] = e.args.name;
        else if (e.name !== "thread_name" && e.dur !== undefined && queue(e) >= 0)
            seen.add(queue(e));
    const rows = [...seen].sort((a, b) => a - b);
    const spans = sound.filter((e) => e.ph === "X" && typeof e.cat === "string" && known(e.ts) && (e.pid === 1 || e.pid === 2))
        .map((e) => ({group: e.pid - 1, lane: rows.indexOf(queue(e)), name: e.name, begin: e.ts * 1e-3,
                      end: (e.ts + e.dur) * 1e-3,
                      colour: (KINDS.find((kind) => kind.of.includes(e.cat)) || KINDS[6]).colour}));
    const groups = spans.some((s) => s.group === 1) ? ["measured", "predicted"] : ["measured"];
    return [panel(r.name, "timeline", timeline({title: "Time line of one step", groups, lanes: rows.map((q) => names[q] || ""), kinds: KINDS, spans}))];
}

/* How layers spread their tokens over experts; the least is the worst where the last column says so. */
const SPREADS = [["balance", "Balance of experts", "1: even; experts: one has all", "expert_balance", false],
                 ["entropy", "Entropy of the choice of experts", "1: even; 0: one has all", "expert_entropy", true],
                 ["idle-experts", "Experts without rows", "experts", "experts_idle", false],
                 ["fullest-expert", "Share of the fullest expert", "of a layer's rows", "expert_max_share", false]];

function expertPanels(r) {
    return !r.layers.step ? [] : SPREADS.map(([name, title, yLabel, key, low]) => panel(r.name, name, lineChart({
        title, xLabel: "step", yLabel, zero: true,
        series: [{name: "mean of layers", x: r.layers.step, y: column(r.layers, key), colour: 0},
                 {name: "worst layer", x: r.layers.step, y: column(r.layers, key + (low ? " least" : " most")), colour: 1}]})));
}

/* Panels of all runs together, then of each run. */
function runPanels(runs) {
    const section = runs.length > 1 ? "All runs" : runs[0].name;
    const shared = COLUMNS.map(([name, title, yLabel, key, log]) => panel(section, name, lineChart({
        title, xLabel: "step", yLabel, log, zero: !log,
        series: runs.map((r, i) => ({name: runs.length > 1 ? r.name : "", x: column(r.steps, "step"), y: column(r.steps, key), colour: 2 * i}))})));
    return [lossPanel(section, runs, "step"), lossPanel(section, runs, "tokens"), ...shared, ...runs.flatMap((r) =>
        [...measurePanels(r), ...setPanels(r), ...answerPanels(r), stepTimePanel(r), ...timelinePanels(r),
         ...memoryPanels(r), ...expertPanels(r), linkPanel(r)])];
}

/* --- sweeps ---------------------------------------------------------------------------------------- */

const axesOf = (row) => Object.entries(row.axes && typeof row.axes === "object" ? row.axes : {});

/* A map for each combination of the values on all axes but the first two. */
function mapPanels(section, rows) {
    const rest = (row) => [string(row.job), ...axesOf(row).slice(2).map(([key, v]) => `${key} = ${string(v)}`)].filter((s) => s).join(", ");
    const combinations = [...new Set(rows.filter((row) => axesOf(row).length).map(rest))].slice(0, 12);
    return combinations.map((combination, nth) => {
        const mine = rows.filter((row) => axesOf(row).length && rest(row) === combination), cells = [];
        const value = (row, k) => string((axesOf(row)[k] || [])[1]);
        const all = (k) => [...new Set(mine.map((row) => value(row, k)))].slice(0, 24);
        const columns = all(0), names = all(1), axes = axesOf(mine[0]);
        for (const row of mine) {
            const i = names.indexOf(value(row, 1)), words = row.status === "does not fit" ? "no fit" : string(row.status);
            (cells[i] = cells[i] || [])[columns.indexOf(value(row, 0))] = {value: row.tok_s, words};
        }
        return panel(section, `heat-map-${nth + 1}`, heatMap({
            title: "Speed" + (combination && ": ") + combination, xLabel: axes[0][0], yLabel: axes[1] ? axes[1][0] : "",
            unit: "tokens a second", columns, rows: names, cells: names.map((_, i) => cells[i] || [])}));
    });
}

function scatterPanels(section, table, rows) {
    const points = rows.filter((row) => known(row.predicted_s) && known(row.measured_s)).map((row) => ({
        x: row.predicted_s, y: row.measured_s, name: [string(row.job), ...axesOf(row).map(([key, v]) => `${key}=${string(v)}`)].join(" ")}));
    const percent = (v) => known(v) ? (100 * v).toFixed(1) : "?";
    const title = `Predicted and measured: median error ${percent(table.median_error)}%, worst ${percent(table.worst_error)}%`;
    return points.length ? [panel(section, "predicted-measured",
                                  scatterChart(title, "predicted seconds a step", "measured seconds a step", points))] : [];
}

const SHOWN = [["predicted_s", "predicted s"], ["measured_s", "measured s"], ["deviation_pct", "spread %"], ["runs", "runs"],
               ["measured_over_predicted", "ratio"], ["tok_s", "tokens/s"], ["model_tflops", "TFLOP/s"], ["wait_h2d_pct", "wait %"],
               ["device_mib", "device MiB"], ["peak_rss_mib", "peak MiB"], ["planned_host_mib", "planned MiB"]];

function tableOf(section, heads, lines) {
    const cell = (v) => `<td>${known(v) ? short(v) : escaped(string(v))}</td>`;
    return {section, html: `<div class="table"><table><thead><tr>${heads.map((h) => `<th>${escaped(h)}</th>`).join("")}</tr></thead><tbody>` +
                           lines.map((l) => `<tr>${l.map(cell).join("")}</tr>\n`).join("") + "</tbody></table></div>"};
}

function tablePanel(section, rows) {
    const keys = rows.length ? axesOf(rows[0]) : [];
    const heads = ["job", ...keys.map(([key]) => key.slice(key.indexOf(".") + 1)), "status", ...SHOWN.map(([, head]) => head)];
    const lines = rows.map((row) => [row.job, ...axesOf(row).map(([, v]) => v), row.status,
                                     ...SHOWN.map(([key]) => row.tok_s !== undefined ? row[key] : "")]); /* else it has no figures */
    return tableOf(section, heads, lines);
}

/* The newest answers to held-out prompts. */
function answerPanels(r) {
    const rows = (Array.isArray(r.answers) ? r.answers : []).filter((row) => row && typeof row === "object").slice(0, 20);
    const last = (messages) => (Array.isArray(messages) ? messages[messages.length - 1] || {} : {}).content;
    const asked = ({prompt, messages}) => prompt === undefined ? last(messages) : prompt;
    const lines = rows.map((row) => [asked(row), row.completion, row.reward]);
    return rows.length ? [tableOf(r.name, ["prompt", "answer", "reward"], lines)] : [];
}

/* Each panel is {section, name, draw(range)}, which gives {svg, x: the axis that can be zoomed}; or {section, html}. */
function panelsOf(data) {
    const runs = data.runs.slice(0, 8);
    return [...(runs.length ? runPanels(runs) : []), ...data.sweeps.flatMap(({name, table}) => {
        const rows = (Array.isArray((table || {}).rows) ? table.rows : []).filter((row) => row && typeof row === "object");
        return [...mapPanels(name, rows), ...scatterPanels(name, table || {}, rows), tablePanel(name, rows)];
    })];
}

/* --- the page -------------------------------------------------------------------------------------- */

/* Draws a panel; to drag over it zooms in along x, a double click shows all again. */
function fill(figure, p, range) {
    const {svg, x} = p.draw(range);
    figure.innerHTML = svg + `<a href="data:image/svg+xml,${encodeURIComponent(standalone(svg))}" download="${p.name}.svg">save</a>`;
    const chart = figure.querySelector("svg"), width = chart.viewBox.baseVal.width;
    const value = (event) => {
        const box = chart.getBoundingClientRect(), place = (event.clientX - box.left) / box.width * width;
        return x.min + (Math.min(Math.max(place, x.from), x.to) - x.from) / (x.to - x.from) * (x.max - x.min);
    };
    let begin = null;
    chart.onpointerdown = (event) => begin = x ? value(event) : null;
    chart.onpointerup = (event) => {
        const ends = begin === null ? [] : [begin, value(event)].sort((a, b) => a - b);
        if (ends[1] - ends[0] > 0.01 * (x.max - x.min))
            fill(figure, p, ends);
        begin = null;
    };
    chart.ondblclick = () => fill(figure, p);
    chart.style.touchAction = "pan-y";
    chart.style.userSelect = "none";
}

function show(data) {
    const add = (parent, tag, words) => {
        const element = document.createElement(tag);
        element.textContent = words || "";
        return parent.appendChild(element);
    };
    document.title = data.title;
    add(document.head, "style", STYLE + PAGE_STYLE);
    add(document.body, "h1", data.title);
    let section = null, panels;
    for (const p of panelsOf(data)) {
        if (p.section !== section) {
            add(document.body, "h2", section = p.section);
            panels = add(document.body, "div");
            panels.className = "panels";
        }
        if (p.html) {
            panels.insertAdjacentHTML("beforeend", p.html);
            continue;
        }
        const figure = add(panels, "figure");
        figure.dataset.panel = p.name;
        figure.classList.toggle("wide", p.name === "timeline");
        fill(figure, p);
    }
}

if (typeof document !== "undefined")
    show(JSON.parse(document.getElementById("data").textContent));
