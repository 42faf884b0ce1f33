"""The layout of a sequence: the tokens of each rank, as pure functions of (rank, size).

A rank's shard of n tokens is a tuple of *runs*, `range` objects of global positions, in ascending order, the
order of its rows in memory. Everything else (positions, shard, unshard, the attention plan) reads the runs.
The layout's kind defines them: see `kinds`.

A sequence with an indivisible length is sharded as if it were padded: ranks with the last positions have
fewer tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from burst_mcore.layout.balance import EVEN, EVEN_WINDOW, candidates, imbalance
from burst_mcore.layout.kinds import DEFAULTS, NAMES, LayoutKind, Runs, kind_from, kind_of
from burst_mcore.mask import Mask
from burst_mcore.words import brief


@dataclass(frozen=True, init=False, repr=False)
class Layout:
    """The sharding of a sequence over the G ranks of a ring.

    `Layout("zigzag")`, `Layout("stacked-zigzag", stacks=4)`, `Layout("chunks", chunks=((0, 3), (1, 2)))`: the
    name of a class in `burst_mcore.layout.kinds`, and its parameters. Every layout has the parameters of all
    kinds: `layout.block` is 0 without blocks. Layouts compare, hash and pickle by value.

    Raises ValueError if the name or a parameter is not legal.
    """

    rule: LayoutKind

    def __init__(self, kind: str = "zigzag", **parameters: Any) -> None:
        object.__setattr__(self, "rule", kind_of(kind, parameters))

    @property
    def kind(self) -> str:
        """The name of its kind."""
        return self.rule.word

    def __getattr__(self, name: str) -> Any:
        """Return a parameter of the layout, or the default of a parameter that only other kinds have."""
        if name not in DEFAULTS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.rule, name, DEFAULTS[name])

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.kind, *self._parameters.values()))

    @property
    def _parameters(self) -> dict[str, Any]:
        return {field.name: getattr(self.rule, field.name) for field in fields(self.rule)}

    def __reduce__(self) -> tuple[Callable[[], Layout], tuple[()]]:
        return partial(Layout, self.kind, **self._parameters), ()  # the cached hash is this process's

    @classmethod
    def of(cls, layout: Layout | str) -> Layout:
        """Return a layout from itself or from its name, such as "zigzag" or "block-striped:128".

        Raises:
            ValueError: for anything else.
        """
        if isinstance(layout, Layout):
            return layout
        if not isinstance(layout, str):
            raise ValueError(f"layout must be a Layout or a word ({NAMES}), got {layout!r}")
        kind = kind_from(layout)
        return cls(kind.word, **{field.name: getattr(kind, field.name) for field in fields(kind)})

    @classmethod
    def for_mask(cls, mask: Mask, n: int, size: int) -> Layout:
        """Return the layout that balances `mask` over n tokens and `size` ranks, with little communication.

        Candidates in order: contiguous, zigzag, stacked zigzag, finer and finer chunks (each chunk to the
        rank with the least work), striped. The result is the first with at most 1.05 times the mean work on
        the busiest rank (1.10 for a window alone), by queries and by keys, else the most balanced.

        Raises:
            ValueError: the mask does not fit n tokens, or size is not a number of ranks.
        """
        return _for_mask(mask, n, size)

    def __str__(self) -> str:
        return self._word

    def __repr__(self) -> str:
        return f"Layout({self._word!r})"

    @cached_property
    def _word(self) -> str:
        return str(self.rule)

    def divisor(self, size: int) -> int:
        """Return the divisor of padded lengths, on a ring of `size` ranks.

        Raises:
            ValueError: the layout does not fit the number of ranks.
        """
        return _divisor(self, size)

    def padded(self, n: int, size: int) -> int:
        """Return the padded length of a sequence of n tokens: the next multiple of `divisor`.

        Raises:
            ValueError: as `divisor`; or n < 1.
        """
        if n < 1:
            raise ValueError(f"a sequence has at least one token, got n={n}")
        divisor = self.divisor(size)
        if self.rule.length and n != divisor:
            raise ValueError(f"the documents of layout {self} end at {divisor}, the sequence has {n} tokens")
        return -(-n // divisor) * divisor

    def runs(self, n: int, rank: int, size: int) -> Runs:
        """Return the global positions of `rank`, ascending, as ranges; positions of padding are >= n.

        Raises:
            ValueError: rank outside the ring, or as `padded`.
        """
        if size < 1 or not 0 <= rank < size:
            raise ValueError(f"rank must be in [0, size) with size >= 1, got rank {rank} of size {size}")
        return _runs(self, n, rank, size)

    def run_table(self, n: int, size: int) -> Tensor:
        """Return the runs of all ranks, int64 [runs, 4]: rank, start, stop, step; by rank and start.

        Raises:
            ValueError: as `padded`.
        """
        n = self.padded(n, size)
        return torch.tensor([[0, 0, n, 1]]) if size == 1 else self.rule.run_table(n, size)

    def chunk_table(self, n: int, size: int) -> Tensor | None:
        """Return the equal chunks of the padded sequence by rank, int64 [size, chunks of a rank].

        None if the layout has no equal chunks.
        """
        return None if size == 1 else self.rule.chunk_table(self.padded(n, size), size)

    def edges(self, n: int, size: int) -> Tensor:
        """Return the ascending edges of the layout's pieces, int64 [edges], from 0.

        Raises:
            ValueError: as `padded`.
        """
        padded = self.padded(n, size)
        edges = torch.zeros(1, dtype=torch.int64) if size == 1 else self.rule.edges(padded, size)
        return edges[edges < n]


@lru_cache(maxsize=64)
def _for_mask(mask: Mask, n: int, size: int) -> Layout:
    if not isinstance(mask, Mask):
        raise ValueError(f"mask must be a Mask, got {brief(mask)}: Mask.causal(), Mask.full(), ...")
    for name, value, noun in (("n", n, "tokens"), ("size", size, "ranks")):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be a number of {noun}, at least 1, got {brief(value)}")
    enough = EVEN_WINDOW if mask.has_window and len(mask.terms) == 1 else EVEN
    layouts: dict[Layout, float] = {}
    for fields_of in candidates(mask, n, size):
        layout = Layout(**fields_of)
        layouts[layout] = imbalance(layout, mask, n, size)
        if layouts[layout] <= enough:
            return layout
    return min(layouts, key=lambda each: layouts[each])


@lru_cache(maxsize=1024)
def _divisor(layout: Layout, size: int) -> int:
    layout.rule.check(size)
    return layout.rule.length or (1 if size == 1 else layout.rule.divisor(size))


@lru_cache(maxsize=1024)
def _runs(layout: Layout, n: int, rank: int, size: int) -> Runs:
    table = layout.run_table(n, size)
    return tuple(range(*run) for run in table[table[:, 0] == rank, 1:].tolist())


def positions(n: int, *, rank: int, size: int, layout: Layout | str = "zigzag") -> Tensor:
    """Return the global position of each row of `rank`, int64 [local rows], in local order.

    `n` is the length of the GLOBAL sequence in tokens. Ranks hold equally many rows if the layout's divisor
    divides n; else some hold fewer, perhaps none.

    Raises:
        ValueError: as `Layout.runs`.
    """
    runs = Layout.of(layout).runs(n, rank, size)
    tokens = torch.cat([torch.arange(r.start, r.stop, r.step) for r in runs])
    return tokens[tokens < n]


def shard(x: Tensor, dim: int, *, rank: int, size: int, layout: Layout | str = "zigzag") -> Tensor:
    """Return the shard of `x` along `dim` of `rank`, as a new contiguous tensor. Differentiable.

    Raises:
        ValueError: as `Layout.runs`, with n = x.shape[dim].
    """
    n = x.shape[dim]
    runs = Layout.of(layout).runs(n, rank, size)
    if any(run.step > 1 for run in runs):
        return x.index_select(dim, positions(n, rank=rank, size=size, layout=layout).to(x.device))
    pieces = [x.narrow(dim, r.start, min(r.stop, n) - r.start) for r in runs if r.start < n]
    return torch.cat(pieces or [x.narrow(dim, 0, 0)], dim=dim)


def unshard(parts: Sequence[Tensor], dim: int, *, layout: Layout | str = "zigzag") -> Tensor:
    """Return the global tensor from every rank's part, in rank order: the inverse of `shard`. Differentiable.

    Raises:
        ValueError: no parts, parts that differ in another dimension, or lengths other than the layout's.
    """
    parts = list(parts)
    shapes = [tuple(part.shape) for part in parts]
    others = {shape[:dim] + shape[dim:][1:] for shape in shapes}
    if len(others) != 1 or not all(shape[dim:] for shape in shapes):
        raise ValueError(f"unshard needs one part per rank, of one shape but for dim {dim}, got {shapes}")
    size, lengths = len(parts), [part.shape[dim] for part in parts]
    n = sum(lengths)
    sharded = [positions(n, rank=r, size=size, layout=layout) for r in range(size)]
    if lengths != (legal := [len(tokens) for tokens in sharded]):
        raise ValueError(f"layout {layout} shards {n} tokens over {size} ranks as {legal}, got {lengths}")
    return torch.cat(parts, dim=dim).index_select(dim, torch.cat(sharded).argsort().to(parts[0].device))
