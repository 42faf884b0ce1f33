"""The terms of masks: windows, strides, documents, blocks, trees, ... A mask is an intersection of terms."""

from __future__ import annotations

import numbers
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from burst_mcore.mask.bands import UNBOUNDED, disjoint, everything, tightened
from burst_mcore.words import brief, digest


class Term:
    """A factor of an intersection of masks: a frozen dataclass, so that it compares by value.

    Equal strings are equal terms, on all ranks.
    """

    of_layer: tuple[Term, ...] | None = None
    """The term's part that does not depend on the batch; None: the term itself."""

    def check(self, n: int) -> None:
        """Raise ValueError if the term does not fit a sequence of n tokens."""

    def bands(self, n: int) -> Tensor:
        """Return the allowed pairs of n tokens as disjoint bands, int64 [bands, 6]: see `mask.bands`."""
        raise NotImplementedError

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        """Return whether queries at positions q see keys at positions k, bool [len(q), len(k)]."""
        raise NotImplementedError


@dataclass(frozen=True)
class Window(Term):
    """Key j is seen by query i iff i - left <= j <= i + right; None is unbounded."""

    left: int | None
    right: int | None

    def __str__(self) -> str:
        if self == Window(None, 0):
            return "causal"
        return f"window({self.left}, {self.right})"

    def clipped(self, n: int) -> Window | None:
        """Return the window without bounds longer than n tokens; None if no bound remains."""
        left, right = (None if side is None or side >= n else side for side in (self.left, self.right))
        return None if left is right is None else Window(left, right)

    def bands(self, n: int) -> Tensor:
        left, right = (UNBOUNDED if side is None else side for side in (self.left, self.right))
        return torch.tensor([[0, n, 0, n, -left, right]])

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        distance = k[None, :] - q[:, None]
        left, right = (UNBOUNDED if side is None else side for side in (self.left, self.right))
        return (distance >= -left) & (distance <= right)


@dataclass(frozen=True)
class Stride(Term):
    """Key j is seen by query i iff i - j is a multiple of `step`. It has no bands: see `Mask.stride`."""

    step: int

    def __str__(self) -> str:
        return f"every {self.step}"

    def bands(self, n: int) -> Tensor:
        return everything(n)

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        return (k[None, :] - q[:, None]) % self.step == 0


@dataclass(frozen=True)
class Documents(Term):
    """Packed documents: tokens see only their own document."""

    digest: str
    ends: Tensor = field(compare=False)
    """cu_seqlens, int64, from 0, without empty documents."""
    of_layer = ()

    def __str__(self) -> str:
        return f"documents({len(self.ends) - 1}, #{self.digest})"

    def check(self, n: int) -> None:
        if int(self.ends[-1]) != n:
            raise ValueError(f"the documents of the mask end at {self.ends[-1]}, the sequence has {n} tokens")

    def bands(self, n: int) -> Tensor:
        first, last = self.ends[:-1], self.ends[1:]
        open_ = torch.full_like(first, UNBOUNDED)
        return torch.stack([first, last, first, last, -open_, open_], 1)

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        ends = self.ends.to(q.device)
        of_q, of_k = (torch.searchsorted(ends, x, right=True) for x in (q, k))
        return of_q[:, None] == of_k[None, :]


@dataclass(frozen=True)
class Blocks(Term):
    """Query block a sees key block b iff matrix[a, b]."""

    size: int
    digest: str
    matrix: Tensor = field(compare=False)

    def __str__(self) -> str:
        return f"blocks({self.matrix.shape[0]} x {self.matrix.shape[1]} of {self.size}, #{self.digest})"

    def check(self, n: int) -> None:
        needed = -(-n // self.size)
        if tuple(self.matrix.shape) != (needed, needed):
            blocks = f"a block matrix over {n} tokens in blocks of {self.size}"
            raise ValueError(f"{blocks} must be [{needed}, {needed}], got {list(self.matrix.shape)}")

    def bands(self, n: int) -> Tensor:
        edge = torch.zeros(len(self.matrix), 1, dtype=torch.int8)
        steps = torch.cat([edge, self.matrix.to(torch.int8), edge], 1).diff(dim=1)
        row, first = (steps == 1).nonzero().unbind(1)  # neighbours in a row are one band
        _, last = (steps == -1).nonzero().unbind(1)
        columns = [x * self.size for x in (row, row + 1, first, last)]
        open_ = torch.full_like(row, UNBOUNDED)
        return torch.stack([*(x.clamp(max=n) for x in columns), -open_, open_], 1)

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        at_q, at_k = (x // self.size for x in (q, k))
        return self.matrix.to(q.device)[at_q[:, None], at_k[None, :]]


@dataclass(frozen=True)
class Ranges(Term):
    """A union of slices, each a range of queries and a range of keys; slices may overlap."""

    digest: str
    slices: Tensor = field(compare=False)
    ranges: Tensor = field(compare=False)
    """[slices, 4]: the user's (start, stop) of queries and of keys of each slice."""

    def __str__(self) -> str:
        return f"ranges({len(self.ranges)}, #{self.digest})"

    def check(self, n: int) -> None:
        for row in (self.ranges[:, 1::2] > n).any(1).nonzero().flatten().tolist()[:1]:
            q0, q1, k0, k1 = self.ranges[row].tolist()
            pairs = f"queries [{q0}, {q1}) x keys [{k0}, {k1})"
            raise ValueError(f"slice {row} of the mask, {pairs}, goes beyond the sequence of {n} tokens")

    def bands(self, n: int) -> Tensor:
        return disjoint(self.slices)

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        allowed = torch.zeros(len(q), len(k), dtype=torch.bool, device=q.device)
        for q0, q1, k0, k1, low, high in self.slices.tolist():
            distance = k[None, :] - q[:, None]
            inside = ((q >= q0) & (q < q1))[:, None] & ((k >= k0) & (k < k1))[None, :]
            allowed |= inside & (distance >= low) & (distance <= high)
        return allowed


@dataclass(frozen=True)
class Chunks(Term):
    """Chunks of `size` tokens: tokens see only their own chunk."""

    size: int

    def __str__(self) -> str:
        return f"chunked({self.size})"

    def bands(self, n: int) -> Tensor:
        first = torch.arange(0, n, self.size)
        last, open_ = (first + self.size).clamp(max=n), torch.full_like(first, UNBOUNDED)
        return torch.stack([first, last, first, last, -open_, open_], 1)

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        return q[:, None] // self.size == k[None, :] // self.size


@dataclass(frozen=True)
class Images(Ranges):
    """Image blocks: tokens of a block see the block; other tokens see no key."""

    kind: str = field(compare=False)
    """The name of a block in errors."""

    def __str__(self) -> str:
        return f"images({len(self.ranges)}, #{self.digest})"

    def check(self, n: int) -> None:
        for first, last in self.ranges[self.ranges[:, 1] > n, :2].tolist()[:1]:
            raise ValueError(f"{self.kind} [{first}, {last}) goes beyond the sequence of {n} tokens")

    def check_within(self, ends: Tensor) -> None:
        """Raise ValueError if a block spans several documents; ends: cu_seqlens."""
        edges = self.ranges[:, :2] - torch.tensor([0, 1])
        first, last = torch.searchsorted(ends, edges, right=True).unbind(1)
        for index in (first != last).nonzero().flatten().tolist()[:1]:
            where, end = "[{}, {})".format(*self.ranges[index].tolist()), int(ends[first[index]])
            raise ValueError(f"{self.kind} {where} goes over the end of a document, at {end}")


@dataclass(frozen=True)
class Tree(Term):
    """Concatenated nodes of tokens, parents first; a node sees its ancestors, and itself causally."""

    digest: str
    parents: Tensor = field(compare=False)
    """The parent of each node; -1 for a root."""
    ends: Tensor = field(compare=False)
    """The start of each node, and the end of the last node."""
    of_layer = (Window(None, 0),)

    def __str__(self) -> str:
        return f"tree({len(self.parents)}, #{self.digest})"

    def check(self, n: int) -> None:
        if int(self.ends[-1]) != n:
            raise ValueError(f"the tree's nodes add up to {self.ends[-1]}, but the sequence has {n} tokens")

    def bands(self, n: int) -> Tensor:
        """A band for each node and interval of its descendants: in depth-first order one band a node."""
        ends, runs, rows = self.ends.tolist(), self._runs(), []
        node = 0
        while node < len(runs):
            first = node
            while node + 1 < len(runs) and runs[node + 1] == [(node + 1, runs[node][0][1]), *runs[node][1:]]:
                node += 1  # an only child next to its parent: the same queries see the keys of both
            node += 1
            rows += [[ends[a], ends[b], ends[first], ends[node], -UNBOUNDED, 0] for a, b in runs[first]]
        return tightened(torch.tensor(rows))

    def _runs(self) -> list[list[tuple[int, int]]]:
        """Return each node and its descendants, as intervals (first, last + 1)."""
        runs = [[(node, node + 1)] for node in range(len(self.parents))]
        for node, parent in reversed(list(enumerate(self.parents.tolist()))):
            if parent >= 0:
                runs[parent] = _joined(runs[parent], runs[node])
        return runs

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        above = torch.eye(len(self.parents), dtype=torch.bool)
        for node, parent in enumerate(self.parents.tolist()):
            if parent >= 0:
                above[node] |= above[parent]
        of_q, of_k = (torch.searchsorted(self.ends.to(x.device), x, right=True) - 1 for x in (q, k))
        return above.to(q.device)[of_q[:, None], of_k[None, :]] & (k[None, :] <= q[:, None])


def _joined(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> list[tuple[int, int]]:
    intervals: list[tuple[int, int]] = []
    for first, last in sorted(a + b):
        if intervals and intervals[-1][1] == first:
            intervals[-1] = (intervals[-1][0], last)
        else:
            intervals.append((first, last))
    return intervals


def documents_of(cu_seqlens: Sequence[int] | Tensor) -> Documents:
    """Return the term of cu_seqlens, without empty documents. Raises ValueError if they are not legal."""
    ends = integers("cu_seqlens", cu_seqlens)
    if ends.dim() != 1 or len(ends) < 2 or int(ends[0]) != 0:
        raise ValueError(f"cu_seqlens must be [0, ..., the sequence's length], got {brief(ends.tolist())}")
    for place in (ends.diff() < 0).nonzero().flatten().tolist()[:1]:
        raise ValueError(f"cu_seqlens must not descend, got {ends[place : place + 2].tolist()} at {place}")
    ends = ends.unique_consecutive()  # empty documents
    if len(ends) < 2:
        raise ValueError(f"cu_seqlens must hold at least one token, got {brief(ends.tolist())}")
    return Documents(digest(ends), ends)


def images_of(blocks: Sequence[Sequence[int]] | Tensor, kind: str = "image block") -> Images:
    """Return the term of blocks [start, stop), in any order. Raises ValueError if they are not legal."""
    pairs = sorted(pair for pair in pairs_of("blocks", blocks) if pair[0] < pair[1])
    for one, following in pairwise(pairs):
        if following[0] < one[1]:
            raise ValueError(f"image blocks must not overlap, got {one} and {following}")
    ranges = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).repeat(1, 2)
    open_ = torch.full_like(ranges[:, :1], UNBOUNDED)
    return Images(digest(ranges), torch.cat([ranges, -open_, open_], 1), ranges, kind)


def tree_of(parents: Sequence[int] | Tensor, lengths: Sequence[int] | Tensor) -> Tree:
    """Return the term of a tree. Raises ValueError if parents or lengths are not legal."""
    above, tokens = integers("parents", parents), integers("lengths", lengths)
    if above.dim() != 1 or above.shape != tokens.shape or not len(above):
        raise ValueError(
            f"parents and lengths must be lists with a number for each node, got "
            f"{brief(above.tolist())} and {brief(tokens.tolist())}"
        )
    for node in ((above < -1) | (above >= torch.arange(len(above)))).nonzero().flatten().tolist()[:1]:
        raise ValueError(
            f"the parent of node {node} must be a node before it, or -1 for a root, got {above[node]}"
        )
    for node in (tokens < 0).nonzero().flatten().tolist()[:1]:
        raise ValueError(f"lengths must be numbers of tokens >= 0, got {int(tokens[node])} for node {node}")
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), tokens.cumsum(0)])
    return Tree(digest(torch.stack([above, tokens])), above, ends)


def pairs_of(name: str, ranges: Sequence[Sequence[int]] | Tensor) -> list[list[int]]:
    """Return ranges (start, stop) as a list. Raises ValueError, with the argument's name, if illegal."""
    table = integers(name, ranges)
    table = table.reshape(0, 2) if table.shape == (0,) else table
    if table.dim() != 2 or table.shape[1] != 2:
        raise ValueError(f"{name} must be a list of (start, stop), got {brief(table.tolist())}")
    for start, stop in table.tolist():
        if not 0 <= start <= stop:
            raise ValueError(f"{name} must hold ranges 0 <= start <= stop, got ({start}, {stop})")
    pairs: list[list[int]] = table.tolist()
    return pairs


def integers(name: str, values: object) -> Tensor:
    """Return an int64 copy on the CPU. Raises ValueError, with the argument's name, for other dtypes."""
    table = tensor_of(f"{name} must be integers", values)
    if table.numel() and table.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        raise ValueError(f"{name} must be integers, got {table.dtype}")
    return table.to(torch.int64).clone()


def tensor_of(legal: str, values: object, **options: Any) -> Tensor:
    """Return a tensor on the CPU. Raises ValueError, with the legal values, if there is no such tensor."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.as_tensor(values, **options).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{legal} ({error})") from None


def is_int(value: object) -> bool:
    """Return whether a value is an integer of Python or numpy, not a bool."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
