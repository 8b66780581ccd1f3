# SPDX-License-Identifier: Apache-2.0
"""
A system call fails, at each place where a run makes it: no run hangs, none ends by a signal, what has a checkpoint's
name verifies, and going on from there gives the bits of a run that nothing happened to. A save in the middle of a run
that fails leaves the state live. And each sync is there: from what is done to files, in order, nothing gets its name
or is removed before what it stands on is on the drive.
"""
import os
import shutil
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cli"))
import data_env  # noqa: E402
from runner import run_tests  # noqa: E402
from tiny import (BINARY, FULL, SLOW, base, config, losses, megatrain, patience, planes, write_data, write_ini,  # noqa: E402
                  write_model)

TOOL = os.environ["MEGATRAIN_SYSCALLS"]
STEPS = 4
ERRORS = ("EIO", "EINTR", "ENOSPC", "EINVAL", "ENOSYS")
SAVES = ("open", "write", "fsync", "fsync-dir", "rename", "mkdir", "remove")
CODES = {0, 1, 2, 3, 4, 5, 6, 7}  # megatrain help exit-codes


class Place:
    def __init__(self, tmp):
        self.tmp, self.drive, self.n = tmp, os.path.join(tmp, "drive"), 0
        os.makedirs(self.drive)
        self.model = write_model(os.path.join(tmp, "model"), config(
            "qwen3", num_hidden_layers=1, hidden_size=16, intermediate_size=24, num_attention_heads=2,
            num_key_value_heads=1, head_dim=8))
        self.data = write_data(os.path.join(tmp, "data.jsonl"), n=20, longest=30)
        out, ini = self.ini("want")
        megatrain("-q", "run", ini)
        self.want = losses(out), planes(os.path.join(out, f"checkpoint-{STEPS}"))
        self.points = self.failed = 0

    def ini(self, name, **over):
        out = os.path.join(self.tmp, name)
        return out, write_ini(out + ".ini", base(self.model, self.data, out, **{
            "train__steps": STEPS, "train__batch_size": 2, "train__micro_batch": 1, "data__seq_len": 32,
            "checkpoint__every": 2, "checkpoint__keep": 1, "checkpoint__save_deadline": "1s", "memory__states": "disk",
            "memory__nvme_paths": self.drive, "device__cpu_threads": 1, "memory__device_budget": "4MiB", **over}))

    def watch(self, *cmd, fault=None, part=None, after=None, log=None, env=None):
        """The program under the tool; (exit code, what it said, how often the call came)."""
        log = log or os.path.join(self.tmp, "log")
        args = [TOOL, "-l", log]
        for flag, value in (("-f", fault), ("-p", part), ("-a", after)):
            args += [flag, value] if value else []
        p = subprocess.Popen([*args, BINARY, *map(str, cmd)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                             text=True, env={**os.environ, **(env or {})})
        try:
            said = p.communicate(timeout=patience(120))[1]
        except subprocess.TimeoutExpired:
            p.kill()
            raise
        with open(log) as f:
            lines = f.read().splitlines()
        return p.returncode, said, int(lines[-1].split("\t")[1])

    def go_on(self, name, out, ini):
        """What has a name is whole, and a run from there ends with the bits that are wanted."""
        for n in os.listdir(out) if os.path.isdir(out) else []:
            if n.startswith("checkpoint-") and not n.endswith(".tmp"):
                megatrain("verify", os.path.join(out, n))
        megatrain("-q", "run", ini, "--resume")
        assert losses(out) == self.want[0], f"{name}: losses differ"
        assert planes(os.path.join(out, f"checkpoint-{STEPS}")) == self.want[1], f"{name}: planes differ"
        assert not os.listdir(self.drive), f"{name}: scratch is left"


def what_cannot_be_read_back_is_kept(p):
    """Only other bytes are wrong: what a file server does not give at the moment is not set aside, nor written again as weights
    alone, and older ones stay."""
    for error, keep in (("ESTALE", 1), ("EROFS", 3), ("EIO", 1)):
        for step in (2, STEPS):
            out, ini = p.ini(f"unread-{error}-{step}", checkpoint__keep=keep, memory__states="host")
            code, said, _ = p.watch("run", ini, fault=f"open:{error}:1:0", part=f"/checkpoint-{step}/")
            there = {n for n in os.listdir(out) if n.startswith("checkpoint-")}
            read = f"step {step} was saved, but cannot be read back" in said or (step == STEPS and keep > 1)  # else nobody waits
            assert code == 0 and read and "reads back wrong" not in said, (error, step, code, said)
            assert there == {"checkpoint-2", f"checkpoint-{STEPS}"}, (error, step, there)
            p.go_on(f"unread {error} {step}", out, ini)


def places(n, most):
    """Up to `most` of the n places of a call, the first and the last among them, others spread over all."""
    if FULL or n <= most:
        return range(1, n + 1)
    return sorted({1 + i * (n - 1) // (most - 1) for i in range(most)})


def any_call_may_fail(p):
    """Once, anywhere between reading the configuration and the end."""
    calls = [("open", 5, {}), ("write", 4, {}), ("fsync", 3, {}), ("fsync-dir", 3, {}), ("rename", 3, {}),
             ("flock", 3, {}), ("fallocate", 3, {}), ("statx", 3, {}), ("io_uring_enter", 5, {}),
             ("pwrite", 4, {"MEGATRAIN_IO": "threads"})]
    if not SLOW:
        calls.append(("mmap", 5, {}))  # a sanitizer maps memory itself, and ends the process where it gets none
    for call, most, env in calls:
        out, ini = p.ini("any")
        part = p.tmp if SLOW else None
        find = lambda fault: p.watch("run", ini, fault=fault, part=part, after="any.ini", env=env)
        code, said, n = find(f"{call}:EIO:0:0")
        assert code == 0 and n, (call, code, n, said)
        shutil.rmtree(out)
        for i, at in enumerate(places(n, 2 if SLOW else most)):
            few = FULL and n < 60
            for error in ERRORS if few else [ERRORS[i % len(ERRORS)]]:
                name = f"{call}:{error}:{at}:1"
                code, said, _ = find(name)
                assert code in CODES, (name, code, said)
                assert code == 0 or "megatrain: " in said or "error" in said, (name, code, said)
                p.failed += code != 0
                p.points += 1
                p.go_on(name, out, ini)
                shutil.rmtree(out, ignore_errors=True)


def a_save_that_fails_leaves_the_state_live(p):
    """The one in the middle of a run, at any of its calls."""
    for call in SAVES:
        out, ini = p.ini("live")
        find = lambda fault: p.watch("run", ini, fault=fault, part="live/checkpoint-2")
        code, said, n = find(f"{call}:EIO:0:0")
        assert code == 0 and n, (call, code, n, said)
        shutil.rmtree(out)
        for i, at in enumerate(places(n, 2)):
            for error in ERRORS if FULL else [ERRORS[i % len(ERRORS)]]:
                name = f"{call}:{error}:{at}:1 of a save"
                code, said, _ = find(f"{call}:{error}:{at}:1")
                assert code == 0, (name, code, said)
                assert losses(out) == p.want[0] and planes(os.path.join(out, f"checkpoint-{STEPS}")) == p.want[1], name
                for n in os.listdir(out):
                    if n.startswith("checkpoint-") and not n.endswith(".tmp"):
                        megatrain("verify", os.path.join(out, n))
                p.points += 1
                shutil.rmtree(out)


def a_last_save_is_tried_again_whatever_time_is_left(p):
    """Its first calls fail, with little time left or none; for good, a queue runs again what a checkpoint can go on from."""
    endless = {"train__steps": 100000, "checkpoint__time_limit": "3s", "train__schedule": "constant", "train__warmup": "0"}
    for fault, keys, want in (("fsync:EIO:1:1", {"checkpoint__save_deadline": "10ms"}, 0), ("mkdir:ESTALE:1:3", {}, 0),
                              ("fsync:EIO:1:1", endless, 75)):
        out, ini = p.ini("again", checkpoint__every=0, **keys)
        code, said, _ = p.watch("run", ini, fault=fault, part="again/checkpoint-")
        assert code == want and "trying again" in said, (fault, code, said)
        megatrain("verify", out + "/latest")
        assert os.path.exists(out + "/latest/megatrain/state.json"), said
        p.points += 1
        shutil.rmtree(out)
    out, ini = p.ini("requeued", checkpoint__every=0, **endless)
    megatrain("-q", "run", ini, "--max-steps", 2)
    code, said, _ = p.watch("run", ini, "--resume", fault="fsync:EIO:1:0", part="requeued/checkpoint-")
    assert code == 75 and f"the newest checkpoint is {out}/checkpoint-2" in said, (code, said)
    shutil.rmtree(out)


def a_last_save_that_fails_for_good_leaves_the_one_before(p):
    for i, call in enumerate(("open", "write", "fsync", "fsync-dir", "rename", "mkdir")[:2 if SLOW else None]):
        out, ini = p.ini("last", checkpoint__save_deadline="10ms")
        name = f"{call}:{ERRORS[0 if i % 2 else 2]}:1:0"
        code, said, n = p.watch("run", ini, fault=name, part=f"last/checkpoint-{STEPS}")
        assert n and code in (1, 4), (name, code, said)
        assert f"step {STEPS} was not saved" in said and f"the newest checkpoint is {out}/checkpoint-2" in said, said
        p.points += 1
        p.go_on(name, out, ini)
        shutil.rmtree(out)


def what_cannot_be_locked_is_used_with_a_warning(p):
    """Some parallel and some network file systems have no locks; a cache may be one that can only be read."""
    for fault, part, text in (("flock:ENOSYS:1:0", None, "cannot be locked"), ("open:EROFS:1:0", "cache/lock", "Steps"),
                              ("statfs:ENOSYS:1:0", None, "Steps")):  # nor do all say how much is free
        out, ini = p.ini("unlocked")
        code, said, n = p.watch("run", ini, fault=fault, part=part)
        assert n and code == 0 and text in said, (fault, code, said)
        assert planes(os.path.join(out, f"checkpoint-{STEPS}")) == p.want[1]
        shutil.rmtree(out)


def without_sums_a_drive_is_asked_before_a_save(p):
    """A page that could not be written back is reported to a sync alone; it must not reach a checkpoint."""
    out, ini = p.ini("asked", memory__nvme_checksums="off")
    find = lambda fault: p.watch("run", ini, fault=fault, part="megatrain-scratch")
    code, said, n = find("fsync:EIO:0:0")
    assert code == 0 and n == 2, (code, n, said)  # saves
    assert planes(os.path.join(out, f"checkpoint-{STEPS}")) == p.want[1]
    shutil.rmtree(out)
    code, said, _ = find("fsync:EIO:2:1")
    assert code == 1 and "may not be what was written" in said and p.drive in said, (code, said)
    assert "checkpoint-2" in os.listdir(out) and f"checkpoint-{STEPS}" not in os.listdir(out), os.listdir(out)
    p.go_on("asked", out, ini)


# --- syncs: from what is done, in order -----------------------------------------------------------------------------


class Unsynced:
    """What a power cut could still take back, after each call."""

    def __init__(self, log, out, never=("metrics.", ".lock", "lock", "events.out.")):
        self.files, self.names, self.out, self.never = set(), set(), out, never
        with open(log) as f:
            calls = [line.rstrip("\n").split("\t") for line in f][:-1]
        for call, path, to, fails in calls:
            if not fails:
                getattr(self, call.replace("-", "_"), lambda *_: None)(path, to)
        assert not self.files, f"written and not synced in the end: {self.files}"
        assert not self.names, f"names that are not durable in the end: {self.names}"

    def ours(self, path):
        return os.path.basename(path).startswith(self.never) or path.startswith(("/proc", "/sys", "/dev/null"))

    def new_name(self, path):
        if not self.ours(path) and not path.endswith(".tokens"):  # a cache that is gone is made anew
            self.names.add(path)

    def forget(self, path):
        below = lambda p: p == path or p.startswith(path + "/")
        self.files = {f for f in self.files if not below(f)}
        self.names = {n for n in self.names if not below(n)}

    def create(self, path, _):
        self.new_name(path)

    def write(self, path, _):
        if path.startswith("/") and not self.ours(path) and not os.path.basename(path).startswith("megatrain-scratch"):
            self.files.add(path)
        if os.path.basename(path) == "metrics.jsonl":  # another step is done: what was saved and set aside is durable
            left = [n for n in self.names if os.path.dirname(n) == self.out and "checkpoint-" in n]
            assert not left, f"not durable when the run went on: {left}"

    pwrite = truncate = write

    mkdir = link = create

    def fsync(self, path, _):
        self.files.discard(path)

    def fsync_dir(self, path, _):
        self.names = {n for n in self.names if os.path.dirname(n) != path}

    def rename(self, old, new):
        below = [f for f in self.files | self.names if f.startswith(old + "/")]
        assert not below and old not in self.files, f"{new} gets its name before these are durable: {below or old}"
        self.forget(old)
        self.forget(new)
        if new.endswith(".tmp"):
            self.nothing_waits(new)  # pruning
        else:
            self.new_name(new)

    def remove(self, path, _):
        self.forget(path)

    def nothing_waits(self, pruned):
        left = [n for n in self.names if os.path.dirname(n) == self.out and "checkpoint-" in n]
        assert not left, f"{pruned} is removed before these are durable: {left}"


def each_sync_of_a_run_is_there(p):
    log = os.path.join(p.tmp, "syncs")
    cache = os.path.join(p.tmp, "new", "cache")
    out = os.path.join(p.tmp, "new", "deep", "run")
    _, ini = p.ini("sync-run", checkpoint__dir=out, data__cache_dir=cache)
    follow = lambda *cmd: (megatrain_ok(p.watch("-q", *cmd, part=p.tmp, log=log)), Unsynced(log, out))
    follow("run", ini)
    # one that a killed save left complete except for its name
    last = os.path.join(out, f"checkpoint-{STEPS}")
    os.rename(last, last + ".tmp")
    follow("run", ini, "--resume", "--set", f"train.steps={STEPS + 2}")
    calls = [tuple(line.rstrip("\n").split("\t")[:3]) for line in open(log)]
    calls = [c for c in calls if c[0] in ("fsync", "fsync-dir", "rename") and c[1].startswith((last + ".tmp", out))]
    at = calls.index(("rename", last + ".tmp", last))
    synced = {("fsync", "/megatrain/seal.json"), ("fsync-dir", "/megatrain"), ("fsync-dir", "")}
    assert {c[:2] for c in calls[at - 3:at]} == {(call, last + ".tmp" + path) for call, path in synced}, calls
    assert calls[at + 1][:2] == ("fsync-dir", out), calls[at:at + 2]
    # later ones of a run that goes on from an earlier one, and all of another, are set aside
    keep = "--set", "checkpoint.keep=9", "--set", "checkpoint.every=1"
    follow("run", ini, "--resume", "--set", f"train.steps={STEPS + 6}", *keep)
    follow("run", ini, f"--resume={out}/checkpoint-{STEPS + 3}", "--set", f"train.steps={STEPS + 9}")
    assert [n for n in os.listdir(out) if f"checkpoint-{STEPS + 5}.abandoned" in n]
    follow("run", ini, "--force", "--set", "train.steps=3")
    megatrain("verify", os.path.join(out, "latest"))
    follow("export", os.path.join(out, "latest"), os.path.join(p.tmp, "other", "place"))


SHARD = """
import sys
sys.path.insert(0, sys.argv[1])
from megatrain_data.shard import LINES, ShardWriter
w = ShardWriter(sys.argv[2], 300, 7)
w.add([1, 2, 3], [True] * 3, [3], [1])
w.commit("text", LINES)
"""


def a_shard_of_the_helper_is_synced_before_it_has_its_name(p):
    log, shard = os.path.join(p.tmp, "helper"), os.path.join(p.tmp, "helper.tokens")
    inside = os.path.join(data_env.ROOT, ".venv-data", "bin", "python")
    python = inside if os.path.exists(inside) else sys.executable
    subprocess.run([TOOL, "-l", log, "-p", p.tmp, python, "-c", SHARD, os.path.join(data_env.ROOT, "scripts"), shard],
                   check=True)
    assert [line for line in open(log) if line.startswith("rename") and line.split("\t")[2] == shard]
    Unsynced(log, p.tmp)


def megatrain_ok(result):
    assert result[0] == 0, result


def a_folder_is_synced_when_a_save_is_tried_again(p):
    """The checkpoint has its name already; that this is durable is what failed."""
    log = os.path.join(p.tmp, "again")
    out, ini = p.ini("again-run", checkpoint__every=0, checkpoint__save_deadline="10m")
    megatrain_ok(p.watch("-q", "run", ini, log=log, part=p.tmp, fault="fsync-dir:EIO:0:0"))
    dirs = [line.split("\t") for line in open(log) if line.startswith(("fsync-dir", "rename"))]
    renamed = [i for i, d in enumerate(dirs) if d[0] == "rename" and d[2].endswith(f"/checkpoint-{STEPS}")][0]
    nth = 1 + sum(d[0] == "fsync-dir" for d in dirs[:renamed])
    shutil.rmtree(out)
    run = subprocess.Popen([TOOL, "-l", log, "-p", p.tmp, "-f", f"fsync-dir:EIO:{nth}:1", BINARY, "run", ini],
                           stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    said = ""
    while "trying again" not in said:
        line = run.stderr.readline()
        assert line, said
        said += line
    open(os.path.join(out, "SAVE"), "w").close()
    said += run.communicate()[1]
    assert run.returncode == 0, (run.returncode, said)
    Unsynced(log, out)


def a_file_system_is_tried_with_each_kind_of_sync(p):
    for call, nth, what in (("fsync", 1, "a file"), ("fsync-dir", 1, "a folder"), ("fsync-dir", 2, "a folder")):
        out, ini = p.ini("tried")
        os.makedirs(out)
        code, said, _ = p.watch("run", ini, fault=f"{call}:EIO:{nth}:1", part="tried")
        assert code == 1 and f"cannot sync {what}" in said and "step 1/" not in said, (call, nth, code, said)
        shutil.rmtree(out)


if __name__ == "__main__":
    if subprocess.run([TOOL, "true"]).returncode == 77:
        print("this system does not let a filter of system calls be watched")
        sys.exit(77)
    run_tests(globals(), Place, lambda p: f"{p.points} places, {p.failed} of them ended a run")
