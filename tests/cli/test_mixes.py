# SPDX-License-Identifier: Apache-2.0
"""Every mix of kept, offloaded and recomputed records, either part of them by itself, gives the same bits: all of them
with MEGATRAIN_TEST_FULL, else a few drawn with a fixed seed. Device memory is as small as each mix allows: with more of it
nothing leaves."""
import os
import random
import sys
import tempfile

from tiny import FULL, SLOW, base, config, losses, megatrain, metrics, planes, with_weights, write_data, write_ini, \
    write_model

STEPS, LAYERS = 3, 3
DRAWN = 2 if SLOW else 4
MODELS = {
    "dense": lambda: config("qwen3", num_hidden_layers=LAYERS),
    "mixture": lambda: config("qwen3_moe", num_hidden_layers=LAYERS, mlp_only_layers=[1]),
    "adapters": lambda: config("qwen2", num_hidden_layers=LAYERS),
}
LORA = {"adapter__kind": "lora", "adapter__rank": 4, "adapter__dropout": 0.2, "model__init": "weights",
        "train__learning_rate": "5e-3"}


def mixes():
    """(unit, kept layers, layers of which attention's records are offloaded, and the rest's)."""
    return [(unit, keep, attention, rest) for unit in ("layer", "half") for keep in range(LAYERS + 1)
            for attention in range(LAYERS - keep + 1) for rest in range(LAYERS - keep + 1)]


def least_budget(tmp, sections):
    """In KiB, to 64."""
    lo, hi = 256, 8 << 10
    while hi - lo > 64:
        mid = (lo + hi) // 2
        sections["memory"]["device_budget"] = f"{mid}KiB"
        ini = write_ini(os.path.join(tmp, "probe.ini"), sections)
        if megatrain("-q", "run", "--dry-run", ini, expect=None).returncode:
            lo = mid
        else:
            hi = mid
    return hi


def run(tmp, name, model, data, env=None, **over):
    """Losses and planes, and bytes that leave the device in the last step."""
    out = os.path.join(tmp, name)
    sections = base(model, data, out, model__dtype="bf16", train__steps=STEPS, **over)
    if env:
        sections["memory"]["device_budget"] = f"{least_budget(tmp, sections)}KiB"
    megatrain("-q", "run", write_ini(out + ".ini", sections), env=env)
    result = losses(out), planes(os.path.join(out, f"checkpoint-{STEPS}"))
    return result, [m for m in metrics(out) if "loss" in m][-1]["d2h_bytes"]


def make(tmp, kind, data):
    """A model, and the settings that train it; adapters stand on weights that were written before."""
    model = write_model(os.path.join(tmp, "model"), MODELS[kind]())
    if kind != "adapters":
        return model, {}
    return with_weights(tmp, model, data), LORA


def check(tmp, kind):
    data = write_data(os.path.join(tmp, "data.jsonl"))
    model, settings = make(tmp, kind, data)
    want, _ = run(tmp, "kept", model, data, memory__activations="keep", **settings)
    assert len(want[0]) == STEPS and all(l == l for _, l, _ in want[0]), want[0]
    some = mixes() if FULL else random.Random(kind).sample(mixes(), DRAWN)
    ends = [(unit, 0, n, n) for unit in ("layer", "half") for n in (0, LAYERS)]
    left = {}
    for mix in sorted({*ends, *some}):
        unit, keep, attention, rest = mix
        got, left[mix] = run(tmp, "-".join(map(str, mix)), model, data, env={"MEGATRAIN_POISON": "1"},
                             memory__activations="recompute", memory__unit=unit, memory__keep_layers=keep,
                             memory__offload_attention=attention, memory__offload_layers=rest, **settings)
        assert got[0] == want[0], f"{kind}, {mix}: losses or norms differ: {got[0]} {want[0]}"
        assert got[1] == want[1], f"{kind}, {mix}: planes differ"
    for none, all_of_them in zip(ends[::2], ends[1::2]):  # records do leave
        assert left[none] < left[all_of_them], (kind, none, left)
    print(f"{kind}: {len(left)} of {len(mixes())} mixes")


for kind in sys.argv[1:]:
    with tempfile.TemporaryDirectory() as tmp:
        check(tmp, kind)
