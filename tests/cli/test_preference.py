# SPDX-License-Identifier: Apache-2.0
"""Preferences: no difference to the reference before the first update, whatever the model; the same bits for every
placement and after kills; data; refusals. Numbers are compared with TRL's in parity/test_preference.py."""
import csv
import filecmp
import json
import math
import os
import random
import shutil
import subprocess
import tempfile
import time
import xml.etree.ElementTree as ET

from tiny import BINARY, SLOW, base, config, drawn, losses, megatrain, metrics, part, planes, write_ini, write_model

STEPS = 10


def write_pairs(path, n=40, seed=3, vocab=270):
    r = random.Random(seed)
    ids = lambda most: [r.randrange(vocab) for _ in range(r.randrange(1, most))]
    with open(path, "w") as f:
        for _ in range(n):
            f.write(json.dumps({"prompt_ids": ids(12), "chosen_ids": ids(15), "rejected_ids": ids(15)}) + "\n")
    return path


def run(tmp, name, model, data, *args, loss="sigmoid", expect=0, **over):
    out = f"{tmp}/{name}"
    keys = {"preference__loss": loss, "train__steps": STEPS, "train__warmup": 0, "eval__every": 5, **over}
    return megatrain("run", write_ini(out + ".ini", base(model, data, out, **keys)), *args, expect=expect), out


def without_updates_nothing_differs(tmp, data):
    """In every micro-batch of the first epoch, also of the held-out pairs."""
    cases = {"f32": {}, "bf16": {"model__dtype": "bf16"}, "mixture": {"family": "qwen3_moe", "memory__expert_group": 2},
             "pieces": {"memory__logits_chunk": 64, "memory__logits_piece": 64, "train__micro_batch": 6},
             "nf4": {"model__base_dtype": "nf4", "adapter__kind": "lora", "model__dtype": "bf16"}}
    for name, over in list(cases.items())[:2 if SLOW else None]:
        model = write_model(f"{tmp}/model-{name}", config(over.pop("family", "qwen3")))
        _, out = run(tmp, name, model, data, train__learning_rate=0, **over)
        for m in metrics(out):
            prefix = "eval_" if "eval_loss" in m else ""
            if prefix + "loss" in m and m.get("epoch", 0) <= 1:
                assert m[prefix + "loss"] == math.log(2), (name, m)
                assert m[prefix + "rewards/margins"] == m[prefix + "rewards/chosen"] == 0, (name, m)


def placement_changes_no_bit(tmp, model, data):
    drive = f"{tmp}/drive"
    os.mkdir(drive)
    cases = {"plain": {}, "slots": {"memory__slots": 2, "memory__activations": "recompute", "memory__unit": "half"},
             "disk": {"memory__states": "disk", "memory__nvme_paths": drive, "memory__activations": "offload"},
             "thread": {"device__cpu_threads": 1}}
    got = {}
    for loss in ("sigmoid", "orpo", "kto"):
        for name, over in cases.items():
            _, out = run(tmp, f"{loss}-{name}", model, data, loss=loss, **over)
            measured = [[v for k, v in m.items() if "/" in k or k.endswith("loss")] for m in metrics(out)]
            got[name] = losses(out), measured, planes(f"{out}/checkpoint-{STEPS}")
        assert all(g == got["plain"] for g in got.values()), loss
        assert got["plain"][0][-1][1] < got["plain"][0][0][1], "nothing was learnt"


def kills_change_no_bit(tmp, model, data):
    _, whole = run(tmp, "whole", model, data, checkpoint__every=3)
    want = planes(f"{whole}/checkpoint-{STEPS}")
    out = f"{tmp}/killed"
    ini = write_ini(out + ".ini", base(model, data, out, preference__loss="sigmoid", train__steps=STEPS, train__warmup=0,
                                       eval__every=5, checkpoint__every=3))
    for wait in (0.02, 0.05, None):  # while it starts, or computes the reference; with a checkpoint
        p = subprocess.Popen([BINARY, "-q", "run", ini, "--resume"])
        while wait is None and not os.path.isdir(f"{out}/checkpoint-3"):
            assert p.poll() is None, "the run ended before it was killed"
            time.sleep(0.002)
        time.sleep(wait or 0)
        p.kill()
        p.wait()
    said = megatrain("run", ini, "--resume").stderr
    assert "under the model as it is" not in said, "the reference was computed again"
    assert planes(f"{out}/checkpoint-{STEPS}") == want
    megatrain("verify", f"{out}/checkpoint-3")
    path = f"{out}/checkpoint-3/megatrain/reference.f64"
    assert os.path.getsize(path) == 8 * 2 * 40


def longer_runs_have_the_bits_of_one(tmp, model, data):
    """A run that saw a part of the data goes on for longer, on other held-out pairs, too: what its checkpoint lacks of the
    reference is computed from what it began with, or refused if that is no more."""
    first, other = (write_pairs(f"{tmp}/held-out-{n}.jsonl", n=n, seed=n) for n in (7, 9))
    _, made = run(tmp, "begun", model, data, train__steps=1, train__seed=8, checkpoint__save="weights", data__eval=first)
    begun = f"{made}/checkpoint-1"
    constant = {"train__schedule": "constant", "data__eval": first, "checkpoint__every": 2}
    cases = {"random": (model, {}), "kto": (model, {"loss": "kto"}), "blocks": (begun, {"train__blocks": 1, "train__block_steps": 2}),
             "lora": (begun, {"adapter__kind": "lora", "train__learning_rate": "1e-2"})}
    for name, (start, over) in cases.items():
        over = {**constant, **over, "model__init": "random" if start is model else "weights"}
        _, whole = run(tmp, f"longer-whole-{name}", start, data, **{**over, "data__eval": other})
        for steps in (2, 5, STEPS):
            new = {"data__eval": other} if steps == STEPS else {}
            _, out = run(tmp, f"longer-{name}", start, data, "--resume", **{**over, "train__steps": steps, **new})
        assert losses(out) == losses(whole), (name, losses(out), losses(whole))
        evals = [[m for m in metrics(o) if "eval_loss" in m][-1] for o in (out, whole)]
        assert [{k: v for k, v in e.items() if k != "eval_s"} for e in evals][0] == {k: v for k, v in evals[1].items() if k != "eval_s"}, name
        last = f"checkpoint-{STEPS}"
        files = [f for f in os.listdir(f"{out}/{last}") if f.endswith(".safetensors")] + ["megatrain/reference.f64"]
        assert filecmp.cmpfiles(f"{out}/{last}", f"{whole}/{last}", files, shallow=False)[0] == files, (name, files)
    _, out = run(tmp, "longer-gone", begun, data, **constant, train__steps=2, model__init="weights")
    shutil.move(begun, f"{begun}-was")
    shutil.copytree(f"{out}/checkpoint-2", begun)
    shutil.rmtree(f"{begun}/megatrain")
    more = {**constant, "train__steps": 6, "model__init": "weights"}
    p, _ = run(tmp, "longer-gone", begun, data, "--resume", expect=7, **more)
    assert "is not the model as it was when training began" in p.stderr and "preference.reference" in p.stderr, p.stderr
    p, _ = run(tmp, "longer-gone", begun, data, "--resume", "--force", preference__reference=f"{begun}-was", **more)
    assert all(math.isfinite(m["loss"]) for m in metrics(out) if "loss" in m), p.stderr


def formats(tmp, model):
    """Strings with the byte tokenizer, with and without a prompt; rated answers; equal answers are left out."""
    pairs = [{"prompt": f"q{i}", "chosen": f" yes {i}", "rejected": f" no {i}"} for i in range(20)]
    implicit = [{"chosen": f"q{i} yes {i}", "rejected": f"q{i} no {i}"} for i in range(20)]
    rated = [{"prompt": f"q{i} ", "completion": ("yes" if i % 3 else "no") + f" {i}", "label": i % 3 != 0 if i % 2 else int(i % 3 != 0)} for i in range(30)]
    got = {}
    for name, rows in (("pairs", pairs + [dict(pairs[0], rejected=" yes 0")]), ("rated", rated), ("implicit", implicit)):
        with open(f"{tmp}/{name}.jsonl", "w") as f:
            f.writelines(json.dumps(r) + "\n" for r in rows)
        loss = "kto" if name == "rated" else "sigmoid"
        _, out = run(tmp, name, model, f"{tmp}/{name}.jsonl", loss=loss, data__tokenizer="byte", data__eval="", log__csv="on")
        first = [m for m in metrics(out) if "loss" in m][0]
        assert name != "rated" or first["kl"] == 0, first
        with open(f"{out}/metrics.csv") as f:
            rows = list(csv.DictReader(f))
        for row, m in zip(rows, metrics(out)):
            assert all(float(row[k]) == v for k, v in m.items() if "/" in k or k == "kl"), (row, m)
        assert first["loss"] == (0.5 if name == "rated" else math.log(2)), first
        got[name] = losses(out)
    assert got["pairs"] == got["implicit"]
    for lacks, of in (("rejected", pairs), ("chosen", pairs), ("rejected", implicit)):
        with open(f"{tmp}/half.jsonl", "w") as f:
            f.writelines(json.dumps({k: v for k, v in o.items() if k != lacks}) + "\n" for o in of)
        p, _ = run(tmp, "half", model, f"{tmp}/half.jsonl", expect=3, data__tokenizer="byte", data__eval="")
        assert f'half.jsonl:1: there is a' in p.stderr and f'no "{lacks}": name yours by data.columns = {lacks}:' in p.stderr, p.stderr


def a_report_shows_measures(tmp, model, data):
    """The charts of pairs and of rated answers; of other runs there are none. (Sound pictures are test_plan.py's.)"""
    runs = {loss: run(tmp, f"report-{loss}", model, data, loss=loss, train__steps=4, eval__every=2)[1] for loss in ("sigmoid", "kto")}
    text = f"{tmp}/report-text.jsonl"
    with open(text, "w") as f:
        f.writelines(json.dumps({"text": f"some text {i}"}) + "\n" for i in range(20))
    _, runs["off"] = run(tmp, "report-off", model, text, loss="off", data__tokenizer="byte", train__steps=4, eval__every=2)
    panels = {loss: drawn(out, html=f"{out}.html") for loss, out in runs.items()}
    if not panels["off"]:
        return
    for pictures in panels.values():
        for name in pictures.keys() & {"rewards", "log-probabilities"}:
            assert "chosen" in ET.fromstring(pictures[name]).itertext(), name
    panels = {loss: set(pictures) for loss, pictures in panels.items()}
    shown = {"rewards", "preferred", "log-probabilities"}
    assert shown <= panels["sigmoid"] and "distance" not in panels["sigmoid"], panels["sigmoid"]
    assert panels["kto"] >= {"rewards", "log-probabilities", "distance"}, panels["kto"]
    assert not panels["off"] & (shown | {"distance"}), panels["off"]


def long_answers_are_cut(tmp, model):
    """data.overlong = truncate gives the losses of answers that were cut before: each of a pair to half a row, a rated one to a
    row. What is left without an answer's token, or of equal answers, is left out and counted."""
    r = random.Random(9)
    ids = lambda least, most: [r.randrange(270) for _ in range(r.randrange(least, most))]
    pairs = [{"prompt_ids": ids(1, 12), "chosen_ids": ids(1, 60), "rejected_ids": ids(1, 60)} for _ in range(40)]
    whole, half = 64, 32
    fills = {"prompt_ids": ids(40, 41), "chosen_ids": ids(3, 4), "rejected_ids": ids(3, 4)}
    same = ids(30, 31)
    equal = {"prompt_ids": ids(4, 5), "chosen_ids": same + ids(40, 50), "rejected_ids": same + ids(1, 9)}
    cut = lambda p, key, most: p["prompt_ids"] + p[key] if len(p["prompt_ids"] + p[key]) <= most else (p["prompt_ids"] + p[key])[:most]
    short = [{"prompt_ids": p["prompt_ids"], **{k: cut(p, k, half)[len(p["prompt_ids"]):] for k in ("chosen_ids", "rejected_ids")}} for p in pairs]
    assert any(len(cut(p, "chosen_ids", 99)) > half and len(p["prompt_ids"] * 2 + p["chosen_ids"] + p["rejected_ids"]) <= whole for p in pairs)
    rated = [{"prompt_ids": p["prompt_ids"], "completion_ids": p["chosen_ids"], "label": i % 2 == 0} for i, p in enumerate(pairs)]
    files = {"long": pairs[:20] + [fills] + pairs[20:] + [equal], "short": short, "rated-long": rated,
             "rated-short": [dict(o, completion_ids=cut(o, "completion_ids", whole)[len(o["prompt_ids"]):]) for o in rated]}
    for name, rows in files.items():
        with open(f"{tmp}/{name}.jsonl", "w") as f:
            f.writelines(json.dumps(o) + "\n" for o in rows)
    got = {}
    for name in files:
        keys = dict(loss="apo_zero_unpaired" if "rated" in name else "sigmoid", data__max_untrained=1,
                    **{"data__overlong": "truncate"} if "long" in name else {})
        _, out = run(tmp, f"cut-{name}", model, f"{tmp}/{name}.jsonl", **keys)
        got[name] = losses(out), [m["eval_loss"] for m in metrics(out) if "eval_loss" in m], planes(f"{out}/checkpoint-{STEPS}")
        ini = f"{out}.ini"
        megatrain("score", ini, "--model", f"{out}/checkpoint-{STEPS}", "--data", f"{tmp}/{name}.jsonl", "--out", f"{out}.scores")
        with open(f"{out}.scores") as f:
            got[name] += tuple([(o["hash"], o["tokens"]) for o in map(json.loads, f)]),
    assert got["long"] == got["short"] and got["rated-long"] == got["rated-short"]
    stats = json.loads(megatrain("data", "stats", f"{tmp}/cut-long.ini", "--json").stdout)
    n = sum(any(len(cut(p, k, 99)) > half for k in ("chosen_ids", "rejected_ids")) for p in pairs)
    assert (stats["pairs"], stats["overlong"], stats["untrained"], stats["equal_pairs"]) == (40, n + 2, 1, 1), stats
    with open(f"{tmp}/fills.jsonl", "w") as f:
        f.writelines(json.dumps(o) + "\n" for o in pairs[:5] + [fills] * 5)
    p, _ = run(tmp, "cut-fills", model, f"{tmp}/fills.jsonl", data__overlong="truncate", expect=3)
    assert "fills.jsonl:6" in p.stderr and "data.seq_len" in p.stderr, p.stderr


def statistics(tmp, model):
    """What data stats tells of lengths, equal answers and pairs that contradict each other."""
    pair = lambda p, c, r: {"prompt": p, "chosen": c, "rejected": r}
    rows = [pair("a", "long one", "short"), pair("a", "short", "long one"), pair("b", "long one", "short"), pair("c", "same", "size"),
            pair("d", "no", "nay"), pair("e", "x", "x"), pair("f", "much longer", "z")]
    rated = [{"prompt": "a", "completion": "long one", "label": True}, {"prompt": "a", "completion": "no", "label": False}]
    got = {}
    for name, records in (("pairs", rows), ("rated", rated)):
        with open(f"{tmp}/stats-{name}.jsonl", "w") as f:
            f.writelines(json.dumps(r) + "\n" for r in records)
        ini = write_ini(f"{tmp}/stats.ini", base(model, f"{tmp}/stats-{name}.jsonl", f"{tmp}/none", data__tokenizer="byte", data__eval="",
                                                 train__batch_size=1, train__micro_batch=1, data__packing="off",
                                                 preference__loss="kto" if name == "rated" else "sigmoid"))
        got[name] = json.loads(megatrain("data", "stats", ini, "--json").stdout)
        said = megatrain("data", "stats", ini).stdout
        assert name == "rated" or ("50.0% of chosen answers are longer than the rejected ones, 16.7% equally long" in said and
                                   "Pairs       6; 1 more of equal answers are left out; of 2 another pair" in said), said
    ends = lambda answers: sum(len(a) + 1 for a in answers)  # with the token that ends each
    kept = [r for r in rows if r["chosen"] != r["rejected"]]
    want = {"pairs": 6, "equal_pairs": 1, "reversed_pairs": 2, "chosen_longer": 3, "length_ties": 1, "good_answers": 6, "bad_answers": 6,
            "good_tokens": ends(r["chosen"] for r in kept), "bad_tokens": ends(r["rejected"] for r in kept)}
    assert {k: got["pairs"][k] for k in want} == want, got["pairs"]
    want = {"pairs": 0, "good_answers": 1, "bad_answers": 1, "good_tokens": 9, "bad_tokens": 3}
    assert {k: got["rated"][k] for k in want} == want, got["rated"]


def the_best_is_by_any_measure(tmp, model, data):
    """The best checkpoint and early stopping by a measure of which more is better; what was the best by another one is
    forgotten as a run goes on."""
    by = {name: f"eval_{name}" for name in ("loss", "rewards/margins", "rewards/rejected")}
    keys = {"eval__every": 1, "train__learning_rate": "1e-2", "train__steps": 8, "checkpoint__keep": 1}
    for name, measure in by.items():
        _, out = run(tmp, f"best-{name.replace('/', '-')}", model, data, eval__best_by=name, **keys)
        evals = {m["step"]: m[measure] for m in metrics(out) if measure in m and m["step"]}
        best = (max if name == "rewards/margins" else min)(evals, key=evals.get)
        with open(f"{out}/latest/trainer_state.json") as f:
            named = json.load(f)
        assert (named["best_metric"], named["best_model_checkpoint"]) == (evals[best], f"checkpoint-{best}"), (name, evals, named)
        assert os.readlink(f"{out}/best") == f"checkpoint-{best}"
    first = {"eval__best_by": "logps/rejected", "checkpoint__every": 4, **keys}
    _, out = run(tmp, "changed", model, data, **{**first, "train__steps": 4, "train__schedule": "constant"})
    changed = {**first, "eval__best_by": "accuracy", "train__schedule": "constant"}
    p, _ = run(tmp, "changed", model, data, "--resume", **changed)
    evals = {m["step"]: m["eval_accuracy"] for m in metrics(out) if "eval_accuracy" in m and m["step"] > 4}
    assert "was by logps/rejected" in p.stderr, p.stderr
    with open(f"{out}/latest/trainer_state.json") as f:
        assert json.load(f)["best_metric"] == max(evals.values())
    p, _ = run(tmp, "stops", model, data, eval__best_by="rewards/rejected", eval__early_stop_patience=1,
               train__learning_rate=0, **{k: v for k, v in keys.items() if k != "train__learning_rate"})
    assert "stopped early at step 2: no better rewards/rejected in 1 evaluations" in p.stderr, p.stderr


def others_are_references(tmp, model, data):
    """Another model, an adapter, and a file of scores. That of the start's own weights changes no bit; a file says what its
    model's folder does; a run goes on without either."""
    held_out = write_pairs(f"{tmp}/held-out.jsonl", n=12, seed=4)
    small = {"train__steps": 4, "eval__every": 2, "data__eval": held_out, "checkpoint__keep": 20}
    _, first = run(tmp, "other-first", model, data, checkpoint__save="weights", **small)
    _, tuned = run(tmp, "other-tuned", model, data, checkpoint__save="weights", train__seed=7, **small)
    _, adapted = run(tmp, "other-adapted", f"{first}/checkpoint-4", data, model__init="weights", adapter__kind="lora",
                     checkpoint__save="weights", train__learning_rate="1e-2", **small)
    own, other = f"{first}/checkpoint-4", f"{tuned}/checkpoint-4"
    keys = {"model__init": "weights", "checkpoint__every": 2, **small}
    scores = ""
    for file in (held_out, data):  # together they are a file of scores, too
        ini = write_ini(f"{tmp}/other-score.ini", base(own, data, f"{tmp}/none", **{k: v for k, v in keys.items() if k != "data__eval"},
                                                       data__eval="", preference__loss="sigmoid"))
        megatrain("score", ini, "--model", other, "--data", file, "--out", f"{tmp}/scores.jsonl")
        with open(f"{tmp}/scores.jsonl") as f:
            scores += f.read()
    with open(f"{tmp}/all-scores.jsonl", "w") as f:
        f.write(scores)
    got = {}
    for name, of in (("start", "start"), ("same", own), ("model", other), ("adapter", f"{adapted}/checkpoint-4"),
                     ("file", f"{tmp}/all-scores.jsonl")):
        p, out = run(tmp, f"other-{name}", own, data, preference__reference=of, **keys)
        got[name] = [m[k] for m in metrics(out) for k in ("loss", "grad_norm", "eval_loss", "eval_rewards/margins") if k in m]
    assert got["same"] == got["start"] and got["start"][0] == math.log(2), got["start"]
    for name in ("model", "adapter"):
        assert abs(got[name][0] - math.log(2)) > 1e-4, (name, got[name])
    assert got["model"] != got["adapter"]
    assert all(abs(a - b) <= 2e-6 * max(1, abs(b)) for a, b in zip(got["file"], got["model"])), (got["file"], got["model"])
    of_kto = []
    for of in ("start", own):
        _, out = run(tmp, "other-kto", own, data, "--force", loss="kto", preference__reference=of, **keys)
        of_kto.append(losses(out))
    assert of_kto[0] == of_kto[1]
    # a run goes on without the folder, and not with another reference
    shutil.rmtree(f"{tmp}/other-model/checkpoint-4")
    with open(f"{tmp}/other-model/checkpoint-2/megatrain/state.json") as f:
        assert json.load(f)["reference"]["of"] == other
    os.rename(other, other + "-gone")
    want = got["model"]
    p, out = run(tmp, "other-model", own, data, "--resume", preference__reference=other, **keys)
    assert "under the reference" not in p.stderr
    assert [m["loss"] for m in metrics(out) if "loss" in m][-1] in want
    shutil.rmtree(f"{out}/checkpoint-4")
    os.rename(other + "-gone", other)
    p, _ = run(tmp, "other-model", own, data, "--resume", preference__reference=own, expect=2, **keys)
    assert "preference.reference" in p.stderr, p.stderr
    p, _ = run(tmp, "other-model", own, data, "--resume", "--force", expect=None, **keys)
    assert p.returncode and other in p.stderr and "the start is" in p.stderr, p.stderr
    # what is refused
    lines = scores.splitlines(keepends=True)
    for name, text in (("lacks", "".join(lines[:-1])), ("torn", scores[:-9]), ("nothing", ""), ("foreign", lines[0].replace('"hash"', '"h"'))):
        with open(f"{tmp}/scores-{name}", "w") as f:
            f.write(text)
    wide = write_model(f"{tmp}/wide", config(vocab_size=300))
    _, wide = run(tmp, "other-wide", wide, data, checkpoint__save="weights", **{**small, "train__steps": 1})
    spoken = {}
    for name, ids in (("a", {"x": 0, "y": 1}), ("b", {"y": 1, "x": 0}), ("c", {"x": 1, "y": 0})):
        spoken[name] = shutil.copytree(own, f"{tmp}/spoken-{name}")
        with open(f"{spoken[name]}/tokenizer.json", "w") as f:
            json.dump({"model": {"type": "BPE", "vocab": ids}, "added_tokens": [{"id": 2, "content": "z"}]}, f)
    # token ids need no tokenizer: of two folders with the same one, written in another order, nothing is refused
    run(tmp, "other-spoken", spoken["a"], data, preference__reference=spoken["b"], **keys)
    for what, start, over in ((f"1 of {2 * 52} answers", own, dict(preference__reference=f"{tmp}/scores-lacks")),
                              ("scores-torn:104", own, dict(preference__reference=f"{tmp}/scores-torn")),
                              (f"of {2 * 52} answers", own, dict(preference__reference=f"{tmp}/scores-nothing")),
                              ("scores-foreign:1", own, dict(preference__reference=f"{tmp}/scores-foreign")),
                              ("vocabulary of 300", own, dict(preference__reference=f"{wide}/checkpoint-1")),
                              ("another tokenizer", spoken["a"], dict(preference__reference=spoken["c"])),
                              ("no such folder", own, dict(preference__reference=f"{tmp}/nowhere")),
                              ("needs no reference", own, dict(preference__reference=other, loss="simpo")),
                              ("mismatched", own, dict(preference__reference=f"{tmp}/all-scores.jsonl", loss="kto"))):
        p, _ = run(tmp, "other-refused", start, data, "--force", expect=None, **over, **keys)
        assert p.returncode not in (0, -11) and what in p.stderr, (what, p.returncode, p.stderr)


def answers_that_come_later_have_a_reference(tmp, model):
    """Of a file that an epoch visits in part, beside one that it visits twice: an epoch has as many rows as there are, but not each."""
    files = [write_pairs(f"{tmp}/weighed-{k}.jsonl", n=12, seed=k) for k in range(2)]
    keys = {"data__eval": "", "data__packing": "off", "train__steps": 24, "train__batch_size": 4, "checkpoint__every": 0}
    data = f"{files[0]}:2, {files[1]}:0.25"
    _, whole = run(tmp, "weighed", model, data, **keys)
    assert len(losses(whole)) == 24 and all(math.isfinite(l) for _, l, _ in losses(whole)), losses(whole)
    run(tmp, "weighed-cut", model, data, "--max-steps", 9, **keys)
    _, cut = run(tmp, "weighed-cut", model, data, "--resume", **keys)
    assert planes(f"{cut}/checkpoint-24") == planes(f"{whole}/checkpoint-24")


def rounds_go_on(tmp, model, data):
    """The commands of `megatrain help preferences` for rounds with a server, as they stand there."""
    home = f"{tmp}/rounds"
    os.mkdir(home)
    _, first = run(tmp, "rounds-base", model, data, train__steps=2, checkpoint__save="weights")
    for name in ("round1.jsonl", "round2.jsonl"):
        write_pairs(f"{home}/{name}", seed=len(name))
    with open(f"{home}/round2-answers.jsonl", "w") as f:
        f.writelines(json.dumps({"prompt": f"q{i}", "completion": f" a{k}"}) + "\n" for i in range(3) for k in range(4))
    keys = {"model__init": "weights", "preference__loss": "sigmoid", "train__steps": 3, "data__tokenizer": "byte", "data__eval": "",
            "adapter__kind": "lora", "train__learning_rate": "1e-2"}
    write_ini(f"{home}/dpo.ini", base(f"{first}/checkpoint-2", "none", f"{home}/none", **keys, data__cache_dir=f"{tmp}/cache"))
    write_ini(f"{home}/judge.ini", base(f"{first}/checkpoint-2", "none", f"{home}/none", model__init="weights", data__tokenizer="byte", data__eval="",
                                        data__cache_dir=f"{tmp}/cache"))
    commands = [line.split()[1:] for line in megatrain("help", "preferences").stdout.splitlines() if line.startswith("  megatrain ")]
    assert len(commands) == 3, commands
    for command in commands:
        megatrain(*command, cwd=home)
    with open(f"{home}/round2-scores.jsonl") as f:
        assert [sum(o["best"] for o in rows) for rows in zip(*[map(json.loads, f)] * 4)] == [1, 1, 1]
    began = metrics(f"{home}/out/round2")[0]
    assert began["loss"] == math.log(2) and began["step"] == 1, began  # the adapter of the first round is its own reference
    weights = [open(f"{home}/out/{r}/latest/adapter_model.safetensors", "rb").read() for r in ("round1", "round2")]
    assert weights[0] != weights[1]


def refusals(tmp, model, data):
    text = f"{tmp}/text.jsonl"
    with open(text, "w") as f:
        f.writelines(json.dumps({"text": f"some text {i}"}) + "\n" for i in range(20))
    bad = f"{tmp}/bad.jsonl"
    with open(bad, "w") as f:
        f.write(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n")
        f.write(json.dumps({"prompt": "a", "chosen": "b", "rejected": 3}) + "\n")
    asked, rated = f"{tmp}/asked.jsonl", f"{tmp}/rated-alone.jsonl"
    with open(asked, "w") as f:
        f.write(json.dumps({"question": "a", "chosen": "b", "rejected": "c"}) + "\n")
    with open(rated, "w") as f:
        f.writelines(json.dumps({"prompt": f"a {i}", "completion": "b", "label": i % 2 == 0}) + "\n" for i in range(20))
    for what, over in (("prompt:question", dict(data=asked)), ("set it to kto", dict(data=rated)), ("set it to kto", dict(data=rated, loss="simpo")),
                       ("set it to kto", dict(data=rated, loss="off")),
                       ("adapter.dropout", dict(adapter__kind="lora", adapter__dropout=0.1)), ("data.overlong", dict(data__overlong="split")),
                       ("preference.loss", dict(loss="kto_pair")), ("set it to sigmoid", dict(loss="off")), ("bad.jsonl:2", dict(data=bad)),
                       ("not chosen and rejected", dict(data=text)), ("data.seq_len", dict(data__seq_len=8)),
                       ("label_smoothing", dict(preference__label_smoothing=0.5)), ("eval.best_by", dict(eval__best_by="kl")),
                       ("eval.best_by", dict(eval__best_by="log_odds_ratio")), ("eval.best_by", dict(loss="off", eval__best_by="rewards/margins"))):
        p, _ = run(tmp, "refused", model, over.pop("data", data), expect=None, data__tokenizer="byte", **over)
        assert p.returncode not in (0, -11) and what in p.stderr, (what, p.returncode, p.stderr)


def main(tmp):
    os.environ["MEGATRAIN_DISK_PIECE"] = "2048"
    model, data = write_model(f"{tmp}/model", config()), write_pairs(f"{tmp}/data.jsonl")
    if part("first"):
        without_updates_nothing_differs(tmp, data)
        placement_changes_no_bit(tmp, model, data)
        formats(tmp, model)
        statistics(tmp, model)
        refusals(tmp, model, data)
    if part("rest"):
        kills_change_no_bit(tmp, model, data)
        longer_runs_have_the_bits_of_one(tmp, model, data)
        a_report_shows_measures(tmp, model, data)
        long_answers_are_cut(tmp, model)
        the_best_is_by_any_measure(tmp, model, data)
        others_are_references(tmp, model, data)
        answers_that_come_later_have_a_reference(tmp, model)
        rounds_go_on(tmp, model, data)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as tmp:
        main(tmp)
