# SPDX-License-Identifier: Apache-2.0
"""Reads nvcc's PTX: kernels, with their parameters, registers, shared memory and instructions."""
import re


class Error(Exception):
    pass


class Instruction:
    def __init__(self, line, guard, opcode, operands):
        self.line, self.guard, self.opcode, self.operands = line, guard, opcode, operands
        self.reads, self.writes, self.code, self.target, self.ends = [], [], None, None, False
        self.low_reads = []  # registers of which only the low half is read
        self.halves = self.partial = None  # a 64-bit pack's parts; the same once one of them is in doubt, and its target


class Kernel:
    def __init__(self, name):
        self.name, self.params, self.max_threads, self.shared, self.registers = name, [], [0, 0, 0], [], {}
        self.shared_bytes = self.dynamic_align = 0
        self.body = []  # Instruction, or a label as str
        self.address = 1024


def statements(text):
    """(line, statement) of each: what ends in ';', a label with its ':', '{' and '}'."""
    text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m.group().count("\n"), text, flags=re.S)
    # how newer compilers take the high half of a register
    text = re.sub(r"\{ \.reg \.b32 tmp; (mov\.b64 \{)tmp, (%\w+\}, %\w+;) \}", r"\1_, \2", text)
    line, start, at, depth = 1, 1, "", 0
    for raw in text.splitlines():
        raw = raw.split("//")[0]
        for c in raw + "\n":
            if not at.strip():
                at, start = "", line
            if c in "{}" and not at.strip():
                yield line, c
                continue
            at += c
            depth += (c in "([{") - (c in ")]}")
            if c == ";" or (c == ":" and re.fullmatch(r"\s*[$\w]+:", at)):
                yield start, " ".join(at.rstrip("; \n").split())
                at = ""
            elif c == "\n" and depth == 0 and re.match(r"\s*\.(version|target|address_size|maxntid|minnctapersm)\b", at):
                yield start, " ".join(at.split())
                at = ""
            elif c == "\n" and depth == 0 and re.search(r"\.entry\b.*\)\s*$", at, re.S):
                yield start, " ".join(at.split())
                at = ""
        line += 1
    if at.strip():
        raise Error(f"{start}: the file ends within a statement")


def align(n, to):
    return -(-n // to) * to


def parse_entry(text):
    m = re.fullmatch(r"(?:\.visible )?\.entry (\w+)\s*\((.*)\)", text)
    if not m:
        raise Error(f"not understood: {text}")
    k, offset = Kernel(m.group(1)), 0
    for p in filter(None, (p.strip() for p in m.group(2).split(","))):
        q = re.fullmatch(r"\.param(?: \.align (\d+))? \.(\w+)(?: \.ptr(?: \.\w+)?(?: \.align \d+)?)? (\w+)(?:\[(\d+)\])?", p)
        if not q:
            raise Error(f"parameter not understood: {p}")
        width = int(re.sub(r"\D", "", q.group(2))) // 8
        to = int(q.group(1) or width)
        offset = align(offset, to)
        k.params.append((q.group(3), offset, width * int(q.group(4) or 1)))
        offset += k.params[-1][2]
    return k


def add_shared(k, text):
    m = re.fullmatch(r"(\.extern )?\.shared(?: \.align (\d+))? \.(\w+) (\w+)(?:\[(\d*)\])?", text)
    if not m:
        raise Error(f"not understood: {text}")
    extern, to, kind, name, n = m.groups()
    width = int(re.sub(r"\D", "", kind)) // 8
    if extern:
        k.dynamic_align = int(to or width)
        k.shared.append((name, None, 0))
        return
    k.address = align(k.address, int(to or width))
    k.shared.append((name, k.address, width * int(n or 1)))
    k.shared_bytes = align(k.shared_bytes, int(to or width)) + k.shared[-1][2]
    k.address += k.shared[-1][2] + 64


def split_operands(text):
    parts, depth, at = [], 0, ""
    for c in text:
        depth += (c in "{[") - (c in "}]")
        if c == "," and not depth:
            parts.append(at.strip())
            at = ""
        else:
            at += c
    return parts + [at.strip()] if at.strip() else parts


def parse(text):
    """The kernels of a file."""
    kernels, k, module_shared, depth = [], None, [], 0
    for line, s in statements(text):
        try:
            if s == "{":
                depth += 1
                if depth > 1:
                    raise Error("a scope within a kernel")
            elif s == "}":
                depth -= 1
                kernels.append(k)
                k = None
            elif re.match(r"\.(version|target|address_size|minnctapersm|pragma)\b", s):
                pass
            elif ".entry" in s.split("(")[0]:
                k = parse_entry(s)
            elif s.startswith(".maxntid"):
                n = [int(x) for x in s.split(None, 1)[1].split(",")]
                k.max_threads = n + [1] * (3 - len(n))
            elif re.match(r"(\.extern )?\.shared\b", s):
                if k:
                    add_shared(k, s)
                else:
                    module_shared.append(s)
            elif s.startswith(".reg"):
                kind, names = re.fullmatch(r"\.reg \.(\w+) (.*)", s).groups()
                for n in names.split(","):
                    stem, count = re.fullmatch(r"(%\w+?)(?:<(\d+)>)?", n.strip()).groups()
                    for i in range(int(count)) if count else [""]:
                        # newer compilers declare floats as words
                        k.registers[f"{stem}{i}"] = "f32" if kind == "b32" and stem == "%f" else kind
            elif s.endswith(":"):
                k.body.append(s[:-1])
            elif k and depth:
                m = re.fullmatch(r"(?:@(!?%\w+) )?([a-z][\w.:]*)(?: (.*))?", s)
                if not m:
                    raise Error(f"not understood: {s}")
                k.body.append(Instruction(line, m.group(1), m.group(2), split_operands(m.group(3) or "")))
            else:
                raise Error(f"not understood: {s}")
        except (Error, AttributeError, TypeError) as e:
            raise Error(f"{line}: {e} in: {s}") from e
    for k in kernels:  # shared variables of the file belong to the kernels that name them
        used = " ".join(o for i in k.body if isinstance(i, Instruction) for o in i.operands)
        for s in module_shared:
            if re.search(rf"\b{re.escape(re.split(r'[ [ ]', s.split('[')[0].strip())[-1])}\b", used):
                add_shared(k, s)
        k.shared.sort(key=lambda v: v[1] if v[1] is not None else 1 << 30)
    return kernels
