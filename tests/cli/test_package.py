# SPDX-License-Identifier: Apache-2.0
"""The Debian package, the archive and the wheel of this build: what is in each, that the program runs from where it is
unpacked, that the package names what it needs and the others have it. With MEGATRAIN_TEST_FULL=1, and as root, the package is
installed in a new Debian root, trains a step, is removed, and leaves nothing. test_package.py ROOT BUILD"""
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile

ROOT, BUILD = sys.argv[1:]
CONFIG = """[model]
path = {model}
init = random
[data]
train = {text}
tokenizer = byte
seq_len = 64
[train]
steps = 1
batch_size = 2
[checkpoint]
dir = {out}
[device]
kind = cpu
"""


def run(*cmd, **more):
    p = subprocess.run(cmd, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **more)
    assert not p.returncode, f"{cmd}: exit {p.returncode}\n{p.stdout[-3000:]}"
    return p.stdout


def files(root):
    return {os.path.relpath(os.path.join(d, n), root) for d, _, names in os.walk(root) for n in names}


def unpacked(package, tmp):
    root = os.path.join(tmp, "unpacked")
    run("dpkg-deb", "-x", package, root)
    has = files(root)
    for name in ("usr/bin/megatrain", "usr/share/man/man1/megatrain.1.gz", "usr/share/man/man5/megatrain.ini.5.gz",
                 "usr/share/bash-completion/completions/megatrain.bash", "usr/share/fish/vendor_completions.d/megatrain.fish",
                 "usr/share/doc/megatrain/examples/sft_qwen3.ini", "usr/share/megatrain/prepare_data.py",
                 "usr/share/megatrain/setup_data.py", "usr/share/megatrain/data_packages.txt",
                 "usr/share/megatrain/machines/rtx4090.ini", "usr/share/megatrain/models/Qwen3-8B.json",
                 "usr/share/doc/megatrain/copyright"):
        assert name in has, name
    assert all(name.startswith("usr/") for name in has), has
    program = os.path.join(root, "usr/bin/megatrain")
    home = {**os.environ, "HOME": tmp, "XDG_CACHE_HOME": os.path.join(tmp, "cache")}
    said = run(program, "plan", "--model", "Qwen3-8B", "--machine", "rtx4090", "--host-mem", "256GiB", cwd=tmp, env=home)
    assert "tokens/s" in said, said
    control = run("dpkg-deb", "-f", package)
    assert "Depends: libc6" in control and "libhwloc15" in control and "python3" in control, control
    print(f"ok unpacked: {len(has)} files, {os.path.getsize(package)} bytes")


def archive(tmp):
    """The archive for other distributions: the program finds all libraries in it that are not the system's."""
    path = run(os.path.join(ROOT, "scripts", "archive"), BUILD, tmp).strip().splitlines()[-1]
    run("tar", "-C", tmp, "-xf", path)
    root = os.path.join(tmp, os.path.basename(path).removesuffix(".tar.gz"))
    print(f"ok archive: {stands_alone(root, tmp)} libraries, {os.path.getsize(path)} bytes")


def stands_alone(root, tmp):
    """The program below `root` has all that is not the system's; how many libraries that are."""
    program, libraries = os.path.join(root, "bin/megatrain"), os.path.join(root, "lib/megatrain")
    for line in run("ldd", program).splitlines():
        soname, _, where = line.strip().partition(" => ")
        system = any(soname.startswith(s + ".so") for s in ("libc", "libm", "libstdc++", "libgcc_s", "libdl", "libcuda"))
        assert not where or system or where.startswith(os.path.join(root, "bin/../lib/megatrain/")), line
    home = {**os.environ, "HOME": tmp, "XDG_CACHE_HOME": os.path.join(tmp, "cache")}
    said = run(program, "plan", "--model", "Qwen3-8B", "--machine", "rtx4090", "--host-mem", "256GiB", cwd=tmp, env=home)
    assert "tokens/s" in said, said
    return len(os.listdir(libraries))


def train_and_export(program, tmp):
    """A step on text, and its export."""
    with open(os.path.join(tmp, "text.txt"), "w") as f:
        f.write("The river is green, and the boat is red.\n" * 400)
    ini, out = os.path.join(tmp, "run.ini"), os.path.join(tmp, "out")
    with open(ini, "w") as f:
        f.write(CONFIG.format(model=os.path.join(ROOT, "configs/models/demo-qwen3"), text=os.path.join(tmp, "text.txt"), out=out))
    assert "step 1/1" in run(program, "run", ini)
    run(program, "export", os.path.join(out, "checkpoint-1"), os.path.join(tmp, "exported"))


def wheel(tmp):
    """The wheel in a new Python environment: it stands alone there, trains, knows its extras, and leaves nothing."""
    path = run(os.path.join(ROOT, "scripts", "package"), "--wheel", BUILD, tmp).strip().splitlines()[-1]
    venv = os.path.join(tmp, "venv")
    run(sys.executable, "-m", "venv", venv)
    before, pip = files(venv), [os.path.join(venv, "bin/pip"), "--disable-pip-version-check"]
    run(*pip, "install", "--no-index", path)
    for name in ("share/man/man1/megatrain.1", "share/megatrain/prepare_data.py", "share/megatrain/machines/rtx4090.ini"):
        assert os.path.exists(os.path.join(venv, name)), name
    libraries = stands_alone(venv, tmp)
    train_and_export(os.path.join(venv, "bin/megatrain"), tmp)
    with zipfile.ZipFile(path) as z:
        meta = z.read(next(n for n in z.namelist() if n.endswith("/METADATA"))).decode()
    assert "Requires-Dist: tokenizers>=0.21; extra == 'data'" in meta, meta
    run(*pip, "uninstall", "-y", "megatrain")
    assert files(venv) == before, sorted(files(venv) ^ before)
    print(f"ok wheel: {os.path.basename(path)}, {libraries} libraries, {os.path.getsize(path)} bytes")


def mirror():
    """Where this machine's apt takes Debian from."""
    said = run("apt-get", "indextargets", "--format", "$(SITE) $(RELEASE)", "Created-By: Packages")
    return next(line.split()[0] for line in said.splitlines() if " " in line and not line.split()[0].endswith("security"))


def installed(package, tmp):
    root = os.path.join(tmp, "debian")
    run("debootstrap", "--variant=minbase", "bookworm", root, mirror())
    shutil.copy("/etc/apt/sources.list", os.path.join(root, "etc/apt/sources.list")) if os.path.exists("/etc/apt/sources.list") else None
    for name in ("etc/apt/sources.list.d", "etc/apt/apt.conf.d", "etc/apt/trusted.gpg.d", "etc/apt/keyrings"):
        if os.path.isdir("/" + name):
            shutil.copytree("/" + name, os.path.join(root, name), dirs_exist_ok=True)
    for name in ("etc/resolv.conf", "etc/hosts"):
        shutil.copy("/" + name, os.path.join(root, name))
    shutil.copy(package, os.path.join(root, "tmp/megatrain.deb"))

    def inside(*cmd): # /proc and /sys are there in a mount namespace alone, which ends with the command
        return run("unshare", "--mount", "sh", "-ec", 'mount -t proc proc "$0/proc"; mount --rbind /sys "$0/sys"; exec chroot "$0" "$@"',
                   root, "env", "HOME=/root", "DEBIAN_FRONTEND=noninteractive", *cmd)

    inside("apt-get", "-qq", "update")
    inside("apt-get", "-qq", "install", "-y", "--no-install-recommends", "libc6")
    before = files(os.path.join(root, "usr"))
    inside("apt-get", "-qq", "install", "-y", "--no-install-recommends", "/tmp/megatrain.deb")
    shutil.copytree(os.path.join(ROOT, "configs/models/demo-qwen3"), os.path.join(root, "root/model"))
    with open(os.path.join(root, "root/text.txt"), "w") as f:
        f.write("The river is green, and the boat is red.\n" * 400)
    with open(os.path.join(root, "root/run.ini"), "w") as f:
        f.write(CONFIG.format(model="model", text="text.txt", out="out"))
    assert "step 1/1" in inside("megatrain", "run", "/root/run.ini")
    inside("megatrain", "export", "/root/out/checkpoint-1", "/root/exported")
    inside("apt-get", "-qq", "install", "-y", "--reinstall", "--no-install-recommends", "/tmp/megatrain.deb")
    inside("apt-get", "-qq", "purge", "-y", "megatrain")
    left = {f for f in files(os.path.join(root, "usr")) - before if "megatrain" in f}
    assert not left, left
    print("ok installed, trained a step, exported, installed again, removed")


with tempfile.TemporaryDirectory() as tmp:
    package = run(os.path.join(ROOT, "scripts", "package"), BUILD, tmp).strip().splitlines()[-1]
    unpacked(package, tmp)
    archive(tmp)
    wheel(tmp)
    if os.environ.get("MEGATRAIN_TEST_FULL") and os.geteuid() == 0 and shutil.which("debootstrap"):
        installed(package, tmp)
