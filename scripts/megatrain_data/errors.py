# SPDX-License-Identifier: Apache-2.0
"""The exception for what the user can correct. Any other exception is a bug of this program."""


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
