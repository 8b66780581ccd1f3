# SPDX-License-Identifier: Apache-2.0
"""The experts that a reference chooses where scores are equal, or nearly.

torch.topk takes any of equals, megatrain the first; sigmoids of large logits are equal in FP32 though not in double, and scores
that differ by their own rounding may be ordered either way. So choices are made by the scores as FP32 has them, the lowest
index of equals first. Where a step of the reference is then not megatrain's, the sets that are tied within rounding are taken in
other ways, one after the other, until it is: a difference that no such choice explains is not one of ties.
"""
import collections
import contextlib
import itertools

import torch

#: of two scores that are tied: relative to the larger, or to 1 for logits and biased scores near 0
ROUNDING = 2e-6
F32 = torch.float32  # whatever a reference in double makes of the name
#: steps computed again in search of another choice
TRIES = 400
Best = collections.namedtuple("Best", "values indices")


class Choices:
    """Of each step, call of topk and row, what was taken; and of rows with ties, what else could have been."""

    def __init__(self):
        self.taken, self.forced, self.ties, self.given = {}, {}, {}, None
        self.step = self.call = 0

    @contextlib.contextmanager
    def making(self, given=None):
        """topk chooses as above, or, with the taken of another run, as there."""
        was, self.given = (torch.topk, torch.Tensor.topk), given
        torch.topk = torch.Tensor.topk = lambda *a, **k: self._topk(*a, **k)
        try:
            yield self
        finally:
            torch.topk, torch.Tensor.topk = was

    def begin(self, step):
        self.step, self.call = step, 0
        self.ties = {}

    def _topk(self, x, k, dim=-1, largest=True, sorted=True):
        assert largest and dim in (-1, x.dim() - 1), "the reference chooses in a way that is not known here"
        at = (self.step, self.call)
        self.call += 1
        if self.given is not None:
            index = self.given[at]
        else:
            index = self._choose(at, x.detach().to(F32).reshape(-1, x.shape[-1]), k).reshape(*x.shape[:-1], k)
            self.taken[at] = index
        return Best(x.gather(-1, index), index)

    def _choose(self, at, key, k):
        order = key.sort(dim=-1, descending=True, stable=True).indices
        index = order[:, :k].clone()
        if k < key.shape[-1]:
            last = key.gather(-1, order[:, k - 1:k + 1])
            near = last[:, :1] - last[:, 1:] <= ROUNDING * last.abs().max(-1, keepdim=True).values.clamp(min=1)
            for row in near[:, 0].nonzero()[:, 0].tolist():
                self._tie((*at, row), key[row], k)
                if (*at, row) in self.forced:
                    index[row] = torch.tensor(self.forced[(*at, row)])
        return index

    def _tie(self, where, key, k):
        """All that are as good as the last that is taken, not it and the next alone."""
        bound = key.sort(descending=True, stable=True).values[k - 1]
        room = ROUNDING * max(1.0, abs(bound.item()))
        sure = [i for i, v in enumerate(key.tolist()) if v > bound + room]
        tied = [i for i, v in enumerate(key.tolist()) if abs(v - bound) <= room]
        self.ties[where] = [sure + list(some) for some in itertools.combinations(tied, k - len(sure))]

    def settle(self, compute, error):
        """Makes compute() again with other choices while that brings error(its result) down; returns the last result."""
        best, tries, before = error(compute()), TRIES, None
        while best > 1 and best != before and tries > 0:
            before = best
            for where, sets in sorted(self.ties.items()):
                kept = self.forced.get(where)
                for some in sets:
                    self.forced[where] = some
                    now, tries = error(compute()), tries - 1
                    if now < best * 0.98:
                        best, kept = now, some
                if kept is None:
                    del self.forced[where]
                else:
                    self.forced[where] = kept
                if best <= 1 or tries <= 0 or best < before:  # what is tied behind this may be other sets now
                    break
        return compute()
