# SPDX-License-Identifier: Apache-2.0
"""What is noticed of a file's samples while their tokens are made. It is kept with the token shard (src/data/notes.h), so that
every command that opens the data says it, not only the one that made the tokens."""
import unicodedata

BYTES, TEXT = 3072, 400  # of a shard's header, and of one note
SHOW = "look at it with: megatrain data show"
PRINTS = "set data.template to one that prints it (built in: qwen3), or leave it out of the data"
# level (w: a warning, i: worth knowing, y: for the program, which may say it), and the mend
KINDS = {
    "refused": ("w", "such samples are left out, as many as data.max_untrained allows"),
    "unprinted": ("w", SHOW), "special": ("w", SHOW), "calls": ("w", PRINTS), "tools": ("w", PRINTS), "thoughts": ("w", PRINTS),
    "hollow": ("w", "the model learns to say nothing there; " + SHOW), "endless": ("w", "the model may not learn to stop"),
    "variables": ("w", ""), "undefined": ("w", "what it stands for is missing in the text"), "key": ("w", ""), "field": ("w", ""),
    "file": ("w", ""), "dropped": ("i", ""), "roles": ("y", ""), "other": ("y", ""), "joined": ("y", ""),
}


class Odd:
    """What is noticed in a chunk: {key: [text of the first sample, [indices of samples]]}. A key is a kind, or "kind:name"."""

    def __init__(self):
        self.found = {}

    def add(self, key, index, text):
        entry = self.found.setdefault(key, [text, []])
        if index not in entry[1][-1:]:
            entry[1].append(index)


def shown(text):
    """As much of a stranger's text as one line of a terminal takes, without control characters."""
    text = "".join(" " if c.isspace() else c if unicodedata.category(c) not in ("Cc", "Cf", "Cs") else "?" for c in text)
    return text.encode(errors="replace")[:TEXT].decode(errors="ignore")


class Notes:
    """Those of a file: the first sample of each key, and how many there are."""

    def __init__(self):
        self.by_key = {}

    def add(self, key, text, place="", n=0):
        entry = self.by_key.setdefault(key, [0, place, text])
        entry[0] += n

    def packed(self):
        """A line each: level, key, number of samples, place, text, mend; tabs between them. As many as there is room for."""
        out = b""
        for key, (n, place, text) in sorted(self.by_key.items(), key=lambda item: (list(KINDS).index(item[0].partition(":")[0]), item[0])):
            level, mend = KINDS[key.partition(":")[0]]
            line = "\t".join([level, shown(key)[:40], str(n), place, shown(text), mend]).encode(errors="replace") + b"\n"
            if len(out) + len(line) < BYTES:
                out += line
        return out
