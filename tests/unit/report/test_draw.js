/* SPDX-License-Identifier: Apache-2.0 */
/* What src/report/draw.js computes: node test_draw.js DRAW.js */
"use strict";
const assert = require("assert"), fs = require("fs"), test = require("node:test");
const code = fs.readFileSync(process.argv.at(-1), "utf8");
const {Axis, lineChart, smooth} = new Function(code + "; return {Axis, lineChart, smooth};")();
const N = 400, range = (n) => [...Array(n).keys()], size = (v) => Math.sqrt(v.reduce((sum, x) => sum + x * x, 0) / v.length);

test("a smoothed line does not lag", () => {
    const line = range(N).map((i) => 5 - 0.01 * i), loss = range(N).map((i) => 2 + 8 * Math.exp(-i / 30));
    line[7] = line[200] = null;
    const ofLine = smooth(line), ofLoss = smooth(loss);
    for (const i of range(N)) {
        assert.equal(ofLine[i] === null, line[i] === null);
        assert(line[i] === null || Math.abs(ofLine[i] - line[i]) < 1e-9);
        assert(Math.abs(ofLoss[i] - loss[i]) < 0.03 * 8);
    }
});

test("it has less noise", () => {
    let state = 5;
    const noise = range(N).map(() => (state = state * 48271 % 2147483647) / 2147483647 - 0.5), calm = smooth(noise);
    assert(size(calm.slice(100, N - 20)) < size(noise.slice(100, N - 20)) / 4);
    assert(size(calm.slice(N - 20)) < size(noise.slice(N - 20)) / 1.5);
});

test("few values stay themselves", () => {
    for (const v of [[], [3], [3, 1]])
        assert.deepEqual(smooth(v), v);
});

test("what is no number is not drawn, and text is escaped", () => {
    const chart = (y) => lineChart({title: "T & t", xLabel: "step", yLabel: "", series: [{name: "a <b>", x: [1, 2, 3], y, colour: 0}]})().svg;
    assert(chart([1, null, 2]).includes("T &amp; t") && chart([1, null, 2]).split("M").length === 3); /* two lines */
    assert(!/<b>|NaN|null/.test(chart([1, null, 2])) && chart([null, null, null]).includes("no data"));
});

test("the labels of an axis are written alike", () => {
    for (const [log, min, max, first, last] of [[false, 0.002, 0.01, "0.002", "0.01"], [false, 0.001, 0.005, "1e-3", "5e-3"],
                                                [false, 4000, 20000, "4k", "20k"], [true, -5, 0, "1e-5", "1"], [true, 0, 2.75, "1", "100"]]) {
        const labels = Object.assign(new Axis(0, 1, log), {min, max}).labels().map(([, name]) => name);
        assert.deepEqual([labels[0], labels.at(-1)], [first, last]);
    }
});

test("a range of steps fills the picture", () => {
    const series = [{x: range(9), y: range(9), colour: 0}], {x} = lineChart({title: "", xLabel: "", yLabel: "", series})([2, 5]);
    assert.deepEqual([x.min, x.max], [2, 5]);
});

/* As much of a browser as the page's script uses. */
function element(tag) {
    const inner = {viewBox: {baseVal: {width: 640}}, style: {}, getBoundingClientRect: () => ({left: 0, width: 320})};
    const of = {tag, children: [], dataset: {}, style: {}, classList: {toggle: () => 0}, chart: inner};
    return Object.assign(of, {appendChild: (child) => of.children[of.children.push(child) - 1], querySelector: () => inner,
                              insertAdjacentHTML: (_, html) => of.children.push({tag: "html", html})});
}

test("a page is drawn, and to drag over a chart zooms in", () => {
    const run = {name: "r", steps: {step: range(9), loss: range(9)}, evals: {}, layers: {}}, data = {title: "T", runs: [run], sweeps: []};
    const document = {head: element("head"), body: element("body"), createElement: element,
                      getElementById: () => ({textContent: JSON.stringify(data)})};
    new Function("document", code)(document);
    const loss = document.body.children.find((e) => e.className === "panels").children[0], all = loss.innerHTML;
    assert(document.title === "T" && loss.dataset.panel === "loss" && all.includes("<svg") && all.includes('download="loss.svg"'));
    loss.chart.onpointerdown({clientX: 100});
    loss.chart.onpointerup({clientX: 200});
    assert(loss.innerHTML !== all);
    loss.chart.ondblclick();
    assert.equal(loss.innerHTML, all);
});
