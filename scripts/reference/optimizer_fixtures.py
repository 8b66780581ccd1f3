#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""optimizer_fixtures.py OUT: oracles of the lean optimizers in numpy, for tests/unit/optim/test_lean.c.

AdamW with states in blocks of 8 bits is the update of torch.optim.AdamW with states decoded to f32 before and encoded
after, companded as FlashOptim 0.1.4 does (arXiv 2602.23349), with scales in bf16. Lion is lion-pytorch 0.2.5's, sgd
torch.optim.SGD's with decoupled decay. The file is little-endian: N and STEPS (i32), weights [N] and gradients
[STEPS, N] at first (f32); then what is expected: of 8-bit AdamW the weights (f32), codes of m (i8) and v (u8), scales
of m and v (f32, [N / 32]); of lion the weights and m; of sgd the weights and m (f32).
Last, of AdamW with f32 states the bits of masters (u32): of 24 bits, rounded after each update; and of bf16, rounded by
chance with Philox4x32-10 (Salmon et al. 2011), keyed by SEED, of stream 0xA6 << 56 | update << 24 | TENSOR."""
import sys

import numpy as np

N, STEPS, BLOCK = 320, 20, 32
LR, B1, B2, EPS, WD = 1e-3, 0.9, 0.99, 1e-8, 0.1
SEED, TENSOR = 5, 9
f32 = np.float32


def bf16(x):
    u = np.ascontiguousarray(x, f32).view(np.uint32)
    return ((u + 0x7fff + ((u >> 16) & 1)) & 0xffff0000).astype(np.uint32).view(f32)


def encode_m(m):
    a = np.maximum(np.abs(m).reshape(-1, BLOCK).max(1), f32(1e-12))
    x = m.reshape(-1, BLOCK) / a[:, None]
    q = np.floor(f32(127) * (f32(2) * x / (f32(1) + np.abs(x))) + f32(0.5))
    return np.clip(q, -127, 127).astype(np.int8), bf16(a)


def decode_m(q, a):
    y = q.astype(f32) / f32(127)
    return (a[:, None] * (y / (f32(2) - np.abs(y)))).reshape(-1)


def encode_v(v):
    root = np.sqrt(v).reshape(-1, BLOCK)
    a = root.max(1)
    q = np.floor(f32(255) * root / np.where(a > 0, a, f32(1))[:, None] + f32(0.5))
    return np.clip(q, 0, 255).astype(np.uint8), bf16(a)


def decode_v(q, a):
    return (a[:, None] * q.astype(f32) / f32(255)).reshape(-1) ** 2


def adamw8(w, grads):
    m, v = encode_m(np.zeros(N, f32)), encode_v(np.zeros(N, f32))
    for t, g in enumerate(grads, 1):
        m1, v1 = decode_m(*m), decode_v(*v)
        m1 = m1 + f32(1 - B1) * (g - m1)
        v1 = f32(B2) * v1 + f32(1 - B2) * g * g
        w = w * f32(1 - LR * WD)
        w = w - f32(LR / (1 - B1**t)) * (m1 / (np.sqrt(v1) / f32(np.sqrt(1 - B2**t)) + f32(EPS)))
        m, v = encode_m(m1), encode_v(v1)
    return [w, m[0], v[0], m[1], v[1]]


def lion(w, grads):
    m = np.zeros(N, f32)
    for g in grads:
        w = w * f32(1 - LR * WD) - f32(LR) * np.sign(m * f32(B1) + f32(1 - B1) * g)
        m = m * f32(B2) + f32(1 - B2) * g
    return [w, m]


def sgd(w, grads):
    m = np.zeros(N, f32)
    for g in grads:
        m = f32(B1) * m + g
        w = w * f32(1 - LR * WD) - f32(LR) * m
    return [w, m]


def round24(w, t):
    u24 = (w.view(np.uint32) + np.uint32(0x80)) >> 8
    hi, low = (u24 + np.uint32(0x80)) >> 8, (u24 & 0xff).astype(np.uint8).astype(np.int8)
    return (((hi << 8) + low.astype(np.int32).view(np.uint32)) << 8).astype(np.uint32)


def philox(counter, key):
    c, k = [np.array(x, np.uint64) for x in counter], [int(x) for x in key]
    for _ in range(10):
        p0, p1 = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        low, high = lambda x: x & np.uint64(0xffffffff), lambda x: x >> np.uint64(32)
        c = [high(p1) ^ c[1] ^ np.uint64(k[0]), low(p1), high(p0) ^ c[3] ^ np.uint64(k[1]), low(p0)]
        k = [(k[0] + 0x9E3779B9) & 0xffffffff, (k[1] + 0xBB67AE85) & 0xffffffff]
    return np.stack(c, -1).astype(np.uint32)


def round_by_chance(w, t):
    stream, block = 0xA6 << 56 | t << 24 | TENSOR, np.arange(N // 8)
    zero = np.zeros_like(block)
    words = philox((block, zero, zero + (stream & 0xffffffff), zero + (stream >> 32)), (SEED, 0)).reshape(-1)
    halves = np.stack([words & 0xffff, words >> 16], -1).reshape(-1)
    return (w.view(np.uint32) + halves) & np.uint32(0xffff0000)


def adamw_master(w, grads, rounded):
    m, v = np.zeros(N, f32), np.zeros(N, f32)
    for t, g in enumerate(grads, 1):
        m = m + f32(1 - B1) * (g - m)
        v = f32(B2) * v + f32(1 - B2) * g * g
        w = w * f32(1 - LR * WD)
        w = w - f32(LR / (1 - B1**t)) * (m / (np.sqrt(v) / f32(np.sqrt(1 - B2**t)) + f32(EPS)))
        w = rounded(w, t).view(f32)
    return [w.view(np.uint32)]


r = np.random.default_rng(7)
w0 = r.normal(0, 0.05, N).astype(f32)
# of very different sizes by block, as moments of large models have; a block of zeros
size = np.repeat(10.0 ** r.uniform(-9, 1, N // BLOCK), BLOCK)
size[:BLOCK] = 0
grads = (r.normal(0, 1, (STEPS, N)) * size).astype(f32)
with open(sys.argv[1], "wb") as f:
    f.write(np.array([N, STEPS], np.int32).tobytes() + w0.tobytes() + grads.tobytes())
    wide24, wide16 = round24(w0, 0).view(f32), (w0.view(np.uint32) + np.uint32(0x8000) & np.uint32(0xffff0000)).view(f32)
    masters = adamw_master(wide24, grads, round24) + adamw_master(wide16, grads, round_by_chance)
    for part in adamw8(w0, grads) + lion(w0, grads) + sgd(w0, grads) + masters:
        f.write(np.ascontiguousarray(part).tobytes())
