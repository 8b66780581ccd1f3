# SPDX-License-Identifier: Apache-2.0
"""Runs as users have them: killed, stopped, resumed, skipped steps, frozen tensors, lengthened, locked."""
import csv
import json
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time

from tiny import (BINARY, FULL, base, chosen, config, drawn, losses, megatrain, metrics, planes, read_safetensors, read_until, write_data,
                  write_ini, write_model)

PIECES = {"MEGATRAIN_DISK_PIECE": "2048"}


def start(*args, env=None):
    return subprocess.Popen([BINARY, *map(str, args)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env={**os.environ, **(env or {})})


def on_disk(tmp):
    drive = os.path.join(tmp, "drive")
    os.makedirs(drive, exist_ok=True)
    return {"memory__states": "disk", "memory__nvme_paths": drive, "memory__device_budget": "8MiB"}


def killed(name, env, over, kills_wanted, tmp, model, data):
    def ini(tag, **more):
        out = os.path.join(tmp, f"{name}-{tag}")
        return out, write_ini(out + ".ini", base(model, data, out, train__steps=12, checkpoint__every=1, checkpoint__keep=2, **more))
    want_out, want = ini("want")
    t0 = time.time()
    megatrain("-q", "run", want)
    took = time.time() - t0
    out, path = ini("kill", **over)
    rng = random.Random(3)
    kills = 0
    for _ in range(10 * kills_wanted):
        p = start("-q", "run", path, "--resume", env=env)
        time.sleep(rng.random() * took * 0.6)
        p.kill()
        p.communicate()
        kills += p.returncode == -signal.SIGKILL
        for n in os.listdir(out) if os.path.isdir(out) else []:
            if n.startswith("checkpoint-") and not n.endswith(".tmp") and FULL:
                megatrain("verify", os.path.join(out, n))
        if os.path.isdir(os.path.join(out, "checkpoint-12")):
            if kills >= kills_wanted or not FULL:
                break
            check_killed(out, want_out)
            shutil.rmtree(out)
    # A run that is killed before it has read its checkpoint back leaves one more: the last run, which has a step to
    # make, removes them.
    shutil.rmtree(os.path.join(out, "checkpoint-12"), ignore_errors=True)
    megatrain("-q", "run", path, "--resume", env=env)
    check_killed(out, want_out)
    assert kills > 0
    left = [n for n in os.listdir(out) if n.startswith("checkpoint-") and not n.endswith(".tmp")]
    assert len(left) <= 2, left
    return kills


def check_killed(out, want_out):
    assert losses(out) == losses(want_out), "losses differ after kills"
    assert planes(out + "/checkpoint-12") == planes(want_out + "/checkpoint-12"), "planes differ after kills"


def killed_at_random_moments_resumes_to_the_same_bits(tmp, model, data):
    kills = killed("host", {}, {}, 150 if FULL else 8, tmp, model, data)
    kills += killed("disk", PIECES, on_disk(tmp), 150 if FULL else 8, tmp, model, data)
    # scratch that kills left goes with the next run that uses the drive
    megatrain("-q", "run", write_ini(os.path.join(tmp, "sweeps.ini"), base(
        model, data, os.path.join(tmp, "sweeps"), train__steps=1, **on_disk(tmp))))
    left = os.listdir(os.path.join(tmp, "drive"))
    assert not left, f"scratch of killed runs is left: {left}"
    assert not FULL or kills >= 300, kills


def signals_save_the_last_applied_update(tmp, model, data):
    for signo, code, env, over in ((signal.SIGINT, 130, {}, {}), (signal.SIGTERM, 143, {}, {}),
                                   (signal.SIGTERM, 143, PIECES, on_disk(tmp))):
        tag = f"{code}-{len(over)}"
        out = os.path.join(tmp, f"signal-{tag}")
        ini = write_ini(out + ".ini", base(model, data, out, train__steps=500, **over))
        p = start("run", ini, env=env)
        read_until(p, "step 3/")
        p.send_signal(signo)
        _, err = p.communicate()
        assert p.returncode == code and "stopped; continue with --resume" in err, (p.returncode, err)
        done = [n for n in os.listdir(out) if n.startswith("checkpoint-")]
        assert len(done) == 1, done
        step = int(done[0].split("-")[1])
        assert step >= 3
        megatrain("-q", "run", ini, "--resume", "--max-steps", 2)
        assert [s for s, _, _ in losses(out)] == list(range(1, step + 3))
        whole = os.path.join(tmp, f"whole-{tag}")
        ini2 = write_ini(whole + ".ini", base(model, data, whole, train__steps=500))
        megatrain("-q", "run", ini2, "--max-steps", step + 2)
        assert losses(out) == losses(whole)
        assert planes(f"{out}/checkpoint-{step + 2}") == planes(f"{whole}/checkpoint-{step + 2}")


def what_is_said_is_true_of_the_command(tmp, model, data):
    """What a stopped run can go on from, and a learning rate that was chosen: by commands that have one."""
    out = os.path.join(tmp, "said")
    ini = write_ini(out + ".ini", base(model, data, out, train__steps=500, train__learning_rate="auto"))
    p = start("run", ini, "--no-save")
    began = ""
    while "step 3/" not in began:
        began += p.stderr.readline()
    p.send_signal(signal.SIGINT)
    assert "stopped; there is no checkpoint to go on from (--no-save)" in p.communicate(timeout=60)[1]
    says = {"run": began, **{c: megatrain(*c.split(), ini, expect=None).stderr for c in ("check", "eval", "data stats")}}
    assert {c: "train.learning_rate is 1e-05: auto" in said for c, said in says.items()} == {"run": True, "check": True, "eval": False,
                                                                                           "data stats": False}, says


def usr1_saves_and_goes_on(tmp, model, data):
    out = os.path.join(tmp, "usr1")
    ini = write_ini(out + ".ini", base(model, data, out, train__steps=60))
    p = start("run", ini)
    read_until(p, "step 2/")
    p.send_signal(signal.SIGUSR1)
    p.communicate()
    assert p.returncode == 0
    assert len([n for n in os.listdir(out) if n.startswith("checkpoint-")]) == 2


def usr2_tells_the_status(tmp, model, data):
    out = os.path.join(tmp, "usr2")
    ini = write_ini(out + ".ini", base(model, data, out, train__steps=100000))
    p = start("run", ini)
    read_until(p, "step 2/")
    p.send_signal(signal.SIGUSR2)
    while not (line := p.stderr.readline()).startswith("status: "):
        assert line
    assert "training for" in line and "steps done" in line, line
    p.kill()
    p.communicate()


def a_command_gets_every_record_and_holds_nothing_up(tmp, model, data):
    def run(name, command, steps=6, **over):
        out = os.path.join(tmp, "exec-" + name)
        ini = write_ini(out + ".ini", base(model, data, out, train__steps=steps, eval__every=3, log__exec=command, **over))
        t0 = time.time()
        said = megatrain("run", ini).stderr
        return out, said, time.time() - t0
    got = os.path.join(tmp, "got.jsonl")
    out, said, _ = run("all", f"cat > {got}; echo at the end")
    assert open(got).read() == open(os.path.join(out, "metrics.jsonl")).read() and "at the end" in said, said
    run("alone", f"cat > {got}", log__jsonl="off")
    assert [m["step"] for m in map(json.loads, open(got)) if "loss" in m] == [1, 2, 3, 4, 5, 6]
    for name, command, words in (("early", "head -n 1 > /dev/null; exit 3", "exit code 3"), ("none", "/nowhere/command", "exit code 127")):
        out, said, _ = run(name, command)
        assert words in said and len(losses(out)) == 6, said


def csv_and_tensorboard_hold_what_jsonl_holds(tmp, model, data):
    out = os.path.join(tmp, "logs")
    ini = write_ini(out + ".ini", base(model, data, out, train__steps=6, log__csv="on", log__tensorboard="on",
                                       data__eval="4", eval__every=3))
    megatrain("-q", "run", ini, "--max-steps", 3)
    megatrain("-q", "run", ini, "--resume", "--max-steps", 1)
    shutil.rmtree(f"{out}/checkpoint-4")
    megatrain("-q", "run", ini, "--resume")  # from step 3: rows of step 4 are written anew
    want = metrics(out)
    with open(f"{out}/metrics.csv") as f:
        rows = list(csv.DictReader(f))
    assert len(rows) == len(want)
    for row, record in zip(rows, want):
        for k, v in record.items():
            assert float(row[k]) == float(v), (k, row[k], v)
    scalars = {}
    for name in sorted(os.listdir(f"{out}/tensorboard"), key=lambda n: os.stat(f"{out}/tensorboard/{n}").st_mtime_ns):
        for step, purge, values in events(f"{out}/tensorboard/{name}"):
            if purge:
                scalars = {k: v for k, v in scalars.items() if k[0] < step}
            scalars.update({(step, tag): v for tag, v in values.items()})
    for record in want:
        for k, v in record.items():
            if k != "step" and not isinstance(v, bool):
                assert scalars.pop((record["step"], k)) == struct.unpack("f", struct.pack("f", v))[0], (record, k)
    assert not scalars, scalars


def crc32c(data):
    c = 0xffffffff
    for b in data:
        c ^= b
        for _ in range(8):
            c = c >> 1 ^ (0x82f63b78 if c & 1 else 0)
    c ^= 0xffffffff
    return ((c >> 15 | c << 17) + 0xa282ead8) & 0xffffffff


def fields(message):
    """(number, value) of a protobuf message's fields."""
    at = 0

    def varint():
        nonlocal at
        v = shift = 0
        while True:
            b = message[at]
            at += 1
            v |= (b & 127) << shift
            shift += 7
            if b < 128:
                return v

    while at < len(message):
        tag = varint()
        kind = tag & 7
        if kind == 0:
            yield tag >> 3, varint()
            continue
        n = {1: 8, 5: 4}.get(kind) or varint()
        yield tag >> 3, message[at:at + n]
        at += n


def events(path):
    """(step, whether it voids what older files say from it on, scalars) of a TensorBoard file."""
    with open(path, "rb") as f:
        blob = f.read()
    while blob:
        n, head_crc = struct.unpack("<QI", blob[:12])
        body, crc = blob[12:12 + n], struct.unpack("<I", blob[12 + n:16 + n])[0]
        assert head_crc == crc32c(blob[:8]) and crc == crc32c(body)
        blob = blob[16 + n:]
        event = dict(fields(body))
        values = {}
        for _, value in fields(event.get(5, b"")):
            value = dict(fields(value))
            values[value[1].decode()] = struct.unpack("<f", value[2])[0]
        yield event[2], 7 in event, values


def a_time_limit_asks_to_be_requeued(tmp, model, data):
    out = os.path.join(tmp, "limit")
    ini = write_ini(out + ".ini", base(model, data, out, train__steps=100000, checkpoint__time_limit="1s"))
    megatrain("-q", "run", ini, expect=75)
    assert os.path.islink(os.path.join(out, "latest"))
    megatrain("verify", os.path.join(out, "latest"))


def state_of(checkpoint):
    with open(os.path.join(checkpoint, "megatrain", "state.json")) as f:
        state = json.load(f)
    with open(os.path.join(checkpoint, "trainer_state.json")) as f:
        log = json.load(f)
    return {k: state.get(k) for k in ("best_loss", "best_step", "bad_evals", "best_saved_step", "eval_step")}, log["best_metric"], [
        (r["step"], r["eval_loss"]) for r in log["log_history"] if "eval_loss" in r]


def what_an_evaluation_did_not_come_to_say_is_said_by_the_next_run(tmp, model, data):
    """The last save comes before the last evaluation, which is added to it; killed or stopped within an evaluation, it is made again."""
    many = write_data(os.path.join(tmp, "owed.jsonl"), n=4000, seed=3)
    keys = dict(data__eval=many, eval__max_samples=4000, train__steps=6, eval__every=4, checkpoint__keep=1, eval__early_stop_patience=3)
    paths = {name: os.path.join(tmp, "owed-" + name) for name in ("want", "killed", "stopped")}
    inis = {name: write_ini(out + ".ini", base(model, data, out, **keys)) for name, out in paths.items()}
    megatrain("-q", "run", inis["want"])
    want = state_of(paths["want"] + "/checkpoint-6")
    assert [s for s, _ in want[2]] == [4, 6] and want[0]["eval_step"] == 6 and want[1] is not None, want
    p = start("run", inis["killed"])
    while not os.path.isdir(paths["killed"] + "/checkpoint-6"):
        assert p.poll() is None
        time.sleep(0.01)
    p.kill()
    p.communicate()
    half = state_of(paths["killed"] + "/checkpoint-6")
    assert [s for s, _ in half[2]] == [4], half
    p = start("run", inis["stopped"])
    while "step 4/" not in p.stderr.readline():
        pass
    p.send_signal(signal.SIGTERM)
    p.communicate(timeout=60)
    assert p.returncode == 143 and not state_of(paths["stopped"] + "/checkpoint-4")[2]
    for name in ("killed", "stopped"):
        out = paths[name]
        megatrain("-q", "run", inis[name], "--resume")
        assert state_of(out + "/checkpoint-6") == want, (name, state_of(out + "/checkpoint-6"), want)
        assert [m["step"] for m in metrics(out) if "eval_loss" in m] == [4, 6]
        megatrain("verify", out + "/checkpoint-6")
        assert os.readlink(out + "/best") == os.readlink(paths["want"] + "/best")
    again = megatrain("run", inis["killed"], "--resume").stderr
    assert "eval step" not in again and state_of(paths["killed"] + "/checkpoint-6") == want, again


def best_of(out):
    """What is said to be the best checkpoint: by the link, and by the newest one's trainer_state.json."""
    link = os.path.join(out, "best")
    with open(os.path.join(out, "latest", "trainer_state.json")) as f:
        named = json.load(f)
    assert os.path.isdir(link) == bool(named["best_model_checkpoint"]) and os.path.islink(link) == os.path.isdir(link)
    if os.path.islink(link):
        assert os.readlink(link) == named["best_model_checkpoint"]
    return named["best_model_checkpoint"], named["best_metric"]


def the_best_model_is_saved_kept_and_named(tmp, model, data):
    out, few = os.path.join(tmp, "best"), write_data(os.path.join(tmp, "few.jsonl"), n=4, seed=5)
    keys = {"data__eval": data, "eval__every": 2, "eval__at_start": "on", "train__learning_rate": "3e-3", "train__schedule": "constant",
            "train__steps": 24, "checkpoint__every": 5, "checkpoint__keep": 1}  # four samples are learned by heart
    ini = lambda name, **over: write_ini(out + f"-{name}.ini", base(model, few, f"{out}-{name}", **{**keys, **over}))
    megatrain("-q", "run", ini("kept"))
    evals = [(m["eval_loss"], m["step"]) for m in metrics(out + "-kept") if "eval_loss" in m and m["step"]]
    best_loss, best = min(evals)
    assert 0 < best < 20 and best % 5, evals
    assert best_of(out + "-kept") == (f"checkpoint-{best}", best_loss), (best_of(out + "-kept"), evals)
    left = sorted(n for n in os.listdir(out + "-kept") if n.startswith("checkpoint-"))
    assert left == sorted({f"checkpoint-{best}", "checkpoint-24"}), left
    megatrain("-q", "run", ini("none", checkpoint__keep_best="off"))
    assert best_of(out + "-none") == (None, None)
    early = ini("early", eval__early_stop_patience=2)
    said = megatrain("run", early).stderr
    last = best + 4
    assert f"stopped early at step {last}: no better loss in 2 evaluations" in said and f"best: checkpoint-{best}, loss" in said, said
    assert best_of(out + "-early") == (f"checkpoint-{best}", best_loss)
    said = megatrain("run", early, "--resume").stderr
    assert f"stopped early at step {last}" in said and f"step {last + 1}/" not in said and "are done" not in said, said
    again = ini("early", eval__early_stop_patience=20)
    megatrain("-q", "run", again, "--resume")
    assert losses(out + "-early") == losses(out + "-kept") and best_of(out + "-early") == (f"checkpoint-{best}", best_loss)
    assert "checkpoint-24, where all steps are done" in megatrain("run", again, "--resume").stderr


def evaluation_sets_are_reported_by_name(tmp, model, data):
    """Each as if it were data.eval, in metrics, the report and `eval`; the best may be that of one of them."""
    out, few = os.path.join(tmp, "sets"), write_data(os.path.join(tmp, "sets-few.jsonl"), n=4, seed=5)
    other = write_data(os.path.join(tmp, "sets-other.jsonl"), n=5, seed=9)
    keys = dict(data__eval=data, eval__sets="few:sets-few.jsonl, far-off_2:sets-other.jsonl", eval__every=2, train__steps=4, log__csv="on",
                train__learning_rate="3e-3", checkpoint__every=2, eval__best_by="few_loss", eval__at_start="on")
    ini = write_ini(out + ".ini", base(model, few, out, **keys))
    said = megatrain("run", ini).stderr
    rows = [m for m in metrics(out) if "eval_loss" in m]
    assert [m["step"] for m in rows] == [0, 2, 4] and all({"eval_few_loss", "eval_far-off_2_accuracy"} <= set(m) for m in rows), rows
    line = f"eval step 4 | few: loss {rows[-1]['eval_few_loss']:.4f}"
    assert line in said and said.count("| far-off_2: loss") == 3, said
    assert best_of(out)[1] == min(m["eval_few_loss"] for m in rows)
    together = [json.loads(line) for line in megatrain("eval", ini, "--model", out + "/latest", "--json").stdout.splitlines()][1:]
    assert [r["set"] for r in together] == ["few", "far-off_2"], together
    for (name, path), set_ in zip((("few", few), ("far-off_2", other)), together):
        alone = write_ini(out + "-alone.ini", base(model, few, out, data__eval=path))
        got = json.loads(megatrain("eval", alone, "--model", out + "/latest", "--json").stdout)
        assert {**got, "set": name} == set_ and got["tokens"] == rows[-1][f"eval_{name}_tokens"], (name, got, set_)
        assert abs(got["loss"] / rows[-1][f"eval_{name}_loss"] - 1) < 2e-3, (got, rows[-1])  # of weights in bf16
    with open(out + "/metrics.csv") as f:
        table = list(csv.DictReader(f))
    assert [float(r["eval_few_ppl"]) for r in table if r["eval_few_ppl"]] == [m["eval_few_ppl"] for m in rows]
    pictures = drawn(out, html=out + ".html")
    assert not pictures or ("Loss of evaluation sets" in pictures["sets"] and "far-off_2" in pictures["sets"])
    with open(out + "/config.effective.ini") as f:
        assert f"sets = few:{os.path.realpath(few)}, far-off_2:" in f.read()
    for over, code, words in ((dict(eval__sets="few.jsonl"), 2, "list of NAME:FILE"), (dict(eval__sets="a:x, a:y"), 2, "names a twice"),
                              (dict(data__eval=""), 2, "set that, too"), (dict(eval__best_by="fewer_loss"), 2, "a set of eval.sets"),
                              (dict(eval__sets="few:nowhere.jsonl"), None, "nowhere.jsonl")):
        p = megatrain("check", write_ini(out + "-bad.ini", base(model, few, out, **{**keys, **over})), expect=code)
        assert p.returncode and words in p.stderr, (over, p.stderr)


def an_evaluation_without_samples_is_named(tmp, model, data):
    """A set that has none is refused; a share that holds none out is warned of, once, and nothing is evaluated."""
    out, long = os.path.join(tmp, "none"), os.path.join(tmp, "none.jsonl")
    with open(long, "w") as f:
        f.write(json.dumps({"input_ids": [1] * 99}) + "\n")
    keys = dict(data__eval=data, eval__sets=f"long:{long}, whole:{data}", data__overlong="drop")
    assert "none.jsonl:1" in megatrain("run", write_ini(out + ".ini", base(model, data, out, **keys)), expect=3).stderr
    few = write_data(os.path.join(tmp, "none-few.jsonl"), n=3, seed=5)
    said = megatrain("run", write_ini(out + ".ini", base(model, few, out, data__eval="1%", eval__every=1, train__steps=1))).stderr
    assert said.count("data.eval = 1% holds out no sample: nothing is evaluated") == 1 and "eval step" not in said, said


def an_evaluation_on_what_is_trained_is_warned_of(tmp, model, data):
    out, link = os.path.join(tmp, "seen"), os.path.join(tmp, "seen.jsonl")
    os.symlink(data, link)
    for of, seen in ((link, True), (write_data(os.path.join(tmp, "unseen.jsonl"), n=3, seed=5), False)):
        p = megatrain("check", write_ini(out + ".ini", base(model, data, out, data__eval=of)))
        assert p.stderr.count("is trained on, too") == seen, (of, p.stderr)


def every_checkpoint_names_the_best(tmp, model, data):
    """Also where each evaluation is the best: the last checkpoint is being read back while the next one is saved."""
    out = os.path.join(tmp, "each")
    few = write_data(os.path.join(tmp, "each.jsonl"), n=6, seed=1)
    megatrain("-q", "run", write_ini(out + ".ini", base(model, few, out, data__eval=few, eval__every=1, train__steps=12, train__warmup=0)))
    for m in metrics(out):
        if "eval_loss" in m and m["step"]:
            path = os.path.join(out, f"checkpoint-{m['step']}", "trainer_state.json")
            with open(path) as f:
                assert json.load(f)["best_metric"] == m["eval_loss"], path


def a_second_run_on_the_same_folder_is_refused(tmp, model, data):
    out = os.path.join(tmp, "lock")
    ini = write_ini(out + ".ini", base(model, data, out, train__steps=100000))
    p = start("run", ini)
    read_until(p, "step 1/")
    second = megatrain("-q", "run", ini, "--resume", expect=2)
    assert f"process {p.pid}" in second.stderr, second.stderr
    p.kill()
    p.communicate()


def frozen_tensors_do_not_move(tmp, model, data):
    got = []
    for name, env, over in (("host", {}, {}), ("disk", PIECES, on_disk(tmp))):
        out = os.path.join(tmp, "frozen-" + name)
        ini = write_ini(out + ".ini", base(model, data, out, model__freeze="model.embed_tokens.*, model.layers.0.*, *.mlp.up_proj.weight",
                                           train__steps=4, checkpoint__every=1, train__warmup=0, **over))
        megatrain("-q", "run", ini, env=env)
        first = read_safetensors(f"{out}/checkpoint-1/model.safetensors")
        last = read_safetensors(f"{out}/checkpoint-4/model.safetensors")
        for name in first:
            frozen = "embed_tokens" in name or "layers.0." in name or "up_proj" in name
            assert (first[name] == last[name]) == frozen, name
        got.append(planes(f"{out}/checkpoint-4"))
    assert got[0] == got[1]


def what_was_trained_and_then_frozen_keeps_all_its_bits(tmp, model, data):
    """The model's folder has bf16, the checkpoint the f32 that training made of it."""
    start_of, out = os.path.join(tmp, "thaw-start"), os.path.join(tmp, "thaw")
    megatrain("-q", "run", write_ini(start_of + ".ini", base(model, data, start_of, train__steps=1)))
    stored = os.path.join(tmp, "thaw-model")
    megatrain("-q", "export", start_of + "/latest", stored)

    def go_on(steps, *more, **over):
        sections = base(stored, data, out, train__steps=steps, model__init="weights", checkpoint__every=1, train__warmup=0, **over)
        megatrain("-q", "run", write_ini(out + ".ini", sections), *more)

    go_on(2)
    go_on(3, "--resume", "--force", model__freeze="model.embed_tokens.*")
    go_on(4, "--resume", model__freeze="model.embed_tokens.*")
    masters = [read_safetensors(f"{out}/checkpoint-{n}/megatrain/state-00000.safetensors")["model.embed_tokens.weight.master"]
               for n in (2, 4)]
    assert masters[0] == masters[1] and any(masters[0][2][i] for i in range(0, 4000, 4)), "more bits than bf16 has"


def moments_in_bf16_resume_to_the_same_bits(tmp, model, data):
    got = []
    for name, env, over in (("host", {}, {}), ("disk", PIECES, on_disk(tmp))):
        for stop in 0, 3:
            out = os.path.join(tmp, f"bf16-moments-{name}-{stop}")
            ini = write_ini(out + ".ini", base(model, data, out, train__steps=6, optimizer__state_dtype="bf16",
                                               optimizer__beta2=0.99, **over))
            if stop:
                megatrain("-q", "run", ini, "--max-steps", stop, env=env)
            said = megatrain("run", ini, *(["--resume"] if stop else []), env=env).stderr
            got.append((losses(out), planes(f"{out}/checkpoint-6")))
            tensors = read_safetensors(f"{out}/checkpoint-6/megatrain/state-00001.safetensors")
            assert {k.split(".")[-1]: v[0] for k, v in tensors.items()} == {"master": "F32", "exp_avg": "BF16",
                                                                            "exp_avg_sq": "BF16"}
            rows = {use: size for use, size in re.findall(r"  (weights \(lo\)|first moments|second moments) +(\S+ \S+)$",
                                                          said, re.M)}
            assert rows["first moments"] == rows["second moments"] == rows["weights (lo)"], said
    assert all(g == got[0] for g in got), "moments in bf16: tiers or a resume change bits"


STATES = {("adamw", "8bit"): {"exp_avg": "U8", "exp_avg_sq": "U8"}, ("lion", "bf16"): {"exp_avg": "BF16"}, ("sgd", "f32"): {}}


def lean_states_are_the_same_in_every_place(tmp, model, data):
    """Optimizers with few states: in memory, on a drive, with other cuts, killed between steps, and refused by others."""
    places = {"host": ({}, {}), "disk": (PIECES, on_disk(tmp)),
              "halves": ({"MEGATRAIN_ADAM_ISA": "scalar"}, {"memory__unit": "half", "memory__embedding": "host",
                                                            "device__cpu_threads": 1})}
    for (kind, states), dtypes in STATES.items():
        got = {}
        for name, (env, over) in places.items():
            out = os.path.join(tmp, f"lean-{kind}-{name}")
            rounding = "stochastic" if states == "bf16" else "nearest"
            ini = write_ini(out + ".ini", base(model, data, out, train__steps=6, optimizer__type=kind,
                                               optimizer__state_dtype=states, optimizer__rounding=rounding, **over))
            if name == "disk":
                megatrain("-q", "run", ini, "--max-steps", 3, env=env)
            megatrain("-q", "run", ini, *(["--resume"] if name == "disk" else []), env=env)
            got[name] = losses(out), planes(f"{out}/checkpoint-6")
        assert all(g == got["host"] for g in got.values()), f"{kind} {states}: places or a resume change bits"
        assert got["host"][0][-1][1] < got["host"][0][0][1], "nothing was learnt"
        tensors = read_safetensors(f"{tmp}/lean-{kind}-host/checkpoint-6/megatrain/state-00001.safetensors")
        for shape, types in (2, dtypes), (1, {k: "F32" if states == "8bit" else v for k, v in dtypes.items()}):
            of = [t[:-7] for t, v in tensors.items() if t.endswith(".master") and len(v[1]) == shape]
            assert of and all({k: tensors[f"{t}.{k}"][0] for k in dtypes} == types for t in of), (kind, shape)
            assert len([t for t in tensors if not t.endswith(".master")]) == len(dtypes) * len(tensors) // (len(dtypes) + 1)
    ini = f"{tmp}/lean-adamw-host.ini"
    said = megatrain("-q", "run", ini, "--resume", "--force", "--set", "optimizer.state_dtype=f32", "--set", "train.steps=8",
                     expect=None)
    assert said.returncode and "exp_avg" in said.stderr, said.stderr
    said = megatrain("-q", "run", ini, "--resume", "--set", "optimizer.state_dtype=f32", expect=None)
    assert said.returncode and "optimizer.state_dtype: 8bit -> f32" in said.stderr, said.stderr
    for wrong, why in (("optimizer.rounding=stochastic", "for states in bf16"), ("optimizer.momentum=0.5", "no such key")):
        said = megatrain("-q", "check", ini, "--set", wrong, expect=None)
        assert said.returncode and why in said.stderr, said.stderr


def what_is_frozen_costs_nothing(tmp, model, data):
    """The figures of a model whose MLPs are frozen beside those of the whole: planned, and as the run measured them."""
    stored = os.path.join(tmp, "stored")
    for dtype in "bf16", "f32":
        figures = {}
        for name, freeze in ("whole", ""), ("mlp", "*.mlp.*"):
            out = os.path.join(tmp, f"figures-{dtype}-{name}")
            over = dict(model__dtype=dtype, model__freeze=freeze, train__steps=3, eval__every=0, **on_disk(tmp))
            if not os.path.isdir(stored):  # weights of bf16, as models have them
                megatrain("-q", "run", write_ini(out + ".first.ini", base(model, data, out + "-first", train__steps=1)))
                megatrain("export", f"{out}-first/checkpoint-1", stored)
            said = megatrain("run", write_ini(out + ".ini", base(stored, data, out, model__init="weights", **over)),
                             env=PIECES).stderr
            units = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20}
            rows = {}
            for use, n, unit in re.findall(r"^  .{14}  (.{28})  +([\d.]+) ([KM]?i?B)$", said, re.M):
                rows.setdefault(use.strip(), []).append(float(n) * units[unit])
            step = [m for m in metrics(out) if "loss" in m][-1]
            figures[name] = rows, step
        cfg = config("qwen3", num_hidden_layers=3)
        mlp = 3 * 3 * cfg["hidden_size"] * cfg["intermediate_size"]  # elements
        (rows, step), (few_rows, few) = figures["whole"], figures["mlp"]
        size = {"first moments": 4, "second moments": 4, "weights (lo)": 2}
        for use, bytes_ in size.items():
            saved = sum(rows[use]) - sum(few_rows[use])
            assert abs(saved - mlp * bytes_) <= 3 * 8192 * bytes_, (dtype, use, saved, mlp * bytes_)
        assert "frozen weights (lo)" not in few_rows
        grad = 2 if dtype == "bf16" else 4
        assert step["d2h_bytes"] - few["d2h_bytes"] - mlp * grad <= 3 * 8192 * grad, (step, few)
        assert step["d2h_bytes"] - few["d2h_bytes"] >= mlp * grad
        # in f32 the lo halves of what is frozen do not go over the link
        assert (step["h2d_bytes"] - few["h2d_bytes"] >= mlp * 2) == (dtype == "f32"), (step, few)
        written = lambda s: sum(s["disk_write"].values())
        assert written(step) - written(few) >= mlp * 10, (step["disk_write"], few["disk_write"])


def a_step_that_overflows_is_skipped_to_the_bit(tmp, model, data):
    """Weights so large that the loss is not finite: the step is skipped, the run stops after max_skips."""
    huge = write_model(os.path.join(tmp, "huge"), config("llama", num_hidden_layers=2, initializer_range=1e18))
    for name, over in (("host", {}), ("disk", on_disk(tmp))):
        out = os.path.join(tmp, "skip-" + name)
        ini = write_ini(out + ".ini", base(huge, data, out, train__max_skips=3, checkpoint__every=1, **over))
        p = megatrain("run", ini, expect=6)
        assert "3 steps in a row" in p.stderr and "skipped" in p.stderr, p.stderr
        a, b = planes(f"{out}/checkpoint-1"), planes(f"{out}/checkpoint-2")
        assert a == b
        assert json.load(open(f"{out}/checkpoint-2/megatrain/state.json"))["updates"] == "0"


def schedules_and_metrics_agree(tmp, model, data):
    out = os.path.join(tmp, "metrics")
    ini = write_ini(out + ".ini", base(model, data, out, train__schedule="cosine", train__warmup="11%", train__min_lr_ratio=0.1))
    megatrain("-q", "run", ini)
    m = [x for x in metrics(out) if "loss" in x]
    import math
    for i, x in enumerate(m):
        want = 1e-3 * (i / 2 if i < 2 else 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (i - 2) / 8)))
        assert abs(x["lr"] - want) <= 1e-12, (i, x["lr"], want)
        assert x["clip"] <= 1 and abs(x["clip"] - min(1, 0.5 / (x["grad_norm"] + 1e-6))) < 1e-6
    for decay, falls in (("10%", 1), ("4", 4), ("30%", 3)):
        end = write_ini(out + "-wsd.ini", base(model, data, out + "-wsd", train__schedule="wsd", train__warmup=2, train__decay=decay))
        megatrain("-q", "run", end, "--force", "--no-save")
        rates = [x["lr"] for x in metrics(out + "-wsd") if "lr" in x]
        assert sum(r < 1e-3 for r in rates[2:]) == falls - 1 and rates[2:11 - falls] == [1e-3] * (9 - falls), (decay, rates)
    shown = megatrain("config", "show", ini).stdout
    assert "metrics.ini:" in shown and "default" in shown
    effective = os.path.join(out, "config.effective.ini")
    again = megatrain("config", "show", effective).stdout
    assert "learning_rate = 0.001" in again
    trainer = json.load(open(f"{out}/latest/trainer_state.json"))
    assert trainer["global_step"] == 10 and len(trainer["log_history"]) >= 10


def another_batch_size_repeats_no_row_and_leaves_none_out(tmp, model, data):
    """Samples of different lengths, one a row: two passes have each of them twice, though the batch grows in the first."""
    rows, lengths = os.path.join(tmp, "rows.jsonl"), range(4, 59, 5)
    with open(rows, "w") as f:
        f.writelines(json.dumps({"input_ids": [(i * 7 + k * k) % 270 for k in range(n)]}) + "\n" for i, n in enumerate(lengths))
    out = os.path.join(tmp, "rows")
    keys = {"data__eval": "", "data__packing": "off", "train__steps": "", "train__micro_batch": 1}

    def run(batch, *args, expect=0, **length):
        return megatrain("run", write_ini(out + ".ini", base(model, rows, out, **{**keys, "train__batch_size": batch, **length})),
                         *args, expect=expect).stderr
    for length in ({"train__epochs": 2}, {"train__tokens": 2 * len(lengths) * 64}):
        shutil.rmtree(out, ignore_errors=True)
        run(2, "--max-steps=2", **length)
        said = run(3, "--resume", expect=2, **length)
        assert "train.batch_size: 2 -> 3" in said and "go on after the 4 rows" in said, said
        shutil.copytree(out, out + "-before", symlinks=True)
        results = []
        for stop in ("--max-steps=4",), ():  # stopped once more, it is the same run
            shutil.rmtree(out)
            shutil.copytree(out + "-before", out, symlinks=True)
            run(3, "--resume", "--force", *stop, **length)
            run(3, "--resume", **length)
            steps = [m for m in metrics(out) if "loss" in m]
            results.append([(m["loss"], m["lr"]) for m in steps])
        assert results[0] == results[1], results
        shutil.rmtree(out + "-before")
        epochs = [round(m["epoch"] * len(lengths)) for m in steps]
        assert epochs[:6] == [2, 4, 7, 10, 11, 14] and epochs[-1] == 2 * len(lengths), epochs
        assert steps[epochs.index(len(lengths))]["tokens"] == sum(lengths) and steps[-1]["tokens"] == 2 * sum(lengths), steps
    with open(os.path.join(out, "latest", "trainer_state.json")) as f:
        assert json.load(f)["epoch"] == 2


def accumulation_does_not_change_the_loss(tmp, model, data):
    """One micro-batch of 6 and six of 1, on ragged data: the same up to rounding."""
    got = []
    for mb in (6, 3, 1):
        out = os.path.join(tmp, f"acc-{mb}")
        megatrain("-q", "run", write_ini(out + ".ini", base(model, data, out, train__micro_batch=mb)))
        got.append(losses(out))
    for other in got[1:]:
        for (_, l, n), (_, l2, n2) in zip(got[0], other):
            assert abs(l - l2) <= 1e-5 * l and abs(n - n2) <= 1e-4 * n, (l, l2, n, n2)


def small_updates_survive(tmp, model, data):
    """A learning rate below bf16's resolution still moves the masters."""
    out = os.path.join(tmp, "small")
    ini = write_ini(out + ".ini", base(model, data, out, model__dtype="bf16", train__learning_rate="1e-7", train__warmup=0,
                                       train__steps=3, checkpoint__every=1))
    megatrain("-q", "run", ini)
    a = read_safetensors(f"{out}/checkpoint-1/megatrain/state-00001.safetensors")
    b = read_safetensors(f"{out}/checkpoint-3/megatrain/state-00001.safetensors")
    name = "model.layers.0.mlp.down_proj.weight.master"
    assert a[name][2] != b[name][2]


TESTS = [v for v in list(globals().values()) if callable(v) and getattr(v, "__code__", None)
         and v.__code__.co_varnames[:3] == ("tmp", "model", "data")]
FIRST = (signals_save_the_last_applied_update, csv_and_tensorboard_hold_what_jsonl_holds, the_best_model_is_saved_kept_and_named,
         evaluation_sets_are_reported_by_name, a_second_run_on_the_same_folder_is_refused, frozen_tensors_do_not_move,
         a_step_that_overflows_is_skipped_to_the_bit, schedules_and_metrics_agree, accumulation_does_not_change_the_loss)

with tempfile.TemporaryDirectory() as tmp:
    model = write_model(os.path.join(tmp, "model"), config("qwen3", num_hidden_layers=3))
    data = write_data(os.path.join(tmp, "data.jsonl"))
    for test in chosen(TESTS, first=FIRST):
        t0 = time.time()
        test(tmp, model, data)
        print(f"ok {test.__name__} {time.time() - t0:.1f} s", flush=True)
