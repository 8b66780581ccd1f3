# SPDX-License-Identifier: Apache-2.0
"""What scripts/setup and scripts/build decide about GPU and toolkit, with programs on PATH that answer as nvidia-smi, nvcc,
pip and apt do; tests/door/clean_root.py does it in earnest. test_setup.py ROOT"""
import os
import shutil
import subprocess
import sys
import tempfile

SCRIPTS = os.path.join(sys.argv[1], "scripts")
SMI = """#!/bin/sh
case "$*" in
*compute_cap*) printf '{gpus}' ;;
"") echo "| Driver Version: 535.1   CUDA Version: {cuda} |" ;;
*) exit 9 ;;
esac
"""
NVCC = """#!/bin/sh
case $1 in
--version) echo "Cuda compilation tools, release {cuda}, V{cuda}.1" ;;
--list-gpu-arch) printf 'compute_%s\\n' {archs} ;;
--dryrun) echo "#$ TOP=$(dirname "$0")/.." >&2 ;;
esac
"""
ARCHS = {"13.0": "75 80 86 89 90 100 103 120 121", "12.4": "50 80 86 89 90", "12.9": "50 80 86 89 90 100 120"}
# Installs what wheels hold: of CUDA 13 a whole toolkit, of CUDA 12 all but the compiler.
PIP = """#!/bin/sh
echo "$*" >>"$LOG"
[ -z "$OFFLINE" ] || { echo "ERROR: No matching distribution found" >&2; exit 1; }
while [ "$1" != --target ]; do shift; done
case $* in *==13*) cu=cu13 ;; *) cu=cublas ;; esac
mkdir -p "$2/nvidia/$cu/include" "$2/nvidia/$cu/lib"
touch "$2/nvidia/$cu/include/cublasLt.h" "$2/nvidia/$cu/lib/libcublasLt.so.13"
mkdir -p "$2/nvidia/cuda_nvcc/include/crt"
echo "extern double sinpi(double x);" >"$2/nvidia/cuda_nvcc/include/crt/math_functions.h"
[ $cu != cu13 ] || { mkdir "$2/nvidia/$cu/bin"; cp "$NVCC13" "$2/nvidia/$cu/bin/nvcc"; }
"""
APT_CACHE = '#!/bin/sh\n[ -z "$APT" ] || echo "  Candidate: $APT.131~x"\n'
APT_GET = '#!/bin/sh\necho "apt-get $*" >>"$LOG"\ncase $* in *download*) cp "$DEB" . ;; esac\n'
# In this machine's place: no driver's library, no toolkit, /proc of the test.
DRIVE = """
import sys
sys.path.insert(0, sys.argv[1])
import gpu_seen, setup_cuda
gpu_seen.by_driver, gpu_seen.PROC, gpu_seen.WSL, setup_cuda.SYSTEM_NVCC = lambda: None, sys.argv[2], "/nowhere", "/nowhere"
try:
    setup_cuda.main("--no-cuda" in sys.argv, "--options" in sys.argv)
except setup_cuda.Failed as e:
    sys.exit(f"setup: {e}")
"""


def program(path, text):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as f:
        f.write(text)
    os.chmod(path, 0o755)


def toolkit(home, cuda, blas=True):
    program(home + "/bin/nvcc", NVCC.format(cuda=cuda, archs=ARCHS[cuda]))
    os.makedirs(home + "/include")
    if blas:
        open(home + "/include/cublasLt.h", "w").close()


def debian_package(tmp):
    """As Debian's nvidia-cuda-toolkit lies in its package."""
    tools = tmp + "/package/usr/lib/nvidia-cuda-toolkit"
    program(tools + "/bin/nvcc", NVCC.format(cuda="12.4", archs=ARCHS["12.4"]))
    program(tools + "/bin/g++", "#!/bin/sh\necho g++ 13\n")
    for path in (tools + "/bin/cicc", *(f"{tmp}/package/usr/bin/{n}" for n in ("cudafe++", "fatbinary", "nvlink", "ptxas"))):
        program(path, "#!/bin/sh\n")
    program(tools + "/libdevice/libdevice.10.bc", "")
    program(tmp + "/package/DEBIAN/control", "Package: nvidia-cuda-toolkit\nVersion: 12.4\nArchitecture: all\nMaintainer: m <m@m>\n"
            "Description: d\nDepends: g++-13 | g++-12\n")
    os.chmod(tmp + "/package/DEBIAN", 0o755)
    subprocess.run(["dpkg-deb", "-b", tmp + "/package", tmp + "/t.deb"], check=True, stdout=subprocess.DEVNULL)
    return tmp + "/t.deb"


class Machine:
    """A tree with the scripts, and a machine that has the given GPUs, driver and toolkit."""

    def __init__(self, tmp, name, gpus=("8.9",), cuda="13.0", has=None, blas=True, proc=None, **env):
        self.tree, self.log = f"{tmp}/{name}", f"{tmp}/{name}/log"
        os.makedirs(self.tree + "/scripts")
        for script in ("setup", "build", "setup_cuda.py", "gpu_seen.py", "packages.txt"):
            shutil.copy(f"{SCRIPTS}/{script}", self.tree + "/scripts")
        open(self.log, "w").close()
        if gpus:
            program(self.tree + "/bin/nvidia-smi", SMI.format(gpus="\\n".join(gpus), cuda=cuda))
        if proc:
            program(self.tree + "/proc/gpus/0000:01:00.0/information", "Model: a card\n")
            program(self.tree + "/proc/version", f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {proc}\n")
        if has:
            toolkit(self.tree + "/toolkit", has, blas)
        program(self.tree + "/.venv/bin/pip", PIP)
        program(self.tree + "/bin/apt-cache", APT_CACHE)
        program(self.tree + "/bin/apt-get", APT_GET)
        program(self.tree + "/nvcc13", NVCC.format(cuda="13.0", archs=ARCHS["13.0"]))
        path = ":".join([self.tree + "/bin", *([self.tree + "/toolkit/bin"] if has else []), "/usr/bin", "/bin"])
        self.env = {"PATH": path, "LOG": self.log, "NVCC13": self.tree + "/nvcc13", "HOME": tmp, "PYTHONDONTWRITEBYTECODE": "1", **env}

    def run(self, *cmd):
        p = subprocess.run(cmd, capture_output=True, text=True, env=self.env, cwd=self.tree)
        return p.returncode, p.stdout, p.stderr

    def setup(self, *args):
        status, out, said = self.run(sys.executable, "-c", DRIVE, self.tree + "/scripts", self.tree + "/proc", *args)
        assert "Traceback" not in said, said
        return status, out.split(), said

    def asked(self):
        with open(self.log) as f:
            return f.read()


def decisions(tmp):
    """What is installed (words that pip and apt were asked for), Meson's options, and what is said; status 1: not at all."""
    own13, own12, mine = (f"-Dnvcc=TREE/{x}/bin/nvcc" for x in (".venv-cuda/nvidia/cu13", ".venv-cuda/nvidia/cu12", "toolkit"))
    new, none = {"APT": "12.4", "DEB": debian_package(tmp)}, []
    cases = {
        "no-gpu": (dict(gpus=None), none, ["-Dcuda=disabled"], []),
        "left-out": (dict(args=["--no-cuda"]), none, ["-Dcuda=disabled"], ["compute capability 8.9", "left out"]),
        "too-old": (dict(gpus=["7.5"]), none, ["-Dcuda=disabled"], ["7.5", "too old"]),
        "geforce": (dict(), ["cublas", "==13.0.2"], ["-Dcuda=enabled", own13, "-Dgpu-archs=89"], ["8.9", "0.5 GB to download"]),
        "ampere": (dict(gpus=["8.6", "7.5", "8.6"]), ["==13.0.2"], [own13, "-Dgpu-archs=86"], ["8.6"]),
        "two": (dict(gpus=["12.0", "8.6"]), ["==13.0.2"], [own13, "-Dgpu-archs=86,120"], []),
        "hopper": (dict(gpus=["9.0"]), ["==13.0.2", "nvidia-cudnn-cu13==", "nvrtc"], ["-Dgpu-archs=90"], ["and cuDNN"]),
        "blackwell": (dict(gpus=["12.0"], cuda="13.1"), ["==13.0.2"], ["-Dgpu-archs=120"], []),
        "later": (dict(gpus=["13.0"], cuda="14.0"), ["==13.0.2"], ["-Dgpu-archs=121"], []),  # its driver compiles the PTX
        "has-toolkit": (dict(has="13.0"), none, [mine, "-Dgpu-archs=89"], []),
        "has-older": (dict(has="12.9", gpus=["12.1"]), none, [mine, "-Dgpu-archs=120"], []),
        "no-blas": (dict(has="13.0", blas=False), ["==13.0.2"], [own13], ["it has no cuBLAS"]),
        "old-driver": (dict(has="13.0", cuda="12.2", **new), ["==12.4.", "apt-get -qq download"], [own12, "-Dgpu-archs=89"],
                       ["the driver knows CUDA 12.2 and older", "fetching CUDA 12.4"]),
        "old-driver-hopper": (dict(gpus=["9.0"], cuda="12.2", **new), ["==12.4.", "nvidia-cudnn-cu12"], [own12, "-Dgpu-archs=90"], []),
        "old-driver-new-gpu": (dict(gpus=["12.0"], cuda="12.8", **new), none, 1, ["update the driver to 580", "CUDA 12.4"]),
        "no-compiler": (dict(cuda="12.2"), none, 1, ["update the driver to 580", "non-free"]),
        "older-driver": (dict(cuda="11.4", **new), none, 1, ["update the driver to 580"]),
        "offline": (dict(gpus=["12.0"], OFFLINE="1"), ["==13.0.2"], 1, ["Python package index", "No matching distribution"]),
        "by-kernel": (dict(gpus=None, proc="580.95.05"), ["==13.0.2"], ["-Dcuda=enabled", own13], ["is not known", "CUDA 13.0"]),
        "by-kernel-old": (dict(gpus=None, proc="535.261.03", **new), ["==12.4."], [own12], ["CUDA 12.0"]),
    }
    for name, (given, asked, options, said) in cases.items():
        args = given.pop("args", [])
        m = Machine(tmp, name, **given)
        status, _, err = m.setup(*args)
        log = m.asked()
        assert all(word in log for word in asked) and bool(log) == bool(asked), (name, log)
        assert all(word in err for word in said) and (said or asked or not err), (name, err)
        assert "cudnn" not in log or any("cudnn" in word for word in asked), (name, log)
        if options == 1:
            assert status == 1 and not os.path.exists(m.tree + "/.venv-cuda"), (name, status, err)
            assert m.setup("--options")[0] == 1, name
            continue
        assert status == 0, (name, status, err)
        got = [o.replace(m.tree, "TREE") for o in m.setup(*args, "--options")[1]]
        assert set(options) <= set(got) and len(got) <= 3, (name, got)
        if own12 in options:  # glibc declares it so, too
            with open(m.tree + "/.venv-cuda/nvidia/cu12/include/crt/math_functions.h") as f:
                assert f.read() == "extern double sinpi(double x) noexcept (true);\n"
        m.setup(*args)
        assert m.asked() == log, name  # once is enough
    print(f"ok decisions: {len(cases)} machines")


def builds(tmp):
    """scripts/build sets a folder up for the GPU, again when that has changed, and leaves alone what somebody set up."""
    m = Machine(tmp, "tree", has="13.0")
    tree = m.tree
    program(tree + "/bin/dpkg-query", "#!/bin/sh\necho installed\n")
    program(tree + "/bin/meson", '#!/bin/sh\n[ "$1" = --version ] && echo 1.7.0 && exit\necho "meson $*" >>"$LOG"\n'
            'mkdir -p build\ntouch build/build.ninja\n')
    program(tree + "/bin/ninja", '#!/bin/sh\necho "ninja $*" >>"$LOG"\n')

    def build(*args):
        before = len(m.asked())
        status, out, err = m.run(tree + "/scripts/build", *args)
        assert status == 0, out + err
        return [line for line in m.asked()[before:].replace(tree, "TREE").splitlines() if "fetching" not in line], out + err

    for_gpu = "meson setup build{} -Dcuda=enabled -Dnvcc=TREE/toolkit/bin/nvcc -Dgpu-archs={}"
    ninja = "ninja -C build program"
    assert build()[0] == [for_gpu.format("", 89), ninja]
    assert build()[0] == [ninja]
    program(tree + "/bin/nvidia-smi", SMI.format(gpus="12.0", cuda="13.0"))
    assert build()[0] == [for_gpu.format(" --reconfigure", 120), ninja]
    told = build("--no-cuda")
    assert told[0] == ["meson setup build --reconfigure -Dcuda=disabled", ninja] and "left out" in told[1], told
    shutil.rmtree(tree + "/build")
    assert build("-Dtests=enabled")[0] == ["meson setup build -Dtests=enabled", ninja]
    told = build()
    assert told[0] == [ninja] and "keeps the options" in told[1] and "-Dgpu-archs=120" in told[1], told
    print("ok builds")


def other_systems(tmp):
    """Without dpkg, setup looks for what packages bring, and names what is missing."""
    m = Machine(tmp, "other", gpus=None)
    for tool in ("bash", "sed", "awk", "grep", "sort", "head", "cat", "dirname", "python3", "env", "rm", "id", "paste"):
        os.symlink(shutil.which(tool), m.tree + "/bin/" + tool)
    for tool in ("gcc", "g++", "mpirun", "ninja", "nvcc"):
        program(f"{m.tree}/bin/{tool}", "#!/bin/sh\ncat >/dev/null\n")
    program(m.tree + "/bin/meson", "#!/bin/sh\necho 1.7.0\n")
    m.env["PATH"] = m.tree + "/bin"
    status, _, said = m.run(m.tree + "/scripts/setup")
    assert status == 1 and "libcjson-dev (libcjson)" in said and "pkg-config" in said, said
    program(m.tree + "/bin/pkg-config", '#!/bin/sh\n[ "$2" != cmocka ]\n')
    status, _, said = m.run(m.tree + "/scripts/setup")
    assert status == 0 and "going on without libcmocka-dev" in said, said
    print("ok other systems")


with tempfile.TemporaryDirectory(prefix="megatrain-setup-") as tmp:
    decisions(tmp)
    builds(tmp)
    other_systems(tmp)
