#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Turns data files into token shards; megatrain runs it when shards are missing.

    prepare_data.py < JOB.json

The job is one JSON object on standard input: "mode" (prepare, encode, decode) and what megatrain_data/prepare.py
reads of it. Standard output is one JSON object a line: "doing", "progress", "source", "pieces", "ids", and last "done"
or "error" (with "kind": input, usage or runtime; and the message). Exit status 0 or 1.
"""
import importlib.util
import json
import os
import site
import sys

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes are the parallelism here
os.environ["RUST_BACKTRACE"] = "0"  # libraries' last words are a line


def say(event):
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def fail(message, kind):
    say({"event": "error", "kind": kind, "message": message})
    sys.exit(1)


def main():
    text = sys.stdin.read()
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    if sys.prefix == sys.base_prefix and site.check_enableusersite() is not None and not os.environ.get("PYTHONNOUSERSITE"):
        site.addsitedir(site.getusersitepackages())  # what `pip install --user` puts there: -I leaves it out
    for name in ("jinja2", "numpy", "pyarrow", "tokenizers"):
        if importlib.util.find_spec(name) is None:
            fail(f"Python module {name} is missing in {sys.executable}", "environment")
    from megatrain_data import errors, prepare
    try:
        prepare.run(errors.parse_json(text), say)
    except errors.DataError as e:
        fail(str(e), e.kind)
    except RecursionError:
        fail("what the data helper reads is nested too deep", "input")
    except BrokenPipeError:
        sys.exit(1)
    except OSError as e:
        fail(f"{e.filename or 'data helper'}: {e.strerror or e}", "runtime")
    say({"event": "done"})


if __name__ == "__main__":
    main()
