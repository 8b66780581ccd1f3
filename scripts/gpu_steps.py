# SPDX-License-Identifier: Apache-2.0
"""Training steps of real shapes from random weights, for scripts/gpu-check: configurations and their results.
Standard library only."""
import json
import os
import random
import shutil

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def write_model(folder, shape):
    """The config.json of a shape of configs/models, or a tiny one of the tests; returns its vocabulary."""
    os.makedirs(folder, exist_ok=True)
    path, here = os.path.join(ROOT, "configs", "models", shape + ".json"), os.path.join(folder, "config.json")
    if os.path.exists(path):
        shutil.copy(path, here)
    else:
        import tiny
        tiny.write_model(folder, tiny.config(shape))
    with open(here) as f:
        config = json.load(f)
    return (config.get("text_config") or config)["vocab_size"]


def write_run(tmp, shape, seq, tokens, budget, keys):
    """Writes a configuration to the folder tmp, with its model and random tokens; returns its path. budget: GiB of the
    device; keys: more keys, SECTION.KEY."""
    vocab = write_model(os.path.join(tmp, "model"), shape)
    data, ini = os.path.join(tmp, "data.jsonl"), os.path.join(tmp, "run.ini")
    r = random.Random(1)
    with open(data, "w") as out:
        for _ in range(2 * tokens // seq):
            out.write(json.dumps({"input_ids": [r.randrange(vocab) for _ in range(seq)]}) + "\n")
    keys = {"model.path": os.path.join(tmp, "model"), "model.init": "random", "model.dtype": "bf16", "data.train": data, "data.eval": "",
            "data.seq_len": seq, "data.packing": "on", "data.cache_dir": tmp + "/cache", "train.steps": 1000,
            "train.tokens_per_step": tokens, "train.learning_rate": 1e-5, "memory.device_budget": f"{int(budget * 1024)}MiB",
            "memory.host_budget": "97%", "checkpoint.dir": tmp + "/out", "checkpoint.every": 0, "checkpoint.save": "weights",
            "device.kind": "cuda", **keys}
    with open(ini, "w") as out:
        for section in dict.fromkeys(k.split(".")[0] for k in keys):
            out.write(f"[{section}]\n" + "".join(f"{k.split('.')[1]} = {v}\n" for k, v in keys.items() if k.startswith(section + ".")))
    return ini


def read(metrics):
    """The steps of a metrics file that may still be written."""
    steps = []
    try:
        with open(metrics) as f:
            lines = f.read().splitlines()
    except OSError:
        return []
    for line in lines:
        try:
            steps.append(json.loads(line))
        except ValueError:
            pass  # half written
    return [m for m in steps if "loss" in m]


def median(values):
    values = sorted(values)
    return values[len(values) // 2]


def summarise(shape, seq, tokens, budget, steps, best, planned):
    """Medians; best: TFLOP/s of a matrix product alone, or None; planned: what `plan --json` says of the step, or {}."""
    mid = {k: median([m[k] for m in steps]) for k in steps[0]
           if all(isinstance(m.get(k), (int, float)) for m in steps)}
    seconds = mid["t_step"]
    tflops = planned["model_tflops"] * planned["step_seconds"] / seconds if planned else None
    share = lambda key: round(mid.get(key, 0) / seconds, 4)
    result = {"model": shape, "seq_len": seq, "tokens_per_step": tokens, "device_budget_gib": round(budget, 1), "steps": len(steps),
              "loss": steps[-1]["loss"], "tok_s": round(tokens / seconds), "model_tflops": tflops and round(tflops, 1),
              "share_of_peak": round(tflops / best, 3) if tflops and best else None,
              "predicted": planned and round(planned["step_seconds"], 3),
              "adam_ns_per_parameter": round(mid.get("t_opt", 0) / planned["trained_parameters"] * 1e9, 3) if planned else None,
              # where the GPU had nothing to do: its input was not there, or the host was between steps
              "idle_waiting": share("t_wait_h2d"), "idle_between": share("t_data"),
              "h2d_gbps": round(mid.get("h2d_bytes", 0) / seconds / 1e9, 2), "d2h_gbps": round(mid.get("d2h_bytes", 0) / seconds / 1e9, 2)}
    for key in ("t_step", "t_fwd", "t_bwd", "t_opt", "t_wait_h2d", "t_data"):
        result[key] = round(mid[key], 4) if key in mid else None
    return result
