# SPDX-License-Identifier: Apache-2.0
"""Training from a drive beside the floor that compute and the drive set (meson test --benchmark -v bench/disk).

A model with 2 GiB of state trains in 512 MiB of host memory, device included. The floor is backward + the longest of
forward, bytes read / read rate and Adam; or bytes written / write rate where that is longer. Forward, backward and
Adam are those of the same steps with all states in memory, the rates those of `probe disk` in between. One thread
computes and one updates: run it on two cores that do nothing else.

  bench_disk.py [DIR] [LAYERS] [ROWS ...]     folder on the drive (a temporary one), 15, rows of 128 tokens a step
"""
import json
import os
import statistics
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cli"))
from tiny import base, config, megatrain, metrics, write_data, write_ini, write_model

STEPS, SKIP, ROUNDS = 5, 2, 2


def run(tmp, name, model, data, rows, trace=None, **over):
    out = os.path.join(tmp, name)
    settings = dict(model__dtype="bf16", data__eval="", data__seq_len=128, data__packing="on", train__steps=STEPS,
                    train__batch_size=rows, train__micro_batch=min(rows, 4), memory__device_budget="256MiB",
                    memory__activations="recompute", checkpoint__save="weights", device__cpu_threads=1)
    ini = write_ini(out + ".ini", base(model, data, out, **{**settings, **over}))
    megatrain("-q", "run", ini, "--force", *(["--trace", trace] if trace else []))
    return [m for m in metrics(out) if "loss" in m][SKIP:]


def medians(steps):
    times = {k: statistics.median(m.get(k, 0) for m in steps)
             for k in ("t_step", "t_fwd", "t_bwd", "t_opt", "t_wait_h2d", "t_disk_read", "t_disk_write")}
    return times | {k: sum(steps[-1].get(k, {}).values()) for k in ("disk_read", "disk_write")}


def rates(folder):
    r = json.loads(megatrain("probe", "disk", folder, "--size", "2GiB", "--seconds", "3", "--json").stdout)
    return [r[f"disk {k} GB/s"] * 1e9 for k in ("read", "write", "both")]


def busy(spans):
    """Merged intervals."""
    merged = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1][1] = max(end, merged[-1][1])
        else:
            merged.append([begin, end])
    return merged


def common(a, b):
    return [(max(p[0], q[0]), min(p[1], q[1])) for p in a for q in b if min(p[1], q[1]) > max(p[0], q[0])]


def length(spans):
    return sum(end - begin for begin, end in spans)


def overlap(trace):
    """How much of the third step's forward each stage of the update works, and all three at once."""
    events = [e for e in json.load(open(trace))["traceEvents"] if e.get("pid") == 1]
    rows = {e["tid"]: e["args"]["name"].rstrip(" 0123456789") for e in events if e["name"] == "thread_name"}
    spans = [(rows[e["tid"]], e["cat"], e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X"]
    turn = max(end for _, op, _, end in spans if op == "head")
    of = lambda name: busy((b, min(e, turn)) for row, _, b, e in spans if row == name and b < turn)
    stages = [of("disk reads"), of("host optimizer"), of("disk writes")]
    at_once = common(common(stages[0], stages[1]), stages[2])
    return [length(s) / turn for s in (*stages, at_once)]


def bench(tmp, folder, model, data, rows):
    trace = os.path.join(tmp, "trace.json")
    host, disk, speeds = [], [], [rates(folder)]
    for _ in range(ROUNDS):  # in turn, so that a shared machine's moods hit both
        host += run(tmp, f"host-{rows}", model, data, rows, memory__states="host")
        disk += run(tmp, f"disk-{rows}", model, data, rows, trace, memory__states="auto", memory__nvme_paths=folder,
                    memory__host_budget="512MiB")
        speeds.append(rates(folder))
    host, disk = medians(host), medians(disk)
    read, write, both = (statistics.median(s[k] for s in speeds) for k in range(3))
    forward, backward, adam = host["t_fwd"] - host["t_wait_h2d"], host["t_bwd"], host["t_opt"]
    reading, writing = disk["disk_read"] / read, disk["disk_write"] / write
    floor = max(backward + max(forward, reading, adam), writing)
    print(f"{rows} rows of 128 tokens a step; drive: reads {read / 1e9:.2f} GB/s, writes {write / 1e9:.2f} GB/s, both at once "
          f"{both / 1e9:.2f} GB/s")
    print(f"  in memory   forward {forward:.2f} s, backward {backward:.2f} s, Adam {adam:.2f} s; a step {host['t_step']:.2f} s")
    print(f"  the drive   {disk['disk_read'] / 1e9:.2f} GB read in {reading:.2f} s, {disk['disk_write'] / 1e9:.2f} GB written in "
          f"{writing:.2f} s at these rates; both at once {(disk['disk_read'] + disk['disk_write']) / both:.2f} s")
    print(f"  from disk   forward {disk['t_fwd']:.2f} s, backward {disk['t_bwd']:.2f} s, Adam {disk['t_opt']:.2f} s, reads under way "
          f"{disk['t_disk_read']:.2f} s, writes {disk['t_disk_write']:.2f} s; a step {disk['t_step']:.2f} s")
    print("  of forward  reads {:.0%}, Adam {:.0%}, writes {:.0%}, all three at once {:.0%}".format(*overlap(trace)))
    print(f"  a step over the floor of {floor:.2f} s   {disk['t_step'] / floor:.3f}   target <= 1.15", flush=True)


with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as tmp:
    layers = int(sys.argv[2]) if len(sys.argv) > 2 else 15
    folder = os.path.join(tmp, "drive")
    os.mkdir(folder)
    model = write_model(os.path.join(tmp, "model"),
                        config("qwen3", num_hidden_layers=layers, hidden_size=1024, intermediate_size=3072,
                               num_attention_heads=16, num_key_value_heads=8, head_dim=64))
    data = write_data(os.path.join(tmp, "data.jsonl"), n=800, longest=128)
    print(f"load average {os.getloadavg()[0]:.2f}")
    for rows in map(int, sys.argv[3:] or ("2", "4")):
        bench(tmp, folder, model, data, rows)
