#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""ptx2c.py FILE.ptx OUT.cpp: each kernel of nvcc's PTX as a C++ function that does what one thread does, on ptx.h.

Registers become variables, branches gotos, accesses to memory calls that check. A register that is read where not every
path has written it carries a flag, and the read is checked when it happens. What is not known here (an opcode, a
modifier, a directive) is an error: nothing is guessed.
"""
import os
import re
import sys

from ptx_blocks import blocks_of, settle
from ptx_text import Error, Instruction, parse

C_TYPE = {"pred": "bool", "f32": "float", "f64": "double"}
for _w in 8, 16, 32, 64:
    C_TYPE.update({f"u{_w}": f"uint{_w}_t", f"b{_w}": f"uint{_w}_t", f"s{_w}": f"int{_w}_t"})
SPECIAL = {f"%{name}.{d}": f"mt_emu_{var}.{d}" for name, var in
           (("tid", "thread_idx"), ("ntid", "block_dim"), ("ctaid", "block_idx"), ("nctaid", "grid_dim")) for d in "xyz"}
SPECIAL["%laneid"] = "(t.id % 32)"
INT = "[us](?:16|32|64)"
BITS = "b(?:16|32|64)"
WORD = "[usbf](?:8|16|32|64)"

# --- instructions ----------------------------------------------------------------------------------------------

OPERATIONS = []


def op(pattern):
    def add(f):
        OPERATIONS.append((re.compile(pattern), f))
        return f
    return add


class Writer:
    """Makes the C++ of one instruction; notes the registers it reads and writes."""

    def __init__(self, kernel, ins):
        self.k, self.i, self.o = kernel, ins, ins.operands

    def variable(self, reg):
        if reg not in self.k.registers:
            raise Error(f"unknown register {reg}")
        return reg.replace("%", "v_")

    def address_of(self, symbol):
        for name, at, _ in self.k.shared:
            if name == symbol:
                return f"{at}u" if at is not None else "t.l->dynamic_address"
        for name, at, _ in self.k.params:
            if name == symbol:
                return f"{at}u"
        raise Error(f"unknown name {symbol}")

    def read(self, operand, kind):
        """A C++ expression of that PTX type."""
        c = C_TYPE[kind]
        if operand in SPECIAL:
            return f"({c}){SPECIAL[operand]}"
        if operand.startswith("%"):
            v, have = self.variable(operand), self.k.registers[operand]
            low = have[1:] == "64" and kind[1:] in ("8", "16", "32")
            (self.i.low_reads if low else self.i.reads).append(operand)
            if have == "pred" or kind == "pred":
                if have != kind:
                    raise Error(f"{operand} is a {have}, not a {kind}")
                return v
            if kind == have or C_TYPE[have] == c:
                return v
            if have[0] == "f":
                return f"({c})ptx::bits({v})"
            if kind[0] == "f":
                return f"ptx::{'flt' if kind == 'f32' else 'dbl'}({v})"
            return f"({c}){v}"
        if re.fullmatch(r"0[fF][0-9A-Fa-f]{8}", operand):
            return f"ptx::flt(0x{operand[2:]}u)" if kind == "f32" else f"({c})0x{operand[2:]}u"
        if re.fullmatch(r"0[dD][0-9A-Fa-f]{16}", operand):
            return f"ptx::dbl(0x{operand[2:]}ull)"
        if re.fullmatch(r"-?(0[xX][0-9A-Fa-f]+|\d+)", operand) and kind not in ("f32", "f64"):
            n = int(operand, 0)
            return f"({c}){n & 0xffffffffffffffff}ull"
        if re.fullmatch(r"[$\w]+", operand):
            return f"({c}){self.address_of(operand)}"
        raise Error(f"operand {operand} as {kind}")

    def write(self, reg, kind, value):
        """An assignment of a C++ expression of that PTX type."""
        self.i.writes.append(reg)
        v, have = self.variable(reg), self.k.registers[reg]
        if have == "pred" or kind == "pred":
            if have != kind:
                raise Error(f"{reg} is a {have}, not a {kind}")
            return f"{v} = {value};"
        if have[0] == "f" and kind[0] != "f":
            return f"{v} = ptx::{'flt' if have == 'f32' else 'dbl'}(({C_TYPE['u' + have[1:]]})({value}));"
        if have[0] != "f" and kind[0] == "f":
            return f"{v} = ({C_TYPE[have]})ptx::bits({value});"
        return f"{v} = {value};" if have[0] == "f" else f"{v} = ({C_TYPE[have]})({value});"

    def result(self, kind, value, reg=None):
        return self.write(reg or self.o[0], kind, value)

    def args(self, *kinds):
        return [self.read(o, k) for o, k in zip(self.o[1:], kinds)]

    def address(self, operand):
        m = re.fullmatch(r"\[([%$\w]+)(?:\+(-?\w+))?\]", operand)
        if not m:
            raise Error(f"address {operand}")
        base = self.read(m.group(1), "b64")
        if m.group(1).startswith("%") and self.k.registers[m.group(1)] in ("b32", "u32"):
            return f"(uint64_t)(uint32_t)({base} + {int(m.group(2) or '0', 0)})"
        return f"{base} + (int64_t){int(m.group(2) or '0', 0)}" if m.group(2) else base

    def group(self, operand):
        return [x.strip() for x in operand.strip("{}").split(",")] if operand.startswith("{") else [operand]

    def here(self):
        return f"FILE_, {self.i.line}"


@op(rf"(add|sub|mul\.lo)\.({INT})")
def _(w, name, kind):
    a, b = w.args(kind, kind)
    u = C_TYPE["u" + kind[1:]]  # without overflow
    wide = "(uint32_t)" if kind[1:] == "16" else ""
    return w.result(kind, f"({u})({wide}({u}){a} {'+-*'[('add', 'sub', 'mul.lo').index(name)]} {wide}({u}){b})")


@op(r"(add|sub|mul)\.rn\.f32")  # without .rn the assembler may fuse them
def _(w, name):
    a, b = w.args("f32", "f32")
    return w.result("f32", f"{a} {'+-*'[('add', 'sub', 'mul').index(name)]} {b}")


@op(r"add\.rz\.f32")
def _(w):
    return w.result("f32", "ptx::add_to_zero({}, {})".format(*w.args("f32", "f32")))


@op(r"(add|sub|mul)\.rn\.f64")
def _(w, name):
    a, b = w.args("f64", "f64")
    return w.result("f64", f"{a} {'+-*'[('add', 'sub', 'mul').index(name)]} {b}")


@op(r"fma\.(rn|rm)\.f32")
def _(w, rounding):
    a, b, c = w.args("f32", "f32", "f32")
    return w.result("f32", f"{'fmaf' if rounding == 'rn' else 'ptx::fma_down'}({a}, {b}, {c})")


@op(r"(div|rcp|sqrt)\.rn\.f32")
def _(w, name):
    a = w.args(*["f32"] * (len(w.o) - 1))
    return w.result("f32", f"{a[0]} / {a[1]}" if name == "div" else f"1.0f / {a[0]}" if name == "rcp" else f"sqrtf({a[0]})")


@op(r"(copysign)\.f32")
def _(w, name): # the sign of the first, the rest of the second
    a = w.args("f32", "f32")
    return w.result("f32", f"copysignf({a[1]}, {a[0]})")


@op(r"(rcp\.approx|rcp\.approx\.ftz|ex2\.approx|ex2\.approx\.ftz)\.f32")
def _(w, name):
    return w.result("f32", f"ptx::{ {'rcp.approx': 'rcp_approx', 'rcp.approx.ftz': 'rcp_ftz', 'ex2.approx': 'ex2', 'ex2.approx.ftz': 'ex2_ftz'}[name]}({w.args('f32')[0]})")


@op(rf"mul\.(wide|hi)\.([us](?:16|32|64))")
def _(w, name, kind):
    a, b = w.args(kind, kind)
    twice = f"{kind[0]}{2 * int(kind[1:])}"
    wide = C_TYPE.get(twice, "__int128" if kind == "s64" else "unsigned __int128")
    if name == "hi":
        return w.result(kind, f"ptx::mul_hi<{C_TYPE[kind]}, {wide}>({a}, {b})")
    return w.result(twice, f"({wide}){a} * ({wide}){b}")


@op(rf"mad\.(lo|wide)\.({INT})")
def _(w, name, kind):
    if name == "wide":
        twice = f"{kind[0]}{2 * int(kind[1:])}"
        a, b, c = w.args(kind, kind, twice)
        u = C_TYPE["u" + twice[1:]]
        return w.result(twice, f"({u})({C_TYPE[twice]}){a} * ({u})({C_TYPE[twice]}){b} + ({u}){c}")
    a, b, c = (f"({C_TYPE['u' + kind[1:]]}){x}" for x in w.args(kind, kind, kind))
    return w.result(kind, f"{a} * {b} + {c}")


@op(rf"(div|rem)\.({INT})")
def _(w, name, kind):
    a, b = w.args(kind, kind)
    c = C_TYPE[kind]
    return w.result(kind, f"ptx::{'quotient' if name == 'div' else 'remainder_of'}<{c}>(t, {a}, {b}, {w.i.line})")


@op(rf"(min|max)\.({INT}|f32)")
def _(w, name, kind):
    a, b = w.args(kind, kind)
    return w.result(kind, f"ptx::{'lesser' if name == 'min' else 'greater'}({a}, {b})")


@op(r"(neg|abs)\.(s16|s32|s64|f32)")
def _(w, name, kind):
    a = w.args(kind)[0]
    if kind == "f32":
        return w.result("f32", f"ptx::flt(ptx::bits({a}) ^ 0x80000000u)" if name == "neg" else f"fabsf({a})")
    u = C_TYPE["u" + kind[1:]]
    minus = f"({u})(0 - ({u}){a})"
    return w.result(kind, minus if name == "neg" else f"{a} < 0 ? {minus} : ({u}){a}")


@op(rf"(and|or|xor)\.({BITS}|pred)")
def _(w, name, kind):
    a, b = w.args(kind, kind)
    return w.result(kind, f"{a} {'&|^'[('and', 'or', 'xor').index(name)]} {b}")


@op(rf"not\.({BITS}|pred)")
def _(w, kind):
    return w.result(kind, f"{'!' if kind == 'pred' else '~'}{w.args(kind)[0]}")


@op(rf"(shl|shr)\.([usb](?:16|32|64))")
def _(w, name, kind):
    a, n = w.args(kind, "u32")
    return w.result(kind, f"ptx::{name}<{C_TYPE[kind]}>({a}, {n})")


@op(r"bfe\.u32")
def _(w):
    return w.result("u32", "ptx::bfe_u32({}, {}, {})".format(*w.args("u32", "u32", "u32")))


@op(r"bfi\.b32")
def _(w):
    return w.result("b32", "ptx::bfi_b32({}, {}, {}, {})".format(*w.args("b32", "b32", "u32", "u32")))


@op(r"popc\.b32")
def _(w):
    return w.result("u32", f"__builtin_popcount({w.args('b32')[0]})")


@op(r"prmt\.b32")
def _(w):
    return w.result("b32", "ptx::prmt({}, {}, {})".format(*w.args("b32", "b32", "b32")))


@op(rf"setp\.(\w+)\.({INT}|{BITS}|f32)")
def _(w, name, kind):
    a, b = w.args(kind, kind)
    sign = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
    if name in sign and not (kind == "f32" and name == "ne"):
        if kind[0] == "b" and name not in ("eq", "ne"):
            raise Error("order of bits")
        return w.result("pred", f"{a} {sign[name]} {b}")
    if kind != "f32":
        raise Error(f"comparison {name}")
    if name == "ne":
        return w.result("pred", f"{a} < {b} || {a} > {b}")
    opposite = {"equ": ("<", ">"), "neu": ("!=",), "ltu": (">=",), "leu": (">",), "gtu": ("<=",), "geu": ("<",)}
    if name == "equ":
        return w.result("pred", f"!({a} < {b} || {a} > {b})")
    if name == "neu":
        return w.result("pred", f"{a} != {b}")
    if name in opposite:
        return w.result("pred", f"!({a} {opposite[name][0]} {b})")
    if name in ("num", "nan"):
        return w.result("pred", f"{'' if name == 'nan' else '!'}({a} != {a} || {b} != {b})")
    raise Error(f"comparison {name}")


@op(rf"selp\.({WORD})")
def _(w, kind):
    a, b, p = w.args(kind, kind, "pred")
    return w.result(kind, f"{p} ? {a} : {b}")


@op(rf"mov\.({WORD}|pred)")
def _(w, kind):
    to, of = w.group(w.o[0]), w.group(w.o[1])
    if len(to) == len(of) == 1:
        return w.result(kind, w.read(of[0], kind))
    n, width = max(len(to), len(of)), int(kind[1:])
    part = f"b{width // n}"
    if part == "b8":
        raise Error("bytes of a register")
    c = C_TYPE["u" + kind[1:]]
    if len(of) == n:
        code = w.result(kind, " | ".join(f"({c}){w.read(x, part)} << {i * width // n}" for i, x in enumerate(of)))
        if width == 64 and n == 2 and not w.i.guard:
            w.i.halves = [x if x.startswith("%") and x not in SPECIAL else None for x in of]
        return code
    v = w.read(of[0], part if to[1:] == ["_"] else kind)
    return "{ " + f"{c} all_ = {v}; " + " ".join(
        w.result(part, f"({C_TYPE[part]})(all_ >> {i * width // n})", x) for i, x in enumerate(to) if x != "_") + " }"


@op(rf"cvt\.([usb](?:8|16|32|64))\.([usb](?:8|16|32|64))")
def _(w, to, of):
    narrows = int(to[1:]) < int(of[1:])  # then it reads the low half alone
    return w.result(to, f"({C_TYPE[to]}){w.args(to if narrows else of)[0]}")


@op(rf"cvt\.rn\.f32\.({INT})")
def _(w, of):
    return w.result("f32", f"(float){w.args(of)[0]}")


@op(r"cvt\.(?:rn\.f32\.f64|f64\.f32)")
def _(w):
    to, of = w.i.opcode.split(".")[-2:]
    return w.result(to, f"({C_TYPE[to]})({w.args(of)[0]})")


@op(r"cvt\.rni\.f32\.f32")
def _(w):
    return w.result("f32", f"rintf({w.args('f32')[0]})")


@op(r"cvt\.rzi\.s32\.f32")
def _(w):
    return w.result("s32", f"ptx::truncated({w.args('f32')[0]})")


@op(r"cvt\.sat\.f32\.f32")
def _(w):
    return w.result("f32", f"ptx::saturate({w.args('f32')[0]})")


@op(r"cvt\.rn\.bf16x2\.f32")
def _(w):
    return w.result("b32", "ptx::bf16x2({}, {})".format(*w.args("f32", "f32")))


@op(r"cvt\.rn\.bf16\.f32")
def _(w):
    return w.result("b16", f"ptx::bf16_of({w.args('f32')[0]})")


@op(r"cvta(\.to)?\.(global|shared)\.u(?:32|64)")
def _(w, to, space):
    a = w.args("b64")[0]
    return w.result("b64", a if space == "global" else f"{a} {'-' if to else '+'} ptx::SHARED_WINDOW")


@op(rf"ld\.(param|global|global\.nc|shared|)\.?(v2\.|v4\.|)({WORD})")
def _(w, space, vector, kind):
    regs, where = w.group(w.o[0]), w.address(w.o[1])
    c, n = C_TYPE[kind], int(vector[1]) if vector else 1
    if len(regs) != n:
        raise Error(f"{len(regs)} registers")
    name = {"param": "param", "global": "global", "global.nc": "constant", "shared": "shared", "": "generic"}[space]
    if not vector:
        return w.result(kind, f"ptx::ld_{name}<{c}>(t, {where}, {w.i.line})")
    return "{ " + f"auto all_ = ptx::ld_{name}<ptx::v{n}<{c}>>(t, {where}, {w.i.line}); " + " ".join(
        w.result(kind, f"all_.v[{i}]", r) for i, r in enumerate(regs) if r != "_") + " }"


@op(rf"st\.(global|shared|)\.?(v2\.|v4\.|)({WORD})")
def _(w, space, vector, kind):
    where, regs = w.address(w.o[0]), w.group(w.o[1])
    c, n = C_TYPE[kind], int(vector[1]) if vector else 1
    if len(regs) != n:
        raise Error(f"{len(regs)} registers")
    values = [w.read(r, kind) for r in regs]
    t = f"ptx::v{n}<{c}>" if vector else c
    value = t + "{{" + ", ".join(values) + "}}" if vector else f"({c}){values[0]}"
    return f"ptx::st_{space or 'generic'}<{t}>(t, {where}, {value}, {w.i.line});"


@op(r"bra(?:\.uni)?")
def _(w):
    w.i.target = w.o[0]
    return f"goto {label(w.o[0])};"


@op(r"ret|exit")
def _(w):
    w.i.ends = True
    return f"{{ ptx::leave(t, {w.i.line}); return; }}"


@op(r"(?:bar|barrier)\.sync")
def _(w):
    if w.o != ["0"]:
        raise Error("a barrier other than 0 of all threads")
    return f"mt_emu_barrier({w.here()});"


@op(r"bar\.warp\.sync")
def _(w):
    return f"ptx::sync_warp(t, {w.read(w.o[0], 'b32')}, {w.here()});"


@op(r"shfl\.sync\.(up|down|bfly|idx)\.b32")
def _(w, how):
    to = w.o[0].split("|")
    v, b, c, mask = w.args("b32", "b32", "b32", "b32")
    s = "{ bool valid_; " + w.result("b32", f"ptx::shfl(t, ptx::SHFL_{how.upper()}, &valid_, {v}, {b}, {c}, {mask}, {w.here()})", to[0])
    return s + (" " + w.result("pred", "valid_", to[1]) if len(to) == 2 else "") + " }"


@op(r"vote\.sync\.(any\.pred|all\.pred|ballot\.b32)")
def _(w, how):
    p, mask = w.args("pred", "b32")
    all_lanes = f"ptx::ballot(t, {p}, {mask}, {w.here()})"
    if how == "ballot.b32":
        return w.result("b32", all_lanes)
    return w.result("pred", f"{all_lanes} != 0" if how == "any.pred" else f"{all_lanes} == {mask}")


@op(r"ldmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared\.b16")
def _(w, n, trans):
    regs, where = w.group(w.o[0]), w.address(w.o[1])
    return "{ " + f"uint32_t all_[{n}]; ptx::ldmatrix(t, all_, {n}, {'true' if trans else 'false'}, {where}, {w.here()}); " + \
        " ".join(w.result("b32", f"all_[{i}]", r) for i, r in enumerate(regs)) + " }"


@op(r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.bf16\.bf16\.f32")
def _(w):
    d, a, b, c = (w.group(o) for o in w.o)
    lists = [", ".join(w.read(r, kind) for r in regs) for regs, kind in ((a, "b32"), (b, "b32"), (c, "f32"))]
    return ("{ " + f"float d_[4], c_[4] = {{{lists[2]}}}; uint32_t a_[4] = {{{lists[0]}}}, b_[2] = {{{lists[1]}}}; " +
            f"ptx::mma_bf16(t, d_, a_, b_, c_, {w.here()}); " +
            " ".join(w.result("f32", f"d_[{i}]", r) for i, r in enumerate(d)) + " }")


@op(r"cp\.async\.(?:ca|cg)\.shared\.global(?:\.L2::\d+B)?")
def _(w):
    to, of, n = w.address(w.o[0]), w.address(w.o[1]), w.read(w.o[2], "u32")
    some = w.read(w.o[3], "u32") if len(w.o) > 3 else n
    return f"ptx::copy_async(t, (uint32_t)({to}), {of}, {n}, {some}, {w.i.line});"


@op(r"cp\.async\.commit_group")
def _(w):
    return "ptx::commit_group(t);"


@op(r"cp\.async\.wait_group")
def _(w):
    return f"ptx::wait_group(t, {int(w.o[0])});"


@op(r"cp\.async\.wait_all")
def _(w):
    return "ptx::wait_group(t, -1);"


# What a kernel may well come to use: it is named, so that nobody takes it for a fault of the parser.
UNMODELLED = [
    (r"mma\..*\.(e4m3|e5m2|e2m3|e3m2|e2m1)\b", "products of 8, 6 or 4-bit floats"),
    (r"mma\.sync|mma\.sp|wmma\.|wgmma\.|tcgen05\.", "products other than m16n8k16 of bf16 with f32 sums"),
    (r"(lg2|tanh|sin|cos|sqrt|rsqrt|div)\.(approx|full)", "this approximation; ex2 and rcp are"),
    (r"cvt\..*(e4m3|e5m2|e2m1|ue8m0)x2", "conversions to 8 and 4-bit floats"),
    (r"(stmatrix|movmatrix|ldmatrix)\.", "this movement of matrices; ldmatrix of 16-bit elements is"),
    (r"(bar|barrier)\.|mbarrier\.", "barriers other than bar.sync 0 of all threads"),
    (r"cp\.async\.|cp\.reduce|red\.|atom\.|membar|fence\.", "copies in bulk, atomics and fences"),
]


def label(name):
    return "L_" + name.replace("$", "")


def translate(k, ins):
    for pattern, f in OPERATIONS:
        m = pattern.fullmatch(ins.opcode)
        if m:
            w = Writer(k, ins)
            if ins.guard:
                w.read(ins.guard.lstrip("!"), "pred")
            ins.code = f(w, *m.groups())
            return
    for pattern, what in UNMODELLED:
        if re.match(pattern, ins.opcode):
            raise Error(f"{ins.opcode} is not modelled: {what}")
    raise Error(f"{ins.opcode} is not known")


def code_of(x, doubtful):
    """An instruction's line, with the flags of registers in doubt."""
    flag = lambda r: "set_" + r[1:]
    before = "".join(f"if (!{flag(r)}) ptx::unset(t, {x.line}, \"{r}\"); " for r in dict.fromkeys(x.reads)
                     if r in doubtful and not (x.guard and r == x.guard.lstrip("!")))
    before += "".join(f"if (!{flag(r)} && !low_{r[1:]}) ptx::unset(t, {x.line}, \"{r}\"); " for r in dict.fromkeys(x.low_reads)
                      if r in doubtful)
    after = "".join(f" {flag(r)} = true;" for r in x.writes if r in doubtful)
    if x.partial and x.partial[0] in doubtful:
        low, high = (flag(r) if r in doubtful else "true" for r in x.partial[1:])
        after += f" {flag(x.partial[0])} = {low} && {high}; low_{x.partial[0][1:]} = {low};"
    code = before + x.code + after
    if not x.guard:
        return code
    p = x.guard.lstrip("!")
    check = f"if (!{flag(p)}) ptx::unset(t, {x.line}, \"{p}\"); " if p in doubtful else ""
    return f"{check}if ({'!' if x.guard[0] == '!' else ''}{p.replace('%', 'v_')}) {{ {code} }}"


# --- output --------------------------------------------------------------------------------------------------------


def write_kernel(k, n):
    for x in k.body:
        if isinstance(x, Instruction):
            try:
                translate(k, x)
            except (Error, ValueError, IndexError, KeyError) as e:
                raise Error(f"{x.line}: {e} in: {x.opcode} {', '.join(x.operands)}") from e
    blocks = blocks_of(k)
    doubtful = settle(blocks)
    used = {r for _, ins in blocks for x in ins for r in x.reads + x.low_reads + x.writes + (x.partial or []) if r}
    lines, table = [], []
    targets = {x.target for _, ins in blocks for x in ins if x.target}
    for name, ins in blocks:
        if name in targets:
            lines.append(f"{label(name)}:;")
        if not ins:
            continue
        lines.append(f"    executed_{n}[{len(table)}] = 1;")
        entry = [ins[0].line, 0]
        table.append(entry)
        for x in ins:
            if x.guard and not x.target and not x.ends:  # counted where it acts
                x.code = f"executed_{n}[{len(table)}] = 1; " + x.code
                table.append([x.line, 1])
            else:
                entry[1] += 1
            lines.append(f"    {code_of(x, doubtful)}")
    out = [f"/* {k.name} */", f"static unsigned char executed_{n}[{len(table)}];",
           f"static const ptx::block_of_code blocks_{n}[] = {{" + ", ".join(f"{{{a}, {b}}}" for a, b in table) + "};",
           f"static void run_{n}(const void *launch_)", "{", "    ptx::thread t(launch_);"]
    by_type = {}
    for r in sorted(used):
        by_type.setdefault(C_TYPE[k.registers[r]], []).append(r.replace("%", "v_"))
    out += [f"    {c} {', '.join(names)};" for c, names in by_type.items()]
    out += [f"    bool set_{r[1:]} = false;" + (f" bool low_{r[1:]} = false; {r.replace('%', 'v_')} = 0;"
                                              if k.registers[r] != "pred" else "") for r in sorted(doubtful)]
    out += lines + ["}"]
    static = [v for v in k.shared if v[1] is not None]
    out += [f"static const ptx::param params_{n}[] = {{" + ", ".join(f"{{{at}, {b}}}" for _, at, b in k.params) + "{0, 0}};".replace("{0", ", {0" if k.params else "{0"),
            f"static const ptx::variable shared_{n}[] = {{" + "".join(f"{{\"{a}\", {at}, {b}}}, " for a, at, b in static) + "{nullptr, 0, 0}};",
            f"static ptx::kernel kernel_{n} = {{\"{k.name}\", FILE_, PATH_, run_{n}, params_{n}, {len(k.params)}, "
            f"{k.params[-1][1] + k.params[-1][2] if k.params else 0}, {{{', '.join(map(str, k.max_threads))}}}, shared_{n}, "
            f"{len(static)}, {k.shared_bytes}, {k.dynamic_align}, blocks_{n}, executed_{n}, {len(table)}, nullptr}};", ""]
    return out


def main(source, out):
    with open(source) as f:
        kernels = parse(f.read())
    path = os.path.abspath(source)
    lines = ["/* Made by ptx2c.py. */", '#include "ptx.h"', f'static const char FILE_[] = "{os.path.basename(source)}", PATH_[] = "{path}";', ""]
    for n, k in enumerate(kernels):
        lines += write_kernel(k, n)
    lines += ["__attribute__((constructor)) static void add_kernels()", "{"]
    lines += [f"    ptx::add_kernel(&kernel_{n});" for n in range(len(kernels))] + ["}"]
    with open(out, "w") as f:
        f.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:3])
    except Error as e:
        sys.exit(f"{sys.argv[1]}:{e}")
