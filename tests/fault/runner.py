# SPDX-License-Identifier: Apache-2.0
"""Runs the tests of a file: its functions whose first parameter is `p`, the place that they share, in their order."""
import os
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cli"))
from tiny import base, config, megatrain, write_data, write_ini, write_model  # noqa: E402


class FinishedRun:
    """Two steps of a small model: its folders, its configuration and its checkpoint."""

    def __init__(self, tmp, layers):
        self.tmp = tmp
        self.model = write_model(os.path.join(tmp, "model"), config("qwen3", num_hidden_layers=layers))
        self.data = write_data(os.path.join(tmp, "data.jsonl"))
        self.out = os.path.join(tmp, "out")
        self.ini = write_ini(self.out + ".ini", base(self.model, self.data, self.out, train__steps=2))
        megatrain("-q", "run", self.ini)
        self.good = os.path.join(self.out, "checkpoint-2")


def tests_of(names):
    """The tests among a module's globals()."""
    return [v for v in list(names.values()) if callable(v) and getattr(v, "__code__", None)
            and v.__code__.co_varnames[:1] == ("p",)]


def run_tests(names, make_place, summary=None):
    """All tests, or those that the command line names. make_place(folder): in memory where it can be, since syncs take
    most of the time elsewhere. summary(place): the last line to print."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as tmp:
        place = make_place(tmp)
        for test in tests_of(names):
            if len(sys.argv) > 1 and test.__name__ not in sys.argv[1:]:
                continue
            t0 = time.time()
            test(place)
            print(f"ok {test.__name__} {time.time() - t0:.1f} s", flush=True)
        if summary:
            print(summary(place), flush=True)
