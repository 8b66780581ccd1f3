#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""limit.py BUILD FACTOR COMMAND...: runs a test for `meson test` and ends it when it has used more processor time than it
may, or is stuck. A busy machine is no failure: the limit is FACTOR x the test's `timeout` in processor seconds of all its
processes, 20 times that with MEGATRAIN_TEST_FULL, and a test is stuck if for three minutes nearly none of its threads ran or
waited for a processor or a drive.
With MEGATRAIN_TEST_TIMES=FILE a line is added to FILE: the test's name, processor seconds, seconds, exit status."""
import json
import os
import select
import signal
import sys
import time

TICK = os.sysconf("SC_CLK_TCK")
STUCK_AFTER, BUSY_SHARE = 180, 0.1  # samples, one a second; a loop that looks every few milliseconds is below a tenth


def test_of(build, command):
    """The name and the limit in seconds of the test with this command line; the largest limit of several."""
    try:
        with open(os.path.join(build, "meson-info", "intro-tests.json")) as f:
            tests = [t for t in json.load(f) if t["cmd"] == command]
    except OSError:
        tests = []
    names = [t["name"] for t in tests if all(os.environ.get(k) == v for k, v in t["env"].items())]
    limits = [t["timeout"] for t in tests]
    return (names or [" ".join(command)])[0], max(limits, default=30) if all(limits) else 0


def processes(session):
    """(pid, processor seconds, with those of children that have ended) of a session's processes and of those that they
    started in sessions of their own, as scripts/gpu-check does."""
    parent, used, found = {}, {}, set()
    for pid in os.listdir("/proc"):
        try:
            if pid.isdigit():
                with open(f"/proc/{pid}/stat") as f:
                    field = f.read().rpartition(") ")[2].split()
                parent[int(pid)], used[int(pid)] = int(field[1]), sum(map(int, field[11:15])) / TICK
                if int(field[3]) == session:
                    found.add(int(pid))
        except OSError:
            pass  # it has ended
    new = found
    while new:
        new = {pid for pid in parent if parent[pid] in new} - found
        found = found | new
    return [(pid, used[pid]) for pid in found]


def wants_to_run(pid):
    """Whether a thread of the process runs, or waits for a processor or a drive."""
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/stat") as f:
                if f.read().rpartition(") ")[2][0] in "RD":
                    return True
    except OSError:
        pass
    return False


def watch(child, session, limit):
    """Waits for the child. Why it has to end before that, or None."""
    fd, seen, used_before = os.pidfd_open(child), [], 0
    ended = select.poll()
    ended.register(fd, select.POLLIN)
    while not ended.poll(1000):
        others = [(pid, used) for pid, used in processes(session) if pid != os.getpid()]
        used = sum(u for _, u in others)
        if limit and used > limit:
            return f"it used {used:.0f} processor seconds; its limit is {limit:.0f}"
        seen.append(used - used_before > BUSY_SHARE or any(wants_to_run(pid) for pid, _ in others))
        used_before = used
        if sum(seen[-STUCK_AFTER:]) < BUSY_SHARE * STUCK_AFTER and len(seen) >= STUCK_AFTER:
            return f"it is stuck: for {STUCK_AFTER} s it has done next to nothing"
    return None


def main(build, factor, *command):
    name, limit = test_of(build, list(command))
    own_session = os.getsid(0) == os.getpid()  # as meson starts tests
    began, child = time.monotonic(), os.fork()
    if child == 0:
        try:
            if not own_session:
                os.setsid()
            os.execvp(command[0], command)
        except OSError as e:
            print(f"{command[0]}: {e.strerror}", file=sys.stderr)
            os._exit(127)
    session = os.getpid() if own_session else child
    why = watch(child, session, limit * float(factor) * (20 if os.environ.get("MEGATRAIN_TEST_FULL") else 1))
    if why:
        print(f"limit.py: {name}: {why}", file=sys.stderr, flush=True)
        for pid, _ in processes(session):
            if pid != os.getpid():
                os.kill(pid, signal.SIGKILL)
    _, status, usage = os.wait4(child, 0)
    code = os.waitstatus_to_exitcode(status)
    code = 1 if why else code if code >= 0 else 128 - code
    if os.environ.get("MEGATRAIN_TEST_TIMES"):
        with open(os.environ["MEGATRAIN_TEST_TIMES"], "a") as f:
            f.write(f"{name}\t{usage.ru_utime + usage.ru_stime:.2f}\t{time.monotonic() - began:.2f}\t{code}\n")
    return code


sys.exit(main(*sys.argv[1:]))
