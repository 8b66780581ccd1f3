# SPDX-License-Identifier: Apache-2.0
"""Compares megatrain with transformers and torch.optim.AdamW on small models with weights that look trained.

For each case: makes a model and ragged data, trains both for 20 steps on the same batches, compares every
loss, gradient norm and final weight, and loads the export back in transformers. The reference runs in double
(transformers keeps norms and softmax in FP32 even then); torch's own distance from it in FP32 is printed beside
ours. Run by scripts/parity.
"""
import contextlib
import copy
import glob
import json
import os
import re
import sys
import tempfile

sys.path[:0] = [os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tests", d) for d in ("cli", "parity")]
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, Mxfp4Config
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from seeded import write_spec, write_weights
from tiny import base, config, megatrain, metrics, write_data, write_ini, write_model

STEPS, ROWS, LR = 20, 8, 1e-3

CASES = {
    "llama-gqa7-llama3rope": ("llama", dict(num_attention_heads=7, num_key_value_heads=1, hidden_size=56, head_dim=8,
        rope_scaling={"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                      "original_max_position_embeddings": 32})),
    "llama-bias-tied-linear": ("llama", dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True,
        rope_scaling={"rope_type": "linear", "factor": 2.0})),
    "mistral-window": ("mistral", dict(sliding_window=12)),
    "qwen2-tied-yarn": ("qwen2", dict(tie_word_embeddings=True,
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64})),
    "qwen3": ("qwen3", dict(head_dim=24)),
    "qwen3-tied-window": ("qwen3", dict(head_dim=16, tie_word_embeddings=True, use_sliding_window=True,
        sliding_window=10, max_window_layers=2)),
}


#: they choose experts beside the router, and are never trained
CHOOSING = ("e_score_correction_bias", "expert_bias")
ROUTERS = (".gate.weight", ".router.weight", ".gate.wg.weight", ".router.layer.weight")


def rule_of(name, t, of, router):
    """What a tensor of a file is made of (tests/cli/seeded.py), that looks trained: norms far from one, outlier channels,
    biases that are not zero, routers far from ties, which two programs may break differently. of: the model's class;
    router: the size of routers."""
    gemma4, delta = "Gemma4" in of, of.startswith(("Qwen3_5", "Qwen3Next"))
    # norms that multiply by 1 + w; but for Muse Glimmer's last one, and the outputs of the delta rule
    less = ("Gemma" in of and not gemma4 or "NemotronFor" in of or delta and "linear_attn" not in name
            or "MuseGlimmer" in of and "layernorm" in name)
    between = lambda low, high: f"uniform({low - less:.2f},{high - less:.2f})"
    if t.dim() == 0 or name.endswith(("act_fn.beta", "act_fn.eps")):  # as its class has it
        return f"constant({t.flatten()[0].item():g})"
    if any(w in name for w in CHOOSING):
        return "normal(0.2)"
    if name.endswith(("layer_scalar", "router.scale", "per_expert_scale")):
        return "uniform(0.6,1.2)"
    if name.endswith("router.proj.weight"):  # of a norm's output, over sqrt(hidden_size)
        return "normal(1.6)"
    if "norm" in name and not name.endswith("bias"):
        # the product of the queries' and keys' scales the scores: larger ones make attention one-hot, and then a step
        # turns a rounding error into a thousand of them, in torch as well
        scores = any(w in name for w in ("q_norm", "k_norm", "query_layernorm", "key_layernorm"))
        return between(0.7, 1.3) if delta else between(0.5, 2.5) if not scores else between(0.25, 0.65) if gemma4 else between(0.5, 1.3)
    if name.endswith("A_log"):
        return "uniform(-1.5,0.5)"
    if name.endswith(".D"):
        return "uniform(0.5,1.5)"
    if name.endswith("conv1d.weight"):
        return "causal(0.3)"
    if name.endswith("bias") or "sinks" in name:
        return "normal(0.3)"
    if name.endswith(ROUTERS):
        return f"normal({router})"
    return "normal(0.2)" if "in_proj" in name else "outlier(0.06)" if t.dim() >= 2 else "normal(0.06)"


def lr_at(k, total, warmup):
    return LR * k / warmup if k < warmup else LR * (1 - (k - warmup) / (total - warmup))


def balance_loss(model, router_logits):
    """Over all layers and all tokens of a step; router_logits: of each sample, a tuple of its layers'."""
    layers = tuple(torch.cat(rows) for rows in zip(*router_logits))
    c = model.config
    return load_balancing_loss_func(layers, getattr(c, "num_experts", 0) or c.num_local_experts, c.num_experts_per_tok)


def adamw(groups):
    return torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.999), eps=1e-8, foreach=False)


def train_torch(model, samples, dtype, warmup=2, clip=0.5, wd=0.1, aux=0.0, optimizer=adamw, lr=LR, steps=STEPS, rows=ROWS, ratio=1):
    """Losses and gradient norms of all steps; dtype f32 or f64 (that of the model) or bf16 (autocast over f32). With
    aux, the coefficient of the loss that balances experts, a third list: that loss. ratio: of the learning rate of an adapter's B."""
    decay, rest, faster = [], [], []
    for name, p in model.named_parameters():
        if p.requires_grad:
            (faster if "lora_B" in name else rest if "bias" in name or "norm" in name else decay).append(p)
    groups = [{"params": decay, "weight_decay": wd}, {"params": rest, "weight_decay": 0.0},
              {"params": faster, "weight_decay": wd, "ratio": ratio}]
    opt = optimizer(groups if faster else groups[:2])
    losses, norms, balance = [], [], []
    model.train()
    for step in range(steps):
        batch = [samples[i % len(samples)] for i in range(step * rows, (step + 1) * rows)]
        total = sum(sum(l != -100 for l in s["labels"][1:]) for s in batch)
        loss_sum, router_logits = 0.0, []
        opt.zero_grad()
        for s in batch:
            ids = torch.tensor([s["input_ids"]])
            labels = torch.tensor([s["labels"]])
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
                out = model(input_ids=ids, **({"output_router_logits": True} if aux else {}))
            logits = out.logits
            logits = logits if dtype == "f64" else logits.float()
            l = torch.nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:], ignore_index=-100, reduction="sum")
            (l / total).backward(retain_graph=bool(aux))
            loss_sum += l.item()
            if aux:
                router_logits.append(out.router_logits)
        if aux:
            b = balance_loss(model, router_logits)
            (aux * b).backward()
            balance.append(b.item())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        for g in opt.param_groups:
            g["lr"] = lr_at(step, steps, warmup) / LR * lr * g.get("ratio", 1)
        opt.step()
        losses.append(loss_sum / total)
        norms.append(norm.item())
    return (losses, norms, balance) if aux else (losses, norms)


def record_routers(model, samples):
    """Of each router, by layer, the experts of each token in ascending order."""
    ids, hooks = {}, []
    for name, module in model.named_modules():
        kind = type(module).__name__
        if "Router" not in kind and not kind.endswith("Gate"):
            continue
        layer = int(name.split("layers.")[1].split(".")[0])

        def hook(_, __, out, layer=layer):
            chosen = [t for t in out if torch.is_tensor(t) and t.dtype in (torch.int64, torch.int32)]
            ids.setdefault(layer, []).extend(chosen[0].reshape(-1, chosen[0].shape[-1]).sort(-1).values.tolist())

        hooks.append(module.register_forward_hook(hook))
    with torch.no_grad():
        for s in samples[:ROWS]:
            model(input_ids=torch.tensor([s["input_ids"]]))
    for h in hooks:
        h.remove()
    return {str(k): v for k, v in sorted(ids.items())}


def tokens_on_a_line(text):
    """JSON with each list of integers on one line."""
    return re.sub(r"\[\s+([\d,\s]+?)\s+\]", lambda m: "[" + re.sub(r"\s+", " ", m[1]) + "]", text)


@contextlib.contextmanager
def double_throughout(hf=None):
    """transformers computes recurrences in torch.float32 whatever the model is in: that is double meanwhile. Without a
    configuration norms and softmax of any model are, too, which the fixtures have in torch.float32."""
    f32, method = torch.float32, torch.Tensor.float
    if hf is None or any(hasattr(hf, k) for k in ("linear_num_key_heads", "mamba_n_heads", "mamba_num_heads")):
        torch.float32, torch.Tensor.float = torch.float64, torch.Tensor.double
    try:
        yield
    finally:
        torch.float32, torch.Tensor.float = f32, method


def rel(a, b):
    return abs(a - b) / max(abs(b), 1e-30)


def class_of(cfg):
    """Auto classes do not know every class of text."""
    return getattr(transformers, cfg["architectures"][0], AutoModelForImageTextToText if "text_config" in cfg else AutoModelForCausalLM)


def from_config(cfg, hf, **more):
    cls = class_of(cfg)
    return (cls._from_config if hasattr(cls, "_from_config") else cls.from_config)(hf, **more)


def load(d, dtype=torch.float32):
    with open(os.path.join(d, "config.json")) as f:
        cfg = json.load(f)
    more = {"quantization_config": Mxfp4Config(dequantize=True)} if cfg.get("quantization_config", {}).get("quant_method") == "mxfp4" else {}
    return class_of(cfg).from_pretrained(d, dtype=dtype, attn_implementation="eager", experts_implementation="eager", **more)


def release_state(model):
    """Tensors by their names in files: transformers keeps the experts of a layer in one tensor, files do not."""
    state = {}
    with tempfile.TemporaryDirectory() as tmp:
        model.save_pretrained(tmp)
        for f in glob.glob(os.path.join(tmp, "*.safetensors")):
            with safe_open(f, "pt") as s:
                state.update({k: s.get_tensor(k) for k in s.keys()})
    # save_pretrained of transformers 5.24 gives the text layers of Kimi K2.5 the name of its vision tower's
    return {k.replace("language_model.model.blocks.", "language_model.model.layers."): v for k, v in state.items()}


def specify(d, cfg, dtype="BF16", router=0.5, kept=(), packed=None, seed=1):
    """Writes config.json and model.tensors. kept: what is F32 in any case, by parts of names; packed: replaces
    a tensor's entry by others."""
    write_model(d, cfg)
    model, tensors = from_config(cfg, AutoConfig.from_pretrained(d), dtype=torch.float32), {}
    for name, t in release_state(model).items():
        if not (cfg["tie_word_embeddings"] and name == "lm_head.weight"):
            of = "F32" if any(k in name for k in (*CHOOSING, *kept)) else dtype
            entry = {name: (of, list(t.shape), rule_of(name, t, type(model).__name__, router))}
            tensors.update(packed and packed(name, t) or entry)
    write_spec(os.path.join(d, "model.tensors"), tensors, seed)


def adapter_rule(name, t, of):
    if "lora_A" in name:
        return f"uniform({-t.shape[-1] ** -0.5:.4g},{t.shape[-1] ** -0.5:.4g})"
    if "magnitude" in name:  # near the lengths of columns
        return f"uniform({0.9 * t.min():.3g},{1.1 * t.max():.3g})"
    return "normal(0.05)" if "lora_B" in name else rule_of(name, t, of, 0.5)


def specify_adapter(d, model, base):
    """Writes adapter_config.json and adapter_model.tensors of a model of PEFT's, B not zero, for the fixture `base`."""
    model.peft_config["default"].base_model_name_or_path = base  # not where this machine has it
    os.makedirs(d, exist_ok=True)
    with tempfile.TemporaryDirectory() as tmp:
        model.save_pretrained(tmp)
        with open(os.path.join(tmp, "adapter_config.json")) as f, open(os.path.join(d, "adapter_config.json"), "w") as to:
            json.dump({k: sorted(v) if k == "target_modules" and isinstance(v, list) else v for k, v in json.load(f).items()}, to, indent=2)
        state, of = load_file(os.path.join(tmp, "adapter_model.safetensors")), type(model.get_base_model()).__name__
    whole = lambda k: "lora_" not in k  # as the model has it
    write_spec(os.path.join(d, "adapter_model.tensors"),
               {k: ("WIDE" if whole(k) else "F32", list(t.shape), adapter_rule(k, t, of)) for k, t in state.items()})


def make_model(d, cfg, dtype="BF16"):
    """Writes a model with its weights; returns it in f32."""
    specify(d, cfg, dtype)
    write_weights(d)
    return load(d)


def ini_of(d, data, out, dtype):
    # shuffle off and packing off: row i is sample i; 8 rows in 4 micro-batches
    return write_ini(out + ".ini", base(d, data, out, model__init="weights", model__dtype=dtype, data__eval="",
        data__packing="off", data__shuffle="off", train__steps=STEPS, train__batch_size=ROWS, train__micro_batch=2,
        train__learning_rate=LR, train__min_lr_ratio=0, optimizer__grad_dtype="f32" if dtype == "f32" else "auto"))


def read_masters(checkpoint):
    masters = {}
    for f in glob.glob(os.path.join(checkpoint, "megatrain", "*.safetensors")):
        with safe_open(f, "pt") as st:
            masters.update({k[:-7]: st.get_tensor(k) for k in st.keys() if k.endswith(".master")})
    return masters


def worst_weights(got, model):
    """The largest relative L2 error of a tensor, its name, and that of the K biases, whose gradient nearly
    vanishes."""
    worst, worst_k, where = 0.0, 0.0, ""
    for k, p in model.named_parameters():
        want = p.detach().double()
        e = ((got[k].double() - want).norm() / want.norm()).item()
        if k.endswith("k_proj.bias"):
            worst_k = e if not e <= worst_k else worst_k
        elif not e <= worst:
            worst, where = e, k
    return worst, where, worst_k


def run_case(tmp, name, dtype):
    family, over = CASES[name]
    cfg = config(family, **over)
    d = os.path.join(tmp, name)
    model = make_model(d, cfg, "F32")
    data = write_data(os.path.join(tmp, name + ".jsonl"), n=STEPS * ROWS, seed=7)
    samples = [json.loads(l) for l in open(data)]
    out = os.path.join(tmp, f"{name}-{dtype}")
    megatrain("-q", "run", ini_of(d, data, out, dtype))
    ours = [m for m in metrics(out) if "loss" in m]
    reference = copy.deepcopy(model).double() if dtype == "f32" else model
    losses, norms = train_torch(reference, samples, "f64" if dtype == "f32" else dtype)
    dl = max(rel(o["loss"], t) for o, t in zip(ours, losses))
    dn = max(rel(o["grad_norm"], t) for o, t in zip(ours, norms))
    masters = read_masters(os.path.join(out, f"checkpoint-{STEPS}"))
    worst, where, worst_k = worst_weights(masters, reference)
    loaded = AutoModelForCausalLM.from_pretrained(os.path.join(out, f"checkpoint-{STEPS}"), dtype=torch.float32)
    for k, p in loaded.named_parameters():
        assert (p - masters[k]).abs().max() <= masters[k].abs().max() * 2 ** -8, k
    limits = (1e-5, 2e-5, 1e-4, 2e-2) if dtype == "f32" else (1e-2, 1.0, 1.0, 1.0)
    ok = dl <= limits[0] and dn <= limits[1] and worst <= limits[2] and worst_k <= limits[3]
    print(f"{'ok  ' if ok else 'FAIL'} {name:26s} {dtype}: loss {dl:.1e}  norm {dn:.1e}  weights {worst:.1e} ({where})"
          f"  k bias {worst_k:.1e}  clipped {sum(n > 0.5 for n in norms)}/{STEPS}  loss {losses[0]:.4f} -> {losses[-1]:.4f}",
          flush=True)
    if dtype == "f32":
        l32, n32 = train_torch(model, samples, "f32")
        worst, where, worst_k = worst_weights(dict(model.named_parameters()), reference)
        print(f"     torch in f32, from the same: loss {max(map(rel, l32, losses)):.1e}  norm {max(map(rel, n32, norms)):.1e}"
              f"  weights {worst:.1e} ({where})  k bias {worst_k:.1e}", flush=True)
    return ok


def main():
    torch.set_num_threads(1)  # products are too small for more threads
    want = sys.argv[1:] or list(CASES)
    with tempfile.TemporaryDirectory() as tmp:
        results = [run_case(tmp, name, dtype) for name in want for dtype in ("f32", "bf16")]
    print(f"{sum(results)} passed, {len(results) - sum(results)} failed; transformers {transformers.__version__}, "
          f"torch {torch.__version__}")
    sys.exit(not all(results))


if __name__ == "__main__":
    main()
