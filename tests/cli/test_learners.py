# SPDX-License-Identifier: Apache-2.0
"""Several runs on one base that is read once: each has the bits of its run alone, whatever the others do."""
import json
import os
import shutil
import sys
import tempfile

from tiny import SLOW, base, config, losses, megatrain, metrics, part, planes, read_safetensors, write_data, write_ini, write_model

STEPS = 4 if SLOW and not part("rest") else 6
COMMON = {"model__init": "weights", "model__dtype": "bf16", "adapter__kind": "lora", "train__steps": STEPS,
          "checkpoint__every": 0}
#: what each run has of its own: data, adapters, seed, rate, clipping, decay, length, evaluation
RUNS = {
    "a": {"adapter__rank": 6, "adapter__alpha": 9, "adapter__dropout": 0.2, "train__learning_rate": "5e-3", "train__seed": 3},
    "b": {"adapter__kind": "dora", "adapter__rank": 2, "adapter__targets": "q_proj, down_proj", "train__seed": 4,
          "train__learning_rate": "1e-3", "train__batch_size": 3, "train__steps": STEPS - 2, "train__grad_clip": 0,
          "optimizer__weight_decay": 0, "eval__every": 2},
    "c": {"adapter__rank": 3, "adapter__rank_pattern": "v_proj:5", "train__batch_size": 8, "optimizer__beta2": 0.95,
          "train__schedule": "cosine", "adapter__lr_ratio_b": 4, "eval__at_start": "on", "checkpoint__every": 2},
}


class Place:
    def __init__(self, tmp):
        self.tmp = tmp
        self.data = {n: write_data(os.path.join(tmp, n + ".jsonl"), n=50 + 7 * i, seed=i + 5)
                     for i, n in enumerate(RUNS)}
        seed = write_model(os.path.join(tmp, "seed"), config("qwen2", num_hidden_layers=2, intermediate_size=8256)) # matrices large enough for files
        out = os.path.join(tmp, "seed-out")
        megatrain("-q", "run", self.ini("seed", seed, {"train__steps": 1, "checkpoint__save": "weights"}, "a", out))
        self.model = os.path.join(out, "checkpoint-1")

    def ini(self, name, model, over, data, out):
        return write_ini(os.path.join(self.tmp, name + ".ini"), base(model, self.data[data], out, **over))

    def run(self, kind, names, *args, over=None, env=None, expect=0, each=None, quiet=("-q",)):
        """Runs these together; returns what each of them results in."""
        outs = {n: os.path.join(self.tmp, f"{kind}-{n}") for n in names}
        inis = [self.ini(f"{kind}-{n}", self.model,
                         {**COMMON, **RUNS[n], **(over or {}), **(each or {}).get(n, {})}, n, outs[n]) for n in names]
        self.said = megatrain(*quiet, "run", *inis, *args, env=env, expect=expect).stderr
        return outs

    def result(self, out, name, steps=None):
        c = os.path.join(out, f"checkpoint-{steps or RUNS[name].get('train__steps', STEPS)}")
        evals = [(m["step"], m["eval_loss"]) for m in metrics(out) if "eval_loss" in m]
        return losses(out), evals, planes(c), read_safetensors(os.path.join(c, "adapter_model.safetensors"))


def run_alone(p):
    return {n: p.result(p.run("alone", [n])[n], n) for n in RUNS}


def check_bits(p, alone, *ways):
    drive = os.path.join(p.tmp, "drive")
    os.makedirs(drive, exist_ok=True)
    placements = {
        "together": {},
        "halves": {"memory__unit": "half", "memory__slots": 2, "memory__adapters": "resident", "memory__activations": "recompute"},
        "drive": {"memory__states": "disk", "memory__nvme_paths": drive, "memory__activations": "offload"},
        "files": {"memory__base": "files", "memory__activations": "recompute", "device__cpu_threads": 1},
    }
    for name in ways:
        outs = p.run(name, RUNS, over=placements[name], env={"MEGATRAIN_POISON": "1", "MEGATRAIN_DISK_PIECE": "2048"})
        for n in RUNS:
            assert p.result(outs[n], n) == alone[n], f"{name}: run {n} has another result than alone"
    told = json.load(open(os.path.join(outs["b"], "run.json")))
    assert told["learners"] == 3, told


def check_resume(p, alone):
    """Two stop after three steps, and one of them is resumed alone; another comes to them, and is left without a checkpoint."""
    outs = p.run("cut", ["b", "c"], "--max-steps", 3)
    p.run("cut", ["c"], "--resume", "--max-steps", 1)
    outs = p.run("cut", RUNS, "--resume", "--max-steps", 1)
    shutil.rmtree(outs["a"])
    outs = p.run("cut", RUNS, "--resume")
    for n in RUNS:
        got = p.result(outs[n], n)
        assert set(alone[n][1]) <= set(got[1]), f"resumed: run {n} has other evaluations"  # those of the ends came besides
        assert got[0] == alone[n][0] and got[2:] == alone[n][2:], f"resumed: run {n} has another result than alone"


def check_failures(p, alone):
    """One that fails leaves the others as they are."""
    hot = {"train__learning_rate": 1000, "train__warmup": 0, "train__max_skips": 1, "train__grad_clip": 0,
           "adapter__alpha": 1000000}
    outs = p.run("fails", RUNS, expect=6, each={"a": hot}, quiet=())
    assert "not finite" in p.said and f"megatrain: {outs['a']}: " in p.said and "the other runs go on" in p.said, p.said
    assert f"{outs['c']} | step {STEPS}/{STEPS}" in p.said, p.said
    for n in "bc":
        assert p.result(outs[n], n) == alone[n], f"beside one that fails: run {n} has another result than alone"


def check_refusals(p):
    for each, said in (({"b": {"data__seq_len": 128}}, "cannot share a base: data.seq_len differs"),
                       ({"b": {"model__dtype": "f32"}}, "cannot share a base: model.dtype differs"),
                       ({"b": {"adapter__kind": "none", "adapter__rank": 16, "adapter__targets": "all-linear",
                               "optimizer__grad_dtype": "f32"}}, "share a base if all of them train adapters"),
                       ({"c": {"adapter__train_also": "model.norm"}}, "adapter.train_also with several adapters")):
        p.run("refused", RUNS, "--dry-run", expect=2, each=each)
        assert said in p.said, p.said
    p.run("refused", RUNS, "--out", "x", expect=2)
    assert "--out is of one run" in p.said, p.said
    p.run("refused", RUNS, expect=2, over={"checkpoint__dir": p.tmp + "/one"})
    assert "/one is in use by another run (of this command)" in p.said, p.said


def main():
    with tempfile.TemporaryDirectory() as tmp:
        p = Place(tmp)
        alone = run_alone(p)
        if part("first"):
            check_bits(p, alone, "together")
            check_refusals(p)
        if part("rest"):
            check_bits(p, alone, "halves", "drive", "files")
            check_resume(p, alone)
            check_failures(p, alone)


main()
