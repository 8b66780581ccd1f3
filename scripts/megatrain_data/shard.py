# SPDX-License-Identifier: Apache-2.0
"""Token shards as src/data/shard.h defines them, written as a stream: memory does not grow with the file."""
import os
import shutil
import struct

import numpy as np

from .notes import BYTES, Notes

HEADER, VERSION = 4096, 6
LINES, INDICES = 1, 2     # kinds of place
PLAIN_TEXT = 1            # flag: one text, which is cut at the ends of rows
ANSWERS = 2               # flag: two samples are an item
ROLLOUTS = 4              # flag: tokens have values


class ShardWriter:
    """Writes tokens to PATH.PID.tmp, and mask, offsets and places to files beside it; at the end joins and renames them."""

    def __init__(self, path, vocab, source_hash):
        self.path, self.vocab, self.hash = path, vocab, source_hash
        self.tmp = f"{path}.{os.getpid()}.tmp"
        self.files = {k: open(f"{self.tmp}{k}", "xb") for k in ("", ".mask", ".offsets", ".values", ".places")}
        self.files[""].write(bytes(HEADER))
        self.n_tokens = self.n_samples = self.n_trained = self.max_len = 0
        self.n_untrained = self.n_bytes = self.n_equal = 0
        self.untrained_at, self.notes = [], Notes()
        self.bits = np.zeros(0, dtype=bool)  # bits of the mask that do not fill a byte yet

    def add(self, tokens, mask, lengths, places, opens=True, values=()):
        """Adds samples, joined; `opens` False: the first one continues the previous sample. values: of rollouts, of each token."""
        self.files[".values"].write(np.asarray(values, dtype="<f4").tobytes())
        self.files[""].write(np.ascontiguousarray(tokens, dtype="<u4").tobytes())
        bits = np.concatenate([self.bits, mask])
        whole = len(bits) // 8 * 8
        self.files[".mask"].write(np.packbits(bits[:whole], bitorder="little").tobytes())
        self.bits = bits[whole:]
        ends = np.cumsum(lengths, dtype=np.uint64)
        starts = ends - np.asarray(lengths, dtype=np.uint64) + np.uint64(self.n_tokens)
        if not opens:
            starts, places = starts[1:], places[1:]
        self.files[".offsets"].write(starts.astype("<u8").tobytes())
        self.files[".places"].write(np.asarray(places, dtype="<u8").tobytes())
        self.n_tokens += len(tokens)
        self.n_samples += len(starts)
        self.max_len = max([self.max_len, *map(int, lengths[-1:] if not opens else [max(lengths, default=0)])])

    def commit(self, format_name, place_kind, flags=0):
        self.files[".mask"].write(np.packbits(self.bits, bitorder="little").tobytes())
        self.files[".offsets"].write(struct.pack("<Q", self.n_tokens))
        out = self.files[""]
        if self.n_tokens % 2:
            out.write(bytes(4))
        for kind in (".mask", ".offsets", ".values", ".places"):
            self.files[kind].close()
            with open(self.tmp + kind, "rb") as f:
                shutil.copyfileobj(f, out, 1 << 20)
            if kind == ".mask":
                out.write(bytes(-os.path.getsize(self.tmp + kind) % 8))
        places = ", ".join(self.untrained_at).encode()[:159]
        header = struct.pack(f"<8sII4Q4QII24s160s3Q{BYTES}s", b"MTTOKENS", VERSION, 4, self.vocab, self.n_tokens, self.n_samples,
                             self.hash, self.n_trained, self.max_len, self.n_untrained, self.n_bytes,
                             place_kind, flags, format_name.encode(), places, 0, 0, self.n_equal, self.notes.packed())
        out.seek(0)
        out.write(header)
        out.flush()
        os.fsync(out.fileno())
        out.close()
        os.rename(self.tmp, self.path)
        self.drop()

    def drop(self):
        for kind, f in self.files.items():
            f.close()
            if os.path.exists(self.tmp + kind):
                os.unlink(self.tmp + kind)
