# SPDX-License-Identifier: Apache-2.0
"""Makes the fixtures of tests/parity/adapters: adapters that PEFT wrote, with B not zero, on the tiny models of
tests/parity, and the results of training them for 20 steps with PEFT, transformers and torch.optim.AdamW. Then runs megatrain on them, has
PEFT load what it wrote, and compares the losses. Run by hand when adapters change; the tests need no torch.
    MEGATRAIN=build/cli/megatrain .venv-parity/bin/python scripts/reference/adapter_fixtures.py [--check] [CASE...]
--check does not change the fixtures and does only the last part.
"""
import copy
import ctypes
import ctypes.util
import json
import os
import shutil
import sys
import tempfile

import numpy
import peft
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from parity import ROWS, STEPS, adapter_rule, double_throughout, load, rel, specify_adapter, train_torch
from philox import philox
import sums  # of tests/parity
from seeded import PARITY, fixture, read_spec, write_spec
from tiny import base, megatrain, write_ini

ROOT = os.path.join(PARITY, "adapters")
MLP = ["gate_proj", "up_proj", "down_proj"]
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

# case: model, PEFT's configuration, learning rate of B over that of A
CASES = {
    "llama": ("llama", dict(r=8, lora_alpha=16, target_modules=ALL), 1),
    "llama-head": ("llama", dict(r=4, lora_alpha=6, target_modules=["q_proj", "lm_head"], modules_to_save=["model.norm"]), 1),
    "mistral-rslora": ("mistral", dict(r=4, lora_alpha=8, use_rslora=True, target_modules=ALL,
                                       modules_to_save=["lm_head", "model.norm"]), 4),
    "qwen2-patterns": ("qwen2", dict(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"],
                                     rank_pattern={"q_proj": 3, r"layers\.1\.mlp\.up_proj": 8},
                                     alpha_pattern={"v_proj": 20, "model.layers.0.mlp.down_proj": 3}), 1),
    # in mixtures of experts, PEFT takes the names of MLPs to mean the experts': others are listed as parameters
    "qwen2_moe-shared": ("qwen2_moe", dict(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "o_proj"],
                                           target_parameters=["shared_expert." + m + ".weight" for m in MLP],
                                           rank_pattern={"up_proj.weight": 6}), 1),
    "glm4_moe-shared": ("glm4_moe", dict(r=4, lora_alpha=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
                                         target_parameters=[at + m + ".weight" for at in ("mlp.", "shared_experts.")
                                                            for m in MLP]), 1),
    "deepseek_v3-latents": ("deepseek_v3", dict(r=4, lora_alpha=8, target_modules=[
        "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"], rank_pattern={"kv_b_proj": 6}), 2),
    "deepseek_v2-dora": ("deepseek_v2", dict(r=3, lora_alpha=6, use_dora=True, target_modules=[
        "q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]), 1),
    # keys that are values, too: one adapter of k_proj for both
    "gemma4_text-dora": ("gemma4_text", dict(r=3, lora_alpha=6, use_dora=True, target_modules=ALL), 1),
    "gemma4_moe-experts": ("gemma4_moe", dict(r=4, lora_alpha=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "router.proj"],
                                              target_parameters=["experts.gate_up_proj", "experts.down_proj"]), 2),
    "qwen3_moe-experts": ("qwen3_moe", dict(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"] + MLP), 4),
    "mixtral-experts": ("mixtral", dict(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "w1", "w3", "w2"]), 1),
    "minimax_m2-experts": ("minimax_m2", dict(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "w1", "w3", "w2"]), 1),
    # routers: parameters, or in Hunyuan a linear module; in FP32 in ERNIE and Hunyuan
    "qwen3_moe-router": ("qwen3_moe", dict(r=3, lora_alpha=6, target_modules=["o_proj"], target_parameters=["mlp.gate.weight"]), 1),
    "gpt_oss-router": ("gpt_oss", dict(r=4, lora_alpha=8, target_modules=["q_proj"], target_parameters=["mlp.router.weight"],
                                       alpha_pattern={"mlp.router.weight": 5}), 1),
    "ernie4_5_moe-router": ("ernie4_5_moe", dict(r=4, lora_alpha=8, target_modules=["q_proj", "k_proj", "o_proj"],
                                                 target_parameters=["mlp.gate.weight"]), 1),
    "qwen2_moe-gate": ("qwen2_moe", dict(r=4, lora_alpha=8, target_modules=["k_proj", "shared_expert_gate"],
                                         target_parameters=["mlp.gate.weight"] + [
                                             "shared_expert." + m + ".weight" for m in MLP]), 1),
    "hunyuan_v1_moe-router": ("hunyuan_v1_moe", dict(r=4, lora_alpha=8, target_modules=["q_proj", "wg"]), 1),
    # PEFT has one adapter for all experts of gpt-oss; of the parameters of a module, it wraps one around the other
    "gpt_oss-experts": ("gpt_oss", dict(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], rank_pattern={"down_proj": 6},
                                        alpha_pattern={"gate_up_proj": 12}, target_parameters=["mlp.experts.gate_up_proj",
                                        "mlp.experts.down_proj"]), 4),
    # files and transformers name these parameters differently
    "granitemoe-experts": ("granitemoe", dict(r=4, lora_alpha=8, target_modules=["q_proj", "o_proj"], rank_pattern={"down_proj": 6},
                                              target_parameters=["block_sparse_moe.router.weight", "block_sparse_moe.experts.gate_up_proj",
                                                                 "block_sparse_moe.experts.down_proj"]), 1),
    "gpt_oss_mxfp4-experts": ("gpt_oss_mxfp4", dict(r=4, lora_alpha=8, use_rslora=True, target_modules=["o_proj"],
                                                    target_parameters=["0.mlp.experts.down_proj", "1.mlp.experts.gate_up_proj",
                                                                       "1.mlp.experts.down_proj"]), 1),
    # ... and of families whose files have the experts one by one, on the parameters that transformers makes of these
    "qwen3_moe-joined": ("qwen3_moe", dict(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj"] + MLP), 4),
    "mixtral-joined": ("mixtral", dict(r=4, lora_alpha=8, target_modules=["o_proj"], rank_pattern={"down_proj": 6},
                                       target_parameters=["mlp.gate.weight", "0.mlp.experts.gate_up_proj",
                                                          "1.mlp.experts.down_proj", "1.mlp.experts.gate_up_proj"]), 1),
    # its routers and shared experts have other names in files than their modules in transformers
    "hy_v3-all": ("hy_v3", dict(r=4, lora_alpha=8, target_modules="all-linear"), 1),
    # both kinds of MLPs, Mamba 2, and experts of which PEFT wraps two parameters, neither of them a gate's
    "nemotron_h-all": ("nemotron_h", dict(r=4, lora_alpha=8, target_modules=["in_proj", "q_proj", "o_proj"],
                       rank_pattern={"down_proj": 6}, target_parameters=[
                           "mixer.gate.weight", "mixer.experts.up_proj", "mixer.experts.down_proj", "shared_experts.up_proj.weight",
                           "shared_experts.down_proj.weight", "mixer.up_proj.weight", "mixer.down_proj.weight"]), 2),
    # both products of latent experts
    "nemotron_super-experts": ("nemotron_super", dict(r=4, lora_alpha=8, target_modules=["fc1_latent_proj", "fc2_latent_proj"],
                               target_parameters=["mixer.experts.up_proj", "mixer.experts.down_proj"]), 1),
    "nemotron_super-dora": ("nemotron_super", dict(r=4, lora_alpha=8, use_dora=True, target_modules=["fc1_latent_proj",
                            "fc2_latent_proj", "in_proj", "q_proj"]), 1),
    # a shared expert whose output and input gradient are parts of sums
    "granite4_moe-dora": ("granite4_moe", dict(r=4, lora_alpha=8, use_dora=True, rank_pattern={"input_linear": 6}, target_modules=[
        "in_proj", "q_proj", "shared_mlp.input_linear", "shared_mlp.output_linear"]), 1),
    "llama-dora": ("llama", dict(r=4, lora_alpha=8, use_dora=True, target_modules=["q_proj", "v_proj", "o_proj", "up_proj",
                                 "down_proj"]), 1),
    "qwen2-dora": ("qwen2", dict(r=8, lora_alpha=8, use_dora=True, target_modules=ALL, modules_to_save=["model.norm"]), 4),
    "llama-dropout": ("llama", dict(r=4, lora_alpha=8, lora_dropout=0.25, target_modules=["q_proj", "k_proj", "o_proj",
                                    "up_proj", "down_proj", "lm_head"]), 1),
    "qwen3-upper": ("qwen3", dict(r=8, lora_alpha=8, target_modules=ALL, layers_to_transform=[1]), 1),
}


#: families whose experts have other names in files: of their module, and gate, up, down
EXPERTS = {"mixtral": ("block_sparse_moe", ["w1", "w3", "w2"]), "minimax_m2": ("block_sparse_moe", ["w1", "w3", "w2"])}
SEED = 42  # train.seed by default


class Dropout(torch.nn.Module):
    """Dropout with megatrain's masks: by step, module, token and column."""
    samples, first_row = 0, 0

    @staticmethod
    def count(_, __, given, ___):
        Dropout.samples += 1
        Dropout.first_row = Dropout.first_row + given["input_ids"].numel() if Dropout.samples % ROWS else 0

    def __init__(self, name, p):
        super().__init__()
        hash64 = ctypes.CDLL(ctypes.util.find_library("xxhash")).XXH3_64bits
        hash64.restype = ctypes.c_uint64
        self.key, self.p = hash64(name.encode(), ctypes.c_size_t(len(name))) & 0xffffffff, p

    def forward(self, x):
        if not self.training:
            return x
        n, width = x.shape[-2:]
        words = [philox(SEED, Dropout.samples // ROWS % STEPS << 32 | self.key, -(-width // 4), Dropout.first_row + i << 32)[:width] for i in range(n)]
        mask = torch.from_numpy(numpy.stack(words) >= int(self.p * 2**32)).reshape(x.shape)
        return x * mask.to(x.dtype) / (1 - self.p)


def set_masks(model, p):
    for name, m in model.named_modules():
        if p and hasattr(m, "lora_dropout"):
            m.lora_dropout["default"] = Dropout(name.removeprefix("base_model.model."), p)
    model.register_forward_hook(Dropout.count, with_kwargs=True)


def one_by_one(name):
    """Does the case have adapters of single experts, as PEFT wrote them for models whose experts were modules?"""
    return name.endswith("-experts") and "target_parameters" not in CASES[name][1]


def split_experts(state, r, family):
    """Splits PEFT's one adapter for all experts into those of single experts: gate and up are the diagonal blocks of its B."""
    out = {}
    block, (gate, up, down) = EXPERTS.get(family, ("mlp", MLP))
    for k, v in state.items():
        if ".mlp.experts." not in k or not k.endswith("lora_A.weight"):
            if ".mlp.experts." not in k:
                out[k] = v
            continue
        b, gate_up = state[k.replace("lora_A", "lora_B")], ".base_layer." in k
        prefix, rank = f"{k.split('.mlp.experts.')[0]}.{block}.experts.", 2 * r if gate_up else r
        n = v.shape[0] // rank
        a, b = v.reshape(n, rank, -1), b.reshape(b.shape[0], rank, n)
        for e in range(n):
            names = [gate, up] if gate_up else [down]
            for i, name in enumerate(names):
                rows = b.shape[0] // len(names)
                out[f"{prefix}{e}.{name}.lora_A.weight"] = a[e, i * r:(i + 1) * r]
                out[f"{prefix}{e}.{name}.lora_B.weight"] = b[i * rows:(i + 1) * rows, i * r:(i + 1) * r, e]
    return out


def only_blocks(model, r):
    """Gate and up have separate adapters: entries that would mix them get no gradient."""
    def hook(n):
        def mask(g):
            blocks = torch.zeros_like(g).reshape(g.shape[0], 2 * r, n)
            half = g.shape[0] // 2
            blocks[:half, :r], blocks[half:, r:] = 1, 1
            return g * blocks.reshape(g.shape)
        return mask
    for name, p in model.named_parameters():
        if ".experts.base_layer.lora_B" in name:
            p.register_hook(hook(p.shape[1] // (2 * r)))


def specify_experts(name, config, d):
    """Writes a folder as PEFT did for models whose experts were separate modules."""
    family, tensors = CASES[name][0], {}
    for k, (_, shape, _) in read_spec(os.path.join(PARITY, family, "model.tensors"))[1].items():
        dense = ".mlp." in k and ".experts." not in k  # to PEFT, the names do not mean these
        if not dense and any(k.endswith(f".{m}.weight") for m in config["target_modules"]):
            for of, size in ("A", [config["r"], shape[1]]), ("B", [shape[0], config["r"]]):
                tensor = f"base_model.model.{k.removesuffix('.weight')}.lora_{of}.weight"
                tensors[tensor] = "F32", size, adapter_rule(tensor, torch.empty(size), family)
    LoraConfig(task_type="CAUSAL_LM", base_model_name_or_path=family, **config).save_pretrained(d)
    write_spec(os.path.join(d, "adapter_model.tensors"), tensors)


def make(name, samples):
    family, config, _ = CASES[name]
    d = os.path.join(ROOT, name, "start")
    shutil.rmtree(os.path.dirname(d), ignore_errors=True)
    if one_by_one(name):
        os.makedirs(d)
        specify_experts(name, config, d)
    else:
        specify_adapter(d, get_peft_model(load(fixture(family)), LoraConfig(task_type="CAUSAL_LM", **config)), family)
    start = fixture(f"adapters/{name}/start")
    model = PeftModel.from_pretrained(load(fixture(family)), start, is_trainable=True)
    state, given = peft.get_peft_model_state_dict(model), load_file(os.path.join(start, "adapter_model.safetensors"))
    state = split_experts(state, config["r"], family) if one_by_one(name) else state
    assert set(state) == set(given) and all(torch.equal(state[k], given[k]) for k in given)
    set_masks(model, config.get("lora_dropout"))
    train_all(name, model, samples)


def train_all(name, model, samples):
    family, config, ratio = CASES[name]
    lr, d, experts = 2e-3, os.path.join(ROOT, name), one_by_one(name)
    double, bf16 = copy.deepcopy(model).double(), copy.deepcopy(model)
    for m in (double, bf16, model) if experts else ():
        only_blocks(m, config["r"])
    train = lambda model, dtype: train_torch(model, samples, dtype, lr=lr, ratio=ratio)
    with double_throughout(model.config):
        losses, norms = train(double, "f64")
    (l32, n32), (l16, _) = train(model, "f32"), train(bf16, "bf16")
    assert Dropout.samples in (0, 3 * STEPS * ROWS)
    Dropout.samples = 0
    state = peft.get_peft_model_state_dict(double)
    state = split_experts(state, config["r"], family) if experts else state
    sums.write(os.path.join(d, "trained.sums"), {k: v for k, v in state.items() if not k.endswith(".base_layer.weight")})
    expected = {"made_with": f"peft {peft.__version__}, transformers {transformers.__version__}, torch {torch.__version__}",
                "model": family, "steps": STEPS, "rows": ROWS, "learning_rate": lr, "lr_ratio_b": ratio,
                "kind": "dora" if config.get("use_dora") else "lora", "dropout": config.get("lora_dropout", 0),
                "losses": losses, "norms": norms, "torch_f32": {"losses": l32, "norms": n32}, "torch_bf16": {"losses": l16}}
    with open(os.path.join(d, "expected.json"), "w") as f:
        json.dump(expected, f, indent=1)
        f.write("\n")
    print(f"{name}: loss {losses[0]:.4f} -> {losses[-1]:.4f}, norm {norms[0]:.3f}; torch f32: losses "
          f"{max(map(rel, l32, losses)):.1e}, norms {max(map(rel, n32, norms)):.1e}")


def check(name, samples, tmp):
    """Checks that PEFT reads our checkpoint unchanged, with the same loss and adapters on the same modules."""
    family, config, ratio = CASES[name]
    start = fixture(f"adapters/{name}/start")
    out = os.path.join(tmp, name)
    ini = write_ini(out + ".ini", base(fixture(family), os.path.join(tmp, "data.jsonl"), out,
        model__init="weights", model__dtype="f32", data__eval="", data__packing="off", data__shuffle="off", train__steps=3,
        train__batch_size=ROWS, train__micro_batch=2, train__learning_rate=1e-3, adapter__kind="dora" if config.get("use_dora") else "lora",
        adapter__path=start))
    megatrain("-q", "run", ini)
    ours = os.path.join(out, "checkpoint-3")
    model = PeftModel.from_pretrained(load(fixture(family)), ours)
    began = PeftModel.from_pretrained(load(fixture(family)), start)
    names = lambda m: sorted(n for n, p in m.named_parameters() if "lora" in n or "modules_to_save" in n)
    assert names(model) == names(began), set(names(model)) ^ set(names(began))
    merged = os.path.join(tmp, name + "-merged")
    megatrain("export", "--merge", "--dtype", "f32", ours, merged)
    whole = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32, attn_implementation="eager")
    ids = torch.tensor([samples[0]["input_ids"]])
    with torch.no_grad():
        a, b, c = model(input_ids=ids).logits, whole(input_ids=ids).logits, began(input_ids=ids).logits
    assert (a - b).abs().max() < 1e-4 < (a - c).abs().max(), ((a - b).abs().max(), (a - c).abs().max())
    eval_ini = write_ini(out + "-eval.ini", base(fixture(family), os.path.join(tmp, "data.jsonl"), out + "-e",
        model__dtype="f32", data__eval=os.path.join(tmp, "data.jsonl"), data__packing="off", train__batch_size=ROWS))
    got = json.loads(megatrain("-q", "eval", "--json", "--adapter", ours, eval_ini).stdout)
    total, n = 0.0, 0
    for s in samples:
        labels = torch.tensor([s["labels"]])
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([s["input_ids"]])).logits
        total += torch.nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:], ignore_index=-100, reduction="sum").item()
        n += int((labels[0, 1:] != -100).sum())
    assert n == got["tokens"] and rel(got["loss"], total / n) < 2e-6, (got, total / n)
    print(f"{name}: PEFT reads the checkpoint; loss {got['loss']:.6f}, PEFT's {total / n:.6f}; merged {(a - b).abs().max():.1e}")


def main():
    torch.set_num_threads(1)  # products are too small for more threads
    only_check = "--check" in sys.argv
    samples = [json.loads(l) for l in open(os.path.join(PARITY, "data.jsonl"))]
    with tempfile.TemporaryDirectory() as tmp:
        shutil.copy(os.path.join(PARITY, "data.jsonl"), tmp)
        for name in [a for a in sys.argv[1:] if a != "--check"] or CASES:
            if not only_check:
                make(name, samples)
            check(name, samples, tmp)


main()
