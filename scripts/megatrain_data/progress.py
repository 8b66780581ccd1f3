# SPDX-License-Identifier: Apache-2.0
"""The progress of preparing all files together, and its rate."""
import os
import time

SECONDS = 0.5  # between two events


class Progress:
    def __init__(self, paths):
        self.sizes = [os.path.getsize(p) if os.path.isfile(p) else 0 for p in paths]
        self.file = self.samples = self.tokens = 0  # that are done
        self.began = self.last = time.monotonic()

    def due(self):
        now = time.monotonic()
        if now - self.last < SECONDS:
            return False
        self.last = now
        return True

    def event(self, done, writer):
        """The values of a progress event; `done`: bytes read of the current file, whose samples `writer` has."""
        seconds, tokens = self.last - self.began, self.tokens + writer.n_tokens
        share = min((sum(self.sizes[:self.file]) + done) / max(sum(self.sizes), 1), 1.0)
        return {"file": self.file + 1, "files": len(self.sizes), "samples": self.samples + writer.n_samples, "tokens": tokens,
                "share": share, "tokens_per_second": tokens / seconds, "eta": seconds * (1 - share) / max(share, 1e-9)}

    def pass_file(self, writer):
        self.file += 1
        self.samples += writer.n_samples
        self.tokens += writer.n_tokens
