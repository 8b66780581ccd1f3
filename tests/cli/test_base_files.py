#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""memory.base = files with every form in which files have weights: the bits of a base in host memory, read and not copied.

test_base_files.py CASE... (a function of this file)
"""
import bisect
import glob
import json
import math
import mmap
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time

from test_base import cached_bytes, drop_from_cache, io_counters, settings, tensor_at, turn_a_bit
from test_packed import bf16_bytes, decode_nf4, e4m3, f32, floats, write_decoded
from seeded import PARITY
from tiny import (BINARY, FULL, base, config, fixture, losses, megatrain, metrics, patience, planes, read_safetensors,
                  write_data, write_ini, write_model, write_safetensors)

DENSE = dict(hidden_size=256, intermediate_size=2304, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             head_dim=32)
# an expert's matrices have 1 MiB in bf16
EXPERTS = dict(hidden_size=512, intermediate_size=1024, num_local_experts=4, num_experts_per_tok=2, num_hidden_layers=2,
               vocab_size=272, head_dim=64, num_attention_heads=4, num_key_value_heads=2)


def make(tmp, name, cfg):
    """A random model in bf16, as other programs write it."""
    made, out = os.path.join(tmp, name + "-made"), os.path.join(tmp, name)
    data = write_data(os.path.join(tmp, "data.jsonl"), vocab=cfg["vocab_size"])
    write_model(made, cfg)
    first = os.path.join(tmp, name + "-first")
    megatrain("-q", "run", write_ini(first + ".ini", base(made, data, first, train__steps=1, model__dtype="bf16")))
    megatrain("export", f"{first}/checkpoint-1", out, "--shard-size", "5MB")
    shutil.rmtree(f"{out}/megatrain")
    for d in made, first:
        shutil.rmtree(d)
    return out, data


def rewrite(model, out, change):
    """A copy whose every file's tensors went through change(name, (dtype, shape, bytes), tensors) -> the same or None."""
    shutil.copytree(model, out)
    shutil.rmtree(f"{out}/megatrain", ignore_errors=True)
    kept = {}
    for path in glob.glob(f"{out}/*.safetensors"):
        t = read_safetensors(path)
        new = {n: change(n, v, t) for n, v in t.items()}
        write_safetensors(path, {n: v for n, v in new.items() if v})
        kept.update({n: os.path.basename(path) for n, v in new.items() if v})
    for index in glob.glob(f"{out}/*.index.json"):
        with open(index, "w") as f:
            json.dump({"weight_map": kept}, f)
    return out


def bits_below(data, size, mask):
    """Other low bits in each element, so that it is not exact in bf16."""
    n = len(data) // size
    low = int.from_bytes(mask.to_bytes(size, "little") * n, "little")
    return (int.from_bytes(data, "little") ^ low).to_bytes(len(data), "little")


def as_f32(name, t, _=None):
    dtype, shape, data = t
    wide = bytearray(2 * len(data))
    wide[2::4], wide[3::4] = data[0::2], data[1::2]
    return "F32", shape, bits_below(bytes(wide), 4, 0x9a53 if len(shape) > 1 else 0)


def as_f16(name, t, _=None):
    _, shape, data = as_f32(name, t)
    return "F16", shape, bits_below(struct.pack(f"<{len(data) // 4}e", *struct.unpack(f"<{len(data) // 4}f", data)), 2, 5)


def without_nesting(name, t, tensors):
    """bitsandbytes' NF4 with scales in F32."""
    weight = name.split(".weight")[0] + ".weight"
    if name.endswith((".nested_absmax", ".nested_quant_map")):
        return None
    if name.endswith(".absmax"):
        table, nested = floats(tensors[weight + ".nested_quant_map"][2]), floats(tensors[weight + ".nested_absmax"][2])
        off = f32(json.loads(tensors[weight + ".quant_state.bitsandbytes__nf4"][2])["nested_offset"])
        scales = [f32(f32(table[q] * nested[i // 256]) + off) for i, q in enumerate(t[2])]
        return "F32", t[1], struct.pack(f"<{len(scales)}f", *scales)
    if name.endswith("bitsandbytes__nf4"):
        note = json.dumps({k: v for k, v in json.loads(t[2]).items() if not k.startswith("nested")}).encode()
        return "U8", [len(note)], note
    return t


def stored_bytes(model, names):
    return sum(len(v[2]) for f in glob.glob(f"{model}/*.safetensors") for n, v in read_safetensors(f).items()
               if re.search(names, n))


def check_writes(out, used):
    """Nothing but what is in the run's folder was written: of the base, only names and sums are there (cli/adapters)."""
    kept = sum(os.path.getsize(f) for f in glob.glob(f"{out}/**/*", recursive=True) if os.path.isfile(f) and not os.path.islink(f))
    assert max(used["wchar"], used["write_bytes"]) < kept + (1 << 20), (used, kept)


def run(tmp, model, data, home, *args, name="out", expect=0, **over):
    out = os.path.join(tmp, name)
    if "--resume" not in args:
        shutil.rmtree(out, ignore_errors=True)
    keys = dict(model__freeze="", adapter__kind="lora", adapter__rank=4, train__learning_rate="1e-2", memory__device_budget="128MiB", **over)
    ini = settings(tmp, model, data, out, memory__base=home, **keys)
    before = io_counters()
    said = megatrain("run", ini, *args, expect=expect, env={"MEGATRAIN_POISON": "1"}).stderr
    if home == "files" and not expect:
        check_writes(out, {k: v - before[k] for k, v in io_counters().items()})
    return out, said


def result(out):
    folder = f"{out}/checkpoint-3"
    return losses(out), planes(folder), read_safetensors(f"{folder}/adapter_model.safetensors")


def steps_leave_the_page_cache_alone(tmp, model, data, **keys):
    """Once small tensors have been loaded, with what the system reads ahead of them."""
    files, out = glob.glob(f"{model}/*.safetensors"), os.path.join(tmp, "cached")
    shutil.rmtree(out, ignore_errors=True)
    ini = settings(tmp, model, data, out, **{**keys, "memory__base": "files", "train__steps": 100000})
    p = subprocess.Popen([BINARY, "run", ini, "--no-save"], stderr=subprocess.PIPE, text=True)
    try:
        wait_for_steps(out, p, 2)
        if not all([drop_from_cache(f) for f in files]):
            print("   (no direct I/O here: the page cache was not looked at)")
            return
        wait_for_steps(out, p, len(losses(out)) + 3)
        cached = sum(cached_bytes(f) for f in files)
        assert cached == 0, (model, cached)
    finally:
        p.kill()
        p.wait()


def wait_for_steps(out, p, n):
    until = time.time() + patience(120)
    while p.poll() is None and time.time() < until:
        if os.path.exists(f"{out}/metrics.jsonl") and len(losses(out)) >= n:
            return
        time.sleep(0.05)
    raise AssertionError((p.poll(), p.communicate()))


def same_bits(tmp, model, data, names, dtypes=("bf16",), placements=(), **over):
    """names: tensors of the files that must be read in place. A bit of one turns: it is found from either home."""
    dtypes, placements = (("bf16", "f32"), placements) if FULL else (dtypes, placements[:1] if len(dtypes) > 1 else ())
    size, kept = stored_bytes(model, names), None
    for dtype in dtypes:
        keys = dict(over, model__dtype=dtype)
        want, said = run(tmp, model, data, "host", name="host-" + dtype, **keys)
        assert "read in place" not in said
        want = result(want)
        for i, more in enumerate(({"memory__adapters": "resident"}, *placements)):
            out, said = run(tmp, model, data, "files", name=f"files-{dtype}-{i}", **{**keys, **more})
            assert result(out) == want, (model, dtype, more, "its home changes bits")
            mib = float(re.search(r"Base +([\d.]+) MiB of frozen weights are read in place", said).group(1))
            assert abs(mib - size / 2**20) < 0.02 * mib, (mib, size / 2**20)
            step = [m for m in metrics(out) if "loss" in m][-1]
            assert step["disk_read"]["weights"] >= size and not sum(step["disk_write"].values()), step
            # nor is any of it in host memory: the row of a kind that is in files is that of what is small
            rows = re.findall(r"^  host +(frozen weights[^ ]*(?: \([^)]*\))?) +([\d.]+ \S+)", said, re.M)
            assert all("small" in r[0] for r in rows), rows
    steps_leave_the_page_cache_alone(tmp, model, data, model__freeze="", adapter__kind="lora", adapter__rank=4,
                                     memory__device_budget="128MiB", **keys)
    # half of the steps from one home, half from the other: the sums in the checkpoint are the same
    whole = losses(os.path.join(tmp, "files-%s-0" % dtype)), result(os.path.join(tmp, "files-%s-0" % dtype))[1]
    for i, (first, then) in enumerate((("files", "host"), ("host", "files"))):
        out, _ = run(tmp, model, data, first, "--max-steps", 2, name=f"resumed-{i}", **keys)
        run(tmp, model, data, then, "--resume", name=f"resumed-{i}", **keys)
        assert (losses(out), planes(f"{out}/checkpoint-3")) == whole, (first, then)
    read = {n: v for f in glob.glob(f"{model}/*.safetensors") for n, v in read_safetensors(f).items() if re.search(names, n)}
    name = max(sorted(read), key=lambda n: len(read[n][2]))
    path, at = tensor_at(model, name)
    turn_a_bit(path, at + 70)
    stem = name.split(".weight")[0].split("_proj")[0].replace("gate_up", "gate").replace("experts.", "experts.0.")
    for home in "files", "host":
        said = run(tmp, model, data, home, "--resume", name="resumed-0", expect=3, train__steps=5,
                   **{k: v for k, v in keys.items() if k != "train__steps"})[1]
        assert stem in said and path in said and "checksum" in said, (name, said)
    turn_a_bit(path, at + 70)


MLP = r"mlp\.(gate|up|down)_proj\.weight"
LAYERS = r"_proj\.weight"


def wider_than_bf16(tmp):
    model, data = make(tmp, "dense", config("qwen3", **DENSE))
    for kind, change in (("f32", as_f32), ("f16", as_f16)):
        other = rewrite(model, os.path.join(tmp, kind), change)
        same_bits(tmp, other, data, MLP, dtypes=("bf16", "f32") if kind == "f32" else ("f32",),
                  placements=(dict(memory__unit="half", memory__slots=2),))
    # a value that no plane can have
    path, at = tensor_at(other, "model.layers.1.mlp.up_proj.weight")
    with open(path, "r+b") as f:
        f.seek(at + 2 * 3000)
        f.write(b"\0\x7c")
    for home in "files", "host":
        said = run(tmp, other, data, home, name="infinite", expect=3)[1]
        assert "layers.1.mlp.up_proj" in said and "element 3000" in said and "finite" in said, said


def packed(tmp):
    model, data = make(tmp, "dense", config("qwen3", **{**DENSE, "num_attention_heads": 8, "num_key_value_heads": 4}))
    for kind in "nf4", "fp8":
        other = os.path.join(tmp, kind)
        megatrain("export", model, other, "--quantize", kind)
        shutil.rmtree(f"{other}/megatrain", ignore_errors=True)
        same_bits(tmp, other, data, LAYERS, placements=(dict(memory__unit="half", memory__slots=2),))
    nf4 = rewrite(os.path.join(tmp, "nf4"), os.path.join(tmp, "single"), without_nesting)
    same_bits(tmp, nf4, data, LAYERS)
    path, at = tensor_at(other, "model.layers.0.mlp.down_proj.weight")
    with open(path, "r+b") as f:
        f.seek(at + 99)
        f.write(b"\x7f")
    for home in "files", "host":
        said = run(tmp, other, data, home, name="infinite", expect=3)[1]
        assert "layers.0.mlp.down_proj" in said and "not finite" in said, said


def experts_in_another_order(tmp):
    model, data = make(tmp, "oss", config("gpt_oss", **EXPERTS))
    fused = r"experts\.(gate_up|down)_proj$"
    same_bits(tmp, model, data, fused, placements=(dict(memory__expert_group=1, memory__slots=2),))
    same_bits(tmp, rewrite(model, os.path.join(tmp, "oss-f32"), as_f32), data, fused)


def packed_experts(tmp):
    model, data = make(tmp, "oss", config("gpt_oss", **EXPERTS))
    release = os.path.join(tmp, "release")
    megatrain("export", model, release, "--quantize", "mxfp4")
    shutil.rmtree(f"{release}/megatrain", ignore_errors=True)
    same_bits(tmp, release, data, r"_proj_(blocks|scales)$", placements=(dict(memory__expert_group=1, memory__slots=2),))


def rows_in_pairs(tmp):
    """ERNIE-4.5: rows of q and k that rotate together are neighbours in the files."""
    with open(os.path.join(PARITY, "ernie4_5_moe", "config.json")) as f:
        cfg = {**json.load(f), "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128,
               "torch_dtype": "bfloat16"}
    model, data = make(tmp, "ernie", cfg)
    same_bits(tmp, model, data, r"self_attn\.[qo]_proj\.weight", adapter__targets="o_proj")


def every_home(tmp, model, data, **over):
    """Of a model as it is released: host memory, drives and files give the same bits, in runs and across a resume."""
    want = result(run(tmp, model, data, "host", name="host", **over)[0])
    for home in "files", "disk":
        out, said = run(tmp, model, data, home, name=home, **over)
        assert result(out) == want and ("read in place" in said) == (home == "files"), (model, home)
    for i, (first, then) in enumerate((("files", "disk"), ("host", "files"))):
        out, _ = run(tmp, model, data, first, "--max-steps", 1, name=f"released-{i}", **over)
        run(tmp, model, data, then, "--resume", name=f"released-{i}", **over)
        assert (losses(out), planes(f"{out}/checkpoint-3")) == (want[0], want[1]), (first, then)


def as_released(tmp):
    """gpt-oss in MXFP4; MiniMax-M2, a matrix an expert, in FP8 with blocks of 128x128, partial ones at the edges."""
    data = write_data(os.path.join(tmp, "few.jsonl"), vocab=96)
    every_home(tmp, fixture("gpt_oss_mxfp4"), data)
    fp8 = os.path.join(tmp, "minimax")
    megatrain("export", fixture("minimax_m2"), fp8, "--quantize", "fp8")
    shutil.rmtree(f"{fp8}/megatrain")
    t = read_safetensors(f"{fp8}/model.safetensors")
    assert t["model.layers.0.block_sparse_moe.experts.0.w1.weight"][0] == "F8_E4M3"
    assert t["model.layers.0.block_sparse_moe.experts.0.w1.weight_scale_inv"][0] == "F32"
    every_home(tmp, fp8, data)


def encode_fp8(data, rows, cols):
    """A matrix of bf16 as DeepSeek's files have it: (codes, scales of blocks of 128x128); those at the edges are partial.
    Scales are exact in bf16."""
    levels = sorted((e4m3(c), c) for c in range(256) if c & 127 != 127 and c != 128)
    values, codes = [v for v, _ in levels], [c for _, c in levels]
    wide = bytearray(2 * len(data))
    wide[2::4], wide[3::4] = data[0::2], data[1::2]
    x, per_row = floats(bytes(wide)), -(-cols // 128)
    scales = [0.0] * (per_row * -(-rows // 128))
    block = [i // cols // 128 * per_row + i % cols // 128 for i in range(len(x))]
    for v, b in zip(x, block):
        scales[b] = max(scales[b], abs(v) / 448)
    scales = [in_bf16_or_above(s) for s in scales]
    def code(v):
        at = min(max(bisect.bisect(values, v), 1), len(values) - 1)
        return codes[at if values[at] - v < v - values[at - 1] else at - 1]
    return bytes(code(v / scales[b]) for v, b in zip(x, block)), struct.pack(f"<{len(scales)}f", *scales)


def in_bf16_or_above(x):
    bits, = struct.unpack("<I", struct.pack("<f", x))
    return struct.unpack("<f", struct.pack("<I", (bits + 0xffff) & 0xffff0000))[0]


def scales_as_bf16(tmp, model, tensors, data, want):
    """As Qwen3's releases in FP8 have them: the same weights, also read in place."""
    def cut(name, t, _):
        return ("BF16", t[1], b"".join(t[2][i + 2:i + 4] for i in range(0, len(t[2]), 4))) if name.endswith("_scale_inv") else t

    out = rewrite(model, os.path.join(tmp, "fp8-bf16"), cut)
    for home in "host", "files":
        assert result(run(tmp, out, data, home, model__dtype="bf16")[0]) == want, home
    frozen = os.path.join(tmp, "fp8-frozen")
    megatrain("run", settings(tmp, out, data, frozen, model__freeze="*_proj.weight", adapter__kind="none",
                              memory__device_budget="128MiB"), "--max-steps", 1)
    megatrain("export", f"{frozen}/checkpoint-1", f"{frozen}-out")
    packed = {n: cut(n, v, None) for n, v in tensors.items() if "_proj.weight" in n}
    assert packed.items() <= read_safetensors(f"{frozen}-out/model.safetensors").items()


def other_programs_fp8(tmp):
    """A mixture in DeepSeek's FP8, written by other code than ours: rows and columns are no multiples of 128. The bits
    are those of the decoded model, from every home; exports keep codes and scales; adapters cannot be merged into it."""
    plain, data = make(tmp, "wide", config("glm4_moe", hidden_size=200, moe_intermediate_size=136, intermediate_size=328,
                                           num_hidden_layers=2, n_routed_experts=4, n_group=1, first_k_dense_replace=1))
    t = {n: v for f in glob.glob(f"{plain}/*.safetensors") for n, v in read_safetensors(f).items()}
    packed, out = {}, os.path.join(tmp, "fp8")
    for name, (dtype, shape, raw) in t.items():
        packed[name] = dtype, shape, raw
        if "_proj.weight" in name:
            codes, scales = encode_fp8(raw, *shape)
            packed[name] = "F8_E4M3", shape, codes
            packed[name + "_scale_inv"] = "F32", [-(-n // 128) for n in shape], scales
    shutil.copytree(plain, out, ignore=shutil.ignore_patterns("*.safetensors*"))
    write_safetensors(f"{out}/model.safetensors", packed)
    with open(f"{out}/config.json") as f:
        c = json.load(f)
    c["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    with open(f"{out}/config.json", "w") as f:
        json.dump(c, f)
    assert packed["model.layers.1.mlp.experts.0.down_proj.weight_scale_inv"][1] == [2, 2]
    every_home(tmp, out, data)
    for dtype in "f32", "bf16":
        decoded = write_decoded(os.path.join(tmp, "decoded-" + dtype), out, dtype.upper())
        want = result(run(tmp, decoded, data, "host", name="plain", model__dtype=dtype)[0])
        assert result(run(tmp, out, data, "files", model__dtype=dtype)[0]) == want, dtype
    megatrain("export", out, f"{out}-again")
    assert read_safetensors(f"{out}-again/model.safetensors") == packed
    checkpoint, merged = f"{tmp}/out/checkpoint-3", {}
    for dtype in "f32", "bf16":  # a packed base is decoded
        said = megatrain("export", "--merge", "--dtype", dtype, checkpoint, f"{tmp}/merged-{dtype}").stderr
        assert "are decoded" in said and "quantization_config" not in open(f"{tmp}/merged-{dtype}/config.json").read()
        merged[dtype] = read_safetensors(f"{tmp}/merged-{dtype}/model.safetensors")
    megatrain("export", "--merge", "--dtype", "f32", "--model", os.path.join(tmp, "decoded-f32"), checkpoint, f"{tmp}/merged-want")
    wanted = read_safetensors(f"{tmp}/merged-want/model.safetensors")
    assert merged["f32"] == wanted, [n for n in wanted if merged["f32"].get(n) != wanted[n]]
    for n, (dtype, shape, raw) in merged["bf16"].items():
        assert shape == wanted[n][1] and (n not in t or "_proj" not in n or dtype == "BF16"), n
    scales_as_bf16(tmp, out, packed, data, want)


def as_e8m0(shape, codes, scales):
    """Scales of which each is rounded to a power of two, in a byte."""
    return {"": ("F8_E4M3", shape, codes), "_scale_inv": ("F8_E8M0", [-(-n // 128) for n in shape], bytes(
        max(1, round(math.log2(s)) + 127) for s in floats(scales)))}


def as_one_scale(shape, codes, scales):
    """The first scale for all, in BF16, beside one of activations, which is ignored."""
    return {"": ("F8_E4M3", shape, codes), "_scale_inv": ("BF16", [], scales[2:4])}


def as_int4(shape, codes, scales):
    """The codes' bytes as pairs of codes of 4 bits: what they say does not matter."""
    n = shape[0] * shape[1]
    half = bytes((3 * codes[i] ^ codes[i + 1]) & 255 for i in range(0, n, 2))
    return {"_packed": ("I32", [shape[0], shape[1] // 8], half), "_shape": ("I64", [2], struct.pack("<2q", *shape)),
            "_scale": ("BF16", [shape[0], shape[1] // 32], b"".join(bf16_bytes(0.002 + i % 13 * 1e-4) for i in range(n // 32)))}


INT4 = {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
        "config_groups": {"group_0": {"targets": ["Linear"], "input_activations": None, "output_activations": None, "weights": {
            "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "actorder": None}}}}
FP8 = {"quant_method": "fp8", "fmt": "e4m3"}
LATER = {"e8m0": (as_e8m0, {**FP8, "activation_scheme": "dynamic", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}),
         "one_scale": (as_one_scale, {**FP8, "activation_scheme": "static", "weight_block_size": None}),
         "int4": (as_int4, INT4)}


def later_formats(tmp, names=tuple(LATER)):
    """FP8 with scales in bytes (DeepSeek V3.1) or one for a tensor (Ministral 3), int4 of experts (Kimi-K2-Thinking): the
    bits are those of the decoded model, from every home; exports and checkpoints keep what they do not train."""
    plain, data = make(tmp, "wide", config("glm4_moe", hidden_size=192, moe_intermediate_size=160, intermediate_size=320,
                                           num_hidden_layers=2, n_routed_experts=4, n_group=1, first_k_dense_replace=1))
    t = {n: v for f in glob.glob(f"{plain}/*.safetensors") for n, v in read_safetensors(f).items()}
    for kind in names:
        make_packed, quantization = LATER[kind]
        out, packed = os.path.join(tmp, kind), {}
        for name, (dtype, shape, raw) in t.items():
            if "_proj.weight" not in name or (kind == "int4" and ".mlp.experts." not in name):
                packed[name] = dtype, shape, raw
                continue
            for suffix, v in make_packed(shape, *encode_fp8(raw, *shape)).items():
                packed[name + suffix] = v
            if kind == "one_scale":
                packed[name[:-len("weight")] + "activation_scale"] = "BF16", [], bf16_bytes(0.25)
        shutil.copytree(plain, out, ignore=shutil.ignore_patterns("*.safetensors*"))
        write_safetensors(f"{out}/model.safetensors", packed)
        with open(f"{out}/config.json") as f:
            c = json.load(f)
        with open(f"{out}/config.json", "w") as f:
            json.dump({**c, "quantization_config": quantization}, f)
        every_home(tmp, out, data)
        for dtype in ("f32", "bf16") if FULL else ("f32",):
            decoded = write_decoded(os.path.join(tmp, f"{kind}-{dtype}"), out, dtype.upper())
            want = result(run(tmp, decoded, data, "host", name="plain", model__dtype=dtype)[0])
            assert result(run(tmp, out, data, "files", model__dtype=dtype)[0]) == want, (kind, dtype)
        megatrain("export", out, f"{out}-again")
        assert read_safetensors(f"{out}-again/model.safetensors") == packed, kind
        merged = {}
        for model in out, os.path.join(tmp, f"{kind}-f32"):
            megatrain("export", "--merge", "--dtype", "f32", "--model", model, f"{tmp}/out/checkpoint-3", f"{model}-merged")
            merged[model] = read_safetensors(f"{model}-merged/model.safetensors")
        assert "quantization_config" not in open(f"{out}-merged/config.json").read()
        assert merged[out] == merged[f"{tmp}/{kind}-f32"], kind
        keeps_what_is_frozen(tmp, out, data, packed)


def keeps_what_is_frozen(tmp, model, data, packed):
    """A checkpoint of a run that trains the rest has the packed tensors as they came, and trains on from itself."""
    frozen = f"{model}-frozen"
    keys = dict(model__freeze="*_proj.weight", adapter__kind="none", memory__device_budget="128MiB", checkpoint__frozen="copy")
    megatrain("run", settings(tmp, model, data, frozen, **keys), "--max-steps", 1)
    have = read_safetensors(f"{frozen}/checkpoint-1/model.safetensors")
    kept = {n: v for n, v in packed.items() if "_proj.weight" in n}
    assert kept.items() <= have.items(), [n for n in kept if have.get(n) != kept[n]]
    again = f"{model}-again-trained"
    megatrain("run", settings(tmp, f"{frozen}/checkpoint-1", data, again, **keys), "--max-steps", 1)


def elsewhere(tmp):
    """A matrix whose codes and scales lie in files on two file systems, one of them perhaps without direct I/O."""
    model, data = make(tmp, "dense", config("qwen3", **DENSE))
    packed, memory = os.path.join(tmp, "nf4"), "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    shared = tempfile.mkdtemp(prefix="mt-base-files-", dir=memory)
    try:
        megatrain("export", model, packed, "--quantize", "nf4")
        shutil.rmtree(f"{packed}/megatrain", ignore_errors=True)
        tensors = {n: v for f in glob.glob(f"{packed}/*.safetensors") for n, v in read_safetensors(f).items()}
        for f in glob.glob(f"{packed}/*.safetensors"):
            os.remove(f)
        where = {n: f"model-0000{1 + n.endswith('map') + 2 * ('.weight.' in n)}-of-00004.safetensors" for n in tensors}
        for file in set(where.values()):
            moved = shared if file[9] == "3" else packed
            write_safetensors(f"{moved}/{file}", {n: v for n, v in tensors.items() if where[n] == file})
            if moved == shared:
                os.symlink(f"{shared}/{file}", f"{packed}/{file}")
        with open(f"{packed}/model.safetensors.index.json", "w") as f:
            json.dump({"weight_map": where}, f)
        every_home(tmp, packed, data)
        for i, there in enumerate((True, False)):  # files of plain weights, too
            if not there:
                shutil.copytree(model, f"{shared}/whole")
            of = packed if there else f"{shared}/whole"
            said = run(tmp, of, data, "files", name=f"told-{i}")[1]
            told = "no direct I/O; using the page cache" in said
            assert told == ("through the page cache" in said) == (not reads_directly(shared)), said
            assert not told or f"{shared}/" in said or f"{packed}/model-00003" in said, said
    finally:
        shutil.rmtree(shared)


def reads_directly(folder):
    path = os.path.join(folder, "probe")
    with open(path, "wb") as f:
        f.write(bytes(8192))
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        os.preadv(fd, [mmap.mmap(-1, 4096)], 0)
        os.close(fd)
    except OSError:
        return False
    finally:
        os.remove(path)
    return True


def files_that_change(tmp):
    """Of a run: cut off, emptied, written anew, or replaced, as a download does. The checkpoint is good, the message clear."""
    model, data = make(tmp, "dense", config("qwen3", **DENSE))
    name = "model.layers.1.mlp.up_proj.weight"
    keys = dict(model__freeze="", adapter__kind="lora", adapter__rank=4, memory__base="files", train__steps=100000,
                checkpoint__every=1, checkpoint__keep=3, log__every=1)
    def begin(case):
        copy, out = os.path.join(tmp, case), os.path.join(tmp, f"{case}-out")
        shutil.copytree(model, copy)
        ini = settings(tmp, copy, data, out, **keys)
        return copy, out, ini, tensor_at(copy, name)[0]
    def write_anew(path):
        with open(path, "r+b") as f:  # the same file
            n, = struct.unpack("<Q", f.read(8))
            f.seek(8 + n)
            f.write(bytes(os.path.getsize(path) - 8 - n))
    changes = {"shorter": lambda path: os.truncate(path, os.path.getsize(path) // 2), "empty": lambda path: os.truncate(path, 0),
               "anew": write_anew}
    for case, change in changes.items():
        copy, out, ini, path = begin(case)
        p = subprocess.Popen([BINARY, "run", ini], stderr=subprocess.PIPE, text=True)
        try:
            wait_for_steps(out, p, 3)
            change(path)
            said = p.communicate()[1]
        finally:
            p.kill()
        words = "has changed" if case == "anew" else "has become shorter"
        assert case != "anew" or "reading them again" in said, said[-1500:]
        assert p.returncode == 1 and words in said and f"{copy}/" in said, (case, p.returncode, said[-1500:])
        last = f"{out}/{os.readlink(f'{out}/latest')}"
        megatrain("verify", last)
        said = megatrain("run", ini, "--resume", expect=3).stderr
        assert os.path.basename(path) in said, said  # as long as the file is wrong
        shutil.copy(os.path.join(model, os.path.basename(path)), path)
        more = ("run", ini, "--resume", "--max-steps", int(last.rsplit("-")[-1]) + 1)
        if case == "anew":
            said = megatrain(*more, env={"MEGATRAIN_IO_FAULT": "read:eio:9:0"}, expect=1).stderr
            assert f"of {copy}/" in said and "Input/output error" in said, said
        megatrain(*more, env={"MEGATRAIN_IO_FAULT": "read:short:1:0"})
    # replaced: what is open stays as it was, and so does the run; another one does not go on with other weights
    copy, out, ini, path = begin("replaced")
    p = subprocess.Popen([BINARY, "run", ini], stderr=subprocess.PIPE, text=True)
    try:
        wait_for_steps(out, p, 3)
        shutil.copy(path, path + ".new")
        turn_a_bit(path + ".new", tensor_at(copy, name)[1] + 99)
        os.replace(path + ".new", path)
        wait_for_steps(out, p, len(losses(out)) + 3)
        p.send_signal(signal.SIGINT)
        said = p.communicate()[1]
    finally:
        p.kill()
    assert "checksum" not in said and "Traceback" not in said, said[-1500:]
    said = megatrain("run", ini, "--resume", expect=3).stderr
    assert name in said and path in said and "checksum" in said, said


if __name__ == "__main__":
    for case in sys.argv[1:]:
        with tempfile.TemporaryDirectory(prefix="mt-base-files-") as tmp:
            globals()[case](tmp)
            print("ok", case)
