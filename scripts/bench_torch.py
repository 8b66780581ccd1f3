# SPDX-License-Identifier: Apache-2.0
"""Training throughput beside transformers + torch: same model, batch, threads and machine, in one run.

Every sample fills its row, so that neither side packs or pads. torch runs SDPA attention and its fused AdamW,
clipping and accumulating as we do; bf16 is autocast over FP32 weights. Prints the median step of each of three
turns, ours and theirs by turns, and the ratio of the medians; a bf16 figure says little on a CPU without
AVX512_BF16 (printed). scripts/setup --parity makes the environment.
    MEGATRAIN=build/cli/megatrain .venv-parity/bin/python scripts/bench_torch.py [f32] [bf16]
"""
import json
import os
import random
import statistics
import sys
import tempfile
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tests", "cli"))
from tiny import base, config, megatrain, metrics, write_ini, write_model

THREADS = len(os.sched_getaffinity(0))
SEQ, ROWS, MICRO, STEPS, SKIP, TURNS = 256, 8, 8, 8, 2, 3
SHAPE = dict(num_hidden_layers=8, hidden_size=512, intermediate_size=1536, num_attention_heads=8, num_key_value_heads=4,
             head_dim=64, vocab_size=8192, max_position_embeddings=512)


def write_rows(path):
    r = random.Random(3)
    with open(path, "w") as f:
        for _ in range(STEPS * ROWS):
            f.write(json.dumps({"input_ids": [r.randrange(SHAPE["vocab_size"]) for _ in range(SEQ)]}) + "\n")
    return path


def ours(tmp, model, data, dtype, turn):
    out = os.path.join(tmp, f"{dtype}-{turn}")
    ini = write_ini(out + ".ini", base(model, data, out, model__dtype=dtype, data__eval="", data__seq_len=SEQ,
        data__shuffle="off", train__steps=STEPS, train__batch_size=ROWS, train__micro_batch=MICRO, train__warmup=0,
        memory__device_budget="2GiB", checkpoint__save="weights", device__cpu_threads=THREADS))
    megatrain("-q", "run", ini)
    return statistics.median(m["t_step"] for m in metrics(out)[SKIP:] if "loss" in m)


def theirs(path, data, dtype):
    torch.manual_seed(0)
    hf = AutoConfig.from_pretrained(path)
    hf._attn_implementation = "sdpa"
    model = AutoModelForCausalLM.from_config(hf).float().train()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    rows = [json.loads(l)["input_ids"] for l in open(data)]
    times = []
    for step in range(STEPS):
        t0 = time.perf_counter()
        opt.zero_grad()
        for at in range(step * ROWS, (step + 1) * ROWS, MICRO):
            ids = torch.tensor(rows[at:at + MICRO])
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
                logits = model(input_ids=ids, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]).float(),
                                                     ids[:, 1:].reshape(-1), reduction="sum")
            (loss / (ROWS * (SEQ - 1))).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
        times.append(time.perf_counter() - t0)
    return statistics.median(times[SKIP:])


def main():
    torch.set_num_threads(THREADS)
    flags = next((l for l in open("/proc/cpuinfo") if l.startswith("flags")), "")
    print(f"load average {os.getloadavg()[0]:.2f}, {THREADS} threads, torch {torch.__version__}, AVX512_BF16: "
          f"{'yes' if 'avx512_bf16' in flags else 'no'}")
    with tempfile.TemporaryDirectory() as tmp:
        model = write_model(os.path.join(tmp, "model"), config("qwen3", **SHAPE))
        data = write_rows(os.path.join(tmp, "rows.jsonl"))
        for dtype in sys.argv[1:] or ["f32", "bf16"]:
            mine, other = [], []
            for turn in range(TURNS):
                mine.append(ours(tmp, model, data, dtype, turn))
                other.append(theirs(model, data, dtype))
                print(f"  {dtype} turn {turn + 1}: ours {mine[-1]:.3f} s a step, torch {other[-1]:.3f} s", flush=True)
            a, b = statistics.median(mine), statistics.median(other)
            print(f"{dtype}: ours {ROWS * SEQ / a:.0f} tok/s, torch {ROWS * SEQ / b:.0f} tok/s: {b / a:.2f}x   target 1.5, at least 1.3")


main()
