#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Builds scripts/Dockerfile and asks the image for its version: by docker or buildah where one answers, else its steps run
in new Debian roots (as root, with debootstrap and a network; some minutes).   dockerfile.py [--roots]"""
import os
import re
import shutil
import sys
import tempfile

from clean_root import ENVIRONMENT, MIRROR, ROOT, must, run, take_network

FILE = os.path.join(ROOT, "scripts", "Dockerfile")


def answers(*cmd):
    try:
        return run(*cmd, timeout=60).returncode == 0
    except OSError:
        return False


def by_engine():
    """What the image's program says of itself; None: there is no engine."""
    if answers("docker", "info"):
        must("docker", "build", "-q", "-f", FILE, "-t", "megatrain-test", ROOT)
        return must("docker", "run", "--rm", "megatrain-test", "--version")
    if answers("buildah", "images"):
        must("buildah", "bud", "-q", "-f", FILE, "-t", "megatrain-test", ROOT)
        name = must("buildah", "from", "-q", "megatrain-test").strip()
        return must("buildah", "run", name, "megatrain", "--version")
    return None


def copy(root, sources, to):
    """COPY: of this tree what is committed, or what another stage has."""
    os.makedirs(root + to, exist_ok=True)
    if sources == ["."]:
        must("sh", "-c", f"git -C {ROOT} archive HEAD | tar -x -C {root + to}")
    else:
        must("cp", "-r", *[path + "/." for path in sources], root + to)


def by_roots(tmp):
    """The same, step by step. Of the Dockerfile's language it knows what this one has."""
    with open(FILE, encoding="utf-8") as f:
        steps = [line.split(maxsplit=1) for line in f.read().splitlines() if line and line[0] != "#"]
    values, roots, root, folder, entry = {}, {}, None, "/", None
    for word, rest in steps:
        print(word, rest, flush=True)
        rest = re.sub(r"\$\{(\w+)\}", lambda m: values[m[1]], rest)
        if word == "ARG":
            name, value = rest.split("=")
            values[name] = value
        elif word == "FROM":
            base, _, alias = rest.partition(" AS ")
            root, folder = os.path.join(tmp, f"root-{len(roots)}"), "/"
            roots[alias] = root
            suite = {"debian:12": "bookworm", "debian:13": "trixie"}[base]
            must("debootstrap", "--variant=minbase", "--include=ca-certificates", suite, root, MIRROR)
            take_network(root)
        elif word == "COPY":
            *sources, to = rest.split()
            if sources[0].startswith("--from="):
                sources = [roots[sources[0].removeprefix("--from=")] + path for path in sources[1:]]
            copy(root, sources, to)
        elif word == "WORKDIR":
            folder = rest
        elif word == "RUN":
            within = f"mount --rbind /dev {root}/dev && mount -t proc proc {root}/proc && exec chroot {root} sh -c 'cd {folder} && {rest}'"
            must("unshare", "-m", "sh", "-c", within, env={**ENVIRONMENT, "DEBIAN_FRONTEND": "noninteractive"})
        elif word == "ENTRYPOINT":
            entry, = re.findall(r'"(.*?)"', rest)
        else:
            raise AssertionError(f"{FILE}: {word} is not known here")
    assert not os.path.exists(root + "/src"), "the last stage has the sources"
    return must("chroot", root, entry, "--version")


def main():
    version = None if "--roots" in sys.argv else by_engine()
    if version is None and (os.geteuid() or not shutil.which("debootstrap")):
        print("not built: neither docker nor buildah answers, and new roots need root and debootstrap")
        return
    if version is None:
        with tempfile.TemporaryDirectory() as tmp:
            version = by_roots(tmp)
    print(version.strip())
    assert version.startswith("megatrain "), version


if __name__ == "__main__":
    main()
