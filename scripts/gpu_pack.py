# SPDX-License-Identifier: Apache-2.0
"""gpu-check pack: the program and its checks, built here for one architecture, with the libraries that the other machine may
lack and the sources that the checks read, in one file. Standard library only."""
import os
import re
import shutil
import subprocess
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PROGRAMS = ["cli/megatrain", "cuda/megatrain-cudnn.so", "tests/device/conformance", "tests/bench/bench_kernels", "tests/bench/bench_peak"]
SOURCES = ["scripts", "configs", "tests/cli", "tests/cuda_host/test_streams.py", "tests/parity/fp8"]
MOST = 20 << 20
# What the system or the GPU's driver has; the C++ library is only for machines that have none.
SYSTEM = re.compile(r"lib(c|m|pthread|dl|rt|cuda|cublas|cublasLt|cudnn|nvrtc|cudart)\.so")
LAST = re.compile(r"lib(stdc\+\+|gcc_s)\.so")


def run(*cmd, **more):
    return subprocess.run(cmd, cwd=ROOT, check=True, stdout=subprocess.PIPE, **more).stdout


def build_for(arch):
    """The build's folder; optional libraries that are large or of one machine are left out."""
    build = os.path.join(ROOT, "build-gpu-" + arch)
    env = {**os.environ, "PATH": os.path.join(ROOT, ".venv", "bin") + ":" + os.environ["PATH"] + ":/usr/local/cuda/bin"}
    if not os.path.exists(os.path.join(build, "build.ninja")):
        run("meson", "setup", build, "-Dcuda=enabled", "-Dtests=enabled", "-Dgpu-archs=" + arch, "-Dmpi=disabled", "-Donednn=disabled", env=env)
    run("ninja", "-C", build, "gpu-check", "cli/megatrain", env=env)
    return build


def copy_program(source, to):
    if os.path.exists(source):
        os.makedirs(os.path.dirname(to), exist_ok=True)
        run("strip", "--strip-unneeded", "-o", to, source)


def copy_libraries(build, out):
    said = b"".join(run("ldd", os.path.join(build, f)) for f in PROGRAMS if os.path.exists(os.path.join(build, f))).decode()
    for name, path in sorted(set(re.findall(r"(\S+) => (/\S+)", said))):
        if not SYSTEM.match(name):
            copy_program(os.path.realpath(path), os.path.join(out, "lib-last" if LAST.match(name) else "lib", name))


def pack(parser, arch=None, path=None):
    if not arch or not re.fullmatch(r"\d+[a-z]?", arch):
        parser.error("pack ARCH [FILE]: ARCH is a compute capability without its point, such as 90")
    path = path or f"gpu-check-{arch}.tar.gz"
    build = build_for(arch)
    with tempfile.TemporaryDirectory() as tmp:
        out = os.path.join(tmp, "gpu-check")
        os.mkdir(out)
        subprocess.run(["tar", "-x", "-C", out], input=run("git", "archive", "HEAD", *SOURCES), check=True)
        for f in PROGRAMS:
            copy_program(os.path.join(build, f), os.path.join(out, "build", f))
        copy_libraries(build, os.path.join(out, "build"))
        with open(os.path.join(out, "commit"), "wb") as f:
            f.write(run("git", "describe", "--always", "--dirty"))
        shutil.make_archive(os.path.join(tmp, "pack"), "gztar", tmp, "gpu-check")
        size = os.path.getsize(os.path.join(tmp, "pack.tar.gz"))
        shutil.move(os.path.join(tmp, "pack.tar.gz"), path)
    print(f"{path}: {size / (1 << 20):.1f} MiB; on the machine with the GPU: tar xzf {os.path.basename(path)}, cd gpu-check, "
          "scripts/gpu-check --build build --short")
    return int(size > MOST)
