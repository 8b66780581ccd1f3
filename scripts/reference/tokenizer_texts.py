# SPDX-License-Identifier: Apache-2.0
"""Texts of many scripts, by number: for tokenizers."""
import random

PIECES = ["the ", "The cat", "don't", " 12345", "3.14", "\n", "\n\n  ", "\t", "  ", "naïve ", "Straße", "e\u0301", "日本語", "漢字かな",
          "😀", "👩‍👩‍👧", "العربية ", "हिन्दी", "한국어", "ДОБРО", "://", "!!!", "x=y/2;", "{\n", "\r\n", "\u200b", "\u00a0", "Ünï", "ǅ", "0"]


def strings(n):
    r = random.Random(7)
    return ["".join(r.choice(PIECES) for _ in range(r.randint(1, 12))) for _ in range(n)]
