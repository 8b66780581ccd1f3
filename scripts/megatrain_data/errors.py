# SPDX-License-Identifier: Apache-2.0
"""The exception for what the user can correct. Any other exception is a bug of this program."""
import json
import os


def parse_json(text):
    """json.loads, whose only error is ValueError, also for what is nested deeper than Python can follow."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None


class DataError(Exception):
    """kind: "input" (model, tokenizer, data), "usage" (configuration) or "runtime"; where: place in a file."""

    def __init__(self, message, kind="input"):
        super().__init__(message)
        self.kind = kind


class SampleError(Exception):
    """What is wrong with one record; `record` counts from 0 in its chunk, `column` from 1 (None: whole record)."""

    def __init__(self, record, message, column=None):
        super().__init__(message)
        self.record, self.message, self.column = record, message, column

    def __reduce__(self):
        return SampleError, (self.record, self.message, self.column)


def read_json(path, needed=True):
    """The object in a file of JSON; one that is not needed and not there is empty."""
    if not needed and not os.path.exists(path):
        return {}
    try:
        with open(path, encoding="utf-8-sig") as f:
            made = parse_json(f.read())
    except (OSError, ValueError) as e:
        raise DataError(f"cannot read {path}: {e}") from None
    if not isinstance(made, dict):
        raise DataError(f"{path} must be a JSON object")
    return made
