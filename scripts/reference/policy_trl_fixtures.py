# SPDX-License-Identifier: Apache-2.0
"""Makes the fixtures of tests/parity/policy: made-up rollouts, and what TRL's GRPOTrainer makes of them with two small models
of tests/parity, whole and with adapters. Run by hand, with TRL in a Python environment; the tests need neither TRL nor torch.
    PYTHON scripts/reference/policy_trl_fixtures.py [KIND...]
Nothing is generated: the trainer is handed a batch of rollouts at each step, and does all else itself."""
import json
import os
import random
import sys
import tempfile

import torch
import transformers
import trl
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from parity import load, release_state, specify_adapter
from seeded import PARITY as ROOT, fixture
import sums  # of tests/parity

OUT = os.path.join(ROOT, "policy")
STEPS, GROUPS, PER, LR, VOCAB, MOST = 5, 2, 4, 5e-4, 96, 12
#: of what is trained, the seed of its rollouts: with olmoe's first ones some gradients of "mismatch" are 0 but for rounding
SEEDS = {"qwen3": 7, "qwen3-lora": 7, "olmoe": 9, "olmoe-lora": 7}
MEASURES = ("kl", "entropy", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "cispo_clip_ratio")
ADAPTERS = {"qwen3": "adapters/qwen3-upper/start", "olmoe": "policy/olmoe-start"}
# loss, keys of [policy], keys of GRPOConfig
CASES = {
    "dapo": ("dapo", {"clip_high": 0.28}, {"loss_type": "dapo", "epsilon_high": 0.28}),
    "grpo": ("grpo", {"dual_clip": 1.3}, {"loss_type": "grpo", "delta": 1.3}),
    "bnpo": ("bnpo", {}, {"loss_type": "bnpo"}),
    "dr_grpo": ("dr_grpo", {}, {"loss_type": "dr_grpo", "scale_rewards": "none"}),
    "gspo": ("gspo", {"clip_low": 0.03, "clip_high": 0.04},
             {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.03, "epsilon_high": 0.04}),
    "cispo": ("cispo", {"clip_high": 1.1}, {"loss_type": "cispo", "epsilon_high": 1.1}),
    "sapo": ("sapo", {}, {"loss_type": "sapo"}),
    "divergence": ("dapo", {"kl_weight": 0.1}, {"loss_type": "dapo", "beta": 0.1, "use_bias_correction_kl": False}),
    "unbiased": ("dapo", {"kl_weight": 0.1, "kl": "k3_ratio"}, {"loss_type": "dapo", "beta": 0.1}),
    "mismatch": ("grpo", {"mismatch": "row", "mismatch_max": 1.5, "mismatch_beyond": "drop"}, {"loss_type": "grpo"}),
    "batch": ("dapo", {"old": "batch"}, {"loss_type": "dapo"}),
}


def tokenizer():
    names = {{2: "</s>", 1: "<pad>"}.get(i, str(i)): i for i in range(VOCAB)}
    t = Tokenizer(models.WordLevel(names, unk_token="0"))
    t.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=t, eos_token="</s>", pad_token="<pad>")


def start(family, lora):
    model = load(fixture(family))
    return PeftModel.from_pretrained(model, fixture(ADAPTERS[family]), is_trainable=True) if lora else model


def make_adapter(family):
    config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "o_proj"])
    specify_adapter(os.path.join(ROOT, ADAPTERS[family]), get_peft_model(start(family, False), config), family)


def make_rollouts(model, seed):
    """Log-probabilities near the model's own, so that some ratios are clipped and most are not."""
    r, rows = random.Random(seed), []
    ids = lambda n: [r.randrange(3, VOCAB) for _ in range(n)]
    near = lambda lp, by: [round(min(x + r.gauss(0, by), -1e-3), 6) for x in lp]
    for g in range(STEPS * GROUPS):
        prompt = ids(r.randrange(1, 8))
        for _ in range(PER):
            answer = ids(r.randrange(2, MOST))
            with torch.no_grad():
                logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1:-1].log_softmax(-1)
            lp = logits.gather(1, torch.tensor(answer)[:, None])[:, 0].tolist()
            old = near(lp, 0.15)
            rows.append({"prompt_ids": prompt, "completion_ids": answer, "completion_mask": [int(i == 0 or r.random() > 0.15) for i in range(len(answer))],
                         "old_logprobs": old, "logprobs": near(old, 0.1), "ref_logprobs": near(lp, 0.2), "reward": round(r.random(), 3), "group": g})
    return rows


def batch_of(rows, name):
    most = lambda key: max(len(row[key]) for row in rows)
    left = lambda key, fill: torch.tensor([[fill] * (most(key) - len(row[key])) + row[key] for row in rows])
    right = lambda key, fill: torch.tensor([row[key] + [fill] * (most(key) - len(row[key])) for row in rows])
    reward = torch.tensor([row["reward"] for row in rows]).view(-1, PER)
    advantage = reward - reward.mean(1, keepdim=True)
    if name != "dr_grpo":
        advantage = advantage / (reward.std(1, keepdim=True) + 1e-4)
    mask = right("completion_mask", 0)
    of = {"prompt_ids": left("prompt_ids", 1), "completion_ids": right("completion_ids", 1), "completion_mask": mask,
          "prompt_mask": torch.tensor([[0] * (most("prompt_ids") - len(r["prompt_ids"])) + [1] * len(r["prompt_ids"]) for r in rows]),
          "advantages": advantage.flatten(), "num_items_in_batch": mask.sum()}
    # the mask of TRL's completions is of padding; what tools gave is masked beside it
    of["tool_mask"], of["completion_mask"] = mask, torch.tensor([[1] * len(r["completion_ids"]) + [0] * (most("completion_ids") - len(r["completion_ids"])) for r in rows])
    if name != "batch":
        of["old_per_token_logps"] = right("old_logprobs", 0.0)
    if CASES[name][2].get("beta"):
        of["ref_per_token_logps"] = right("ref_logprobs", 0.0)
    if name == "mismatch":
        f = torch.exp(((of["old_per_token_logps"] - right("logprobs", 0.0)) * mask).sum(-1, keepdim=True))
        of["importance_sampling_ratio"] = f.masked_fill(f > 1.5, 0.0)
    return of


def train(family, lora, name, rows):
    per = GROUPS * PER
    with tempfile.TemporaryDirectory() as tmp:
        args = GRPOConfig(output_dir=tmp, per_device_train_batch_size=per, num_generations=PER, max_steps=STEPS, learning_rate=LR, logging_steps=1,
                          lr_scheduler_type="constant", use_cpu=True, bf16=False, report_to=[], save_strategy="no", max_grad_norm=1.0, weight_decay=0.0,
                          disable_tqdm=True, seed=1, gradient_checkpointing=False, optim="adamw_torch", max_completion_length=MOST, temperature=1.0,
                          **{"beta": 0.0, **({"router_aux_loss_coef": 0.0} if family == "olmoe" else {}), **CASES[name][2]})
        trainer = GRPOTrainer(model=start(family, lora), args=args, train_dataset=Dataset.from_list([{"prompt": str(i)} for i in range(3, 90)]),
                              processing_class=tokenizer(), reward_funcs=lambda completions, **_: [0.0] * len(completions))
        trainer.use_vllm = name == "mismatch"
        trainer.vllm_importance_sampling_correction = True
        trainer._prepare_inputs = lambda _: batch_of(rows[trainer._step * per:(trainer._step + 1) * per], name)
        trainer.train()
        log = [h for h in trainer.state.log_history if "loss" in h and "grad_norm" in h]
    return log, trainer.model


def tensors_of(model, lora):
    return get_peft_model_state_dict(model) if lora else release_state(model)


def main():
    torch.set_num_threads(1)
    os.makedirs(OUT, exist_ok=True)
    make_adapter("olmoe")
    made, path = {}, os.path.join(OUT, "expected.json")
    if sys.argv[1:]:  # the others stay
        with open(path) as f:
            made = json.load(f)["cases"]
    for kind in sys.argv[1:] or SEEDS:
        family, lora = kind.removesuffix("-lora"), kind.endswith("-lora")
        rows = make_rollouts(start(family, lora), SEEDS[kind])
        with open(os.path.join(OUT, kind + ".jsonl"), "w") as f:
            f.writelines(json.dumps(row) + "\n" for row in rows)
        for name, (loss, keys, _) in CASES.items():
            log, trained = train(family, lora, name, rows)
            assert len(log) == STEPS, (name, len(log))
            made[f"{kind} {name}"] = {"model": family, "lora": lora, "loss": loss, "keys": keys, "losses": [h["loss"] for h in log],
                                      "norms": [float(h["grad_norm"]) for h in log],
                                      "measures": {m: [h[m] for h in log] for m in MEASURES if m in log[0]}}
            if name == "dapo":
                sums.write(os.path.join(OUT, kind + ".sums"), tensors_of(trained, lora))
            print(kind, name, made[f"{kind} {name}"]["losses"], made[f"{kind} {name}"]["norms"][0], flush=True)
    with open(path, "w") as f:
        json.dump({"made_with": f"TRL {trl.__version__}, transformers {transformers.__version__}, torch {torch.__version__}", "steps": STEPS,
                   "rollouts": GROUPS * PER, "most": MOST, "learning_rate": LR, "cases": made}, f)
        f.write("\n")


main()
