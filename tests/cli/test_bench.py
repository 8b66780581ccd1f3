# SPDX-License-Identifier: Apache-2.0
"""bench and report through the binary."""
import csv
import glob
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

from tiny import BINARY, SLOW, base, config, drawn, megatrain, metrics, part, write_data, write_ini, write_model

SWEEP = """[global]
include = {ini}
[sweep]
train.micro_batch = 1, 2
memory.slots = 2, 3
warmup_steps = 1
steps = 2
repeat = 2
[job roomy]
[job tight]
memory.device_budget = 200KiB
"""


def table(folder):
    with open(os.path.join(folder, "sweep.csv")) as f:
        return [(r["hash"], r["job"], r["train.micro_batch"], r["memory.slots"], r["status"], r["runs"]) for r in csv.DictReader(f)]


def a_sweep_killed_at_random_and_resumed_gives_the_same_table(tmp, ini, env):
    sweep = os.path.join(tmp, "sweep.ini")
    open(sweep, "w").write(SWEEP.format(ini=ini))
    want, out = os.path.join(tmp, "want"), os.path.join(tmp, "killed")
    t0 = time.time()
    p = megatrain("bench", sweep, "--out", want, env=env)
    took = time.time() - t0
    rows = table(want)
    assert len(rows) == 8 and [r[4] for r in rows] == ["ok"] * 4 + ["does not fit"] * 4, rows
    assert "| roomy |" in p.stdout and "does not fit" in p.stdout
    rng, kills = random.Random(5), 0
    for _ in range(4):
        child = subprocess.Popen([BINARY, "-q", "bench", sweep, "--out", out, "--resume"], env={**os.environ, **env},
                                 stdout=subprocess.DEVNULL, start_new_session=True)
        time.sleep(rng.random() * took * 0.5)
        kills += child.poll() is None
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        child.wait()
    assert kills > 0
    done = {n: os.stat(os.path.join(out, n)).st_mtime_ns for n in os.listdir(out) if n.endswith(".json") and n != "sweep.json"}
    megatrain("-q", "bench", sweep, "--out", out, "--resume", env=env)
    assert table(out) == rows
    for n, t in done.items():  # what was there is not run again
        assert os.stat(os.path.join(out, n)).st_mtime_ns == t, n
    before = open(os.path.join(want, "sweep.csv")).read()
    megatrain("-q", "bench", sweep, "--out", want, "--resume", env=env)
    assert open(os.path.join(want, "sweep.csv")).read() == before
    assert "8 without a measurement" not in megatrain("bench", "--compare", want, want).stdout
    assert "results" in megatrain("bench", sweep, "--out", want, env=env, expect=2).stderr
    return want


def a_measured_sweep_predicts_each_step_by_the_rates_around_it(tmp, ini, env):
    sweep, out = os.path.join(tmp, "measured.ini"), os.path.join(tmp, "measured")
    open(sweep, "w").write(f"[global]\ninclude = {ini}\n[sweep]\nmemory.slots = 2\nwarmup_steps = 1\nsteps = 3\n"
                           "repeat = 2\n")
    megatrain("-q", "bench", sweep, "--out", out, "--measure", env=env)
    row = json.load(open(os.path.join(out, "sweep.json")))["rows"][0]
    assert row["status"] == "ok" and row["runs"] == 2 and row["measured_over_predicted"] > 0, row
    assert row["peak_rss_mib"] > 0, row
    assert SLOW or row["peak_rss_mib"] <= row["planned_host_mib"], row  # sanitizers' own memory is in no plan
    logs = sorted(glob.glob(os.path.join(out, "*.rates")))
    assert len(logs) == 2, logs
    for log in logs:
        ops, *lines = map(json.loads, open(log))
        assert [x["step"] for x in lines] == [0, 1, 2, 3, 4], lines
        assert ops["ops"] and all(len(x["seconds"]) == len(ops["ops"]) and min(x["seconds"]) > 0 for x in lines), log
    # operations that took twice as long beside the same steps: about half the ratio
    for log in logs:
        ops, *lines = map(json.loads, open(log))
        with open(log, "w") as f:
            for x in (ops, *({**x, "seconds": [2 * s for s in x["seconds"]]} for x in lines)):
                f.write(json.dumps(x) + "\n")
    megatrain("-q", "bench", sweep, "--out", out, "--measure", "--resume", env=env)
    again = json.load(open(os.path.join(out, "sweep.json")))["rows"][0]
    assert again["measured_s"] == row["measured_s"] and again["predicted_s"] > 1.2 * row["predicted_s"], (row, again)
    os.truncate(logs[0], os.path.getsize(logs[0]) - 3)
    assert "rates" in megatrain("-q", "bench", sweep, "--out", out, "--measure", "--resume", env=env, expect=3).stderr


def predictions_need_no_run(tmp, ini, env):
    sweep = os.path.join(tmp, "predict.ini")
    open(sweep, "w").write(SWEEP.format(ini=ini))
    a, b = os.path.join(tmp, "p1"), os.path.join(tmp, "p2")
    for out in (a, b):
        megatrain("-q", "bench", sweep, "--out", out, "--predict-only", "--machine", "rtx4090", env=env)
    text = open(os.path.join(a, "sweep.json")).read()
    assert text == open(os.path.join(b, "sweep.json")).read()
    rows = json.loads(text)["rows"]
    assert len(rows) == 8 and all("predicted_s" in r for r in rows if r["status"] == "predicted"), rows
    assert os.listdir(os.path.join(a, "runs")) == [".lock"]
    only = megatrain("bench", sweep, "--out", os.path.join(tmp, "p3"), "--predict-only", "--machine", "rtx4090",
                     "--only", "memory.slots=3", env=env).stdout
    assert only.count("| roomy |") == 2, only


def a_crash_is_a_row(tmp, model, data, env):
    ini = write_ini(os.path.join(tmp, "crash.ini"), base(model, data, os.path.join(tmp, "crash"), train__steps=3))
    sweep = os.path.join(tmp, "crash-sweep.ini")
    open(sweep, "w").write(f"[global]\ninclude = {ini}\n[sweep]\nsteps = 2\ndata.train = {data}, {tmp}/missing.jsonl\n")
    out = os.path.join(tmp, "crash-out")
    said = megatrain("bench", sweep, "--out", out, env=env).stderr
    assert "missing.jsonl" in said, said  # the reason, from its log
    with open(os.path.join(out, "sweep.csv")) as f:
        assert [r["status"] for r in csv.DictReader(f)] == ["ok", "exit 3"]
    open(sweep + "2", "w").write(f"[global]\ninclude = {ini}\n[sweep]\nsteps = 2\n[job none]\nmodel.freeze = nothing.*\n"
                                 "[job typo]\noptimizer.type = adm\n[job good]\n")
    said = megatrain("bench", sweep + "2", "--out", out + "2", env=env).stderr
    assert "matches no tensor" in said and "must be one of adamw" in said, said
    with open(os.path.join(out + "2", "sweep.csv")) as f:
        assert [r["status"] for r in csv.DictReader(f)] == ["exit 2", "exit 2", "ok"]
    compared = megatrain("bench", "--compare", out, out).stdout
    assert "exit 3 in both" in compared and "1 without a measurement" in compared, compared


def a_sweep_of_relative_paths_runs_from_any_folder(tmp, model, data, env):
    """The sweep in one folder, its configuration in another, both named relative to the current one. That of a run which
    stops early, by the loss of a set, goes as it is."""
    home = os.path.join(tmp, "relative")
    os.makedirs(os.path.join(home, "sweeps"))
    sections = base(os.path.relpath(model, home), os.path.relpath(data, home), "out", train__steps=2, eval__every=1,
                    eval__early_stop_patience=2, eval__sets=f"more:{os.path.relpath(data, home)}", eval__best_by="more_loss")
    sections["data"]["cache_dir"] = "cache"
    write_ini(os.path.join(home, "base.ini"), sections)
    with open(os.path.join(home, "sweeps", "s.ini"), "w") as f:
        f.write("[global]\ninclude = ../base.ini\n[sweep]\nsteps = 1\nwarmup_steps = 0\ntrain.micro_batch = 1\n")
    def bench(*args, expect):
        p = subprocess.run([BINARY, "bench", "sweeps/s.ini", *args], cwd=home, env={**os.environ, **env}, capture_output=True, text=True)
        assert p.returncode == expect, p.stderr
        return p.stderr
    bench("--out", "results", expect=0)
    with open(os.path.join(home, "results", "sweep.csv")) as f:
        assert [r["status"] for r in csv.DictReader(f)] == ["ok"]
    os.rename(data, data + ".away")
    try:
        said = bench("--out", "failed", expect=1)
    finally:
        os.rename(data + ".away", data)
    assert "every one of the sweep's 1 jobs failed" in said and "no file matches" in said, said


def rows_of(folder):
    return json.load(open(os.path.join(folder, "sweep.json")))["rows"]


def jobs_share_a_base_where_their_configurations_allow_it(tmp, model, data, env):
    """Two and two by placement: times are of both at once, losses those of each alone."""
    ini = write_ini(os.path.join(tmp, "adapters.ini"), base(model, data, os.path.join(tmp, "none"), train__steps=2,
                                                            adapter__kind="lora", model__dtype="bf16"))
    sweep = os.path.join(tmp, "shared.ini")

    def bench(share, out, *args, axes="adapter.rank = 2, 3\nmemory.slots = 2, 3", steps=2, expect=0):
        with open(sweep, "w") as f:
            f.write(f"[global]\ninclude = {ini}\n[sweep]\n{axes}\nwarmup_steps = 0\nsteps = {steps}\n"
                    f"share_base = {share}\n")
        return megatrain("bench", sweep, "--out", os.path.join(tmp, out), *args, env=env, expect=expect)

    bench("off", "apart")
    said = bench("auto", "at-once").stdout
    apart, shared = rows_of(os.path.join(tmp, "apart")), rows_of(os.path.join(tmp, "at-once"))
    assert [r.get("shared_by") for r in apart + shared] == [None] * 4 + [2] * 4, shared
    assert [(r["axes"], r["loss"]) for r in apart] == [(r["axes"], r["loss"]) for r in shared], (apart, shared)
    assert all(r["predicted_s"] > 0 for r in apart) and not any("predicted_s" in r for r in shared), shared
    assert "4 rows ran on a base that several jobs shared" in said, said
    compared = megatrain("bench", "--compare", os.path.join(tmp, "apart"), os.path.join(tmp, "at-once")).stdout
    assert compared.count("of 1 and 2 jobs at once") == 4 and "4 not compared" in compared, compared
    bench("off", "at-once", "--resume")  # results of several are none of one alone
    assert not any("shared_by" in r for r in rows_of(os.path.join(tmp, "at-once")))

    said = bench("on", "refused", expect=2).stderr
    assert "adapter.rank" not in said and "memory.slots differs" in said and "share_base = on" in said, said
    assert "share_base = off" in bench("on", "refused", "--measure", "--force", expect=2).stderr
    # what fails beside another runs again alone, which tells why
    bench("auto", "fails", axes="train.learning_rate = 1e-3, 1000\ntrain.warmup = 0\ntrain.max_skips = 1\n"
          "train.grad_clip = 0\nadapter.alpha = 1000000", steps=5)
    rows = rows_of(os.path.join(tmp, "fails"))
    assert [(r["status"], r.get("shared_by")) for r in rows] == [("ok", 2), ("exit 6", None)], rows


class Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.fetched = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.fetched += [v for k, v in attrs if k in ("src", "href", "xlink:href")]


def a_report_is_one_page_of_sound_pictures(tmp, run, bench):
    broken = os.path.join(tmp, "broken")
    os.makedirs(broken)
    lines = open(os.path.join(run, "metrics.jsonl")).read()
    open(os.path.join(broken, "metrics.jsonl"), "w").write(lines[:-30])  # as a crash leaves it
    html = os.path.join(tmp, "r.html")
    pictures, p = drawn(run, broken, bench, html=html), Page()
    p.feed(open(html).read())
    assert not p.fetched and "link" not in p.tags and p.tags.count("script") == 2, "self-contained"
    assert "neither" in megatrain("report", tmp, expect=3).stderr
    if not pictures:
        return
    want = {"loss", "loss-tokens", "learning-rate", "gradient-norm", "speed", "step-time", "step-time-2", "timeline", "memory", "link",
            "heat-map-1", "heat-map-2", "predicted-measured"}
    assert want <= set(pictures), want - set(pictures)
    for name, svg in pictures.items():
        assert "prefers-color-scheme:dark" in svg
        assert not re.search("nan|infinity|undefined|null", svg.lower().replace("predominan", "")), name
        root = ET.fromstring(svg)  # well-formed
        assert root.tag == "{http://www.w3.org/2000/svg}svg", root.tag
        _, _, w, h = map(float, root.get("viewBox").split())
        body = [t.text or "" for t in root.iter("{http://www.w3.org/2000/svg}text")]
        assert len(body) >= 3, name  # title and axes are labelled
        for r in root.iter("{http://www.w3.org/2000/svg}rect"):
            x, y = float(r.get("x", 0)), float(r.get("y", 0))
            assert -1 <= x <= w + 1 and -1 <= y <= h + 1, (name, x, y)
    first, hatch = pictures["heat-map-1"], pictures["heat-map-2"]
    assert "no fit" in hatch and "url(#mt-hatch)" in hatch
    assert first.count("mt-best\"") == 1 and "rotate(-90)" not in first + hatch and "the best is framed" in first, first
    assert "step (points: evaluations)" in drawn(run, broken, html=os.path.join(tmp, "both.html"))["loss"]  # no line of the legend is theirs


def sizes_in_a_report_are_sizes(tmp, run):
    odd, html = os.path.join(tmp, "odd-sizes"), os.path.join(tmp, "odd-sizes.html")
    shutil.copytree(run, odd)
    told = json.load(open(os.path.join(odd, "run.json")))

    def memory(rows, **more):
        with open(os.path.join(odd, "run.json"), "w") as out:
            json.dump({**told, "memory": rows, **more}, out)
        return drawn(odd, html=html).get("memory")

    rows = [{"tier": "host", "use": f"row {i}", **more} for i, more in enumerate(
        ({"bytes": 100}, {}, {"bytes": 1e300}, {"bytes": -1}, {"bytes": "many"}))]
    chart, widths = memory(rows), []
    if chart is None:
        return
    assert re.findall(r"row [0-9]: [^<]*", chart) == ["row 0: 100 B"], chart
    for budget, words in ((22 << 20, "mt-mark"), (3379 << 20, ">of 3.30 GiB<")):
        chart = memory([{"tier": "device", "use": "slots", "bytes": 11 << 20}], device_budget=budget)
        assert words in chart, chart
        widths.append(float(re.search(r'mt-box f0"[^>]* width="([0-9.]+)"', chart)[1]))
    assert widths[1] > widths[0] > 100, widths  # also of a budget that it is next to nothing of


def text_in_a_report_is_escaped(tmp, run):
    odd, html = os.path.join(tmp, "a<b>&\"c<!--"), os.path.join(tmp, "odd.html")
    os.makedirs(odd)
    open(os.path.join(odd, "metrics.jsonl"), "w").write(open(os.path.join(run, "metrics.jsonl")).read())
    pictures = drawn(odd, run, html=html)
    assert "<b>" not in open(html).read() and "<!--" not in open(html).read()
    assert not pictures or "a&lt;b&gt;&amp;&quot;c" in pictures["loss"] and "<b>" not in pictures["loss"]


def main():
    with tempfile.TemporaryDirectory() as tmp:
        env = {"XDG_CACHE_HOME": os.path.join(tmp, "cache"), "MEGATRAIN_PROBE_SMALL": "1"}
        drive = os.path.join(tmp, "drive")
        os.makedirs(drive)
        megatrain("-q", "probe", "all", "--force", "--brief", "--threads", "2", "--dir", drive, env=env)
        model, data = write_model(os.path.join(tmp, "model"), config()), write_data(os.path.join(tmp, "d.jsonl"))
        run = os.path.join(tmp, "shown")
        ini = write_ini(os.path.join(tmp, "shown.ini"), base(model, data, run, train__steps=6, eval__every=3))
        megatrain("-q", "run", ini, "--trace", os.path.join(tmp, "t.json"), env=env)
        os.rename(os.path.join(tmp, "t.json"), os.path.join(run, "trace.json"))
        assert len([m for m in metrics(run) if "loss" in m]) == 6
        if part("first"):
            predictions_need_no_run(tmp, ini, env)
            a_crash_is_a_row(tmp, model, data, env)
            jobs_share_a_base_where_their_configurations_allow_it(tmp, model, data, env)
            sizes_in_a_report_are_sizes(tmp, run)
            text_in_a_report_is_escaped(tmp, run)
        if part("rest"):
            bench = a_sweep_killed_at_random_and_resumed_gives_the_same_table(tmp, ini, env)
            a_measured_sweep_predicts_each_step_by_the_rates_around_it(tmp, ini, env)
            a_sweep_of_relative_paths_runs_from_any_folder(tmp, model, data, env)
            a_report_is_one_page_of_sound_pictures(tmp, run, bench)


if __name__ == "__main__":
    sys.exit(main())
