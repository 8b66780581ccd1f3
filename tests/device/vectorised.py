# SPDX-License-Identifier: Apache-2.0
"""Hot loops of the cpu device (MT_HOT) are vectorised in each of their versions: a compiler that cannot do so says
nothing, and scalar code is several times slower. Usage: vectorised.py LIBRARY"""
import re
import subprocess
import sys

#: register that a version should compute in, by the version's name
VERSIONS = {"arch_x86_64_v4": "zmm", "arch_x86_64_v3": "ymm"}
SCALAR = re.compile(r"v?(add|sub|mul|div|f[n]?m(add|sub)\d+)ss\s")
FEW = 8  # scalar operations of a function that has no loop over floats


def functions(library):
    """Name and instructions of each version."""
    name, code = None, []
    dump = subprocess.run(["objdump", "-d", "--no-show-raw-insn", library], stdout=subprocess.PIPE, text=True, check=True)
    for line in dump.stdout.splitlines():
        start = re.match(r"[0-9a-f]+ <(.*)>:", line)
        if start:
            if name:
                yield name, code
            name, code = start[1], []
        elif "\t" in line:
            code.append(line.split("\t", 1)[1])
    if name:
        yield name, code


def main():
    found, bad = 0, []
    for name, code in functions(sys.argv[1]):
        register = VERSIONS.get(name.rpartition(".")[2])
        if not register:
            continue
        found += 1
        if sum(bool(SCALAR.match(x)) for x in code) > FEW and not any(register in x for x in code):
            bad.append(name)
    print(f"{found} versions of hot loops, scalar: {', '.join(sorted(bad)) or 'none'}")
    assert found > 50, "versions have other names with this compiler"
    sys.exit(bool(bad))


main()
