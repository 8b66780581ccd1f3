# SPDX-License-Identifier: Apache-2.0
"""Placement moves no bit: one model in many places, each compared with a plain run of the same numerics, made once."""
import os

from tiny import POISON, base, config, least_host, losses, megatrain, metrics, planes, run_in, with_weights, write_data, write_ini, \
    write_model

os.environ.setdefault("MEGATRAIN_RESIDENT", str(32 << 20))  # budgets that bite are found in other processes
PIECES = {"MEGATRAIN_DISK_PIECE": "2048", **POISON}
#: parts of configurations; {drive} is a folder of the model's, {host} the least host memory that the run is accepted with
DRIVE = {"memory__states": "disk", "memory__nvme_paths": "{drive}"}
RECOMPUTE = {"memory__activations": "recompute"}
LORA = {"model__init": "weights", "adapter__kind": "lora", "adapter__rank": 4}
PLACEMENT = ("memory__", "device__", "checkpoint__")  # all other keys are numerics
#: kind of model -> family, what its configuration has of its own, whether it needs weights: matrices large enough for files
MODELS = {
    "dense": ("qwen2", {"num_hidden_layers": 3}, False),
    "tied": ("qwen3", {"tie_word_embeddings": True}, False),
    "mixture": ("qwen3_moe", {"num_hidden_layers": 3, "mlp_only_layers": [1]}, False),
    "adapters": ("qwen2", {"num_hidden_layers": 3, "intermediate_size": 8256}, True),
}


class Same:
    """A model of a kind in a folder, its data and the results of its plain runs. `common`: keys of all its runs; `plain`: keys of
    the plain ones alone."""

    def __init__(self, tmp, kind, common, plain=None, models=None):
        family, more, weights = {**MODELS, **(models or {})}[kind]
        self.tmp, self.kind, self.common, self.plain = tmp, kind, {"train__steps": 4, **common}, plain or {}
        self.model, self.known = write_model(os.path.join(tmp, "model"), config(family, **more)), {}
        self.data, self.drive = write_data(os.path.join(tmp, "data.jsonl")), os.path.join(tmp, "drive")
        os.makedirs(self.drive, exist_ok=True)
        if weights:
            self.model = with_weights(tmp, self.model, self.data)

    def keys(self, over):
        over = {**self.common, **over}
        over = {k: v.replace("{drive}", self.drive) if isinstance(v, str) else v for k, v in over.items()}
        if over.get("memory__host_budget") == "{host}":
            over["memory__host_budget"] = least_host(self.tmp, self.model, self.data, over)
        return over

    def run(self, name, over, *args, env=None):
        """Its folder."""
        return run_in(self.tmp, name, self.model, self.data, self.keys(over), *args, env=env)

    def result(self, out):
        evals = [(m["step"], m["eval_loss"]) for m in metrics(out) if "eval_loss" in m]
        return losses(out), evals, planes(os.path.join(out, f"checkpoint-{self.common['train__steps']}"))

    def reference(self, over):
        """The result of a plain run with the numerics of these keys."""
        numerics = tuple(sorted((k, v) for k, v in over.items() if not k.startswith(PLACEMENT)))
        if numerics not in self.known:
            usual = {k: v for k, v in self.common.items() if k.startswith(PLACEMENT)}
            out = run_in(self.tmp, f"plain {len(self.known)}", self.model, self.data,
                         {**{k: v for k, v in self.common.items() if k not in usual}, **dict(numerics), **self.plain})
            self.known[numerics] = self.result(out)
            steps = self.known[numerics][0]
            assert len(steps) == self.common["train__steps"] and all(x == x for _, x, *_ in steps), steps
        return self.known[numerics]

    def check(self, cases, look=None):
        """cases: name -> (environment, keys). look(name, folder, keys): what else a run has to have."""
        for name, (env, over) in cases.items():
            out, want = self.run(name, over, env=env), self.reference(over)
            for what, a, b in zip(("losses or norms", "evaluations", "weights or states"), self.result(out), want):
                assert a == b, f"{self.kind}, {name}: other {what}" + (f": {a} {b}" if what[0] != "w" else "")
            if look:
                look(name, out, over)

    def refused(self, over, *words):
        ini = write_ini(os.path.join(self.tmp, "no.ini"), base(self.model, self.data, os.path.join(self.tmp, "no"), **self.keys(over)))
        said = megatrain("run", "--dry-run", ini, expect=2).stderr
        assert all(w in said for w in words), said
