# SPDX-License-Identifier: Apache-2.0
"""Predictions of a mixture's steps on the cpu device: the eight placements of configs/sweeps/experts.ini, each step
beside a prediction from the times of its operations right before and after it (meson test --benchmark -v bench/experts).

Takes some four minutes; other work on the machine spoils it.
"""
import json
import os
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.join(HERE, "..", "..")
sys.path.insert(0, os.path.join(HERE, "..", "cli"))
from tiny import megatrain

TARGET = 0.10

with tempfile.TemporaryDirectory() as tmp:
    text = os.path.join(tmp, "text.txt")
    with open(text, "w") as f:
        for name in "README.md", os.path.join("src", "README.md"):
            f.write(open(os.path.join(ROOT, name)).read() * 8)
    env = {"DEMO_TEXT": text, "DEMO_OUT": os.path.join(tmp, "demo"), "XDG_CACHE_HOME": os.path.join(tmp, "cache")}
    print(f"load average {os.getloadavg()[0]:.2f}", flush=True)
    megatrain("-q", "probe", "all", "--force", "--brief", env=env)
    out = os.path.join(tmp, "sweep")
    megatrain("-q", "bench", os.path.join(ROOT, "configs", "sweeps", "experts.ini"), "--measure", "--out", out, env=env)
    with open(os.path.join(out, "sweep.json")) as f:
        rows = json.load(f)["rows"]
    worst = 0
    for r in rows:
        place = " ".join(f"{k.split('.')[1]}={v}" for k, v in r["axes"].items())
        worst = max(worst, abs(r["measured_over_predicted"] - 1))
        print(f"{place:52s} measured {r['measured_s']:7.3f} s, predicted {r['predicted_s']:7.3f}: "
              f"{r['measured_over_predicted']:.3f} +-{r.get('ratio_deviation_pct', 0):.1f}%")
    print(f"{'worst of ' + str(len(rows)) + ' predictions of a mixture':58s} {worst:8.1%}   target {TARGET:.0%}")
