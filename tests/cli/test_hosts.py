# SPDX-License-Identifier: Apache-2.0
"""Several hosts, started by mpirun, have the bits of one process: here they are processes of one machine."""
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile

import host_faults
from hosts import (LAUNCH, OPEN_MPI, STEPS, compare, compare_with_one, endless, ini_of, inputs, mpirun, ranks_of,
                   run_beside_hidden, run_two, wait_for_steps)
from tiny import (BINARY, FULL, config, flip_in_memory, losses, megatrain, metrics, middle_of, read_safetensors, write_data,
                  write_model)

STATES = {"weights (hi)", "weights (lo)", "first moments", "second moments", "gradients"}


def evaluations(out):
    return [sorted((k, v) for k, v in m.items() if k == "step" or k.startswith("eval_") and k != "eval_s")
            for m in metrics(out) if "eval_loss" in m]


def write_pairs(path):
    with open(path, "w") as f:
        for i in range(60):
            ids = lambda n: [(i * 7 + k * k + n) % 270 for k in range(3 + (i + n) % 9)]
            f.write(json.dumps({"prompt_ids": ids(1), "chosen_ids": ids(2), "rejected_ids": ids(3)}) + "\n")
    return path


def teacher(tmp, model, data):
    """A teacher's likeliest tokens of the data."""
    out = os.path.join(tmp, "teacher")
    made, ini = ini_of(tmp, "made", model, data, train__steps=1, train__seed=7, checkpoint__save="weights")
    megatrain("run", ini)
    _, ini = ini_of(tmp, "asked", os.path.join(made, "checkpoint-1"), data, model__init="weights")
    megatrain("score", ini, "--data", data, "--out", out, "--top", 8)
    return out + ".top"


def hosts_have_the_bits_of_one(tmp):
    model, data = inputs(tmp)
    pairs = write_pairs(os.path.join(tmp, "pairs.jsonl"))
    directions = ["adafactor", "muon", "apollo", "galore"] if FULL else ["muon"] # their states are on the device of one host in a step
    mixture = write_model(os.path.join(tmp, "mixture"), config("qwen3_moe", num_hidden_layers=2, mlp_only_layers=[1]))
    mixtures = write_model(os.path.join(tmp, "mixtures"), config("qwen3_moe", num_hidden_layers=2))
    few, more = (write_data(os.path.join(tmp, f"eval-{n}.jsonl"), n=n, seed=n) for n in (3, 9))
    kinds = {"f32": {"eval__every": 2, "data__eval": more, "eval__sets": f"few:{few}, more:{more}"},
             "bf16": {"model__dtype": "bf16", "memory__activations": "recompute"},
             "frozen": {"model__freeze": "*.k_proj.*, *.layers.1.input_layernorm.*"}, # gaps in what is trained of a unit
             "reference": {"data__train": pairs, "preference__loss": "sigmoid", "eval__every": 2},
             "mixture": {"model__path": mixture, "memory__expert_group": 3, "memory__slots": 2},
             "shared": {"model__share_layers": 2},
             "balanced": {"model__path": mixtures, "train__router_aux_loss": 0.01, "train__steps": 2},
             "teacher": {"train__objective": "distill", "distill__teacher": teacher(tmp, model, data), "distill__top": 5},
             "whole": {"optimizer__type": "muon", "train__grad_clip": 0, "train__steps": 3, "cluster__states": "whole"},
             **{kind: {"optimizer__type": kind, "train__grad_clip": 0, "train__steps": 3} for kind in directions}}
    twice = {"f32", "balanced", "muon"} # the others on three hosts; every night all on two, three and four
    for kind, over in kinds.items() if OPEN_MPI or FULL else [("f32", kinds["f32"]), ("muon", kinds["muon"])]:
        last = f"checkpoint-{over.get('train__steps', STEPS)}"
        one, ini = ini_of(tmp, f"one-{kind}", model, data, **over)
        megatrain("run", ini)
        for n in (2, 3, 4) if FULL else (2, 3) if kind in twice else (3,):
            many, ini = ini_of(tmp, f"{kind}-{n}", model, data, **over)
            mpirun(n, "run", ini)
            assert losses(many) == losses(one), f"{kind}, {n} hosts"
            assert evaluations(many) == evaluations(one), f"{kind}, {n} hosts"
            assert kind != "f32" or "eval_few_loss" in dict(evaluations(one)[0]), evaluations(one)
            compare(os.path.join(one, last), os.path.join(many, last), f"{kind}, {n} hosts")
            with open(os.path.join(many, "run.json")) as f:
                assert json.load(f)["hosts"] == n


def each_host_has_drives_and_files_of_its_own(tmp):
    """States, or a frozen base, on every host's drives; a base that is read in place, and has to be the same everywhere."""
    model, data = inputs(tmp, hidden_size=256, intermediate_size=2304, num_attention_heads=4) # tensors of 1 MiB
    made, ini = ini_of(tmp, "made", model, data, train__steps=1, train__seed=7, checkpoint__save="weights", model__dtype="bf16")
    megatrain("run", ini)
    weights, drive = os.path.join(made, "checkpoint-1"), os.path.join(tmp, "drive")
    os.mkdir(drive)
    disk = {"memory__states": "disk", "memory__nvme_paths": drive, "train__steps": 2}
    frozen = {"model__path": weights, "model__init": "weights", "model__dtype": "bf16", "adapter__kind": "lora", "train__steps": 2}
    short = {**disk, "model__dtype": "bf16", "memory__activations": "disk", "train__batch_size": 16, "memory__device_budget": "24MiB"}
    kinds = {"states": disk, "all": short, "base": {**disk, **frozen, "memory__base": "disk"}, "files": {**frozen, "memory__base": "files"}}
    for kind, over in kinds.items():
        one, ini = ini_of(tmp, f"one-{kind}", model, data, **over)
        p = megatrain("run", ini)
        if kind == "all": # so little beside the program itself that gradients go to drives, too
            over["memory__host_budget"] = f"{float(re.search(r'process +([0-9.]+) MiB', p.stdout + p.stderr)[1]) + 113:.0f}MiB"
        for n in (2, 3) if FULL or kind == "states" else (2,):
            many, ini = ini_of(tmp, f"{kind}-{n}", model, data, **over)
            said = mpirun(n, "run", ini)
            assert kind != "all" or re.search(r"^Disk .* writes .*states .*gradients .*activations", said, re.M), said
            assert losses(many) == losses(one), f"{kind}, {n} hosts"
            compare(os.path.join(one, "checkpoint-2"), os.path.join(many, "checkpoint-2"), f"{kind}, {n} hosts")
    other = shutil.copytree(weights, os.path.join(tmp, "other"))
    file = os.path.join(other, "model.safetensors")
    with open(file, "r+b") as f: # a bit in the middle, where a large matrix is
        at = f.seek(os.path.getsize(file) // 2)
        bits = f.read(1)[0]
        f.seek(at)
        f.write(bytes([bits ^ 1]))
    for mount, say in ((f'--bind "{other}" "{weights}"', "is not that of host 0"), (f'-t tmpfs none "{weights}"', weights)):
        _, ini = ini_of(tmp, say[:2], model, data, **kinds["files"])
        p = run_beside_hidden(ini, mount)
        assert p is None or (p.returncode and "host 1" in p.stderr and say in p.stderr), p


def what_the_first_alone_needs_to_have(tmp):
    """The folder of a reference; adapters to go on from, those of a checkpoint, too, and tensors that it names."""
    model, data = inputs(tmp)
    here = os.path.join(tmp, "here")
    made, ini = ini_of(tmp, "made", model, data, train__steps=1, train__seed=7, checkpoint__save="weights")
    megatrain("run", ini)
    weights = os.path.join(made, "checkpoint-1")
    lora = {"model__path": weights, "model__init": "weights", "adapter__kind": "lora", "train__learning_rate": "1e-2"}
    adapted, ini = ini_of(tmp, "adapted", model, data, train__steps=1, adapter__rank=3, adapter__targets="q_proj, down_proj",
                          adapter__rank_pattern="*.layers.1.*:5", adapter__train_also="model.norm", **lora)
    megatrain("run", ini)
    shutil.copytree(weights, os.path.join(here, "reference"))
    shutil.copytree(os.path.join(adapted, "checkpoint-1"), os.path.join(here, "adapters"))
    cases = {"reference": {"data__train": write_pairs(os.path.join(tmp, "pairs.jsonl")), "preference__loss": "sigmoid",
                           "preference__reference": os.path.join(here, "reference")},
             "adapters": {**lora, "adapter__path": os.path.join(here, "adapters")}}
    for name, over in cases.items():
        one, ini = ini_of(tmp, f"one-{name}", model, data, **over)
        megatrain("run", ini)
        many, ini = ini_of(tmp, f"many-{name}", model, data, **over)
        p = run_beside_hidden(ini, f'-t tmpfs none "{here}"') # a host that does not have it
        if p:
            assert p.returncode == 0, p.stdout + p.stderr
            compare(os.path.join(one, f"checkpoint-{STEPS}"), os.path.join(many, f"checkpoint-{STEPS}"), name)
    shutil.rmtree(here)
    more = {**cases["adapters"], "train__steps": STEPS + 1}
    frozen = {"model__path": weights, "model__init": "weights", "model__freeze": "*.mlp.*, *embed*"}
    _, ini = ini_of(tmp, "frozen", model, data, **{**frozen, "train__steps": 1, "model__freeze": "*.mlp.*"})
    megatrain("run", ini)
    for name, over in {"adapters": more, "frozen": {**frozen, "train__steps": 2}}.items():
        made = os.path.join(tmp, {"adapters": f"one-{name}"}.get(name, name))
        ends = {kind: shutil.copytree(made, os.path.join(tmp, f"{kind}-on-{name}")) for kind in ("one", "many")}
        for kind, out in ends.items():
            _, ini = ini_of(tmp, os.path.basename(out), model, data, **over)
            (megatrain if kind == "one" else lambda *a: mpirun(2, *a))("run", ini, "--resume", "--force")
        last = f"checkpoint-{over['train__steps']}"
        compare(os.path.join(ends["one"], last), os.path.join(ends["many"], last), f"{name} resumed")


def phases_have_the_bits_of_one(tmp):
    """What ends a phase is in files of the first host alone; other hosts begin the next with what it sends."""
    model, data = inputs(tmp)
    made, ini = ini_of(tmp, "made", model, data, train__steps=1, train__seed=7, checkpoint__save="weights", model__dtype="bf16")
    megatrain("run", ini)
    init = {"model__path": os.path.join(made, "checkpoint-1"), "model__init": "weights", "model__dtype": "bf16", "checkpoint__every": 1}
    drive, packed = os.path.join(tmp, "drive"), os.path.join(tmp, "packed") # of which a block is in bf16 once it was trained
    os.mkdir(drive)
    megatrain("export", init["model__path"], packed, "--quantize", "fp8")
    cases = {"blocks": {**init, "model__path": packed, "train__blocks": "layers", "train__block_steps": 1, "memory__base": "disk",
                        "memory__nvme_paths": drive},
             "merges": {**init, "adapter__kind": "lora", "adapter__merge_every": 2, "train__learning_rate": "1e-2"},
             "delinked": {"model__share_layers": 3, "train__delink_at": 2, "memory__states": "disk", "memory__nvme_paths": drive}}
    for name, over in cases.items():
        one, ini = ini_of(tmp, f"one-{name}", model, data, **over)
        megatrain("run", ini)
        many, ini = ini_of(tmp, name, model, data, **over)
        mpirun(3, "run", ini, "--max-steps=3")
        mpirun(2, "run", ini, "--resume")
        assert losses(many) == losses(one), name
        compare(os.path.join(one, f"checkpoint-{STEPS}"), os.path.join(many, f"checkpoint-{STEPS}"), name)
        assert {d for d in os.listdir(many) if d.startswith("overlay")} == {d for d in os.listdir(one) if d.startswith("overlay")}, name


def they_go_on_with_other_numbers(tmp):
    model, data = inputs(tmp, tie_word_embeddings=True)
    over = {"train__steps": 6, "train__groups": 8, "train__batch_size": 8}
    one, ini = ini_of(tmp, "one", model, data, **over)
    megatrain("run", ini)
    many, ini = ini_of(tmp, "many", model, data, **over)
    mpirun(4, "run", ini, "--max-steps=2") # each deals units, whose states are on one host, anew
    megatrain("run", ini, "--resume", "--max-steps=2")
    mpirun(3, "run", ini, "--resume")
    assert losses(many) == losses(one)
    compare(os.path.join(one, "checkpoint-6"), os.path.join(many, "checkpoint-6"), "4, 1, then 3 hosts")
    assert "same build, configuration" not in mpirun(2, "run", ini, "--resume"), "nothing is left to do"
    if FULL: # as many as there can be, of 16 devices
        over = {"train__groups": 16, "train__batch_size": 20, "train__steps": 2}
        one, ini = ini_of(tmp, "one-16", model, data, **over)
        megatrain("run", ini)
        for n, gpus in (4, 1), (8, 1), (16, 1), (3, 5):
            many, ini = ini_of(tmp, f"many-{n}", model, data, **over, device__gpus=gpus)
            mpirun(n, "run", ini)
            compare(os.path.join(one, "checkpoint-2"), os.path.join(many, "checkpoint-2"), f"{n} hosts of {gpus} devices")


def hosts_with_more_memory_own_more(tmp):
    """Where equal parts are too much for one, by what is named or found; the result has the same bits."""
    model = write_model(os.path.join(tmp, "model"), config("qwen2", num_hidden_layers=6, hidden_size=128, intermediate_size=512))
    data = write_data(os.path.join(tmp, "data.jsonl"))
    over = {"train__steps": 2, "memory__device_budget": "24MiB"}
    one, ini = ini_of(tmp, "one", model, data, **over)
    megatrain("run", ini)
    _, ini = ini_of(tmp, "asked", model, data, **over)
    size = lambda name, text: float(re.search(rf"^ *{name} +([0-9.]+) MiB", text, re.M)[1])
    owns = lambda text: [int(n) for n in re.findall(r"^ +host \d may use .* owns (\d+) of 8 parts", text, re.M)]

    def check(name, run, n, **more):
        out, ini = ini_of(tmp, name, model, data, **over, **more)
        said = run(n, ini)
        compare(os.path.join(one, "checkpoint-2"), os.path.join(out, "checkpoint-2"), f"{name}: {said}")
        return owns(said)
    for n, large in (3, 1), (2, 0):
        said = mpirun(n, "run", "--dry-run", ini)
        needs, states = size("memory.host_budget", said), 3 * size("first moments", said)
        few = [f"{needs - 0.4 * states:.2f}MiB"] * n
        said = mpirun(n, "run", "--dry-run", ini, "--set", f"cluster.memory={', '.join(few)}", expect=4)
        assert "it will not fit" in said, said
        few[large] = f"{needs + 2 * states:.2f}MiB"
        parts = check(f"named-{n}", lambda n, ini: mpirun(n, "run", ini), n, cluster__memory=", ".join(few))
        assert len(parts) == n and sum(parts) == 8 and parts[large] >= 8 / n + 1, (n, parts)
    assert mpirun(2, "run", "--dry-run", ini, "--set", "cluster.memory=1GiB", expect=2).count("names the memory of 1 hosts, and there are 2")
    small = ["env", f"MEGATRAIN_RESIDENT={64 << 20}", "prlimit", f"--as={3 << 30}"] # of another size than the first, too
    has = 1024 * float(re.search(r"host 1 may use ([0-9.]+) GiB", run_two(ini, second=small).stderr)[1]) # 90%

    def found(n, ini):
        p = run_two(ini, second=small)
        assert p.returncode == 0, p.stderr
        return p.stderr
    parts = check("found", found, 2, memory__host_budget=f"{90 * (needs - states / 2) / has:.3f}%")
    assert len(parts) == 2 and sum(parts) == 8 and parts[0] > parts[1], parts


def hosts_with_larger_drives_own_more(tmp):
    """Where equal parts of the states are too much for what is free, or named, of one's drives. One without drives owns what stays in memory."""
    model = write_model(os.path.join(tmp, "model"), config("qwen2", num_hidden_layers=6, hidden_size=128, intermediate_size=512))
    data = write_data(os.path.join(tmp, "data.jsonl"))
    drive = os.path.join(tmp, "drive")
    os.mkdir(drive)
    os.environ["MEGATRAIN_DISK_PIECE"] = "2048"
    over = {"train__steps": 1, "memory__device_budget": "24MiB", "model__dtype": "bf16", "memory__nvme_paths": drive}
    one, ini = ini_of(tmp, "one", model, data, **over)
    megatrain("run", ini)
    _, ini = ini_of(tmp, "asked", model, data, **over)
    said = mpirun(2, "run", "--dry-run", ini)
    needs, states = (float(re.search(rf"^ *{name} +([0-9.]+) MiB", said, re.M)[1]) for name in ("memory.host_budget", "first moments"))
    disk = {"memory__states": "disk"} # their 10 bytes a parameter are 2.5 times the first moments
    few = {"memory__host_budget": f"{needs - 1.2 * states:.2f}MiB", "cluster__drives": "1GiB, 0GiB"}
    cases = {"found": (2, disk, range(1, 4)), "none": (2, few, range(1, 4))}
    if FULL:
        cases.update({"named": (3, {**disk, "cluster__drives": f"1GiB, {states:.2f}MiB, 1GiB"}, range(1, 3)),
                      "no-states": (3, {**disk, "cluster__drives": "1GiB, 0GiB, 1GiB"}, range(1))})
    for name, (n, more, owned) in cases.items():
        out, ini = ini_of(tmp, name, model, data, **over, **more)
        p = run_beside_hidden(ini, f'-t tmpfs -o size={states:.0f}m none "{drive}"') if name == "found" else None
        said = p.stderr if p else mpirun(n, "run", ini)
        parts = [int(n) for n in re.findall(r"^ +host \d may use .* of drives .* owns (\d+) of 8 parts", said, re.M)]
        compare(os.path.join(one, "checkpoint-1"), os.path.join(out, "checkpoint-1"), f"{name}: {said}")
        assert (name == "found" and not p) or (len(parts) == n and sum(parts) == 8 and parts[1] in owned), (parts, said)
    _, ini = ini_of(tmp, "short", model, data, **over, **disk, cluster__drives=f"{2 * states:.2f}MiB, {2 * states:.2f}MiB")
    said = mpirun(2, "run", "--dry-run", ini, expect=4)
    assert "cluster.drives allows" in said, said


def a_host_that_differs_is_refused_or_found(tmp):
    """In what bits depend on, before the first step; in weights that have changed in its memory, at the next save."""
    model, data = inputs(tmp)
    out, ini = ini_of(tmp, "differs", model, data)
    other = write_model(os.path.join(tmp, "other"), config("qwen2", num_hidden_layers=3, rms_norm_eps=1e-3))
    p = run_beside_hidden(ini, f'--bind "{other}" "{model}"')
    assert p is None or (p.returncode == 2 and "host 1: in its config.json of the model rms_norm_eps is 0.001, host 0's 1e-06" in p.stderr), p
    config_of_no_matter = write_model(os.path.join(tmp, "same"), config("qwen2", num_hidden_layers=3, transformers_version="9.9"))
    p = run_beside_hidden(ini, f'--bind "{config_of_no_matter}" "{model}"')
    assert p is None or p.returncode == 0, p
    for dtype in ("f32", "bf16"):
        out, ini = ini_of(tmp, "path", model, data, model__dtype=dtype)
        p = run_two(ini, second=["env", "MEGATRAIN_CPU_GEMM=plain"])
        assert p.returncode == 2 and 'host 1: what its CPU computes products by is "plain C", host 0\'s' in p.stderr, p.stderr
        assert not os.path.exists(os.path.join(out, "checkpoint-4"))
    version = megatrain("--version").stdout.split()[-1].encode()
    older = another_build(tmp, "older", lambda program: program.replace(version + b"\0", version[:-1] + b"~\0"))
    out, ini = ini_of(tmp, "version", model, data)
    p = run_two(ini, program=older)
    assert p.returncode == 2 and f'host 1: its version of megatrain is "{version.decode()[:-1]}~"' in p.stderr, p.stderr
    assert not os.path.exists(os.path.join(out, "checkpoint-4"))
    out, ini = ini_of(tmp, "made", model, data, train__steps=1, model__dtype="bf16", train__warmup=0)
    megatrain("run", ini)
    weights, name = os.path.join(out, "checkpoint-1"), "model.layers.1.mlp.up_proj.weight"
    megatrain("export", weights, weights + "-f32", "--dtype", "f32")
    wide = read_safetensors(os.path.join(weights + "-f32", "model.safetensors"))[name][2]
    low = b"".join(wide[i:i + 2] for i in range(len(wide) // 2, len(wide) // 2 + 512, 4)) # of masters, below bf16
    for kind, folder, what in (("high", weights, middle_of(weights, name)), ("low", weights + "-f32", low)):
        still = {"model__path": folder, "model__init": "weights", "train__learning_rate": 0, "model__dtype": "bf16",
                 "cluster__states": "whole"} # else their owner sends such weights in each step
        out, ini = endless(tmp, f"drifts-{kind}", model, data, **still)
        p = mpirun(3, "run", ini, wait=False)
        wait_for_steps(out, 2, p)
        flip_in_memory(ranks_of(p)[1], what, random.Random(1))
        wait_for_steps(out, len(metrics(out)) + 2, p)
        open(os.path.join(out, "SAVE"), "w").close()
        text, _ = p.communicate(timeout=60)
        assert p.returncode and "host 1 has other weights than host 0 in the unit that begins with model.layers.1." in text, text
        assert not [d for d in os.listdir(out) if d.startswith("checkpoint")], os.listdir(out)


def what_only_one_host_can_do_is_refused(tmp):
    model, data = inputs(tmp)
    cases = {"set train.groups": {"train__groups": 2},
             "update = backward is of one host: it updates a layer as soon as": {"memory__update": "backward",
                                                                               "train__grad_clip": 0}}
    if FULL:
        cases["memory.base = files with train.blocks or"] = {"memory__base": "files", "train__blocks": "layers", "model__init": "weights"}
        cases["device.map = units"] = {"device__map": "units"}
    for say, over in cases.items():
        out, ini = ini_of(tmp, "refused", model, data, **over)
        text = mpirun(3, "run", "--dry-run", ini, expect=2)
        assert say in text, (say, text)
    other, few = (write_data(os.path.join(tmp, f"other-{n}.jsonl"), n=n, seed=2) for n in (40, 5))
    out, ini = ini_of(tmp, "data", model, data, data__eval=data, eval__sets=f"few:{few}")
    for mine in data, few:
        p = run_beside_hidden(ini, f'--bind "{other}" "{mine}"') # a host whose file has other data
        if p:
            assert p.returncode == 2 and "host 1: its data are not those of host 0" in p.stdout + p.stderr, p


def plans_know_what_crosses(tmp):
    plan = ["plan", "--json", "--model", "Qwen3-8B", "--machine", "rtx4090", "--host-mem", "256GiB", "--set", "train.steps=10",
            "--tokens-per-step", "65536", "--set", "memory.embedding=device"]
    fast, slow, four = (json.loads(megatrain(*plan, "--set", "train.groups=4", "--hosts", n, "--net", net).stdout)
                        for n, net in ((2, "100Gb/s"), (2, "5Gb/s"), (4, "5Gb/s")))
    for p in (fast, slow, four):
        crosses, = (r["bytes"] for r in p["resources"] if r["resource"] == "network")
        each = crosses / p["trained_parameters"] # of two hosts: sums in FP32 one way, and the gradient in bf16
        assert abs(each - 6) < 0.01 if p["hosts"] == 2 else each > 8, each
        assert abs(p["efficiency"] * p["hosts"] * p["step_seconds"] / p["step_seconds_of_one_host"] - 1) < 1e-6
        states = sum(r["bytes"] for r in p["memory"] if r["tier"] == "host" and r["use"] in STATES)
        assert abs(states / p["trained_parameters"] / (2 + 12 / p["hosts"]) - 1) < 0.05, (p["hosts"], states)
    uneven = [*plan[:7], "60GiB", *plan[8:], "--set", "train.groups=4", "--hosts", 2, "--set"]
    owners = json.loads(megatrain(*uneven, "cluster.memory=48GiB, 104GiB").stdout)["owners"]
    assert all(0 < o["host_bytes"] <= o["host_budget"] for o in owners), owners
    assert 0.1 < owners[0]["share"] < 0.3 and abs(sum(o["share"] for o in owners) - 1) < 1e-6, owners
    small = ["plan", "--json", "--model", "Qwen3-0.6B", "--machine", "rtx4090", "--host-mem", "5GiB", "--nvme", "7GB/s", "--drives", 2,
             "--hosts", 2]
    for key in "train.steps=10", "train.groups=2", "memory.embedding=device", "cluster.drives=1TB, 1GB":
        small += ["--set", key]
    owners = json.loads(megatrain(*small, "--tokens-per-step", "8192").stdout)["owners"]
    assert owners[1]["share"] < 0.3 and 0 < owners[1]["disk_bytes"] <= 1e9 < owners[0]["disk_bytes"], owners
    assert "refused: 2 hosts take" in megatrain("plan", *small[2:], "--tokens-per-step", "8192", "--net", "1Gb/s", expect=4).stderr
    for p in (fast, slow, four):
        assert ("refused" in p) == (p["efficiency"] * p["hosts"] < 1), p
    assert "refused" in four and "refused" not in fast, (fast, four)
    assert 1 > fast["efficiency"] > 0.7 > slow["efficiency"] > four["efficiency"] > 0, (fast, slow, four)
    for args, say in ((("--hosts", 3), "set train.groups to a power of two, at least 3"), (("--net", "5Gb/s"), "give --hosts"),
                      (("--hosts", 2, "--net", "5"), "no rate")):
        assert say in megatrain(*plan, *args, expect=2).stderr, say


# Runs a program, and writes what the kernel has counted of it: most memory, and what it has written to drives.
COUNT = """import json, os, resource, subprocess, sys
code = subprocess.run(sys.argv[2:]).returncode
written = dict(line.split(": ") for line in open("/proc/self/io").read().splitlines())["write_bytes"]
with open(f"{sys.argv[1]}-{os.environ.get('OMPI_COMM_WORLD_RANK', os.environ.get('PMI_RANK', '0'))}", "w") as f:
    json.dump([resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10, int(written)], f)
sys.exit(code)"""


def a_host_has_and_writes_its_part(tmp):
    """By the kernel's counters of each process: 2 + 12 / hosts bytes of memory a parameter; each step 10 / hosts to drives, masters'
    lower halves and moments."""
    data, drive = write_data(os.path.join(tmp, "data.jsonl")), os.path.join(tmp, "drive")
    os.mkdir(drive)
    over = {"train__batch_size": 4, "model__dtype": "bf16", "memory__slots": 2, "memory__activations": "recompute", "checkpoint__every": 0,
            "memory__device_budget": "32MiB", "memory__host_budget": "2GiB"}

    def count(n, layers, steps, **more):
        """[memory, written] of each host, and parameters."""
        name, more = f"{n}-{layers}-{steps}-{len(more)}", {**more, "train__groups": n} # of which each host has one
        model = write_model(os.path.join(tmp, f"model-{layers}"), config("qwen2", num_hidden_layers=layers, hidden_size=128,
                                                                        intermediate_size=2048))
        out, ini = ini_of(tmp, name, model, data, **{**over, "train__steps": steps, **more})
        subprocess.run([*LAUNCH, "-n", str(n), sys.executable, "-c", COUNT, out, BINARY, "-q", "run", ini, "--no-save"], check=True)
        plan = json.loads(megatrain("plan", ini, "--json").stdout)
        return [json.load(open(f"{out}-{i}")) for i in range(n)], plan["trained_parameters"]
    for n in 1, 2, 4:
        (few, a), (many, b) = count(n, 20, 1), count(n, 40, 1) # so many that more need no more homes for sums
        each = [(y[0] - x[0]) / (b - a) for x, y in zip(few, many)]
        print(n, "hosts: bytes of memory a parameter", *(f"{e:.3f}" for e in each))
        assert all(abs(e / (2 + 12 / n) - 1) < 0.05 for e in each), (n, each)
        disk = {"memory__states": "disk", "memory__nvme_paths": drive}
        (one, a), (three, _) = count(n, 20, 1, **disk), count(n, 20, 3, **disk)
        each = [(y[1] - x[1]) / 2 / a for x, y in zip(one, three)]
        print(n, "hosts: bytes written a parameter and step", *(f"{e:.3f}" for e in each))
        assert all(abs(e / (10 / n) - 1) < 0.05 for e in each), (n, each)


def another_build(tmp, name, change):
    """The program with other bytes; its modules are beside it."""
    near = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(BINARY))), "src")
    os.makedirs(os.path.join(tmp, name, "cli"))
    os.symlink(near, os.path.join(tmp, name, "src"))
    path = shutil.copy(BINARY, os.path.join(tmp, name, "cli", "megatrain"))
    with open(path, "rb") as f:
        program = change(f.read())
    with open(path, "wb") as f:
        f.write(program)
    return path


def hosts_can_be_looked_at(tmp):
    env = {"XDG_CACHE_HOME": os.path.join(tmp, "cache")}
    seen = json.loads(mpirun(2, "doctor", "--json", env=env))
    assert len(seen["hosts"]) == 2 and seen["hosts"][0] == {**seen["hosts"][1], "memory available":
                                                            seen["hosts"][0]["memory available"]}, seen
    assert any("hosts 0 and 1 are one machine" in f for f in seen["findings"]), seen
    assert not any("build" in f or "device" in f for f in seen["findings"]), seen
    other = another_build(tmp, "b", lambda program: program + b"x")
    p = subprocess.run([*LAUNCH, "-n", "1", BINARY, "doctor", ":", "-n", "1", other, "doctor"], text=True, capture_output=True)
    assert p.returncode == 0 and "host 1 has another build" in p.stdout, p
    lone = shutil.copy(BINARY, os.path.join(tmp, "lone")) # without a module beside it, as a build without MPI
    said = json.loads(subprocess.run([lone, "doctor", "--json"], text=True, capture_output=True, check=True,
                                     env={**os.environ, "OMPI_COMM_WORLD_SIZE": "2"}).stdout)
    assert "this build has no MPI" in said["hosts"] and said["cores allowed"], said
    said = mpirun(2, "probe", "net", env=env)
    assert re.search(r"^GB/s each way, all hosts at once +[0-9.]+$", said, re.M) and not re.search(r"\.\d{5}", said), said
    found = json.loads(mpirun(3, "probe", "net", "--json", env=env))
    assert len(found["findings"]) == 2 and "hosts 0 and 2 are one machine" in found["findings"][1], found
    rate = found["GB/s each way, all hosts at once"]
    assert len(found["pairs"]) == 3 and rate > 0.001 and found["us of the slowest pair"] > 0, found
    assert "start it by a launcher" in megatrain("probe", "net", expect=2).stderr
    plan = ["plan", "--json", "--model", "Qwen3-0.6B", "--machine", "rtx4090", "--hosts", 2, "--set", "train.groups=2", "--set",
            "train.steps=2", "--tokens-per-step", "8192"]
    plans = [json.loads(megatrain(*plan, *more, env=env).stdout)
             for more in ((), ("--net", f"{rate}GB/s"), ("--net", f"{rate * 3}GB/s"))]
    of = [p["step_seconds"] for p in plans]
    assert [p["network"] for p in plans] == ["measured by probe net", "--net", "--net"], plans
    assert abs(of[0] / of[1] - 1) < 0.1 and of[2] < of[1] * 0.9, of # as measured, but for the latency


def a_run_can_be_stopped_from_elsewhere(tmp):
    model, data = inputs(tmp)
    for n in (1, 2):
        out, ini = endless(tmp, f"stopped-{n}", model, data)
        assert "no run of this machine" in megatrain("stop", out, expect=2).stderr
        p = mpirun(n, "run", ini, wait=False)
        wait_for_steps(out, 2, p)
        said = megatrain("stop", out).stdout
        text, _ = p.communicate()
        assert p.returncode and "continue with --resume" in text, text
        steps = compare_with_one(tmp, model, data, out)
        assert f"the run has stopped; newest checkpoint: checkpoint-{steps};" in said, said
        assert (n > 1) == ("use megatrain stop" in text) or not OPEN_MPI, text


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as tmp:
        # Launchers that begin and end at once make and remove one folder below /tmp: each has its own.
        os.environ["OMPI_MCA_orte_tmpdir_base"] = tmp
        {**vars(host_faults), **globals()}[sys.argv[1]](tmp)
