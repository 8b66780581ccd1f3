# SPDX-License-Identifier: Apache-2.0
"""How far the preparation of all files together is, and at what rate."""
import os
import time

SECONDS = 0.5  # between two tellings


class Progress:
    def __init__(self, paths):
        self.sizes = [os.path.getsize(p) if os.path.isfile(p) else 0 for p in paths]
        self.file = self.samples = self.tokens = 0  # done
        self.began = self.last = time.monotonic()

    def due(self):
        now = time.monotonic()
        if now - self.last < SECONDS:
            return False
        self.last = now
        return True

    def told(self, done, writer):
        """What a progress event says; `done` bytes of the file under way are read, `writer` has its samples."""
        seconds, tokens = self.last - self.began, self.tokens + writer.n_tokens
        share = min((sum(self.sizes[:self.file]) + done) / max(sum(self.sizes), 1), 1.0)
        return {"file": self.file + 1, "files": len(self.sizes), "samples": self.samples + writer.n_samples, "tokens": tokens,
                "share": share, "tokens_per_second": tokens / seconds, "eta": seconds * (1 - share) / max(share, 1e-9)}

    def pass_file(self, writer):
        self.file += 1
        self.samples += writer.n_samples
        self.tokens += writer.n_tokens
