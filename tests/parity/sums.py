# SPDX-License-Identifier: Apache-2.0
"""A trained tensor is kept as its norm and a few sums of its elements with random signs: of two tensors, the mean square of the
differences of such sums is the square of their distance (Johnson and Lindenstrauss 1984), here to a third or so of it, and no
element can differ unseen. A file has a line of JSON for each tensor: name, shape, sums. Standard library only."""
import array
import itertools
import json
import math
import random

SUMS = 10
BITS = bytes.maketrans(b"01", b"\0\1")


def sums_of(name, numbers):
    """The Euclidean norm, then the sums."""
    total, out = sum(numbers), [math.hypot(*numbers)]
    for k in range(SUMS):
        bits = random.Random(f"{name} {k}").getrandbits(len(numbers))
        plus = sum(itertools.compress(numbers, f"{bits:0{len(numbers)}b}".encode().translate(BITS)))
        out.append(2 * plus - total)
    return out


def write(path, tensors):
    """tensors: {name: a float32 tensor of torch}."""
    with open(path, "w") as f:
        for name, t in sorted(tensors.items()):
            sums = sums_of(name, t.detach().float().flatten().tolist())
            f.write(json.dumps([name, list(t.shape), [float(f"{s:.10g}") for s in sums]]) + "\n")


def read(path):
    """{name: (shape, sums)}"""
    with open(path) as f:
        return {name: (shape, sums) for name, shape, sums in map(json.loads, f)}


def errors(got, want):
    """The distance of each wanted tensor from the one got (of tiny.read_safetensors, in F32), as a part of its norm."""
    found = {}
    for name, (shape, (norm, *sums)) in want.items():
        assert got[name][:2] == ("F32", shape), f"{name}: {got[name][:2]}, not F32 {shape}"
        _, *own = sums_of(name, array.array("f", got[name][2]))
        found[name] = math.dist(own, sums) / math.sqrt(SUMS) / norm
    return found
