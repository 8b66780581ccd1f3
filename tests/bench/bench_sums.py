# SPDX-License-Identifier: Apache-2.0
"""What sums of the drives' planes cost a step that the drive bounds (meson test --benchmark -v bench/sums).

Pairs of runs, with memory.nvme_checksums on and off, in turns; of each the median step. The figure is the median of
the pairs' ratios, beside 2%, and the CPU time of the sums. Run it on cores and a drive that do nothing else.

  bench_sums.py [DIR] [PAIRS] [LAYERS]     folder on the drive (a temporary one), 5, 8
"""
import os
import statistics
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cli"))
from tiny import base, config, megatrain, metrics, write_data, write_ini, write_model

STEPS, SKIP = 8, 3


def step(tmp, model, data, sums):
    """(seconds of the median step, CPU seconds of its sums)."""
    out = os.path.join(tmp, sums)
    ini = write_ini(out + ".ini", base(
        model, data, out, model__dtype="bf16", data__eval="", data__seq_len=128, train__steps=STEPS, train__batch_size=2,
        memory__states="disk", memory__nvme_paths=os.path.join(tmp, "drive"), memory__device_budget="256MiB",
        memory__activations="recompute", memory__nvme_checksums=sums, device__cpu_threads=1))
    megatrain("-q", "run", ini, "--force", "--no-save")
    steps = [m for m in metrics(out) if "loss" in m][SKIP:]
    return statistics.median(m["t_step"] for m in steps), statistics.median(m.get("t_disk_sums", 0) for m in steps)


if __name__ == "__main__":
    where = sys.argv[1] if len(sys.argv) > 1 else None
    pairs, layers = (int(sys.argv[k]) if len(sys.argv) > k else d for k, d in ((2, 5), (3, 8)))
    with tempfile.TemporaryDirectory(dir=where) as tmp_dir:
        os.makedirs(os.path.join(tmp_dir, "drive"))
        m = write_model(os.path.join(tmp_dir, "model"), config(
            "qwen3", hidden_size=1024, intermediate_size=2816, num_hidden_layers=layers, num_attention_heads=16,
            num_key_value_heads=4, head_dim=64, vocab_size=272))
        d = write_data(os.path.join(tmp_dir, "data.jsonl"), n=200)
        ratios = []
        for n in range(pairs):
            order = ("on", "off") if n % 2 else ("off", "on")
            got = {s: step(tmp_dir, m, d, s) for s in order}
            ratios.append(got["on"][0] / got["off"][0])
            print(f"pair {n}: {got['off'][0]:.3f} s without, {got['on'][0]:.3f} s with sums "
                  f"({got['on'][1]:.3f} s of CPU time): {ratios[-1] - 1:+.1%}", flush=True)
        print(f"sums cost {statistics.median(ratios) - 1:+.1%} of a step (median of {pairs} pairs; target +2.0%)")
