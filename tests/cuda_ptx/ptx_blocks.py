# SPDX-License-Identifier: Apache-2.0
"""The blocks of a kernel, and its registers that are read where not every path has written them."""


def blocks_of(k):
    """[(label or None, instructions)]: control enters at the top; a guarded branch or a return ends one."""
    blocks = [(None, [])]
    for x in k.body:
        if isinstance(x, str):
            blocks.append((x, []))
            continue
        blocks[-1][1].append(x)
        if x.target or x.ends:
            blocks.append((None, []))
    return [(name, ins) for name, ins in blocks if name or ins]


def in_doubt(blocks):
    """The registers that some path reads before it writes them."""
    index = {name: i for i, (name, _) in enumerate(blocks) if name}
    follow, number = [], {}
    bit = lambda r: 1 << number.setdefault(r, len(number))
    made = []
    for i, (_, ins) in enumerate(blocks):
        last = ins[-1] if ins else None
        to = [index[last.target]] if last and last.target else []
        if i + 1 < len(blocks) and not (last and (last.target or last.ends) and not last.guard):
            to.append(i + 1)
        follow.append(to)
        made.append(sum({bit(r) for x in ins if not x.guard for r in x.writes}))
    everything = -1
    have = [0] + [everything] * (len(blocks) - 1)
    work = [0]
    while work:
        i = work.pop()
        out = have[i] | made[i]
        for j in follow[i]:
            if have[j] & out != have[j]:
                have[j] &= out
                work.append(j)
    doubtful = set()
    for i, (_, ins) in enumerate(blocks):
        now = have[i]
        for x in ins:
            parts = [r for r in x.partial[1:] if r] if x.partial else []
            doubtful |= {r for r in x.reads + x.low_reads + parts if not now & bit(r)}
            for r in x.writes if not x.guard else []:
                now |= bit(r)
    return doubtful


def settle(blocks):
    """The registers in doubt, and the packs of which a half may never have been written: nvcc widens a word so and then
    takes the low half alone. Such a pack reads nothing yet; it makes a register of which each half is in doubt."""
    while True:
        doubtful = in_doubt(blocks)
        packs = [x for _, ins in blocks for x in ins if x.halves and doubtful & set(filter(None, x.halves))]
        if not packs:
            return doubtful
        for x in packs:
            x.partial, x.halves, x.reads, x.writes = [x.writes[0], *x.halves], None, [], []
