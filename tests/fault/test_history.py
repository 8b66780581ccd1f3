# SPDX-License-Identifier: Apache-2.0
"""
A random walk over a run's life: train on, from the newest checkpoint or from any, with other settings, start anew,
stop by a signal, be killed, have bits turned and files removed, among folders that are not the run's. After each
step the newest durable state of the run must be the one that is resumed, bit for bit. What its bits are is known
from a second run, which has a folder to itself.
"""
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cli"))
from tiny import (BINARY, FULL, ORACLE, SLOW, base, config, megatrain, metrics, patience, planes, write_data, write_ini,  # noqa: E402
                  write_model)

STEPS = 2000 if FULL else 60 if SLOW else 80
SEED = int(os.environ.get("MEGATRAIN_TEST_SEED", "1"))
RATES = ("0.001", "0.01")
NAME = re.compile(r"checkpoint-(0|[1-9][0-9]{0,18})$")  # a step of 64 bits


def digest(folder):
    h = hashlib.sha256()
    for name, data in planes(folder).items():
        h.update(name.encode() + b"\0" + data)
    return h.hexdigest()


def tree(folder):
    """Every file's bytes, to see that nobody touched them."""
    h = hashlib.sha256()
    for at, dirs, names in os.walk(folder):
        dirs.sort()
        for n in sorted(set(names) - {".lock"}):
            h.update(os.path.join(at[len(folder):], n).encode() + b"\0" + open(os.path.join(at, n), "rb").read())
    return h.hexdigest()


def seal(folder):
    try:
        return open(os.path.join(folder, "megatrain", "seal.json")).read()
    except OSError:
        return None


class Entry:
    """A checkpoint with training state, as it was when its save was done."""

    def __init__(self, step, bits, rate, folder, past):
        self.step, self.bits, self.rate, self.past = step, bits, rate, past
        self.seal = seal(folder)
        self.damaged = self.short = False  # by this test: anyhow; so that its size shows it


class Walk:
    def __init__(self, tmp, rng):
        self.tmp, self.rng, self.out = tmp, rng, os.path.join(tmp, "out")
        self.model = write_model(os.path.join(tmp, "model"), config(
            "qwen3", num_hidden_layers=1, hidden_size=16, intermediate_size=24, num_attention_heads=2,
            num_key_value_heads=1, head_dim=8))
        self.data = write_data(os.path.join(tmp, "data.jsonl"), n=20, longest=30)
        self.known = {}    # (bits of the source or None, rate) -> bits and weights after each step
        self.past = []     # the run's checkpoints, oldest first
        self.entries = []  # all there ever were
        self.foreign = {}  # path -> what is in it
        self.counts = {}
        self.log = []  # for who looks for what went wrong

    def ini(self, out, **over):
        return write_ini(out + ".ini", base(
            self.model, self.data, out, train__steps=100000, train__warmup=0, train__schedule="constant",
            data__seq_len=32, data__eval="", train__batch_size=1, train__micro_batch=1, device__cpu_threads=1,
            checkpoint__keep=100, memory__device_budget="4MiB", **over))

    # --- what the bits should be

    def expected(self, source, folder, rate, k):
        """(bits, weights) k steps after the source, from a run in a folder of its own."""
        key = source.bits if source else None, rate
        have = self.known.setdefault(key, [])
        if len(have) < k:
            own = os.path.join(self.tmp, "own")
            shutil.rmtree(own, ignore_errors=True)
            ini = self.ini(own, checkpoint__every=1)
            extra = [f"--resume={folder}", "--force"] if source else []
            megatrain("-q", "run", ini, *extra, "--set", f"train.learning_rate={rate}", "--max-steps", k,
                      binary=ORACLE)
            first = source.step if source else 0
            have[:] = []
            for s in range(first + 1, first + k + 1):
                c = os.path.join(own, f"checkpoint-{s}")
                have.append((digest(c), open(os.path.join(c, "model.safetensors"), "rb").read()))
        return have[k - 1]

    # --- what is in the folder

    def path(self, e):
        return os.path.join(self.out, f"checkpoint-{e.step}")

    def alive(self, e):
        return e.seal and seal(self.path(e)) == e.seal

    def newest(self):
        good = [e for e in self.past if self.alive(e) and not e.damaged]
        return good[-1] if good else None

    def names(self):
        return sorted(os.listdir(self.out)) if os.path.isdir(self.out) else []

    def has_checkpoints(self):
        return any(NAME.match(n) for n in self.names())

    def check_foreign(self, forced):
        for path, was in list(self.foreign.items()):
            now = path
            if forced and NAME.match(os.path.basename(path)) and not os.path.isdir(path):  # set aside, not removed
                aside = [n for n in self.names() if n.startswith(os.path.basename(path) + ".abandoned-")]
                aside = [p for p in (os.path.join(self.out, n) for n in aside) if tree(p) == was]
                assert aside, (path, self.names())
                now = aside[0]
                del self.foreign[path]
                self.foreign[now] = was
            assert os.path.isdir(now) and tree(now) == was, f"{path} is not as it was"

    # --- a run of the program

    def run(self, source, folder, rate, k, keep, every, full, args, how):
        """Trains k steps from the source; how: to the end, ended by a signal, or killed."""
        ini = self.ini(self.out, checkpoint__every=every)
        cmd = [BINARY, "--no-progress", "run", ini, *args, "--set", f"train.learning_rate={rate}", "--set",
               f"checkpoint.keep={keep}", "--set", f"checkpoint.save={'full' if full else 'weights'}",
               "--max-steps", str(k)]
        before = {seal(os.path.join(self.out, n)) for n in self.names()}
        p = subprocess.Popen(cmd, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if how == "kill":
            time.sleep(self.rng.random() * 0.03)
            p.kill()
        try:
            err = p.communicate(timeout=patience(120))[1]
        except subprocess.TimeoutExpired:
            for task in os.listdir(f"/proc/{p.pid}/task"):
                for name in ("comm", "wchan", "syscall", "stat"):
                    print(task, name, open(f"/proc/{p.pid}/task/{task}/{name}").read().strip(), file=sys.stderr)
            p.kill()
            raise
        if how == "end":
            assert p.returncode == 0, (cmd, p.returncode, err)
        if source and p.returncode == 0:
            assert f"resuming from {folder}\n" in err, (folder, err)
        first = source.step if source else 0
        saved = [int(n) for n in re.findall(r"saved checkpoint-([0-9]+)", err)]
        if how == "end":
            want = sorted({s for s in range(first + 1, first + k + 1) if every and s % every == 0} | {first + k})
            assert saved == want, (saved, want, err)
        else:  # the last one may be there although nobody was told
            more = [s for s in range(max([first, *saved]) + 1, first + k + 1) if (every and s % every == 0) or s == first + k]
            path = os.path.join(self.out, f"checkpoint-{more[0]}") if more else ""
            tmp = path + ".tmp" if not os.path.isdir(path) else path
            if more and os.path.isdir(tmp) and seal(tmp) not in before and \
                    megatrain("-q", "verify", tmp, expect=None).returncode == 0:
                saved.append(more[0])
        return saved, err

    def after(self, source, rate, saved, keep, full, told):
        """The saves that were made, in the model of the run."""
        past = list(source.past) + [source] if source else []
        new = []
        for s in saved:
            first = source.step if source else 0
            bits, weights = self.expected(source, None if not source else self.copy, rate, s - first)
            path = os.path.join(self.out, f"checkpoint-{s}")
            if not os.path.isdir(path):
                if os.path.isdir(path + ".tmp"):
                    path += ".tmp"
                else:  # removed by `keep` since, which is checked below
                    new.append(Entry(s, bits, rate, path, []))
                    continue
            assert open(os.path.join(path, "model.safetensors"), "rb").read() == weights, f"{path}: other weights"
            if full:
                assert digest(path) == bits, f"{path}: other bits than were trained"
                e = Entry(s, bits, rate, path, list(past))
                past.append(e)
                self.entries.append(e)
                new.append(e)
        if saved:
            self.past = past
        if saved and told and full:
            whole = [e for e in past if e in self.were_alive and not e.short and e not in new] + new
            for e in whole[-keep:]:
                assert self.alive(e), (f"checkpoint-{e.step} is gone", keep, [x.step for x in whole], self.names())
            for e in whole[:-keep]:
                assert not self.alive(e), (f"checkpoint-{e.step} stays", keep, [x.step for x in whole], self.names())

    def train(self, how="end"):
        r = self.rng
        old = self.newest()
        source, args, forced = old, ["--resume"], False
        pick = r.random()
        rate = source.rate if source else r.choice(RATES)
        if pick < 0.25 and self.entries:
            usable = [(e, os.path.join(self.out, n)) for e in self.entries[-20:] for n in self.names()
                      if not e.damaged and n.startswith(f"checkpoint-{e.step}") and not n.endswith(".tmp")
                      and seal(os.path.join(self.out, n)) == e.seal]
            if usable:
                source, folder = r.choice(usable)
                args = [f"--resume={folder}"]
                rate = source.rate
        elif pick < 0.32:
            source, args, forced = None, ["--force"], True
        if source is None and not forced:
            if self.has_checkpoints():
                return self.refused()
            args = ["--resume"]
        if source and r.random() < 0.3:
            rate = r.choice(RATES)
            if rate != source.rate:
                args.append("--force")
        folder = args[0].split("=")[1] if "=" in args[0] else self.path(source) if source else None
        if source:  # its folder may be gone when the bits after it are wanted
            self.copy = os.path.join(self.tmp, "copy")
            shutil.rmtree(self.copy, ignore_errors=True)
            shutil.copytree(folder, self.copy)
        k, keep, every, full = r.randrange(1, 4), r.randrange(1, 4), r.choice((0, 1, 2)), r.random() < 0.85
        self.were_alive = [e for e in self.entries if self.alive(e)]
        saved, err = self.run(source, folder, rate, k, keep, every, full, args, how)
        self.log.append((how, args, rate, k, keep, every, full, saved, self.names(), err))
        self.after(source, rate, saved, keep, full, None if how == "kill" else "kept")
        if forced and (saved or not self.has_checkpoints()):
            self.past = self.past if saved and full else []
        self.check_foreign(forced)

    def killed(self):
        self.train("kill")

    def refused(self):
        """Nothing can be resumed: that is said, and nothing is touched."""
        before = self.names(), tree(self.out)
        p = megatrain("-q", "run", self.ini(self.out), "--resume", "--max-steps", 1, expect=None)
        assert p.returncode == 7, (p.returncode, p.stderr, before[0])
        assert (self.names(), tree(self.out)) == before, self.names()
        p = megatrain("-q", "run", self.ini(self.out), "--resume", "--force", "--max-steps", 1, expect=None)
        assert p.returncode == 7 and "--force alone" in p.stderr, (p.returncode, p.stderr, before[0])
        assert (self.names(), tree(self.out)) == before, self.names()
        rate = self.rng.choice(RATES)
        self.copy = None
        self.were_alive = []
        saved, _ = self.run(None, None, rate, 2, 2, 0, True, ["--force"], "end")
        self.after(None, rate, saved, 2, True, "kept")
        self.past = self.past if saved else []
        self.check_foreign(True)

    # --- what happens to the folder

    def damage(self):
        here = [e for e in self.past if self.alive(e)]
        if not here:
            return
        e = here[-1] if self.rng.random() < 0.6 else self.rng.choice(here)
        files = [os.path.join(at, n) for at, _, names in os.walk(self.path(e)) for n in names
                 if n not in ("seal.json",)]
        path = self.rng.choice(sorted(files))
        e.damaged = True
        if self.rng.random() < 0.25:
            os.remove(path)
            e.short = True
            return
        with open(path, "r+b") as f:
            at = self.rng.randrange(os.path.getsize(path))
            f.seek(at)
            c = f.read(1)[0] ^ 1 << self.rng.randrange(8)
            f.seek(at)
            f.write(bytes([c]))
        e.short = path.endswith("state.json")

    def foreign_folder(self):
        """Folders that look like checkpoints of this run and are none."""
        name = self.rng.choice(("checkpoint-20251101", "checkpoint-007", "checkpoint-18446744073709551617",
                                "checkpoint-best", "checkpoint-best.tmp", "checkpoint-3.bak", "checkpoint-+4"))
        path, e = os.path.join(self.out, name), self.newest()
        if not e or os.path.exists(path):
            return
        shutil.copytree(self.path(e), path)
        self.foreign[path] = tree(path)

    def step(self):
        what = self.rng.choices((self.train, self.killed, self.damage, self.foreign_folder), (60, 15, 18, 5))[0]
        self.counts[what.__name__] = self.counts.get(what.__name__, 0) + 1
        what()


if __name__ == "__main__":
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # syncs take most of the time elsewhere
    with tempfile.TemporaryDirectory(dir=memory) as tmp_dir:
        walk = Walk(tmp_dir, random.Random(SEED))
        t0 = time.time()
        for i in range(STEPS):
            try:
                walk.step()
            except BaseException:
                print(f"step {i} of seed {SEED}", *walk.log[-4:], sep="\n", file=sys.stderr)
                raise
        print(f"ok {STEPS} steps, {walk.counts}, {time.time() - t0:.1f} s", flush=True)
