# SPDX-License-Identifier: Apache-2.0
"""Makes tests/parity/fp8: a tiny llama and what a few of its steps are in FP8, by numpy alone.

Every linear layer of a layer multiplies codes of E4M3 with one scale for each operand, a power of two from its own
largest magnitude; all else is in bf16 with the roundings of the device (src/README.md, Numerics), sums in double. Run by
hand (scripts/setup --parity makes the environment); the tests need none of it.
    .venv-parity/bin/python scripts/reference/fp8_fixtures.py
"""
import json
import os
import struct

import numpy as np

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tests", "parity", "fp8")
HIDDEN, FFN, LAYERS, HEADS, KV, DIM, VOCAB, LEN, ROWS, STEPS, LR = 32, 48, 2, 4, 2, 16, 96, 24, 3, 4, 0.05
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": FFN,
          "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": DIM,
          "vocab_size": VOCAB, "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
          "initializer_range": 0.1, "tie_word_embeddings": False, "hidden_act": "silu", "bos_token_id": 1,
          "eos_token_id": 2, "torch_dtype": "bfloat16"}


def bf16(x):
    u = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((u + 0x7fff + (u >> 16 & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)


def quantised(x):
    """(values of the codes, their scale)."""
    amax, factor = float(np.abs(x).max()), 1.0
    if amax:
        factor = 2.0 ** (8 - int(np.floor(np.log2(amax))) - 1)
        factor *= 2 if amax * factor * 2 <= 448 else 1
    v = np.abs(x.astype(np.float64)) * factor
    step = 2.0 ** (np.maximum(np.floor(np.log2(np.maximum(v, 1e-300))), -6) - 3)
    return np.copysign(np.rint(v / step) * step, x), 1 / factor


def product(a, b):
    """a b^T of matrices with K along rows, f32, in FP8."""
    (qa, sa), (qb, sb) = quantised(a), quantised(b)
    return (qa @ qb.T * sa * sb).astype(np.float32)


def plain(a, b):
    return (a.astype(np.float64) @ b.astype(np.float64).T).astype(np.float32)


multiply = product


class Linear:
    """y = x W^T (+ c), and backward; multiply() is the product."""
    def __init__(self, w):
        self.w, self.dw = w, np.zeros(w.shape, np.float32)

    def __call__(self, x, c=0):
        return bf16(multiply(x, self.w) + c)

    def backward(self, x, dy):
        self.dw += multiply(dy.T, x.T)
        return bf16(multiply(dy, self.w.T))


class Norm:
    def __init__(self, w):
        self.w, self.dw = w, np.zeros(w.shape, np.float32)

    def stat(self, x):
        return 1 / np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True) + CONFIG["rms_norm_eps"])

    def __call__(self, x):
        return bf16(bf16(x * self.stat(x)) * self.w)

    def backward(self, x, dy, dres):
        r = self.stat(x)
        xhat, g = x * r, dy.astype(np.float64) * self.w
        self.dw += (dy * bf16(xhat)).sum(0)
        return bf16(r * (g - xhat * (g * xhat).mean(1, keepdims=True)) + dres)


def rotate(x, sign):
    """x [n, heads, DIM]; sign -1: the transpose."""
    angle = np.arange(x.shape[0])[:, None] * CONFIG["rope_theta"] ** (-np.arange(0, DIM, 2) / DIM)
    c, s = np.cos(angle)[:, None], sign * np.sin(angle)[:, None]
    a, b = x[..., :DIM // 2], x[..., DIM // 2:]
    return bf16(np.concatenate([a * c - b * s, b * c + a * s], -1))


def softmax(s):
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


class Layer:
    def __init__(self, t, i):
        p = f"model.layers.{i}."
        self.names = [p + "input_layernorm.weight", None, p + "self_attn.o_proj.weight", p + "post_attention_layernorm.weight",
                      None, p + "mlp.down_proj.weight"]
        self.qkv = [p + f"self_attn.{x}_proj.weight" for x in "qkv"]
        self.gate = [p + f"mlp.{x}_proj.weight" for x in ("gate", "up")]
        self.n1, self.n2 = Norm(t[self.names[0]]), Norm(t[self.names[3]])
        self.wqkv, self.wo = Linear(np.concatenate([t[n] for n in self.qkv])), Linear(t[self.names[2]])
        self.wgu, self.wd = Linear(np.concatenate([t[n] for n in self.gate])), Linear(t[self.names[5]])

    def attend(self, qkv):
        n = len(qkv)
        q, k, v = np.split(qkv.reshape(n, -1, DIM), [HEADS, HEADS + KV], 1)
        q, k = rotate(q, 1), rotate(k, 1)
        k, v = np.repeat(k, HEADS // KV, 1), np.repeat(v, HEADS // KV, 1)
        s = np.einsum("qhd,khd->hqk", q, k, dtype=np.float64) * DIM ** -0.5
        return q, k, v, softmax(np.where(np.tri(n, dtype=bool), s, -np.inf))

    def forward(self, x):
        self.x = x
        self.h = self.n1(x)
        self.a = self.wqkv(self.h)
        _, _, v, p = self.attend(self.a)
        self.o = bf16(np.einsum("hqk,khd->qhd", p, v)).reshape(len(x), -1)
        self.y = self.wo(self.o, x)
        self.h2 = self.n2(self.y)
        self.gu = self.wgu(self.h2).astype(np.float64)
        g, u = self.gu[:, :FFN], self.gu[:, FFN:]
        self.act = bf16(g / (1 + np.exp(-g)) * u)
        return self.wd(self.act, self.y)

    def backward(self, d):
        g, u = self.gu[:, :FFN], self.gu[:, FFN:]
        da = self.wd.backward(self.act, d).astype(np.float64)
        s = 1 / (1 + np.exp(-g))
        dgu = bf16(np.concatenate([da * u * s * (1 + g * (1 - s)), da * g * s], 1))
        d = self.n2.backward(self.y, self.wgu.backward(self.h2, dgu), d)
        do = self.wo.backward(self.o, d).reshape(len(d), HEADS, DIM).astype(np.float64)
        q, k, v, p = self.attend(self.a)
        dp = np.einsum("qhd,khd->hqk", do, v)
        o = self.o.reshape(do.shape)
        ds = p * (dp - np.einsum("qhd,qhd->hq", do, o)[..., None]) * DIM ** -0.5

        def of_group(x):
            return bf16(x.reshape(len(d), KV, HEADS // KV, DIM).sum(2))
        dq, dk = bf16(np.einsum("hqk,khd->qhd", ds, k)), of_group(np.einsum("hqk,qhd->khd", ds, q))
        dv = of_group(np.einsum("hqk,qhd->khd", p, do))
        dqkv = np.concatenate([rotate(dq, -1), rotate(dk, -1), dv], 1).reshape(len(d), -1)
        return self.n1.backward(self.x, self.wqkv.backward(self.h, dqkv), d)

    def gradients(self):
        yield from zip(self.names, (self.n1.dw, None, self.wo.dw, self.n2.dw, None, self.wd.dw))
        yield from zip(self.qkv, np.split(self.wqkv.dw, [HEADS * DIM, (HEADS + KV) * DIM]))
        yield from zip(self.gate, np.split(self.wgu.dw, 2))


def step(masters, rows):
    """Loss, and the gradient of each tensor in bf16, as it is applied."""
    t = {n: rounded_away(w) for n, w in masters.items()}
    layers = [Layer(t, i) for i in range(LAYERS)]
    norm, table, head = Norm(t["model.norm.weight"]), t["model.embed_tokens.weight"], t["lm_head.weight"]
    dtable, dhead, loss, n_loss = np.zeros(table.shape, np.float32), np.zeros(head.shape, np.float32), 0.0, ROWS * (LEN - 1)
    micro = []
    for ids in rows:
        x = table[ids]
        for layer in layers:
            x = layer.forward(x)
        micro.append((ids, [dict(vars(layer)) for layer in layers], x))
    for ids, kept, x in micro:
        for layer, v in zip(layers, kept):
            vars(layer).update(v)
        h = norm(x[:-1])
        p = softmax(plain(h, head).astype(np.float64))
        at = np.arange(LEN - 1), ids[1:]
        loss -= np.log(p[at]).sum()
        p[at] -= 1
        dlogits = bf16(p / n_loss)
        dhead += plain(dlogits.T, h.T)
        d = np.zeros_like(x)
        d[:-1] = norm.backward(x[:-1], bf16(plain(dlogits, head.T)), 0)
        for layer in reversed(layers):
            d = layer.backward(d)
        np.add.at(dtable, ids, d)
    g = {"model.norm.weight": norm.dw, "model.embed_tokens.weight": dtable, "lm_head.weight": dhead}
    for layer in layers:
        g.update({n: dw for n, dw in layer.gradients() if n})
    return loss / n_loss, {n: bf16(v) for n, v in g.items()}


def rounded_away(master):
    """The bf16 weight of an FP32 master: half away from zero."""
    return ((master.view(np.uint32) + np.uint32(0x8000)) & np.uint32(0xffff0000)).view(np.float32)


def run(masters, rows):
    masters = {n: w.copy() for n, w in masters.items()}
    losses, norms = [], []
    for _ in range(STEPS):
        loss, g = step(masters, rows)
        losses.append(loss)
        norms.append(float(np.sqrt(sum((v.astype(np.float64) ** 2).sum() for v in g.values()))))
        for n in masters:
            masters[n] -= np.float32(LR) * g[n]
    return {"losses": losses, "norms": norms}


def save(path, tensors):
    head, at, raw = {}, 0, []
    for n, w in tensors.items():
        raw.append((w.view(np.uint32) >> 16).astype(np.uint16).tobytes())
        head[n] = {"dtype": "BF16", "shape": list(w.shape), "data_offsets": [at, at + len(raw[-1])]}
        at += len(raw[-1])
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + b"".join(raw))


def main():
    global multiply
    rng = np.random.default_rng(7)

    def matrix(*shape):
        return bf16(rng.normal(0, 0.15, shape))
    t = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN), "lm_head.weight": matrix(VOCAB, HIDDEN),
         "model.norm.weight": bf16(1 + rng.normal(0, 0.1, HIDDEN))}
    for i in range(LAYERS):
        p = f"model.layers.{i}."
        t |= {p + "input_layernorm.weight": bf16(1 + rng.normal(0, 0.1, HIDDEN)),
              p + "post_attention_layernorm.weight": bf16(1 + rng.normal(0, 0.1, HIDDEN)),
              p + "self_attn.q_proj.weight": matrix(HEADS * DIM, HIDDEN), p + "self_attn.k_proj.weight": matrix(KV * DIM, HIDDEN),
              p + "self_attn.v_proj.weight": matrix(KV * DIM, HIDDEN), p + "self_attn.o_proj.weight": matrix(HIDDEN, HEADS * DIM),
              p + "mlp.gate_proj.weight": matrix(FFN, HIDDEN), p + "mlp.up_proj.weight": matrix(FFN, HIDDEN),
              p + "mlp.down_proj.weight": matrix(HIDDEN, FFN)}
    rows = rng.integers(3, VOCAB, (ROWS, LEN))
    os.makedirs(ROOT, exist_ok=True)
    save(os.path.join(ROOT, "model.safetensors"), t)
    with open(os.path.join(ROOT, "config.json"), "w") as f:
        json.dump(CONFIG, f, indent=1)
    with open(os.path.join(ROOT, "data.jsonl"), "w") as f:
        for ids in rows.tolist():
            f.write(json.dumps({"input_ids": ids, "labels": ids}) + "\n")
    expected = {"made_with": f"numpy {np.__version__}", "rows": ROWS, "seq_len": LEN, "steps": STEPS, "learning_rate": LR}
    for name, multiply in ("fp8", product), ("bf16", plain):
        expected[name] = run(t, rows)
        print(name, expected[name])
    with open(os.path.join(ROOT, "expected.json"), "w") as f:
        json.dump(expected, f, indent=1)
        f.write("\n")


if __name__ == "__main__":
    main()
