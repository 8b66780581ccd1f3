# SPDX-License-Identifier: Apache-2.0
"""Makes int4.safetensors: matrices as gptqmodel, autoawq and compressed-tensors pack them, with what they decode them to.

make_int4.py  (needs torch, compressed-tensors, and sources: GPTQMODEL and AUTOAWQ are the folders of gptqmodel 7.7 and autoawq 0.2.9,
whose functions are taken from their files, since the packages need a GPU's libraries)
"""
import ast
import contextlib
import math
import os
from types import SimpleNamespace

import numpy as np
import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file

ROWS, COLS = 32, 256


def taken(path, names, given):
    """Functions of a source file by name, also methods."""
    with open(path) as f:
        of = [n for n in ast.walk(ast.parse(f.read())) if (isinstance(n, ast.FunctionDef) and n.name in names) or
              (isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") in names)]
    for n in of:
        getattr(n, "decorator_list", []).clear()
    exec(compile(ast.Module(sorted(of, key=lambda n: isinstance(n, ast.FunctionDef)), []), path, "exec"), given)
    return given


def parameters(w, group):
    """Scales and zero points of groups of columns, [rows, groups], from least and most as the quantizers take them."""
    g = w.reshape(ROWS, -1, group)
    low, high = g.amin(-1).clamp(max=0), g.amax(-1).clamp(min=0)
    scale = ((high - low) / 15).half().clamp(min=2e-5).float()
    return scale, (-low / scale).round().clamp(0, 15)


def gptq(w, group, v1, symmetric=False):
    given = {"torch": torch, "t": torch, "np": np, "math": math, "nn": torch.nn, "_ConvNd": torch.nn.modules.conv._ConvNd,
             "transformers": SimpleNamespace(pytorch_utils=SimpleNamespace(Conv1D=())), "BaseQuantLinear": object,
             "THREADPOOLCTL": SimpleNamespace(threadpool_limits=lambda n: contextlib.nullcontext()),
             "_torch_right_shift": torch.bitwise_right_shift}
    f = taken(f"{os.environ['GPTQMODEL']}/gptqmodel/nn_modules/qlinear/__init__.py",
              ("pack_original", "dequantize_weight", "_dequantize_from_codes"), given)
    scale, zero = parameters(w, group)
    zero = torch.full_like(zero, 8) if symmetric else zero
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    m = SimpleNamespace(bits=4, planar=False, maxq=15, pack_factor=8, pack_dtype=torch.int32, pack_dtype_bits=32, in_features=COLS,
                        pack_np_math_dtype=np.uint32, pack_np_dtype=np.int32, dequant_dtype=torch.int8, bias=None,
                        wf_unsqueeze_zero=shifts.reshape(1, 1, 8), wf_unsqueeze_neg_one=shifts.reshape(1, 8, 1))
    m.register_buffer = lambda name, x: setattr(m, name, x)
    m._init_wf_unsqueeze_buffers = lambda: None
    m._dequantize_from_codes = lambda *a, **k: f["_dequantize_from_codes"](m, *a, **k)
    f["pack_original"](m, SimpleNamespace(weight=SimpleNamespace(data=w)), scale, zero, torch.arange(COLS, dtype=torch.int32) // group)
    decoded = f["dequantize_weight"](m)
    less = 0x11111111 if v1 else 0  # convert_gptq_v2_to_v1_format_module()
    return {"qweight": m.qweight, "qzeros": m.qzeros - less, "scales": m.scales, "g_idx": m.g_idx}, decoded.T


def awq(w, group):
    root = os.environ["AUTOAWQ"] + "/awq"
    pack = taken(f"{root}/modules/linear/gemm.py", ("from_linear",), {"torch": torch, "get_best_device": lambda: "cpu"})["from_linear"]
    unpack = taken(f"{root}/utils/packing_utils.py", ("unpack_awq", "reverse_awq_order", "dequantize_gemm", "AWQ_REVERSE_ORDER"),
                   {"torch": torch})["dequantize_gemm"]
    scale, zero = parameters(w, group)
    made = lambda *a: SimpleNamespace(w_bit=4, group_size=group, in_features=COLS, out_features=ROWS)
    linear = SimpleNamespace(weight=SimpleNamespace(data=w, device="cpu"), bias=None, in_features=COLS, out_features=ROWS)
    m = pack(made, linear, 4, group, scales=scale.T.contiguous(), zeros=zero.T.contiguous())
    packed = {"qweight": m.qweight, "qzeros": m.qzeros, "scales": m.scales}
    return packed, unpack(m.qweight, m.qzeros, m.scales, 4, group).T


def compressed(w, group, symmetric):
    shape = {"strategy": "group", "group_size": group} if group < COLS else {"strategy": "channel"}
    args = QuantizationArgs(num_bits=4, type="int", symmetric=symmetric, **shape)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    g = w.reshape(ROWS, -1, group)
    scale, zero = calculate_qparams(g.amin(-1), g.amax(-1), args)
    packed = PackedQuantizationCompressor.compress({"weight": w, "weight_scale": scale, "weight_zero_point": zero.to(torch.int8)}, scheme)
    return packed, PackedQuantizationCompressor.decompress(packed, scheme)["weight"]


def main():
    torch.manual_seed(11)
    w = torch.randn(ROWS, COLS) * torch.linspace(0.01, 1, ROWS)[:, None] + 0.1
    w[3] = 0
    w[5] = w[5].abs()  # a zero point of 0
    made = {"gptq-64": gptq(w, 64, True), "gptq-row": gptq(w, COLS, True, True), "gptq-v2-32": gptq(w, 32, False), "awq-128": awq(w, 128),
            "awq-row": awq(w, COLS), "int4-128": compressed(w.bfloat16(), 128, False), "int4-row": compressed(w.half(), COLS, False),
            "int4-64": compressed(w.half(), 64, True)}
    out = {f"{name}.{k}": v.contiguous().clone() for name, (packed, _) in made.items() for k, v in packed.items()}
    out.update({name + ".decoded": decoded.contiguous() for name, (_, decoded) in made.items()})
    save_file(out, os.path.join(os.path.dirname(os.path.abspath(__file__)), "int4.safetensors"))


main()
