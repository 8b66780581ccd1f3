# SPDX-License-Identifier: Apache-2.0
"""Which NVIDIA GPUs this machine has, for scripts/setup_cuda.py and scripts/gpu-check: by the driver's library, by
nvidia-smi, by what the driver shows in /proc, by WSL's folder. Standard library only."""
import ctypes
import dataclasses
import glob
import os
import re
import shutil
import subprocess

# In containers that have the driver from outside, and in WSL.
DRIVER_FOLDERS = ("/usr/local/nvidia/lib64", "/usr/local/nvidia/lib", "/usr/lib/wsl/lib")
PROC = "/proc/driver/nvidia"
WSL = "/usr/lib/wsl/lib/libcuda.so.1"
# The first driver of each CUDA: its number begins so.
BRANCHES = ((580, (13, 0)), (525, (12, 0)), (450, (11, 0)))


@dataclasses.dataclass
class Seen:
    """GPUs of a machine. archs: compute capabilities, 89 for 8.9, none if it is not known; cuda: the newest that the driver
    knows, None if that is not known."""
    archs: list
    cuda: tuple = None

    def __str__(self):
        archs = ", ".join(f"{a // 10}.{a % 10}" for a in self.archs)
        return (f"an NVIDIA GPU ({'compute capability ' + archs if archs else 'its compute capability is not known'}, "
                f"{'a driver for CUDA %d.%d' % self.cuda if self.cuda else 'the version of its driver is not known'})")


def tool(name):
    places = [f"/usr/bin/{name}", *sorted(glob.glob(f"/usr/local/cuda*/bin/{name}")), f"/usr/local/nvidia/bin/{name}",
              f"/usr/lib/wsl/lib/{name}"]
    return shutil.which(name) or next((p for p in places if os.access(p, os.X_OK)), None)


def output_of(cmd, **more):
    """The output of a small program; empty if it fails."""
    try:
        p = subprocess.run(cmd, capture_output=True, text=True, timeout=60, **more)
        return p.stdout.strip() if p.returncode == 0 else ""
    except (OSError, subprocess.SubprocessError):
        return ""


def read_text(path):
    try:
        with open(path, errors="replace") as f:
            return f.read()
    except OSError:
        return ""


def load_driver():
    """The driver's library; containers may have it where no loader looks."""
    for path in ("libcuda.so.1", *(os.path.join(d, "libcuda.so.1") for d in DRIVER_FOLDERS)):
        try:
            return ctypes.CDLL(path)
        except OSError:
            pass
    return None


def by_driver():
    """What the driver's library says. A toolkit's stub of it, and a driver without a GPU, fail to start."""
    n, version, part = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    cuda = load_driver()
    if not cuda or not hasattr(cuda, "cuDeviceGetCount") or cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(n)) or n.value < 1:
        return None
    archs = set()
    for device in range(n.value):
        arch = 0
        for attribute in (75, 76):  # the major and the minor of the compute capability
            cuda.cuDeviceGetAttribute(ctypes.byref(part), attribute, device)
            arch = 10 * arch + part.value
        archs.add(arch)
    known = cuda.cuDriverGetVersion(ctypes.byref(version)) == 0 and version.value
    return Seen(sorted(archs), (version.value // 1000, version.value // 10 % 100) if known else None)


def of_branch(text):
    """The CUDA that a driver such as "535.261.03" knows at least."""
    number = re.search(r"\b(\d{3})\.\d+", text)
    return next((cuda for first, cuda in BRANCHES if number and int(number.group(1)) >= first), None)


def by_smi():
    smi = tool("nvidia-smi")
    if not smi:
        return None
    query = [smi, "--format=csv,noheader"]
    archs = {int(a + b) for a, b in re.findall(r"^\s*(\d+)\.(\d)\s*$", output_of([*query, "--query-gpu=compute_cap"]), re.M)}
    table = output_of([smi])
    version = re.search(r"CUDA (?:UMD )?Version\s*:\s*(\d+)\.(\d+)", table)
    cuda = tuple(map(int, version.groups())) if version else of_branch(output_of([*query, "--query-gpu=driver_version"]))
    return Seen(sorted(archs), cuda) if archs or version else None


def by_kernel():
    """GPUs that the kernel's driver has, or Windows's, though nothing here can ask them."""
    if glob.glob(PROC + "/gpus/*"):
        return Seen([], of_branch(read_text(PROC + "/version")))
    return Seen([]) if os.path.exists(WSL) else None


def seen():
    """The GPUs of this machine, or None."""
    return by_driver() or by_smi() or by_kernel()
