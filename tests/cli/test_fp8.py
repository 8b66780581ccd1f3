# SPDX-License-Identifier: Apache-2.0
"""model.compute = fp8: steps as numpy makes them, the same bits for every placement, close to bf16, and what is refused.

test_fp8.py CASE...; the fixture is of scripts/reference/fp8_fixtures.py.
"""
import glob
import json
import os
import shutil
import sys
import tempfile

from tiny import DEVICE, FULL, POISON, base, config, fixture, losses, megatrain, metrics, planes, with_weights, write_data, \
    write_ini, write_model

os.environ.setdefault("MEGATRAIN_RESIDENT", str(32 << 20))
HERE = os.path.dirname(os.path.abspath(__file__))
FIXTURE = os.path.join(HERE, "..", "parity", "fp8")
LEARN = int(os.environ.get("MEGATRAIN_TEST_STEPS", "60"))  # steps of the model that learns
STEPS = 4 if DEVICE == "cpu" else 2
FP8 = {"model__dtype": "bf16", "model__compute": "fp8"}
RECOMPUTE = {"memory__activations": "recompute"}
WHOLE = {"intermediate_size": 96, "num_hidden_layers": 3}  # both sides of every layer are multiples of 16
DENSE = {
    "recomputed, two slots": (POISON, {**RECOMPUTE, "memory__slots": 2}),
    "offloaded": (POISON, {"memory__activations": "offload"}),
    "halves of layers": (POISON, {**RECOMPUTE, "memory__unit": "half", "memory__slots": 2}),
    "one thread": ({}, {"device__cpu_threads": 1}),
    "states on a drive": ({"MEGATRAIN_DISK_PIECE": "2048"}, {"memory__states": "disk", "memory__nvme_paths": "{drive}"}),
    "two devices": (POISON, {"device__gpus": 2}),
}
MIXTURE = {
    "groups of three": (POISON, {**RECOMPUTE, "memory__expert_group": 3, "memory__slots": 2}),
    "one group, offloaded": (POISON, {"memory__expert_group": 8, "memory__activations": "offload"}),
}


def run(tmp, name, model, data, env=None, resume=False, **over):
    out = os.path.join(tmp, name.replace(" ", "-").replace(",", ""))
    over = {k: v.format(drive=out + "-drive") if isinstance(v, str) else v for k, v in over.items()}
    os.makedirs(out + "-drive")
    ini = write_ini(out + ".ini", base(model, data, out, **{"train__steps": STEPS, **FP8, **over}))
    if resume:
        megatrain("-q", "run", ini, "--max-steps", STEPS // 2, env=env)
    megatrain("-q", "run", ini, *(["--resume"] if resume else []), env=env)
    return losses(out), planes(os.path.join(out, f"checkpoint-{STEPS}"))


def same_bits(tmp, model, data, variants, **over):
    want = run(tmp, "base", model, data, memory__activations="keep", **over)
    for name, (env, changes) in variants.items():
        if DEVICE != "cpu" and "device__gpus" in changes:
            continue
        print(f"  {name}", flush=True)
        assert run(tmp, name, model, data, env, **{**over, **changes}) == want, name
    print("  resumed", flush=True)
    assert run(tmp, "resumed", model, data, resume=True, **over) == want
    plain = run(tmp, "bf16", model, data, **{**over, "model__compute": "bf16"})
    assert plain == run(tmp, "auto", model, data, **{**over, "model__compute": "auto"})
    pairs = [(a[1], b[1]) for a, b in zip(want[0], plain[0])]
    print("  losses in FP8 and in bf16:", pairs)
    assert all(a != b and abs(a - b) < 0.01 * b for a, b in pairs), pairs
    return want


def near(what, got, want, limit):
    worst = max(abs(a - b) / b for a, b in zip(got, want))
    print(f"  {what}: {worst:.1e} (limit {limit:.0e})")
    return worst <= limit


def keeps_all_bits():
    """Are sums of codes' products in FP32? The tensor cores of Ada and Hopper keep 13 bits (SageAttention2, arXiv:2411.10958)."""
    capability = os.environ.get("MEGATRAIN_TEST_CAPABILITY") or os.environ.get("MT_EMU_CAPABILITY", "90")
    return DEVICE == "cpu" or capability not in ("89", "90")


def oracle(tmp):
    """A micro-batch is a row: scales are of its tokens, whose number is no multiple of 16."""
    with open(os.path.join(FIXTURE, "expected.json")) as f:
        e = json.load(f)
    data, got = shutil.copy(os.path.join(FIXTURE, "data.jsonl"), tmp), {}
    for compute in "fp8", "bf16":
        out = os.path.join(tmp, compute)
        ini = write_ini(out + ".ini", base(fixture("fp8"), data, out, model__init="weights", model__dtype="bf16",
            model__compute=compute, data__eval="", data__packing="off", data__shuffle="off", data__seq_len=e["seq_len"],
            train__steps=e["steps"], train__batch_size=e["rows"], train__micro_batch=1, train__schedule="constant",
            train__warmup=0, train__learning_rate=e["learning_rate"], train__grad_clip=0, optimizer__type="sgd",
            optimizer__weight_decay=0))
        megatrain("-q", "run", ini)
        steps = [m for m in metrics(out) if "loss" in m]
        got[compute] = {"losses": [m["loss"] for m in steps], "norms": [m["grad_norm"] for m in steps]}
    # all codes are numpy's, so that only the order of sums differs; bf16 products round otherwise here and there, and with
    # sums of few bits some codes are their neighbours
    for what, few in ("losses", 5e-3), ("norms", 3e-2):
        assert near(f"FP8, {what}", got["fp8"][what], e["fp8"][what], 1e-6 if keeps_all_bits() else few)
        assert near(f"bf16, {what}", got["bf16"][what], e["bf16"][what], 5e-3)
    close = near("FP8 to numpy's bf16, norms", got["fp8"]["norms"], e["bf16"]["norms"], 1e-2 if keeps_all_bits() else 5e-3)
    assert not close, "FP8 changes nothing"


def dense(tmp):
    model = write_model(os.path.join(tmp, "model"), config("qwen3", **WHOLE))
    same_bits(tmp, model, write_data(os.path.join(tmp, "data.jsonl")), DENSE)


def mixture(tmp):
    """Of routed experts and a shared one; that has a gate of one row, which stays in bf16."""
    model = write_model(os.path.join(tmp, "model"), config("qwen2_moe", shared_expert_intermediate_size=48, num_hidden_layers=2,
                                                           intermediate_size=96))
    same_bits(tmp, model, write_data(os.path.join(tmp, "data.jsonl")), MIXTURE)


def base_model(tmp, **over):
    data = write_data(os.path.join(tmp, "data.jsonl"))
    model = write_model(os.path.join(tmp, "model"), config("qwen3", **WHOLE, **over))
    return with_weights(tmp, model, data), data


def adapters(tmp):
    """Adapters stay in bf16; their base is in FP8, as it is or from codes of NF4."""
    model, data = base_model(tmp)
    lora = {"model__init": "weights", "adapter__kind": "lora", "adapter__rank": 4}
    same_bits(tmp, model, data, {"resident": (POISON, {"memory__adapters": "resident", "memory__unit": "half"})}, **lora)
    os.mkdir(os.path.join(tmp, "packed"))
    same_bits(os.path.join(tmp, "packed"), model, data, {"slots": (POISON, {"memory__slots": 2, **RECOMPUTE})}, **lora,
              model__base_dtype="nf4")


def refused(tmp, model, data, *texts, env=None, **over):
    ini = write_ini(os.path.join(tmp, "refused.ini"), base(model, data, os.path.join(tmp, "refused"), train__steps=1, **over))
    p = megatrain("-q", "run", ini, expect=None, env=env)
    assert p.returncode and all(t in p.stderr for t in texts), (p.returncode, p.stderr)


def refusals(tmp):
    model, data = base_model(tmp)
    if DEVICE == "cuda":
        refused(tmp, model, data, "model.compute = fp8 with model.dtype = f32", "cpu", model__compute="fp8", model__dtype="f32")
    refused(tmp, model, data, "model.compute = bf16 needs model.dtype = bf16", model__compute="bf16", model__dtype="f32")
    if DEVICE == "cuda":
        refused(tmp, model, data, "model.compute = fp8", "no products in FP8", env={"MT_EMU_CAPABILITY": "86"}, **FP8)
    out = os.path.join(tmp, "kept")
    ini = write_ini(out + ".ini", base(model, data, out, train__steps=2, **FP8))
    megatrain("-q", "run", ini, "--max-steps", 1)
    p = megatrain("-q", "run", ini, "--resume", "--set", "model.compute=bf16", expect=None)
    assert p.returncode and "model.compute" in p.stderr, p.stderr
    megatrain("-q", "run", ini, "--resume", "--set", "model.compute=auto")  # the checkpoint's
    with open(os.path.join(out, "config.effective.ini")) as f:
        assert "compute = fp8" in f.read()
    out = os.path.join(tmp, "auto")
    ini = write_ini(out + ".ini", base(model, data, out, train__steps=2, model__dtype="bf16"))
    megatrain("-q", "run", ini, "--max-steps", 1)
    megatrain("-q", "run", ini, "--resume", "--set", "model.compute=bf16")  # what auto was


def learning(tmp):
    """The demo's model on the text of this tree: as good as in bf16. MEGATRAIN_TEST_FULL=1 alone."""
    if not FULL:
        return
    root, data = os.path.join(HERE, "..", ".."), os.path.join(tmp, "text.txt")
    with open(data, "w") as out:
        for folder in "src", "tests/unit", "cli":
            for name in sorted(glob.glob(os.path.join(root, folder, "**", "*.[ch]"), recursive=True)):
                with open(name) as f:
                    out.write(f.read())
    last = {}
    for compute in "bf16", "fp8":
        p = {"DEMO_TEXT": data, "DEMO_OUT": os.path.join(tmp, compute)}
        megatrain("-q", "run", os.path.join(root, "configs", "demo_pretrain.ini"), "--set", "model.dtype=bf16", "--set",
                  f"model.compute={compute}", "--set", f"train.steps={LEARN}", "--set", "train.batch_size=4", env=p)
        steps = [m["loss"] for m in metrics(os.path.join(tmp, compute, "pretrain")) if "loss" in m]
        last[compute] = sum(steps[-LEARN // 4:]) / len(steps[-LEARN // 4:])
    print(f"  losses of the last quarter: {last}")
    assert last["fp8"] < 1.01 * last["bf16"], last


def prices(tmp):
    """One price of products in FP8, fitted to one figure, and what follows from it."""
    def speed(machine, model, tokens, gib, compute="fp8"):
        p = megatrain("plan", "--json", "--machine", machine, "--model", model, "--seq-len", 2048, "--tokens-per-step", tokens,
                      "--host-mem", f"{gib}GiB", "--set", f"model.compute={compute}", expect=None)
        return json.loads(p.stdout)["tokens_per_second"] if not p.returncode else p.stderr
    fitted, bf16 = speed("rtx4090", "Qwen2.5-7B", 65536, 512), speed("rtx4090", "Qwen2.5-7B", 65536, 512, "bf16")
    others = {m: speed("rtx4090", m, t, g) for m, t, g in (("Meta-Llama-3-8B", 131072, 512), ("Qwen2.5-14B", 131072, 512),
                                                           ("Qwen3-32B", 65536, 1024))}
    print(f"  Qwen2.5-7B {fitted:.0f}, in bf16 {bf16:.0f}; {others}")
    assert abs(fitted / 4328 - 1) < 0.02 and fitted > 1.35 * bf16
    assert others["Meta-Llama-3-8B"] > 4000 and others["Qwen2.5-14B"] > 2150 and others["Qwen3-32B"] > 1000, others
    said = speed("rtx3090", "Qwen2.5-7B", 65536, 512)
    assert "RTX 3090" in said and "gemm_e4m3_tflops" in said and "8.9" in said, said


if __name__ == "__main__":
    for case in sys.argv[1:] or ["oracle", "dense", "mixture", "adapters", "refusals", "prices", "learning"]:
        print(case, flush=True)
        with tempfile.TemporaryDirectory() as tmp:
            globals()[case](tmp)
