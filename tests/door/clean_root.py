#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A GPU owner's first command, in a new Debian root that has nothing but an nvidia-smi that answers as the driver of a GPU
would: nvcc really compiles there. As root, with debootstrap and a network; ten minutes and 4 GB each.

  clean_root.py [--suite bookworm] [--gpu 8.9] [--cuda 13.0] [--offline] [--command scripts/demo] [--keep DIR]

Checks that the command ends with a program that has code for that GPU, says that it cannot be used (there is no driver),
and that training went on by the CPU. --offline: packages are installed first, without the GPU, then the network is cut: the
command fails, and says what to do. --gpu none: no nvidia-smi; the program has no GPU code.
"""
import argparse
import os
import re
import struct
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
MIRROR = "http://deb.debian.org/debian"
SMI = """#!/bin/sh
case "$*" in
*compute_cap*) echo {gpu} ;;
*driver_version*) echo {driver} ;;
"") echo "| NVIDIA-SMI {driver}   Driver Version: {driver}   CUDA Version: {cuda} |" ;;
esac
"""
ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LC_ALL": "C.UTF-8",
               **{k: v for k, v in os.environ.items() if k.startswith(("PIP_CERT", "PIP_INDEX", "SSL_CERT_FILE"))}}
DRIVERS = {"13": "580.95.05", "12": "535.261.03", "11": "470.256.02"}


def run(*cmd, **more):
    return subprocess.run(cmd, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **more)


def must(*cmd, **more):
    p = run(*cmd, **more)
    assert not p.returncode, f"{cmd}: exit {p.returncode}\n{p.stdout[-3000:]}"
    return p.stdout


def write(path, text, mode=0o644):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as f:
        f.write(text)
    os.chmod(path, mode)


def take_network(root):
    """The root reaches the network as this machine does."""
    for path in ("/etc/resolv.conf", "/etc/hosts", "/etc/ssl/certs/ca-certificates.crt"):
        if os.path.exists(path):
            must("cp", "-L", path, root + path)


def make_root(root, suite, gpu, cuda):
    """A minimal system with non-free among its sources, as the driver's packages need it, and this tree's newest commit."""
    if not os.path.exists(root + "/etc/debian_version"):
        must("debootstrap", "--variant=minbase", "--include=ca-certificates", suite, root, MIRROR)
    write(root + "/etc/apt/sources.list", f"deb {MIRROR} {suite} main contrib non-free non-free-firmware\n")
    take_network(root)
    if gpu != "none":
        write(root + "/usr/local/bin/nvidia-smi", SMI.format(gpu=gpu, cuda=cuda, driver=DRIVERS[cuda.split(".")[0]]), 0o755)
    os.makedirs(root + "/tree", exist_ok=True)
    if os.path.exists(root + "/tree/build"):
        return  # used again
    archive = subprocess.Popen(["git", "-C", ROOT, "archive", "HEAD"], stdout=subprocess.PIPE)
    must("tar", "-C", root + "/tree", "-x", stdin=archive.stdout)


def inside(root, command, offline=False):
    """Runs a command in the tree, as root of that system; its exit status and output."""
    script = (f"mount -t proc proc {root}/proc && mount --rbind /dev {root}/dev && "
              f"exec chroot {root} /bin/bash -c 'cd /tree && exec nice {command} </dev/null'")
    p = run("unshare", "--mount", "--pid", "--fork", *(["--net"] if offline else []), "sh", "-c", script, env=ENVIRONMENT)
    return p.returncode, p.stdout


def code_in(program):
    """What GPU code the program has: "sm_89", "compute_89". Reads the fat binaries that nvcc makes: a header (magic, version,
    its bytes, bytes of what follows), then entries (kind, version, bytes of header and payload; the architecture at 28)."""
    data, at, found = open(program, "rb").read(), 0, set()
    while (at := data.find(struct.pack("<I", 0xba55ed50), at)) >= 0:
        header, size = struct.unpack_from("<HQ", data, at + 6)
        entry, end = at + header, at + header + size
        while header == 16 and entry < end <= len(data):
            kind, _, bytes_of, payload = struct.unpack_from("<HHIQ", data, entry)
            found.add(("compute_" if kind == 1 else "sm_") + str(struct.unpack_from("<I", data, entry + 28)[0]))
            entry += bytes_of + payload
        at += 4
    return sorted(found)


def check_program(root, gpu):
    program = root + "/tree/build/cli/megatrain"
    arch = gpu.replace(".", "")
    code = code_in(program)
    assert code == ([] if gpu == "none" else ["compute_" + arch, "sm_" + arch]), code
    _, said = inside(root, "build/cli/megatrain doctor")
    assert gpu == "none" or "libcuda.so.1 is not found" in said, said
    used = must("du", "-sm", "--exclude=proc", *[d for d in (root + "/tree/.venv-cuda", root) if os.path.exists(d)]).split()[::2]
    print(f"ok program: {os.path.getsize(program)} bytes, {', '.join(code) or 'no GPU code'}; MB on the disk: {', '.join(used)}")


def check_demo(said, gpu):
    assert "answered word for word" in said, said[-3000:]
    assert gpu == "none" or "the cpu device is taken" in said, said[-3000:]
    print("ok demo: " + re.search(r"\d+ of \d+ answered word for word", said).group())


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--suite", default="bookworm")
    p.add_argument("--gpu", default="8.9")
    p.add_argument("--cuda", default="13.0")
    p.add_argument("--offline", action="store_true")
    p.add_argument("--command", default="scripts/demo")
    p.add_argument("--keep", help="the root's folder, which stays; one that is there is used again")
    a = p.parse_args()
    with tempfile.TemporaryDirectory(prefix="megatrain-root-") as tmp:
        root = os.path.abspath(a.keep or tmp + "/root")
        os.makedirs(root, exist_ok=True)
        make_root(root, a.suite, a.gpu, a.cuda)
        start = time.monotonic()
        if a.offline:
            status, said = inside(root, "scripts/setup --no-cuda")
            assert not status and "is left out (--no-cuda)" in said, said[-3000:]
            status, said = inside(root, a.command, offline=True)
            print(said[-1500:])
            assert status == 1 and "Python package index" in said and "--no-cuda" in said and "nvcc" in said, said
            assert not os.path.exists(root + "/tree/build/build.ninja")
            print("ok offline: it fails, and says what to do")
            return
        status, said = inside(root, a.command)
        write(root + "/tree/clean_root.log", said)
        print("\n".join(line for line in said.splitlines() if line.startswith(("setup:", "==", "warning"))))
        assert not status, f"exit {status}\n{said[-5000:]}"
        print(f"ok {a.command}: {time.monotonic() - start:.0f} s")
        check_program(root, a.gpu)
        if a.command == "scripts/demo":
            check_demo(said, a.gpu)


if __name__ == "__main__":
    main()
