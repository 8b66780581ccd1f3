# SPDX-License-Identifier: Apache-2.0
"""Speed of the streaming, through the binary: figures beside their targets (meson test --benchmark -v).

Medians over the steps after the first two; run it on a machine that does nothing else.
"""
import os
import resource
import statistics
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cli"))
from tiny import base, config, megatrain, metrics, write_data, write_ini, write_model

LAYERS, MICRO = 12, 8


def run(tmp, name, model, data, **over):
    out = os.path.join(tmp, name)
    settings = dict(model__dtype="f32", data__eval="", data__seq_len=128, data__packing="on", train__steps=8,
                    train__batch_size=MICRO, train__micro_batch=1, memory__device_budget="512MiB",
                    memory__activations="recompute", checkpoint__save="weights")
    ini = write_ini(out + ".ini", base(model, data, out, **{**settings, **over}))
    megatrain("-q", "run", ini)
    rows = [m for m in metrics(out) if "loss" in m][2:]
    return {k: statistics.median(m[k] for m in rows) for k in ("t_step", "t_fwd", "t_bwd", "t_opt", "t_wait_h2d", "h2d_bytes",
                                                               "d2h_bytes", "tok_s")}


def in_pairs(tmp, name, model, data, one, other, pairs=3):
    """The median of processor seconds with one's keys over those with other's, in runs that take turns, the first of them too."""
    shared = dict(adapter__kind="lora", adapter__rank=16, model__init="weights", data__seq_len=256, train__steps=4,
                  train__batch_size=16, train__micro_batch=8, memory__activations="keep")
    ratios = []
    for i in range(pairs):
        took = {}
        for which, keys in [("one", one), ("other", other)][::1 if i % 2 else -1]:
            before = seconds()
            run(tmp, f"{name}-{which}-{i}", model, data, **shared, **keys)
            took[which] = seconds() - before
        ratios.append(took["one"] / took["other"])
    print("  pairs: " + " ".join(f"{r:.3f}" for r in sorted(ratios)))
    return statistics.median(ratios)


def seconds():
    """Of the processor, for all runs until now: a busy machine changes them less than the clock."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def figure(what, value, target):
    print(f"{what:58s} {value:8.3f}   target {target}")


with tempfile.TemporaryDirectory() as tmp:
    cfg = config("qwen3", num_hidden_layers=LAYERS, hidden_size=256, intermediate_size=768, num_attention_heads=8,
                 num_key_value_heads=4, head_dim=32)
    model = write_model(os.path.join(tmp, "model"), cfg)
    data = write_data(os.path.join(tmp, "data.jsonl"), n=400, longest=128)
    print(f"load average {os.getloadavg()[0]:.2f}")
    all_in = run(tmp, "resident", model, data, memory__slots=LAYERS)
    two = run(tmp, "two", model, data, memory__slots=2)
    print(f"resident: {all_in['t_step'] * 1e3:.0f} ms a step, {all_in['tok_s']:.0f} tok/s; forward {all_in['t_fwd'] * 1e3:.0f} ms, "
          f"backward {all_in['t_bwd'] * 1e3:.0f} ms, optimizer {all_in['t_opt'] * 1e3:.0f} ms (under the forward)")
    figure("two slots over all resident, no throttle", two["t_step"] / all_in["t_step"], "<= 1.05")

    three = run(tmp, "three", model, data, memory__slots=3)
    h = cfg["hidden_size"]
    layer = h * 16 * 32 + 8 * 32 * h + 3 * h * cfg["intermediate_size"]  # matrices of a layer; the rest is small
    one_pass = LAYERS * layer * 4
    gbps = one_pass / (0.8 * three["t_fwd"]) * 1e-9
    slow = run(tmp, "throttled", model, data, memory__slots=3, device__link_gbps=f"{gbps:.4f}")
    print(f"link of {gbps:.3f} GB/s: a pass of the weights ({one_pass / 2**20:.1f} MiB) takes 80% of the forward's compute")
    figure("throttled link over no throttle, three slots", slow["t_step"] / three["t_step"], "<= 1.10")
    figure("  of the step, waiting for the link", slow["t_wait_h2d"] / slow["t_step"], "")

    wide = config("qwen3", num_hidden_layers=4, hidden_size=512, intermediate_size=1536, num_attention_heads=8, head_dim=64)
    made = os.path.join(tmp, "made")
    megatrain("-q", "run", write_ini(made + ".ini", base(write_model(os.path.join(tmp, "wide"), wide), data, made, data__seq_len=128, train__steps=1)))
    of = os.path.join(made, "checkpoint-1")
    for packed in "bf16", "mxfp4", "int4":
        keys = {"model__base_dtype": packed} if packed != "bf16" else {}
        ratio = in_pairs(tmp, packed, of, data, {**keys, "adapter__merge_aware": packed}, keys)
        figure(f"LoRA with merge awareness over without, {packed}", ratio, "<= 1.05")

    figure("bytes in, in passes of the layers", two["h2d_bytes"] / one_pass, f"{(2 * LAYERS - 2) / LAYERS:.3f} and the vocabulary's")
