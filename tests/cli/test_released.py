# SPDX-License-Identifier: Apache-2.0
"""Models as they are released, in the formats of compressed-tensors, ModelOpt and transformers: the bits of the decoded model from every
home, and codes and scales kept in what is written. released.safetensors, of these programs, says what their codes mean.

test_released.py FORM... (a key of FORMS)
"""
import json
import math
import os
import random
import re
import shutil
import struct
import sys
import tempfile

from test_packed import FP4, bf16_bytes, e4m3, f32, floats
from tiny import POISON, SLOW, base, config, losses, megatrain, planes, read_safetensors, with_weights, write_data, write_ini, write_safetensors, write_model

HERE = os.path.dirname(os.path.abspath(__file__))
E4M3 = [e4m3(c) for c in range(256)]
HOMES = {"host": {}, "files": {"memory__base": "files"}, "drive": {"memory__base": "disk", "memory__unit": "half"}}


def compressed(bits, strategy, form, **more):
    weights = {"num_bits": bits, "type": "float", "symmetric": True, "dynamic": False, "strategy": strategy, **more}
    return {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": {"dynamic": True}}}}


#: what quantization_config is, and the names of the scales
FORMS = {
    "nvfp4": compressed(4, "tensor_group", "nvfp4-pack-quantized", group_size=16),
    "nvfp4-modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
    "fp8-rows": compressed(8, "channel", "float-quantized"),
    "fp8-tensor": compressed(8, "tensor", "float-quantized"),
    "fp8-blocks": compressed(8, "block", "float-quantized", block_structure=[128, 128]),
    "fp8-modelopt": {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head*"]},
    "fp8-64x64": {"quant_method": "fp8", "weight_block_size": [64, 64]},
    "mxfp8-1x32": compressed(8, "group", "mxfp8-quantized", group_size=32, scale_dtype="torch.uint8"),
    "fp8-experts-32x32": {"quant_method": "fp8", "weight_block_size": [32, 32]},
    "fp8-experts-tensor": {"quant_method": "fp8", "weight_block_size": None},
}


def block_of(name):
    """Rows and columns of a block, which names end with; None: 128."""
    m = re.search(r"(\d+)x(\d+)$", name)
    return (int(m[1]), int(m[2])) if m else (128, 128)


def fp4_tensors(r, name, rows, cols, modelopt):
    codes, scales = r.randbytes(rows * cols // 2), bytes(r.randrange(0x20, 0x38) for _ in range(rows * cols // 16))
    factor = struct.pack("<f", r.uniform(0.02, 0.05) if modelopt else r.uniform(20, 50))
    return {name + ("" if modelopt else "_packed"): ("U8", [rows, cols // 2], codes),
            name + "_scale": ("F8_E4M3", [rows, cols // 16], scales),
            name + ("_scale_2" if modelopt else "_global_scale"): ("F32", [] if modelopt else [1], factor),
            name.replace("weight", "input_scale" if modelopt else "input_global_scale"): ("F32", [] if modelopt else [1], factor)}


def scale_name(t, name):
    return next(name + s for s in ("_scale", "_scale_inv") if name + s in t)


def fp8_tensors(r, name, shape, form):
    *experts, rows, cols = shape
    down, across = block_of(form)
    parts = 2 if "gate_up" in name else 1
    grid = {"fp8-rows": [rows, 1], "fp8-tensor": [1], "fp8-modelopt": [], "fp8-experts-tensor": [parts, 1]}.get(
        form, [-(-rows // down), -(-cols // across)])
    n = math.prod(experts + grid)
    scales = [r.uniform(0.0001, 0.0005) for _ in range(n)]
    dtype, data = "F32", struct.pack(f"<{n}f", *scales)
    if form == "fp8-rows":
        dtype, data = "BF16", b"".join(map(bf16_bytes, scales))
    elif form.startswith("mxfp8"):
        dtype, data = "U8", bytes(r.randrange(112, 117) for _ in range(n))
    codes = bytes(c if c & 127 != 127 else 0 for c in r.randbytes(math.prod(shape)))
    suffix = "_scale_inv" if FORMS[form]["quant_method"] == "fp8" else "_scale"
    return {name: ("F8_E4M3", shape, codes), name + suffix: (dtype, experts + grid, data)}


def decode(t, name, form):
    """(shape, values) of a packed matrix, or of all experts', by plain code."""
    scale = t[scale_name(t, name)]
    if name + "_global_scale" in t or name + "_scale_2" in t:
        over = name + "_global_scale" in t
        _, shape, codes = t[name + ("_packed" if over else "")]
        factor = floats(t[name + ("_global_scale" if over else "_scale_2")][2])[0]
        scales = [f32(E4M3[s] / factor if over else E4M3[s] * factor) for s in scale[2]]
        nibbles = [c >> k & 15 for c in codes for k in (0, 4)]
        return [shape[0], 2 * shape[1]], [f32((-1 if c & 8 else 1) * FP4[c & 7] * scales[i // 16]) for i, c in enumerate(nibbles)]
    _, shape, codes = t[name]
    *experts, rows, cols = shape
    *_, down, across = [1, 1, *scale[1]][-2:]
    high, wide = block_of(form)
    if (down, across) != (-(-rows // high), -(-cols // wide)):
        high, wide = rows // down, cols  # of rows, or one
    scales = ([2.0 ** (b - 127) for b in scale[2]] if scale[0] == "U8" else floats(scale[2]) if scale[0] == "F32" else
              floats(b"".join(b"\0\0" + scale[2][i:i + 2] for i in range(0, len(scale[2]), 2))))
    def of(i):
        row, col = i // cols % rows, i % cols
        return scales[(i // (rows * cols) * down + row // high) * across + col // wide]
    return shape, [f32(E4M3[c] * of(i)) for i, c in enumerate(codes)]


def packed_names(form):
    return ("experts.gate_up_proj", "experts.down_proj") if "experts" in form else ("_proj.weight",)


def copy(path, model, t, quantization):
    """The model's folder with these tensors, and with this quantization_config, or None, in config.json."""
    shutil.copytree(model, path)
    shutil.rmtree(f"{path}/megatrain", ignore_errors=True)
    write_safetensors(f"{path}/model.safetensors", t)
    with open(f"{path}/config.json") as f:
        c = json.load(f)
    c.pop("quantization_config", None)
    with open(f"{path}/config.json", "w") as f:
        json.dump({**c, **({"quantization_config": quantization} if quantization else {})}, f)
    return path


def write(path, model, form):
    """A copy of the model with matrices of its layers packed, and {name: (shape, values)} of these."""
    r, decoded, t = random.Random(form), {}, read_safetensors(f"{model}/model.safetensors")
    for name in [n for n in t if n.endswith(packed_names(form))]:
        shape, _ = t[name][1], t.pop(name)
        t.update(fp4_tensors(r, name, *shape, "modelopt" in form) if "fp4" in form else fp8_tensors(r, name, shape, form))
        decoded[name] = decode(t, name, form)
    return copy(path, model, t, FORMS[form]), decoded


def write_plain(path, packed, decoded, dtype, suffix=""):
    """The same model with what was packed in a plain dtype; names end with `suffix`."""
    t = {n: v for n, v in read_safetensors(f"{packed}/model.safetensors").items() if not any(n.startswith(d) for d in decoded)}
    for name, (shape, values) in decoded.items():
        t[name + suffix] = dtype, shape, b"".join(map(bf16_bytes, values)) if dtype == "BF16" else struct.pack(f"<{len(values)}f", *values)
    return copy(path, packed, t, None)
    return path


def run(tmp, name, model, data, *args, expect=0, **over):
    out = os.path.join(tmp, name)
    lora = {} if "model__freeze" in over else {"adapter__kind": "lora", "adapter__rank": 4}
    keys = {"model__init": "weights", "train__steps": 3, "memory__nvme_paths": tmp, **lora, **over}
    p = megatrain("run", write_ini(out + ".ini", base(model, data, out, **keys)), *args, env=POISON, expect=expect)
    return out, p.stderr


def check_fixture():
    """What the programs themselves decode."""
    t = read_safetensors(os.path.join(HERE, "released.safetensors"))
    names = [n[:-len(".decoded")] for n in t if n.endswith(".decoded")]
    assert len(names) == 7
    for name in names:
        _, values = decode(t, name + ".weight", name)
        want = t[name + ".decoded"]
        got = b"".join(map(bf16_bytes, values)) if want[0] == "BF16" else struct.pack(f"<{len(values)}f", *values)
        assert got == want[2], name


def check_kept(tmp, form, packed, data):
    """Frozen, they are in exports as they came; ours names FP8's scales as transformers does."""
    out, _ = run(tmp, "frozen", packed, data, model__freeze="*_proj.weight", checkpoint__frozen="copy")
    megatrain("export", f"{out}/checkpoint-3", f"{out}-out")
    want, got = (read_safetensors(f"{d}/model.safetensors") for d in (packed, f"{out}-out"))
    renamed = form in ("fp8-tensor", "fp8-blocks", "fp8-modelopt")
    for name, (dtype, shape, raw) in want.items():
        if any(p in name for p in packed_names(form)):
            other = got[name.replace("weight_scale", "weight_scale_inv") if renamed else name]
            assert (other[0], other[2]) == (dtype, raw), (name, other[:2])
    with open(f"{out}-out/config.json") as f:
        method = json.load(f)["quantization_config"]["quant_method"]
    assert method == ("fp8" if renamed else FORMS[form]["quant_method"]), method
    again, _ = run(tmp, "again", f"{out}-out", data)
    first, _ = run(tmp, "first", f"{out}/checkpoint-3", data)
    assert losses(again) == losses(first), "what was exported is another model"


def scaleless(name):
    return name[:name.rindex("_scale")]


def check_refusals(tmp, form, packed, data):
    """A byte that is no number, and a scale that is missing."""
    path = os.path.join(tmp, "wrong")
    t = read_safetensors(f"{packed}/model.safetensors")
    name = next(n for n in t if re.search(r"up_proj(\.weight)?_scale(_inv)?$", n))
    shutil.copytree(packed, path)
    write_safetensors(f"{path}/model.safetensors", {n: v for n, v in t.items() if n != name})
    assert scaleless(name) in run(tmp, "missing", path, data, expect=3)[1]
    dtype, shape, raw = t[name]
    nan = {"F8_E4M3": b"\x7f", "BF16": b"\xc0\x7f", "U8": b"\xff"}.get(dtype, b"\0\0\xc0\x7f")
    write_safetensors(f"{path}/model.safetensors", {**t, name: (dtype, shape, nan + raw[len(nan):])})
    for home in "host", "files":
        said = run(tmp, "nan-" + home, path, data, expect=3, memory__base=home)[1]
        assert re.search("(up|gate)_proj", said) and "not finite" in said, said


def check_homes(tmp, packed, decoded, data, homes, suffix=""):
    """A run has the bits of the decoded model's, in both dtypes and from every home."""
    for dtype in ("f32",) if SLOW else ("f32", "bf16"):
        plain = write_plain(os.path.join(tmp, "plain-" + dtype), packed, decoded, dtype.upper(), suffix)
        want, _ = run(tmp, "of-plain-" + dtype, plain, data, model__dtype=dtype)
        for name in homes:
            got, _ = run(tmp, f"{name}-{dtype}", packed, data, model__dtype=dtype, **HOMES[name])
            assert losses(got) == losses(want), (dtype, name, losses(got), losses(want))
            assert planes(f"{got}/checkpoint-3") == planes(f"{want}/checkpoint-3"), (dtype, name)


def main(check_fixture, check):
    check_fixture()
    for form in sys.argv[1:]:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as tmp:
            check(tmp, form)
    print("ok")


def check(tmp, form):
    data = write_data(os.path.join(tmp, "train.jsonl"))
    model = os.path.join(tmp, "made")
    if "experts" in form:
        with open(os.path.join(HERE, "..", "parity", "mistral4", "config.json")) as f:
            write_model(model, {**json.load(f), "vocab_size": 272, "hidden_size": 72, "moe_intermediate_size": 64})
    else:
        write_model(model, config(hidden_size=144, intermediate_size=272, num_hidden_layers=2))
    packed, decoded = write(os.path.join(tmp, "packed"), with_weights(tmp, model, data), form)
    assert len(decoded) == (4 if "experts" in form else 14)
    check_homes(tmp, packed, decoded, data, HOMES)
    check_kept(tmp, form, packed, data)
    check_refusals(tmp, form, packed, data)


if __name__ == "__main__":
    main(check_fixture, check)
