# SPDX-License-Identifier: Apache-2.0
"""Makes tests/parity/lm_eval: made-up multiple-choice tasks of local JSON, the requests that lm-evaluation-harness makes of
them (its --log_samples), and what it computes from them with transformers and the small dense model of tests/parity in
FP32, with a tokenizer that merges across words. Run by hand, with lm-eval installed; the test needs neither it nor torch.
    PYTHON scripts/reference/lm_eval_fixtures.py
"""
import glob
import json
import os
import random
import shutil
import tempfile

import torch
from lm_eval import __version__, simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from parity import load
from seeded import PARITY as ROOT, fixture

OUT = os.path.join(ROOT, "lm_eval")
THINGS = ["sky", "grass", "snow", "coal", "sun", "sea", "tree", "road"]
COLOURS = ["blue", "green", "white", "black", "yellow", "red", "reddish", "grey"]
# context, choices, and what is put between: the choices begin with a space, or the context ends in some, or a word goes on
TASKS = {
    "spaced": dict(doc_to_text="the {{thing}} of {{place}} is", doc_to_choice="{{colours}}", target_delimiter=" "),
    "ends_in_spaces": dict(doc_to_text="{{place}}: the {{thing}} is  ", doc_to_choice="{{colours}}", target_delimiter=""),
    "goes_on": dict(doc_to_text="the {{thing}} looks r", doc_to_choice="{{ends}}", target_delimiter=""),
    "no_context": dict(doc_to_text="", doc_to_choice="{{texts}}", target_delimiter=""),
}


def docs(n, seed):
    r = random.Random(seed)
    for i in range(n):
        colours = r.sample(COLOURS, r.randrange(2, 5))
        thing, place = r.choice(THINGS), r.choice(THINGS)
        yield {"thing": thing, "place": place, "colours": colours, "ends": [e + " as " + place for e in ("ed", "eddish", "ound", " blue")],
               "texts": [f"{c} {thing}" for c in colours] + ["<s>" + place], "label": r.randrange(2)}


def make_tokenizer(dir):
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    texts = [f"the {a} of {b} is {c} <looks> as reddish" for a in THINGS for b in THINGS for c in COLOURS]
    t.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=90, special_tokens=["<s>", "</s>"], show_progress=False))
    t.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", t.token_to_id("<s>"))])
    made = PreTrainedTokenizerFast(tokenizer_object=t, bos_token="<s>", eos_token="</s>")
    made.save_pretrained(dir)
    assert len(made) <= 96
    return made


def main():
    torch.set_num_threads(1)
    shutil.rmtree(OUT, ignore_errors=True)
    os.makedirs(OUT)
    tokenizer = make_tokenizer(OUT)
    model = load(fixture("qwen3"))
    expected = {}
    with tempfile.TemporaryDirectory() as tmp:
        for k, (name, keys) in enumerate(TASKS.items()):
            with open(f"{tmp}/{name}.jsonl", "w") as f:
                f.writelines(json.dumps(d) + "\n" for d in docs(30, k))
            task = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": f"{tmp}/{name}.jsonl"}},
                    "output_type": "multiple_choice", "test_split": "test", "doc_to_target": "label", **keys,
                    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]}
            lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, max_length=64)
            got = simple_evaluate(lm, tasks=[task], task_manager=TaskManager(include_defaults=False), log_samples=True,
                                  bootstrap_iters=0)
            rows, want = [], []
            for s in got["samples"][name]:
                rows.append({"doc_id": s["doc_id"], "target": s["target"], "arguments": {
                    f"gen_args_{i}": {"arg_0": a[0], "arg_1": a[1]} for i, a in enumerate(s["arguments"])}})
                want.append({"logprob": [float(f"{float(r[0][0]):.9g}") for r in s["resps"]],
                             "is_greedy": [str(r[0][1]) == "True" for r in s["resps"]], "acc": s["acc"], "acc_norm": s["acc_norm"]})
            with open(f"{OUT}/samples_{name}.jsonl", "w") as f:
                f.writelines(json.dumps(row) + "\n" for row in rows)
            expected[name] = {"acc": got["results"][name]["acc,none"], "acc_norm": got["results"][name]["acc_norm,none"], "samples": want}
    for path in glob.glob(f"{OUT}/*"):
        if os.path.basename(path) not in ("tokenizer.json", "tokenizer_config.json") and not path.endswith(".jsonl"):
            os.remove(path)
    with open(f"{OUT}/expected.json", "w") as f:
        json.dump({"made_with": f"lm-evaluation-harness {__version__}, torch {torch.__version__}", "tasks": expected}, f)
        f.write("\n")


main()
