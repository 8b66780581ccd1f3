# SPDX-License-Identifier: Apache-2.0
"""The memory table is kept: a model whose state is twenty times the device budget, with the kernel's record of the
process's largest resident set (code and libraries included; how much of them is there as a process begins varies by
some MiB, which a small model's table is allowed on top).

It may never exceed what the table promised, nor the device budget (the cpu device's arena is host memory) plus 14 B a
parameter (16 in f32), boundaries and 200 MB. The table may be 2% above it.
"""
import os
import re
import subprocess
import sys
import tempfile
import time

from tiny import BINARY, FULL, base, config, write_data, write_ini, write_model

UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def resident(pid):
    """The largest resident set of the process so far, in bytes."""
    try:
        with open(f"/proc/{pid}/status") as f:
            return max([int(line.split()[1]) * 1024 for line in f if line.startswith("VmHWM:")], default=0)
    except (FileNotFoundError, ProcessLookupError):
        return 0


def run(ini):
    peak, samples = 0, 0
    with open(ini + ".log", "w+") as log:
        # meson has malloc fill what it gives: that touches the rest of buffers that are larger than what is put in them
        p = subprocess.Popen([BINARY, "run", ini], stdout=subprocess.DEVNULL, stderr=log,
                             env={**os.environ, "MALLOC_PERTURB_": "0"})
        while p.poll() is None:
            peak = max(peak, resident(p.pid))
            samples += 1
            time.sleep(0.005)
        log.seek(0)
        said = log.read()
    assert p.returncode == 0, said
    assert samples > 20, "the run was too short to be sampled"
    return said, peak


def table(said):
    """(tier, use) -> bytes, as printed, with the sums as ("sum", tier)."""
    rows, tier = {}, ""
    for first, use, number, unit in re.findall(r"^  (.{14})  (.{28})  +([\d.]+) ([KMGT]?i?B)$", said, re.M):
        tier = first.strip() or tier
        rows[tier, use.strip()] = float(number) * UNITS[unit]
    assert ("sum", "device") in rows and ("sum", "host") in rows, said
    return rows


def mixture(tmp, hidden, width, seq_len):
    """Sixteen experts a layer, which are nearly all of it."""
    model = write_model(os.path.join(tmp, f"mixture-{hidden}"), config("qwen3_moe", num_hidden_layers=24, hidden_size=hidden,
        moe_intermediate_size=width, num_experts=16, num_attention_heads=hidden // 32, num_key_value_heads=hidden // 64,
        head_dim=32))
    return model, write_data(os.path.join(tmp, "data.jsonl"), n=80, longest=seq_len)


def make(tmp, hidden, ffn, seq_len):
    model = write_model(os.path.join(tmp, f"model-{hidden}"), config("qwen3", num_hidden_layers=48, hidden_size=hidden,
        intermediate_size=ffn, num_attention_heads=hidden // 32, num_key_value_heads=hidden // 64, head_dim=32))
    return model, write_data(os.path.join(tmp, "data.jsonl"), n=80, longest=seq_len)


def measure(tmp, name, shape, dtype, budget, make=make, **over):
    """Trains; the table, what it promised in all and the peak."""
    hidden, ffn, seq_len = shape
    out = os.path.join(tmp, f"out-{name}-{dtype}")
    settings = dict(model__dtype=dtype, memory__device_budget=f"{budget}MiB", memory__activations="recompute",
                    data__seq_len=seq_len, train__steps=3, train__batch_size=2, train__micro_batch=1, checkpoint__save="weights")
    said, peak = run(write_ini(out + ".ini", base(*make(tmp, hidden, ffn, seq_len), out, **{**settings, **over})))
    rows = table(said)
    return rows, rows["sum", "device"] + rows["sum", "host"], peak


def keeps_the_table(promised, peak, slack=0):
    rounding = 10 << 20 if promised > 1 << 30 else 0  # sums are printed to a hundredth of a GiB
    assert peak <= promised + rounding, f"the table promised {promised:.0f}, the run took {peak}"
    assert promised - peak <= slack + 0.02 * promised, f"the table promised {promised:.0f}, the run took only {peak}"


def check(tmp, dtype, shape, budget, least_state, slack=0):
    rows, promised, peak = measure(tmp, "host", shape, dtype, budget)
    planes = sum(v for (tier, use), v in rows.items() if tier == "host" and use.startswith(("weights", "first", "second")))
    n_params = planes / 12
    bound = (budget << 20) + (14 if dtype == "bf16" else 16) * n_params + rows.get(("host", "boundaries and activations"), 0) + 200e6
    print(f"{dtype}: state {planes / 2**20:.0f} MiB, device budget {budget} MiB, promised {promised / 2**20:.1f} MiB, "
          f"measured {peak / 2**20:.1f} MiB", flush=True)
    assert planes >= 20 * (budget << 20), "the state is not 20 times the budget"
    assert planes >= least_state
    assert peak <= bound, f"{peak} bytes are over the claim of {bound:.0f}"
    keeps_the_table(promised, peak, slack)


def check_mixture(tmp, dtype, shape, budget, slack=0):
    """Experts whose state is twenty times the device budget, in groups of four."""
    rows, promised, peak = measure(tmp, "mixture", shape, dtype, budget, make=mixture, memory__expert_group=4)
    experts = 24 * 16 * 3 * shape[0] * shape[1]
    print(f"{dtype} experts: state {12 * experts / 2**20:.0f} MiB, device budget {budget} MiB, promised {promised / 2**20:.1f} MiB, "
          f"measured {peak / 2**20:.1f} MiB", flush=True)
    assert 12 * experts >= 20 * (budget << 20), "the experts' state is not 20 times the budget"
    assert ("device", "routing") in rows and rows["sum", "device"] <= budget << 20, rows
    keeps_the_table(promised, peak, slack)


def check_disk(tmp, dtype, shape, budget, host_budget, slack=0):
    """States on the disk, all of the training state saved after each step."""
    drive = os.path.join(tmp, "drive")
    os.makedirs(drive, exist_ok=True)
    rows, promised, peak = measure(tmp, "disk", shape, dtype, budget, memory__states="auto", memory__nvme_paths=drive,
                                   memory__host_budget=f"{host_budget}MiB", checkpoint__save="full", checkpoint__every=1,
                                   checkpoint__keep=1)
    on_disk = sum(v for (tier, use), v in rows.items() if tier == "nvme")
    print(f"{dtype} from disk: {on_disk / 2**20:.0f} MiB on it, host budget {host_budget} MiB, promised "
          f"{promised / 2**20:.1f} MiB, measured {peak / 2**20:.1f} MiB", flush=True)
    assert on_disk > host_budget << 20 and promised <= host_budget << 20, rows
    keeps_the_table(promised, peak, slack)


with tempfile.TemporaryDirectory() as tmp:
    if FULL:  # 4 GiB of memory, some minutes
        large = (576, 1728, 64)
        check(tmp, "bf16", large, 100, 2 << 30)
        check(tmp, "f32", large, 100, 2 << 30)
        check_disk(tmp, "bf16", large, 100, 512)
        check_mixture(tmp, "bf16", (512, 512, 64), 100)
    else:
        small = (192, 512, 64)
        for dtype in sys.argv[1:]:
            check(tmp, dtype, small, 10, 0, 10 << 20)
            check_disk(tmp, dtype, small, 10, 128, 10 << 20)
            check_mixture(tmp, dtype, (128, 128, 64), 10, 10 << 20)
