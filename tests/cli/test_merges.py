# SPDX-License-Identifier: Apache-2.0
"""Adapters that are merged while they are trained (ReLoRA): a run that is stopped or killed anywhere goes on with the same bits,
every home of the base gives them, exports are whole models, and what could not be merged exactly is refused."""
import glob
import json
import os
import re
import shutil
import subprocess
import tempfile
import time

from tiny import (BINARY, FULL, base, config, megatrain, metrics, planes, read_safetensors, with_weights,
                  write_data, write_ini, write_model)

STEPS, EVERY, TARGETS = 8, 3, "q_proj, down_proj"


def settings(tmp, model, out, **over):
    keys = dict(model__init="weights", model__dtype="bf16", adapter__kind="lora", adapter__rank=2, adapter__targets=TARGETS,
                adapter__merge_every=EVERY, adapter__merge_warmup=2, train__steps=STEPS, train__learning_rate="2e-2", train__min_lr_ratio=0,
                checkpoint__every=2, data__eval="4")
    keys.update(over)
    return write_ini(out + ".ini", base(model, os.path.join(tmp, "data.jsonl"), out, **keys))


def exported(out, step=STEPS):
    to, found = f"{out}-export-{step}", {}
    shutil.rmtree(to, ignore_errors=True)
    megatrain("-q", "export", f"{out}/checkpoint-{step}", to)
    for path in glob.glob(to + "/*.safetensors"):
        found.update(read_safetensors(path))
    return found


def result(out):
    return planes(f"{out}/checkpoint-{STEPS}"), exported(out)


def exports_are_whole_models(tmp, model, out):
    given = read_safetensors(os.path.join(model, "model.safetensors"))
    before = given
    for step in (2, 4, 6, 8) if FULL else (8,):
        now = exported(out, step)
        assert set(now) == set(given), "a whole model"
        for name in given:
            assert (now[name] != before[name]) == any(t in name for t in TARGETS.split(", ")), (step, name)
        before = now
    last = [m for m in metrics(out) if "eval_loss" in m][-1]["eval_loss"]
    ini = write_ini(out + "-eval.ini", base(f"{out}-export-{STEPS}", os.path.join(tmp, "data.jsonl"), out + "-eval",
                                            model__init="weights", model__dtype="bf16", data__eval="4"))
    loss = json.loads(megatrain("-q", "eval", ini, "--json").stdout)["loss"]
    assert abs(loss - last) < 2e-3 * last, (loss, last)
    folders = [os.path.basename(p) for p in glob.glob(out + "/overlay-*")]
    assert sorted(int(p.split("-")[1]) for p in folders) == [1, 2], folders
    with open(f"{out}/checkpoint-4/adapter_config.json") as f:
        assert "/overlay-1-" in json.load(f)["base_model_name_or_path"], "they are not of the model's own weights"


def weights_alone_keep_what_they_rest_on(tmp, model, out):
    """Of checkpoints without a state, too, what adapters were merged into stays beside them."""
    alone = os.path.join(tmp, "weights")
    megatrain("-q", "run", settings(tmp, model, alone, checkpoint__save="weights"))
    for step in (4, 8): # of different overlays
        assert exported(alone, step) == exported(out, step), step


def the_rate_rises_again(out):
    rates = {m["step"]: m["lr"] for m in metrics(out) if "lr" in m}
    assert rates[4] == 0 and rates[7] == 0, rates
    assert abs(rates[5] / rates[3] - 0.5 * (8 - 4) / (8 - 2)) < 1e-6, rates  # half of what the schedule has there


def the_plan_knows_what_a_merge_writes(out):
    overlay = glob.glob(out + "/overlay-1-*")[0]
    bytes_of = sum(len(raw) for path in glob.glob(overlay + "/*.safetensors") for _, _, raw in read_safetensors(path).values())
    args = "plan", "--machine", "rtx4090", out + ".ini"
    assert json.loads(megatrain("-q", *args, "--json").stdout)["merge_write_bytes"] == bytes_of > 0
    assert f"Merges    Every {EVERY} steps: {bytes_of * 1e-9:.4g} GB" in megatrain("-q", *args).stdout
    said = megatrain("run", "--dry-run", out + ".ini").stderr  # two are there at once
    assert re.search(rf"overlays of phases +{2 * bytes_of / 1024:.2f} KiB", said), (bytes_of, said)


def stopped_anywhere(tmp, model, want):
    """After one step at a time, in a folder where a killed merge has left things."""
    out = os.path.join(tmp, "stopped")
    ini, resume = settings(tmp, model, out), ()
    for n in (3, 1, 2, 0) if FULL else (3, 0):
        for name in ("overlay-adapters.tmp", "overlay-1.tmp", "overlay-2.tmp") if resume else ():
            os.makedirs(os.path.join(out, name), exist_ok=True)
        megatrain("-q", "run", ini, *resume, *(("--max-steps", n) if n else ()))
        resume = ("--resume",)
    assert result(out) == want
    assert not glob.glob(out + "/*.tmp"), os.listdir(out)


def killed_in_a_merge(tmp, model, want):
    out = os.path.join(tmp, "killed")
    ini, args = settings(tmp, model, out, checkpoint__every=1), ()
    for what in ("overlay-adapters.tmp", "overlay-1-*", "overlay-2.tmp", None):
        p = subprocess.Popen([BINARY, "-q", "run", ini, *args], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        while p.poll() is None and not (what and glob.glob(os.path.join(out, what))):
            time.sleep(0.0002)
        if what:
            p.kill()
        error = p.communicate()[1]
        args = ("--resume",)
    assert p.returncode == 0, error
    assert result(out) == want


def every_home(tmp, model, want):
    drive = os.path.join(tmp, "drive")
    os.makedirs(drive, exist_ok=True)
    ways = {"disk": dict(memory__base="disk", memory__nvme_paths=drive, memory__unit="half"),
            "slots": dict(memory__slots=2, memory__adapters="streamed", device__cpu_threads=1)}
    for name, keys in ways.items():
        out = os.path.join(tmp, name)
        megatrain("-q", "run", settings(tmp, model, out, **keys))
        assert result(out) == want, name


def goes_on_elsewhere(tmp, model, out, want):
    """From a checkpoint in a moved folder, of a model that was moved."""
    moved, other, elsewhere = (os.path.join(tmp, n) for n in ("moved", "other", "elsewhere"))
    shutil.copytree(out, moved, symlinks=True)
    shutil.copytree(model, elsewhere)
    megatrain("-q", "run", settings(tmp, elsewhere, other), f"--resume={moved}/checkpoint-4", "--force")
    assert exported(other) == want[1]
    megatrain("-q", "export", f"{moved}/checkpoint-{STEPS}", moved + "-export", "--model", elsewhere)
    assert read_safetensors(moved + "-export/model.safetensors") == want[1]


def refusals(tmp, model, out):
    ini = settings(tmp, model, os.path.join(tmp, "refused"))

    def refused(text, *args, of=ini):
        p = megatrain("-q", "run", of, *args, expect=2)
        assert text in p.stderr, p.stderr

    cases = (("adapter.kind=dora", "kind = lora"), ("model.base_dtype=nf4", "base_dtype"), ("model.init=random", "model.init"),
             ("train.blocks=layers", "train.blocks"))
    for key, text in cases if FULL else cases[:2]:
        refused(text, "--set", key, "--force")
    refused("merge_every", "--set", "adapter.merge_every=2", f"--resume={out}/checkpoint-4")
    for key in ("adapter.merge_every=0", "adapter.targets=up_proj") if FULL else ("adapter.targets=up_proj",):
        refused("overlay-1-", "--set", key, f"--resume={out}/checkpoint-4", "--force")
    for folder in out, os.path.join(tmp, "weights"):  # without a state, too
        refused("are of overlay-1-", "--set", f"adapter.path={folder}/checkpoint-4")
        p = megatrain("-q", "eval", ini, "--adapter", f"{folder}/checkpoint-4", expect=2)  # the model's own weights
        assert "are of overlay-1-" in p.stderr, p.stderr
    packed, alone = os.path.join(tmp, "packed"), os.path.join(tmp, "alone")
    megatrain("-q", "export", model, packed, "--quantize", "fp8")
    refused("is fp8 in the model's files", of=settings(tmp, packed, os.path.join(tmp, "refused-packed")))
    if not FULL:
        return
    shutil.copytree(f"{out}/checkpoint-4", f"{alone}/checkpoint-4")
    p = megatrain("-q", "export", f"{alone}/checkpoint-4", alone + "-export", expect=7)
    assert "overlay-1-" in p.stderr and "is not there" in p.stderr, p.stderr


with tempfile.TemporaryDirectory() as tmp:
    data = write_data(os.path.join(tmp, "data.jsonl"))
    model, out = with_weights(tmp, write_model(os.path.join(tmp, "config"), config(num_hidden_layers=2)), data), os.path.join(tmp, "out")
    megatrain("-q", "run", settings(tmp, model, out))
    want = result(out)
    exports_are_whole_models(tmp, model, out)
    weights_alone_keep_what_they_rest_on(tmp, model, out)
    the_rate_rises_again(out)
    the_plan_knows_what_a_merge_writes(out)
    stopped_anywhere(tmp, model, want)
    if FULL:
        killed_in_a_merge(tmp, model, want)
        goes_on_elsewhere(tmp, model, out, want)
        every_home(tmp, model, want)
    refusals(tmp, model, out)
