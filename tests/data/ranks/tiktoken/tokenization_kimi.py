# SPDX-License-Identifier: Apache-2.0
class Tokenizer:
    pat_str = "|".join([
        '[\\p{Han}]+',
        "[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        '\\p{N}{1,3}',
        ' ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*',
        '\\s*[\\r\\n]+',
        '\\s+(?!\\S)',
        '\\s+',
    ])
