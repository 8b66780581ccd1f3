#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes, from the headers of device operations, a C table of each operation's arguments: its numbers by name, and
the arrays that it reads and writes with their sizes. Headers are the contract: `const` is an input, a shape in brackets
begins the comment of an array. What they cannot say so is in the tables below; a field that neither explains is an
error.

    arguments.py OUT.inc HEADER..."""
import re
import sys

# Arrays whose bytes are not the shape in brackets times the element: C expressions of `a`; None: not looked at.
BYTES = {
    "embedding_bwd.run_ids": "4 * a->n_runs", "layernorm.w": "e * a->c * (a->biased ? 2 : 1)",
    "layernorm_bwd.w": "e * a->c", "layernorm_bwd.dw": "4 * a->c * (a->biased ? 2 : 1)",
    "rmsnorm_bwd.w": "e * a->c", "rmsnorm_bwd.rstd": "4 * a->n",
    "layernorm_bwd.rstd": "4 * a->n", "bias_bwd.db": "4 * a->c",
    "qk_rope.positions": "4 * a->n", "qk_rope.cos_t": "2 * a->max_pos * a->rot",
    "qk_rope.sin_t": "2 * a->max_pos * a->rot", "qk_rope.q_norm": "e * (a->q.n ? a->q.dim : a->k.dim)",
    "qk_rope.k_norm": "e * (a->q.n ? a->q.dim : a->k.dim)", "qk_rope.rstd": "a->q_norm ? 4 * a->n * (a->q.n + a->k.n) : 0",
    "qk_rope_bwd.dq_norm": "4 * a->dq.dim", "qk_rope_bwd.dk_norm": "4 * a->dq.dim",
    "attention.cu_seqlens_host": None, "delta_rule.cu_seqlens_host": None, "attention_cached.past_host": None,
    "attention_cached.table_host": None, "attention_cached.past": "4 * a->of.n_docs",
    "attention_cached.table": "4 * a->of.n_docs * a->table_ld", "attention_cached.cache": "1",
    "attention_sink.sinks": "e * a->o.n", "attention_sink_bwd.sinks": "e * a->o.n",
    "attention_sink_bwd.lse": "4 * a->n * a->o.n", "add.a": "e * a->n", "add.b": "e * a->n", "add.out": "e * a->n",
    "grad_cast.src": "4 * a->n", "grad_cast.dst": "mt_dtype_size(a->dst_dtype) * a->n",
    "grad_cast.partials": "4 * mt_div_up(a->n, (size_t)MT_SUMSQ_BLOCK)",
    "join.buf": "4 * a->n", "zero.ptr": "a->bytes", "cast.src": "mt_dtype_size(a->src_dtype) * a->n",
    "cast.dst": "mt_dtype_size(a->dst_dtype) * a->n", "rows.rows": "4 * a->n",
    "merge_adapter.a": "e * a->r * a->of.cols", "merge_adapter.b": "e * a->of.rows * a->r",
    "merge_adapter.magnitude": "e * a->of.rows", "merge_adapter.scale": "4 * a->of.rows",
    "merge_adapter.inverse": "4 * a->of.rows", "merge_adapter.of.out": "e * a->rows * a->cols",
    "decode.codes": "1", "decode.scales": "1", "decode.zeros": "1", "decode.nested_scales": "1", "decode.nested_map": "1024",
    "decode.nested_offset": "4", "decode.factor": "4", "carried.before": None, "carried.after": None,
    "carried.past": None, "carried.place": None, # of generation and of rows in chunks,
    "handed.from": None, "handed.to": None, # which are not judged
    "packed_gemm.a": "2 * a->b.cols", "packed_gemm.bias": "2 * a->b.rows",
    "packed_gemm.c": "a->b.rows * mt_dtype_size(a->d_dtype)", "packed_gemm.d": "a->b.rows * mt_dtype_size(a->d_dtype)",
    "cross_entropy.few": "4 * a->n * a->n_few",
    "cross_entropy.few_values": "4 * a->n * a->n_few", "cross_entropy.targets": "4 * a->n",
    "dora_scale.scale": "4 * a->n", "glu_bwd.gate_up": "2 * e * a->n * a->f", "glu_bwd.dout": "e * a->n * a->f",
    "glu_bwd.dgate_up": "2 * e * a->n * a->f", "glu.gate_up": "2 * e * a->n * a->f",
    "activate_bwd.x": "e * a->n * a->f", "activate_bwd.dout": "e * a->n * a->f", "activate_bwd.dx": "e * a->n * a->f",
    "xielu_bwd.x": "e * a->n * a->f", "xielu_bwd.dout": "e * a->n * a->f", "xielu_bwd.dx": "e * a->n * a->f",
    "xielu_bwd.shape": "e * 4", "moe_gather.x": "e * a->c * MT_JUDGE_TOKENS",
    "moe_gather.weights": "4 * a->k * MT_JUDGE_TOKENS",
    "expert_glu_bwd.gate_up": "mt_glu_inputs(a->kind) * e * a->n_padded * a->f",
    "expert_glu_bwd.dgate_up": "mt_glu_inputs(a->kind) * e * a->n_padded * a->f",
    "expert_glu_bwd.weights": "4 * a->k * (a->list ? (size_t)MT_JUDGE_TOKENS : a->n)",
    "expert_glu_bwd.dweights": "4 * a->k * (a->list ? (size_t)MT_JUDGE_TOKENS : a->n)",
    "expert_glu_bwd.down_bias": "e * a->c", "expert_glu_bwd.d_o": "e * a->n_padded * a->c",
    "shared_gate_bwd.w": "e * a->c", "shared_gate_bwd.x": "e * a->n * a->c",
    "router_bwd.expert_scale": "e * a->e", "router_bwd.aux": "4 * a->e",
    "short_conv.w": "e * a->x.n * a->x.dim * a->taps", "short_conv.bias": "e * a->x.n * a->x.dim",
    "short_conv_bwd.dw": "4 * a->fwd.x.n * a->fwd.x.dim * a->fwd.taps",
    "short_conv_bwd.dbias": "4 * a->fwd.x.n * a->fwd.x.dim", "delta_gates.a_log": "e * a->a.n * a->a.dim",
    "delta_gates.dt_bias": "e * a->a.n * a->a.dim", "delta_gates.beta": "4 * a->n * a->a.n * a->a.dim",
    "delta_gates.g": "4 * a->n * a->a.n * a->a.dim",
    "delta_gates_bwd.dbeta": "4 * a->fwd.n * a->fwd.a.n * a->fwd.a.dim",
    "delta_gates_bwd.dg": "4 * a->fwd.n * a->fwd.a.n * a->fwd.a.dim",
    "delta_gates_bwd.dskip": "4 * a->fwd.n * a->fwd.a.n * a->fwd.a.dim",
    "delta_gates_bwd.da_log": "4 * a->fwd.a.n * a->fwd.a.dim",
    "delta_gates_bwd.ddt_bias": "4 * a->fwd.a.n * a->fwd.a.dim",
    "delta_gates_bwd.dd": "4 * a->fwd.a.n * a->fwd.a.dim", "delta_rule.skip": "e * a->v.n",
    "delta_rule_bwd.dbeta": "4 * a->fwd.n * a->fwd.v.n", "delta_rule_bwd.dg": "4 * a->fwd.n * a->fwd.v.n",
    "delta_rule_bwd.dskip": "a->fwd.skip ? 4 * a->fwd.n * a->fwd.v.n : 0",
    "gated_norm.w": "e * (a->gate_first ? a->x.n : 1) * a->x.dim",
    "gated_norm_bwd.dw": "4 * mt_gated_norm_weights(&a->fwd)",
    "quantise.codes_t": "a->cols * mt_codes_ld(a->rows)", "quantise.scale": "4",
    "apollo.low": "4 * mt_apollo_channels(a) * a->rank", "apollo.m": "4 * mt_apollo_channels(a) * a->rank",
    "apollo.v": "4 * mt_apollo_channels(a) * a->rank", "widen.x": "e * a->n", "widen.y": "4 * a->n",
    "low_adam.low": "4 * a->n", "muon.m": "mt_dtype_size(a->m_dtype) * a->n",
    "adafactor.row": "4 * a->rows", "adafactor.col": "4 * a->cols",
    "cross_entropy.logits": "4 * a->vocab", "moe_combine.src": "e * a->rows * a->c",
    "eigen.w": "4 * a->n * a->n", "low_adam.m": "4 * a->n", "low_adam.v": "4 * a->n",
    "rmsnorm.x": "e * a->c", "rmsnorm.y": "e * a->c", "bias_bwd.dy": "e * a->c", "bias_bwd.x": "e * a->c",
    "rmsnorm_bwd.x": "e * a->c", "rmsnorm_bwd.dy": "e * a->c", "rmsnorm_bwd.dx": "e * a->c",
    "rmsnorm_bwd.dres": "e * a->c", "gemm.a_scale": "4", "gemm.b_scale": "4",
    "cap.x": "4 * a->c", "cross_entropy.dlogits": "e * a->vocab",
    "gemm.bias": "mt_dtype_size(a->dtype == MT_E4M3 ? a->d_dtype : a->dtype) * a->n",
    "gemm.a": "(a->trans_a ? a->m : a->k) * e", "gemm.b": "(a->trans_b ? a->k : a->n) * e",
    "gemm.c": "a->n * mt_dtype_size(a->d_dtype)", "gemm.d": "a->n * mt_dtype_size(a->d_dtype)",
    "router.logits": "mt_dtype_size(a->logits_dtype) * a->n * a->e",
    "router_bwd.logits": "mt_dtype_size(a->logits_dtype) * a->n * a->e",
    "router_stats.logits": "e * a->n * a->e", "router_bwd.dscale": "4 * a->n * a->e",
    "dropout.add": "mt_dtype_size(a->out_dtype) * a->n * a->c",
    "dropout.out": "mt_dtype_size(a->out_dtype) * a->n * a->c",
    "rows.src": "e * a->c * (gathers ? (size_t)MT_JUDGE_TOKENS : a->n)",
    "rows.dst": "e * a->c * (gathers ? a->n : a->n_dst)",
}
# Rows that lie apart: their number and the distance between them in bytes, or the struct that says where they are.
APART = {
    "gemm.a": ("a->trans_a ? a->k : a->m", "a->lda * e"), "gemm.b": ("a->trans_b ? a->n : a->k", "a->ldb * e"),
    "gemm.c": ("a->m", "a->ldc * mt_dtype_size(a->d_dtype)"),
    "gemm.d": ("a->m", "a->ldd * mt_dtype_size(a->d_dtype)"),
    "bias_bwd.dy": ("a->n", "a->ld * e"), "bias_bwd.x": ("a->n", "a->ld * e"),
    "cap.x": ("a->n", "4 * a->ld"), "cross_entropy.logits": ("a->n", "4 * a->ld"),
    "cross_entropy.dlogits": ("a->n", "e * a->ld_dlogits"), "rmsnorm.x": "x_at", "rmsnorm.y": "y_at",
    "rmsnorm_bwd.x": "x_at", "rmsnorm_bwd.dy": "dy_at", "rmsnorm_bwd.dx": "dx_at", "rmsnorm_bwd.dres": "dx_at",
}
READ, WRITE, UPDATE = "MT_JUDGE_READ", "MT_JUDGE_WRITE", "MT_JUDGE_UPDATE"
USE = {
    "rmsnorm.rstd": f"a->use_rstd ? {READ} : {WRITE}", "layernorm.rstd": f"a->use_rstd ? {READ} : {WRITE}",
    "join.buf": UPDATE, "merge_adapter.of.out": UPDATE, "adafactor.g": UPDATE, "adafactor.row": UPDATE, "adafactor.col": UPDATE,
    "muon.m": UPDATE, "apollo.g": UPDATE, "apollo.m": UPDATE, "apollo.v": UPDATE, "apollo.norm": UPDATE,
    "low_adam.low": UPDATE, "low_adam.m": UPDATE, "low_adam.v": UPDATE,
    "unit_rows.to": UPDATE, "eigen.a": UPDATE, "cross_entropy.few_values": f"a->dlogits ? {READ} : {WRITE}",
    "attention_sink.o": UPDATE, "moe_combine.sum": UPDATE, "expert_glu_bwd.dweights": f"a->list ? {UPDATE} : {WRITE}",
    "bias_bwd.db": UPDATE, "cap.x": UPDATE, "qk_rope_bwd.dq_norm": UPDATE, "qk_rope_bwd.dk_norm": UPDATE,
}
HEADS_WRITTEN = {
    "attention.o", "delta_rule.o", "short_conv.y", "gated_norm.y", "head_gate.y", "qk_rope.to_q", "qk_rope.to_k",
    "qk_rope_bwd.to_dq", "qk_rope_bwd.to_dk", "short_conv_bwd.dx", "gated_norm_bwd.dx", "gated_norm_bwd.dz",
    "head_gate_bwd.dx", "head_gate_bwd.dgate", "delta_gates_bwd.da", "delta_gates_bwd.db",
} | {f"{op}_bwd.{x}" for op in ("attention", "delta_rule") for x in ("dq", "dk", "dv")}
# Of the forward's arguments that a backward has within its own: what it does not read.
UNREAD = {"merge_adapter": {"codes"}, "qk_rope_bwd": {"to_q", "to_k", "q", "k", "rstd"}, "short_conv_bwd": {"y"}, "gated_norm_bwd": {"y"},
          "head_gate_bwd": {"y"}, "delta_rule_bwd": {"o"}, "delta_gates_bwd": {"beta", "g"}}
# Views that are only used if this condition of `a` holds.
IF = {"delta_gates.b": "!a->plain", "delta_gates_bwd.db": "!a->fwd.plain"}
# Where things lie, and memory that is scratch: not what is computed.
PLACES = re.compile(r"^(ld\w*|workspace|most_n|most_len|\w+_at|max_pos)$")
SIZES = {"int32_t": "4", "uint32_t": "4", "float": "4", "uint16_t": "2", "uint8_t": "1", "void": "e"}


def structs_of(text):
    """{name: [(type, field, is const, is pointer, comment)]}"""
    out = {}
    for name, body in re.findall(r"^struct (mt_\w+) \{\n(.*?)^\};", text, re.S | re.M):
        fields = []
        body = re.sub(r"\n\s*(?=[^;/]*\*/)", " ", body)
        for line in re.findall(r"[^;]+;(?:[ \t]*/\*.*?\*/)?", body, re.S):
            code, _, comment = line.partition(";")
            code = re.sub(r"/\*.*?\*/", "", code, flags=re.S).strip()
            m = re.match(r"(const )?(?:struct |enum )?(\w+) (.*)$", code, re.S)
            for field in m[3].split(","):
                field = field.strip()
                fields.append((m[2], field.strip("*"), bool(m[1]), field.startswith("*"), comment))
        out[name] = fields
    return out


def shape(comment, names):
    m = re.match(r"\s*/\* *\[([^\]]+)\]", comment)
    if not m:
        return None
    words = set(re.findall(r"\b[a-z_]\w*", m[1])) - set(names)
    if words:
        return None
    return " * ".join("(%s)" % re.sub(r"(?<![.\w])([a-z_]\w*)", r"a->\1", x.strip()) for x in m[1].split(","))


class Writer:
    def __init__(self, structs):
        self.structs, self.lines, self.missing = structs, [], []

    def arrays(self, op, key, fields, at, nested):
        names = [f[1] for f in fields]
        for kind, field, const, pointer, comment in fields:
            name, own = f"{key}.{field}", f"{op}.{at[3:]}{field}"
            name = own if own in USE else name
            unread = nested and field in UNREAD.get(op, ())
            if kind == "mt_heads":
                use = READ if nested or name not in HEADS_WRITTEN else WRITE
                use = USE.get(name, use) if not nested else use
                if name in IF:
                    self.lines.append("    if (%s)" % IF[name].replace("a->", at if nested else "a->"))
                if not unread:
                    tokens = at + ("n" if "n" in names else "fwd.n")
                    self.lines.append(f'    mt_judge_heads(out, {use}, "{field}", &{at}{field}, {tokens}, e);')
            elif f"mt_{kind[3:]}" in self.structs and not pointer and kind not in ("mt_row_groups", "mt_router_rule"):
                self.arrays(op, kind[3:], self.structs[kind], at + field + ".", True)
            elif pointer and not PLACES.match(field) and not unread:
                self.array(name, field, kind, const or (nested and own not in USE), comment, at, shape(comment, names))
        if op == "qk_rope_bwd" and not nested:
            self.lines.append("    if (a->fwd.q_norm) {")
            for f in ("q", "k"):
                self.lines.append(f'        mt_judge_heads(out, {READ}, "{f}", &a->fwd.{f}, a->fwd.n, e);')
            size = "4 * a->fwd.n * (a->fwd.q.n + a->fwd.k.n)"
            self.lines.append(f'        mt_judge_rows(out, {READ}, "rstd", a->fwd.rstd, 1, {size}, 0);')
            self.lines.append("    }")

    def array(self, name, field, kind, const, comment, at, dims):
        size = BYTES.get(name, dims and f"{SIZES[kind]} * {dims}")
        if name in BYTES and BYTES[name] is None:
            return
        if not size:
            self.missing.append(name)
            return
        adds = re.search(r"accumulated|in place|destroyed", comment)
        use = READ if const else USE.get(name) or (UPDATE if adds else WRITE)
        apart = APART.get(name)
        if isinstance(apart, str):
            line = f'mt_judge_groups(out, {use}, "{field}", a->{field}, a->n, {size}, &a->{apart}, e);'
        else:
            rows, pitch = apart or ("1", "0")
            line = f'mt_judge_rows(out, {use}, "{field}", a->{field}, {rows}, {size}, {pitch});'
        self.lines.append("    " + line.replace("a->", at))

    def numbers(self, op, fields, at):
        for kind, field, _, pointer, _ in fields:
            if at != "a->" and field in UNREAD.get(op, ()):
                continue
            if pointer or PLACES.match(field) or kind == "mt_row_groups":
                continue
            if kind == "mt_heads":
                if any(x.split(".") == [op, field] or (at != "a->" and x == f"{op[:-4]}.{field}") for x in IF):
                    continue
                self.lines.append(f'    mt_judge_number(out, "{field}.n", (double){at}{field}.n);')
                self.lines.append(f'    mt_judge_number(out, "{field}.dim", {at}{field}.n ? (double){at}{field}.dim : 0);')
            elif kind in self.structs:
                self.numbers(op, self.structs[kind], at + field + ".")
            elif kind == "mt_dtype":
                self.lines.append(f'    mt_judge_dtype(out, "{field}", {at}{field});')
            else:
                self.lines.append(f'    mt_judge_number(out, "{field}", (double){at}{field});')


def main():
    text = "".join(open(p).read() for p in sys.argv[2:])
    structs = structs_of(text)
    ops = re.findall(r"^\s+[XW]\((\w+), (\w+), struct mt_(\w+)\)", text, re.M)
    w = Writer(structs)
    for ident, op, kind in ops:
        fields = structs["mt_" + kind]
        dtypes = [f[1] for f in fields if f[0] == "mt_dtype"]
        first = dtypes[0] if dtypes else next((f"{f[1]}.dtype" for f in fields if f[1] in ("fwd", "of")), None)
        w.lines += [f"static void judge_{op}(const void *args, struct mt_judge_call *out)", "{",
                    f"    const struct mt_{kind} *a = args;",
                    f"    const size_t e = {'mt_dtype_size(a->%s)' % first if first else '4'};", "    (void)e;"]
        if kind == "rows":
            w.lines.append(f"    const bool gathers = {'true' if op == 'gather_rows' else 'false'};")
        w.numbers(op, fields, "a->")
        w.arrays(op, kind, fields, "a->", False)
        w.lines += ["}", ""]
    if w.missing:
        sys.exit("arguments.py: no shape is known of " + ", ".join(sorted(set(w.missing))) +
                 ": begin its comment with one in brackets, or add it to BYTES")
    w.lines.append("static void (*const judge_call[MT_N_DEV_OPS])(const void *, struct mt_judge_call *) = {")
    w.lines += [f"    [MT_DEV_{ident}] = judge_{op}," for ident, op, _ in ops] + ["};"]
    open(sys.argv[1], "w").write("\n".join(["/* Made by arguments.py. */"] + w.lines) + "\n")


main()
