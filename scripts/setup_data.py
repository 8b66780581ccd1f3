#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the Python environment of the data helper: setup_data.py FOLDER. Does nothing where it is complete."""
import os
import subprocess
import sys

MODULES = "import tokenizers, jinja2, pyarrow, numpy"
PACKAGES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "data_packages.txt")


def main(folder):
    python = os.path.join(folder, "bin", "python")
    if os.path.exists(python) and not subprocess.run([python, "-c", MODULES], stderr=subprocess.DEVNULL).returncode:
        print(f"{folder} is complete")
        return 0
    print(f"installing tokenizers, jinja2, pyarrow and numpy into {folder}", flush=True)
    os.makedirs(os.path.dirname(folder) or ".", mode=0o700, exist_ok=True)
    made = subprocess.run([sys.executable, "-m", "venv", folder])
    if made.returncode:
        print("setup_data.py: this Python cannot make an environment: install python3-venv", file=sys.stderr)
        return 1
    return subprocess.run([os.path.join(folder, "bin", "pip"), "install", "-q", "--disable-pip-version-check", "--no-deps",
                           "-r", PACKAGES]).returncode


if len(sys.argv) != 2:
    sys.exit(__doc__)
sys.exit(main(sys.argv[1]))
