# SPDX-License-Identifier: Apache-2.0
"""Is the GPU right? The parts of scripts/gpu-check that name every case that fails: they take the check, return what they found,
and raise c.failed with the names of all that failed. Standard library only."""
import concurrent.futures
import os
import re
import tempfile

CASE = re.compile(r"^FAIL (\S+)", re.M)
WIDE = {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}
FEW = {"as it is": {}, "2 slots": {"memory__slots": 2}, "offloaded": {"memory__activations": "offload"},
       "half layers": {"memory__unit": "half", "memory__slots": 2, "memory__activations": "recompute"}}
PLACES = {**FEW, "kept": {"memory__activations": "keep"}, "recomputed": {"memory__activations": "recompute"},
          "embedding on the host": {"memory__embedding": "host"}, "staged": {"memory__pin": "staging"},
          "states on a drive": {"memory__states": "disk", "memory__nvme_paths": "{drive}"}}
# Sizes of heads that the GPU's own kernels are for, which tests/cli/test_bits.py's small ones do not reach.
GROUPS = {  # family, of the model, of the configuration, attention, placements
    "heads of 64": ("qwen3", WIDE, {}, None, PLACES),
    "heads of 128, own attention": ("qwen3", {**WIDE, "head_dim": 128}, {}, "own", FEW),
    "tiled attention": ("qwen3", WIDE, {}, "tiled", FEW),
    "f32": ("qwen3", WIDE, {"model__dtype": "f32"}, None, FEW),
    "mixture": ("qwen3_moe", {"head_dim": 64, "num_hidden_layers": 3}, {}, None, FEW),
    "fp8": ("qwen3", {**WIDE, "intermediate_size": 96}, {"model__compute": "fp8"}, None, FEW),
    "lora": ("qwen3", WIDE, {"adapter__kind": "lora"}, None, FEW),
}


def one_case(c, name, attention, case):
    """None, or why it fails, alone in its process."""
    try:
        text = c.run(f"{name}-{case}"[:120], [c.binary("tests/device/conformance"), "cuda", "=" + case], 25,
                     env={"MEGATRAIN_ATTENTION": attention}, ok=(0, 1))
        return None if text.strip().endswith(" 0 failures") else text.strip()[-200:]
    except c.failed as e:
        return str(e)[-200:]


def conformance(c, attention, seconds):
    """All cases in one process; if it breaks off, since an error of the GPU ends whatever follows it, each alone."""
    name, program = "conformance-" + attention, c.binary("tests/device/conformance")
    try:
        text = c.run(name, [program, "cuda"], seconds, env={"MEGATRAIN_ATTENTION": attention}, ok=(0, 1, 77))
    except c.failed as e:
        text = str(e)
    last = text.strip().splitlines()[-1]
    if last.endswith(" 0 failures") or (attention == "fused" and last.startswith("device ")):
        return last
    if not re.search(r"\d+ failures$", last):
        cases = c.run(name + "-list", [program, "--list"], 20).split()
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            wrong = {k: w for k, w in zip(cases, pool.map(lambda k: one_case(c, name, attention, k), cases)) if w}
        if not wrong:
            return f"each of {len(cases)} cases passes alone; together: {last[-200:]}"
        raise c.failed(f"{len(wrong)} of {len(cases)} cases: " + "; ".join(f"{k}: {w}" for k, w in wrong.items()))
    raise c.failed(f"{last}: {', '.join(dict.fromkeys(CASE.findall(text)))}")


def tiny_run(c, folder, name, family, shape, keys, kind="cuda", attention=None):
    """Losses and planes of a few steps of a tiny model, or why it failed."""
    import tiny
    at = os.path.join(folder, re.sub(r"\W+", "-", name))
    os.makedirs(at + "-drive")
    keys = {k: str(v).format(drive=at + "-drive") for k, v in keys.items()}
    model = tiny.write_model(at + "-model", tiny.config(family, **shape))
    ini = tiny.write_ini(at + ".ini", tiny.base(model, os.path.join(folder, "data.jsonl"), at, **{
        "train__steps": 4, "memory__device_budget": "512MiB", "model__dtype": "bf16", "device__kind": kind, "data__cache_dir": at + "-cache", **keys}))
    try:
        c.run("run-" + os.path.basename(at), [c.binary("cli/megatrain"), "-q", "run", ini], 90,
              env={"MEGATRAIN_ATTENTION": attention} if attention else None)
        return tiny.losses(at), tiny.planes(os.path.join(at, "checkpoint-4"))
    except (c.failed, c.no_time, OSError) as e:
        return str(e)[-250:] or "no time was left"


def tiny_runs(c, jobs):
    """The results of tiny runs side by side: {name: arguments}."""
    import tiny
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(max(2, c.report["machine"]["cores"] // 2)) as pool:
        tiny.write_data(os.path.join(folder, "data.jsonl"))
        return dict(zip(jobs, pool.map(lambda j: tiny_run(c, folder, j[0], *j[1]), jobs.items())))


def raise_if(c, wrong, n):
    if wrong:
        raise c.failed(f"{len(wrong)} of {n}: " + "; ".join(f"{k}: {w}" for k, w in wrong.items()))


def placements(c, groups=None):
    """The same losses and planes for each placement of a group."""
    chosen = {g: GROUPS[g] for g in groups or GROUPS}
    jobs = {f"{g}, {p}": (family, shape, {**keys, **over}, "cuda", attention)
            for g, (family, shape, keys, attention, places) in chosen.items() for p, over in places.items()}
    got, wrong = tiny_runs(c, jobs), {}
    for name, r in got.items():
        base = got[name.rsplit(", ", 1)[0] + ", as it is"]
        if isinstance(r, str):
            wrong[name] = r
        elif not isinstance(base, str) and r != base:
            planes = ", ".join(k for k in r[1] if r[1][k] != base[1].get(k))
            wrong[name] = f"losses {r[0]}, not {base[0]}" if r[0] != base[0] else f"planes differ: {planes}"
    raise_if(c, wrong, len(jobs))
    return {"runs": f"{len(jobs)} in {len(chosen)} groups, the same bits for every placement"}


def families(c, names=None):
    """Losses of a few steps of each family, beside the cpu device's."""
    import tiny
    jobs = {f"{f} {d} {kind}": (f, {}, {"model__dtype": d}, kind) for f in names or sorted(tiny.FAMILIES)
            for d in ("f32", "bf16") for kind in ("cuda", "cpu")}
    got, wrong, worst = tiny_runs(c, jobs), {}, {"f32": 0.0, "bf16": 0.0}
    for name in (n.removesuffix(" cpu") for n in jobs if n.endswith(" cpu")):
        gpu, cpu, dtype = got[name + " cuda"], got[name + " cpu"], name.split()[-1]
        if isinstance(gpu, str) or isinstance(cpu, str):
            wrong[name] = gpu if isinstance(gpu, str) else cpu
            continue
        gap = max(abs(a[1] / b[1] - 1) for a, b in zip(gpu[0], cpu[0]))
        worst[dtype] = max(worst[dtype], gap)
        if not gap < (1e-4 if dtype == "f32" else 1e-2):
            wrong[name] = f"losses {[x[1] for x in gpu[0]]}, on the cpu device {[x[1] for x in cpu[0]]}"
    raise_if(c, wrong, len(jobs) // 2)
    return {"largest difference of a loss": ", ".join(f"{d} {w:.1e}" for d, w in worst.items()), "families": len(jobs) // 4}
