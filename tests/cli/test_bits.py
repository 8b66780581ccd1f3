# SPDX-License-Identifier: Apache-2.0
"""Placement never changes the result: losses, norms and final planes are equal to the bit."""
import os
import sys
import tempfile

from tiny import (DEVICE, FULL, ORACLE, SLOW, base, config, losses, megatrain, metrics, planes, write_data, write_ini,
                  write_model)

os.environ.setdefault("MEGATRAIN_RESIDENT", str(32 << 20))  # budgets that bite are found in other processes
STEPS = int(os.environ.get("MEGATRAIN_TEST_STEPS", "10" if FULL else "6"))
LAYERS, ROWS = (4, 4) if SLOW else (6, 6)
VARIANTS = {
    "slots 2": {"memory__slots": 2},
    "slots 3": {"memory__slots": 3},
    "slots 5": {"memory__slots": 5},
    "keep": {"memory__activations": "keep"},
    "offload": {"memory__activations": "offload"},
    "recompute": {"memory__activations": "recompute"},
    "recompute, some offloaded": {"memory__activations": "recompute", "memory__offload_layers": 2},
    "recompute, kept and offloaded": {"memory__activations": "recompute", "memory__keep_layers": 1, "memory__offload_layers": 2},
    "attention offloaded": {"memory__activations": "recompute", "memory__offload_layers": 0, "memory__offload_attention": 3},
    "all but attention offloaded": {"memory__activations": "recompute", "memory__offload_layers": 4,
                                    "memory__offload_attention": 0},
    "parts kept and offloaded": {"memory__activations": "recompute", "memory__keep_layers": 1, "memory__offload_layers": 1,
                                 "memory__offload_attention": 2},
    "attention's output offloaded": {"memory__activations": "recompute", "memory__offload_layers": 0,
                                     "memory__offload": "attention.out:3"},
    "segments offloaded apart": {"memory__activations": "recompute", "memory__keep_layers": 1, "memory__slots": 2,
                                 "memory__offload_layers": 1, "memory__offload": "attention.qkv:3, attention.out:2"},
    "half layers, parts offloaded": {"memory__unit": "half", "memory__activations": "recompute",
                                     "memory__offload_layers": 3, "memory__offload_attention": 1},
    "half layers, some offloaded": {"memory__unit": "half", "memory__activations": "recompute", "memory__offload_layers": 3},
    "half layers": {"memory__unit": "half", "memory__slots": 2, "memory__activations": "recompute"},
    "half layers, kept": {"memory__unit": "half", "memory__activations": "keep"},
    "half layers, offloaded": {"memory__unit": "half", "memory__activations": "offload"},
    "embedding on the host": {"memory__embedding": "host"},
    "embedding on the host, recompute": {"memory__embedding": "host", "memory__activations": "recompute", "memory__slots": 2},
    "embedding on the host, eval and save at every step": {"memory__embedding": "host", "eval__every": 1,
                                                           "checkpoint__every": 1},
    "one thread": {"device__cpu_threads": 1},
    "eval and save at every step": {"eval__every": 1, "checkpoint__every": 1},
}
# Pieces of 2048 parameters, so that small units have several; host budgets found so that they bite.
PIECES = {"MEGATRAIN_DISK_PIECE": "2048"}
DISK = {
    "states on disk": ({}, {"memory__states": "disk"}),
    "states on disk, pieces": (PIECES, {"memory__states": "disk", "memory__slots": 2}),
    "states on disk, threads": ({**PIECES, "MEGATRAIN_IO": "threads"}, {"memory__states": "disk"}),
    "states on two disks": (PIECES, {"memory__states": "disk", "memory__nvme_paths": "{0}, {1}"}),
    "states on disk, eval and save at every step":
        (PIECES, {"memory__states": "disk", "eval__every": 1, "checkpoint__every": 1}),
    "short transfers": ({**PIECES, "MEGATRAIN_IO_FAULT": "any:short:1:0"}, {"memory__states": "disk"}),
    "transfers in another order": ({**PIECES, "MEGATRAIN_IO_FAULT": "any:reorder:1:0"}, {"memory__states": "disk"}),
    "all on disk": ({**PIECES, "MEGATRAIN_POISON": "1"}, {"memory__states": "disk", "memory__host_budget": "{all}"}),
    "half layers on disk": (PIECES, {"memory__states": "disk", "memory__host_budget": "{all}", "memory__unit": "half"}),
    "all on disk, threads": ({"MEGATRAIN_IO": "threads"}, {"memory__states": "disk", "memory__host_budget": "{all}"}),
    "mixed": (PIECES, {"memory__states": "auto", "memory__host_budget": "{mixed}"}),
    "activations on disk": ({}, {"memory__activations": "disk", "memory__device_budget": "{device}",
                                 "memory__host_budget": "{spill}"}),
    # with slow reads: weights come later than all else that forward waits for, also where no update is pending
    "states and boundaries on disk":
        ({**PIECES, "MEGATRAIN_IO_FAULT": "read:delay:1:0"},
         {"memory__states": "disk", "memory__activations": "recompute",
          "memory__device_budget": "{device}", "memory__host_budget": "{all}"}),
    "states and activations on disk":
        (PIECES, {"memory__states": "disk", "memory__activations": "disk",
                  "memory__device_budget": "{device}", "memory__host_budget": "{all}"}),
}
# Every dtype and head with these; two of the four with all of them, one where all is slow.
DISK_ALL = ("bf16-tied",) if SLOW else ("f32-untied", "bf16-tied")
DISK_ALWAYS = ("states on disk, pieces", "all on disk", "states and activations on disk")
ENVIRONMENTS = {
    "scalar Adam": {"MEGATRAIN_ADAM_ISA": "scalar"},
    "avx2 Adam": {"MEGATRAIN_ADAM_ISA": "avx2"},
    "poisoned slots": {"MEGATRAIN_POISON": "1"},
}
if DEVICE == "cpu":
    VARIANTS["throttled"] = {"device__link_gbps": 0.5}
else:  # the host's part is the same as on the cpu device
    del ENVIRONMENTS["scalar Adam"], ENVIRONMENTS["avx2 Adam"]


def smallest_budget(tmp, sections, key="device_budget", env=None, most=64 << 10):
    """The least budget in KiB that the planner accepts, to 64 KiB; coarser where each try opens a GPU."""
    lo, hi = 64, most
    while hi - lo > (64 if DEVICE == "cpu" else 512):
        mid = (lo + hi) // 2
        sections["memory"][key] = f"{mid}KiB"
        ini = write_ini(os.path.join(tmp, "probe.ini"), sections)
        if megatrain("-q", "run", "--dry-run", ini, expect=None, env=env, binary=ORACLE).returncode == 0:
            hi = mid
        else:
            lo = mid
    return hi


def run(tmp, name, model, data, env=None, resume_at=None, first=None, **over):
    out = os.path.join(tmp, name.replace(" ", "-"))
    over = {"train__steps": STEPS, **over}
    ini = write_ini(out + ".ini", base(model, data, out, **over))
    if first:
        first_env, first_over = first
        fixed = {k: v for k, v in over.items() if not k.startswith("memory__")}
        path = write_ini(out + ".first.ini", base(model, data, out, **{**fixed, **first_over}))
        megatrain("-q", "run", path, "--max-steps", max(STEPS // 2 - 1, 1), env=first_env)
        megatrain("-q", "run", ini, "--resume", env=env)
    elif resume_at:
        other = {**over, "memory__slots": 5, "memory__activations": "keep", "memory__unit": "half",
                 "checkpoint__every": resume_at}
        first = write_ini(out + ".first.ini", base(model, data, out, **other))
        megatrain("-q", "run", first, "--max-steps", resume_at)
        megatrain("-q", "run", ini, "--resume", env=env)
    else:
        megatrain("-q", "run", ini, env=env)
    return losses(out), planes(os.path.join(out, f"checkpoint-{STEPS}"))


def disk_config(tmp, model, data, env, over):
    """Fills in folders and the budgets that the variant asks for."""
    dirs = [os.path.join(tmp, f"drive{i}") for i in range(2)]
    for d in dirs:
        os.makedirs(d, exist_ok=True)
    over = {"memory__nvme_paths": "{0}", **over}
    over["memory__nvme_paths"] = over["memory__nvme_paths"].format(*dirs)
    least = lambda key, **more: smallest_budget(
        tmp, base(model, data, os.path.join(tmp, "none"), **{**over, **more}), key, env, 256 << 10)
    if over.get("memory__device_budget") == "{device}":
        over["memory__device_budget"] = f"{least('device_budget', memory__host_budget='1GiB')}KiB"
    budget = over.get("memory__host_budget")
    if budget == "{mixed}":
        need = least("host_budget", memory__states="host")
        over["memory__host_budget"] = f"{(least('host_budget') + 7 * need) // 8}KiB"
    elif budget:
        over["memory__host_budget"] = f"{least('host_budget')}KiB"
    return over, dirs


def disk_bytes(out):
    """Bytes written in the last step, by purpose."""
    return metrics(out)[-2]["disk_write"]


def check_disk(tmp, tag, model, data, common, same):
    written = {}
    few = DEVICE != "cpu" or tag not in DISK_ALL
    for name, (env, over) in DISK.items():
        if few and name not in DISK_ALWAYS:
            continue
        over, dirs = disk_config(tmp, model, data, env, {**common, **over})
        same(name, run(tmp, f"{tag} {name}", model, data, env=env, **over))
        written[name] = disk_bytes(os.path.join(tmp, f"{tag} {name}".replace(" ", "-")))
        left = [f for d in dirs for f in os.listdir(d)]
        assert not left, f"{tag}, {name}: scratch is left: {left}"
    some = written["states on disk, pieces"]
    assert some["states"] > 0 and some["gradients"] == 0
    if common["model__dtype"] == "bf16":  # in f32 loads take the lo plane, too
        assert some["weights"] == 0
    assert written["all on disk"]["weights"] > 0 and written["all on disk"]["gradients"] > 0
    assert written["states and activations on disk"]["activations"] > 0
    if few:
        return
    assert written["states and boundaries on disk"]["activations"] > 0
    assert 0 < written["mixed"]["states"] < written["all on disk"]["states"]
    # resumed across tiers: from disk to host memory and back
    env, over = DISK["all on disk"]
    over, _ = disk_config(tmp, model, data, env, {**common, **over})
    same("resumed from disk", run(tmp, f"{tag} resumed from disk", model, data, first=(env, over), **common))
    same("resumed to disk", run(tmp, f"{tag} resumed to disk", model, data, env=env, first=({}, {}), **over))
    # evaluated from disk
    out = os.path.join(tmp, tag)
    told = [megatrain("-q", "eval", write_ini(out + ".eval.ini", base(model, data, out, **o)), "--json", "--model",
                      os.path.join(out, f"checkpoint-{STEPS}")).stdout for o in (common, over)]
    assert told[0] == told[1] and "loss" in told[0], told


def check_cut(tmp, tag, data, common):
    """Where layers do not fit they are cut, by themselves, and nothing but the memory changes."""
    model = write_model(os.path.join(tmp, f"wide-{tag}"),
                        config("qwen3", num_hidden_layers=2, num_attention_heads=16, num_key_value_heads=16,
                               head_dim=64, intermediate_size=1360))
    out = os.path.join(tmp, f"{tag} cut".replace(" ", "-"))
    least = {unit: smallest_budget(tmp, base(model, data, out, **common, memory__unit=unit))
             for unit in ("layer", "auto")}
    assert least["auto"] < 0.9 * least["layer"], least
    want = run(tmp, f"{tag} whole", model, data, **common)
    assert run(tmp, f"{tag} cut", model, data, **common, memory__device_budget=f"{least['auto']}KiB") == want
    for name, unit in ("whole", "layer"), ("cut", "half"):
        with open(os.path.join(tmp, f"{tag}-{name}", "config.effective.ini")) as f:
            assert f"unit = {unit} ;" in f.read(), name


def check(tmp, dtype, tied):
    model = write_model(os.path.join(tmp, f"model-{dtype}-{tied}"),
                        config("qwen3", tie_word_embeddings=tied, num_hidden_layers=LAYERS))
    data = write_data(os.path.join(tmp, "data.jsonl"))
    common = {"model__dtype": dtype, "train__batch_size": ROWS}
    tag = f"{dtype}-{'tied' if tied else 'untied'}"
    want = run(tmp, tag, model, data, **common)
    assert len(want[0]) == STEPS, want[0]
    assert all(l == l for _, l, _ in want[0])

    def same(name, got):
        assert got[0] == want[0], f"{tag}, {name}: losses or norms differ: {got[0]} {want[0]}"
        assert got[1].keys() == want[1].keys()
        for f in got[1]:
            assert got[1][f] == want[1][f], f"{tag}, {name}: planes of {f} differ"

    for name, over in VARIANTS.items():
        same(name, run(tmp, f"{tag} {name}", model, data, **common, **over))
    for name, env in ENVIRONMENTS.items():
        same(name, run(tmp, f"{tag} {name}", model, data, env=env, **common, memory__slots=2))
    for act, unit, layers, of_attention in (("recompute", "half", 0, 0), ("recompute", "layer", 0, 0),
                                            ("recompute", "layer", 3, 1), ("offload", "layer", 0, 0)):
        out = os.path.join(tmp, "none")
        tiny = {**common, "memory__activations": act, "memory__unit": unit, "memory__offload_layers": layers,
                "memory__offload_attention": of_attention}
        budget = f"{smallest_budget(tmp, base(model, data, out, **tiny))}KiB"
        same(f"tiny budget {budget} {act} {unit} {layers}",
             run(tmp, f"{tag} tiny {act} {unit} {layers}", model, data, env={"MEGATRAIN_POISON": "1"},
                 memory__device_budget=budget, **tiny))
    if not tied and DEVICE == "cpu":
        check_cut(tmp, tag, data, common)
    check_disk(tmp, tag, model, data, common, same)
    same("resumed", run(tmp, f"{tag} resumed", model, data, resume_at=STEPS // 2, **common, memory__slots=2,
                        memory__activations="recompute"))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as tmp:
        for case in sys.argv[1:]:
            dtype, tied = case.split("-")
            check(tmp, dtype, tied == "tied")
