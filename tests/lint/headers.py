#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""headers.py ROOT COMPILER...: each header compiles alone, with warnings as errors: it includes what it needs. Those of
CUDA against the headers of the host emulation. A NAME_body.h is a piece of a function and no header."""
import concurrent.futures
import os
import subprocess
import sys

ROOT, COMPILER = sys.argv[1], sys.argv[2:]
FLAGS = ["-fsyntax-only", "-D_GNU_SOURCE", '-DMT_VERSION=""', "-Wall", "-Wextra", "-Werror", "-Wno-unused-function",
         "-Wno-unused-variable", "-Wno-c2x-extensions", "-Wno-missing-field-initializers", "-Wno-unknown-pragmas"]
C = ["-x", "c", "-std=gnu11", "-Wundef", "-Wstrict-prototypes"]
CXX = ["-x", "c++", "-std=gnu++17"]
CUDA = ["-DMT_CUDA_EMU", "-Icuda", "-isystem", "tests/cuda_host/include"]


def headers():
    """(path, flags) of each header."""
    for top in ("src", "cli", "cuda", "tests"):
        for folder, _, names in sorted(os.walk(os.path.join(ROOT, top))):
            for name in sorted(names):
                path = os.path.relpath(os.path.join(folder, name), ROOT)
                cuda = path.startswith(("cuda", "tests/cuda_"))
                if name.endswith(".cuh") or (name.endswith(".h") and path.startswith("tests/cuda_")):
                    yield path, CXX + CUDA
                elif name.endswith(".h") and not name.endswith("_body.h"):
                    yield path, C + (CUDA if cuda else [])


def compile_alone(header):
    path, flags = header
    command = [*COMPILER, *FLAGS, *flags, "-Isrc", "-Itests/device", "-Itests/support", "-include", path, os.devnull]
    p = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return p.returncode == 0, f"{path}: does not compile alone\n{p.stderr}"


with concurrent.futures.ThreadPoolExecutor(2) as pool:
    results = list(pool.map(compile_alone, headers()))
bad = [what for good, what in results if not good]
print("".join(bad) + f"{len(results)} headers, {len(bad)} faults")
sys.exit(bool(bad) or not results)
