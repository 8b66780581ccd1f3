# SPDX-License-Identifier: Apache-2.0
"""Int4 as GPTQ, AWQ and compressed-tensors release it, in groups of any size, with zero points: the bits of the decoded model from every
home. int4.safetensors, of these programs, says what their codes mean: in f32 code - zero times scale, which f16 rounds to what they compute.

test_int4.py FORM... (a key of FORMS)
"""
import json
import os
import random
import re
import shutil
import struct

from test_packed import bf16_bytes
from test_released import HOMES, check_homes, compressed, copy, main, run
from tiny import base, config, losses, megatrain, read_safetensors, with_weights, write_data, write_ini, write_model

HERE = os.path.dirname(os.path.abspath(__file__))
PLACE = [0, 4, 1, 5, 2, 6, 3, 7]  # of AWQ's outputs in a word


def gptq(group, form="gptq"):
    return {"quant_method": "gptq", "bits": 4, "group_size": group, "sym": group == -1, "desc_act": False, "checkpoint_format": form}


def awq(group, plain):
    return {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm", "modules_to_not_convert": plain}


def int4(symmetric=False, **shape):
    made = compressed(4, form="pack-quantized", **shape)
    group = made["config_groups"]["group_0"]
    group["input_activations"] = None
    group["weights"].update(type="int", symmetric=symmetric, actorder="static")
    return made


FORMS = {"gptq-64": gptq(64), "gptq-row": gptq(-1), "gptq-v2-32": gptq(32, "gptq_v2"), "awq-128": awq(128, ["self_attn"]),
         "awq-experts-32": awq(32, ["k_proj", "mlp.gate"]),
         "int4-128": int4(strategy="group", group_size=128), "int4-row": int4(strategy="channel"),
         "int4-64": int4(strategy="group", group_size=64, symmetric=True)}


def words(tensor):
    return struct.unpack(f"<{len(tensor[2]) // 4}I", tensor[2])


def scales_of(tensor):
    dtype, _, raw = tensor
    if dtype == "F16":
        return struct.unpack(f"<{len(raw) // 2}e", raw)
    return [struct.unpack("<f", b"\0\0" + raw[i:i + 2])[0] for i in range(0, len(raw), 2)]


def decode(t, stem, form):
    """(shape, values) of a layer, by plain code."""
    if stem + "weight_packed" in t:
        (rows, n), codes, scale = t[stem + "weight_packed"][1], words(t[stem + "weight_packed"]), t[stem + "weight_scale"]
        cols, across, zeros = 8 * n, scale[1][1], words(t[stem + "weight_zero_point"]) if stem + "weight_zero_point" in t else None
        code = lambda r, c: codes[r * n + c // 8] >> c % 8 * 4
        zero = lambda r, g: zeros[r // 8 * across + g] >> r % 8 * 4 if zeros else 8
        at = lambda r, g: r * across + g
    else:
        codes, zeros, scale = words(t[stem + "qweight"]), words(t[stem + "qzeros"]), t[stem + "scales"]
        across, rows = scale[1]
        is_awq, more = form.startswith("awq"), 0x11111111 if form.startswith("gptq") and "v2" not in form else 0
        cols = t[stem + "qweight"][1][0] * (1 if is_awq else 8)
        shift = lambda r: 4 * (PLACE[r % 8] if is_awq else r % 8)
        code = lambda r, c: codes[c * (rows // 8) + r // 8] >> shift(r) if is_awq else codes[c // 8 * rows + r] >> c % 8 * 4
        zero = lambda r, g: (zeros[g * (rows // 8) + r // 8] + more & 0xffffffff) >> shift(r)
        at = lambda r, g: g * rows + r
    scales, group = scales_of(scale), cols // across
    return [rows, cols], [((code(r, c) & 15) - (zero(r, c // group) & 15)) * scales[at(r, c // group)] for r in range(rows) for c in range(cols)]


def tensors(r, stem, rows, cols, form):
    last = form.rsplit("-", 1)[1]
    group = cols if last == "row" else int(last)
    across, codes = cols // group, ("I32", r.randbytes(rows * cols // 2))
    half = b"".join(struct.pack("<e", r.uniform(0.001, 0.004)) for _ in range(rows * across))
    if form.startswith("int4"):
        out = {"weight_packed": (codes[0], [rows, cols // 8], codes[1]), "weight_shape": ("I64", [2], struct.pack("<2q", rows, cols)),
               "weight_scale": ("F16", [rows, across], half)}
        if form != "int4-64":
            half = b"".join(map(bf16_bytes, struct.unpack(f"<{rows * across}e", half)))
            out["weight_scale"] = "BF16", [rows, across], half
            out["weight_zero_point"] = "I32", [(rows + 7) // 8, across], r.randbytes((rows + 7) // 8 * across * 4)
    else:
        shape = [cols, rows // 8] if form.startswith("awq") else [cols // 8, rows]
        zeros = b"\x77" * (across * rows // 2) if form == "gptq-row" else r.randbytes(across * rows // 2)
        out = {"qweight": (codes[0], shape, codes[1]), "qzeros": ("I32", [across, rows // 8], zeros), "scales": ("F16", [across, rows], half)}
    if form.startswith("gptq"):
        out["g_idx"] = "I32", [cols], struct.pack(f"<{cols}i", *(c // group for c in range(cols)))
        out["bias"] = "F16", [rows], bytes(2 * rows)  # AutoGPTQ's, of a layer that has none
    return {stem + name: tensor for name, tensor in out.items()}


def write(path, model, form):
    """A copy of the model with matrices of its layers packed, and {stem: (shape, values)} of these."""
    r, decoded, t = random.Random(form), {}, read_safetensors(f"{model}/model.safetensors")
    plain = FORMS[form].get("modules_to_not_convert", [])
    for name in [n for n in t if n.endswith("_proj.weight") and not any(p in n for p in plain)]:
        stem, (_, shape, _) = name[:-len("weight")], t.pop(name)
        t.update(tensors(r, stem, *shape, form))
        decoded[stem] = decode(t, stem, form)
    return copy(path, model, t, FORMS[form]), decoded


def check_fixture():
    """What the programs decode: in f32 the same products, before f16 or bf16 rounds them."""
    t = read_safetensors(f"{HERE}/int4.safetensors")
    names = [n[:-len(".decoded")] for n in t if n.endswith(".decoded")]
    assert len(names) == 8
    for name in names:
        (dtype, shape, want), (have, values) = t[name + ".decoded"], decode(t, name + ".", name)
        got = b"".join(map(bf16_bytes, values)) if dtype == "BF16" else struct.pack(f"<{len(values)}e", *values)
        got = got.replace(b"\0\x80", b"\0\0") if dtype != "BF16" else got
        assert (have, got) == (shape, want.replace(b"\0\x80", b"\0\0") if dtype != "BF16" else want), name


def check_kept(tmp, form, packed, decoded, data):
    """Frozen, they are in exports as compressed-tensors has them, with the same values; merged, they are decoded."""
    out, _ = run(tmp, "frozen", packed, data, model__freeze="*_proj.weight", checkpoint__frozen="copy")
    megatrain("export", f"{out}/checkpoint-3", f"{out}-out")
    got = read_safetensors(f"{out}-out/model.safetensors")
    for stem, of in decoded.items():
        assert decode(got, stem, "int4") == of, stem
    with open(f"{out}-out/config.json") as f:
        q = json.load(f)["quantization_config"]
    assert q["quant_method"] == "compressed-tensors" and q["config_groups"]["group_0"]["weights"]["symmetric"] == (form == "int4-64"), q
    again, _ = run(tmp, "again", f"{out}-out", data)
    first, _ = run(tmp, "first", f"{out}/checkpoint-3", data)
    assert losses(again) == losses(first), "what was exported is another model"
    megatrain("export", f"{tmp}/host-f32/checkpoint-3", f"{tmp}/merged", "--merge", "--model", packed)
    merged = read_safetensors(f"{tmp}/merged/model.safetensors")
    plain = read_safetensors(f"{tmp}/plain-f32/model.safetensors")
    assert {n: v[1] for n, v in merged.items()} == {n: v[1] for n, v in plain.items()}


def check_in_place(tmp, packed, decoded, data):
    """Put into our order once, they are read in place."""
    megatrain("export", packed, f"{tmp}/rows", "--quantize", "int4")
    got = read_safetensors(f"{tmp}/rows/model.safetensors")
    assert {n[:-len("weight_packed")]: decode(got, n[:-len("weight_packed")], "int4") for n in got if n.endswith("weight_packed")} == decoded
    out, _ = run(tmp, "rows-out", f"{tmp}/rows", data, model__dtype="f32", memory__base="files")
    assert losses(out) == losses(f"{tmp}/host-f32")


def check_refusals(tmp, form, packed, data):
    t, turned = read_safetensors(f"{packed}/model.safetensors"), not form.startswith("int4")
    stem = next(n for n in t if re.search(r"up_proj\.(weight_)?scales?$", n)).rsplit(".", 1)[0] + "."
    scale, codes, q = stem + ("scales" if turned else "weight_scale"), stem + ("qweight" if turned else "weight_packed"), FORMS[form]
    cases = [({scale: None}, q, "scale for each"), ({scale: b"\0\x7e" if t[scale][0] == "F16" else b"\xc0\x7f"}, q, "not finite"),
             ({codes: (t[codes][0], t[codes][1][::-1], t[codes][2])}, q, "another number of bits than 4" if turned else "another shape")]
    if turned:
        cases += [({stem + "qzeros": None}, q, "no qzeros"), ({}, {**q, "bits": 8}, "another number of bits than 4"),
                  ({}, {**q, "group_size": 48}, "group_size"), ({}, {**q, "version": "gemv", "checkpoint_format": "gemv"}, "gemv")]
    if form.startswith("gptq"):
        cases += [({stem + "bias": b"\0\x3c"}, q, "is not zero"), ({}, {**q, "lm_head": True}, "lm_head")]
        if form != "gptq-row":
            cases += [({stem + "g_idx": struct.pack("<i", 1)}, q, "desc_act")]
    for i, (change, quantization, said) in enumerate(cases):
        wrong = {**t, **{n: (*t[n][:2], v + t[n][2][len(v):]) if isinstance(v, bytes) else v for n, v in change.items()}}
        path = copy(f"{tmp}/wrong-{i}", packed, {n: v for n, v in wrong.items() if v}, quantization)
        assert said in run(tmp, f"wrong-{i}-out", path, data, expect=3)[1], (said, i)
    if turned:
        assert "GPTQ or AWQ" in run(tmp, "in-place", packed, data, expect=2, memory__base="files")[1]
        assert "packed as GPTQ or AWQ" in run(tmp, "blocks", packed, data, expect=2, model__freeze="", train__blocks=1, train__block_steps=1)[1]
    if form != "int4-64":
        assert "zero points: set it to bf16" in run(tmp, "aware", packed, data, expect=2, adapter__merge_aware="int4")[1]


def check_plan(tmp, packed, data):
    """Without files, config.json says what planes take."""
    def said(model):
        ini = write_ini(f"{tmp}/plan.ini", base(model, data, f"{tmp}/plan", adapter__kind="lora", model__init="weights"))
        return re.search(r"frozen weights \(packed\) +(.*)", megatrain("run", ini, "--dry-run").stderr)[1]
    bare = shutil.copytree(packed, f"{tmp}/bare")
    os.remove(f"{bare}/model.safetensors")
    # codes, an F16 and a zero point of 4 bits for 128 weights, and the shape in 64 bytes: of three matrices; of two layers, in whole pages
    layer = 3 * (128 * 256 // 2 + 256 * 5 // 2 + 64)
    assert said(bare) == said(packed) == f"{2 * -(-layer // 4096) * 4}.00 KiB", (said(bare), said(packed), layer)


def check(tmp, form):
    data = write_data(os.path.join(tmp, "train.jsonl"))
    model, shape = os.path.join(tmp, "made"), {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32}
    write_model(model, config("qwen3_moe", **shape, moe_intermediate_size=64) if "experts" in form else config(**shape))
    packed, decoded = write(os.path.join(tmp, "packed"), with_weights(tmp, model, data), form)
    assert len(decoded) == (2 * (3 + 24) if "experts" in form else 6 if form.startswith("awq") else 14)
    check_homes(tmp, packed, decoded, data, HOMES if form.startswith("int4") else ("host", "drive"), "weight")
    check_kept(tmp, form, packed, decoded, data)
    check_refusals(tmp, form, packed, data)
    if form == "awq-128":
        check_plan(tmp, packed, data)
        check_in_place(tmp, packed, decoded, data)


if __name__ == "__main__":
    main(check_fixture, check)
