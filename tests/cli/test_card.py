# SPDX-License-Identifier: Apache-2.0
"""The model card that an export of a run's checkpoint has."""
import json
import os
import tempfile

from tiny import base, config, megatrain, write_ini, write_model


def card_of(folder, *words):
    megatrain("verify", folder)  # it is one of the files that have checksums
    with open(os.path.join(folder, "README.md")) as f:
        text = f.read()
    assert text.startswith("---\n") and text.count("\n---\n") == 1, text
    for w in words:
        assert w in text, (w, text)
    return text


with tempfile.TemporaryDirectory() as tmp:
    cache, secret = os.path.join(tmp, "models--Some-Org--A-Model", "snapshots", "123"), os.path.join(tmp, "secret")
    os.mkdir(secret)
    data, other = os.path.join(secret, "d.txt"), os.path.join(secret, "e|f.txt")
    for path in data, other:
        with open(path, "w") as f:
            f.write("abcdefgh" * 200)
    write_model(cache, config("qwen3", num_hidden_layers=1))
    own = {"train__steps": 4, "data__tokenizer": "byte", "data__eval": data, "eval__every": 2}
    out = lambda name: os.path.join(tmp, name)
    megatrain("-q", "run", write_ini(out("a.ini"), base(cache, f"{data}, {other}", out("full"), **own)))
    megatrain("-q", "export", out("full/latest"), out("whole"))
    text = card_of(out("whole"), "library_name: transformers\n", "base_model: Some-Org/A-Model\n", "finetune", "# whole\n",
                   "| Base | Some-Org/A-Model |", "| Method | all parameters |", "| Data | d.txt, e\\|f.txt |", "4 of 4", "rows of 64",
                   "## Evaluation")
    with open(out("full/latest/trainer_state.json")) as f:
        evaluations = [r for r in json.load(f)["log_history"] if "eval_loss" in r]
    assert len(evaluations) == 2 and all(f"| {r['step']} | {r['eval_loss']:.6g} |" in text for r in evaluations), text
    assert tmp not in text and "secret" not in text, text
    megatrain("-q", "export", out("whole"), out("again"))  # no run's: nothing is known of how it came about
    assert not os.path.exists(out("again/README.md"))
    megatrain("-q", "run", write_ini(out("b.ini"), base(out("whole"), data, out("lora"), **own, model__init="weights", adapter__kind="lora",
                                                        adapter__rank=4, adapter__targets="q_proj, v_proj")))
    megatrain("-q", "export", out("lora/latest"), out("adapters"))
    text = card_of(out("adapters"), "library_name: peft\n", "- lora\n", "| Base | whole |",
                   "| Method | lora, rank 4, alpha 32, targets q_proj, v_proj |")
    assert "base_model" not in text and "secret" not in text, text  # a folder is no model of the Hub
    megatrain("-q", "export", "--merge", out("lora/latest"), out("merged"))
    card_of(out("merged"), "library_name: transformers\n", "merged into the model's weights")
    # names are no markup, whatever they are
    evil, marked = os.path.join(tmp, "m&'<b>*x*"), os.path.join(secret, "_d_ (b)`<script>.txt")
    os.rename(out("whole"), evil)
    os.rename(data, marked)
    megatrain("-q", "run", write_ini(out("e.ini"), base(evil, marked, out("marked"), **{**own, "data__eval": ""}, model__init="weights")))
    megatrain("-q", "export", out("marked/latest"), out("# <i>e"))
    text = card_of(out("# <i>e"), "\n# \\# &lt;i&gt;", "| Base | m&amp;'&lt;b&gt;\\*x\\* |", "| Data | \\_d\\_ (b)\\`&lt;script&gt;.txt |")
    assert "<" not in text and "base_model" not in text, text
    os.rename(evil, out("whole"))
    os.rename(marked, data)
    # a model that is named as on the Hub, distilled
    os.mkdir(os.path.join(tmp, "models--Some-Org--A-Model", "refs"))
    with open(os.path.join(tmp, "models--Some-Org--A-Model", "refs", "main"), "w") as f:
        f.write("123")
    env = {"HF_HUB_CACHE": tmp}
    megatrain("-q", "score", write_ini(out("c.ini"), base(out("whole"), data, out("none"), data__tokenizer="byte", data__overlong="split", data__eval="")),
              "--data", data, "--out", out("scores"), "--top", "4")
    megatrain("-q", "run", write_ini(out("d.ini"), base("Some-Org/A-Model", data, out("taught"), **{
        **own, "data__eval": "", "data__overlong": "split", "train__objective": "distill", "distill__teacher": out("scores.top"),
        "distill__top": 3, "distill__sft": 0.25, "optimizer__master": "24bit", "model__dtype": "bf16", "model__compute": "fp8"})), env=env)
    megatrain("-q", "export", out("taught/latest"), out("student"))
    text = card_of(out("student"), "base_model: Some-Org/A-Model\n", "| Base | Some-Org/A-Model |", "masters 24bit", "products in fp8",
                   "| Distilled from | scores.top, top 3, share of the data's own tokens 0.25 |")
    assert "secret" not in text and tmp not in text, text
