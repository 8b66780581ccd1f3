# SPDX-License-Identifier: Apache-2.0
"""Makes released.safetensors: matrices as compressed-tensors and ModelOpt pack them, with what they decode them to.

make_released.py  (needs torch, safetensors, compressed-tensors; ModelOpt's formula is its NVFP4QTensor.dequantize())
"""
import os

import torch
from compressed_tensors.compressors.naive_quantized.base import FloatQuantizationCompressor
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import save_file

ROWS, COLS = 24, 64


def nvfp4(w):
    args = QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    factor = generate_gparam(w.amin().reshape(1), w.amax().reshape(1))
    blocks = w.reshape(ROWS, COLS // 16, 16)
    scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args, global_scale=factor)
    packed = NVFP4PackedCompressor.compress({"weight": w, "weight_scale": scale, "weight_global_scale": factor}, scheme)
    return packed, NVFP4PackedCompressor.decompress(packed, scheme)["weight"]


def fp8_rows(w):
    args = QuantizationArgs(num_bits=8, type="float", strategy="channel", symmetric=True)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    scale, zero = calculate_qparams(w.amin(-1, keepdim=True), w.amax(-1, keepdim=True), args)
    packed = FloatQuantizationCompressor.compress({"weight": w, "weight_scale": scale, "weight_zero_point": zero}, scheme)
    packed.pop("weight_zero_point", None)
    return packed, FloatQuantizationCompressor.decompress(packed, scheme)["weight"]


def modelopt(packed):
    codes, scale, factor = packed["weight_packed"], packed["weight_scale"], 1 / packed["weight_global_scale"][0]
    table = torch.tensor([0, .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6])
    pairs = torch.stack([codes & 15, codes >> 4], -1).reshape(ROWS, COLS // 16, 16).long()
    return ({"weight": codes, "weight_scale": scale, "weight_scale_2": factor},
            (table[pairs] * (scale.float() * factor)[..., None]).reshape(ROWS, COLS))


def main():
    torch.manual_seed(7)
    w = torch.randn(ROWS, COLS) * torch.linspace(0.01, 1, ROWS)[:, None]
    w[3] = 0
    out, first = {}, nvfp4(w)
    for name, (packed, decoded) in {"nvfp4": first, "modelopt": modelopt(first[0]), "rows": fp8_rows(w)}.items():
        out.update({f"{name}.{k}": v.contiguous().clone() for k, v in packed.items()})
        out[name + ".decoded"] = decoded.contiguous()
    save_file(out, os.path.join(os.path.dirname(os.path.abspath(__file__)), "released.safetensors"))


main()
