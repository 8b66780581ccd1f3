# SPDX-License-Identifier: Apache-2.0
"""Makes tests/parity/mezo: fifty steps of MeZO (Malladi et al. 2023, algorithm 1) in double, by forward passes of transformers and
PEFT with weights that have the program's noise added: Philox, and the points of the normal distribution in float32, here by numpy.
Which number a tensor's noise has is found by a step of the program with signs. Run by hand; the test needs no torch:
    MEGATRAIN=build/cli/megatrain .venv-parity/bin/python scripts/reference/mezo_fixtures.py [CASE]...
"""
import json
import math
import os
import sys
import tempfile

import numpy
import torch
import transformers

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tests", "parity")
sys.path.insert(0, ROOT)
import sums  # of tests/parity
import test_mezo as ours
from parity import ROWS, load, lr_at, release_state
from philox import philox
from seeded import fixture

SEED, f32 = 42, numpy.float32


def log(x):
    """fdlibm's logf."""
    u = x.view(numpy.uint32) + numpy.uint32(0x3f800000 - 0x3f3504f3)
    k = ((u >> 23).astype(numpy.int32) - 0x7f).astype(f32)
    f = ((u & numpy.uint32(0x7fffff)) + numpy.uint32(0x3f3504f3)).view(f32) - f32(1)
    s = f / (f32(2) + f)
    z, half = s * s, f32(0.5) * f * f
    w = z * z
    r = z * (f32(0.66666662693) + w * f32(0.28498786688)) + w * (f32(0.40000972152) + w * f32(0.24279078841))
    return s * (half + r) + k * f32(9.0580006145e-06) - half + f + k * f32(6.9313812256e-01)


def normal(words):
    """Giles 2010, in single precision."""
    p = ((words >> 9).astype(f32) + f32(0.5)) * f32(2.0 ** -23)
    w = -log(f32(4) * p * (f32(1) - p))
    near = [2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503, -0.00417768164,
            0.246640727, 1.50140941]
    far = [-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613, 0.00943887047,
           1.00167406, 2.83297682]

    def horner(c, x):
        y = numpy.full_like(x, c[0])
        for k in c[1:]:
            y = f32(k) + y * x
        return y
    return f32(1.41421356) * (f32(2) * p - f32(1)) * numpy.where(
        w < 5, horner(near, w - f32(2.5)), horner(far, numpy.sqrt(w) - f32(3)))


def noise(kind, n, number, step, sample, seed=SEED):
    """The noise of the first n elements of a tensor."""
    block = 128 if kind == "sign" else 4
    words = philox(seed, 0xA9 << 56 | step << 24 | number, (n + block - 1) // block, sample << 48).astype(numpy.uint32)
    if kind == "sign":
        return 1.0 - 2.0 * numpy.unpackbits(words.astype("<u4").view(numpy.uint8), bitorder="little")[:n]
    return normal(words)[:n].astype(numpy.float64)


def takes(layer, n_layers, share, step):
    """Whether a layer takes part in a step: mt_permute() of 64-bit numbers, whose rounds are four."""
    if layer is None:
        return True
    half = ((n_layers - 1).bit_length() + 1) // 2
    mask, i = (1 << half) - 1, layer
    while True:
        left, right = i >> half, i & mask
        for r in range(4):
            words = philox(SEED ^ r << 56, 0xAA << 56 | step, 1, right)
            left, right = right, left ^ (int(words[0]) << 32 | int(words[1])) & mask
        i = left << half | right
        if i < n_layers:
            return i < max(round(share * n_layers), 1)


def numbers_of(case, expected, start):
    """By the names of what is trained: a step of megatrain changes each weight by its slope times a sign. Small tensors need
    several seeds."""
    found = {name: range(400) for name in start}
    for seed in range(1, 4):
        with tempfile.TemporaryDirectory() as tmp:
            once = {**expected, "steps": 1, "learning_rate": 1e-2, "mezo": {"noise": "sign"}}
            _, checkpoint = ours.train(tmp, case, once, train__warmup=0, optimizer__weight_decay=0, train__schedule="constant",
                                       train__seed=seed)
            after = ours.trained(checkpoint, case)
        for name, w in start.items():
            moved = torch.frombuffer(bytearray(after[name][2]), dtype=torch.float32).double() - w.double().flatten()
            sign = numpy.sign(moved.numpy())
            found[name] = [k for k in found[name] if abs(numpy.dot(noise("sign", len(sign), k, 0, 0, seed), sign)) == len(sign)]
    assert all(len(k) == 1 for k in found.values()), found
    return {name: k[0] for name, k in found.items()}


def loss_of(model, samples, step):
    batch = [samples[i % len(samples)] for i in range(step * ROWS, (step + 1) * ROWS)]
    total, loss = sum(sum(l != -100 for l in s["labels"][1:]) for s in batch), 0.0
    for s in batch:
        logits = model(input_ids=torch.tensor([s["input_ids"]])).logits
        loss += torch.nn.functional.cross_entropy(logits[0, :-1], torch.tensor(s["labels"][1:]), ignore_index=-100,
                                                  reduction="sum").item()
    return loss / total


def layer_of(name):
    return int(name.split("layers.")[1].split(".")[0]) if "layers." in name else None


def size_of(w):
    """Of its bf16, rounded half away from zero: the bits without the sign."""
    return (((w.float().view(torch.int32) & 0x7fffffff) + 0x8000) >> 16).long()


def limit_of(w, small):
    """The least size that so many weights do not exceed; of zeros alone, any."""
    sizes = size_of(w).flatten().sort().values
    limit = int(sizes[math.ceil(small * len(sizes)) - 1])
    return 0x7fff if small == 1 or not limit else limit


@torch.no_grad()
def train(model, params, numbers, samples, rate, keys, steps):
    eps, q, share = keys.get("eps", 1e-3), keys.get("samples", 1), keys.get("layers", 1)
    limits = {n: limit_of(p, keys.get("small", 1)) for n, p in params.items()}
    losses, norms, n_layers = [], [], model.config.num_hidden_layers
    for step in range(steps):
        start = {n: p.detach().clone() for n, p in params.items()}
        moving = [n for n in params if takes(layer_of(n), n_layers, share, step)]
        slopes, seen, along = [], [], {n: 0.0 for n in moving}
        for s in range(q):
            z = {n: torch.from_numpy(noise(keys["noise"], params[n].numel(), numbers[n], step, s)).view_as(params[n])
                 * (size_of(start[n]) <= limits[n]) for n in moving}
            both = []
            for sign in 1, -1:
                for n in moving:
                    params[n].copy_(start[n] + sign * eps * z[n])
                both.append(loss_of(model, samples, step))
            slopes.append((both[0] - both[1]) / (2 * eps))
            seen += both
            for n in moving:
                along[n] = along[n] + slopes[-1] / q * z[n]
        lr = lr_at(step, steps, 2) / 1e-3 * rate
        for n in params:
            decay = 0.0 if "bias" in n or "norm" in n else 0.1
            params[n].copy_(start[n] - lr * (along[n] + decay * start[n]) if n in along else start[n])
        losses.append(sum(seen) / len(seen))
        norms.append((sum(g * g for g in slopes) / q) ** 0.5)
    return losses, norms


torch.set_num_threads(1)
samples = [json.loads(line) for line in open(os.path.join(ROOT, "data.jsonl"))]
os.makedirs(os.path.join(ROOT, "mezo"), exist_ok=True)
for case, (name, rate, keys) in ours.CASES.items():
    if sys.argv[1:] and case not in sys.argv[1:]:
        continue
    model = load(fixture(name), torch.float64).eval()
    steps = 25 if "small" in keys else 50  # then rounding takes a weight at its limit to the other side
    expected = {"made_with": f"transformers {transformers.__version__}, torch {torch.__version__}", "steps": steps, "rows": ROWS,
                "learning_rate": rate, "model": name, "mezo": keys}
    if case.startswith("adapters"):
        import peft
        model = peft.PeftModel.from_pretrained(model, fixture("adapters/llama/start"), is_trainable=True,
                                               autocast_adapter_dtype=False).double().eval()
        params = {n.replace(".default", ""): p for n, p in model.named_parameters() if "lora_" in n}
    else:
        params = dict(model.named_parameters())
    numbers = numbers_of(case, expected, {n: p.detach() for n, p in params.items()})
    losses, norms = train(model, params, numbers, samples, rate, keys, steps)
    state = params if case.startswith("adapters") else release_state(model)
    sums.write(os.path.join(ROOT, "mezo", f"{case}.sums"), state)
    with open(os.path.join(ROOT, "mezo", f"{case}.json"), "w") as f:
        f.write(json.dumps({**expected, "losses": losses, "norms": norms}, indent=1) + "\n")
    print(case, losses[0], losses[-1], norms[0], norms[-1])
