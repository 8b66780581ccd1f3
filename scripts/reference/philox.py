# SPDX-License-Identifier: Apache-2.0
"""The program's random numbers, of what is compared with it."""
import numpy
import torch


def philox(seed, stream, n, first=0):
    """The words of blocks [first, first + n) of Philox4x32-10 (Salmon et al. 2011)."""
    at = numpy.arange(first, first + n, dtype=numpy.uint64)
    c = [at & numpy.uint64(0xffffffff), at >> numpy.uint64(32),
         numpy.full(n, stream & 0xffffffff, numpy.uint64), numpy.full(n, stream >> 32, numpy.uint64)]
    k, low = [seed & 0xffffffff, seed >> 32], numpy.uint64(0xffffffff)
    for _ in range(10):
        p0, p1 = c[0] * numpy.uint64(0xD2511F53), c[2] * numpy.uint64(0xCD9E8D57)
        c = [(p1 >> numpy.uint64(32)) ^ c[1] ^ numpy.uint64(k[0]), p1 & low, (p0 >> numpy.uint64(32)) ^ c[3] ^ numpy.uint64(k[1]),
             p0 & low]
        k = [(k[0] + 0x9E3779B9) & 0xffffffff, (k[1] + 0xBB67AE85) & 0xffffffff]
    return numpy.stack(c, 1).reshape(-1)


def drawn_signs(seed, n, number, drawn):
    """The n signs of a projection: of the tensor `number`, which was drawn `drawn` times before."""
    words = philox(seed, 0xA7 << 56 | drawn << 24 | number, (n + 127) // 128)
    return torch.from_numpy(1.0 - 2.0 * numpy.unpackbits(words.astype("<u4").view(numpy.uint8), bitorder="little")[:n])
