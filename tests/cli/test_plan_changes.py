# SPDX-License-Identifier: Apache-2.0
"""What plan offers where nothing fits: each change, asked for, does."""
import concurrent.futures
import itertools
import json
import os
import random
import re
import tempfile
import time

from test_plan import CONFIGS, plan, shape_json
from tiny import FULL, chosen, megatrain

DAY = int(time.time()) // 86400  # in full some questions are others each day; a failure shows its question


def what_does_not_fit_says_what_would(tmp):
    model = shape_json(tmp, "70b")
    r = plan("--machine", "rtx3090", "--gpu-mem", "10GiB", "--model", model, expect=4)
    assert not r["fits"] and "short" in r["short"], r
    # the device suffices for the smallest micro-batch: what no choice avoids is the host's
    r = plan("--machine", "rtx4090", "--gpu-mem", "8GiB", "--host-mem", "128GiB", "--model", "Qwen3-8B", expect=4)
    assert "host budget" in r["short"], r
    text = megatrain("plan", "--machine", "rtx4090", "--model", model, expect=4).stderr
    assert "short by" in text and "would fit" in text and "hardware" in text, text
    assert "drive" in text or "host memory of" in text, text
    scored = ("--machine", "rtx4090", "--host-mem", "64GiB", "--model", model, "--score", "8")
    keys = {k for c in plan(*scored, expect=4)["changes"] for k in re.findall(r"--set (\S+)=", c["change"])}
    assert keys == {"model.base_dtype"}, keys  # where nothing trains


def follow(args, change):
    """The arguments with a change that a refusal offers: options as they stand, or "key = value"."""
    options = re.findall(r"(--[a-z-]+) ([^\s;)]+)", change)
    key = re.match(r"([a-z_]+\.[a-z_]+) = ([^\s,]+)", change)
    assert options or key, change
    options = options or [("--set", f"{key[1]}={key[2]}")]
    return args + tuple(x for option in options for x in option)


def ask(args):
    """(fits, answer): without a drive's rate, too, there is an answer."""
    p = megatrain("-q", "plan", *args, "--json", expect=None)
    assert p.returncode in (0, 4), (args, p.returncode, p.stderr)
    return p.returncode == 0, json.loads(p.stdout)


def what_is_needed_is_enough(tmp):
    """A budget of the size that a refusal names is: of the device with its libraries' part, and of the host where the base
    cannot be read in place, or updates under backward need less."""
    args = ("--machine", "rtx4090", "--model", shape_json(tmp, "8b", 9), "--seq-len", "2048", "--tokens-per-step", "8Ki")
    for more, key in ((("--gpu-mem", "3GiB"), "memory.device_budget"),
                      (("--host-mem", "6GiB", "--set", "adapter.kind=lora"), "memory.host_budget"),
                      (("--host-mem", "16GiB", "--set", "train.grad_clip=0"), "memory.host_budget")):
        short = plan(*args, *more, expect=4)["short"]
        need, unit = re.search(r"([\d.]+) ([MG]iB) are needed", short).groups()
        assert ask((*args, *more, "--set", f"{key}={need}{unit}"))[0], short
        assert not ask((*args, *more, "--set", f"{key}={float(need) * 0.98:.2f}{unit}"))[0], short


def what_is_offered_is_possible(tmp):
    """Of chunks of rows: not without a backward pass, and micro-batches of a row. Of blocks: all of them fit."""
    args = ("--machine", "rtx4090", "--model", shape_json(tmp, "8b", 5))
    long = (*args, "--seq-len", "65536", "--tokens-per-step", "128Ki", "--gpu-mem", "8GiB", "--micro-batch", "2")
    mezo = plan(*long, "--set", "optimizer.type=mezo", "--set", "train.grad_clip=0", expect=4)
    assert "train.chunk" not in json.dumps(mezo), mezo
    blocks = (*args, "--seq-len", "1024", "--tokens-per-step", "4Ki", "--host-mem", "6GiB", "--set", "train.blocks=2",
              "--set", "train.block_order=ascending")
    for asked, word in ((long, "train.chunk"), (blocks, "host memory of")):
        changes = [c["change"] for c in ask(asked)[1]["changes"]]
        assert ask(follow(asked, next(c for c in changes if word in c)))[0], changes
    for key in "memory.states", "memory.activations", "memory.base":
        assert f"{key} = disk needs" in megatrain("plan", *args, "--set", f"{key}=disk", expect=2).stderr


def two_parts_are_offered_together(tmp):
    """The device is too small for a layer, and host memory for the base: no change alone would do."""
    args = ("--machine", "rtx3090", "--model", "Qwen3-8B", "--host-mem", "8GiB", "--gpu-mem", "3GiB", "--seq-len", "2048", "--set", "adapter.kind=lora")
    fits, answer = ask(args)
    changes = [c["change"] for c in answer["changes"]]
    assert not fits and all(c.startswith("device memory of") for c in changes), changes
    for part in ("host memory of", "NVMe drive"):
        assert ask(follow(args, next(c for c in changes if part in c)))[0], changes
    args += ("--set", "memory.states=host")  # which drives are no use with
    changes = [c["change"] for c in ask(args)[1]["changes"]]
    assert ask(follow(args, next(c for c in changes if "NVMe drive" in c)))[0], changes
    # the page tables of 1.9 TiB are 3.7 GiB of the GPU's memory: more of the host's alone would not do
    args = ("--machine", "rtx4090", "--model", shape_json(tmp, "405b", 40), "--seq-len", "512", "--tokens-per-step", "2Ki", "--micro-batch", "1",
            "--set", "memory.activations=recompute", "--host-mem", "64GiB", "--gpu-mem", "22GiB")
    changes = [c["change"] for c in ask(args)[1]["changes"]]
    assert ask(follow(args, next(c for c in changes if "host memory of" in c)))[0], changes


def recomputing_comes_before_hardware(tmp):
    """Also where memory.activations is set: memory for all activations would be offered by the terabyte. And hardware that
    there is comes before more."""
    keep = ("--machine", "rtx4090", "--seq-len", "4096", "--set", "memory.activations=keep")
    nf4 = "--set adapter.kind=lora --set model.base_dtype=nf4 --set memory.activations=recompute --tokens-per-step"
    for args, first in ((("--model", "Qwen3-8B", "--host-mem", "128GiB", "--tokens-per-step", "16Ki"), "memory.activations = recompute"),
                        (("--model", "Llama-3.3-70B", "--host-mem", "64GiB"), nf4),
                        (("--model", "Llama-3.1-405B", "--host-mem", "64GiB"), "two NVMe drives")):
        fits, answer = ask((*args, *keep))
        change = answer["changes"][0]
        assert not fits and change["change"].startswith(first) and "memory.activations" in change["change"], answer
        assert ask(follow((*args, *keep), change["change"]))[0], change
    assert "host memory of 6" in answer["changes"][-1]["change"], answer  # faster, but no workstation takes 6 TiB


def shape_of(model):
    return json.load(open(os.path.join(CONFIGS, "models", model + ".json")))


def question(k, models):
    """The k-th random question to the planner: a GPU and the memory of a machine, a model, what is trained and how."""
    rng = random.Random(f"refusals {k}")
    seq_len = rng.choice((512, 1024, 2048, 4096, 8192))
    machine = rng.choice(("rtx3060", "rtx3090", "rtx4070", "rtx4090", "rtx5090", "a6000", "h100", "h200"))
    model = rng.choice(models)
    seq_len = min(seq_len, shape_of(model).get("index_topk", seq_len))  # longer texts are refused whatever the memory
    args = ["--machine", machine, "--model", model,
            "--host-mem", f"{rng.choice((8, 16, 24, 32, 48, 64, 96, 128, 192, 256))}GiB", "--seq-len", str(seq_len)]
    if rng.random() < 0.3:
        args += ["--gpu-mem", f"{rng.choice((3, 4, 6, 8, 10, 16))}GiB"]
    if rng.random() < 0.25:
        args += ["--nvme", f"{rng.choice((3, 7, 12))}GB/s", "--drives", str(rng.choice((1, 2, 4)))]
    if rng.random() < 0.6:
        args += ["--tokens-per-step", str(seq_len * rng.choice((1, 4, 16, 64)))]
    if rng.random() < 0.2:
        args += ["--micro-batch", "1"]
    for key, share, values in (("memory.states", 0.1, ("host",)), ("memory.activations", 0.15, ("recompute", "keep", "offload")),
                               ("optimizer.state_dtype", 0.1, ("bf16", "8bit"))):
        if rng.random() < share:
            args += ["--set", f"{key}={rng.choice(values)}"]
    if rng.random() < 0.4:
        args += ["--set", f"adapter.kind={rng.choice(('lora', 'dora'))}"]
        if rng.random() < 0.4 and "quantization_config" not in shape_of(model):
            args += ["--set", f"model.base_dtype={rng.choice(('nf4', 'fp8', 'mxfp4'))}"]
    return tuple(args)


def answer_and_follow(args):
    """None: it fits; else the change that the refusal offers first, which has to fit."""
    fits, answer = ask(args)
    if fits:
        return None
    assert answer["changes"], (args, answer)
    change = answer["changes"][0]["change"]
    assert ask(follow(args, change))[0], (args, change)
    return change


def answered(asked):
    """What answer_and_follow() says of each of the questions; in full as many at a time as there are cores."""
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() if FULL else 1) as pool:
        for args, change in zip(asked, pool.map(answer_and_follow, asked)):
            if FULL:
                print(*args, f"-> {change}" if change else "fits", flush=True)
            yield args, change


def a_refusal_s_first_change_fits(tmp):
    """Each of the random questions that is refused is asked again with the first change that is offered. In full: 50
    refusals of all published models, others each day."""
    wanted, refused = 50 if FULL else 4, 0
    models = sorted(n[:-5] for n in os.listdir(os.path.join(CONFIGS, "models")) if n.endswith(".json"))
    if not FULL:
        models = ["Llama-3.2-3B", "Qwen3-8B"]
    first = DAY * 100 * wanted if FULL else 0
    for k in range(first, first + 100 * wanted, wanted):
        refused += sum(change is not None for _, change in answered([question(i, models) for i in range(k, k + wanted)]))
        if refused >= wanted:
            break


def a_refusal_and_wear_name_leaner_masters(tmp):
    args = ("--machine", "rtx4090", "--tokens-per-step", "16Ki", "--seq-len", "4096", "--model", shape_json(tmp, "8b"),
            "--micro-batch", "1", "--set", "memory.activations=recompute", "--set", "memory.slots=2")
    changes = [c["change"] for c in plan(*args, "--host-mem", "64GiB", expect=4)["changes"]]
    lean = "--set optimizer.state_dtype=8bit --set optimizer.master=24bit"
    assert lean in changes and "--set optimizer.state_dtype=8bit" not in changes, changes
    assert ask(follow((*args, "--host-mem", "64GiB"), lean))[0]
    drives = ("--host-mem", "64GiB", "--nvme", "7GB/s")
    said = megatrain("plan", *args, *drives).stdout
    assert "optimizer.master = 24bit: masters of 8.03 GB less" in said, said
    assert "optimizer.master = bf16: masters of 16.06 GB less" in said, said
    assert "optimizer.master = 24bit" not in megatrain("plan", *args, *drives, "--set", "optimizer.master=24bit").stdout


def a_change_has_no_needless_settings(tmp):
    args = ("--machine", "rtx4090", "--host-mem", "64GiB", "--seq-len", "4096", "--tokens-per-step", "64Ki", "--model",
            shape_json(tmp, "70b"), "--set", "adapter.kind=lora", "--set", "model.base_dtype=nf4")
    changes = [c["change"] for c in plan(*args, expect=4)["changes"]]
    assert "--tokens-per-step 16384" in changes and not any("memory.update" in c for c in changes), changes


def the_questions_of_a_new_user_are_answered(tmp):
    """LoRA on a GPU and the memory that one has, no drive named. In full a fifth of them each day."""
    models = [("Qwen3-4B",), ("Qwen3-8B",), ("Llama-3.1-8B",), ("Qwen2.5-7B",), ("Qwen3-14B",), ("Qwen3-32B",),
              ("Qwen3-30B-A3B", "--set", "model.base_dtype=nf4"), ("Llama-3.3-70B",),
              ("Llama-3.3-70B", "--set", "model.base_dtype=nf4")]
    of = itertools.product(("rtx3090", "rtx4090", "rtx5090"), (64, 96, 128, 192, 256), models)
    if not FULL:
        of = [("rtx4090", 128, models[1])]
    asked = [("--machine", machine, "--host-mem", f"{gib}GiB", "--model", *model, "--set", "adapter.kind=lora")
             for machine, gib, model in of]
    for args, change in answered(asked[DAY % 5::5] if FULL else asked):
        if "Qwen3-8B" in args:
            assert change is None and ask(args)[1]["settings"].get("memory.base") != "files", args


TESTS = [v for v in list(globals().values()) if getattr(v, "__code__", None) and v.__code__.co_varnames[:v.__code__.co_argcount] == ("tmp",)]

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as tmp:
        for test in chosen(TESTS, first=(what_is_needed_is_enough,)):
            test(tmp)
            print(f"ok {test.__name__}", flush=True)
