# SPDX-License-Identifier: Apache-2.0
"""Real text that every machine with Python has: the documentation strings of Python's own modules, as questions and answers.
    real_data.py DIR       writes train.jsonl, held-out.jsonl and pairs.jsonl (preferences: another's answer is rejected)"""
import importlib
import inspect
import json
import os
import random
import sys

MODULES = "argparse ast asyncio base64 bisect calendar collections contextlib csv datetime decimal email functools heapq html io \
itertools json logging math os pathlib random re shutil socket string subprocess tempfile textwrap threading time typing urllib.parse \
uuid zipfile".split()
HELD_OUT = 24


def documentation():
    """Pairs of a name and what is said of it."""
    for module in MODULES:
        m = importlib.import_module(module)
        for name, value in sorted(vars(m).items()):
            said = inspect.getdoc(value) if callable(value) and not name.startswith("_") else None
            if said and 80 < len(said) < 300 and getattr(value, "__module__", "") == module:
                yield f"{module}.{name}", said


def write_data(folder):
    rows = list(documentation())
    random.Random(3).shuffle(rows)
    assert len(rows) > 100, len(rows)
    for file, some in (("held-out", rows[:HELD_OUT]), ("train", rows[HELD_OUT:]), ("pairs", rows)):
        with open(os.path.join(folder, file + ".jsonl"), "w") as f:
            for i, (name, said) in enumerate(some):
                ask = [{"role": "user", "content": f"What does Python's {name} do?"}]
                answer = lambda text: [{"role": "assistant", "content": text}]
                other = rows[(i * 7 + 1) % len(rows)][1]
                row = {"prompt": ask, "chosen": answer(said), "rejected": answer(other)} if file == "pairs" else {"messages": ask + answer(said)}
                f.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    write_data(*sys.argv[1:])
