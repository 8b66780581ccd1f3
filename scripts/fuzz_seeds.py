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


def shard(samples, vocab, version=4):
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
SERVED = json.load(open(os.path.join(ROOT, "tests/cli/served.json")))
QUANTISED = {**{name: o["quantization_config"] for name, o in SERVED.items()},
             "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head*", "*.self_attn*"]},
             "rows": {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["re:.*mlp.(gate|up)_proj"],
                      "config_groups": {"g": {"weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}}}}}
for name, value in QUANTISED.items():
    config = json.load(open(os.path.join(ROOT, "tests/parity/qwen3/config.json")))
    put("hf_config", "served-" + name, json.dumps({**config, "quantization_config": value}))


def packed(pieces):
    header, at = {}, 0
    for name, (dtype, shape, n) in pieces.items():
        header[name], at = tensor(dtype, shape, at, at + n), at + n
    return safetensors(header, bytes((i * 37 + 60) % 126 for i in range(at)))


for name, which, pieces in (
        ("nvfp4", 0, {"_packed": ("U8", [16, 32], 512), "_scale": ("F8_E4M3", [16, 4], 64), "_global_scale": ("F32", [1], 4)}),
        ("modelopt", 0, {"": ("U8", [16, 32], 512), "_scale": ("F8_E4M3", [16, 4], 64), "_scale_2": ("F32", [], 4)}),
        ("mxfp4", 0, {"_packed": ("U8", [16, 32], 512), "_scale": ("U8", [16, 2], 32)}),
        ("int4", 0, {"_packed": ("I32", [16, 8], 512), "_scale": ("BF16", [16, 2], 64), "_shape": ("I64", [2], 16)}),
        ("zeros", 0, {"_packed": ("I32", [16, 8], 512), "_scale": ("F16", [16, 1], 32), "_zero_point": ("I32", [2, 1], 8),
                      "_shape": ("I64", [2], 16)}),
        ("gptq", 0, {"qweight": ("I32", [8, 16], 512), "scales": ("F16", [2, 16], 64), "qzeros": ("I32", [2, 2], 16)}),
        ("awq", 0, {"qweight": ("I32", [64, 2], 512), "scales": ("F16", [1, 16], 32), "qzeros": ("I32", [1, 2], 8)}),
        ("rows", 1, {"": ("F8_E4M3", [130, 40], 5200), "_scale": ("BF16", [130, 1], 260)}),
        ("blocks", 1, {"": ("F8_E4M3", [130, 40], 5200), "_scale_inv": ("F32", [2, 1], 8)}),
        ("e8m0", 1, {"": ("F8_E4M3", [130, 40], 5200), "_scale": ("F8_E8M0", [2, 1], 2)}),
        ("parts", 0, {"": ("F8_E4M3", [16, 64], 1024), "_scale": ("U8", [16, 2], 32)}),
        ("experts", 3, {"": ("F8_E4M3", [2, 32, 64], 4096), "_scale_inv": ("F32", [2, 2, 2], 32)}),
        ("expert-rows", 4, {"": ("F8_E4M3", [2, 260, 40], 20800), "_scale": ("BF16", [2, 260, 1], 1040)}),
        ("one-each", 5, {"": ("F8_E4M3", [2, 6, 16], 192), "_scale_inv": ("F32", [2, 1, 1], 8)}),
        ("one", 2, {"": ("F8_E4M3", [3, 16], 48), "_scale": ("F16", [1], 2)}),
        ("nf4", 0, {"": ("U8", [512, 1], 512), ".absmax": ("F32", [16], 64), ".quant_map": ("F32", [16], 64),
                    ".quant_state.bitsandbytes__nf4": ("U8", [80], 80)})):
    put("packed", name, bytes([which]) + packed({("w.weight" if k[:1] in "_." else "w.") + k: v for k, v in pieces.items()}))
for i, case in enumerate(json.load(open(os.path.join(ROOT, "tests/unit/hf/rope.json")))["cases"]):
    put("hf_config", f"rope{i}", json.dumps(case["config"]))
for path in glob.glob(os.path.join(ROOT, "configs/*.ini")):
    put("ini", os.path.basename(path), open(path, "rb").read())
put("ini", "whole", "[model]\npath = m\nfreeze = a*, b\n[data]\ntrain = \"d ; e\", f\n[train]\nsteps = 3k\nbatch_size = 4\n"
    "warmup = 7.5%\n[memory]\ndevice_budget = 1.5GiB\nhost_budget = 80%\n[checkpoint]\nevery = 1h30m\ntime_limit = 2d\n")
put("ini", "variable", "[model]\npath = ${HOME:-x}\n# c\n; d\n[optimizer]\neps = 1e-8\nbeta2=.95\n")
put("ini", "include", "include = other.ini\n[train]\nsteps = 3\n\0[model]\npath = m\n[data]\ntrain = d\n")
put("ini", "itself", "include = first.ini\n[model]\npath = m\n")
for path in glob.glob(os.path.join(ROOT, "configs/machines/*.ini")):
    put("machine", os.path.basename(path), open(path, "rb").read())
put("machine", "names", "[machine]\nname = \" a card; in quotes \"\ngpu = a \"card\";two\nfingerprint = \"; a\"\n")
put("machine", "measured", "[compute]\nbf16_tflops = 100 ; measured\n[host]\ndram_gbs = 50\nadam_ns_4 = 0.3\n")
STATE = {"version": 1, "step": "4", "updates": "4", "skips": "0", "skips_in_row": "0", "tokens": "9", "loss_tokens": "9",
         "steps_per_epoch": "4", "total_steps": "8", "data_hash": "77", "best_step": "2", "bad_evals": "0", "seconds": 1.5,
         "best_loss": 2.5, "config": "[train]\nsteps = 8\n", "run": "0123456789abcdef", "ancestors": [
             {"run": "fedcba9876543210", "step": "2", "state.json": "0011223344556677"}], "frozen": {
                 "w": {"file": "model.safetensors", "xxh3": "0011223344556677"}}, "log_history": [{"step": 1, "loss": 3}],
         "files": {"model.safetensors": {"size": 10, "xxh3": "0011223344556677", "tensors": {"w": "0011223344556677"}}}}
put("checkpoint", "state", json.dumps(STATE))
put("checkpoint", "numbers", json.dumps({k: int(v) if isinstance(v, str) and v.isdigit() else v for k, v in STATE.items()}))
put("checkpoint", "manifest", " " + json.dumps({"version": 1, "files": STATE["files"], "run": STATE["run"]}))
put("checkpoint", "seal", json.dumps(STATE) + "\0" + json.dumps({"file": "state.json", "xxh3": "0011223344556677",
                                                                  "seal": "0011223344556677"}))
put("index", "two", json.dumps({"metadata": {"total_size": 6}, "weight_map": {"w": "a.safetensors", "x": "b.safetensors"}}))
put("index", "base", json.dumps({"metadata": {"base_model": "."}, "weight_map": {
    "w": "a.safetensors", "x": "frozen-tensors-are-in-the-base-model.safetensors"}}))
put("dataset_info", "some", json.dumps({"a": {"file_name": "a.json", "columns": {"prompt": "q", "response": "a"}},
                                        "d": {"file_name": "d", "formatting": "sharegpt", "tags": {"role_tag": "from"}},
                                        "hub": {"hf_hub_url": "x/y"}}))
RUN = {"name": "a run", "model": "m", "config": "[train]\nsteps = 2\n", "device": "cpu", "memory": [
    {"tier": "host", "use": "planes", "bytes": 100}, {"tier": "host", "use": "no bytes"},
    {"tier": "host", "use": "too many", "bytes": 1e300}, {"tier": "host", "use": "too few", "bytes": -1}]}
ROWS = [{"hash": "0", "job": "j", "axes": {"a.b": "1", "c": "x"}, "status": "ok", "tok_s": 5, "predicted": 4},
        {"job": "k", "axes": {"a.b": "2", "c": "x"}, "status": "no fit"}]
TRACE = {"traceEvents": [{"name": "update", "ph": "X", "ts": 1, "dur": 2, "pid": 0, "tid": 3, "args": {"unit": "layer 0"}},
                         {"name": "thread_name", "ph": "M", "pid": 1, "tid": 0, "args": {"name": "compute"}}]}
for i, value in enumerate((ROWS, RUN, TRACE)):
    put("report", f"file{i}", bytes([i]) + json.dumps(value).encode())
put("report", "sweep", bytes([0]) + json.dumps({"rows": ROWS, "median_error": 0.1}).encode())
put("report", "metrics", bytes([3]) + b'{"step":1,"loss":2}\n{"step":2,"eval_loss":2,"layer":0,"expert_entropy":1}\n{"st')
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
