# SPDX-License-Identifier: Apache-2.0
"""Training steps of real shapes from random weights, for scripts/gpu-check: configurations and their
results. Standard library only."""
import json
import os
import random

# hidden, MLP, layers, query heads, key heads, vocabulary, tied
SHAPES = {
    "tiny": (64, 176, 3, 4, 2, 512, True),
    "0.5b": (896, 4864, 24, 14, 2, 151936, True),
    "1.5b": (1536, 8960, 28, 12, 2, 151936, True),
    "7b": (3584, 18944, 28, 28, 4, 152064, False),
    "8b": (4096, 14336, 32, 32, 8, 128256, False),
}
LLAMA = ("8b",)  # the others are Qwen2's: biases of q, k and v; or mixtures, as Qwen3's
# experts, width of one, experts of a token
MIXTURES = {"moe": (128, 768, 8), "tiny-moe": (8, 32, 2)}
SHAPES |= {"moe": (2048, 6144, 2, 32, 4, 151936, True), "tiny-moe": (64, 176, 2, 4, 2, 512, True)}
HEAD_DIM = {"moe": 128}  # where it is not hidden / query heads


def parameters(shape):
    """Parameters: all, and those that a token uses."""
    h, f, layers, q, kv, vocab, tied = SHAPES[shape]
    d = HEAD_DIM.get(shape, h // q)
    experts, width, chosen = MIXTURES.get(shape, (1, f, 1))
    biases = 0 if shape in LLAMA else 2 * d if shape in MIXTURES else (q + 2 * kv) * d  # or norms of q and k
    attention = h * (q + 2 * kv) * d + q * d * h + (h * experts if shape in MIXTURES else 0)
    layer = attention + 3 * h * width * experts + biases + 2 * h
    return layers * layer + h + vocab * h * (1 if tied else 2), layers * (attention + 3 * h * width * chosen) + vocab * h


def flops_per_token(shape, seq):
    """6 operations for each weight that a token uses, and causal attention; without recomputation."""
    h, _, layers, _, _, _, _ = SHAPES[shape]
    return 6 * parameters(shape)[1] + 6 * layers * h * seq


def write_run(tmp, shape, seq, tokens, budget):
    """Writes a configuration to the folder tmp, with its model and data; returns its path."""
    h, f, layers, q, kv, vocab, tied = SHAPES[shape]
    model = os.path.join(tmp, "model")
    os.makedirs(model, exist_ok=True)
    family = ("LlamaForCausalLM", "llama") if shape in LLAMA else ("Qwen2ForCausalLM", "qwen2")
    mixture = {}
    if shape in MIXTURES:
        family = "Qwen3MoeForCausalLM", "qwen3_moe"
        experts, width, chosen = MIXTURES[shape]
        mixture = {"num_experts": experts, "moe_intermediate_size": width, "num_experts_per_tok": chosen,
                   "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
                   "head_dim": HEAD_DIM.get(shape, h // q)}
    with open(os.path.join(model, "config.json"), "w") as out:
        json.dump({"architectures": [family[0]], "model_type": family[1], "hidden_size": h,
                   "intermediate_size": f, "num_hidden_layers": layers, "num_attention_heads": q,
                   "num_key_value_heads": kv, "vocab_size": vocab, "tie_word_embeddings": tied,
                   "max_position_embeddings": max(seq, 32768), "rms_norm_eps": 1e-6, "rope_theta": 1e6,
                   "hidden_act": "silu", "initializer_range": 0.02, "bos_token_id": 0, "eos_token_id": 1,
                   "torch_dtype": "bfloat16", **mixture}, out)
    data = os.path.join(tmp, f"data-{seq}.jsonl")
    r = random.Random(1)
    with open(data, "w") as out:
        for _ in range(2 * tokens // seq):
            out.write(json.dumps({"input_ids": [r.randrange(vocab) for _ in range(seq)]}) + "\n")
    ini = os.path.join(tmp, "run.ini")
    with open(ini, "w") as out:
        out.write(f"[model]\npath = {model}\ninit = random\ndtype = bf16\n"
                  f"[data]\ntrain = {data}\neval =\nseq_len = {seq}\npacking = on\ncache_dir = {tmp}/cache\n"
                  f"[train]\nsteps = 1000\ntokens_per_step = {tokens}\nlearning_rate = 1e-5\n"
                  f"[memory]\ndevice_budget = {budget}GiB\nhost_budget = 97%\n"
                  f"[checkpoint]\ndir = {tmp}/out\nevery = 0\nsave = weights\n[device]\nkind = cuda\n")
    return ini


def read(metrics):
    """The steps of a metrics file that may still be written."""
    steps = []
    try:
        with open(metrics) as f:
            lines = f.read().splitlines()
    except OSError:
        return []
    for line in lines:
        try:
            steps.append(json.loads(line))
        except ValueError:
            pass  # half written
    return [m for m in steps if "loss" in m]


def median(values):
    values = sorted(values)
    return values[len(values) // 2]


def summarise(shape, seq, tokens, budget, steps, best):
    """Medians; `best` are the TFLOP/s of a matrix product alone, or None."""
    mid = {k: median([m[k] for m in steps]) for k in steps[0]
           if all(isinstance(m.get(k), (int, float)) for m in steps)}
    tok_s = tokens / mid["t_step"]
    tflops = tok_s * flops_per_token(shape, seq) / 1e12
    n, _ = parameters(shape)
    result = {"model": shape, "parameters": n, "seq_len": seq, "tokens_per_step": tokens,
              "device_budget_gib": budget, "steps": len(steps), "loss": steps[-1]["loss"], "tok_s": round(tok_s),
              "model_tflops": round(tflops, 1), "share_of_peak": round(tflops / best, 3) if best else None,
              "adam_ns_per_parameter": round(mid.get("t_opt", 0) / n * 1e9, 3),
              # where the GPU had nothing to do: its input was not there, or the host was between steps
              "idle_waiting": round(mid.get("t_wait_h2d", 0) / mid["t_step"], 4),
              "idle_between": round(mid.get("t_data", 0) / mid["t_step"], 4),
              "h2d_gbps": round(mid.get("h2d_bytes", 0) / mid["t_step"] / 1e9, 2),
              "d2h_gbps": round(mid.get("d2h_bytes", 0) / mid["t_step"] / 1e9, 2)}
    for key in ("t_step", "t_fwd", "t_bwd", "t_opt", "t_wait_h2d", "t_data"):
        result[key] = round(mid[key], 4) if key in mid else None
    return result
