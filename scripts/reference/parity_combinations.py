# SPDX-License-Identifier: Apache-2.0
"""Trains random combinations with megatrain and with transformers and PEFT, and compares losses, norms and every final tensor.

A case draws a family, shapes, what is trained, the format of the base, data, optimizer and placement, and a way (parity_ways.py).
The reference runs in double, torch's own distance from it in FP32 is the floor. Where a case is beyond that, the floor is the largest of
several FP32 runs whose starts differ by a rounding: of a badly conditioned model one alone may be ten times nearer than another. Where it
still is, the case is made again with a larger eps: Adam divides by gradients that are 0 but for rounding, and a gradient that is wrong stays
so. Then the run is repeated under another placement, half of the times interrupted and resumed there, or by two hosts: every bit must be
the same. The case of a seed is the same until a family or a way is added, so a failure is repeated by
    scripts/parity combinations --seed SEED --n 1
and kept for tests/parity/test_combinations.py, which needs no torch, by
    scripts/parity combinations --seed SEED --n 1 --store NAME
where the cases of names are made again, as they are, by
    scripts/parity combinations --again NAME...
"""
import argparse
import copy
import fnmatch
import itertools
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import warnings

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tests", "cli"))
import peft
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file

from parity import double_throughout, load, make_model, release_state, specify_adapter
import sums  # of tests/parity
from parity_choices import Choices
from parity_families import MIXTURES, NESTED, draw, experts, freezable, linear, norms
from parity_ways import WAYS, draw_way
from seeded import write_weights
from test_packed import write_decoded
from tiny import BINARY, base, losses, megatrain, metrics, write_ini

STEPS, ROWS = 5, 4
STORED = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tests", "parity", "combinations")
#: what may be off where torch in FP32 happens to be exact, and how often its distance otherwise
LEAST = {"loss": 1e-6, "norm": 1e-5, "update": 1e-3}
TIMES = 3
#: FP32 runs of a floor, and eps, where the first are not enough
RUNS, EPS = 8, "1e-4"
#: what a case has of PEFT's configuration
PEFT = ("r", "lora_alpha", "target_modules", "target_parameters", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "modules_to_save")
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n"]


def draw_training(r, name, family, over):
    mixture = family in MIXTURES
    kind = r.choice(["all", "freeze", "lora", "lora", "dora"])
    if kind == "freeze":
        return {"kind": kind, "freeze": r.choice(freezable(family))}
    if kind == "all":
        return {"kind": kind}
    names = linear(family, over)
    targets = sorted(r.sample(names, r.randint(1, len(names))))
    spec = dict(r=r.choice([1, 3, 4, 8]), lora_alpha=r.choice([1, 8, 16]), target_modules=targets, use_rslora=r.random() < 0.3,
                use_dora=kind == "dora", rank_pattern={targets[0]: r.choice([2, 5])} if r.random() < 0.4 else {},
                alpha_pattern={targets[-1]: 4} if r.random() < 0.3 else {})
    if mixture and kind == "lora" and r.random() < 0.4:
        spec["target_parameters"] = experts(family)[:r.choice([1, 2])]
    if r.random() < 0.3:
        left = [f"layers.0.self_attn.{t}" for t in names if t not in targets and t.endswith(("v_proj", "o_proj"))]
        spec["modules_to_save"] = [r.choice(norms(family) + left)]
    if name in NESTED:  # the tower has modules of the same names
        spec["target_modules"] = rf".*language_model.*\.({'|'.join(targets)})"
        spec["modules_to_save"] = ["language_model." + m if m.startswith("layers.") else m for m in spec.get("modules_to_save", [])] or None
    return {"kind": kind, "peft": spec}


def draw_placement(r, trained, mixture, bases, drive):
    over = {"memory__activations": r.choice(["keep", "offload", "recompute"]), "memory__slots": r.choice([2, 3]),
            "memory__unit": r.choice(["layer", "half"]), "device__cpu_threads": r.choice([1, 2]), "memory__nvme_paths": drive,
            "memory__states": r.choice(["host", "host", "disk"])}
    if trained["kind"] in ("lora", "dora"):
        over.update(memory__base=r.choice(bases), memory__adapters=r.choice(["streamed", "resident"]))
    if mixture:
        over["memory__expert_group"] = r.choice([1, 2, 4])
    return over


def draw_settings(r):
    schedule = r.choice(["constant", "linear", "cosine"])
    return {"train__schedule": schedule, "train__warmup": r.choice([0, 2]), "train__learning_rate": r.choice(["5e-4", "1e-3"]),
            "train__min_lr_ratio": r.choice([0, 0.1]), "train__grad_clip": r.choice([0, 0.5, 5]), "train__micro_batch": r.choice([1, 2, 4]),
            "optimizer__weight_decay": r.choice([0, 0.1]), "optimizer__beta1": r.choice([0.8, 0.9]), "optimizer__beta2": r.choice([0.95, 0.999]),
            "optimizer__eps": r.choice(["1e-8", "1e-6"])}


class Case:
    def __init__(self, seed, tmp, way=None):
        r = random.Random(seed)
        self.seed, self.tmp = seed, os.path.join(tmp, str(seed))
        self.name, self.family, self.cfg, self.over = draw(r)
        self.mixture = self.family in MIXTURES
        self.trained = draw_training(r, self.name, self.family, self.over)
        self.settings = draw_settings(r)
        packs = self.trained["kind"] in ("lora", "dora")
        self.base = r.choice(["f32", "bf16", "nf4", "fp8", "mxfp4", "int4", "nvfp4"]) if packs else r.choice(["f32", "bf16"])
        bases = ["host", "disk"]
        self.wide = self.base == "bf16" and self.trained["kind"] == "lora" and not self.mixture and r.random() < 0.3
        if self.wide:  # tensors large enough to be read in place; PEFT's DoRA has the square of a layer's inputs in memory
            width = "shared_intermediate_size" if "shared_intermediate_size" in self.over else "intermediate_size"
            self.cfg.get("text_config", self.cfg)[width] = -(-(1 << 19) // self.over["hidden_size"] // 8) * 8
            bases = ["host", "files"]
        drive = os.path.join(self.tmp, "drive")
        os.makedirs(drive)
        self.places = [draw_placement(r, self.trained, self.mixture, bases, drive) for _ in range(2)]
        self.stop = r.randint(1, STEPS - 1) if r.random() < 0.5 else 0
        self.adapters = "peft" in self.trained
        self.way, self.hosts = draw_way(random.Random(f"{seed} way"), self, way)

    def describe(self):
        peft = self.trained.get("peft", {})
        modules = peft.get("target_modules", [])
        what = self.trained.get("freeze") or (modules if isinstance(modules, str) else ", ".join(modules)) + " " + str(peft.get("modules_to_save", ""))
        return (f"{self.seed} {self.way.describe()}{', 2 hosts' if self.hosts > 1 else ''}: {self.name} {self.base} {self.trained['kind']} {what} "
                f"{self.settings['train__schedule']}")

    def prepare(self):
        """Writes the base, as megatrain and as torch read it, the data, and PEFT's folder to begin from."""
        self.dir = os.path.join(self.tmp, "model")
        model = make_model(self.dir, self.cfg, "F32" if self.base == "f32" else "BF16")
        self.way.prepare(self, model)
        plain = self.dir
        if self.base not in ("f32", "bf16"):
            self.dir = os.path.join(self.tmp, "packed")
            megatrain("-q", "export", plain, self.dir, "--quantize", self.base)
            with open(os.path.join(self.dir, "config.json")) as f:
                if "quantization_config" in json.load(f):  # some matrix has whole blocks
                    plain = write_decoded(os.path.join(self.tmp, "decoded"), self.dir, "F32")
        self.plain, self.model = plain, self.load(plain)
        data = self.way.write_data(os.path.join(self.tmp, "data.jsonl"), STEPS * ROWS)
        self.data, self.samples = data, [json.loads(l) for l in open(data)]
        if self.adapters:
            self.start = os.path.join(self.tmp, "start")
            specify_adapter(self.start, get_peft_model(self.model, LoraConfig(lora_dropout=0, task_type="CAUSAL_LM", **self.trained["peft"])), "model")
            write_weights(self.start)
            self.model = PeftModel.from_pretrained(self.load(plain), self.start, is_trainable=True)
        for n, p in self.model.named_parameters():
            if self.trained["kind"] == "freeze":
                p.requires_grad_(not fnmatch.fnmatchcase(n, self.trained["freeze"]))

    def load(self, folder):
        return load(folder)

    def ini(self, name, place):
        over = dict(self.settings, memory__device_budget="1GiB", model__init="weights", model__dtype="f32", data__eval="", data__packing="off", data__shuffle="off",
                    train__steps=STEPS, train__batch_size=ROWS, optimizer__grad_dtype="f32", checkpoint__frozen="copy") | place | self.way.keys
        if self.adapters:
            over.update(adapter__kind=self.trained["kind"], adapter__path=self.start)
        elif "freeze" in self.trained:
            over["model__freeze"] = self.trained["freeze"]
        out = os.path.join(self.tmp, name)
        return out, write_ini(out + ".ini", base(self.dir, self.data, out, **over))

    def run(self, name, place, stop=0, then=None, hosts=1):
        out, ini = self.ini(name, place)
        if stop:
            megatrain("-q", "run", ini, "--max-steps", stop)
            _, ini = self.ini(name, then)
        last = ["-q", "run", ini, *(["--resume"] if stop else [])]
        if hosts > 1:
            p = subprocess.run([*MPIRUN, str(hosts), BINARY, *last], text=True, capture_output=True)
            assert p.returncode == 0, p.stdout + p.stderr
        else:
            megatrain(*last)
        return out

    def final(self, model):
        if self.adapters:
            return {k: v.detach().double() for k, v in get_peft_model_state_dict(model).items()}
        model = model.merge_and_unload() if isinstance(model, PeftModel) else model
        return {k: v.double() for k, v in release_state(model).items() if not (self.over["tie_word_embeddings"] and k == "lm_head.weight")}


class Kept(Case):
    """A case of tests/parity/combinations, as its files describe it."""

    def __init__(self, name, tmp):
        read = lambda *path: json.load(open(os.path.join(STORED, name, *path)))
        e, self.cfg = read("expected.json"), read("model", "config.json")
        seed, self.name, self.base = re.match(r"(\d+)(?: \w+:)? (\w+) (\w+)", e["case"]).groups()
        self.cfg.pop("quantization_config", None)
        self.seed, self.tmp, self.text = int(seed), os.path.join(tmp, seed), e["case"]
        self.over = {**self.cfg.get("text_config", self.cfg), "tie_word_embeddings": self.cfg["tie_word_embeddings"]}
        self.mixture, self.stop, self.hosts, self.settings = self.name in MIXTURES, e["stop"], 1, e["settings"]
        self.trained, self.adapters = {"kind": e["kind"], **({"freeze": e["freeze"]} if e["freeze"] else {})}, e["kind"] in ("lora", "dora")
        if self.adapters:
            self.trained["peft"] = {k: v for k, v in read("start", "adapter_config.json").items() if k in PEFT}
        drive = os.path.join(self.tmp, "drive")
        os.makedirs(drive)
        self.places = [{**place, "memory__nvme_paths": drive} for place in e["places"]]
        kind = next(w for w in WAYS if w.name == ("fp8" if "model__compute" in self.settings else "plain"))
        self.way = kind.__new__(kind)
        self.way.c, self.way.keys = self, {k: self.settings.pop(k) for k in ("model__compute", "data__seq_len") if k in self.settings}

    def describe(self):
        return self.text


def off(got, want):
    return abs(got - want) / max(abs(want), 1e-9)


def lr_at(c, k):
    s, peak = c.settings, float(c.settings["train__learning_rate"]) * c.way.rate(k)
    warm, least = s["train__warmup"], float(s["train__min_lr_ratio"]) * peak
    if k < warm:
        return peak * k / warm
    at = (k - warm) / (STEPS - warm)
    if s["train__schedule"] == "constant":
        return peak
    return least + (peak - least) * (1 - at if s["train__schedule"] == "linear" else 0.5 * (1 + math.cos(math.pi * at)))


def gradients(c, model, step, choices):
    """The loss of a step, its gradients' norm, and the gradients in the model."""
    loss = 0.0
    choices.begin(step)
    model.zero_grad()
    for part in c.way.losses(model, c.samples[step * ROWS:(step + 1) * ROWS]):
        part.backward()
        loss += part.item()
    grads = [p.grad for p in model.parameters() if p.requires_grad and p.grad is not None]
    return loss, torch.nn.utils.get_total_norm(grads).item()


def train_torch(c, model, choices, wanted=None):
    """The model, losses and norms of all steps. wanted: where they are not these, experts that are tied may be chosen in other ways."""
    s = c.settings
    decays = lambda n: "lora_" in n or not ("bias" in n or "norm" in n)
    c.way.begin(model, choices)
    out, norms = [], []
    model.train()
    for step in range(STEPS):
        begun = c.way.switch(model, step)
        if begun:
            model = begun
            named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
            opt = c.way.optimizer([{"params": [p for n, p in named if decays(n)], "weight_decay": float(s["optimizer__weight_decay"])},
                                   {"params": [p for n, p in named if not decays(n)], "weight_decay": 0.0}],
                                  (s["optimizer__beta1"], s["optimizer__beta2"]), float(s["optimizer__eps"]))
        compute = lambda: gradients(c, model, step, choices)
        error = lambda got: max(off(g, w) / LEAST[k] for k, g, w in zip(("loss", "norm"), got, wanted[step]))
        loss, norm = choices.settle(compute, error) if wanted else compute()
        clip = float(s["train__grad_clip"]) or math.inf
        torch.nn.utils.clip_grad_norm_([p for _, p in named], clip)
        norms.append(norm)
        for g in opt.param_groups:
            g["lr"] = lr_at(c, step)
        opt.step()
        out.append(loss)
    return model, out, norms


def distance(got, want, start):
    """The largest error of a tensor's update, relative to the update; tensors that did not move must not have moved."""
    worst, where = 0.0, ""
    for k, w in want.items():
        moved = (w - start[k]).norm().item()
        e = (got[k].double().reshape(w.shape) - w).norm().item() / max(moved, 1e-6 * w.norm().item(), 1e-12)
        if not e <= worst:
            worst, where = e, k
    return worst, where


def result(out, adapters):
    checkpoint = os.path.join(out, f"checkpoint-{STEPS}")
    if adapters:
        tensors = load_file(os.path.join(checkpoint, "adapter_model.safetensors"))
    else:
        megatrain("-q", "export", checkpoint, checkpoint + "-f32", "--dtype=f32")
        tensors = load_file(os.path.join(checkpoint + "-f32", "model.safetensors"))
    return losses(out), {k: v.float().numpy().tobytes() for k, v in tensors.items()}, tensors


def store(c, name, losses, norms, want):
    """The case as tests/parity/test_combinations.py runs it: files, settings, places, and of what was trained two tensors."""
    d = os.path.join(STORED, name)
    shutil.rmtree(d, ignore_errors=True)
    made = shutil.ignore_patterns("*.safetensors")  # follow from what is beside them
    shutil.copytree(os.path.join(c.tmp, "model"), os.path.join(d, "model"), ignore=made)
    shutil.copy(c.data, os.path.join(d, "data.jsonl"))
    if c.adapters:
        shutil.copytree(c.start, os.path.join(d, "start"), ignore=made)
    moved = sorted(k for k in want if any(w in k for w in ("lora_", "proj", "norm")))
    sums.write(os.path.join(d, "trained.sums"), {k: want[k] for k in random.Random(c.seed).sample(moved, min(2, len(moved)))})
    places = [{k: v for k, v in p.items() if k != "memory__nvme_paths"} for p in c.places]
    expected = {"made_with": f"transformers {transformers.__version__}, torch {torch.__version__}, peft {peft.__version__}",
                "case": c.describe(), "base": c.base, "settings": c.settings | c.way.keys, "places": places, "stop": c.stop, "steps": STEPS, "rows": ROWS,
                "kind": c.trained["kind"], "freeze": c.trained.get("freeze", ""), "losses": losses, "norms": norms}
    with open(os.path.join(d, "expected.json"), "w") as f:
        f.write(json.dumps(expected, indent=1) + "\n")


def read_back(c, out, got):
    """What others make of what we wrote: transformers of the export, PEFT of the adapters. None, or what is wrong."""
    checkpoint = os.path.join(out, f"checkpoint-{STEPS}")
    if not c.adapters:
        read = release_state(c.load(checkpoint + "-f32"))
        return next((k for k, v in read.items() if k in got and not torch.equal(v, got[k])), None)
    merged = os.path.join(out, "merged")
    megatrain("-q", "export", "--merge", "--dtype", "f32", checkpoint, merged)
    with torch.no_grad():
        ids = torch.tensor([next(c.samples[0][k] for k in ("input_ids", "token_ids", "prompt_ids") if k in c.samples[0])])
        logits = lambda folder: PeftModel.from_pretrained(c.load(c.plain), folder)(input_ids=ids).logits
        ours, theirs = c.load(merged)(input_ids=ids).logits, logits(checkpoint)
        alike = lambda other: (other - theirs).abs().max() <= 2e-5 * theirs.abs().max()
        if not alike(ours):
            return "merged"
        with open(os.path.join(checkpoint, "adapter_config.json")) as f:
            if json.load(f).get("target_parameters"):
                return None
        folded = os.path.join(out, "folded")
        megatrain("-q", "export", "--fold-scales", checkpoint, folded)
        with open(os.path.join(folded, "adapter_config.json")) as f:
            left = json.load(f)
        return None if left["r"] == left["lora_alpha"] and not left["rank_pattern"] and alike(logits(folded)) else "folded"


class Reference:
    """The case as torch trains it in double, and how far megatrain and torch in FP32, with the same experts, are from it."""

    def __init__(self, c, records, tensors, wanted=None):
        self.c, self.choices, self.single, self.floors = c, Choices(), copy.deepcopy(c.model), []
        self.start = c.final(copy.deepcopy(c.model))  # in double a copy
        with self.choices.making(), double_throughout():
            double, self.losses, self.norms = train_torch(c, copy.deepcopy(c.model).double(), self.choices, wanted)
        self.other = len(self.choices.forced)
        self.want = c.final(double)
        got = {k: v for k, v in tensors.items() if k in self.want}
        self.missing = [k for k in self.want if k not in got and (self.want[k] != self.start[k]).any()]
        update, self.where = distance(got | {k: self.start[k] for k in self.want if k not in got}, self.want, self.start)
        self.ours = {"loss": max(map(off, [m["loss"] for m in records], self.losses)),
                     "norm": max(map(off, [m["grad_norm"] for m in records], self.norms)), "update": update}
        self.look()
        while not self.near and len(self.floors) < RUNS:
            self.look()

    def look(self):
        """One more run in FP32, after the first from a start that is off by a rounding."""
        model = copy.deepcopy(self.single)
        torch.manual_seed(len(self.floors))
        with torch.no_grad():
            for p in model.parameters() if self.floors else ():
                p.mul_(1 + 6e-8 * torch.randn(p.shape))
        with self.choices.making(self.choices.taken):
            model, losses, norms = train_torch(self.c, model, self.choices)
        self.floors.append({"loss": max(map(off, losses, self.losses)), "norm": max(map(off, norms, self.norms)),
                            "update": distance(self.c.final(model), self.want, self.start)[0]})
        self.floor = {k: max(f[k] for f in self.floors) for k in LEAST}
        self.near = all(self.ours[k] <= max(LEAST[k], TIMES * self.floor[k]) for k in LEAST)


def compare(c, name):
    """A run, what it made, and the reference."""
    ours = c.run(name, c.places[0])
    first, records = result(ours, c.adapters), [m for m in metrics(ours) if "loss" in m]
    of = Reference(c, records, first[2])
    if c.mixture and not of.near:
        tied = Reference(c, records, first[2], [(m["loss"], m["grad_norm"]) for m in records])
        of = tied if tied.near else of
    return ours, first, records, of


def is_exact_once(c):
    """Where rounding flips codes, floors excuse much: of the steps of a run whose weights stay, none of which knows of a flip in another,
    one has to be exact."""
    c = copy.copy(c)
    c.settings = c.settings | {"train__learning_rate": "1e-12"}
    c.way = copy.copy(c.way)
    c.way.c = c
    records, choices = [m for m in metrics(c.run("still", c.places[0])) if "loss" in m], Choices()
    with choices.making(), double_throughout():
        _, losses, norms = train_torch(c, copy.deepcopy(c.model).double(), choices)
    return any(off(m["loss"], l) <= LEAST["loss"] and off(m["grad_norm"], n) <= LEAST["norm"] for m, l, n in zip(records, losses, norms))


def run_case(c, keep=None):
    try:
        c.prepare()
        ours, first, records, of = compare(c, "a")
        second = result(c.run("b", c.places[0] if c.stop else c.places[1], c.stop, c.places[1], c.hosts), c.adapters)
        same = first[:2] == second[:2]
        rates = max(off(m["lr"], lr_at(c, i)) for i, m in enumerate(records)) < 1e-6
        wrong = read_back(c, ours, first[2]) if c.seed % 3 == 0 and c.way.name not in ("merges", "merge_aware") else None
        small = not of.near
        if small:
            shutil.rmtree(ours)
            c.settings["optimizer__eps"] = EPS
            *_, of = compare(c, "a")
        once = not c.way.flips or all(of.ours[k] <= LEAST[k] for k in ("loss", "norm")) or is_exact_once(c)
        ok = same and rates and of.near and once and not of.missing and not wrong
        if keep and ok and c.way.name in ("plain", "fp8") and c.hosts == 1:  # as tests/parity/test_combinations.py knows them
            store(c, keep, of.losses, of.norms, of.want)
        print("ok  " if ok else "FAIL", c.describe(), " ".join(f"{k} {of.ours[k]:.1e}:{of.floor[k]:.1e}" for k in LEAST),
              f"with {of.other} other choices among ties" if of.other else "", f"of {len(of.floors)} floors" if len(of.floors) > 1 else "",
              f"with eps {EPS}" if small else "", "" if same else "BITS DIFFER",
              "" if rates else "RATES DIFFER", "" if once else "NO STEP IS EXACT", of.where if not ok else "", of.missing[:2], wrong or "", flush=True)
        return ok
    finally:
        shutil.rmtree(c.tmp, ignore_errors=True)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--n", type=int, default=300)
    p.add_argument("--families", help="only seeds that draw one of these, by commas: their case is the same without this")
    p.add_argument("--way", choices=[w.name for w in WAYS], help="every case that can have it has it")
    p.add_argument("--store", help="a name in tests/parity/combinations")
    p.add_argument("--again", nargs="*", help="names there, whose cases are made again")
    a = p.parse_args()
    torch.set_num_threads(1)  # products are too small for more threads
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    failed = []
    only = a.families.split(",") if a.families else None
    seeds = (s for s in itertools.count(a.seed) if not only or draw(random.Random(s))[0] in only)
    with tempfile.TemporaryDirectory() as tmp:
        cases = a.again or list(itertools.islice(seeds, a.n))
        for case in cases:
            try:
                ok = run_case(Kept(case, tmp), case) if a.again else run_case(Case(case, tmp, a.way), a.store)
            except Exception as e:
                print("FAIL", case, type(e).__name__, str(e)[:400], flush=True)
                ok = False
            if not ok:
                failed.append(case)
    print(f"{len(cases) - len(failed)} passed, {len(failed)} failed {failed}; transformers {transformers.__version__}, torch {torch.__version__}, "
          f"peft {peft.__version__}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
