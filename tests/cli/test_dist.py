# SPDX-License-Identifier: Apache-2.0
"""The source archive (meson dist) of the newest commit: it has every file, configures where there is no repository, and
builds and passes what is quick. With MEGATRAIN_TEST_FULL=1 all of it is built, and passes the first tier. test_dist.py ROOT BUILD"""
import os
import subprocess
import sys
import tarfile
import tempfile

ROOT, BUILD = sys.argv[1:]
GIT = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}
QUICK = ("lint/text", "lint/layers", "lint/circles", "lint/parameters", "config/test_schema")
TARGET = "tests/unit/config/test_schema"


FULL = os.environ.pop("MEGATRAIN_TEST_FULL", None)  # the archive's tests have the usual size


def run(*cmd, **more):
    p = subprocess.run(cmd, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, **GIT}, **more)
    assert not p.returncode, f"{cmd}: exit {p.returncode}\n{p.stdout[-3000:]}"
    return p.stdout


def archive(tmp):
    """Makes the archive and unpacks it; returns its folder."""
    said = run("meson", "dist", "-C", BUILD, "--no-tests", "--allow-dirty", "--formats", "gztar")
    path = said.strip().splitlines()[-1].removeprefix("Created ")
    with tarfile.open(path) as tar:
        tar.extractall(tmp)  # no filter: Debian 12's Python has none, and it is our own
    top, = os.listdir(tmp)
    print(f"ok archive: {os.path.basename(path)}, {os.path.getsize(path)} bytes")
    return os.path.join(tmp, top)


def holds_all(tree):
    tracked = set(filter(None, run("git", "ls-tree", "-rz", "--name-only", "HEAD", cwd=ROOT).split("\0")))
    has = {os.path.relpath(os.path.join(d, name), tree) for d, _, names in os.walk(tree) for name in names}
    assert has == tracked, sorted(has ^ tracked)[:20]
    print(f"ok files: {len(has)}")


def builds(tree):
    build, tests = os.path.join(tree, "build"), ["--suite", "first"] if FULL else QUICK
    run("meson", "setup", build, tree, "-Dcuda=disabled", "-Dtests=enabled", f"-Doptimization={2 if FULL else 0}")
    run("ninja", "-C", build, *([] if FULL else [TARGET]))
    run("meson", "test", "-C", build, "--no-rebuild", *tests)
    print("ok built and tested:", *tests)


if not os.path.exists(os.path.join(ROOT, ".git")):
    print("no repository here: an archive is made of one")
    sys.exit(77)
with tempfile.TemporaryDirectory(prefix="megatrain-dist-") as tmp:
    tree = archive(tmp)
    holds_all(tree)
    builds(tree)
