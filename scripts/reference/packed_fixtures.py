#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes tests/unit/weights/packed.safetensors: small matrices as bitsandbytes and transformers pack and unpack them.

packed_fixtures.py OUT    (needs torch, transformers, bitsandbytes, compressed-tensors and safetensors; bitsandbytes'
default backend)

For each format X: X.weight and its scales and the like as in files, X.wide (the matrix before packing, f32), X.f32 and
X.bf16 (decoded by the reference code).
"""
import sys

import bitsandbytes.functional as bnb
import torch
from compressed_tensors.compressors import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
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


def e8m0(out, name, wide):
    """FP8 with scales that are powers of two, in a byte each (DeepSeek V3.1 and later)."""
    class UE8M0(Quantizer):
        class quantization_config:
            weight_block_size = (128, 128)
            scale_fmt = "ue8m0"
    packed = Fp8Quantize(UE8M0)._quantize_one(f"{name}.weight", wide)
    cut = lambda t: t[:, :16].contiguous()  # of the blocks' columns
    codes, scales = packed[f"{name}.weight"], packed[f"{name}.weight_scale_inv"].to(torch.float8_e8m0fnu)
    out.update({f"{name}.weight": cut(codes), f"{name}.weight_scale_inv": scales})
    for dtype, key in (torch.float32, "f32"), (torch.bfloat16, "bf16"):
        out[f"{name}.{key}"] = cut(Fp8Dequantize(UE8M0)._dequantize_one(codes, scales.float(), dtype))


def one_scale(out, name, wide):
    """FP8 with one scale in BF16 for the matrix (Ministral 3): the definition is codes times scale."""
    scale = (wide.abs().max() / 448).bfloat16()
    codes = (wide / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    out.update({f"{name}.weight": codes, f"{name}.weight_scale_inv": scale,
                f"{name}.activation_scale": torch.tensor(0.5, dtype=torch.bfloat16)})
    exact = codes.float() * scale.float()
    out.update({f"{name}.f32": exact, f"{name}.bf16": exact.bfloat16()})


def int4(out, name, wide):
    """compressed-tensors' pack-quantized, groups of 32."""
    args = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)
    scale = (wide.reshape(wide.shape[0], -1, 32).abs().amax(-1) / 7.5).bfloat16()
    codes = quantize(wide.bfloat16(), scale, torch.zeros_like(scale), args, dtype=torch.int8)
    out.update({f"{name}.weight_packed": pack_to_int32(codes, 4), f"{name}.weight_scale": scale,
                f"{name}.weight_shape": torch.tensor(wide.shape)})
    assert torch.equal(unpack_from_int32(out[f"{name}.weight_packed"], 4, wide.shape), codes)
    out[f"{name}.f32"] = dequantize(codes, scale.float(), None, args, dtype=torch.float32)
    out[f"{name}.bf16"] = dequantize(codes, scale, None, args, dtype=torch.bfloat16)


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
    e8m0(out, "e8m0", torch.randn(256, 128) * torch.tensor([0.02, 3.0]).repeat_interleave(128)[:, None])
    one_scale(out, "one", torch.randn(40, 72) * 0.02)
    int4(out, "int4", torch.randn(24, 96) * torch.rand(24, 1) * 0.1)
    save_file(out, path)


main(sys.argv[1])
