# SPDX-License-Identifier: Apache-2.0
"""Random combinations of a family, shapes, what is trained, the base's format and settings, kept by scripts/parity
combinations --store: losses, norms and tensors against transformers and PEFT in double; then the same bits under another
placement, where dead scratch is NaN, interrupted and resumed there in half of the cases.
"""
import json
import os
import shutil
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cli"))
import sums
from test_parity import at_most, relative
from tiny import POISON, SLOW, base, fixture, losses, megatrain, metrics, read_safetensors, write_ini

HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "combinations")


def model_of(tmp, name, fmt):
    model, packed = fixture(f"combinations/{name}/model"), os.path.join(tmp, name + "-" + fmt)
    if fmt not in ("nf4", "fp8"):
        return model
    if not os.path.exists(packed):
        megatrain("-q", "export", model, packed, "--quantize", fmt)
    return packed


def run(tmp, name, out, expected, place, stop=0, then=None):
    drive, data = os.path.join(tmp, "drive"), os.path.join(tmp, name + ".jsonl")
    os.makedirs(drive, exist_ok=True)
    shutil.copy(os.path.join(HERE, name, "data.jsonl"), data)

    def ini(place):
        over = dict(expected["settings"], memory__device_budget="256MiB", model__init="weights", model__dtype="f32", data__eval="",
                    data__packing="off", data__shuffle="off", train__steps=expected["steps"], train__batch_size=expected["rows"],
                    optimizer__grad_dtype="f32", checkpoint__frozen="copy", memory__nvme_paths=drive, **place)
        if expected["kind"] in ("lora", "dora"):
            over.update(adapter__kind=expected["kind"], adapter__path=fixture(f"combinations/{name}/start"))
        elif expected["freeze"]:
            over["model__freeze"] = expected["freeze"]
        return write_ini(os.path.join(tmp, out + ".ini"), base(model_of(tmp, name, expected["base"]), data, os.path.join(tmp, out), **over))

    if stop:
        megatrain("-q", "run", ini(place), "--max-steps", stop)
    megatrain("-q", "run", ini(then if stop else place), *(["--resume"] if stop else []), env=POISON if out.endswith("-b") else None)
    checkpoint = os.path.join(tmp, out, f"checkpoint-{expected['steps']}")
    if expected["kind"] in ("lora", "dora"):
        return os.path.join(tmp, out), read_safetensors(os.path.join(checkpoint, "adapter_model.safetensors"))
    megatrain("-q", "export", checkpoint, checkpoint + "-f32", "--dtype=f32")
    return os.path.join(tmp, out), read_safetensors(os.path.join(checkpoint + "-f32", "model.safetensors"))


def check(tmp, name):
    with open(os.path.join(HERE, name, "expected.json")) as f:
        expected = json.load(f)
    print(f"{name}: {expected['case']}")
    first, second = expected["places"]
    out, got = run(tmp, name, name + "-a", expected, first)
    steps = [m for m in metrics(out) if "loss" in m]
    assert len(steps) == expected["steps"]
    at_most("losses", max(relative(m["loss"], l) for m, l in zip(steps, expected["losses"])), 2e-6)
    at_most("norms", max(relative(m["grad_norm"], n) for m, n in zip(steps, expected["norms"])), 2e-5)
    for tensor, error in sums.errors(got, sums.read(os.path.join(HERE, name, "trained.sums"))).items():
        at_most(tensor, error, 1e-4)
    if SLOW:
        return
    if expected["kind"] in ("lora", "dora"):
        merged = os.path.join(tmp, name + "-merged")
        megatrain("-q", "export", "--merge", "--dtype", "f32", os.path.join(out, f"checkpoint-{expected['steps']}"), merged)
        of, into = (read_safetensors(os.path.join(d, "model.safetensors")) for d in (model_of(tmp, name, expected["base"]), merged))
        pieces = (".absmax", "_absmax", "_map", "__nf4", "_scale_inv")
        assert set(into) == {k for k in of if not k.endswith(pieces)}, set(into) ^ set(of)
        assert not any(into[k][0] in ("U8", "F8_E4M3") for k in into)
    stop = expected["stop"]
    other, again = run(tmp, name, name + "-b", expected, first if stop else second, stop, second)
    assert losses(other) == losses(out) and again == got, "another placement, other bits"


def check_packed(tmp, name):
    """What is not of a nested decoder is copied, and listed as not packed; the decoder has the files' names."""
    model, out = fixture(name), os.path.join(tmp, name + "-packed")
    megatrain("-q", "export", model, out, "--quantize", "nf4")
    of, into = (read_safetensors(os.path.join(d, "model.safetensors")) for d in (model, out))
    tower = [k for k in of if "language_model" not in k and not k.startswith("lm_head")]
    assert tower and not set(of) - set(into) and all(into[k] == of[k] for k in tower)
    with open(os.path.join(out, "config.json")) as f:
        plain = json.load(f)["quantization_config"]["llm_int8_skip_modules"]
    assert all(any(("model." + k.removeprefix("model.")).startswith(p) for p in plain) for k in tower), plain


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as tmp:
        for model in ("qwen3_vl", "mistral3", "gemma3"):
            check_packed(tmp, model)
        for case in sys.argv[1:] or sorted(os.listdir(HERE)):
            check(tmp, case)
