# SPDX-License-Identifier: Apache-2.0
"""Weights of fixtures, which follow from their names and shapes: FOLDER/X.tensors says what is in X.safetensors, in
lines of dtype, shape, rule and name, as `BF16 96x40 outlier(0.06) model.layers.{0-1}.mlp.up_proj.weight`. The makers in
scripts/reference write such a file and train what follows from it; so do the tests. The numbers are the same everywhere:
bits of the Mersenne Twister, sums of integers, one product and one sum of doubles each. Standard library only.

    seeded.py PROGRAM...      runs PROGRAM... FOLDER, of all fixtures of tests/parity with their weights
"""
import array
import atexit
import functools
import glob
import itertools
import json
import math
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import tempfile

PARITY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "parity")


def words(key, n, each):
    """n times as many numbers of 16 bits as `each`."""
    raw = random.Random(key).getrandbits(16 * n * each).to_bytes(2 * n * each, "little")
    numbers = array.array("H", raw)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def normal(key, shape, std):
    """Sums of four uniform numbers: within 3.5 standard deviations."""
    w, by = words(key, math.prod(shape), 4), std * 1.7320508 / 65536
    return [(a + b + c + d - 131070) * by for a, b, c, d in zip(w[0::4], w[1::4], w[2::4], w[3::4])]


def uniform(key, shape, low, high):
    by = (high - low) / 65536
    return [low + by * w for w in words(key, math.prod(shape), 1)]


def constant(_, shape, value):
    return [value] * math.prod(shape)


def outlier(key, shape, std):
    """Normal, with a column that is four times as large."""
    numbers = normal(key, shape, std)
    numbers[3::shape[-1]] = [4 * x for x in numbers[3::shape[-1]]]
    return numbers


def causal(key, shape, std):
    """A convolution that mostly hands on the token itself."""
    numbers, last = normal(key, shape, std), slice(shape[-1] - 1, None, shape[-1])
    numbers[last] = [x + 0.7 for x in numbers[last]]
    return numbers


RULES = {f.__name__: f for f in (normal, uniform, constant, outlier, causal)}


def encode(dtype, numbers):
    if dtype == "U8":
        return bytes(map(int, numbers))
    raw = array.array("f", numbers)
    if sys.byteorder == "big":
        raw.byteswap()
    raw = bytearray(raw.tobytes())
    if dtype == "WIDE":  # the values that BF16 has, as F32
        raw[0::4] = raw[1::4] = bytes(len(numbers))
    if dtype == "BF16":  # towards zero
        half = bytearray(len(raw) // 2)
        half[0::2], half[1::2] = raw[2::4], raw[3::4]
        raw = half
    return bytes(raw)


def make(name, shape, rule, seed=1):
    """The copy of a tensor beside its adapter has the tensor's numbers."""
    kind, arguments = rule.rstrip(")").split("(")
    name = name.replace("base_model.model.", "").replace(".base_layer.weight", ".weight")
    return RULES[kind](f"{seed} {name}", shape, *map(float, arguments.split(",")))


def expand(name):
    """model.layers.{0-1}.x: of layers 0 and 1."""
    parts = re.split(r"\{(.*?)\}", name)
    for i in range(1, len(parts), 2):
        ends = [list(map(int, part.split("-"))) for part in parts[i].split(",")]
        parts[i] = [str(k) for e in ends for k in range(e[0], e[-1] + 1)]
    return map("".join, itertools.product(*([p] if isinstance(p, str) else p for p in parts)))


def span(numbers):
    """{0-3}, or {0,2}; a number alone as it is."""
    numbers = sorted(numbers)
    if len(numbers) == 1:
        return str(numbers[0])
    whole = numbers == list(range(numbers[0], numbers[-1] + 1))
    return "{" + (f"{numbers[0]}-{numbers[-1]}" if whole else ",".join(map(str, numbers))) + "}"


def together(names):
    """A line for all layers and experts with the same names, where each of the layers has each of the experts."""
    alike = {}
    for name in names:
        alike.setdefault(re.sub(r"\.\d+(?=\.)", ".#", name), []).append(name)
    for template, of in sorted(alike.items()):
        at = [list(map(int, re.findall(r"\.(\d+)(?=\.)", name))) for name in of]
        spans = [span(set(column)) for column in zip(*at)]
        line = re.sub("#", lambda _, it=iter(spans): next(it), template)
        yield from [line] if set(expand(line)) == set(of) else of


def write_spec(path, tensors, seed=1):
    """tensors: {name: (dtype, shape, rule)}"""
    lines = {}
    for name, (dtype, shape, rule) in tensors.items():
        lines.setdefault(f"{dtype} {'x'.join(map(str, shape)) or '-'} {rule}", []).append(name)
    with open(path, "w") as f:
        f.write(f"seed {seed}\n")
        f.writelines(f"{line} {name}\n" for line, names in sorted(lines.items()) for name in together(names))


def read_spec(path):
    """The seed, and what write_spec() was given."""
    tensors = {}
    with open(path) as f:
        seed = f.readline().split()[1]
        for dtype, shape, rule, names in map(str.split, f):
            for name in expand(names):
                tensors[name] = dtype, [int(d) for d in shape.split("x") if d != "-"], rule
    return seed, tensors


def read_safetensors(path):
    """name -> (dtype, shape, bytes)."""
    with open(path, "rb") as f:
        data = f.read()
    n, = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + n])
    return {k: (v["dtype"], v["shape"], data[8 + n + v["data_offsets"][0]:8 + n + v["data_offsets"][1]])
            for k, v in header.items() if k != "__metadata__"}


def write_safetensors(path, tensors):
    """tensors: as read_safetensors() gives them."""
    header, at, body = {"__metadata__": {"format": "pt"}}, 0, []
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
        body.append(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + b"".join(body))


def write_weights(folder):
    """X.safetensors of each X.tensors."""
    for path in glob.glob(os.path.join(folder, "*.tensors")):
        seed, tensors = read_spec(path)
        write_safetensors(path[:-len("tensors")] + "safetensors", {
            name: (dtype.replace("WIDE", "F32"), shape, encode(dtype, make(name, shape, rule, seed)))
            for name, (dtype, shape, rule) in tensors.items()})


@functools.lru_cache(None)
def scratch():
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.lru_cache(None)
def fixture(name):
    """A copy of the folder tests/parity/NAME with its weights, which is there until the process ends."""
    to = os.path.join(scratch(), name)
    shutil.copytree(os.path.join(PARITY, name), to)
    write_weights(to)
    return to


if __name__ == "__main__":
    shutil.copy(os.path.join(PARITY, "data.jsonl"), scratch())
    for config in glob.glob(os.path.join(PARITY, "*", "config.json")):
        fixture(os.path.basename(os.path.dirname(config)))
    sys.exit(subprocess.call([*sys.argv[1:], scratch()]))
