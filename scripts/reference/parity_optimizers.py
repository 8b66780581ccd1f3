# SPDX-License-Identifier: Apache-2.0
"""Makes tests/parity/optimizers: twenty steps of models of tests/parity with optimizers other than AdamW, in double.
Run by hand; the tests need no torch. lion-pytorch, apollo-torch and galore-torch have to be installed beside what
scripts/setup --parity installs.
    .venv-parity/bin/python scripts/reference/parity_optimizers.py [MODEL]... [CASE]...
"""
import functools
import importlib.metadata
import json
import math
import os
import sys
from unittest.mock import MagicMock

import torch
import transformers
from lion_pytorch import Lion
from safetensors.torch import load_file, save_file
from transformers.optimization import Adafactor

for name in "bitsandbytes", "bitsandbytes.optim", "bitsandbytes.optim.optimizer", "bitsandbytes.functional": # of its 8-bit optimizers alone
    sys.modules.setdefault(name, MagicMock(Optimizer2State=torch.optim.Optimizer))
import apollo_torch
import apollo_torch.random_projector
import galore_torch
import galore_torch.galore_projector

from parity import ROWS, STEPS, load, release_state, train_torch
from philox import drawn_signs
from seeded import PARITY as ROOT, fixture
import sums  # of tests/parity



class DecoupledSGD(torch.optim.SGD):
    """torch.optim.SGD after weights have decayed as AdamW's do, and not with the gradient."""

    @torch.no_grad()
    def step(self, closure=None):
        decay = [g["weight_decay"] for g in self.param_groups]
        for g in self.param_groups:
            for p in g["params"]:
                p.mul_(1 - g["lr"] * g["weight_decay"])
            g["weight_decay"] = 0.0
        super().step(closure)
        for g, wd in zip(self.param_groups, decay):
            g["weight_decay"] = wd


class OfFiles(torch.optim.Optimizer):
    """An optimizer of whole tensors, over those of the files: transformers keeps the experts of a layer in one tensor,
    and of each expert gate and up. `make` gets the groups with these; gradients are not clipped."""

    def __init__(self, groups, make):
        super().__init__(groups, {"lr": 0.0})
        self.pieces = [[(p, index) for p in g["params"] for index in self.of(p)] for g in groups]
        self.inner = make([{"params": [torch.nn.Parameter(p.data[i]) for p, i in pieces], "lr": 0.0,
                            "weight_decay": g["weight_decay"]} for g, pieces in zip(groups, self.pieces)])

    @staticmethod
    def of(p):
        if p.dim() < 3:
            return [...]
        halves = [slice(None)] if p.shape[1] == hidden else [slice(p.shape[1] // 2), slice(p.shape[1] // 2, None)]
        return [(e, half) for e in range(p.shape[0]) for half in halves]

    @torch.no_grad()
    def step(self, closure=None):
        for outer, inner, pieces in zip(self.param_groups, self.inner.param_groups, self.pieces):
            inner["lr"] = outer["lr"]
            for mine, (p, index) in zip(inner["params"], pieces):
                mine.grad = p.grad[index].contiguous()
        self.inner.step()


def adafactor(groups):
    return OfFiles(groups, lambda g: Adafactor(g, lr=1e-3, scale_parameter=True, relative_step=False, warmup_init=False,
                                               beta1=None))


def orthogonal(u):
    """torch.optim.Muon's iteration, in u's own precision."""
    tall = u.shape[0] > u.shape[1]
    x = u.T if tall else u
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if tall else x


class MuonOrAdamW(torch.optim.Optimizer):
    """torch.optim.Muon with adjust_lr_fn="match_rms_adamw", for matrices of layers; AdamW for embedding, head, routers and
    vectors."""

    def __init__(self, groups, rest):
        super().__init__(groups, {"lr": 0.0})
        self.rest = rest
        self.adamw = [torch.optim.AdamW([p for p in g["params"] if self.is_rest(p)] or [torch.nn.Parameter(torch.zeros(1))],
                                        lr=0.0, weight_decay=g["weight_decay"]) for g in groups]

    def is_rest(self, p):
        return p.dim() < 2 or min(p.shape) < 8 or p.data_ptr() in self.rest

    @torch.no_grad()
    def step(self, closure=None):
        for g, adamw in zip(self.param_groups, self.adamw):
            adamw.param_groups[0]["lr"] = g["lr"]
            adamw.step()
            for p in (p for p in g["params"] if not self.is_rest(p)):
                m = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                m.lerp_(p.grad, 0.05)
                u = orthogonal(p.grad.lerp(m, 0.95))
                p.mul_(1 - g["lr"] * g["weight_decay"])
                p.add_(u, alpha=-g["lr"] * 0.2 * max(p.shape) ** 0.5)


def muon(groups):
    return OfFiles(groups, lambda g: MuonOrAdamW(g, rest))


def signs(shape, seed, **_):
    """In place of apollo_torch's normal numbers: `seed` is (number of the tensor, how often it was drawn before)."""
    number, drawn = seed
    return drawn_signs(SEED, math.prod(shape), number, drawn).reshape(shape)


def of_layers(params, rest):
    """The matrices of layers, and all else."""
    matrices = [p for p in params if p.dim() == 2 and min(p.shape) >= 8 and p.data_ptr() not in rest]
    return matrices, [p for p in params if not any(p is m for m in matrices)]


class ApolloOrAdamW(torch.optim.Optimizer):
    """apollo_torch's, which is AdamW for what has no rank, after weights have decayed. A gradient that was 0 sets no limit: it
    would make all later steps of an expert without rows nearly 0."""

    def __init__(self, groups, rest, keys):
        super().__init__(groups, {"lr": 0.0})
        apollo_torch.random_projector.stable_randn = signs
        apollo_torch.random_projector.next_seed = lambda seed: (seed[0], seed[1] + 1)
        projected = {"rank": int(keys["rank"]), "update_proj_gap": keys["projection_gap"], "scale": keys.get("direction_scale", 1),
                     "scale_type": "tensor" if keys.get("by_tensor") else "channel", "proj": "random", "proj_type": "std"}
        self.inner = []
        for g in groups:
            matrices, others = of_layers(g["params"], rest)
            inner = apollo_torch.APOLLOAdamW([{"params": ps, **more} for ps, more in ((matrices, projected), (others, {})) if ps],
                                             lr=0.0, weight_decay=0.0)
            for p in matrices:
                inner.state[p]["seed"] = (numbers[p.detach().float().numpy().tobytes()], 0)
            self.inner.append(inner)

    @torch.no_grad()
    def step(self, closure=None):
        for g, inner in zip(self.param_groups, self.inner):
            for p in g["params"]:
                p.mul_(1 - g["lr"] * g["weight_decay"])
            for of in inner.param_groups:
                of["lr"] = g["lr"]
            inner.step()
            for state in inner.state.values():
                if "scaled_grad" in state and not state["scaled_grad"]:
                    del state["scaled_grad"]


class GaloreOrAdamW(torch.optim.Optimizer):
    """galore_torch's, which is AdamW for what has no rank, after weights have decayed. As in the program, projections begin
    with signs, which stay where a gradient has no more singular vectors, and new vectors have the sign that turns them to the side of the old ones:
    moments are kept, and torch's signs are arbitrary."""

    def __init__(self, groups, rest, keys):
        super().__init__(groups, {"lr": 0.0})
        projected = {"rank": int(keys["rank"]), "update_proj_gap": keys["projection_gap"], "scale": keys["galore_scale"],
                     "proj_type": "std"}
        self.inner = []
        for g in groups:
            matrices, others = of_layers(g["params"], rest)
            self.inner.append(galore_torch.GaLoreAdamW(
                [{"params": ps, **more} for ps, more in ((matrices, projected), (others, {})) if ps], lr=0.0, weight_decay=0.0))
            for p in matrices:
                to = galore_torch.galore_projector.GaLoreProjector(projected["rank"], update_proj_gap=keys["projection_gap"],
                                                                   scale=keys["galore_scale"])
                to.number = numbers[p.detach().float().numpy().tobytes()]
                to.get_orthogonal_matrix = functools.partial(self.vectors, to)
                self.inner[-1].state[p]["projector"] = to

    @staticmethod
    def vectors(to, grad, rank, type):
        rank, right = min(rank, *grad.shape), type == "right"
        if to.ortho_matrix is None:
            old = signs((rank, min(grad.shape)), (to.number, 0)) / min(grad.shape) ** 0.5
        else:
            old = to.ortho_matrix if right else to.ortho_matrix.T
        if grad.any():
            u, values, vh = torch.linalg.svd(grad, full_matrices=False)
            p = (vh if right else u.T)[:rank]
            new = p * ((p * old).sum(1, keepdim=True) < 0).double().mul(-2).add(1)
            old = torch.where((values[:rank] > 3e-6 * values[0])[:, None], new, old)
        return old if right else old.T

    step = ApolloOrAdamW.step


def galore(keys):
    return lambda groups: OfFiles(groups, lambda g: GaloreOrAdamW(g, rest, keys))


def apollo(keys):
    return lambda groups: OfFiles(groups, lambda g: ApolloOrAdamW(g, rest, keys))


def numbers_of(model):
    """The number of each tensor of the model's file, by its bytes: its place in the program's layout."""
    weights = load_file(os.path.join(fixture(model), "model.safetensors"))
    glu = [f"{p}_proj.weight" for p in ("gate", "up", "down")]
    ends = ["input_layernorm.weight", *(f"self_attn.{p}_proj.{w}" for w in ("weight", "bias") for p in "qkv"),
            "self_attn.o_proj.weight", "post_attention_layernorm.weight", "mlp.gate.weight",
            *(f"mlp.shared_expert.{p}" for p in glu), "mlp.shared_expert_gate.weight", *(f"mlp.{p}" for p in glu),
            *(f"mlp.experts.{e}.{p}" for e in range(64) for p in glu)]
    names = ["model.embed_tokens.weight", *(f"model.layers.{i}.{end}" for i in range(8) for end in ends)]
    return {weights[n].float().numpy().tobytes(): i for i, n in enumerate(n for n in names if n in weights)}


SEED = 42
APOLLO = {"type": "apollo", "rank": 8, "projection_gap": 7}
GALORE = {"type": "galore", "rank": 8, "projection_gap": 7, "galore_scale": 0.25}
MINI = {"type": "apollo", "rank": 1, "projection_gap": 100, "direction_scale": 16, "by_tensor": 1}
# the keys of [optimizer], the learning rate, and the same in torch
CASES = {
    "lion": ({"type": "lion", "beta1": 0.9, "beta2": 0.99}, 2e-4, lambda groups: Lion(groups, lr=1e-3, betas=(0.9, 0.99))),
    "momentum": ({"type": "sgd", "momentum": 0.9}, 0.02, lambda groups: DecoupledSGD(groups, lr=1e-3, momentum=0.9)),
    "sgd": ({"type": "sgd"}, 0.1, lambda groups: DecoupledSGD(groups, lr=1e-3)),
    "adafactor": ({"type": "adafactor"}, 0.02, adafactor),
    "muon": ({"type": "muon"}, 2e-3, muon),
    "apollo": (APOLLO, 5e-3, apollo(APOLLO)),
    "apollo_mini": (MINI, 5e-3, apollo(MINI)),
    "galore": (GALORE, 5e-3, galore(GALORE)),
}

torch.set_num_threads(1)
samples = [json.loads(line) for line in open(os.path.join(ROOT, "data.jsonl"))]
os.makedirs(os.path.join(ROOT, "optimizers"), exist_ok=True)
wanted = sys.argv[1:] # models and cases
for name in set(wanted) & {"qwen2", "qwen2_moe"} or ("qwen2", "qwen2_moe"):
    for case in set(wanted) & set(CASES) or CASES:
        keys, lr, optimizer = CASES[case]
        clip = 0.5 if case in ("lion", "momentum", "sgd") else 1e30
        model = load(fixture(name), torch.float64)
        hidden = model.config.hidden_size
        rest = {p.data_ptr() for n, p in model.named_parameters()
                if "embed" in n or "lm_head" in n or n.endswith("mlp.gate.weight")}
        numbers = numbers_of(name) if keys["type"] in ("apollo", "galore") else {}
        losses, norms = train_torch(model, samples, "f64", optimizer=optimizer, lr=lr, clip=clip)
        keys = {**keys, **({} if clip == 0.5 else {"grad_clip": 0})}
        to = os.path.join(ROOT, "optimizers", f"{name}-{case}")
        if case == "lion":  # whose test counts the weights that differ
            save_file({k: p.float().contiguous() for k, p in release_state(model).items()}, to + ".safetensors")
        else:
            sums.write(to + ".sums", release_state(model))
        expected = {"made_with": f"transformers {transformers.__version__}, torch {torch.__version__}, "
                    + ", ".join(f"{p} {importlib.metadata.version(p)}" for p in ("lion-pytorch", "apollo-torch", "galore-torch")),
                    "steps": STEPS, "rows": ROWS,
                    "learning_rate": lr, "optimizer": keys, "losses": losses, "norms": norms}
        with open(to + ".json", "w") as f:
            f.write(json.dumps(expected, indent=1) + "\n")
        print(name, case, losses[0], losses[-1], norms[0], norms[-1])
