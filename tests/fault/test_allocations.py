# SPDX-License-Identifier: Apache-2.0
"""
Memory runs out, at each place where the program's own code asks for some, or cJSON for it: once, and from there on.
Each command then says so or does all that it was asked for; nothing ends by a signal; what has a checkpoint's name
verifies, and a run goes on from the newest to the bits of a run that nothing happened to.
"""
import os
import shutil
import signal
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cli"))
from runner import run_tests  # noqa: E402
from tiny import BINARY, FULL, losses, megatrain, patience, planes  # noqa: E402
import test_syscalls  # noqa: E402

LIBRARY = os.environ["MEGATRAIN_ALLOCATIONS"]
STEPS = test_syscalls.STEPS
NO_MEMORY = 4  # "does not fit"
UNREAD = 7     # a checkpoint that cannot be read at the moment: said to say nothing of its bytes
# How a run ends where a library has no memory, beside well: src/checkpoint/README.md has this list for readers.
CRASHES = {-signal.SIGABRT, -signal.SIGSEGV}
LIBRARIES = {
    "libdnnl,libstdc++": CRASHES,
    "libgomp": {1},
    "libhwloc": {1, "hangs"} | CRASHES,
    "libnuma": {1},
    "liburing": set(),
}


class Place(test_syscalls.Place):
    def __init__(self, tmp):
        super().__init__(tmp)
        self.half = os.path.join(tmp, "half")  # a run that has come half-way
        out, self.half_ini = self.ini("half")
        megatrain("-q", "run", self.half_ini, "--max-steps", 2)
        shutil.copytree(self.half, self.half + ".was")
        self.codes = {}

    def short(self, cmd, fail=None, log=None, begin=None, within=None, timeout=120):
        over = {"ALLOCATIONS_FAIL": fail, "ALLOCATIONS_LOG": log, "ALLOCATIONS_AFTER": begin, "ALLOCATIONS_IN": within}
        env = {**os.environ, "LD_PRELOAD": LIBRARY, **{k: v for k, v in over.items() if v}}
        p = subprocess.run([BINARY, *map(str, cmd)], capture_output=True, text=True, env=env, timeout=patience(timeout))
        return p.returncode, p.stdout, p.stderr

    def sweep(self, name, cmd, again, after):
        """again() puts back what the command changes; after(what, code, output) looks at what it left."""
        log = os.path.join(self.tmp, "allocations")
        again()
        code, want, said = self.short(cmd, log=log)
        assert code == 0, (name, code, said)
        again()
        places = chosen(open(log).read().split())
        for count in (1, 0):
            for at in places if count or FULL else places[::3]:
                what = f"{name}: allocation {at}, " + ("alone" if count else "and all that follow")
                code, out, said = self.short(cmd, fail=f"{at}:{count}")
                assert code in (0, NO_MEMORY) or "memory" in said and code == UNREAD, (what, code, said[-600:])
                assert code == 0 or said.strip(), what
                self.codes[name, code] = self.codes.get((name, code), 0) + 1
                after(what, code, out == want)
                again()


def chosen(sites):
    """Numbers of allocations: of each place in the code the first and the last, more of those that make many."""
    at = {}
    for n, site in enumerate(sites, 1):
        at.setdefault(site, []).append(n)
    some = set()
    for numbers in at.values():
        some |= {*numbers[:4], numbers[-1], *numbers[::max(1, len(numbers) // 40)]} if FULL else {numbers[0], numbers[-1]}
    return sorted(some) if FULL else sorted(some)[::12]


def saves_and_steps(p):
    out, ini = p.ini("short")
    def after(what, code, _):
        if code == 0:
            assert planes(os.path.join(out, f"checkpoint-{STEPS}")) == p.want[1], what
        p.go_on(what, out, ini)
    p.sweep("run", ["run", ini], lambda: shutil.rmtree(out, ignore_errors=True), after)


def no_step_is_lost(p):
    """Once there is something to lose, a single failure ends nothing, but for one of reading data: that is after a save."""
    out, ini = p.ini("begun")
    begin, log = os.path.join(out, "metrics.jsonl"), os.path.join(p.tmp, "allocations")
    assert p.short(["run", ini], log=log, begin=begin)[0] == 0
    sites = open(log).read().split()
    for at in chosen(sites) if FULL else sorted({sites.index(s) + 1 for s in sites})[::3]:
        shutil.rmtree(out)
        code, _, said = p.short(["run", ini], fail=f"{at}:1", begin=begin)
        done = max([s for s, _, _ in losses(out)], default=0)
        assert code == 0 or os.path.isdir(os.path.join(out, f"checkpoint-{done}")), (at, sites[at - 1], done, code, said)
        if code == 0:
            assert planes(os.path.join(out, f"checkpoint-{STEPS}")) == p.want[1], (at, said)
        p.codes["begun", code] = p.codes.get(("begun", code), 0) + 1


def resuming(p):
    def again():
        shutil.rmtree(p.half)
        shutil.copytree(p.half + ".was", p.half)
    p.sweep("run --resume", ["run", p.half_ini, "--resume"], again, lambda what, code, _: p.go_on(what, p.half, p.half_ini))


def libraries_that_end_a_run_lose_nothing_that_was_saved(p):
    """Some end the process on the spot; the list of those that do is as it is documented."""
    os.environ["MEGATRAIN_CPU_GEMM"] = "bf16"  # oneDNN's products on every CPU
    wanted, counts = p.want, {}
    out, ini = p.ini("libraries", model__dtype="bf16")
    begin = os.path.join(out, "checkpoint-2")
    megatrain("-q", "run", ini)
    p.want = losses(out), planes(os.path.join(out, f"checkpoint-{STEPS}"))
    for library, ends in LIBRARIES.items():
        for after in (None, begin):
            log = os.path.join(p.tmp, "allocations")
            shutil.rmtree(out)
            assert p.short(["run", ini], log=log, begin=after, within=library)[0] == 0
            sites = open(log).read().split()
            for at in sorted({*chosen(sites)[:40 if FULL else 1], *[len(sites)] * bool(after and sites)}):
                for count in (1, 0):
                    shutil.rmtree(out, ignore_errors=True)
                    try:
                        code, _, said = p.short(["run", ini], f"{at}:{count}", None, after, library, 20)
                    except subprocess.TimeoutExpired:
                        code, said = "hangs", ""
                    what = library, at, count, code, said[-300:]
                    assert code == 0 or code in ends, what
                    assert not after or {"checkpoint-2", f"checkpoint-{STEPS}"} & set(os.listdir(out)), what
                    p.go_on(what, out, ini)
                    counts[library, code] = counts.get((library, code), 0) + 1
    assert "libhwloc" in {library for library, _ in counts}
    print(*(f"{library} {code}: {n}" for (library, code), n in counts.items()), sep=", ")
    p.want = wanted
    del os.environ["MEGATRAIN_CPU_GEMM"]


def configurations_and_reports(p):
    page = os.path.join(p.tmp, "page.html")
    to = os.path.join(p.tmp, "exported")
    checkpoint = os.path.join(p.half + ".was", "checkpoint-2")
    nothing = lambda *_: None
    def same(what, code, equal):
        assert code or equal, f"{what}: another output, and success"
    p.sweep("config show", ["config", "show", p.half_ini], nothing, same)
    p.sweep("verify", ["verify", checkpoint], nothing, same)
    p.sweep("report", ["report", p.half + ".was", "--html", page], nothing, nothing)
    def exported(what, code, _):
        if code == 0:
            megatrain("verify", to)
        assert code == 0 or not [n for n in os.listdir(p.tmp) if n.startswith("exported")], what
    p.sweep("export", ["export", checkpoint, to], lambda: shutil.rmtree(to, ignore_errors=True), exported)


def data_made_anew(p):
    cache = os.path.join(p.tmp, "cold")
    _, ini = p.ini("cold-run", data__cache_dir=cache)
    again = lambda: shutil.rmtree(cache, ignore_errors=True)
    def after(what, code, equal):
        if code == 0:
            assert equal, what
        megatrain("-q", "data", "stats", ini)  # what is left there serves, or is made anew
    p.sweep("data stats", ["data", "stats", ini, "--json"], again, after)


if __name__ == "__main__":
    run_tests(globals(), Place, lambda p: f"{sum(p.codes.values())} places: " + ", ".join(
        f"{n} {c}: {k}" for (n, c), k in sorted(p.codes.items())))
