# SPDX-License-Identifier: Apache-2.0
"""Eight adapters of rank 16 on one base in files, at once and one after the other (meson test --benchmark -v
bench/learners): where the base's way to the device binds, and where compute does.

Other work on the machine spoils times; CPU seconds, of the same steps, less so. Takes some five minutes.
"""
import os
import resource
import statistics
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "cli"))
from tiny import base, config, megatrain, metrics, write_data, write_ini, write_model

N, STEPS = 8, 4
SHAPE = dict(hidden_size=512, intermediate_size=1536, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4)
COMMON = {"model__init": "weights", "model__dtype": "bf16", "memory__base": "files", "adapter__kind": "lora",
          "adapter__rank": 16, "train__steps": STEPS, "checkpoint__every": 0, "device__cpu_threads": 1,
          "train__warmup": 0, "data__overlong": "truncate"}
LONG = {"train__batch_size": 4, "train__micro_batch": 2, "data__seq_len": 256}
#: and what the time of a step of all at once is to be, over that of eight steps one after the other
CASES = {"the link binds": ({"train__batch_size": 1, "train__micro_batch": 1, "data__seq_len": 32,
                             "device__link_gbps": 0.02, "memory__activations": "recompute"}, 0.35),
         "compute, activations made again": ({**LONG, "memory__activations": "recompute"}, 1.25),
         "compute, activations kept": ({**LONG, "memory__activations": "keep", "memory__device_budget": "512MiB"}, 1.25),
         # activations of one fit, those of eight do not: made again, or in host memory
         "compute, auto in 128 MiB": ({**LONG, "memory__device_budget": "128MiB"}, 1.25),
         "compute, offloaded from 128 MiB": ({**LONG, "memory__device_budget": "128MiB"}, 1.25, "offload")}


def cpu():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(tmp, name, model, data, over, seeds):
    """Seconds of a step, and CPU seconds of the measured steps and the start."""
    outs = [os.path.join(tmp, f"{name}-{seed}") for seed in seeds]
    inis = [write_ini(out + ".ini", base(model, data, out, **{**COMMON, **over, "train__seed": seed}))
            for out, seed in zip(outs, seeds)]
    before = cpu()
    megatrain("-q", "run", *inis, "--no-save", "--force")
    steps = [m["t_step"] for m in metrics(outs[0]) if "t_step" in m]
    return statistics.median(steps[1:] or steps), cpu() - before


def main():
    with tempfile.TemporaryDirectory() as tmp:
        data = write_data(os.path.join(tmp, "data.jsonl"), n=400)
        seed = write_model(os.path.join(tmp, "seed"), config("qwen2", **SHAPE))
        made = os.path.join(tmp, "made")
        megatrain("-q", "run", write_ini(made + ".ini", base(seed, data, made, train__steps=1, model__dtype="bf16",
                                                             checkpoint__save="weights")))
        model = os.path.join(made, "checkpoint-1")
        print(f"load average {os.getloadavg()[0]:.2f}", flush=True)
        for case, (over, target, *of_all) in CASES.items():
            start = run(tmp, "start", model, data, {**over, "train__steps": 1}, [0])[1]
            more = {"memory__activations": of_all[0]} if of_all else {}
            starts = run(tmp, "starts", model, data, {**over, **more, "train__steps": 1}, range(N))[1]
            one, one_cpu = run(tmp, "one", model, data, over, [0])
            all_, all_cpu = run(tmp, "all", model, data, {**over, **more}, range(N))
            print(f"{case:34s} a step of one {one:7.3f} s, of {N} at once {all_:7.3f} s: {all_ / one / N:5.3f} of one "
                  f"after the other (CPU {(all_cpu - starts) / (one_cpu - start) / N:5.3f})   target {target}", flush=True)


main()
