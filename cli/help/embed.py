#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""embed.py OUTPUT FILE...: pages of help as C. A .txt becomes an array of its paragraphs, each a string without line
breaks, that ends with NULL; a line that begins with a space is a paragraph of its own. Any other file becomes a string."""
import os
import sys


def quoted(text):
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def paragraphs(text):
    for block in text.rstrip("\n").split("\n\n"):
        if block.startswith(" "):
            yield from block.split("\n")
        else:
            yield block.replace("\n", " ")


def main(output, files):
    with open(output, "w", encoding="utf-8") as out:
        for path in files:
            name, kind = os.path.splitext(os.path.basename(path))
            name = name.replace("-", "_")
            with open(path, encoding="utf-8") as f:
                text = f.read()
            if kind == ".txt":
                lines = [f"    {quoted(p)},\n" for p in paragraphs(text)] + ["    NULL};\n"]
                out.write(f"static const char *const {name}_text[] = {{\n{''.join(lines)}")
            else:
                lines = [f"    {quoted(line)}\n" for line in text.splitlines(keepends=True)]
                out.write(f"static const char {name}_text[] =\n{''.join(lines)}    ;\n")


main(sys.argv[1], sys.argv[2:])
