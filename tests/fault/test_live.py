# SPDX-License-Identifier: Apache-2.0
"""
A live state is worth more than any write, and than any signal that was not meant to end it: full disks, files that
cannot be written, streams that are gone, folders that are gone. What is there in the end is compared bit for bit.
"""
import fcntl
import glob
import os
import resource
import shutil
import signal
import subprocess
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cli"))
from runner import run_tests  # noqa: E402
from tiny import BINARY, base, config, losses, megatrain, metrics, patience, planes, read_until, with_weights, write_data, write_ini, write_model  # noqa: E402
from test_faults import Small  # noqa: E402

STEPS = 6


class Place:
    def __init__(self, tmp):
        self.tmp = tmp
        self.model = write_model(os.path.join(tmp, "model"), config("qwen3", num_hidden_layers=2))
        self.data = write_data(os.path.join(tmp, "data.jsonl"))
        out, ini = self.ini("want")
        megatrain("-q", "run", ini)
        self.want = losses(out), planes(os.path.join(out, f"checkpoint-{STEPS}"))

    def ini(self, name, out=None, model=None, **over):
        out = out or os.path.join(self.tmp, name)
        sections = {"train__steps": STEPS, "checkpoint__every": 2, "data__eval": "", **over}
        return out, write_ini(os.path.join(self.tmp, name + ".ini"), base(model or self.model, self.data, out, **sections))

    def check(self, out):
        assert losses(out) == self.want[0]
        assert planes(os.path.join(out, f"checkpoint-{STEPS}")) == self.want[1]


def start(*args, **kw):
    kw.setdefault("stderr", subprocess.PIPE)
    return subprocess.Popen([BINARY, *map(str, args)], stdout=subprocess.DEVNULL, text=True, **kw)


def logs_that_cannot_be_written_do_not_end_a_run(p):
    """A file size limit that only the logs reach: their rows wait, and come when it is lifted."""
    out, ini = p.ini("logs", log__csv="on", log__tensorboard="on", checkpoint__every=0)
    run = start("run", ini)
    read_until(run, "step 1/")
    run.send_signal(signal.SIGSTOP)
    resource.prlimit(run.pid, resource.RLIMIT_FSIZE, (10, resource.RLIM_INFINITY))
    run.send_signal(signal.SIGCONT)
    said = read_until(run, "metrics.jsonl: ")
    said += read_until(run, f"step {STEPS - 1}/")
    resource.prlimit(run.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    said += run.communicate()[1]
    assert run.returncode == 0, said
    assert said.count("metrics.jsonl: ") == 1 and "metrics.csv: " in said and "tfevents" in said, said
    p.check(out)
    assert len(open(out + "/metrics.csv").read().splitlines()) == STEPS + 1


def a_trace_that_cannot_be_written_does_not_end_a_run(p):
    """Its folder is gone when it is written."""
    out, ini = p.ini("trace", device__link_gbps=0.005)  # some tenths of a second a step
    folder = os.path.join(p.tmp, "traces")
    os.mkdir(folder)
    run = start("run", ini, "--trace", os.path.join(folder, "trace.json"))
    said = read_until(run, "step 1/")
    shutil.rmtree(folder)
    said += run.communicate()[1]
    assert run.returncode == 0 and "no trace" in said, said
    p.check(out)


def saves_that_fail_leave_the_state_live(p):
    """Every periodic save meets a limit; it is lifted while the last one waits."""
    out, ini = p.ini("saves")
    cap = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (140000, resource.RLIM_INFINITY))
    run = start("run", ini, preexec_fn=cap)
    said = read_until(run, "trying again")
    assert "checkpoint of step 2 not saved" in said and "File too large" in said, said
    assert not [n for n in os.listdir(out) if n.startswith("checkpoint-") and not n.endswith(".tmp")], said
    resource.prlimit(run.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    open(out + "/SAVE", "w").close()
    said += run.communicate()[1]
    assert run.returncode == 0, said
    p.check(out)


def a_last_save_that_fails_ends_as_it_says(p):
    """At the deadline, or at a signal; the exit code is that of the save."""
    cap = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (140000, resource.RLIM_INFINITY))
    out, ini = p.ini("deadline", checkpoint__save_deadline="1s")
    run = start("run", ini, preexec_fn=cap)
    said = run.communicate()[1]
    assert run.returncode == 1 and "there is no other checkpoint to go on from" in said, (run.returncode, said)
    out, ini = p.ini("second")
    run = start("run", ini, preexec_fn=cap)
    said = read_until(run, "trying again")
    run.send_signal(signal.SIGTERM)
    t0 = time.time()
    said += run.communicate()[1]
    assert run.returncode == 1 and time.time() - t0 < patience(10), (run.returncode, said)


def a_full_disk_at_the_end_makes_room_or_keeps_the_weights(p):
    with Small(p.tmp, "4000k") as small:  # two checkpoints and no third
        if not small:
            return
        out, ini = p.ini("full", out=os.path.join(small, "run"), checkpoint__keep=2, checkpoint__save_deadline="1s")
        r = megatrain("run", ini)
        assert "removing older ones" in r.stderr and "up to 4 checkpoints" in r.stderr, r.stderr
        p.check(out)
    with Small(p.tmp, "3000k") as small:  # one, and weights
        out, ini = p.ini("fuller", out=os.path.join(small, "run"), checkpoint__keep=1, checkpoint__save_deadline="1s")
        r = megatrain("run", ini, expect=4)
        assert "weights alone are saved" in r.stderr and out + "/checkpoint-2" in r.stderr, r.stderr
        megatrain("verify", f"{out}/checkpoint-{STEPS}")
        megatrain("verify", f"{out}/checkpoint-2")
        assert not os.path.exists(f"{out}/checkpoint-{STEPS}/megatrain/state.json")


def the_models_folder_is_not_needed_after_the_start(p):
    model = os.path.join(p.tmp, "moved")
    shutil.copytree(p.model, model)
    os.mkdir(model + "/LICENSES")
    os.mkfifo(model + "/LICENSE.fifo")
    secret = os.path.join(p.tmp, "secret")
    open(secret, "w").write("secret")
    os.symlink(secret, model + "/LICENSE_x")
    os.symlink("config.json", model + "/generation_config.json")
    open(model + "/LICENSE", "w").write("licence")
    open(model + "/preprocessor_config.json", "w").write("{}")
    out, ini = p.ini("moved-run", model=model, checkpoint__every=3)
    run = start("run", ini)
    said = read_until(run, "step 1/")
    os.rename(model, model + ".away")
    said += run.communicate()[1]
    assert run.returncode == 0, said
    there = os.listdir(f"{out}/checkpoint-{STEPS}")
    assert {"LICENSE", "config.json", "generation_config.json", "preprocessor_config.json"} <= set(there), there
    assert not {"LICENSES", "LICENSE.fifo", "LICENSE_x"} & set(there), there
    assert "link to a file outside the folder" in said, said


def a_block_is_saved_though_the_models_folder_is_gone(p):
    """Its checkpoints name the model's tensors. The next block needs them: until then everything is saved, and it goes on
    from there. One of weights alone is not said to be unreadable."""
    model, keys = os.path.join(p.tmp, "of-blocks"), dict(model__init="weights", train__blocks="layers", train__block_steps=3)
    with_weights(p.tmp, p.model, p.data, "of-blocks-pre")
    shutil.copytree(os.path.join(p.tmp, "of-blocks-pre", "checkpoint-1"), model)
    want, ini = p.ini("blocks-want", model=model, **keys)
    megatrain("-q", "run", ini)
    out, ini = p.ini("blocks", model=model, **keys)
    run = start("run", ini, "--max-steps", 5)
    said = read_until(run, "step 1/")
    os.rename(model, model + ".away")
    said += run.communicate()[1]
    assert run.returncode == 3 and model in said and "cannot be found" in said and "next block" in said, (run.returncode, said)
    assert {"checkpoint-2", "checkpoint-3"} <= set(os.listdir(out)) and "not saved" not in said, said
    megatrain("verify", f"{out}/checkpoint-3")
    os.rename(model + ".away", model)
    megatrain("-q", "run", ini, "--resume")
    assert losses(out) == losses(want) and planes(f"{out}/checkpoint-{STEPS}") == planes(f"{want}/checkpoint-{STEPS}")


def a_file_system_is_tried_before_anything_is_trained(p):
    out, ini = p.ini("tried")
    cap = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100000, resource.RLIM_INFINITY))  # no hole goes so far
    run = start("run", ini, preexec_fn=cap)
    said = run.communicate()[1]
    assert run.returncode == 1 and "cannot make a hole" in said and "step 1/" not in said, (run.returncode, said)


def a_reader_that_goes_away_does_not_end_a_run(p):
    out, ini = p.ini("pipe")
    r, w = os.pipe()
    run = subprocess.Popen([BINARY, "run", ini], stdout=w, stderr=w)
    os.close(w)
    os.read(r, 10)
    os.close(r)
    assert run.wait() == 0
    p.check(out)
    head = subprocess.run(f"'{BINARY}' config keys | head -1", shell=True, capture_output=True, text=True)
    assert head.returncode == 0 and head.stderr == "", head.stderr  # a command whose result is read ends quietly


def signals_that_were_ignored_stay_ignored(p):
    out, ini = p.ini("nohup", train__steps=40, checkpoint__every=0)
    ignore = lambda: (signal.signal(signal.SIGHUP, signal.SIG_IGN), signal.signal(signal.SIGINT, signal.SIG_IGN))
    run = start("run", ini, preexec_fn=ignore)
    read_until(run, "step 1/")
    run.send_signal(signal.SIGHUP)
    run.send_signal(signal.SIGINT)
    said = run.communicate()[1]
    assert run.returncode == 0 and os.path.isdir(out + "/checkpoint-40"), (run.returncode, said)


def closed_streams_are_not_taken_for_files(p):
    out, ini = p.ini("closed", log__csv="on")
    close = lambda: [os.close(fd) for fd in (0, 1, 2)]
    run = subprocess.Popen([BINARY, "run", ini], preexec_fn=close)
    assert run.wait() == 0
    p.check(out)
    assert len(open(out + "/metrics.csv").read().splitlines()) == STEPS + 1
    assert open(out + "/.lock").read().strip() == str(run.pid)


def a_signal_before_the_first_step_saves_nothing(p):
    """While a folder of weights is read through a pipe that nobody writes to."""
    out, ini = p.ini("early")
    env = {**os.environ, "MEGATRAIN_TEST": "1"}
    for signo, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        shutil.rmtree(out, ignore_errors=True)
        seen = set()
        for delay in (0.0, 0.01, 0.02, 0.03, 0.04, 0.05):
            shutil.rmtree(out, ignore_errors=True)
            run = start("run", ini, env=env)
            time.sleep(delay)
            run.send_signal(signo)
            run.communicate()
            steps = len(losses(out)) if os.path.exists(out + "/metrics.jsonl") else 0
            saved = [n for n in os.listdir(out) if n.startswith("checkpoint-")] if os.path.isdir(out) else []
            assert run.returncode in (code, -signo, 0), run.returncode
            assert "checkpoint-0" not in saved and (steps or not saved), (steps, saved)
            seen.add(run.returncode)


def a_token_cache_that_is_cut_off_does_not_lose_what_was_trained(p):
    """A look at a mapping of it would end the process on the spot."""
    out, ini = p.ini("cutoff", data__cache_dir=os.path.join(p.tmp, "cut"), checkpoint__every=0, train__steps=100000,
                     train__schedule="constant", train__warmup="0")
    run = start("run", ini)
    read_until(run, "step 3/")
    shard, = [n for n in os.listdir(os.path.join(p.tmp, "cut")) if n.endswith(".tokens")]
    os.truncate(os.path.join(p.tmp, "cut", shard), 4096)
    said = run.communicate()[1]
    assert run.returncode == 1 and "token cache" in said and "truncated" in said, (run.returncode, said[-500:])
    saved, = [n for n in os.listdir(out) if n.startswith("checkpoint-")]
    assert int(saved.split("-")[1]) >= 3
    megatrain("verify", os.path.join(out, saved))
    megatrain("-q", "run", ini, "--resume", "--max-steps", 1)


def an_evaluation_that_cannot_be_read_is_left_out(p):
    """Its token cache is cut off once the run is under way, which cannot get far ahead of who reads its lines."""
    data = write_data(os.path.join(p.tmp, "held.jsonl"), n=30, seed=4)
    for name, every, steps in (("periodic", 50, 400), ("last", 0, 400)):
        cache = os.path.join(p.tmp, "cache-" + name)
        out, ini = p.ini("unread-" + name, data__eval=data, data__cache_dir=cache, eval__every=every, checkpoint__every=0,
                         train__steps=steps)
        run = start("run", ini)
        fcntl.fcntl(run.stderr, fcntl.F_SETPIPE_SZ, 4096)
        said = read_until(run, "step 1/")
        shards = {n: os.path.getsize(os.path.join(cache, n)) for n in os.listdir(cache) if n.endswith(".tokens")}
        os.truncate(os.path.join(cache, min(shards, key=shards.get)), 4096)  # the smaller one is the evaluation's
        said += run.communicate()[1]
        assert run.returncode == 0, (run.returncode, said[-600:])
        assert said.count("no evaluation at step") == (steps // every if every else 1) and "truncated" in said, said[-600:]
        megatrain("verify", f"{out}/checkpoint-{steps}")


def a_cache_that_is_made_is_nobody_elses(p):
    cache = os.path.join(p.tmp, "private", "cache")
    _, ini = p.ini("private-run", data__cache_dir=cache)
    megatrain("-q", "run", ini, "--max-steps", 1)
    assert os.stat(cache).st_mode & 0o777 == 0o700
    os.chmod(cache, 0o755)  # as who shares it has it
    shutil.rmtree(os.path.join(p.tmp, "private-run"))
    megatrain("-q", "run", ini, "--max-steps", 1)
    assert os.stat(cache).st_mode & 0o777 == 0o755


def a_helper_that_others_could_have_made_is_not_run(p):
    """The program in a folder that anybody may write to; five folders up, where nothing of ours lies; and in its own."""
    data = os.path.join(p.tmp, "chat.jsonl")
    with open(data, "w") as f:
        f.write('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n')
    root = os.path.join(p.tmp, "tree")
    _, ini = p.ini("strange", data__train=data, data__tokenizer="byte", data__template="chatml",
                   data__cache_dir=os.path.join(p.tmp, "strange-cache"))
    for below, mode, runs in (("build/cli", 0o755, True), ("build/cli", 0o777, False), ("a/b/c/d/e", 0o755, False)):
        shutil.rmtree(root, ignore_errors=True)
        binary = os.path.join(root, below, "megatrain")
        os.makedirs(os.path.dirname(binary))
        os.makedirs(os.path.join(root, "scripts"))
        shutil.copy(BINARY, binary)
        with open(os.path.join(root, "scripts", "prepare_data.py"), "w") as f:
            f.write("open(__file__ + '.ran', 'w')\n")
        os.chmod(os.path.join(root, "scripts"), mode)
        r = subprocess.run([binary, "-q", "run", ini], capture_output=True, text=True)
        assert r.returncode, r.stderr
        assert os.path.exists(os.path.join(root, "scripts", "prepare_data.py.ran")) == runs, (below, mode, r.stderr)
        assert runs or "is not found" in r.stderr, r.stderr


def the_helper_of_another_users_tree_is_run(p):
    """A tree that is mounted into a container belongs to whoever built it: its program, its scripts and its Python."""
    data = os.path.join(p.tmp, "owned.jsonl")
    with open(data, "w") as f:
        f.write('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n')
    root = os.path.join(p.tmp, "owned-tree")
    _, ini = p.ini("owned", data__train=data, data__tokenizer="byte", data__template="chatml",
                   data__cache_dir=os.path.join(p.tmp, "owned-cache"))
    files = {"scripts/prepare_data.py": "", ".venv-data/bin/python": '#!/bin/sh\n: >"$0.ran"\n', "cli/megatrain": None}
    for name, text in files.items():
        path = os.path.join(root, name)
        os.makedirs(os.path.dirname(path))
        if text is None:
            shutil.copy(BINARY, path)
            continue
        with open(path, "w") as f:
            f.write(text)
        os.chmod(path, 0o755)
    if not os.geteuid():  # nobody else can give files away
        for folder, _, names in os.walk(root):
            for path in [folder, *(os.path.join(folder, n) for n in names)]:
                os.chown(path, 4242, 4242)
    env = {k: v for k, v in os.environ.items() if k not in ("MEGATRAIN_PYTHON", "MEGATRAIN_DATA_HELPER")}
    r = subprocess.run([os.path.join(root, "cli/megatrain"), "-q", "run", ini], capture_output=True, text=True, env=env)
    assert r.returncode and os.path.exists(os.path.join(root, ".venv-data/bin/python.ran")), r.stderr


def what_killed_runs_leave_is_removed(p):
    out, ini = p.ini("leftovers")
    os.makedirs(out + "/.rehearsal-123.tmp")
    os.makedirs(out + "/.rehearsal-123")
    open(out + "/metrics.jsonl.abcdef.tmp", "w").close()
    open(out + "/notes.tmp", "w").close()
    megatrain("-q", "run", ini, "--force")
    assert not [n for n in os.listdir(out) if "rehearsal" in n or n.endswith("def.tmp")] and os.path.exists(out + "/notes.tmp")


def a_run_that_starts_over_and_saves_nothing_forgets_nothing(p):
    out, ini = p.ini("over")
    megatrain("-q", "run", ini, "--max-steps", 2)
    long, more = p.ini("over-long", out=out, train__steps=100000, checkpoint__every=0, train__schedule="constant",
                       train__warmup="0")
    run = start("run", more, "--force")
    read_until(run, "step 1/")
    run.kill()
    run.communicate()
    r = megatrain("run", ini, "--resume", expect=7)
    aside, = glob.glob(out + "/checkpoint-2.abandoned-*")
    assert f"--resume={aside}" in r.stderr, r.stderr
    megatrain("-q", "run", ini, f"--resume={aside}")
    assert planes(os.path.join(out, f"checkpoint-{STEPS}")) == p.want[1]


def time_on_cpu(run):
    with open(f"/proc/{run.pid}/schedstat") as f:
        return int(f.read().split()[0]) / 1e9


def catches(run, sig):
    with open(f"/proc/{run.pid}/status") as f:
        return int(f.read().split("SigCgt:")[1].split()[0], 16) >> sig - 1 & 1


def a_request_before_the_first_step_is_met(p):
    """USR1 and USR2, as a queue sends them, from the first line on: the run goes on."""
    for delay in (0.002, 0.01, 0.03):
        out, ini = p.ini("asked", checkpoint__every=0)
        shutil.rmtree(out, ignore_errors=True)
        run = start("run", ini)
        time.sleep(delay)
        while not b"run" in open(f"/proc/{run.pid}/cmdline", "rb").read().split(b"\0"):
            time.sleep(0.001)
        began = time_on_cpu(run)
        while run.poll() is None and not all(catches(run, sig) for sig in (signal.SIGUSR1, signal.SIGUSR2)):
            assert time_on_cpu(run) < began + 0.1, "what comes before is linking, of a new file slowly"
            time.sleep(0.001)
        run.send_signal(signal.SIGUSR1)
        run.send_signal(signal.SIGUSR2)
        said = run.communicate()[1]
        assert run.returncode == 0, (delay, run.returncode, said[-500:])


def links_that_others_have_put_into_the_folder_are_not_followed(p):
    """What a run writes by name in its folder is its own file: a link there leads nowhere, also to be appended to."""
    for name, args in ((".lock", ("--force",)), ("metrics.jsonl", ("--resume",)), ("metrics.csv", ("--resume",))):
        out, ini = p.ini("linked-" + name.strip("."), log__csv="on")
        if "--resume" in args:
            megatrain("-q", "run", ini, "--max-steps", 2)
            os.remove(f"{out}/{name}")
        os.makedirs(out, exist_ok=True)
        victim = os.path.join(p.tmp, "victim")
        open(victim, "w").write("mine")
        os.symlink(victim, f"{out}/{name}")
        r = megatrain("run", ini, *args, expect=None)
        assert (f"{out}/{name}: it is a link" in r.stderr) == (r.returncode == 1), (name, r.stderr)
        assert open(victim).read() == "mine" and (name != ".lock" or r.returncode), (name, r.returncode)
        if r.returncode:
            os.remove(f"{out}/{name}")
            megatrain("-q", "run", ini, *args)
        megatrain("verify", f"{out}/checkpoint-{STEPS}")
    out, ini = p.ini("hard-link")
    os.makedirs(out)
    os.link(victim, f"{out}/.lock")  # locked, and left as it is
    megatrain("-q", "run", ini)
    assert open(victim).read() == "mine" and os.path.exists(f"{out}/checkpoint-{STEPS}")


def requests_of_an_earlier_run_are_removed(p):
    out, ini = p.ini("stale")
    megatrain("-q", "run", ini, "--max-steps", 2)
    for name in ("STOP", "SAVE"):
        open(os.path.join(out, name), "w").close()
    megatrain("-q", "run", ini, "--resume")
    p.check(out)


def a_signal_during_an_evaluation_saves_as_any(p):
    data = write_data(os.path.join(p.tmp, "eval.jsonl"), n=600)
    for at_end in (False, True):
        out, ini = p.ini(f"in-eval-{at_end}", train__steps=3 if at_end else 1000, eval__every=0 if at_end else 3, data__eval=data,
                         checkpoint__every=0)
        run = subprocess.Popen([BINARY, "run", ini], stderr=subprocess.PIPE, text=True)
        for line in run.stderr:
            if line.startswith("step 3/"):
                break
        time.sleep(0.02)
        run.terminate()
        run.stderr.read()
        code = run.wait(60)
        assert code in (143, 0), code  # 0: the last evaluation was over
        megatrain("verify", out + "/latest")


def a_folder_that_goes_away_does_not_lose_the_run(p):
    """It is removed, renamed, replaced by another run's, or its lock is removed."""
    keys = dict(train__steps=100000, checkpoint__every=0, train__schedule="constant", train__warmup="0")
    def begin(name):
        out, ini = p.ini(name, **keys)
        run = start("run", ini)
        return out, ini, run, read_until(run, "step 2/")
    def end(run, said, where):
        run.send_signal(signal.SIGTERM)
        said += run.communicate()[1]
        assert run.returncode == 143, (run.returncode, said[-800:])
        latest, = glob.glob(where + "/latest")
        megatrain("verify", latest)
        return said
    out, ini, run, said = begin("removed")
    shutil.rmtree(out)
    assert "was removed while the run used it" in end(run, said, out)
    megatrain("-q", "run", ini, "--resume", "--max-steps", 1)
    out, ini, run, said = begin("renamed")
    os.rename(out, out + "-2")
    assert f"was renamed to {out}-2" in end(run, said, out + "-2") and not os.path.exists(out)
    out, ini, run, said = begin("replaced")
    shutil.rmtree(out)
    other = start("run", ini)
    end(other, read_until(other, "step 2/"), out)
    said = end(run, said, out + "-*")
    assert "this run goes on in" in said and len(glob.glob(out + "/checkpoint-*")) == 1, said
    out, ini, run, said = begin("unlocked")
    os.remove(out + "/.lock")
    assert "it is locked again" in end(run, said, out)


def the_time_limit_counts_from_the_start_and_holds_the_save(p):
    out, ini = p.ini("limit", train__steps=100000, checkpoint__every=0, checkpoint__time_limit="2s")
    t0 = time.time()
    megatrain("-q", "run", ini, expect=75)
    assert time.time() - t0 < patience(20)  # of 100,000 steps
    megatrain("verify", out + "/latest")


if __name__ == "__main__":
    run_tests(globals(), Place)
