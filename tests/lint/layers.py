#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""layers.py ROOT: includes point down only. The layers are the folders of src in the order in which src/meson.build
enters them, lowest first. A file may include headers of its own folder and of the lower ones that its folder's
meson.build names (base_dep, ...). cuda/ may include what is no higher than device, and is included by kinds alone;
cli/ may include everything in src. The table at the head of src/meson.build names the same layers in the same order."""
import os
import re
import sys


def read(*path):
    with open(os.path.join(*path), encoding="utf-8") as f:
        return f.read()


def layers_of(root):
    """(layers, lowest first; those of the table in the comment)"""
    text = read(root, "src", "meson.build")
    return re.findall(r"^subdir\('(\w+)'\)", text, re.M), re.findall(r"^#   (\w+) {2,}\S", text, re.M)


def includes(root, folder):
    """(path, line, folder included) of each #include "folder/..." below `folder`."""
    for where, _, names in sorted(os.walk(os.path.join(root, folder))):
        for name in sorted(names):
            if not name.endswith((".c", ".h", ".cc", ".cu", ".cuh")):
                continue
            path = os.path.join(where, name)
            for number, line in enumerate(read(path).split("\n"), 1):
                m = re.match(r'\s*#\s*include\s+"([^"]+)/[^"/]+"', line)
                if m:
                    yield os.path.relpath(path, root), number, m.group(1).split("/")[0]


def main(root):
    layers, table = layers_of(root)
    bad = []
    if layers != table:
        bad.append(f"src/meson.build: its table says {' '.join(table)}, it enters {' '.join(layers)}")
    folders = {name for name in os.listdir(os.path.join(root, "src"))
               if os.path.isdir(os.path.join(root, "src", name))}
    bad += [f"src/{name}: src/meson.build does not enter it" for name in sorted(folders - set(layers))]
    n = 0
    for at, layer in enumerate(layers):
        lower = layers[:at]
        named = set(re.findall(r"\b(\w+)_dep\b", read(root, "src", layer, "meson.build")))
        bad += [f"src/{layer}/meson.build: names {d}_dep, which is not lower"
                for d in layers[at + 1:] if d in named]
        for path, line, target in includes(root, os.path.join("src", layer)):
            n += 1
            if target == layer:
                continue
            if target not in lower + ["cuda"] * (layer == "kinds"):
                bad.append(f"{path}:{line}: {layer} includes {target}, which is not below it")
            elif target not in named:
                bad.append(f"{path}:{line}: includes {target}; src/{layer}/meson.build does not name {target}_dep")
    for folder, allowed in (("cuda", layers[:layers.index("device") + 1]), ("cli", layers)):
        for path, line, target in includes(root, folder):
            n += 1
            if target not in allowed:
                bad.append(f"{path}:{line}: {folder} includes {target}, which is not below it")
    print("\n".join(bad + [f"{len(layers)} layers, {n} includes, {len(bad)} faults"]))
    return bool(bad) or not n


sys.exit(main(sys.argv[1]))
