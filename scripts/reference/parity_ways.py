# SPDX-License-Identifier: Apache-2.0
"""What else a random combination may draw: another objective, optimizer, states or course of training, and hosts beside drives.
Each is the keys of a run, and the same in torch."""
import fnmatch
import functools
import json
import os
import random
import re
import shutil
import struct

import numpy
import peft
import torch
from safetensors.numpy import load_file
from torch.nn.functional import cross_entropy, kl_div, logsigmoid

from safetensors.torch import save_file

from parity import make_model, release_state
from parity_families import NESTED, VOCAB, linear
from parity_fp8 import install
from philox import drawn_signs
from test_packed import write_decoded
from tiny import base, megatrain, read_safetensors, write_data, write_ini

#: whose parameters in transformers are the tensors of the files, rows in their order
PLAIN = {"llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "olmo2", "olmo3", "granite", "exaone4", "seed_oss", "smollm3", "cwm",
         "ministral", "arcee", "nemotron", "starcoder2", "hunyuan_v1_dense"}


class Way:
    """Of tokens, by AdamW in f32."""
    name = "plain"
    #: does a rounding move values by more than itself?
    flips = False

    def __init__(self, r, c):
        self.c, self.r, self.keys = c, r, {}
        self.draw(r, c)

    @staticmethod
    def fits(c):
        return True

    def draw(self, r, c):
        pass

    def describe(self):
        return self.name

    def prepare(self, c, model):
        """Beside the model's folder, before the data are written."""

    def write_data(self, path, n):
        return write_data(path, n=n, seed=self.c.seed, longest=24, vocab=VOCAB)

    def begin(self, model, choices):
        """Before the first step, with the model as it starts."""

    def losses(self, model, batch):
        """Terms of a step's loss, one after the other."""
        total = sum(sum(l != -100 for l in b["labels"][1:]) for b in batch)
        for b in batch:
            logits = model(input_ids=torch.tensor([b["input_ids"]])).logits
            yield cross_entropy(logits[0, :-1], torch.tensor(b["labels"][1:]), ignore_index=-100, reduction="sum") / total

    def optimizer(self, groups, betas, eps):
        return torch.optim.AdamW(groups, lr=1.0, foreach=False, betas=betas, eps=eps)

    def switch(self, model, step):
        """The model from this step on, where the optimizer begins anew; else None."""
        return model if step == 0 else None

    def rate(self, step):
        """Factor of the learning rate."""
        return 1


def log_probability(model, prompt, answer):
    logits = model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1:-1]
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(answer)[:, None]).sum()


class Preference(Way):
    """Pairs, with the model as it starts as the reference."""
    name = "preference"
    LOSSES = {"sigmoid": lambda d, c, r, beta: -0.9 * logsigmoid(beta * d) - 0.1 * logsigmoid(-beta * d),
              "hinge": lambda d, c, r, beta: torch.relu(1 - beta * d),
              "apo_zero": lambda d, c, r, beta: 1 - torch.sigmoid(beta * c) + torch.sigmoid(beta * r),
              "cpo": lambda d, c, r, beta: -logsigmoid(beta * d)}

    def draw(self, r, c):
        self.loss, self.beta = r.choice(sorted(self.LOSSES)), r.choice([0.1, 0.4])
        self.keys = dict(preference__loss=self.loss, preference__beta=self.beta, preference__sft=0)
        if self.loss == "sigmoid":
            self.keys["preference__label_smoothing"] = 0.1

    def write_data(self, path, n):
        r = random.Random(self.c.seed)
        ids = lambda n: [r.randrange(3, VOCAB) for _ in range(n)]
        with open(path, "w") as f:
            for _ in range(n):
                f.write(json.dumps(self.item(r, ids)) + "\n")
        return path

    def item(self, r, ids):
        return {"prompt_ids": ids(r.randrange(1, 8)), **{k: ids(r.randrange(1, 12)) for k in ("chosen_ids", "rejected_ids")}}

    def answers(self, i):
        s = self.c.samples[i]
        return [(s["prompt_ids"], s[k]) for k in ("chosen_ids", "rejected_ids")]

    def begin(self, model, choices):
        choices.begin(-1)
        with torch.no_grad():
            self.known = [[log_probability(model, *a) for a in self.answers(i)] for i in range(len(self.c.samples))]

    def losses(self, model, batch):
        for s in batch:
            i = self.c.samples.index(s)
            c, r = (log_probability(model, *a) - (0 if self.loss == "cpo" else k) for a, k in zip(self.answers(i), self.known[i]))
            yield self.LOSSES[self.loss](c - r, c, r, self.beta) / len(batch)


class Kto(Preference):
    """Rated answers, from a level that mismatched ones of the micro-batch give."""
    name = "kto"

    def draw(self, r, c):
        self.beta, self.weights = r.choice([0.1, 0.4]), {True: r.choice([1, 1.5]), False: 1}
        self.keys = dict(preference__loss="kto", preference__beta=self.beta, preference__desirable_weight=self.weights[True])

    def item(self, r, ids):
        return {"prompt_ids": ids(r.randrange(1, 8)), "completion_ids": ids(r.randrange(1, 12)), "label": r.random() < 0.5}

    def lender(self, i):
        """Answers move on by one within micro-batches; within all, where these have one."""
        m = self.c.settings["train__micro_batch"]
        n = m if m > 1 else len(self.c.samples)
        return i - 1 if i % n else i + n - 1

    def answers(self, i):
        s = self.c.samples[i]
        return [(s["prompt_ids"], s["completion_ids"]), (s["prompt_ids"], self.c.samples[self.lender(i)]["completion_ids"])]

    def losses(self, model, batch):
        m, first = self.c.settings["train__micro_batch"], self.c.samples.index(batch[0])
        for at in range(first, first + len(batch), m):
            some = range(at, at + m)
            with torch.no_grad():
                z = torch.stack([log_probability(model, *self.answers(i)[1]) - self.known[i][1] for i in some]).mean().clamp(min=0)
            for i in some:
                good = self.c.samples[i]["label"]
                d = log_probability(model, *self.answers(i)[0]) - self.known[i][0] - z
                yield self.weights[good] * (1 - torch.sigmoid((self.beta if good else -self.beta) * d)) / len(batch)


class Distill(Way):
    """The likeliest tokens of a teacher that is this model with noise."""
    name = "distill"

    def prepare(self, c, model):
        self.teacher = os.path.join(c.tmp, "teacher")
        model = make_model(self.teacher, c.cfg, "F32")
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn(p.shape) * 0.02)
        state = {k: v for k, v in release_state(model).items() if not (c.cfg["tie_word_embeddings"] and k == "lm_head.weight")}
        save_file(state, os.path.join(self.teacher, "model.safetensors"), metadata={"format": "pt"})

    def draw(self, r, c):
        self.top, self.share, self.warmth = r.choice([3, 8, VOCAB]), r.choice([0, 0.3]), r.choice([1, 2])

    def write_data(self, path, n):
        super().write_data(path, n)
        c, out = self.c, path + "-teacher"
        ini = write_ini(out + ".ini", base(self.teacher, path, os.path.join(c.tmp, "none"), model__init="weights", data__packing="off",
                                           data__shuffle="off", data__eval=""))
        megatrain("-q", "score", ini, "--data", path, "--out", out, "--top", self.top)
        self.keys |= dict(train__objective="distill", distill__teacher=out + ".top", distill__top=self.top, distill__sft=self.share,
                         distill__temperature=self.warmth)
        self.known = self.read(out + ".top")
        return path

    def read(self, path):
        """Of each sample the teacher's tokens, their log-probabilities, and the rest's probability, for each trained token."""
        with open(path, "rb") as f:
            raw = f.read()
        _, top, _, n, rows, _ = struct.unpack_from("<8sIIQQQ", raw)
        kept = numpy.frombuffer(raw, [("top", [("id", "<u4"), ("logp", "<f4")], top), ("rest", "<f4")], rows, 64 + 32 * n)
        entries = [struct.unpack_from("<QQQQ", raw, 64 + 32 * i)[1:3] for i in range(n)]
        of = lambda rows: (torch.tensor(rows["top"]["id"].astype("i8")), torch.tensor(rows["top"]["logp"].copy()), torch.tensor(rows["rest"].copy()))
        return [of(kept[first:first + count]) for first, count in entries]

    def losses(self, model, batch):
        total = sum(sum(l != -100 for l in b["labels"][1:]) for b in batch)
        for b in batch:
            keep = torch.tensor(b["labels"][1:]) != -100
            ids, p, rest = self.known[self.c.samples.index(b)]
            logits = model(input_ids=torch.tensor([b["input_ids"]])).logits[0, :-1][keep]
            logq = torch.log_softmax(logits, -1)
            p, q = p.to(logq.dtype), logq.gather(-1, ids)
            if ids.shape[-1] < logq.shape[-1]:
                others = torch.ones_like(logq, dtype=torch.bool).scatter(-1, ids, False)
                p = torch.cat([p, rest.to(p.dtype).clamp(min=1e-30).log()[:, None]], -1)
                q = torch.cat([q, torch.logsumexp(logq.masked_fill(~others, -torch.inf), -1)[:, None]], -1)
            p, q = (torch.log_softmax(x / self.warmth, -1) for x in (p, q))
            kl = kl_div(q, p, reduction="sum", log_target=True) * self.warmth ** 2
            nll = cross_entropy(logits, torch.tensor(b["input_ids"][1:])[keep], reduction="sum")
            yield ((1 - self.share) * kl + self.share * nll) / total


class Policy(Way):
    """Rollouts, some with tokens between the policy's own that it has not sampled."""
    name = "policy"
    LOSSES = ("grpo", "bnpo", "dapo", "dr_grpo", "gspo", "cispo", "sapo", "dppo", "dro", "opd")
    BY = {"bnpo": "micro", "grpo": "rows", "gspo": "rows", "sapo": "rows", "dr_grpo": "constant"}
    MOST = 12

    def draw(self, r, c):
        k = self.k = dict(loss=r.choice(self.LOSSES), old=r.choice(["batch", "file"]), mismatch=r.choice(["none", "token", "row"]), mismatch_max=1.1,
                          mismatch_beyond=r.choice(["cut", "drop"]), kl=r.choice(["k1", "k3", "k3_ratio"]), kl_weight=r.choice([0, 0.2]),
                          scale=r.choice(["group", "batch", "none"]), temperature=r.choice([1, 0.7]), dual_clip=0, clip_low=0.1, clip_high=0.1,
                          normalise=r.choice(["auto", "tokens", "micro", "rows", "constant"]), max_tokens=self.MOST)
        if k["loss"] in ("grpo", "bnpo", "dapo", "dr_grpo", "gspo"):
            k["dual_clip"] = r.choice([0, 1.5])
        if k["loss"] == "gspo" and k["kl"] == "k3_ratio":
            k["kl"] = "k3"
        self.keys = {f"policy__{n}": v for n, v in k.items()} | {"data__format": "rollouts"}

    def write_data(self, path, n):
        r = random.Random(self.c.seed)
        near = lambda lp: [min(0.0, p + r.gauss(0, 0.1)) for p in lp]
        with open(path, "w") as f:
            for i in range(n):
                length, first = r.randrange(4, 20), r.randrange(1, 4)
                mask = [int(first <= t and r.random() < 0.7) for t in range(length)]
                mask[first:] = [1, *mask[first + 1:]]
                sampled = [r.gauss(-4.5, 0.3) for _ in range(length)]
                f.write(json.dumps({"token_ids": [r.randrange(3, VOCAB) for _ in range(length)], "mask": mask, "logprobs": sampled, "old_logprobs": near(sampled),
                                    "ref_logprobs": near(sampled), "temperature": self.k["temperature"], **self.judged(r, i, length)}) + "\n")
        return path

    def judged(self, r, i, length):
        if self.c.seed % 2:
            return {"reward": r.random(), "group": i // 2}
        return {"advantage": [r.gauss(0, 1) for _ in range(length)] if i % 2 else r.gauss(0, 1)}

    def advantages(self, batch):
        """Of each sample, a number or one for each token."""
        if "advantage" in batch[0]:
            return [s["advantage"] for s in batch]
        of = lambda group: torch.tensor([s["reward"] for s in self.c.samples if group in (None, s["group"])], dtype=torch.float64)
        by = {"group": lambda g: of(g).std().item() + 1e-4, "batch": lambda g: of(None).std().item() + 1e-4, "none": lambda g: 1}[self.k["scale"]]
        return [(s["reward"] - of(s["group"]).mean().item()) / by(s["group"]) for s in batch]

    def term(self, lp, old, ref, a):
        k, d = self.k, lp - old
        kind = k["loss"]  # gspo's slope is each token's own: GSPO-token, of which tokens' advantages and factors are
        r = torch.exp(d.mean().detach() + lp - lp.detach() if kind == "gspo" else d)
        if kind in ("cispo", "sapo", "dro", "opd", "dppo"):
            tau, moved = torch.where(a > 0, 1.0, 1.05), lp.exp() - old.exp()
            kept = lambda out: torch.where(out.detach(), 0.0, 1.0)
            return {"cispo": lambda: -r.clamp(max=k["clip_high"]).detach() * a * lp, "sapo": lambda: -4 / tau * torch.sigmoid(tau * (r - 1)) * a,
                    "dro": lambda: -(lp * a - 0.05 / 2 * d * d), "opd": lambda: -kept(moved < -k["clip_low"]) * (ref - lp).detach() * r,
                    "dppo": lambda: -kept(torch.where(a > 0, moved > k["clip_high"], moved < -k["clip_low"])) * r * a + 1e-3 * d * d}[kind]()
        least = torch.minimum(r * a, r.clamp(1 - k["clip_low"], 1 + k["clip_high"]) * a)
        return -torch.where((a < 0) & (k["dual_clip"] > 0), torch.maximum(least, k["dual_clip"] * a), least)

    def row(self, model, s, a):
        """The sum of a rollout's terms."""
        k, keep = self.k, torch.tensor(s["mask"][1:]) == 1
        logits = model(input_ids=torch.tensor([s["token_ids"]])).logits[0, :-1] / k["temperature"]
        lp = torch.log_softmax(logits, -1).gather(-1, torch.tensor(s["token_ids"][1:])[:, None])[:, 0][keep]
        sampler, old, ref = (torch.tensor(s[n][1:], dtype=lp.dtype)[keep] for n in ("logprobs", "old_logprobs", "ref_logprobs"))
        old = lp.detach() if k["old"] == "batch" else old
        drift = old - sampler
        factor = torch.exp(drift.sum().expand_as(drift) if k["mismatch"] == "row" else drift if k["mismatch"] == "token" else 0 * drift)
        beyond = torch.zeros_like(factor) if k["mismatch_beyond"] == "drop" else torch.full_like(factor, k["mismatch_max"])
        factor = torch.where(factor <= k["mismatch_max"], factor, beyond) if k["mismatch"] != "none" else factor
        terms = factor * self.term(lp, old, ref, torch.tensor(a[1:], dtype=lp.dtype)[keep] if isinstance(a, list) else torch.full_like(lp, a))
        away = ref - lp
        kl = {"k1": -away, "k3": away.exp() - away - 1, "k3_ratio": (away.exp() - away - 1) * torch.exp(lp - old)}[k["kl"]]
        return (terms + k["kl_weight"] * kl).sum()

    def losses(self, model, batch):
        by, m = self.k["normalise"], self.c.settings["train__micro_batch"]
        by = self.BY.get(self.k["loss"], "tokens") if by == "auto" else by
        tokens = [sum(s["mask"][1:]) for s in batch]
        for i, (s, a) in enumerate(zip(batch, self.advantages(batch))):
            micro = sum(tokens[i // m * m:i // m * m + m]) * (len(batch) // m)
            yield self.row(model, s, a) / {"tokens": sum(tokens), "micro": micro, "rows": tokens[i] * len(batch), "constant": self.MOST * len(batch)}[by]


class OwnOptimizer(torch.optim.Optimizer):
    """AdamW, by rules for keeping its moments or for making its steps."""

    def __init__(self, groups, way, betas, eps):
        super().__init__(groups, {"lr": 1.0})
        self.way, self.betas, self.eps, self.t = way, betas, eps, 0

    @torch.no_grad()
    def step(self):
        self.t += 1
        for g in self.param_groups:
            for p in (p for p in g["params"] if p.grad is not None):
                p.mul_(1 - g["lr"] * g["weight_decay"])
                p.sub_(g["lr"] * self.way.direction(p, p.grad, self.state[p], self.t, self.betas, self.eps))


def moments(g, state, t, betas, kept=lambda x, which: x):
    """Means of a gradient and of its square, as they are before they are kept."""
    m, v = (state.get(k, torch.zeros_like(g)) for k in "mv")
    m, v = m + (1 - betas[0]) * (g - m), betas[1] * v + (1 - betas[1]) * g * g
    state["m"], state["v"] = kept(m, "m"), kept(v, "v")
    return m, v


class OwnWay(Way):
    """By an optimizer that is written here, for models whose parameters are tensors of the files."""

    @staticmethod
    def fits(c):
        return c.family in PLAIN and c.name not in NESTED

    def optimizer(self, groups, betas, eps):
        return OwnOptimizer(groups, self, betas, eps)


class States(OwnWay):
    """Moments in bf16, or in blocks of 8 bits, as scripts/reference/optimizer_fixtures.py has them."""
    name = "states"

    def draw(self, r, c):
        self.dtype = r.choice(["bf16", "8bit"])
        self.keys = dict(optimizer__state_dtype=self.dtype)
        c.settings["optimizer__beta2"] = 0.95

    @staticmethod
    def in_blocks(x, which):
        flat = torch.nn.functional.pad(x.flatten(), (0, -x.numel() % 32)).reshape(-1, 32)
        bf16 = lambda x: x.to(torch.bfloat16).to(flat.dtype)
        if which == "m":
            a = flat.abs().amax(1, keepdim=True).clamp(min=1e-12)
            y = (127 * (2 * (flat / a) / (1 + (flat / a).abs())) + 0.5).floor().clamp(-127, 127) / 127
            out = bf16(a) * (y / (2 - y.abs()))
        else:
            a = flat.sqrt().amax(1, keepdim=True)
            y = (255 * flat.sqrt() / torch.where(a > 0, a, 1) + 0.5).floor().clamp(0, 255)
            out = (bf16(a) * y / 255) ** 2
        return out.flatten()[:x.numel()].reshape(x.shape)

    def direction(self, p, g, state, t, betas, eps):
        lean = (lambda x, which: x.to(torch.bfloat16).to(x.dtype)) if self.dtype == "bf16" else self.in_blocks
        vector = self.dtype == "8bit" and p.dim() < 2
        m, v = moments(g, state, t, betas, *([] if vector else [lean]))
        return m / (1 - betas[0] ** t) / (v.sqrt() / (1 - betas[1] ** t) ** 0.5 + eps)


class Apollo(OwnWay):
    """mt_apollo (src/device/ops_direct.h), written again from its paper; AdamW for all but the matrices of layers."""
    name = "apollo"

    def draw(self, r, c):
        self.rank, self.gap, self.whole, self.scale = r.choice([2, 4]), r.choice([2, 10]), r.choice([0, 1]), r.choice([1, 16])
        c.trained, c.adapters = {"kind": "all"}, False
        c.settings["train__grad_clip"] = 0
        self.keys = dict(optimizer__type="apollo", optimizer__rank=self.rank, optimizer__projection_gap=self.gap,
                         optimizer__by_tensor=self.whole, optimizer__direction_scale=self.scale, checkpoint__every=1)

    def begin(self, model, choices):
        """What checkpoint-1 has of the matrices' projected gradients."""
        folder, self.first = os.path.join(self.c.tmp, "a", "checkpoint-1", "megatrain"), {}
        first = {k: v for f in os.listdir(folder) if f.endswith(".safetensors") for k, v in load_file(os.path.join(folder, f)).items()}
        for n, p in model.named_parameters():
            if n + ".low_exp_avg" in first:
                self.first[id(p)] = torch.from_numpy(first[n + ".low_exp_avg"]).to(p.dtype)
        assert len(self.first) == sum(k.endswith(".low_exp_avg") for k in first)

    def project(self, g, number, drawn):
        tall, small = g.shape[0] >= g.shape[1], min(g.shape)
        rank = min(self.rank, small)
        s = drawn_signs(42, small * rank, number, drawn).to(g.dtype) / rank ** 0.5
        return g @ s.reshape(rank, small).T if tall else g.T @ s.reshape(small, rank)

    def number(self, g, first):
        """A tensor's signs are of its place in the program's layout: the one that explains the first projected gradient."""
        of = [(self.project(g, n, 0) - first.reshape(max(g.shape), -1)).norm().item() for n in range(200)]
        assert min(of) < 1e-3 * first.norm(), "no number explains it"
        return of.index(min(of))

    def direction(self, p, g, state, t, betas, eps):
        step = (1 - betas[1] ** t) ** 0.5 / (1 - betas[0] ** t)
        if id(p) not in self.first:
            m, v = moments(g, state, t, betas)
            return step * m / (v.sqrt() + eps)
        if t == 1:
            state["number"] = self.number(g, self.first[id(p)] / (1 - betas[0]))
        low, tall = self.project(g, state["number"], (t - 1) // self.gap), g.shape[0] >= g.shape[1]
        m, v = moments(low, state, t, betas)
        u = m / (v.sqrt() + eps)
        factor = u.norm() / (low.norm() + 1e-8) if self.whole else u.norm(dim=1) / (low.norm(dim=1) + 1e-8)
        d = g * (factor if self.whole else factor[:, None] if tall else factor[None])
        n, before = d.norm(), state.get("norm", 0)
        f = max(n / (before + 1e-8), 1.01) / 1.01 if before else 1
        state["norm"] = n / f
        return self.scale ** 0.5 * step * d / f


class Blocks(Way):
    """A layer at a time; checkpoints name what the last block has not. Files in FP32, so that a switch rounds nothing."""
    name = "blocks"

    def draw(self, r, c):
        c.trained, c.adapters, c.base = {"kind": "all"}, False, "f32"
        self.every, self.order = r.choice([1, 2]), r.choice(["ascending", "descending"])
        self.always = r.choice(["", "*norm_f.*" if c.family == "nemotron_h" else "*.norm.weight", "*embed*"])
        self.keys = dict(train__blocks="layers", train__block_steps=self.every, train__block_order=self.order, train__blocks_always=self.always,
                         checkpoint__frozen="name")

    def trains(self, name, block):
        layer = re.search(r"\.layers\.(\d+)\.", name)
        return bool(layer) and int(layer[1]) == block or fnmatch.fnmatchcase(name, self.always)

    def switch(self, model, step):
        if step % self.every:
            return None
        n = self.c.over["num_hidden_layers"]
        at = step // self.every % n
        for name, p in model.named_parameters():
            p.requires_grad_(self.trains(name, at if self.order == "ascending" else n - 1 - at))
        return model


class Merges(Way):
    """New adapters every few steps, whose A is taken from a checkpoint after a step with a rate of 0."""
    name = "merges"

    @staticmethod
    def fits(c):
        return c.name not in NESTED and c.trained["kind"] == "lora"

    def draw(self, r, c):
        self.every, self.warmup, spec = r.choice([2, 3]), r.choice([1, 2]), c.trained["peft"]
        spec = {k: spec[k] for k in ("r", "lora_alpha", "target_modules", "use_rslora")}
        c.trained, c.adapters, c.base, c.settings["train__warmup"] = {"kind": "merges", "peft": spec}, False, "f32", 2
        self.keys = dict(adapter__kind="lora", adapter__rank=spec["r"], adapter__alpha=spec["lora_alpha"], adapter__targets=", ".join(spec["target_modules"]),
                         adapter__rslora="on" if spec["use_rslora"] else "off", adapter__merge_every=self.every, adapter__merge_warmup=self.warmup,
                         checkpoint__every=1)

    def switch(self, model, step):
        if step % self.every:
            return None
        if step:
            model = model.merge_and_unload()
        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **self.c.trained["peft"]), autocast_adapter_dtype=False)
        drawn = load_file(os.path.join(self.c.tmp, "a", f"checkpoint-{step + 1}", "adapter_model.safetensors"))
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.data = torch.from_numpy(drawn[name.replace(".default", "")]).to(p.dtype)
                assert "lora_A" in name or not p.any(), "B is 0 until the first update with a rate"
        return model

    def rate(self, step):
        return step % self.every / self.warmup if step >= self.every and step % self.every < self.warmup else 1


class MergeAware(Way):
    """Adapters trained straight through the weights that the program exports as the merged ones of each step, the first of which has
    a rate of 0."""
    name = "merge_aware"
    FORMATS = ("bf16", "nf4", "fp8", "mxfp4", "int4", "nvfp4")

    @staticmethod
    def fits(c):
        return c.family in PLAIN and c.name not in NESTED and c.trained["kind"] in ("lora", "dora") and not c.wide and c.over["hidden_size"] % 32 == 0

    def draw(self, r, c):
        c.base, c.settings["train__warmup"] = r.choice(self.FORMATS), 2
        for key in ("target_parameters", "modules_to_save"):
            c.trained["peft"].pop(key, None)
        c.over["intermediate_size"] = c.cfg["intermediate_size"] = 64  # whole blocks
        self.keys = dict(adapter__merge_aware=c.base, checkpoint__every=1)
        if c.base not in ("bf16", "nf4"):
            self.keys["adapter__merge_scale"] = r.choice(["frozen", "recomputed"])

    def begin(self, model, choices):
        for name, m in model.named_modules():
            if isinstance(m, peft.tuners.lora.Linear):
                m.forward = functools.partial(self.product, m, name.removeprefix("base_model.model.") + ".weight")

    @staticmethod
    def values(dtype, shape, data):
        wide = numpy.frombuffer(data, "<f4") if dtype == "F32" else (numpy.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
        return torch.from_numpy(wide.reshape(shape).astype("<f8"))

    def product(self, m, name, x):
        """Straight through the rounding of the matrix, with DoRA of what its magnitudes scale."""
        w, by = m.base_layer.weight + m.scaling["default"] * m.lora_B["default"].weight @ m.lora_A["default"].weight, 1
        if m.lora_magnitude_vector:
            w, by = w / w.detach().norm(dim=1)[:, None], m.lora_magnitude_vector["default"].weight[:, None]
        served = self.served[name].to(w.dtype)
        return torch.nn.functional.linear(x, by * (w + (served / by - w).detach()), m.base_layer.bias)

    def switch(self, model, step):
        at = os.path.join(self.c.tmp, "a", f"checkpoint-{max(step, 1)}")
        if not os.path.exists(at + "-merged"):
            megatrain("-q", "export", "--merge", at, at + "-merged")
            if self.c.base != "bf16":
                write_decoded(at + "-decoded", at + "-merged", "F32")
        file = os.path.join(at + ("-merged" if self.c.base == "bf16" else "-decoded"), "model.safetensors")
        self.served = {k: self.values(*t) for k, t in read_safetensors(file).items()}
        return super().switch(model, step)


class Chunks(Way):
    """Rows of several chunks."""
    name = "chunks"

    def draw(self, r, c):
        c.settings["train__micro_batch"] = 1
        self.keys = dict(train__chunk=r.choice([8, 16]))

    def write_data(self, path, n):
        return write_data(path, n=n, seed=self.c.seed, longest=60, vocab=VOCAB)


class AllDora(Way):
    """DoRA of everything that has it."""
    name = "dora"

    @staticmethod
    def fits(c):
        return c.name not in NESTED and not c.wide

    def draw(self, r, c):
        c.trained, c.adapters = {"kind": "dora", "peft": dict(r=r.choice([1, 3, 4]), lora_alpha=8, target_modules=linear(c.family, c.over), use_dora=True)}, True


class Fp8(Way):
    """Whole models and adapters, on packed bases, too. All else is in f32."""
    name = "fp8"
    flips = True  # to the next code
    FAMILIES = PLAIN | {"phi3", "glm", "glm4", "mixtral", "qwen3_moe", "qwen2_moe"}
    LENGTH = 24  # of all samples: padding would be rows of the operands, too
    @staticmethod
    def fits(c):
        return c.name in Fp8.FAMILIES and not c.wide

    def draw(self, r, c):
        for key in "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size":
            if key in c.over:
                c.over[key] = c.cfg[key] = r.choice([32, 40, 48, 64])
        if c.over["hidden_size"] % 16 and c.name != "phi3" and r.random() < 0.8:
            c.over["hidden_size"] = c.cfg["hidden_size"] = 2 * c.over["hidden_size"]
        spec = c.trained.get("peft", {})
        spec.pop("target_parameters", None)
        if any("proj" in m for m in spec.get("modules_to_save", [])):
            del spec["modules_to_save"]
        self.keys = dict(model__compute="fp8", data__seq_len=self.LENGTH)

    def write_data(self, path, n):
        r = random.Random(self.c.seed)
        with open(path, "w") as f:
            for _ in range(n):
                ids = [r.randrange(VOCAB) for _ in range(self.LENGTH)]
                f.write(json.dumps({"input_ids": ids, "labels": [-100] * (self.LENGTH // 3) + ids[self.LENGTH // 3:]}) + "\n")
        return path

    def begin(self, model, choices):
        install(model)

    def losses(self, model, batch):
        m, total = self.c.settings["train__micro_batch"], sum(sum(l != -100 for l in b["labels"][1:]) for b in batch)
        for some in (batch[i:i + m] for i in range(0, len(batch), m)):
            logits = model(input_ids=torch.tensor([b["input_ids"] for b in some])).logits
            labels = torch.tensor([b["labels"][1:] for b in some])
            yield cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum") / total


WAYS = [Way, Preference, Kto, Policy, Distill, States, Apollo, Blocks, Merges, MergeAware, Chunks, AllDora, Fp8]


def draw_way(r, c, name=None):
    """One that the case can have, or that of a name if it can, and how many hosts its second run is of, each with drives of its own."""
    ways = [w for w in WAYS if w.fits(c)]
    way = r.choice([w for w in ways if w.name == name] or ways)(r, c)
    if not c.trained["kind"] in ("lora", "dora", "merges"):
        c.base = c.base if c.base == "f32" else "bf16"
    for place in c.places:
        if c.trained["kind"] not in ("lora", "dora", "merges"):
            place.pop("memory__base", None), place.pop("memory__adapters", None)
        if way.name == "apollo":  # whose states are never on drives
            place["memory__states"] = "host"
        if place.get("memory__base") == "files" and c.base != "bf16":
            place["memory__base"] = "host"
    hosts = 2 if r.random() < 0.25 and way.name not in ("blocks", "merges") and shutil.which("mpirun") else 1
    if hosts > 1:
        c.settings["train__micro_batch"] = min(2, c.settings["train__micro_batch"])
        way.keys["train__groups"] = 2
        if way.name != "apollo":
            c.places[1]["memory__states"] = "disk"
    return way, hosts
