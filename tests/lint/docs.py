# SPDX-License-Identifier: Apache-2.0
"""What the pages beside the code name is there: files, folders, identifiers, keys of the configuration, links. The list
of layers has every folder of src/. Reads text alone; checks no claim."""
import glob
import os
import re
import subprocess
import sys

ROOT = os.path.realpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
PAGES = ["README.md", ".github/*.md", "src/**/README.md", "cuda/README.md", "tests/**/README.md", "scripts/README.md"]
CODE = ["src/**/*.[ch]", "cli/*.[ch]", "cuda/*", "tests/**/*.[ch]", "tests/**/*.py", "tests/**/*.cpp", "scripts/*", "scripts/**/*.py"]
#: made while the program or its set-up runs, or not of this tree
MADE = re.compile(r"^(build.*|out/.*|~/.*|\$.*|.*[<>*].*|/.*|.*\.safetensors|.*\.ini|share/.*|.*\.jsonl?|gpu-.*|\.(venv|cudnn|lock).*|megatrain/|org/name|name\.[ch])")
FILE = re.compile(r"^[\w./-]+\.(c|h|cu|cuh|cc|py|md|build|options|txt|in)$")
NAME = re.compile(r"^(mt|MT)_\w+")


def files(patterns):
    return sorted({p for g in patterns for p in glob.glob(os.path.join(ROOT, g), recursive=True) if os.path.isfile(p)})


def read(path):
    with open(path, encoding="utf-8", errors="replace") as f:
        return f.read()


def marked(text):
    """What stands between backticks, with its line; fenced and indented examples are not looked at."""
    for n, line in enumerate(text.splitlines(), 1):
        if not line.startswith("    "):
            yield from ((n, w.strip()) for w in re.findall(r"`([^`]+)`", line))


def exists(page, path):
    bases = [os.path.dirname(page), ROOT, os.path.join(ROOT, "src"), os.path.join(ROOT, "tests"), os.path.join(ROOT, ".github")]
    below = "/" not in path and glob.glob(os.path.join(os.path.dirname(page), "**", path), recursive=True)
    return below or any(glob.glob(os.path.join(b, path)) for b in bases)


def faults(page, text, words, keys):
    """[(line, what)] of a page's text."""
    sections = {k.split(".")[0] for k in keys}
    out = []
    for n, w in marked(text):
        name, key = NAME.match(w), re.fullmatch(r"([a-z]+)\.([a-z_]+)(?: = .*)?", w)
        path = w.split(" ")[0]
        if name:
            word = name.group(0)
            if word not in words and not any(k.startswith(word) for k in words if word.endswith("_")):
                out.append((n, f"{word} is nowhere in the code"))
        elif FILE.match(w) or "/" in path and re.match(r"^[\w.-]+/[\w./*-]*$", path):
            if not MADE.match(path) and not exists(page, path):
                out.append((n, f"there is no {path}"))
        elif key and not MADE.match(w) and key.group(1) in sections and f"{key.group(1)}.{key.group(2)}" not in keys:
            out.append((n, f"{w} is no key of the configuration"))
    return [f"{os.path.relpath(page, ROOT)}:{n}: {what}" for n, what in out]


def links(page, text):
    out = []
    for n, line in enumerate(text.splitlines(), 1):
        for target in re.findall(r"\]\(([^)#]+)\)", line):
            if "://" not in target and not os.path.exists(os.path.join(os.path.dirname(page), target)):
                out.append(f"{os.path.relpath(page, ROOT)}:{n}: the link to {target} leads nowhere")
    return out


def layers(text):
    """The list of layers in src/README.md has the folders of src/meson.build, the highest first."""
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", text[text.index("## The layers"):text.index("## From configuration")], re.M)
    listed = [f for r in rows for f in re.findall(r"`(\w+)`", r)]
    built = re.findall(r"^subdir\('(\w+)'\)", read(os.path.join(ROOT, "src", "meson.build")), re.M)
    if sorted(listed) != sorted(built):
        return [f"src/README.md: the list of layers is not that of src/meson.build: {sorted(set(listed) ^ set(built))}"]
    return []


def main():
    words = set(re.findall(r"\w+", " ".join(read(f) for f in files(CODE) if f != os.path.realpath(__file__))))
    keys = set(re.findall(r"^([a-z]+\.[a-z_]+) =", subprocess.run([os.environ["MEGATRAIN"], "config", "keys"], check=True,
                                                                  capture_output=True, text=True).stdout, re.M))
    pages = files(PAGES)
    assert len(keys) > 50 and len(words) > 5000 and len(pages) > 5
    # it can fail
    probe = os.path.join(ROOT, "src", "README.md")
    said = faults(probe, "`mt_no_such_thing()`, `store/none.c`, `data.no_key`, `none/` but `src/store/`, `model.path`", words, keys)
    assert len(said) == 4, said
    assert links(probe, "[here](none.md) [there](README.md)") and layers(read(probe).replace("| `store` |", "| |", 1))
    said = [f for p in pages for f in faults(p, read(p), words, keys) + links(p, read(p))] + layers(read(probe))
    print("\n".join(said) or f"ok {len(pages)} pages")
    return 1 if said else 0


sys.exit(main())
