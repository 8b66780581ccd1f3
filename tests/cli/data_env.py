# SPDX-License-Identifier: Apache-2.0
"""Starts a test over in the data helper's environment, where the Python that runs it lacks what the helper needs."""
import importlib.util
import os
import sys

ROOT = os.path.abspath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))


def enter(*modules):
    """Returns where all of the modules are there, at the latest in .venv-data; else ends with the mend."""
    if all(importlib.util.find_spec(m) for m in modules):
        return
    inside = os.path.join(ROOT, ".venv-data", "bin", "python")
    if os.environ.get("MT_DATA_TEST") or not os.path.exists(inside):
        sys.exit("this needs the data helper's environment: scripts/setup --data")
    os.environ["MT_DATA_TEST"] = "1"
    os.execv(inside, [inside, *sys.argv])
