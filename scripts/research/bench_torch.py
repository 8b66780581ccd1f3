# SPDX-License-Identifier: Apache-2.0
"""Training throughput beside transformers + torch: same model, batch, threads and machine, a step of each in turn.

Each has all cores while the other is stopped, and they alternate at every step, so that a machine's drift affects
both. Every sample fills its row, so that neither side packs or pads. torch runs SDPA attention and its fused AdamW,
clipping and accumulating as we do; bf16 is autocast over FP32 weights. Prints the times of both in each round, the
rates of matrix products (6 N), and the median of the rounds' ratios; a bf16 figure means little on a CPU without
AVX512_BF16 (printed). `moe` is a mixture of experts in f32, compared in each round with the faster of transformers' two
implementations of experts. `lora` trains adapters of rank 16 on all linear layers of the frozen dense model, in f32,
beside PEFT (4 N: the weights have no gradient). `qwen3_5` has the gated delta rule in three of four layers, beside
transformers' path in torch, and `deepseek` a mixture with latent attention, both in f32. `generate` has the shape of
SmolLM2-135M in f32: greedy tokens of many short prompts, and of a long one, beside transformers' generate() with its cache;
both without loading the model. scripts/setup --parity makes the environment.
    MEGATRAIN=build/cli/megatrain .venv-parity/bin/python scripts/research/bench_torch.py [f32|bf16|moe|lora|qwen3_5|deepseek|generate]... [--turns N]
"""
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tests", "cli"))
from tiny import BINARY, base, config, write_ini, write_model

CORES = len(os.sched_getaffinity(0))
SEQ, ROWS, MICRO, TURNS = 512, 8, 2, 12
SHAPE = dict(num_hidden_layers=12, hidden_size=512, intermediate_size=1536, num_attention_heads=8,
             num_key_value_heads=4, head_dim=64, vocab_size=16000, max_position_embeddings=512)
HEADS = SHAPE["head_dim"] * (SHAPE["num_attention_heads"] + SHAPE["num_key_value_heads"])
LAYER = SHAPE["hidden_size"] * (2 * HEADS + 3 * SHAPE["intermediate_size"])
HEAD = SHAPE["hidden_size"] * SHAPE["vocab_size"]
FLOP = 6 * (SHAPE["num_hidden_layers"] * LAYER + HEAD) * SEQ * ROWS  # of the matrices alone, a step
EXPERTS, CHOSEN, WIDTH = 16, 4, 512
MIXTURE = dict(num_experts=EXPERTS, num_experts_per_tok=CHOSEN, moe_intermediate_size=WIDTH, num_hidden_layers=6)
MIXTURE_LAYER = SHAPE["hidden_size"] * (2 * HEADS + 3 * CHOSEN * WIDTH + EXPERTS)
#: the same hidden size, with the delta rule; and with latents
DELTA = dict(linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=64, linear_value_head_dim=64, linear_conv_kernel_dim=4,
             full_attention_interval=4, num_hidden_layers=8)
LATENT = dict(num_key_value_heads=8, head_dim=None, q_lora_rank=256, kv_lora_rank=128, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64,
              n_routed_experts=EXPERTS, num_experts_per_tok=CHOSEN, moe_intermediate_size=WIDTH, n_shared_experts=1, first_k_dense_replace=1,
              n_group=1, topk_group=1, routed_scaling_factor=1.0, norm_topk_prob=True, num_hidden_layers=6)
MODELS = {"moe": ("qwen3_moe", MIXTURE), "qwen3_5": ("qwen3_5_text", DELTA), "deepseek": ("deepseek_v3", LATENT)}
#: how transformers runs experts; None: it has none
WAYS = {"f32": [None], "bf16": [None], "moe": ["grouped_mm", "eager"], "lora": [None], "qwen3_5": [None],
        "deepseek": ["grouped_mm", "eager"]}
RANK = 16
TARGETS = {"f32": "1.5, at least 1.3", "bf16": "1.5, at least 1.3", "moe": "1.3", "lora": "at least 1.3 with AVX-512, 1.1 with AVX2",
           "qwen3_5": "1.5", "deepseek": "1.2"}


#: prompts, their tokens, new tokens of each, and the target
GENERATED = [(64, 256, 128, "at least 1.3"), (1, 1000, 1000, "at least 0.9")]
SMALL = dict(num_hidden_layers=30, hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3, head_dim=64,
             vocab_size=49152, max_position_embeddings=2048, tie_word_embeddings=True, eos_token_id=None)


def delta_layers():
    """Parameters in the matrices of the decoder with the delta rule."""
    h, k, v = SHAPE["hidden_size"], DELTA["linear_num_key_heads"] * DELTA["linear_key_head_dim"], \
        DELTA["linear_num_value_heads"] * DELTA["linear_value_head_dim"]
    mlp, n = 3 * h * SHAPE["intermediate_size"], DELTA["num_hidden_layers"]
    delta = h * (2 * k + 3 * v + 2 * DELTA["linear_num_value_heads"])
    full = h * (2 * HEADS + SHAPE["head_dim"] * SHAPE["num_attention_heads"])  # with gates
    return n * mlp + n * 3 // 4 * delta + n // 4 * full


def latent_layers():
    """Parameters in the matrices of the mixture with latents that a token uses."""
    c, h, heads = LATENT, SHAPE["hidden_size"], SHAPE["num_attention_heads"]
    nope, rope, v = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    mla = h * (c["q_lora_rank"] + c["kv_lora_rank"] + rope) + heads * ((nope + rope) * c["q_lora_rank"] + (nope + v) * c["kv_lora_rank"] + v * h)
    sparse = 3 * h * WIDTH * (CHOSEN + 1) + h * EXPERTS
    return c["num_hidden_layers"] * mla + (c["num_hidden_layers"] - 1) * sparse + 3 * h * SHAPE["intermediate_size"]


def flop(what):
    """Operations of a step in the matrices that a token uses."""
    if what == "lora":
        return FLOP * 4 // 6
    if what in ("qwen3_5", "deepseek"):
        return 6 * ((delta_layers() if what == "qwen3_5" else latent_layers()) + HEAD) * SEQ * ROWS
    if what != "moe":
        return FLOP
    return 6 * (MIXTURE["num_hidden_layers"] * MIXTURE_LAYER + HEAD) * SEQ * ROWS


def write_rows(path):
    r = random.Random(3)
    with open(path, "w") as f:
        for _ in range((TURNS + 2) * ROWS):
            f.write(json.dumps({"input_ids": [r.randrange(SHAPE["vocab_size"]) for _ in range(SEQ)]}) + "\n")
    return path


class Ours:
    """A run that is stopped except during the step of step()."""

    def __init__(self, tmp, model, data, what):
        self.out = os.path.join(tmp, what)
        adapter = dict(adapter__kind="lora", adapter__rank=RANK, adapter__alpha=2 * RANK) if what == "lora" else {}
        ini = write_ini(self.out + ".ini", base(model, data, self.out, model__dtype="bf16" if what == "bf16" else "f32", data__eval="",
            data__seq_len=SEQ, data__shuffle="off", train__steps=TURNS + 1, train__batch_size=ROWS,
            train__micro_batch=MICRO, train__warmup=0, memory__device_budget="2GiB", checkpoint__save="weights",
            device__cpu_threads=CORES, **adapter))
        self.p = subprocess.Popen([BINARY, "-q", "run", ini])
        self.done = 0
        self.wait()

    def wait(self):
        while self.p.poll() is None and len(self.steps()) == self.done:
            time.sleep(0.001)
        self.p.send_signal(signal.SIGSTOP)
        self.done += 1

    def steps(self):
        path = os.path.join(self.out, "metrics.jsonl")
        return [l for l in open(path) if '"loss"' in l and l.endswith("\n")] if os.path.exists(path) else []

    def step(self):
        t0 = time.perf_counter()
        self.p.send_signal(signal.SIGCONT)
        self.wait()
        return time.perf_counter() - t0

    def end(self):
        self.p.send_signal(signal.SIGCONT)
        if self.p.wait():
            sys.exit(f"megatrain run: exit {self.p.returncode}")


def theirs(path, data, what, experts):
    """Runs a step for each line of standard input and prints its time; asleep between steps."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    torch.set_num_threads(CORES)
    torch.manual_seed(0)
    hf = AutoConfig.from_pretrained(path)
    hf._attn_implementation = "sdpa"
    if experts != "None":
        hf._experts_implementation = experts
    model = AutoModelForCausalLM.from_config(hf).float().train()
    if what == "lora":
        from peft import LoraConfig, get_peft_model
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=RANK, lora_alpha=2 * RANK, target_modules="all-linear"))
    trained = [p for p in model.parameters() if p.requires_grad]
    opt = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.1, fused=True)
    rows = torch.tensor([json.loads(l)["input_ids"] for l in open(data)])

    def step(rows):
        t0 = time.perf_counter()
        opt.zero_grad()
        for ids in rows.split(MICRO):
            with torch.autocast("cpu", torch.bfloat16, enabled=what == "bf16"):
                logits = model(input_ids=ids, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]).float(),
                                                     ids[:, 1:].reshape(-1), reduction="sum")
            (loss / (ROWS * (SEQ - 1))).backward()
        torch.nn.utils.clip_grad_norm_(trained, 0.5)
        opt.step()
        return time.perf_counter() - t0

    for _, batch in zip(sys.stdin, rows.split(ROWS)):
        print(step(batch), flush=True)


def theirs_generated(path):
    """Makes the model, then goes on with the prompts of each file that standard input names, and prints the seconds."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    torch.set_num_threads(CORES)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), attn_implementation="sdpa").float().eval()
    model.save_pretrained(path)
    print("made", flush=True)
    for line in sys.stdin:
        prompts, new = line.split()
        ids, t0 = torch.tensor([json.loads(l)["prompt_ids"] for l in open(prompts)]), time.perf_counter()
        model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=int(new), min_new_tokens=int(new), do_sample=False)
        print(time.perf_counter() - t0, flush=True)


def ours_generated(model, prompts, new, out):
    p = subprocess.run([BINARY, "generate", model, "--prompts", prompts, "--out", out, "--max-tokens", str(new), "--temperature", "0", "--batch", "64", "--guesses", "0",
                        "--set", "model.dtype=f32", "--set", f"device.cpu_threads={CORES}"], text=True, capture_output=True, check=True)
    tokens, each = re.search(r"(\d+) tokens, (\S+) seconds", p.stderr).groups()
    return int(tokens) * float(each)


def compare_generation(tmp, turns):
    model = write_model(os.path.join(tmp, "small"), {k: v for k, v in config("llama", **SMALL).items() if v is not None})
    torch = subprocess.Popen([sys.executable, __file__, "--theirs-generated", model], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    torch.stdout.readline()
    for n, length, new, target in GENERATED:
        prompts, r, ratios = os.path.join(tmp, "prompts.jsonl"), random.Random(n), []
        with open(prompts, "w") as f:
            f.writelines(json.dumps({"prompt_ids": [r.randrange(3, SMALL["vocab_size"]) for _ in range(length)]}) + "\n" for _ in range(n))
        for turn in range(turns):
            a = ours_generated(model, prompts, new, os.path.join(tmp, "out.jsonl"))
            torch.stdin.write(f"{prompts} {new}\n")
            torch.stdin.flush()
            b = float(torch.stdout.readline())
            ratios.append(b / a)
            print(f"  {n} x {length} + {new}, turn {turn + 1}: ours {a:.1f} s, transformers {b:.1f} s: {b / a:.2f}x", flush=True)
        print(f"generate {n} x {length} + {new}: {statistics.median(ratios):.2f}x transformers' speed   target {target}", flush=True)
    torch.communicate("")


def main():
    if sys.argv[1:2] == ["--theirs"]:
        return theirs(*sys.argv[2:6])
    if sys.argv[1:2] == ["--theirs-generated"]:
        return theirs_generated(sys.argv[2])
    cases = sys.argv[1:]
    if "--turns" in cases:
        globals()["TURNS"] = int(cases.pop(cases.index("--turns") + 1))
        cases.remove("--turns")
    flags = next((l for l in open("/proc/cpuinfo") if l.startswith("flags")), "")
    print(f"load average {os.getloadavg()[0]:.2f}, {CORES} threads each, AVX512_BF16: "
          f"{'yes' if 'avx512_bf16' in flags else 'no'}", flush=True)
    with tempfile.TemporaryDirectory() as tmp:
        if "generate" in cases:
            compare_generation(tmp, TURNS)
            cases.remove("generate")
            if not cases:
                return
        data = write_rows(os.path.join(tmp, "rows.jsonl"))
        for what in cases or ["f32", "bf16"]:
            family, over = MODELS.get(what, ("qwen3", {}))
            cfg = {k: v for k, v in config(family, **{**SHAPE, **over}).items() if v is not None}
            compare(tmp, write_model(os.path.join(tmp, "model-" + what), cfg), data, what)


class Theirs:
    def __init__(self, model, data, dtype, experts):
        self.p = subprocess.Popen([sys.executable, __file__, "--theirs", model, data, dtype, str(experts)],
                                  stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.step()

    def step(self):
        self.p.stdin.write("\n")
        self.p.stdin.flush()
        return float(self.p.stdout.readline())


def compare(tmp, model, data, dtype):
    torch, work = [Theirs(model, data, dtype, way) for way in WAYS[dtype]], flop(dtype) / 1e9
    ours, ratios = Ours(tmp, model, data, dtype), []
    for turn in range(TURNS):
        a, each = ours.step(), [t.step() for t in torch]
        b = min(each)
        ratios.append(b / a)
        ways = ", ".join(f"{way or 'torch'} {t:.2f} s ({work / t:.0f})" for way, t in zip(WAYS[dtype], each))
        print(f"  {dtype} turn {turn + 1}: ours {a:.2f} s a step ({work / a:.0f} GFLOP/s), {ways}: {b / a:.2f}x", flush=True)
    ours.end()
    for t in torch:
        t.p.communicate("")
    print(f"{dtype}: {statistics.median(ratios):.2f}x torch's throughput   target {TARGETS[dtype]}", flush=True)


main()
