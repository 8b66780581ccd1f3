#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes a Python wheel of an archive of scripts/archive, for scripts/package --wheel: make_wheel.py ARCHIVE OUT_DIR

bin/, lib/ and share/ of the archive go where pip puts a package's programs and files: into the environment's own folders, so
the program finds its libraries and its data helper as it does everywhere. Extras: "data" installs what the data helper
imports; "cuda13" (or the number of the build's CUDA) cuBLAS, which the program looks for among the environment's packages.
"""
import base64
import hashlib
import os
import re
import subprocess
import sys
import tarfile
import zipfile

HERE = os.path.dirname(os.path.abspath(__file__))
METADATA = """Metadata-Version: 2.1
Name: megatrain
Version: {version}
Summary: Trainer of language models much larger than the GPU's memory
License: Apache-2.0
Requires-Python: >=3.9
"""


def requirements(cuda):
    with open(os.path.join(HERE, "data_packages.txt")) as f:
        extras = {"data": [line.strip() for line in f if line[:1] not in ("#", "\n")]}
    if cuda:
        extras[f"cuda{cuda}"] = [f"nvidia-cublas>={cuda},<{cuda + 1}" if cuda > 12 else f"nvidia-cublas-cu{cuda}"]
    return "".join(f"Provides-Extra: {name}\n" + "".join(f"Requires-Dist: {p}; extra == '{name}'\n" for p in packages)
                   for name, packages in extras.items())


def glibc_of(files):
    """The newest glibc whose symbols they take."""
    symbols = subprocess.run(["objdump", "-T", *files], capture_output=True, text=True, check=True).stdout
    return max(tuple(map(int, v)) for v in re.findall(r"GLIBC_(\d+)\.(\d+)", symbols))


def place(path):
    """Where a file of the archive goes in the wheel."""
    return "scripts/" + os.path.basename(path) if path.startswith("bin/") else "data/" + path


def write(wheel, files, info, texts):
    record = []

    def add(name, data, mode):
        entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
        entry.external_attr, entry.compress_type = (0o100000 | mode) << 16, zipfile.ZIP_DEFLATED
        z.writestr(entry, data)
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record.append(f"{name},sha256={digest},{len(data)}\n")

    with zipfile.ZipFile(wheel, "w") as z:
        for name, (data, mode) in sorted(files.items()):
            add(name, data, mode)
        for name, text in texts.items():
            add(f"{info}/{name}", text.encode(), 0o644)
        z.writestr(f"{info}/RECORD", "".join(record) + f"{info}/RECORD,,\n")


def main(archive, out):
    with tarfile.open(archive) as tar:
        members = {m.name.split("/", 1)[1]: (tar.extractfile(m).read(), m.mode & 0o777) for m in tar if m.isfile()}
    version = re.search(r"megatrain-(.+)-linux-", os.path.basename(archive)).group(1).replace("~", "")
    program = members["bin/megatrain"][0]
    blas = re.search(rb"libcublasLt\.so\.(\d+)", program)
    with tarfile.open(archive) as tar:
        unpacked = os.path.join(out, ".wheel")
        tar.extractall(unpacked)
        objects = [os.path.join(d, n) for d, _, names in os.walk(unpacked) for n in names if n == "megatrain" or ".so" in n]
        tag = "py3-none-manylinux_%d_%d_%s" % (*glibc_of(objects), os.uname().machine)
        subprocess.run(["rm", "-r", unpacked], check=True)
    base = f"megatrain-{version}"
    wheel = os.path.join(out, f"{base}-{tag}.whl")
    write(wheel, {f"{base}.data/{place(name)}": m for name, m in members.items()}, base + ".dist-info",
          {"METADATA": METADATA.format(version=version) + requirements(int(blas.group(1)) if blas else 0),
           "WHEEL": f"Wheel-Version: 1.0\nGenerator: megatrain\nRoot-Is-Purelib: false\nTag: {tag}\n"})
    print(wheel)


main(*sys.argv[1:])
