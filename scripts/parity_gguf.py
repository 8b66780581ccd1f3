# SPDX-License-Identifier: Apache-2.0
"""Exports of both kinds through llama.cpp's converters: a run's model through convert_hf_to_gguf.py, its adapters
through convert_lora_to_gguf.py. Each tensor of the results holds the values of ours. The converters are those in the
source package of llama-cpp-python (some 77 MB, once), or in the folder $MEGATRAIN_LLAMA_CPP.
"""
import glob
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
sys.path.insert(0, os.path.join(ROOT, "tests", "cli"))
import numpy as np
from safetensors.torch import load_file

from tiny import base, config, megatrain, write_ini, write_model

CONVERTERS = os.environ.get("MEGATRAIN_LLAMA_CPP", os.path.join(ROOT, ".venv-parity", "llama.cpp"))
PACKAGE = "llama-cpp-python==0.3.36"
FAMILIES = {"llama": "mistral"}  # with a small tokenizer of that kind
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


def same_values(theirs, path):
    ours = {k: v.float().numpy() for k, v in load_file(path).items()}
    assert sorted(map(fingerprint, theirs.values())) == sorted(map(fingerprint, ours.values())), sorted(theirs)


def check(tmp, family, style):
    model = os.path.join(tmp, "model-" + family)
    shutil.copytree(os.path.join(ROOT, "tests", "data", "chat", style), model)
    write_model(model, config(family, vocab_size=340, num_hidden_layers=2, tie_word_embeddings=False))
    data = os.path.join(tmp, "train.jsonl")
    with open(data, "w") as f:
        f.write('{"input_ids": [5, 6, 7, 8, 9, 10, 11, 12], "labels": [5, 6, 7, 8, 9, 10, 11, 12]}\n' * 8)
    for kind in "none", "lora":
        out = os.path.join(tmp, f"out-{family}-{kind}")
        keys = {"adapter__kind": "lora", "adapter__rank": 4, "adapter__alpha": 12} if kind == "lora" else {}
        ini = write_ini(out + ".ini", base(model, data, out, data__eval="", data__seq_len=16, train__steps=3,
                                           train__batch_size=2, train__micro_batch=1, **keys))
        megatrain("-q", "run", ini)
        folder = out + "-export"
        megatrain("-q", "export", os.path.join(out, "latest"), folder)
        if kind == "none":
            theirs, _ = convert("convert_hf_to_gguf.py", out + ".gguf", folder)
            same_values(theirs, os.path.join(folder, "model.safetensors"))
        else:
            theirs, about = convert("convert_lora_to_gguf.py", out + ".gguf", "--base", model, folder)
            assert about["adapter.lora.alpha"] == 12, about
            same_values(theirs, os.path.join(folder, "adapter_model.safetensors"))
        print(f"ok {family}, {'adapters' if kind == 'lora' else 'a model'}: {len(theirs)} tensors", flush=True)


def main():
    fetch()
    with tempfile.TemporaryDirectory() as tmp:
        for family, style in FAMILIES.items():
            check(tmp, family, style)


main()
