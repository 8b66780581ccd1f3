# SPDX-License-Identifier: Apache-2.0
"""gpt-oss as it is released, its experts in MXFP4: frozen they stay as they came and give the bits of the same model
decoded by transformers (decoded.json of scripts/reference/parity_fixtures.py), wherever they live; trained they are decoded."""
import hashlib
import json
import math
import os
import re
import shutil
import struct
import sys
import tempfile

import test_packed
from tiny import (BINARY, ORACLE, SLOW, base, config, fixture, losses, megatrain, planes, read_safetensors,
                  trained_planes, write_data, write_ini, write_model, write_safetensors)

RELEASED = fixture("gpt_oss_mxfp4")
STEPS = 4
FROZEN = "*.experts.*"
FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def tensors(folder):
    return read_safetensors(os.path.join(folder, "model.safetensors"))


def quantization(folder):
    with open(os.path.join(folder, "config.json")) as f:
        return json.load(f).get("quantization_config")


def is_packed(name):
    return name.endswith(("proj_blocks", "proj_scales"))


def write_decoded(path):
    """The release with its experts as transformers decodes them."""
    with open(os.path.join(RELEASED, "config.json")) as f:
        c = json.load(f)
    c.pop("quantization_config")
    write_model(path, c)
    t = {n: v for n, v in tensors(RELEASED).items() if not is_packed(n)}
    write_safetensors(os.path.join(path, "model.safetensors"),
                      {**t, **experts(RELEASED)})
    return path


def values(t, name):
    """What blocks and scales stand for, in the order of the plain tensor: [experts, in, out], as bf16."""
    (_, (experts, rows, blocks, _), codes), (_, _, scales) = t[name + "_blocks"], t[name + "_scales"]
    cols, out = blocks * 32, bytearray(experts * rows * blocks * 64)
    for i in range(experts * rows * cols):
        c = codes[i // 2] >> (i % 2 * 4) & 15
        x = (-1 if c & 8 else 1) * FP4[c & 7] * 2.0 ** (scales[i // 32] - 127)
        e, r, k = i // (rows * cols), i // cols % rows, i % cols
        struct.pack_into("<H", out, 2 * ((e * cols + k) * rows + r), struct.unpack("<I", struct.pack("<f", x))[0] >> 16)
    return bytes(out)


def experts(folder):
    """The plain tensors of a folder's experts, as transformers decodes them, which is kept by digests."""
    t = tensors(folder)
    with open(os.path.join(RELEASED, "decoded.json")) as f:
        digests = json.load(f)
    out = {}
    for name in digests:
        n_experts, rows, blocks, _ = t[name + "_blocks"][1]
        out[name] = "BF16", [n_experts, blocks * 32, rows], values(t, name)
        assert hashlib.sha256(out[name][2]).hexdigest() == digests[name], f"{name} is not what transformers decodes"
    return out


def train(tmp, name, model, data, env=None, split=0, binary=BINARY, **over):
    out = os.path.join(tmp, name.replace(" ", "-"))
    over = {"train__steps": STEPS, "model__init": "weights", "model__dtype": "bf16", "model__freeze": FROZEN,
            "checkpoint__frozen": "copy", **over}
    ini = write_ini(out + ".ini", base(model, data, out, **over))
    if split:
        megatrain("-q", "run", ini, "--max-steps", split, env=env)
        said = megatrain("-q", "run", ini, "--resume", env=env).stderr
    else:
        said = megatrain("run", ini, env=env, binary=binary).stderr
    return losses(out), os.path.join(out, f"checkpoint-{STEPS}"), said


def frozen_they_stay_as_they_came(tmp, data):
    release, decoded = tensors(RELEASED), write_decoded(os.path.join(tmp, "decoded"))
    drive = os.path.join(tmp, "drive")
    os.makedirs(drive)
    placements = {
        "an expert at a time": {"memory__expert_group": 1, "memory__slots": 2, "env": {"MEGATRAIN_POISON": "1"}},
        "groups of 3": {"memory__expert_group": 3, "memory__activations": "offload", "memory__slots": 3},
        "halves": {"memory__unit": "half", "memory__activations": "recompute", "env": {"MEGATRAIN_POISON": "1"}},
        "disk": {"memory__states": "disk", "memory__nvme_paths": drive, "device__cpu_threads": 1},
        "resumed": {"split": 2},
    }
    for dtype in "bf16", "f32":
        want, ckpt, _ = train(tmp, f"{dtype} plain", decoded, data, binary=ORACLE, model__dtype=dtype)
        got, other, _ = train(tmp, dtype, RELEASED, data, model__dtype=dtype)
        assert got == want and len(got) == STEPS, f"{dtype}: {got} is not {want}"
        assert trained_planes(other) == trained_planes(ckpt), f"{dtype}: weights or moments differ"
        t = tensors(other)
        assert sorted(t) == sorted(release) and all(t[n] == release[n] for n in t if is_packed(n)), "re-encoded"
        assert not any(k.endswith(".master") and ".experts." in k and "proj.weight" in k for k in state_names(other))
        assert quantization(other) == quantization(RELEASED)
        megatrain("verify", other)
        for name, more in placements.items() if dtype == "bf16" or not SLOW else ():
            same, other, _ = train(tmp, f"{dtype} {name}", RELEASED, data, **{"model__dtype": dtype, **more})
            assert same == want, f"{dtype} {name}: {same} is not {want}"
            assert trained_planes(other) == trained_planes(ckpt), f"{dtype} {name}: weights or moments differ"
            t = tensors(other)
            assert all(t[n] == release[n] for n in t if is_packed(n)), f"{dtype} {name}: re-encoded"
    for to in "bf16", "f32":
        out = os.path.join(tmp, "export-" + to)
        megatrain("export", other, out, "--dtype", to)
        t = tensors(out)
        assert sorted(t) == sorted(release) and all(t[n] == release[n] for n in t if is_packed(n)), to
        assert quantization(out) == quantization(RELEASED)


def state_names(checkpoint):
    d = os.path.join(checkpoint, "megatrain")
    return [k for n in os.listdir(d) if n.endswith(".safetensors") for k in read_safetensors(os.path.join(d, n))]


def trained_they_are_decoded(tmp, data):
    want = tensors(write_decoded(os.path.join(tmp, "decoded")))
    _, full, _ = train(tmp, "full", RELEASED, data, model__freeze="", train__learning_rate="0")
    t = tensors(full)
    assert sorted(t) == sorted(want), "not the release's layout in bf16"
    def unsigned(data):
        """AdamW makes a zero of a negative one."""
        return [0 if x == 0x8000 else x for x, in struct.iter_unpack("<H", data)]
    for name in experts(RELEASED):
        assert unsigned(t[name][2]) == unsigned(want[name][2]), f"{name} is not what transformers decodes"
    assert quantization(full) is None
    # the comparison sees a step
    _, moved, _ = train(tmp, "moved", RELEASED, data, model__freeze="", train__steps=STEPS)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    assert tensors(moved)[name] != want[name]


def some_of_them_are_trained(tmp, data):
    """By layers: the rest stays packed, and config.json says where. Within a layer: what is frozen is kept as bf16."""
    release, decoded = tensors(RELEASED), write_decoded(os.path.join(tmp, "decoded"))
    for name, freeze, kept in (("a layer", "model.layers.0.mlp.experts.*", [0]),
                               ("a matrix", "*.experts.*.down_proj.weight", []),
                               ("an expert", "model.layers.1.mlp.experts.2.*", [])):
        want, ckpt, _ = train(tmp, name + " plain", decoded, data, binary=ORACLE, model__freeze=freeze)
        got, other, said = train(tmp, name, RELEASED, data, model__freeze=freeze)
        assert got == want and trained_planes(other) == trained_planes(ckpt), name
        resumed, again, _ = train(tmp, name + " resumed", RELEASED, data, model__freeze=freeze, split=2)
        assert resumed == want and planes(again) == planes(other), name
        t = tensors(other)
        packed = [n for n in release if is_packed(n) and int(n.split(".")[2]) in kept]
        assert sorted(n for n in t if is_packed(n)) == sorted(packed) and all(t[n] == release[n] for n in packed), name
        plain = tensors(ckpt)
        assert all(t[n] == plain[n] for n in t if not is_packed(n)), name
        q = quantization(other)
        if kept:
            assert q["quant_method"] == "mxfp4" and "model.layers.1.mlp.experts" in q["modules_to_not_convert"], q
            assert "model.layers.0.mlp.experts" not in q["modules_to_not_convert"], q
        else:
            assert q is None and "kept as bf16" in said, said
        got, _, _ = train(tmp, name + " again", other, data, model__freeze=freeze)
        assert len(got) == STEPS, "what was written can be read"


def wider_experts_are_packed(tmp, data):
    """When they are loaded, and once for all: weights that MXFP4 has come back."""
    decoded = write_decoded(os.path.join(tmp, "decoded"))
    _, made, said = train(tmp, "made", decoded, data, model__base_dtype="mxfp4")
    assert "mlp.experts.gate_proj 0.00%" in said, said
    out = os.path.join(tmp, "exported")
    assert "mlp.experts.down_proj 0.00%" in megatrain("export", decoded, out, "--quantize", "mxfp4").stderr
    want = experts(RELEASED)
    release, plain = tensors(RELEASED), tensors(decoded)
    for folder in made, out:
        t = tensors(folder)
        assert sorted(t) == sorted(release)
        assert all(t[n][:2] == release[n][:2] for n in t), "not the release's shapes"
        for name in want:
            assert values(t, name) == want[name][2], (folder, name)
        assert quantization(folder) == quantization(RELEASED), quantization(folder)
    t = tensors(out)
    assert all(t[n] == plain[n] for n in t if not is_packed(n)), "only experts are packed"
    megatrain("verify", out)
    got, _, _ = train(tmp, "of what was exported", out, data)
    assert got == train(tmp, "of the release", RELEASED, data)[0]
    assert "already" in megatrain("export", RELEASED, out + "2", "--quantize", "nf4", expect=2).stderr


def experts_in_other_formats(tmp, data):
    """An expert a tensor, in NF4 and FP8: the bits of the model decoded beforehand."""
    data = write_data(os.path.join(tmp, "more.jsonl"))
    model = write_model(os.path.join(tmp, "model"), config("qwen3_moe", num_hidden_layers=2))
    first = os.path.join(tmp, "first")
    megatrain("-q", "run", write_ini(first + ".ini", base(model, data, first, train__steps=1)))
    for fmt in "nf4", "fp8":
        _, packed, _ = train(tmp, fmt + " made", os.path.join(first, "checkpoint-1"), data, model__base_dtype=fmt,
                             train__learning_rate="0")
        decoded = test_packed.write_decoded(os.path.join(tmp, fmt + "-decoded"), packed, "BF16")
        want, ckpt, _ = train(tmp, fmt + " plain", decoded, data, binary=ORACLE)
        for name, more in (("all", {}),
                           ("one", {"memory__expert_group": 1, "memory__slots": 2, "env": {"MEGATRAIN_POISON": "1"}}),
                           ("three", {"memory__expert_group": 3, "memory__activations": "offload"})):
            got, other, _ = train(tmp, f"{fmt} {name}", packed, data, **more)
            assert got == want and trained_planes(other) == trained_planes(ckpt), (fmt, name, got, want)


def adapters_stand_on_them(tmp, data):
    decoded = write_decoded(os.path.join(tmp, "decoded"))
    over = {"model__freeze": "", "adapter__kind": "lora"}
    want, ckpt, _ = train(tmp, "plain", decoded, data, binary=ORACLE, **over)
    got, other, _ = train(tmp, "adapters", RELEASED, data, **over)
    resumed, again, _ = train(tmp, "resumed", RELEASED, data, split=2, **over)
    assert got == want == resumed and len(got) == STEPS
    name = "adapter_model.safetensors"
    a, b, c = (read_safetensors(os.path.join(f, name)) for f in (ckpt, other, again))
    assert a == b == c and a and not any("experts" in n for n in a)
    # another base is refused: a code that is changed
    changed = os.path.join(tmp, "changed")
    shutil.copytree(RELEASED, changed)
    t = tensors(changed)
    n = "model.layers.1.mlp.experts.down_proj_blocks"
    t[n] = (*t[n][:2], bytes([t[n][2][0] ^ 1]) + t[n][2][1:])
    write_safetensors(os.path.join(changed, "model.safetensors"), t)
    ini = os.path.join(tmp, "adapters.ini")
    p = megatrain("-q", "run", ini, "--resume", "--set", f"model.path={changed}", "--max-steps", STEPS + 1, expect=None)
    assert p.returncode and changed in p.stderr, p.stderr


def plans_and_other_commands(tmp, data):
    """config.json alone is enough; 0.54 bytes a parameter of the experts at most, and none of them on the way back."""
    with open(os.path.join(RELEASED, "config.json")) as f:
        c = json.load(f)
    c.update(hidden_size=256, intermediate_size=256)
    alone = write_model(os.path.join(tmp, "alone"), c)
    def table(**over):
        text = megatrain("plan", write_ini(os.path.join(tmp, "plan.ini"), base(alone, data, os.path.join(tmp, "none"), **{
            "model__init": "weights", "model__dtype": "bf16", **over})), "--machine", "rtx4090").stdout
        return {m[1]: int(m[2]) for m in re.finditer(r"^\s+(?:host )?\s*(\S.*?)\s{2,}(\d+)\b", text, re.M)}
    n = 2 * 4 * 3 * 256 * 256
    frozen, full = table(model__freeze="*.experts.*"), table()
    assert 0.53 * n < frozen["frozen weights (packed)"] < 0.54 * n, frozen
    assert "frozen weights (packed)" not in full, full
    assert full["first moments"] - frozen["first moments"] >= 4 * n, (frozen, full)
    told = json.loads(megatrain("inspect", RELEASED, "--json").stdout)
    assert told["parameters"] == sum(math.prod(t[1]) for t in tensors(write_decoded(os.path.join(tmp, "d"))).values())
    assert json.loads(megatrain("inspect", os.path.join(tmp, "d"), "--json").stdout)["active_parameters"] == told["active_parameters"]
    ini = write_ini(os.path.join(tmp, "eval.ini"), base(RELEASED, data, os.path.join(tmp, "eval"), model__init="weights",
                                                        model__dtype="bf16"))
    other = write_ini(os.path.join(tmp, "eval2.ini"), base(os.path.join(tmp, "d"), data, os.path.join(tmp, "eval2"),
                                                           model__init="weights", model__dtype="bf16"))
    a, b = (re.findall(r"[0-9.]{5,}", megatrain("eval", i).stdout) for i in (ini, other))
    assert a and a[0] == b[0], (a, b)


def what_a_file_says_has_to_be_true(tmp, data):
    name = "model.layers.0.mlp.experts.gate_up_proj_scales"
    release = tensors(RELEASED)
    turned = [*release[name][1][:1], release[name][1][2], release[name][1][1]]
    wild = bytes([255]) + release[name][2][1:]
    for what, t, words in (("missing", None, "gate_up_proj"),
                           ("turned", (release[name][0], turned, release[name][2]), name),
                           ("infinite", (*release[name][:2], wild), "finite")):
        for freeze in "", FROZEN:
            wrong = os.path.join(tmp, what + str(bool(freeze)))
            shutil.copytree(RELEASED, wrong)
            rest = {n: v for n, v in release.items() if n != name}
            write_safetensors(os.path.join(wrong, "model.safetensors"), {**rest, name: t} if t else rest)
            ini = write_ini(wrong + ".ini", base(wrong, data, wrong + "-out", model__init="weights", model__freeze=freeze))
            p = megatrain("run", ini, expect=3)
            assert words in p.stderr, (what, p.stderr)
    for family, mend in ("mistral4", "without a weight_scale_inv"), ("gpt_oss", "FineGrainedFP8Config(dequantize=True)"):
        fused = os.path.join(tmp, family)  # gpt_oss has columns before rows
        shutil.copytree(fixture(family), fused)
        fp8 = {n: ("F8_E4M3", t[1], t[2][::2]) if n.endswith("experts.gate_up_proj") else t for n, t in tensors(fused).items()}
        write_safetensors(os.path.join(fused, "model.safetensors"), fp8)
        p = megatrain("run", write_ini(fused + ".ini", base(fused, data, fused + "-out", model__init="weights")), expect=3)
        assert "experts.gate_up_proj" in p.stderr and mend in p.stderr, p.stderr
    # a block that has rows of two matrices
    fused = os.path.join(tmp, "mistral4")
    scales = {n + "_scale_inv": ("F32", [t[1][0], 3, 1], struct.pack(f"<{t[1][0] * 3}f", *[1] * t[1][0] * 3))
              for n, t in tensors(fused).items() if n.endswith("experts.gate_up_proj")}
    write_safetensors(os.path.join(fused, "model.safetensors"), {**tensors(fused), **scales})
    p = megatrain("run", fused + ".ini", expect=3)
    assert "experts.gate_up_proj_scale_inv" in p.stderr and "two matrices apart" in p.stderr, p.stderr


with tempfile.TemporaryDirectory() as tmp:
    for case in sys.argv[1:]:
        print(case)
        folder = os.path.join(tmp, case)
        os.makedirs(folder)
        globals()[case](folder, write_data(os.path.join(folder, "data.jsonl"), vocab=96))
