# SPDX-License-Identifier: Apache-2.0
"""A packed base gives the bits of the same base decoded beforehand, wherever it lives; checkpoints hold it as it came.

test_packed.py FORMAT... (nf4, mxfp4, fp8, int4, nvfp4)
"""
import json
import math
import os
import shutil
import struct
import sys
import tempfile

from tiny import (BINARY, ORACLE, SLOW, base, config, losses, megatrain, metrics, read_safetensors, trained_planes, write_data, write_ini,
                  write_model, write_safetensors)

STEPS = 4
FROZEN = "model.layers.[1-9].*proj.weight, model.layers.0.self_attn.*proj.weight, model.embed_tokens.*"
NF4 = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
       -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
       0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]
FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
BLOCKS = {"mxfp4": 32, "int4": 32, "nvfp4": 16}  # of a row, none of which is incomplete


def f32(x):
    return struct.unpack("<f", struct.pack("<f", x))[0]


def bf16_bytes(x):
    u, = struct.unpack("<I", struct.pack("<f", x))
    return struct.pack("<H", (u + 0x7fff + (u >> 16 & 1)) >> 16)


def e4m3(c):
    e, m = c >> 3 & 15, c & 7
    v = (8 + m) * 2.0 ** (e - 10) if e else m * 2.0 ** -9
    return -v if c & 128 else v


def floats(b):
    return struct.unpack(f"<{len(b) // 4}f", b)


def scales_of(tensor):
    dtype, _, data = tensor
    if dtype in ("F8_E8M0", "U8"):
        return [2.0 ** (b - 127) for b in data]
    if dtype == "BF16":
        data = b"".join(b"\0\0" + data[i:i + 2] for i in range(0, len(data), 2))
    return floats(data)


def decode_nf4(t, name, n):
    codes = t[name][2]
    note = json.loads(t[name + ".quant_state.bitsandbytes__nf4"][2])
    scales = t[name + ".absmax"]
    if scales[0] == "U8":
        table, nested = floats(t[name + ".nested_quant_map"][2]), floats(t[name + ".nested_absmax"][2])
        off = f32(note["nested_offset"])
        scales = [f32(f32(table[q] * nested[i // 256]) + off) for i, q in enumerate(scales[2])]
    else:
        scales = floats(scales[2])
    assert note["blocksize"] == 64 and note["quant_type"] == "nf4"
    values = [f32(v) for v in NF4]
    return note["shape"], [f32(values[codes[i // 2] >> (0 if i % 2 else 4) & 15] * scales[i // 64]) for i in range(n)]


def decode(t):
    """The tensors of a packed file, decoded: name -> (shape, values), by plain code of the formats' definitions."""
    out = {}
    for name, (dtype, shape, data) in t.items():
        if name + ".absmax" in t:
            shape = json.loads(t[name + ".quant_state.bitsandbytes__nf4"][2])["shape"]
            out[name] = decode_nf4(t, name, shape[0] * shape[1])
        elif dtype == "F8_E4M3" and name + "_scale_inv" in t:
            blocks = t[name + "_scale_inv"][1]
            scales, per_row = scales_of(t[name + "_scale_inv"]), blocks[1] if blocks else 0
            table = [e4m3(c) for c in range(256)]
            out[name] = shape, [f32(table[c] * scales[i // shape[1] // 128 * per_row + i % shape[1] // 128 if blocks else 0])
                                for i, c in enumerate(data)]
        elif name.endswith("_packed"):
            name = name[:-len("_packed")]
            codes = [c >> s & 15 for c in data for s in (0, 4)]
            values = [c - 8 for c in range(16)] if dtype == "I32" else FP4 + [-v for v in FP4]
            if name + "_global_scale" in t:
                factor, block = floats(t[name + "_global_scale"][2])[0], 16
                scales = [f32(e4m3(b) / factor) for b in t[name + "_scale"][2]]
            else:
                scales, block = scales_of(t[name + "_scale"]), 32
            out[name] = [*shape[:-1], len(codes) // math.prod(shape[:-1])], [f32(values[c] * scales[i // block]) for i, c in enumerate(codes)]
        elif name.endswith("_blocks"):
            name, scales = name[:-len("_blocks")], t[name[:-len("_blocks")] + "_scales"][2]
            codes = [(c >> s & 15) for c in data for s in (0, 4)]
            out[name] = ([*shape[:-2], shape[-2] * 32],
                         [(-1 if c & 8 else 1) * FP4[c & 7] * 2.0 ** (scales[i // 32] - 127) for i, c in enumerate(codes)])
    return out


def is_piece(name):
    return any(name.endswith(s) for s in ("_scale_inv", "_blocks", "_scales", "_packed", "weight_scale", "weight_shape", "_global_scale",
                                          ".activation_scale", ".absmax", ".nested_absmax", "quant_map",
                                          ".quant_state.bitsandbytes__nf4"))


def write_decoded(path, packed, dtype):
    """The model in `packed` with what is packed in a plain dtype."""
    shutil.copytree(packed, path)
    shutil.rmtree(os.path.join(path, "megatrain"), ignore_errors=True)
    t = read_safetensors(os.path.join(path, "model.safetensors"))
    out = {n: v for n, v in t.items() if not is_piece(n)}
    for name, (shape, values) in decode(t).items():
        data = struct.pack(f"<{len(values)}f", *values) if dtype == "F32" else b"".join(map(bf16_bytes, values))
        out[name] = dtype, shape, data
    write_safetensors(os.path.join(path, "model.safetensors"), out)
    with open(os.path.join(path, "config.json")) as f:
        c = json.load(f)
    assert c.pop("quantization_config")
    with open(os.path.join(path, "config.json"), "w") as f:
        json.dump(c, f)
    return path


def train(tmp, name, model, data, env=None, split=0, binary=BINARY, **over):
    out = os.path.join(tmp, name)
    over = {"train__steps": STEPS, "model__init": "weights", "model__freeze": FROZEN, "checkpoint__frozen": "copy", **over}
    ini = write_ini(out + ".ini", base(model, data, out, **over))
    said = ""
    if split:
        megatrain("-q", "run", ini, "--max-steps", split, env=env)
        megatrain("-q", "run", ini, "--resume", env=env)
    else:
        said = megatrain("run", ini, env=env, binary=binary).stderr
    return losses(out), os.path.join(out, f"checkpoint-{STEPS}"), said


def check_plain_f32(out, fmt, wide):
    """Of a model in f32, what is not packed stays f32 if asked for; a checkpoint's masters are wider than what is packed."""
    assert "master" in megatrain("export", wide, out + "-no", "--quantize", fmt, "--dtype", "f32", expect=2).stderr
    megatrain("export", wide, out + "-whole", "--dtype", "f32")
    read = lambda folder: read_safetensors(os.path.join(folder, "model.safetensors"))
    packed, whole = {}, read(out + "-whole")
    for dtype in "bf16", "f32":
        megatrain("export", out + "-whole", f"{out}-{dtype}", "--quantize", fmt, "--dtype", dtype)
        packed[dtype] = read(f"{out}-{dtype}")
    plain = [n for n, v in packed["bf16"].items() if v[0] == "BF16" and not is_piece(n)]
    assert len(plain) > 8 and all(packed["f32"][n] == (whole[n] if n in plain else v) for n, v in packed["bf16"].items())
    with open(os.path.join(out + "-f32", "config.json")) as f:
        assert json.load(f)["torch_dtype"] == "float32"


def check_export(tmp, fmt, wide, packed, tensors):
    """All layers packed in a folder: as when they are loaded; and a packed folder is exported as it is."""
    out = os.path.join(tmp, fmt + "-export")
    assert "relative L2" in megatrain("export", wide, out, "--quantize", fmt).stderr
    t = read_safetensors(os.path.join(out, "model.safetensors"))
    assert all(t[n] == v for n, v in tensors.items() if is_piece(n) or v[0] in ("U8", "F8_E4M3"))
    assert len(decode(t)) == 3 * (7 - (fmt in BLOCKS)), "not every matrix of the layers is packed"
    assert t["lm_head.weight"][0] == t["model.norm.weight"][0] == "BF16"
    factors = lambda *names: {t.get(f"model.layers.1.{n}_proj.weight_global_scale", [None])[-1] for n in names}
    assert len(factors("self_attn.q", "self_attn.k", "self_attn.v")) == len(factors("mlp.gate", "mlp.up")) == 1, "served as one"
    assert fmt != "nvfp4" or len(factors("self_attn.q", "self_attn.o", "mlp.up")) == 3
    megatrain("verify", out)
    check_plain_f32(out, fmt, wide)
    p = megatrain("export", out, out + "2", "--quantize", "fp8" if fmt == "nf4" else "nf4", expect=2)
    assert "already" in p.stderr, p.stderr
    name = "model.layers.1.mlp.up_proj.weight" + ("_packed" if fmt in BLOCKS else "")
    with open(os.path.join(out, "model.safetensors"), "r+b") as f:
        at = f.read().index(t[name][2])
        f.seek(at)
        f.write(bytes([t[name][2][0] ^ 1]))
    assert "damaged: tensor " + name in megatrain("verify", out, expect=7).stderr
    for dtype in "bf16", "f32":
        again = os.path.join(tmp, f"{fmt}-again-{dtype}")
        megatrain("export", packed, again, "--dtype", dtype)
        t = read_safetensors(os.path.join(again, "model.safetensors"))
        assert sorted(t) == sorted(tensors)
        assert all(t[n] == v for n, v in tensors.items() if is_piece(n) or v[0] in ("U8", "F8_E4M3"))
        assert t["model.norm.weight"][0] == dtype.upper()


def check(tmp, fmt):
    # feed-forward matrices are decoded in several pieces; the attention's are less than a block of 128 rows
    parts = {"part": {"torch_dtype": "bfloat16"}}  # as nested models have them; what exports are made of is at the top
    wide = write_model(os.path.join(tmp, fmt + "-wide"), {**parts, **config(hidden_size=128, intermediate_size=520, num_hidden_layers=3)})
    data = write_data(os.path.join(tmp, "data.jsonl"))
    first = os.path.join(tmp, fmt + "-first")
    megatrain("-q", "run", write_ini(first + ".ini", base(wide, data, first, train__steps=1)))
    wide = os.path.join(first, "checkpoint-1")
    # packed when it is loaded
    _, packed, said = train(tmp, fmt + "-made", wide, data, model__base_dtype=fmt, train__learning_rate="0")
    assert "relative L2" in said and "mlp.up_proj" in said, said
    tensors = read_safetensors(os.path.join(packed, "model.safetensors"))
    plain = read_safetensors(os.path.join(wide, "model.safetensors"))
    frozen = [n for n in plain if "proj" in n and not n.startswith("model.layers.0.mlp")
              and not plain[n][1][1] % BLOCKS.get(fmt, 1)]
    assert sorted(decode(tensors)) == sorted(frozen), "not what should be packed"
    for name, (shape, values) in decode(tensors).items():
        u = struct.unpack(f"<{len(values)}H", plain[name][2])
        want = [struct.unpack("<f", struct.pack("<I", x << 16))[0] for x in u]
        error = (sum((a - b) ** 2 for a, b in zip(values, want)) / sum(b * b for b in want)) ** 0.5
        assert shape == plain[name][1] and error < (0.03 if fmt == "fp8" else 0.13), (name, shape, error)
    with open(os.path.join(packed, "config.json")) as f:
        q = json.load(f)["quantization_config"]
    assert "model.layers.0.mlp.up_proj" in q.get("llm_int8_skip_modules", q.get("modules_to_not_convert", q.get("ignore")))
    check_export(tmp, fmt, wide, packed, tensors)
    # from its own files, in both compute dtypes and with products in FP8, against the decoded model
    for dtype, compute in (("bf16", "auto"), *(() if SLOW else (("f32", "auto"),)), *((("bf16", "fp8"),) if fmt == "fp8" else ())):
        folder = os.path.join(tmp, f"{fmt}-{dtype}-decoded")
        decoded = folder if os.path.exists(folder) else write_decoded(folder, packed, dtype.upper())
        over = {"model__dtype": dtype, "model__compute": compute}
        want, ckpt, _ = train(tmp, f"{fmt}-{dtype}-{compute}-plain", decoded, data, binary=ORACLE, **over)
        got, other, _ = train(tmp, f"{fmt}-{dtype}-{compute}", packed, data, **over)
        assert got == want and len(got) == STEPS, f"{fmt} {dtype} {compute}: {got} is not {want}"
        assert trained_planes(other) == trained_planes(ckpt), f"{fmt} {dtype}: weights or moments differ"
        again = read_safetensors(os.path.join(other, "model.safetensors"))
        assert all(again[n] == v for n, v in tensors.items() if is_piece(n) or v[0] in ("U8", "F8_E4M3")), "re-encoded"
        megatrain("verify", other)
        drive = os.path.join(tmp, "drive")
        os.makedirs(drive, exist_ok=True)
        placements = {
            "slots": {"memory__slots": 2, "env": {"MEGATRAIN_POISON": "1"}},
            "halves": {"memory__unit": "half", "memory__activations": "recompute", "env": {"MEGATRAIN_POISON": "1"}},
            "disk": {"memory__states": "disk", "memory__nvme_paths": drive, "device__cpu_threads": 1},
            "resumed": {"split": 2},
        }
        for name, more in placements.items():
            same, other, _ = train(tmp, f"{fmt}-{dtype}-{compute}-{name}", packed, data, **{**over, **more})
            assert same == want, f"{fmt} {dtype} {name}: {same} is not {want}"
            assert trained_planes(other) == trained_planes(ckpt), f"{fmt} {dtype} {name}: weights or moments differ"
    # what is packed is in no state: of adapters, and of layers that are frozen whole
    for name, more in (("adapters", {"model__freeze": "", "adapter__kind": "lora"}),
                       ("a whole layer", {"model__freeze": "model.layers.0.*", "checkpoint__frozen": "name"})):
        want, ckpt, _ = train(tmp, f"{fmt}-{name}", packed, data, **more)
        same, other, _ = train(tmp, f"{fmt}-{name}-resumed", packed, data, split=2, **more)
        assert same == want, f"{fmt} {name}: {same} is not {want}"
        for d, _, files in os.walk(ckpt):
            for n in (n for n in files if n.endswith(".safetensors")):
                a = os.path.join(d, n)
                b = os.path.join(other, os.path.relpath(a, ckpt))
                assert open(a, "rb").read() == open(b, "rb").read(), f"{fmt} {name}: {n} differs"
    # the machine knows the packed tensors by now; decoded they have other sums
    train(tmp, f"{fmt}-all", packed, data, model__freeze="")
    # decoded and trained in full: no packed tensor is left
    _, full, _ = train(tmp, fmt + "-full", packed, data, model__freeze="")
    t = read_safetensors(os.path.join(full, "model.safetensors"))
    assert sorted(t) == sorted(plain) and all(v[0] == "BF16" for v in t.values())
    with open(os.path.join(full, "config.json")) as f:
        assert "quantization_config" not in json.load(f)
    # what a file says of itself has to be true
    wrong = os.path.join(tmp, fmt + "-wrong")
    shutil.copytree(packed, wrong)
    shutil.rmtree(os.path.join(wrong, "megatrain"))
    name = next(n for n in tensors if n.endswith((".absmax", "_scale_inv", "_scale")))
    write_safetensors(os.path.join(wrong, "model.safetensors"), {n: v for n, v in tensors.items() if n != name})
    ini = write_ini(wrong + ".ini", base(wrong, data, wrong + "-out", model__init="weights", model__freeze=FROZEN))
    p = megatrain("run", ini, expect=3)
    assert name.split(".weight")[0] in p.stderr, p.stderr


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as tmp:
        for case in sys.argv[1:]:
            check(tmp, case)
