# SPDX-License-Identifier: Apache-2.0
"""
Runs from disk with broken drives and full file systems: each ends with its exit code and says which file, or
goes on; the newest checkpoint stays good, and resuming gives the bits of a run that nothing happened to.
"""
import errno
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cli"))
from tiny import (BINARY, FULL, SLOW, base, config, losses, megatrain, metrics, planes,  # noqa: E402
                  write_data, write_ini, write_model)

PIECES = {"MEGATRAIN_DISK_PIECE": "2048"}
STEPS = 6


class Place:
    """A model, a folder for scratch and what an unbroken run gives."""

    def __init__(self, tmp):
        self.tmp = tmp
        self.drive = os.path.join(tmp, "drive")
        os.makedirs(self.drive)
        self.model = write_model(os.path.join(tmp, "model"), config("qwen3", num_hidden_layers=3))
        self.data = write_data(os.path.join(tmp, "data.jsonl"))
        out, ini = self.ini("want", memory__states="host")
        megatrain("-q", "run", ini)
        self.want = losses(out), planes(os.path.join(out, f"checkpoint-{STEPS}"))

    def ini(self, name, **over):
        out = os.path.join(self.tmp, name)
        sections = {"memory__states": "disk", "memory__nvme_paths": self.drive, "train__steps": STEPS,
                    "checkpoint__every": 2, **over}
        return out, write_ini(out + ".ini", base(self.model, self.data, out, **sections))

    def check(self, name, out, ini):
        """Resumes without faults and compares."""
        for n in os.listdir(out):
            if n.startswith("checkpoint-") and not n.endswith(".tmp"):
                megatrain("verify", os.path.join(out, n))
        megatrain("-q", "run", ini, "--resume", env=PIECES)
        assert losses(out) == self.want[0], f"{name}: losses differ"
        assert planes(os.path.join(out, f"checkpoint-{STEPS}")) == self.want[1], f"{name}: planes differ"
        assert not os.listdir(self.drive), f"{name}: scratch is left"


def broken_transfers_end_the_run_and_leave_the_checkpoint(p):
    codes = {"eio": 1, "enospc": 4, "zero": 1}
    seen = set()
    for direction in ("read", "write"):
        for kind in codes:
            for n in range(3, 900, 40 if FULL else 421 if SLOW else 211):
                name = f"{direction}-{kind}-{n}"
                out, ini = p.ini(name)
                r = megatrain("-q", "run", ini, env={**PIECES, "MEGATRAIN_IO_FAULT": f"{direction}:{kind}:{n}:60"}, expect=None)
                seen.add(r.returncode)
                if r.returncode == 0:
                    continue
                assert r.returncode == codes[kind], (name, r.returncode, r.stderr)
                assert "megatrain-scratch-" in r.stderr and "offset" in r.stderr, (name, r.stderr)
                assert f"cannot {direction}" in r.stderr, (name, r.stderr)
                p.check(name, out, ini)
                shutil.rmtree(out)
    assert {1, 4} <= seen, seen


def what_a_drive_changes_in_silence_never_reaches_a_result(p):
    """Turned bits, lost, late and misplaced transfers: the bits of an unbroken run, or an end that names the drive."""
    rng = random.Random(5)
    stopped = 0
    for n in range(1000 if FULL else 6):
        fault = f"{rng.choice(('read', 'write', 'any'))}:{rng.choice(('flip', 'stale', 'swap', 'drop'))}:" \
                f"{rng.randrange(1, 1500)}:{rng.choice((1, 2, 0))}"
        out, ini = p.ini("silent")
        r = megatrain("-q", "run", ini, env={**PIECES, "MEGATRAIN_IO_FAULT": fault}, expect=None)
        assert r.returncode in (0, 1), (fault, r.returncode, r.stderr)
        if r.returncode:
            stopped += 1
            assert "not what was written" in r.stderr and p.drive in r.stderr and "unit " in r.stderr, (fault, r.stderr)
        p.check(fault, out, ini)
        shutil.rmtree(out)
    assert stopped > 1


def what_a_crash_leaves_on_a_drive_is_never_trusted(p):
    """Whatever became of scratch in a power cut: a run goes on from its checkpoint, and the scratch is removed."""
    rng = random.Random(3)

    def torn(path):
        with open(path, "r+b") as f:
            for at in range(0, os.path.getsize(path), 512):
                if rng.random() < 0.5:
                    f.seek(at)
                    f.write(rng.randbytes(512))

    def cut(path):
        os.truncate(path, rng.randrange(os.path.getsize(path)))
    for name, change in {"as it was": lambda path: None, "torn": torn, "cut": cut, "empty": lambda path: os.truncate(path, 0),
                         "twice": lambda path: shutil.copy(path, path[:-6] + "aaaaaa"), "gone": os.remove}.items():
        out, ini = p.ini("crash")
        run = subprocess.Popen([BINARY, "-q", "run", ini], env={**os.environ, **PIECES}, stderr=subprocess.DEVNULL)
        while not os.path.exists(os.path.join(out, "checkpoint-2")) and run.poll() is None:
            time.sleep(0.001)
        run.kill()
        run.wait()
        for left in [os.path.join(p.drive, n) for n in os.listdir(p.drive)]:
            change(left)
        p.check(name, out, ini)
        shutil.rmtree(out)


def a_drive_that_stays_broken_ends_the_run(p):
    out, ini = p.ini("stays")
    r = megatrain("-q", "run", ini, env={**PIECES, "MEGATRAIN_IO_FAULT": "any:eio:200:0"}, expect=1)
    assert "Input/output error" in r.stderr
    p.check("stays", out, ini)


def space_that_is_short_is_refused_before_anything_is_done(p):
    """A limit on file sizes stands in for a small drive; a small file system where one may be mounted."""
    out, ini = p.ini("short")
    cap = lambda: (signal.signal(signal.SIGXFSZ, signal.SIG_IGN),
                   resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, resource.RLIM_INFINITY)))
    r = subprocess.run([BINARY, "-q", "run", ini], capture_output=True, text=True, preexec_fn=cap)
    assert r.returncode == 4, (r.returncode, r.stderr)
    assert "of scratch are needed" in r.stderr and p.drive in r.stderr, r.stderr
    assert not os.listdir(p.drive)
    with Small(p.tmp, "768k") as small:
        if not small:
            return
        out, ini = p.ini("small", memory__nvme_paths=small)
        r = megatrain("-q", "run", ini, expect=4)
        assert "short" in r.stderr and "memory.nvme_paths" in r.stderr, r.stderr
        assert not os.path.exists(os.path.join(out, "checkpoint-2"))


def memory_that_is_short_is_refused_before_anything_is_done(p):
    """By the limit on address space; by the control group's, where one may be made."""
    out, ini = p.ini("rlimit", memory__states="host")
    cap = lambda: resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29))
    if subprocess.run([BINARY, "--version"], capture_output=True, preexec_fn=cap).returncode:
        print("a sanitizer's build takes more memory than these limits: this test is left out", flush=True)
        return
    r = subprocess.run([BINARY, "-q", "run", ini, "--set", "memory.device_budget=376MiB"], capture_output=True, text=True,
                       preexec_fn=cap)
    assert r.returncode == 4 and "it will not fit" in r.stderr, (r.returncode, r.stderr)
    group = f"/sys/fs/cgroup/memory/megatrain-test-{os.getpid()}"
    join = lambda: open(group + "/cgroup.procs", "w").write(str(os.getpid()))
    try:
        os.mkdir(group)
    except OSError as e:
        print(f"no control group may be made here ({e}): the rest of this test is left out", flush=True)
        return
    try:
        for limit, code in ((48 << 20, 4), (96 << 20, 0)):
            with open(group + "/memory.limit_in_bytes", "w") as f:
                f.write(str(limit))
            out, ini = p.ini(f"cgroup-{limit}")
            r = subprocess.run([BINARY, "-q", "run", ini], capture_output=True, text=True, preexec_fn=join,
                               env={**os.environ, **PIECES})
            assert r.returncode == code and ("it will not fit" in r.stderr) == (code == 4), (r.returncode, r.stderr)
        assert losses(out) == p.want[0]
    finally:
        os.rmdir(group)


def a_folder_that_is_gone_or_read_only_is_named(p):
    out, ini = p.ini("gone", memory__nvme_paths=os.path.join(p.tmp, "nowhere"))
    r = megatrain("-q", "run", ini, expect=2)
    assert "nowhere" in r.stderr and "memory.nvme_paths" in r.stderr, r.stderr
    with Small(p.tmp, "4m", "ro") as small:
        if small:
            out, ini = p.ini("readonly", memory__nvme_paths=small)
            r = megatrain("-q", "run", ini, expect=2)
            assert "Read-only" in r.stderr and small in r.stderr, r.stderr


def a_file_system_without_room_for_a_checkpoint_keeps_the_last(p):
    """Checkpoints go to a file system that holds one and not two: the run goes on and says so."""
    with Small(p.tmp, "3600k") as small:
        if not small:
            return
        out = os.path.join(small, "run")
        ini = write_ini(os.path.join(p.tmp, "fills.ini"),
                        base(p.model, p.data, out, train__steps=STEPS, checkpoint__every=2, checkpoint__keep=1,
                             memory__states="disk", memory__nvme_paths=p.drive, checkpoint__save_deadline="1s"))
        r = megatrain("-v", "run", ini, env=PIECES, expect=None)
        assert r.returncode == 4, (r.returncode, r.stderr)
        assert "not saved" in r.stderr, r.stderr
        assert len([m for m in metrics(out) if "loss" in m]) == STEPS
        megatrain("verify", os.path.join(out, "checkpoint-2"))
        left = [n for n in os.listdir(out) if n.endswith(".tmp")]
        assert not left, left


def tmpfs_works_as_a_drive(p):
    with Small(p.tmp, "64m") as small:
        if small:
            out, ini = p.ini("tmpfs", memory__nvme_paths=small)
            megatrain("-q", "run", ini, env=PIECES)
            assert losses(out) == p.want[0]


def reserved_space_stays_reserved_where_writes_go_elsewhere(p):
    """File systems that copy on write: the drive fills to its last byte while the run goes on."""
    for kind, size, options in (("btrfs", "160M", "compress=zstd"), ("xfs", "320M", "defaults")):
        with Image(p.tmp, kind, size, options) as drive:
            if not drive:
                continue
            out, ini = p.ini("on-" + kind, memory__nvme_paths=drive)
            run = subprocess.Popen([BINARY, "run", ini], env={**os.environ, **PIECES}, stderr=subprocess.PIPE, text=True)
            while "step 1/" not in (line := run.stderr.readline()):
                assert line, "the run ended before its first step"
            run.send_signal(signal.SIGSTOP)
            fill(os.path.join(drive, "filled"))
            run.send_signal(signal.SIGCONT)
            said = run.communicate()[1]
            assert run.returncode == 0, (kind, said)
            assert losses(out) == p.want[0], kind


def fill(path):
    """Random bytes, so that none can be left out."""
    with open(path, "wb", buffering=0) as f:
        for size in (1 << 20, 4096):
            try:
                while True:
                    f.write(os.urandom(size))
                    os.fsync(f.fileno())
            except OSError as e:
                assert e.errno == errno.ENOSPC, e


class Mount:
    """A file system, mounted; None where that is not allowed."""

    def __init__(self, tmp, args):
        self.path, self.args, self.mounted = tempfile.mkdtemp(dir=tmp), args, False

    def __enter__(self):
        self.mounted = subprocess.run(["mount", *self.args, self.path], capture_output=True).returncode == 0
        if not self.mounted:
            print("mounting is not allowed here: the rest of this test is left out", flush=True)
        return self.path if self.mounted else None

    def __exit__(self, *exc):
        for left in reversed(range(100 if self.mounted else 0)):
            # The kernel closes the files of a ring some time after the process ended.
            if subprocess.run(["umount", self.path], capture_output=True, check=not left).returncode == 0:
                break
            time.sleep(0.1)


class Small(Mount):
    """A small tmpfs."""

    def __init__(self, tmp, size, options=""):
        options = f"size={size}" + ("," + options if options else "")
        super().__init__(tmp, ["-t", "tmpfs", "-o", options, "megatrain-test"])


class Image(Mount):
    """A file system of another kind, in a file; None also where its tools are missing."""

    def __init__(self, tmp, kind, size, options):
        self.image = os.path.join(tmp, "image." + kind)
        super().__init__(tmp, ["-o", "loop," + options, self.image])
        subprocess.run(["truncate", "-s", size, self.image], check=True)
        tool = shutil.which("mkfs." + kind, path=os.environ["PATH"] + ":/usr/sbin:/sbin")
        if tool:
            subprocess.run([tool, "-q", "-f", self.image], check=True, capture_output=True)

    def __exit__(self, *exc):
        super().__exit__(*exc)
        os.remove(self.image)


TESTS = [v for v in list(globals().values()) if callable(v) and getattr(v, "__code__", None)
         and v.__code__.co_varnames[:1] == ("p",)]

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as tmp_dir:
        place = Place(tmp_dir)
        for test in TESTS:
            if len(sys.argv) > 1 and test.__name__ not in sys.argv[1:]:
                continue
            test(place)
            print(f"ok {test.__name__}", flush=True)
