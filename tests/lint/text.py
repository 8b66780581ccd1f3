#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""text.py ROOT: every source file has an SPDX line at its head and a newline at its end, and no tab, no space at a
line's end, and those of the program no line over 120 columns. A line with a string in it may be longer: messages are
not cut. All that is in tests/ beside sources, fixtures most of all, has at most 5 MB. What cJSON cannot add to an object it leaves to the caller, so the program adds by base/json.h. How code is laid out beyond that is not checked: .clang-format is help, not law."""
import os
import re
import sys

FOLDERS = ["src", "cuda", "cli", "tests", "scripts", ".ci"]
SOURCES = re.compile(r"\.(c|h|cc|cpp|cu|cuh|in|js|py|sh)$|(^|/)meson\.(build|options)$")
COLUMNS = 120  # in src, cuda and cli; the tests have wide tables of cases


def sources(root):
    """Paths of the sources: those of known names, and scripts, which begin with #!."""
    found = [f for f in ("meson.build", "meson.options") if os.path.exists(os.path.join(root, f))]
    for top in FOLDERS:
        for folder, _, names in os.walk(os.path.join(root, top)):
            for name in names:
                path = os.path.relpath(os.path.join(folder, name), root)
                with open(os.path.join(root, path), "rb") as f:
                    script = f.read(2) == b"#!"
                if script or SOURCES.search(path):
                    found.append(path)
    return sorted(found)


MOST = 5_000_000  # bytes of fixtures


def bytes_of_fixtures(root, found):
    """All that is in tests/ and is no source."""
    paths = (os.path.join(folder, name) for folder, _, names in os.walk(os.path.join(root, "tests"))
             if not folder.endswith("__pycache__") for name in names)
    return sum(os.path.getsize(path) for path in paths if os.path.relpath(path, root) not in found)


LEAK = "cJSON_AddItemTo"  # what has no memory to be added
LEAKLESS = "src/base/json.c"


def faults(text, columns):
    """(line, what is wrong) of a file's text."""
    lines = text.split("\n")
    if not any("SPDX-License-Identifier: Apache-2.0" in line for line in lines[:3]):
        yield 1, "no SPDX-License-Identifier: Apache-2.0 in the first three lines"
    if lines[-1]:
        yield len(lines), "no newline at the end of the file"
    for number, line in enumerate(lines, 1):
        if "\t" in line:
            yield number, "a tab"
        if line != line.rstrip():
            yield number, "space at the end of the line"
        if len(line) > columns and not re.search("['\"`]", line):
            yield number, f"{len(line)} columns, more than {columns}"


def main(root):
    found, n_bad = sources(root), 0
    for path in found:
        columns = COLUMNS if path.startswith(("src/", "cuda/", "cli/")) else sys.maxsize
        with open(os.path.join(root, path), encoding="utf-8") as f:
            for number, what in faults(f.read(), columns):
                print(f"{path}:{number}: {what}")
                n_bad += 1
            f.seek(0)
            if columns == COLUMNS and path != LEAKLESS and LEAK in f.read():
                print(f"{path}: {LEAK}...: use mt_json_add() or mt_json_append()")
                n_bad += 1
    size = bytes_of_fixtures(root, set(found))
    if size > MOST:
        print(f"tests: {size} bytes of fixtures, more than {MOST}: scripts/reference makes weights from a seed (tests/README.md)")
        n_bad += 1
    print(f"{len(found)} files, {size} bytes of fixtures, {n_bad} faults")
    return n_bad != 0 or not found


sys.exit(main(sys.argv[1]))
