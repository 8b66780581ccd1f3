#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes tests/unit/weights/packed.safetensors: small matrices as bitsandbytes and transformers pack and unpack them.

packed_fixtures.py OUT    (needs torch, transformers, bitsandbytes and safetensors; bitsandbytes' default backend)

For each format X: X.weight and its scales and the like as in files, X.wide (the matrix before packing, f32), X.f32 and
X.bf16 (decoded by the reference code).
"""
import sys

import bitsandbytes.functional as bnb
import torch
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors


class Quantizer:
    class quantization_config:
        weight_block_size = (128, 128)
        scale_fmt = None


def nf4(out, name, wide, nested):
    codes, state = bnb.quantize_4bit(wide, blocksize=64, quant_type="nf4", compress_statistics=nested)
    out[f"{name}.weight"] = codes
    for key, value in state.as_dict(packed=True).items():
        out[f"{name}.weight.{key}"] = value.contiguous().clone()
    out[f"{name}.wide"] = wide.float()
    for dtype, key in (torch.float32, "f32"), (torch.bfloat16, "bf16"):
        state.dtype = dtype
        out[f"{name}.{key}"] = bnb.dequantize_4bit(codes, state).to(dtype).reshape(wide.shape)


def fp8(out, name, wide):
    """A matrix with partial blocks at its edges: packed after padding with zeros."""
    rows, cols = (-(-n // 128) * 128 for n in wide.shape)
    full = torch.zeros(rows, cols)
    full[:wide.shape[0], :wide.shape[1]] = wide
    packed = Fp8Quantize(Quantizer)._quantize_one(f"{name}.weight", full)
    cut = lambda t: t[:wide.shape[0], :wide.shape[1]].contiguous()
    codes, scales = packed[f"{name}.weight"], packed[f"{name}.weight_scale_inv"]
    out.update({f"{name}.weight": cut(codes), f"{name}.weight_scale_inv": scales, f"{name}.wide": wide})
    for dtype, key in (torch.float32, "f32"), (torch.bfloat16, "bf16"):
        out[f"{name}.{key}"] = cut(Fp8Dequantize(Quantizer)._dequantize_one(codes, scales, dtype))


def mxfp4(out, name, rows, cols):
    """Every code, and scales up to where the largest value is still finite."""
    blocks = (torch.arange(rows * cols // 2) * 37 % 256).to(torch.uint8).reshape(1, rows, cols // 32, 16)
    scales = (torch.arange(rows * cols // 32) * 7 % 253).to(torch.uint8).reshape(1, rows, cols // 32)
    out.update({f"{name}.weight_blocks": blocks[0].clone(), f"{name}.weight_scales": scales[0].clone()})
    for dtype, key in (torch.float32, "f32"), (torch.bfloat16, "bf16"):
        out[f"{name}.{key}"] = convert_moe_packed_tensors(blocks, scales, dtype=dtype)[0].T.contiguous()


def main(path):
    torch.manual_seed(1)
    out = {}
    zeros = torch.randn(24, 72) * 0.02
    zeros[3:6] = 0
    nf4(out, "nf4", zeros, False)
    nf4(out, "nested", (torch.randn(260, 64) * torch.rand(260, 1) * 0.05).bfloat16(), True)
    wide = torch.randn(136, 40) * 0.02
    wide[0] = torch.linspace(-2e-4, 2e-4, 40)
    fp8(out, "fp8", wide)
    mxfp4(out, "mxfp4", 24, 96)
    save_file(out, path)


main(sys.argv[1])
