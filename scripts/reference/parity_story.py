# SPDX-License-Identifier: Apache-2.0
"""The whole workflow on a small model: conversations in a .jsonl -> megatrain run -> export -> transformers generates what
the data taught, and stops. The model is random at first, with a stand-in of Qwen3's tokenizer and chat template.
"""
import json
import os
import random
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tests", "cli"))
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from families import WORDS, write_tokenizer
from tiny import base, config, megatrain, metrics, write_ini, write_model


def facts(n=48, seed=4):
    """Questions whose answers are only in the data."""
    r = random.Random(seed)
    nouns = r.sample(sorted(set(WORDS)), n)
    return [(f"what is the {w}?", f"the {w} is {r.choice(WORDS)} and {r.choice(WORDS)}.") for w in nouns]


def main():
    known = facts()
    with tempfile.TemporaryDirectory() as tmp:
        model = write_model(os.path.join(tmp, "model"), config("qwen3", vocab_size=640, hidden_size=128, intermediate_size=256,
            num_hidden_layers=3, head_dim=32, tie_word_embeddings=True, initializer_range=0.02))
        write_tokenizer(model, "qwen3")
        end = AutoTokenizer.from_pretrained(model).eos_token_id
        with open(os.path.join(model, "generation_config.json"), "w") as f:
            json.dump({"eos_token_id": [end], "do_sample": False}, f)
        data, r = os.path.join(tmp, "train.jsonl"), random.Random(1)
        with open(data, "w") as f:
            for k in range(8):
                for q, a in r.sample(known, len(known)):
                    turns = [{"role": "user", "content": q}, {"role": "assistant", "content": a}]
                    if k % 2:  # after another question, which is trained too
                        q2, a2 = r.choice(known)
                        turns = [{"role": "user", "content": q2}, {"role": "assistant", "content": a2}] + turns
                    f.write(json.dumps({"messages": turns}) + "\n")
        out = os.path.join(tmp, "out")
        ini = write_ini(out + ".ini", base(model, data, out, data__eval="", data__seq_len=128, train__steps="", train__epochs=14,
            train__batch_size=8, train__micro_batch=4, train__learning_rate="3e-3", train__warmup="5%", train__schedule="cosine",
            train__grad_clip=1.0, optimizer__weight_decay=0))
        megatrain("-q", "run", ini)
        losses = [m["loss"] for m in metrics(out) if "loss" in m]
        export = os.path.join(tmp, "export")
        megatrain("-q", "export", os.path.join(out, "latest"), export)
        tok = AutoTokenizer.from_pretrained(export)
        hf = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32).eval()
        right = stopped = same = 0
        for q, a in known:
            ids = tok.apply_chat_template([{"role": "user", "content": q}], add_generation_prompt=True, return_tensors="pt",
                                          return_dict=True)["input_ids"]
            with torch.no_grad():
                new = hf.generate(ids, max_new_tokens=40, do_sample=False, pad_token_id=end)[0, ids.shape[1]:].tolist()
            stopped += new[-1] == end
            said = tok.decode(new, skip_special_tokens=True)
            said = said.split("</think>")[-1].strip()
            right += said == a
        for q, a in known[:3]:
            ours = megatrain("-q", "sample", "--chat", "--model", export, "--prompt", q, "--temperature", "0", "--max-tokens", "40").stdout
            same += ours.split("</think>")[-1].strip() == a
            print(f"   {q} -> {ours.split('</think>')[-1].strip()}")
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.4f} in {len(losses)} steps; transformers answers {right} of {len(known)} questions as "
              f"taught and stops by itself in {stopped}; megatrain sample {same} of 3")
        good = right >= 0.95 * len(known) and stopped == len(known) and same == 3
        print(f"{int(good)} passed, {int(not good)} failed")
        sys.exit(not good)


main()
