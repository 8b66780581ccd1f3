# SPDX-License-Identifier: Apache-2.0
"""Placement never changes the result: losses, norms and final planes are equal to the bit."""
import os
import sys
import tempfile

from tiny import DEVICE, base, config, losses, megatrain, planes, write_data, write_ini, write_model

STEPS = int(os.environ.get("MEGATRAIN_TEST_STEPS", "10"))
VARIANTS = {
    "slots 2": {"memory__slots": 2},
    "slots 3": {"memory__slots": 3},
    "slots 5": {"memory__slots": 5},
    "keep": {"memory__activations": "keep"},
    "offload": {"memory__activations": "offload"},
    "recompute": {"memory__activations": "recompute"},
    "one thread": {"device__cpu_threads": 1},
    "eval and save at every step": {"eval__every": 1, "checkpoint__every": 1},
}
ENVIRONMENTS = {
    "scalar Adam": {"MEGATRAIN_ADAM_ISA": "scalar"},
    "avx2 Adam": {"MEGATRAIN_ADAM_ISA": "avx2"},
    "poisoned slots": {"MEGATRAIN_POISON": "1"},
}
if DEVICE == "cpu":
    VARIANTS["throttled"] = {"device__link_gbps": 0.5}
else:  # the host's part is the same as on the cpu device
    del ENVIRONMENTS["scalar Adam"], ENVIRONMENTS["avx2 Adam"]


def smallest_budget(tmp, sections):
    """The least device budget that the planner accepts, to 64 KiB."""
    lo, hi = 64, 64 << 10
    while hi - lo > 64:
        mid = (lo + hi) // 2
        sections["memory"]["device_budget"] = f"{mid}KiB"
        ini = write_ini(os.path.join(tmp, "probe.ini"), sections)
        if megatrain("-q", "run", "--dry-run", ini, expect=None).returncode == 0:
            hi = mid
        else:
            lo = mid
    return f"{hi}KiB"


def run(tmp, name, model, data, env=None, resume_at=None, **over):
    out = os.path.join(tmp, name.replace(" ", "-"))
    over = {"train__steps": STEPS, **over}
    ini = write_ini(out + ".ini", base(model, data, out, **over))
    if resume_at:
        other = {**over, "memory__slots": 5, "memory__activations": "keep", "checkpoint__every": resume_at}
        first = write_ini(out + ".first.ini", base(model, data, out, **other))
        megatrain("-q", "run", first, "--max-steps", resume_at)
        megatrain("-q", "run", ini, "--resume", env=env)
    else:
        megatrain("-q", "run", ini, env=env)
    return losses(out), planes(os.path.join(out, f"checkpoint-{STEPS}"))


def check(tmp, dtype, tied):
    model = write_model(os.path.join(tmp, f"model-{dtype}-{tied}"),
                        config("qwen3", tie_word_embeddings=tied, num_hidden_layers=6))
    data = write_data(os.path.join(tmp, "data.jsonl"))
    common = {"model__dtype": dtype}
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
    for act in ("recompute", "offload"):
        out = os.path.join(tmp, "none")
        budget = smallest_budget(tmp, base(model, data, out, **common, memory__activations=act))
        same(f"tiny budget {budget} {act}",
             run(tmp, f"{tag} tiny {act}", model, data, env={"MEGATRAIN_POISON": "1"}, **common,
                 memory__device_budget=budget, memory__activations=act))
    same("resumed", run(tmp, f"{tag} resumed", model, data, resume_at=STEPS // 2, **common, memory__slots=2,
                        memory__activations="recompute"))


with tempfile.TemporaryDirectory() as tmp:
    for case in sys.argv[1:]:
        dtype, tied = case.split("-")
        check(tmp, dtype, tied == "tied")
