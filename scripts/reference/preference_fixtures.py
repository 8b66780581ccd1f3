# SPDX-License-Identifier: Apache-2.0
"""Makes the fixtures of tests/parity/preferences: made-up pairs, and what TRL's trainers make of them with the small models
of tests/parity. Run by hand, with TRL in a Python environment; the tests need neither TRL nor torch.
    PYTHON scripts/reference/preference_fixtures.py [CASE...]
"""
import json
import os
import random
import sys
import tempfile

import torch
import transformers
import trl
from datasets import Dataset
from peft import PeftModel
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import SequentialSampler
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from parity import load
from seeded import PARITY as ROOT, fixture
import sums  # of tests/parity

OUT = os.path.join(ROOT, "preferences")
STEPS, PAIRS, LR, VOCAB, EOS = 15, 4, 5e-4, 96, 2
MEASURES = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "logps/chosen", "logps/rejected",
            "nll_loss", "log_odds_ratio", "log_odds_chosen", "mean_token_accuracy", "kl")
RATED = ("kto", "apo_zero_unpaired")
# model, loss, keys of [preference], keys of the trainer
CASES = {
    "sigmoid": ("qwen3", "sigmoid", {}, {}),
    "beta": ("qwen3", "sigmoid", {"beta": 0.3}, {"beta": 0.3}),
    "sft": ("qwen3", "sigmoid", {"sft": 0.7}, {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.7]}),
    "sigmoid_norm": ("qwen3", "sigmoid_norm", {"beta": 2}, {"beta": 2.0}),
    "ipo": ("qwen3", "ipo", {}, {}),
    "hinge": ("qwen3", "hinge", {}, {}),
    "robust": ("qwen3", "robust", {"label_smoothing": 0.1}, {"label_smoothing": 0.1}),
    "apo_zero": ("qwen3", "apo_zero", {}, {}),
    "apo_down": ("qwen3", "apo_down", {}, {}),
    "cpo": ("qwen3", "cpo", {}, {}),
    "simpo": ("qwen3", "simpo", {}, {"beta": 2.0, "simpo_gamma": 0.5, "cpo_alpha": 0.0}),
    "orpo": ("qwen3", "orpo", {"sft_tokens": "all"}, {}),
    "apo_zero_unpaired": ("qwen3", "apo_zero_unpaired", {"desirable_weight": 1.5}, {"desirable_weight": 1.5}),
    "kto": ("qwen3", "kto", {"undesirable_weight": 1.5}, {"undesirable_weight": 1.5}),
    "kto_mixture": ("qwen3_moe", "kto", {"beta": 0.4}, {"beta": 0.4, "router_aux_loss_coef": 0.0}),
    "mixture": ("qwen3_moe", "sigmoid", {}, {"router_aux_loss_coef": 0.0}),
    "lora": ("llama", "sigmoid", {}, {}),
    "truncated": ("qwen3", "sigmoid", {}, {"max_length": 13}),
    "truncated_rated": ("llama", "apo_zero_unpaired", {}, {"max_length": 13}),
}
CUT = {"truncated": 26, "truncated_rated": 13}  # a row of two answers, or of one
# Other models, losses and betas: drawn once, then kept. Not phi3, whose rotary table transformers chooses by the longest row of a batch.
DRAWN = {"models": ("llama", "gemma2", "olmo2", "seed_oss", "qwen3_moe", "glm4", "granite", "gpt_oss"), "n": 8, "seed": 29,
         "losses": ("sigmoid", "sigmoid_norm", "ipo", "hinge", "robust", "apo_zero", "apo_down", "cpo", "simpo", "orpo", "apo_zero_unpaired")}


def draw():
    r = random.Random(DRAWN["seed"])
    losses = r.sample(DRAWN["losses"], DRAWN["n"])
    for i, (model, loss) in enumerate(zip(r.sample(DRAWN["models"], DRAWN["n"]), losses)):
        keys = {"beta": round(10 ** r.uniform(-1.5, 0.3), 3)}
        more = dict(keys)
        if loss == "robust":
            keys["label_smoothing"] = more["label_smoothing"] = round(r.uniform(0, 0.4), 2)
        if loss == "simpo":
            keys["gamma"] = more["simpo_gamma"] = round(r.uniform(0.1, 1.5), 2)
            more["cpo_alpha"] = 0.0
        if loss == "cpo":
            keys["sft"] = more["cpo_alpha"] = round(r.uniform(0, 2), 2)
        if loss == "orpo":
            keys["sft_tokens"] = "all"
        if model in ("qwen3_moe", "gpt_oss"):
            more["router_aux_loss_coef"] = 0.0
        CASES[f"drawn{i}_{model}_{loss}"] = (model, loss, keys, more)


draw()


def tokenizer():
    """One word, one token: its number, but for the end of text."""
    names = {{EOS: "</s>", 1: "<pad>"}.get(i, str(i)): i for i in range(VOCAB)}  # special ones in no number
    t = Tokenizer(models.WordLevel(names, unk_token="0"))
    t.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=t, eos_token="</s>", pad_token="<pad>")


def make_pairs(path):
    r, rows = random.Random(7), []
    ids = lambda n: [r.randrange(3, VOCAB) for _ in range(n)]
    for _ in range(STEPS * PAIRS):
        rows.append({"prompt_ids": ids(r.randrange(1, 10)), "chosen_ids": ids(r.randrange(1, 16)) + [EOS],
                     "rejected_ids": ids(r.randrange(1, 16)) + [EOS]})
    with open(path, "w") as f:
        f.writelines(json.dumps(row) + "\n" for row in rows)
    return rows


def text(ids):
    return "".join(f" {i}" for i in ids if i != EOS)


def train(name, rows):
    model_name, loss, _, more = CASES[name]
    more = dict(more)
    tok = tokenizer()
    model = load(fixture(model_name))
    if name == "lora":
        model = PeftModel.from_pretrained(model, fixture("adapters/llama/start"), is_trainable=True)
    data = [{"prompt": text(p["prompt_ids"]).strip(), "chosen": text(p["chosen_ids"]), "rejected": text(p["rejected_ids"])} for p in rows]
    if loss in RATED:
        data = [{"prompt": p["prompt"], "completion": p[k], "label": k == "chosen"} for p in data for k in ("chosen", "rejected")]
    per = PAIRS * (2 if loss in RATED else 1)
    with tempfile.TemporaryDirectory() as tmp:
        common = dict(output_dir=tmp, per_device_train_batch_size=per, num_train_epochs=1, learning_rate=LR, logging_steps=1,
                      lr_scheduler_type="constant", use_cpu=True, bf16=False, report_to=[], save_strategy="no", max_grad_norm=1.0,
                      weight_decay=0.0, disable_tqdm=True, seed=1, gradient_checkpointing=False, optim="adamw_torch",
                      max_length=more.pop("max_length", 64))
        if loss in ("cpo", "simpo"):
            kind, args = CPOTrainer, CPOConfig(**common, **{"loss_type": "sigmoid" if loss == "cpo" else "simpo", **more})
        elif loss == "orpo":
            kind, args = ORPOTrainer, ORPOConfig(**common, **more)
        elif loss in RATED:
            kind, args = KTOTrainer, KTOConfig(**common, **{"loss_type": loss, "precompute_ref_log_probs": True,
                                                           "train_sampling_strategy": "sequential", **more})
        else:
            kind, args = DPOTrainer, DPOConfig(**common, **{"loss_type": [loss], "precompute_ref_log_probs": True, **more})
        kind._get_train_sampler = lambda self, dataset=None: SequentialSampler(self.train_dataset)
        trainer = kind(model=model, args=args, train_dataset=Dataset.from_list(data), processing_class=tok)
        trainer.train()
        log = [h for h in trainer.state.log_history if "loss" in h and "grad_norm" in h]
    return log, trainer.model


def main():
    torch.set_num_threads(1)
    os.makedirs(OUT, exist_ok=True)
    rows = make_pairs(os.path.join(OUT, "data.jsonl"))
    made, path = {}, os.path.join(OUT, "expected.json")
    if sys.argv[1:]:  # the others stay
        with open(path) as f:
            made = json.load(f)["cases"]
    for name, (model, loss, keys, _) in CASES.items():
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        log, trained = train(name, rows)
        assert len(log) == STEPS, (name, len(log))
        made[name] = {"model": model, "loss": loss, "keys": keys, "losses": [h["loss"] for h in log],
                      "norms": [float(h["grad_norm"]) for h in log],
                      "measures": {m: [h[m] for h in log] for m in MEASURES if m in log[0]}}
        if name in CUT:
            made[name]["row"] = CUT[name]
        if name in ("sigmoid", "lora"):
            tensors = dict(trained.state_dict())
            if name == "lora":
                tensors = {k.replace(".default.", "."): v for k, v in tensors.items() if "lora_" in k and ".default." in k}
            tensors.pop("lm_head.weight", None) if name == "sigmoid" else None
            sums.write(os.path.join(OUT, f"{name}.sums"), tensors)
        print(name, made[name]["losses"][0], made[name]["losses"][-1], made[name]["norms"][0], flush=True)
    with open(path, "w") as f:
        json.dump({"made_with": f"TRL {trl.__version__}, transformers {transformers.__version__}, torch {torch.__version__}",
                   "steps": STEPS, "pairs": PAIRS, "learning_rate": LR, "cases": made}, f)
        f.write("\n")


main()
