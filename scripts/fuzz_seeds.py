# SPDX-License-Identifier: Apache-2.0
"""Writes first inputs for the fuzzers of tests/fuzz: DIR/<fuzzer>/. Standard library only."""
import glob
import json
import os
import struct
import sys

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
OUT = sys.argv[1]


def put(fuzzer, name, data):
    d = os.path.join(OUT, fuzzer)
    os.makedirs(d, exist_ok=True)
    with open(os.path.join(d, name), "wb") as f:
        f.write(data if isinstance(data, bytes) else data.encode())


def safetensors(header, data):
    h = json.dumps(header).encode()
    return struct.pack("<Q", len(h)) + h + bytes(data)


def tensor(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def shard(samples, vocab, version=3):
    tokens = [t for s in samples for t in s]
    offsets = [0]
    for s in samples:
        offsets.append(offsets[-1] + len(s))
    header = struct.pack("<8sII4Q", b"MTTOKENS", version, 4, vocab, len(tokens), len(samples), 77)
    header += struct.pack("<5Q2I", len(tokens) - len(samples), max(map(len, samples)), 0, 0, 99, 1, 0)
    header += b"input_ids".ljust(24, b"\0") + bytes(160)
    body = struct.pack(f"<{len(tokens)}I", *tokens)
    body += bytes(-len(body) % 8)
    mask = bytes([255] * ((len(tokens) + 7) // 8))
    places = struct.pack(f"<{len(samples)}Q", *range(1, len(samples) + 1))
    return (header.ljust(4096, b"\0") + body + mask + bytes(-len(mask) % 8)
            + struct.pack(f"<{len(offsets)}Q", *offsets) + places)


put("safetensors", "one", safetensors({"a": tensor("F32", [2], 0, 8)}, 8))
put("safetensors", "many", safetensors({"__metadata__": {"format": "pt"}, "w": tensor("BF16", [2, 3], 8, 20),
    "x": tensor("F64", [], 0, 8), "e": tensor("U8", [0], 20, 20), "h": tensor("F16", [1, 2, 1], 20, 24)}, 24))
put("safetensors", "empty", safetensors({}, 0))
for path in glob.glob(os.path.join(ROOT, "tests/parity/*/config.json")):
    put("hf_config", os.path.basename(os.path.dirname(path)), open(path, "rb").read())
for i, case in enumerate(json.load(open(os.path.join(ROOT, "tests/unit/hf/rope.json")))["cases"]):
    put("hf_config", f"rope{i}", json.dumps(case["config"]))
for path in glob.glob(os.path.join(ROOT, "configs/*.ini")):
    put("ini", os.path.basename(path), open(path, "rb").read())
put("ini", "whole", "[model]\npath = m\nfreeze = a*, b\n[data]\ntrain = \"d ; e\", f\n[train]\nsteps = 3k\nbatch_size = 4\n"
    "warmup = 7.5%\n[memory]\ndevice_budget = 1.5GiB\nhost_budget = 80%\n[checkpoint]\nevery = 1h30m\ntime_limit = 2d\n")
put("ini", "variable", "[model]\npath = ${HOME:-x}\n# c\n; d\n[optimizer]\neps = 1e-8\nbeta2=.95\n")
put("shard", "one", shard([[1, 2, 3]], 10))
put("shard", "some", shard([[1, 2, 3], [4, 5], [6, 7, 8, 9, 0, 1, 2]], 300))
LINES = {
    "ids": '{"input_ids": [1, 2, 3]}\n{"input_ids": [4, 5, 6], "labels": [-100, 5, 6]}\n',
    "text": '{"text": "hello"}\n\n{"text": "\\u00e9\\ud83d\\ude00"}\r\n',
    "prompt": '{"prompt": "a", "completion": "bc"}\n',
    "chat": '{"messages": [{"role": "user", "content": "x"}]}\n',
}
for name, text in LINES.items():
    for mode in (0, 66):
        put("samples", f"{name}-{mode}", bytes([mode]) + text.encode())
put("samples", "array", bytes([1]) + b'[{"text": "hello"}, {"text": "you"}]')
put("samples", "plain", bytes([2]) + b"plain text, and more of it\n" * 3)
