# SPDX-License-Identifier: Apache-2.0
"""model.compute = fp8 in torch: each product of a linear layer in layers, forward and both gradients, of codes of E4M3 with one
scale for each operand; what a device multiplies as one matrix (q, k and v; gate and up) has one, over all rows of a micro-batch."""
import functools

import torch
from torch.nn.functional import linear

from parity_choices import F32

JOINED = [("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")]


def coded(x):
    """The values of the codes: the factor is the largest power of two that leaves the largest magnitude within 448."""
    m, e = torch.frexp(x.abs().max().to(F32))
    factor = 2.0 ** ((9 if m <= 0.875 else 8) - e.item()) if m else 1.0
    return (x * factor).to(F32).to(torch.float8_e4m3fn).to(x.dtype) / factor


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(*(q := (coded(x), coded(w))))
        return q[0] @ q[1].T

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dy = coded(dy)
        return dy @ w, dy.flatten(0, -2).T @ x.flatten(0, -2)


def whole(*weights):
    """Layers with a side that is no multiple of 16 are not in FP8."""
    return weights[0].shape[1] % 16 == 0 and sum(w.shape[0] for w in weights) % 16 == 0


class Joined:
    """Linear layers of one input, multiplied as one matrix."""

    def __init__(self, layers):
        self.layers, self.x = layers, None
        for i, layer in enumerate(layers):
            layer.forward = lambda x, i=i: self.output(x, i)

    def output(self, x, i):
        if self.x is not x:
            self.x = x
            y = Product.apply(x, torch.cat([layer.weight for layer in self.layers]))
            self.y = y.split([layer.weight.shape[0] for layer in self.layers], -1)
        return self.y[i] if self.layers[i].bias is None else self.y[i] + self.layers[i].bias


class Down(torch.autograd.Function):
    """An expert's last product, times the weights of its rows: backward takes what comes as it is, and weighted inputs."""

    @staticmethod
    def forward(ctx, x, w, weights):
        ctx.save_for_backward(x, q := coded(w), weights)
        return coded(x) @ q.T * weights

    @staticmethod
    def backward(ctx, dy):
        x, w, weights = ctx.saved_tensors
        dy = coded(dy)
        dx = dy @ w
        return dx * weights, dy.T @ coded(x * weights), (dx * x).sum(-1, keepdim=True)


def run_experts(experts, x, index, weights):
    """As transformers' own way, one expert after the other."""
    out = torch.zeros_like(x)
    for e in index.unique():
        rows, k = torch.where(index == e)
        gate_up, down, of_rows = experts.gate_up_proj[e], experts.down_proj[e], weights[rows, k, None]
        gate, up = (Product.apply if whole(gate_up) else linear)(x[rows], gate_up).chunk(2, -1)
        y = experts.act_fn(gate) * up
        out.index_add_(0, rows, Down.apply(y, down, of_rows) if whole(down) else linear(y, down) * of_rows)
    return out


def run_gated(block, x):
    """A shared expert's gate is in the input of its last product."""
    rows, shared = x.flatten(0, -2), block.shared_expert
    gate = torch.sigmoid(block.shared_expert_gate(rows))
    y = shared.down_proj(shared.act_fn(shared.gate_proj(rows)) * shared.up_proj(rows) * gate)
    _, weights, index = block.gate(rows)
    return (block.experts(rows, index, weights) + y).reshape(x.shape)


def of_layer(module, name):
    """A linear layer, below its adapters; None: it has none of that name."""
    layer = getattr(module, name, None)
    layer = getattr(layer, "base_layer", layer)
    return layer if isinstance(layer, torch.nn.Linear) else None


def install(model):
    """Has the model's products in FP8."""
    done = set()
    for name, module in model.named_modules():
        if ".layers." not in name:
            continue
        for names in JOINED:
            layers = [of_layer(module, n) for n in names]
            if all(layers):
                done.update(map(id, layers))
                if whole(*(layer.weight for layer in layers)):
                    Joined(layers)
        if hasattr(module, "shared_expert_gate"):
            module.forward = functools.partial(run_gated, module)
        if name.endswith(".experts"):
            module.forward = functools.partial(run_experts, module)
    for name, module in model.named_modules():
        if ".layers." in name and type(module) is torch.nn.Linear and id(module) not in done and "lora_" not in name and whole(module.weight):
            Joined([module])
