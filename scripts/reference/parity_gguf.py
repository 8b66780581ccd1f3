# SPDX-License-Identifier: Apache-2.0
"""Exports through llama.cpp's converters: models, also with adapters merged, through convert_hf_to_gguf.py, adapters
through convert_lora_to_gguf.py. Each tensor of the results holds the values of ours, and adapters of several ranks and
scales that were folded add as much as before. The converters are those in the
source package of llama-cpp-python (some 77 MB, once), or in the folder $MEGATRAIN_LLAMA_CPP.
"""
import glob
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
sys.path.insert(0, os.path.join(ROOT, "tests", "cli"))
import numpy as np
from safetensors.torch import load_file

from tiny import base, config, megatrain, with_weights, write_ini, write_model

CONVERTERS = os.environ.get("MEGATRAIN_LLAMA_CPP", os.path.join(ROOT, ".venv-parity", "llama.cpp"))
PACKAGE = "llama-cpp-python==0.3.36"
FAMILIES = {"llama": "mistral", "qwen3": "qwen3", "qwen3_moe": "qwen3"}  # with a small tokenizer of that kind
LORA = {"adapter__kind": "lora", "adapter__rank": 4, "adapter__alpha": 12, "train__learning_rate": "1e-2"}
PATTERNS = {"adapter__rank_pattern": "q_proj:8", "adapter__alpha_pattern": "o_proj:20"}
CASES = {  # what is trained, and the options of export
    "a model": ({}, ()),
    "adapters": (LORA, ()),
    "adapters of several ranks, folded": ({**LORA, **PATTERNS}, ("--fold-scales",)),
    "adapters, merged": ({**LORA, **PATTERNS}, ("--merge",)),
}
# They know tokenizers by a hash of what they make of a text, and small stand-ins have none; they import sentencepiece
# before they look for a file of it.
AS_KNOWN = """import runpy, sys, types
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rsplit("/", 1)[0])
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "qwen2"
sys.modules.setdefault("sentencepiece", types.SimpleNamespace(SentencePieceProcessor=None))
runpy.run_path(sys.argv[0], run_name="__main__")"""


def fetch():
    if os.path.exists(os.path.join(CONVERTERS, "convert_lora_to_gguf.py")):
        return
    with tempfile.TemporaryDirectory() as tmp:
        subprocess.run([sys.executable, "-m", "pip", "-q", "download", "--no-deps", "--no-binary", "llama-cpp-python",
                        "-d", tmp, PACKAGE], check=True)
        safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Debian 12's Python has none
        with tarfile.open(glob.glob(os.path.join(tmp, "*.tar.gz"))[0]) as t:
            t.extractall(tmp, members=[m for m in t if m.name.endswith(".py")], **safe)
        shutil.copytree(glob.glob(os.path.join(tmp, "*", "vendor", "llama.cpp"))[0], CONVERTERS, dirs_exist_ok=True)


def convert(script, out, *args):
    env = {**os.environ, "PYTHONPATH": os.path.join(CONVERTERS, "gguf-py"), "HF_HUB_OFFLINE": "1"}
    p = subprocess.run([sys.executable, "-c", AS_KNOWN, os.path.join(CONVERTERS, script), "--outtype", "f32",
                        "--outfile", out, *args], env=env, capture_output=True, text=True)
    assert p.returncode == 0, p.stderr[-3000:]
    sys.path.insert(0, os.path.join(CONVERTERS, "gguf-py"))
    from gguf import GGUFReader
    r = GGUFReader(out)
    tensors = {t.name: np.array(t.data, dtype=np.float32) for t in r.tensors}
    return tensors, {k: f.contents() for k, f in r.fields.items()}


def fingerprint(a):
    """Of a tensor's values in any order: the converter reorders the rows of queries and keys."""
    return a.size, np.sort(a, axis=None).tobytes()


def tensors_of(path):
    """name -> values; the experts of a layer together, as the converter writes them."""
    found = {}
    for name, t in load_file(path).items():
        found.setdefault(re.sub(r"\.experts\.\d+\.", ".experts.", name), []).append(t.float().numpy())
    return {name: np.stack(t) for name, t in found.items()}


def same_values(theirs, path):
    ours = tensors_of(path)
    assert sorted(map(fingerprint, theirs.values())) == sorted(map(fingerprint, ours.values())), sorted(theirs)


def norms(tensors, first, second, scale_of):
    """The norm of what each adapter adds: scale B A, which reordered rows do not change."""
    pairs = [(name, a, tensors[name.replace(first, second)]) for name, a in tensors.items() if first in name]
    return sorted(float(np.linalg.norm(scale_of(name, a.shape[-2]) * (b.reshape(b.shape[-2:]) @ a.reshape(a.shape[-2:]))))
                  for name, a, b in pairs)


def adds_as_much(theirs, alpha, checkpoint):
    """llama.cpp has one alpha, and divides it by the rank of each pair of matrices."""
    with open(os.path.join(checkpoint, "adapter_config.json")) as f:
        c = json.load(f)
    of = lambda pattern, name, default: next((v for k, v in pattern.items() if f".{k}." in name), default)
    ours = norms(tensors_of(os.path.join(checkpoint, "adapter_model.safetensors")), "lora_A", "lora_B",
                 lambda name, rank: of(c["alpha_pattern"], name, c["lora_alpha"]) / rank)
    got = norms(theirs, "lora_a", "lora_b", lambda name, rank: alpha / rank)
    assert len(ours) == len(got) and min(ours) > 0 and np.allclose(ours, got, rtol=1e-5), (ours, got)


def model_and_data(tmp, family, style):
    model, data = os.path.join(tmp, "model-" + family), os.path.join(tmp, "train.jsonl")
    shutil.copytree(os.path.join(ROOT, "tests", "data", "chat", style), model)
    write_model(model, config(family, vocab_size=352, num_hidden_layers=2, tie_word_embeddings=False))
    with open(data, "w") as f:
        f.write('{"input_ids": [5, 6, 7, 8, 9, 10, 11, 12], "labels": [5, 6, 7, 8, 9, 10, 11, 12]}\n' * 8)
    return with_weights(tmp, model, data, "weights-" + family), data


def check(tmp, family, model, data, what):
    keys, options = CASES[what]
    out = os.path.join(tmp, f"out-{family}-{what.replace(' ', '-')}")
    megatrain("-q", "run", write_ini(out + ".ini", base(
        model, data, out, model__init="weights", data__eval="", data__seq_len=16, train__steps=3, train__batch_size=2,
        train__micro_batch=1, **keys)))
    folder, checkpoint = out + "-export", os.path.join(out, "latest")
    megatrain("-q", "export", checkpoint, folder, *options)
    if os.path.exists(os.path.join(folder, "adapter_model.safetensors")):
        theirs, about = convert("convert_lora_to_gguf.py", out + ".gguf", "--base", model, folder)
        same_values(theirs, os.path.join(folder, "adapter_model.safetensors"))
        adds_as_much(theirs, about["adapter.lora.alpha"], checkpoint)
    else:
        theirs, _ = convert("convert_hf_to_gguf.py", out + ".gguf", folder)
        same_values(theirs, os.path.join(folder, "model.safetensors"))
    print(f"ok {family}, {what}: {len(theirs)} tensors", flush=True)


def main():
    fetch()
    with tempfile.TemporaryDirectory() as tmp:
        for family, style in FAMILIES.items():
            model, data = model_and_data(tmp, family, style)
            for what in CASES:
                check(tmp, family, model, data, what)


if __name__ == "__main__":
    main()
