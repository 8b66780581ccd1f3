#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The CUDA toolkit for the NVIDIA GPU of this machine.

  setup_cuda.py              where no toolkit is there that serves GPU and driver, installs one into .venv-cuda
  setup_cuda.py --no-cuda    leaves the GPU out, and says so
  setup_cuda.py --options    prints Meson's options for the GPU, one a line; nothing is installed

For drivers of CUDA 13 and later all of it comes from the Python package index. There is no compiler of CUDA 12 on that
index: it is taken out of the distribution's package nvidia-cuda-toolkit, which is not installed, and headers and libraries
of the same release come from the index. Exit code 1: the GPU cannot be built for; the message says what to do.
"""
import dataclasses
import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile

sys.dont_write_bytecode = True
import gpu_seen
from gpu_seen import output_of

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
OWN = os.path.join(ROOT, ".venv-cuda")
OLDEST_GPU, OLDEST_CUDA = 80, (11, 8)
CUDNN = "9.21.1.3"
TESTED = {(13, 0): "2"}  # the last part of a release's version
# GB to download and on the disk: toolkit; cuDNN with nvrtc
SIZES, CUDNN_SIZES = (0.53, 1.0), (0.5, 0.9)
APT_PACKAGE = "nvidia-cuda-toolkit"
SYSTEM_NVCC = "/usr/local/cuda/bin/nvcc"
WITHOUT = "or go on without the GPU: the option --no-cuda of scripts/setup, build, demo and test"
# Where nvcc of a toolkit made of parts finds them.
PROFILE = """
TOP = $(_HERE_)/..
NVVMIR_LIBRARY_DIR = $(TOP)/nvvm/libdevice
LD_LIBRARY_PATH += $(TOP)/lib:
PATH += $(TOP)/nvvm/bin:$(_HERE_):
INCLUDES += "-I$(TOP)/include" $(_SPACE_)
LIBRARIES =+ $(_SPACE_) "-L$(TOP)/lib"
"""


class Failed(Exception):
    pass


def last_line(text):
    return "".join(text.strip().splitlines()[-1:])


def say(text):
    print("setup: " + text, file=sys.stderr)


# --- toolkits --------------------------------------------------------------------------------------

@dataclasses.dataclass
class Toolkit:
    nvcc: str
    cuda: tuple
    archs: list  # compute capabilities that it has compilers for
    has_blas: bool

    def code_for(self, arch):
        """The architecture whose code runs on that GPU: its own, or the first of its generation; None: none."""
        return next((a for a in (arch, arch // 10 * 10) if a in self.archs), None)

    def why_not(self, gpu):
        """Why it does not serve that GPU; empty: it does."""
        if self.cuda < OLDEST_CUDA:
            return "it is older than CUDA %d.%d" % OLDEST_CUDA
        if gpu.cuda and self.cuda[0] > gpu.cuda[0]:
            return "the driver knows CUDA %d.%d and older" % gpu.cuda
        if not self.has_blas:
            return "it has no cuBLAS (cublasLt.h)"
        # A later GPU compiles PTX when the program starts, if its driver knows this PTX.
        ptx = gpu.cuda and self.cuda <= gpu.cuda
        lacks = [a for a in gpu.archs if not self.code_for(a) and (a < max(self.archs) or not ptx)]
        return "it has no compiler for compute capability %d.%d" % divmod(lacks[0], 10) if lacks else ""

    def options(self, gpu):
        archs = sorted({self.code_for(a) or max(self.archs) for a in gpu.archs})
        return ["-Dcuda=enabled", "-Dnvcc=" + self.nvcc, *(["-Dgpu-archs=" + ",".join(map(str, archs))] if archs else [])]


def read_toolkit(nvcc):
    """The toolkit of an nvcc, or None."""
    cuda = re.search(r"release (\d+)\.(\d+)", output_of([nvcc, "--version"]))
    if not cuda:
        return None
    top = re.search(r"^#\$ TOP=(.+)", subprocess.run([nvcc, "--dryrun", "-c", "-x", "cu", "/dev/null"], capture_output=True,
                                                    text=True).stderr, re.M)
    home = top.group(1).strip() if top else "/usr"  # Debian's has no folder of its own
    return Toolkit(nvcc, tuple(map(int, cuda.groups())),
                   sorted(int(a) for a in re.findall(r"compute_(\d+)\b", output_of([nvcc, "--list-gpu-arch"]))),
                   os.path.exists(home + "/include/cublasLt.h"))


def toolkits():
    """Those of this machine, then our own."""
    places = [shutil.which("nvcc"), os.environ.get("CUDA_HOME", "") + "/bin/nvcc", SYSTEM_NVCC,
              *sorted(glob.glob(OWN + "/nvidia/cu*/bin/nvcc"))]
    there = dict.fromkeys(p for p in places if p and os.access(p, os.X_OK))
    return [t for t in map(read_toolkit, there) if t]


def choose(gpu, there):
    """The first toolkit that serves, or None; and what the others lack."""
    lacks = [(t, t.why_not(gpu)) for t in there]
    return (next((t for t, why in lacks if not why), None),
            "".join(f"; {t.nvcc} (CUDA {t.cuda[0]}.{t.cuda[1]}) does not serve: {why}" for t, why in lacks if why))


# --- installing ------------------------------------------------------------------------------------

def pip_install(target, *packages):
    pip = os.path.join(ROOT, ".venv", "bin", "pip")
    if not os.access(pip, os.X_OK):
        subprocess.run([sys.executable, "-m", "venv", os.path.join(ROOT, ".venv")], check=True)
    p = subprocess.run([pip, "install", "-q", "--disable-pip-version-check", "--no-compile", "--only-binary", ":all:",
                        "--retries", "1", "--target", target, *packages], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if p.returncode:
        raise Failed(f"{packages[0]} cannot be had from the Python package index (can it be reached?): {last_line(p.stderr)}")


def link_names(folder):
    """What the linker looks for: lib.so for lib.so.9."""
    for path in glob.glob(folder + "/lib*.so.*"):
        link = path[:path.index(".so.")] + ".so"
        if not os.path.lexists(link):
            os.symlink(os.path.basename(path), link)


def merge(source, target):
    """The files of a folder at their places in another, as second names."""
    for folder, _, names in os.walk(source):
        there = os.path.join(target, os.path.relpath(folder, source))
        os.makedirs(there, exist_ok=True)
        for name in names:
            if not os.path.lexists(os.path.join(there, name)):
                os.link(os.path.join(folder, name), os.path.join(there, name))


def apt_candidate():
    """The release of CUDA whose compiler the distribution has as a package; None: none."""
    version = re.search(r"Candidate: (\d+)\.(\d+)", output_of(["apt-cache", "policy", APT_PACKAGE], env={**os.environ, "LC_ALL": "C"}))
    return tuple(map(int, version.groups())) if version else None


def take_compiler(package, home):
    """nvcc and its parts out of the distribution's package."""
    with tempfile.TemporaryDirectory() as tmp:
        subprocess.run(["dpkg", "-x", package, tmp], check=True)
        os.makedirs(home + "/nvvm")
        tools = os.path.join(tmp, "usr/lib", APT_PACKAGE)
        shutil.copytree(tools + "/bin", home + "/bin", ignore=shutil.ignore_patterns("nvcc.profile", "cicc"))
        shutil.copytree(tools + "/libdevice", home + "/nvvm/libdevice")
        os.mkdir(home + "/nvvm/bin")
        shutil.copy(tools + "/bin/cicc", home + "/nvvm/bin/")
        for name in ("cudafe++", "fatbinary", "nvlink", "ptxas"):
            shutil.copy(f"{tmp}/usr/bin/{name}", home + "/bin/")
    with open(home + "/bin/nvcc.profile", "w") as f:
        f.write(PROFILE)


def host_compiler(package, home):
    """A g++ that this nvcc takes: it refuses later ones. The package's own g++ looks for one."""
    wanted = re.search(r"\bg\+\+-\d+", output_of(["dpkg-deb", "-f", package, "Depends"]))
    if output_of([home + "/bin/g++", "--version"]) or not wanted:
        return
    say(f"installing {wanted.group()}: this nvcc takes no later compiler")
    sudo = [] if os.getuid() == 0 else ["sudo"]
    if subprocess.run([*sudo, "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-qq", "install", "-y",
                       "--no-install-recommends", wanted.group()], stdout=subprocess.DEVNULL).returncode:
        raise Failed(f"this nvcc takes no later compiler than {wanted.group()}: apt-get install {wanted.group()}")


def add_compiler(new, home):
    """To headers and libraries of CUDA 11.8 or 12: the compiler of the distribution's package; all in one folder."""
    with tempfile.TemporaryDirectory() as tmp:
        os.chmod(tmp, 0o755)  # apt downloads as another user
        p = subprocess.run(["apt-get", "-qq", "download", APT_PACKAGE], cwd=tmp, capture_output=True, text=True)
        if p.returncode:
            raise Failed(f"the package {APT_PACKAGE} cannot be downloaded: {last_line(p.stderr)}")
        package, = glob.glob(tmp + "/*.deb")
        take_compiler(package, home)
        host_compiler(package, home)
    for part in glob.glob(new + "/nvidia/*"):
        for folder in ("include", "lib"):
            if part != home and os.path.isdir(f"{part}/{folder}"):
                merge(f"{part}/{folder}", f"{home}/{folder}")
    suit_glibc(home)


def suit_glibc(home):
    """glibc 2.41 (Debian 13) declares sinpi() and others itself, with noexcept, which these headers have from CUDA 13 on."""
    path = home + "/include/crt/math_functions.h"
    with open(path) as f:
        text = f.read()
    os.unlink(path)  # it is a second name of pip's
    with open(path, "w") as f:
        f.write(re.sub(r"(\b(?:sin|cos)pif?\((?:double|float) x\));", r"\1 noexcept (true);", text))


def release_for(gpu):
    """The release of CUDA to install."""
    if not gpu.cuda or gpu.cuda >= (13, 0):
        return (13, 0)
    newer = "update the driver to 580 or later, for which the compiler comes from the Python package index"
    apt = apt_candidate()
    if not apt:
        raise Failed(f"the Python package index has no compiler of CUDA {gpu.cuda[0]}, and apt no package {APT_PACKAGE} to take it "
                     f"from: {newer}; or add Debian's section non-free, Ubuntu's multiverse, and run apt-get update")
    if apt < OLDEST_CUDA or apt[0] > gpu.cuda[0] or any(a > 90 for a in gpu.archs) and apt < (12, 8):
        raise Failed(f"apt's package {APT_PACKAGE} is of CUDA {apt[0]}.{apt[1]}, which does not serve this GPU and driver: {newer}")
    return apt


def install(gpu):
    cuda = release_for(gpu)
    # cuDNN where its attention is the first choice (cuda/attention.c)
    cudnn = cuda >= (12, 0) and any(a == 90 or 100 <= a < 110 for a in gpu.archs)
    down, disk = (a + b * cudnn for a, b in zip(SIZES, CUDNN_SIZES))
    say(f"fetching CUDA {cuda[0]}.{cuda[1]}{' and cuDNN' if cudnn else ''} into .venv-cuda: {down:.1f} GB to download, {disk:.1f} GB on "
        "the disk (--no-cuda leaves it out)")
    parts = "cudart,cccl,cublas,nvcc" + (",nvvm,crt" if cuda >= (13, 0) else "") + (",nvrtc" if cudnn else "")
    new = OWN + ".new"
    shutil.rmtree(new, ignore_errors=True)
    pip_install(new, f"cuda-toolkit[{parts}]=={cuda[0]}.{cuda[1]}.{TESTED.get(cuda, '*')}",
                *([f"nvidia-cudnn-cu{cuda[0]}=={CUDNN}"] if cudnn else []))
    if cuda < (13, 0):
        add_compiler(new, f"{new}/nvidia/cu{cuda[0]}")
    for folder in glob.glob(new + "/nvidia/*/lib"):
        link_names(folder)
    shutil.rmtree(OWN, ignore_errors=True)
    os.rename(new, OWN)


# --- what is asked ---------------------------------------------------------------------------------

def gpu_to_build_for(no_cuda):
    """The GPUs that the program can use, or None; says which it leaves out."""
    gpu = gpu_seen.seen()
    if gpu and no_cuda:
        return say(f"{gpu} is left out (--no-cuda)")
    if gpu and gpu.archs and max(gpu.archs) < OLDEST_GPU:
        return say(f"{gpu} is too old for megatrain, which needs compute capability 8.0: it is left out")
    return gpu and gpu_seen.Seen([a for a in gpu.archs if a >= OLDEST_GPU], gpu.cuda)


def main(no_cuda, print_options):
    gpu = gpu_to_build_for(no_cuda)
    found, lacks = choose(gpu, toolkits()) if gpu else (None, "")
    if gpu and not found and not print_options:
        say(f"this machine has {gpu}, and no CUDA toolkit that serves it{lacks}")
        install(gpu)
        found, lacks = choose(gpu, toolkits())
    if gpu and not found:
        raise Failed(f"there is no CUDA toolkit that serves {gpu}{lacks}")
    if print_options:
        print("\n".join(found.options(gpu) if found else ["-Dcuda=disabled"]))


if __name__ == "__main__":
    asked = set(sys.argv[1:])
    if asked - {"--no-cuda", "--options"}:
        sys.exit(__doc__)
    try:
        main("--no-cuda" in asked, "--options" in asked)
    except (Failed, OSError, subprocess.CalledProcessError) as e:
        sys.exit(f"setup: {e}. Or install the CUDA toolkit by other means and put its nvcc on PATH; or go on without the GPU: "
                 "--no-cuda, an option of scripts/setup, build, demo and test")
