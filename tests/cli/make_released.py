# SPDX-License-Identifier: Apache-2.0
"""Makes released.safetensors: matrices as compressed-tensors, ModelOpt and transformers pack them, with what they decode them to.

make_released.py  (needs torch, safetensors, compressed-tensors, transformers; ModelOpt's formula is its NVFP4QTensor.dequantize())
"""
import os
from types import SimpleNamespace

import torch
from compressed_tensors.compressors.mxfp8.base import MXFP8QuantizationCompressor
from compressed_tensors.compressors.naive_quantized.base import FloatQuantizationCompressor
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

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


def fp8_in_blocks(w, rows, cols, compressor=FloatQuantizationCompressor, **more):
    """Of several rows, or parts of one."""
    shape = {"strategy": "block", "block_structure": [rows, cols]} if rows > 1 else {"strategy": "group", "group_size": cols}
    args = QuantizationArgs(num_bits=8, type="float", symmetric=True, **shape, **more)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    blocks = w.reshape(ROWS // rows, rows, COLS // cols, cols).transpose(1, 2)
    scale, zero = calculate_qparams(blocks.amin((2, 3)), blocks.amax((2, 3)), args)
    packed = compressor.compress({"weight": w, "weight_scale": scale, "weight_zero_point": zero}, scheme)
    packed.pop("weight_zero_point", None)
    return packed, compressor.decompress(packed, scheme)["weight"]


def experts_in_blocks(w, block):
    """All experts of a layer in one tensor, as transformers saves them."""
    of = SimpleNamespace(quantization_config=SimpleNamespace(weight_block_size=block, scale_fmt="float"))
    packed = Fp8Quantize(of).convert({"weight": w})
    return ({"weight": packed["weight"], "weight_scale": packed["weight_scale_inv"]},
            Fp8Dequantize(of)._dequantize_one(packed["weight"], packed["weight_scale_inv"], torch.float32))


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
    made = {"nvfp4": first, "modelopt": modelopt(first[0]), "rows": fp8_rows(w), "blocks 8x32": fp8_in_blocks(w, 8, 32),
            "blocks 1x32": fp8_in_blocks(w, 1, 32), "mxfp8 1x32": fp8_in_blocks(w, 1, 32, MXFP8QuantizationCompressor,
                                                                               scale_dtype=torch.uint8),
            "experts 8x32": experts_in_blocks(torch.randn(3, ROWS, COLS), (8, 32))}
    for name, (packed, decoded) in made.items():
        out.update({f"{name}.{k}": v.contiguous().clone() for k, v in packed.items()})
        out[name + ".decoded"] = decoded.contiguous()
    save_file(out, os.path.join(os.path.dirname(os.path.abspath(__file__)), "released.safetensors"))


main()
