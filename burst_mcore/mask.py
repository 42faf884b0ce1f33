"""What may attend to what, as data over global positions.

A mask is an intersection of terms. For planning it is lowered to `bands`; intersecting two masks intersects
their bands, so that everything after this file knows bands only. What is no band, every d-th diagonal
(`dilated`), stands beside them as `Mask.stride`.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import numbers
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from burst_mcore.bands import UNBOUNDED, disjoint, everything, intersected, tightened
from burst_mcore.handles import Named, introduce

SLICES = ("full", "causal", "inverse-causal", "bi-causal")
"""The kinds of a slice of `Mask.ranges`."""
_SPELLINGS = {"inv-causal": "inverse-causal", "bicausal": "bi-causal"}


class Term(Protocol):
    """One of the masks that an intersection is made of. Terms compare by value."""

    def check(self, n: int) -> None:
        """ValueError if it does not go with a sequence of n tokens."""
        ...

    def bands(self, n: int) -> Tensor: ...

    def allows(self, q: Tensor, k: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class _Window:
    """Key j is seen by query i iff i - left <= j <= i + right; None is unbounded."""

    left: int | None
    right: int | None

    def __str__(self) -> str:
        if self == _Window(None, 0):
            return "causal"
        return f"window({self.left}, {self.right})"

    def check(self, n: int) -> None:
        pass

    def clipped(self, n: int) -> _Window | None:
        """What ends it in n tokens; None if nothing does."""
        left, right = (None if side is None or side >= n else side for side in (self.left, self.right))
        return None if left is right is None else _Window(left, right)

    def bands(self, n: int) -> Tensor:
        low = -UNBOUNDED if self.left is None else -self.left
        return torch.tensor([[0, n, 0, n, low, UNBOUNDED if self.right is None else self.right]])

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        ahead = k[None, :] - q[:, None]
        seen = torch.ones_like(ahead, dtype=torch.bool)
        if self.left is not None:
            seen &= ahead >= -self.left
        if self.right is not None:
            seen &= ahead <= self.right
        return seen


@dataclass(frozen=True)
class _Stride:
    """Key j is seen by query i iff i - j is a multiple of `step`. It has no bands: see `Mask.stride`."""

    step: int

    def __str__(self) -> str:
        return f"every {self.step}"

    def check(self, n: int) -> None:
        pass

    def bands(self, n: int) -> Tensor:
        return everything(n)

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        return (k[None, :] - q[:, None]) % self.step == 0


@dataclass(frozen=True)
class _Documents:
    """Packed documents; each sees itself alone."""

    digest: str
    ends: Tensor = field(compare=False)
    """cu_seqlens, int64, from 0, without empty documents."""

    def __str__(self) -> str:
        return f"documents({len(self.ends) - 1}, #{self.digest})"

    def check(self, n: int) -> None:
        if int(self.ends[-1]) != n:
            raise ValueError(
                f"the documents of the mask end at {int(self.ends[-1])} (the last of cu_seqlens), but the "
                f"sequence has {n} tokens"
            )

    def bands(self, n: int) -> Tensor:
        first, last = self.ends[:-1], self.ends[1:]
        open_ = torch.full_like(first, UNBOUNDED)
        return torch.stack([first, last, first, last, -open_, open_], 1)

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        ends = self.ends.to(q.device)
        of_q, of_k = (torch.searchsorted(ends, x, right=True) for x in (q, k))
        return of_q[:, None] == of_k[None, :]


@dataclass(frozen=True)
class _Blocks:
    """Query block a sees key block b iff matrix[a, b]."""

    size: int
    digest: str
    matrix: Tensor = field(compare=False)

    def __str__(self) -> str:
        return f"blocks({self.matrix.shape[0]} x {self.matrix.shape[1]} of {self.size}, #{self.digest})"

    def check(self, n: int) -> None:
        needed = -(-n // self.size)
        if tuple(self.matrix.shape) != (needed, needed):
            raise ValueError(
                f"a block matrix over {n} tokens in blocks of {self.size} must be [{needed}, {needed}], got "
                f"{list(self.matrix.shape)}"
            )

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
class _Ranges:
    """The union of slices, given as bands that may overlap."""

    digest: str
    slices: Tensor = field(compare=False)
    given: Tensor = field(compare=False)
    """[slices, 4]: the ranges as they were given."""

    def __str__(self) -> str:
        return f"ranges({len(self.given)}, #{self.digest})"

    def check(self, n: int) -> None:
        beyond = (self.given[:, (1, 3)].amax(1) > n).nonzero().flatten().tolist() if len(self.given) else []
        if beyond:
            q0, q1, k0, k1 = self.given[beyond[0]].tolist()
            raise ValueError(
                f"slice {beyond[0]} of the mask, queries [{q0}, {q1}) x keys [{k0}, {k1}), goes beyond the "
                f"sequence of {n} tokens"
            )

    def bands(self, n: int) -> Tensor:
        return disjoint(self.slices)

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        seen = torch.zeros(len(q), len(k), dtype=torch.bool, device=q.device)
        for q0, q1, k0, k1, low, high in self.slices.tolist():
            ahead = k[None, :] - q[:, None]
            inside = ((q >= q0) & (q < q1))[:, None] & ((k >= k0) & (k < k1))[None, :]
            seen |= inside & (ahead >= low) & (ahead <= high)
        return seen


@dataclass(frozen=True)
class Mask(Named):
    """A mask over the global sequence. Build it with the class methods, intersect with `&`.

    Masks compare and hash by value, so that plans made for one are found again.
    """

    terms: tuple[Term, ...] = ()

    def __post_init__(self) -> None:
        terms = self.terms if isinstance(self.terms, tuple) else (self.terms,)
        if not all(isinstance(term, (_Window, _Stride, _Documents, _Blocks, _Ranges)) for term in terms):
            raise ValueError(
                f"{self.terms!r} is no mask: build one with Mask.causal(), full(), window(), dilated(), "
                f"documents(), blocks(), ranges(), and `&`"
            )
        introduce(self, f"Mask({self})")

    @classmethod
    def full(cls) -> Mask:
        """Every query sees every key."""
        return cls()

    @classmethod
    def causal(cls) -> Mask:
        """A query sees the keys at its own and at earlier positions."""
        return cls((_Window(None, 0),))

    @classmethod
    def window(cls, left: int | None, right: int | None) -> Mask:
        """Key j is seen by query i iff i - left <= j <= i + right; None or -1: unbounded on that side.

        flash-attn's and Megatron's convention; a Hugging Face sliding_window of W is window(W - 1, 0). In a
        sequence that is not longer than a bound, that side is unbounded.

        Raises:
            ValueError: a bound is neither a number >= 0 nor None or -1.
        """
        bounds = [None if value == -1 else value for value in (left, right)]
        for name, value in zip(("left", "right"), bounds, strict=True):
            if value is not None and (not _is_int(value) or value < 0):
                raise ValueError(
                    f"window {name} must be a number of tokens >= 0, or None (or -1) for unbounded, got "
                    f"{value!r}"
                )
        left, right = (None if value is None else int(value) for value in bounds)
        return cls() if left is right is None else cls((_Window(left, right),))

    @classmethod
    def dilated(cls, window: int, dilation: int) -> Mask:
        """Key j is seen by query i iff |i - j| < window and i - j is a multiple of dilation.

        `& Mask.causal()` looks back only; with dilation 1 that is window(window - 1, 0).

        Raises:
            ValueError: window or dilation is not a number >= 1.
        """
        for name, value in (("window", window), ("dilation", dilation)):
            if not _is_int(value) or value < 1:
                raise ValueError(f"{name} of a dilated mask must be a number >= 1, got {value!r}")
        near = cls.window(window - 1, window - 1)
        return near if dilation == 1 else near & cls((_Stride(int(dilation)),))

    @classmethod
    def documents(cls, cu_seqlens: Sequence[int] | Tensor) -> Mask:
        """Packed documents: a token sees the tokens of its own document. `& Mask.causal()` for causal ones.

        Args:
            cu_seqlens: where documents begin, and at last where the sequence ends: 0 <= ... <= n, integers,
                as flash-attn takes them. A CUDA tensor is read once, and again if torch changed it in place;
                what else writes to its memory goes unnoticed.

        Raises:
            ValueError: it does not begin with 0, or descends, or is not a list of integers.
        """
        if not isinstance(cu_seqlens, Tensor) or cu_seqlens.device.type == "cpu":
            return cls((_documents(cu_seqlens),))
        version = -1 if cu_seqlens.is_inference() else cu_seqlens._version
        found = _READ.get(cu_seqlens)
        if found is None or found[0] != version or version < 0:
            found = version, cls((_documents(cu_seqlens),))
            _READ[cu_seqlens] = found
        mask: Mask = found[1]
        return mask

    @classmethod
    def blocks(cls, matrix: Tensor | Sequence[Sequence[bool]], block_size: int) -> Mask:
        """Block-sparse: token i sees token j iff matrix[i // block_size, j // block_size].

        Args:
            matrix: bool [blocks, blocks]. The last block may be cut short by the end of the sequence.
            block_size: tokens of a block.

        Raises:
            ValueError: the matrix is not square and boolean, or block_size is not a number >= 1.
        """
        if not _is_int(block_size) or block_size < 1:
            raise ValueError(f"block_size must be a number >= 1, got {block_size!r}")
        try:
            table = torch.as_tensor(matrix).detach().cpu()
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"a block matrix must be a rectangle of booleans ({error})") from None
        if table.dim() != 2 or table.shape[0] != table.shape[1] or 0 in table.shape:
            raise ValueError(f"a block matrix must be square, [blocks, blocks], got {list(table.shape)}")
        if table.dtype != torch.bool and not bool(((table == 0) | (table == 1)).all()):
            raise ValueError(f"a block matrix must be boolean, got {table.dtype} with values besides 0 and 1")
        table = table.bool().contiguous().clone()
        return cls((_Blocks(int(block_size), _digest(table), table),))

    @classmethod
    def ranges(
        cls,
        q_ranges: Sequence[Sequence[int]] | Tensor,
        k_ranges: Sequence[Sequence[int]] | Tensor,
        kinds: Sequence[str] | str = "full",
    ) -> Mask:
        """The union of slices: slice s lets queries q_ranges[s] see keys k_ranges[s], as kinds[s] says.

        Ranges are [start, stop). Within a slice: "full": all; "causal": up to the diagonal that ends in the
        lower right corner; "inverse-causal": from the diagonal that begins in the upper left corner on;
        "bi-causal": both. (MagiAttention's slices, also as it spells them.) No slice at all: nobody sees
        anything.

        Raises:
            ValueError: lists of different lengths, ranges that descend or are negative, unknown kinds.
        """
        q, k = _pairs("q_ranges", q_ranges), _pairs("k_ranges", k_ranges)
        if not isinstance(kinds, (str, Sequence)):
            raise ValueError(f"kinds must be names of {SLICES}, got {kinds!r}")
        names = [kinds] * len(q) if isinstance(kinds, str) else list(kinds)
        if not len(q) == len(k) == len(names):
            raise ValueError(
                f"q_ranges, k_ranges and kinds must be of one length, got {len(q)}, {len(k)}, {len(names)}"
            )
        rows = []
        for (q0, q1), (k0, k1), name in zip(q, k, names, strict=True):
            kind = str(name).lower().replace("_", "-").replace(" ", "-")
            kind = _SPELLINGS.get(kind, kind)
            if kind not in SLICES:
                raise ValueError(f"unknown kind {name!r} of a slice; legal: {', '.join(map(repr, SLICES))}")
            low = k0 - q0 if kind in ("inverse-causal", "bi-causal") else -UNBOUNDED
            high = k1 - q1 if kind in ("causal", "bi-causal") else UNBOUNDED
            rows.append([q0, q1, k0, k1, low, high])
        given = torch.tensor(rows, dtype=torch.int64).reshape(-1, 6)
        return cls((_Ranges(_digest(given), tightened(given), given[:, :4]),))

    def __and__(self, other: Mask) -> Mask:
        """Both must allow a pair."""
        if not isinstance(other, Mask):
            return NotImplemented
        terms: list[Term] = []
        windows: list[_Window] = []
        steps: list[int] = []
        for term in (*self.terms, *other.terms):
            if isinstance(term, _Window):
                windows.append(term)
            elif isinstance(term, _Stride):
                steps.append(term.step)
            elif isinstance(term, _Documents) and (same := _as_long(term, terms)) is not None:
                ends = torch.cat([term.ends, same.ends]).unique()
                terms[terms.index(same)] = _Documents(_digest(ends), ends)
            elif term not in terms:
                terms.append(term)
        sides = [[getattr(w, side) for w in windows if getattr(w, side) is not None] for side in _SIDES]
        head: list[Term] = [_Window(*(min(side, default=None) for side in sides))] if windows else []
        head += [_Stride(math.lcm(*steps))] if steps else []
        return Mask((*head, *sorted(terms, key=str)))

    def __str__(self) -> str:
        return " & ".join(map(str, self.terms)) or "full"

    @property
    def has_window(self) -> bool:
        """Whether a window that ends on the left is among its terms."""
        return any(isinstance(term, _Window) and term.left is not None for term in self.terms)

    @property
    def is_window(self) -> bool:
        """Whether it is a window that ends on the left, and nothing else."""
        return self.has_window and len(self.terms) == 1

    @property
    def is_sparse(self) -> bool:
        """Whether it is block-sparse or dilated: what it leaves is small and scattered."""
        return self.stride > 1 or any(isinstance(term, _Blocks) for term in self.terms)

    @property
    def document_ends(self) -> Tensor | None:
        """cu_seqlens of its documents, int64; None if it has none. Of several, those cut finest."""
        ends = [term.ends for term in self.terms if isinstance(term, _Documents)]
        return max(ends, key=len, default=None)

    @property
    def without_documents(self) -> Mask:
        """The same, but that documents see each other."""
        return Mask(tuple(term for term in self.terms if not isinstance(term, _Documents)))

    def with_documents(self, ends: Tensor) -> Mask:
        """The same with other documents in the place of its own."""
        return self.without_documents & Mask.documents(ends)

    @property
    def stride(self) -> int:
        """Only pairs whose distance is a multiple of this are allowed, besides what `bands` says."""
        return next((term.step for term in self.terms if isinstance(term, _Stride)), 1)

    def check(self, n: int) -> None:
        """Check that the mask goes with a sequence of n tokens.

        Raises:
            ValueError: documents that do not end at n, block matrices of another size, ranges beyond n.
        """
        for term in self.terms:
            term.check(n)

    def clipped(self, n: int) -> Mask:
        """The same over n tokens: a window at least as long as the sequence has no end there."""
        long = [t for t in self.terms if isinstance(t, _Window) and t.clipped(n) != t]
        if not long:
            return self
        shorter = (t.clipped(n) if isinstance(t, _Window) else t for t in self.terms)
        return Mask(tuple(term for term in shorter if term is not None))

    def bands(self, n: int) -> Tensor:
        """The mask over n tokens as disjoint bands, int64 [bands, 6]: see `burst_mcore.bands`. Cached."""
        return _bands(self, n)

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        """Bool [len(q), len(k)]: may the query at global position q see the key at k (the definition)."""
        seen = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device)
        for term in self.terms:
            seen &= term.allows(q, k)
        return seen


_SIDES = ("left", "right")
_READ: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""(version, mask) of the cu_seqlens tensors that live."""


@lru_cache(maxsize=64)
def _bands(mask: Mask, n: int) -> Tensor:
    mask.check(n)
    return reduce(intersected, [term.bands(n) for term in mask.terms], everything(n))


def _as_long(term: _Documents, others: Sequence[Term]) -> _Documents | None:
    """The documents among `others` that end where `term` ends."""
    last = int(term.ends[-1])
    return next((x for x in others if isinstance(x, _Documents) and int(x.ends[-1]) == last), None)


def _documents(cu_seqlens: Sequence[int] | Tensor) -> _Documents:
    ends = _integers("cu_seqlens", cu_seqlens)
    if ends.dim() != 1 or len(ends) < 2 or int(ends[0]) != 0:
        raise ValueError(
            f"cu_seqlens must be a list of integers that begins with 0 and ends with the sequence's length, "
            f"got {_short(ends)}"
        )
    down = (ends.diff() < 0).nonzero().flatten().tolist()
    if down:
        at = down[0]
        raise ValueError(
            f"cu_seqlens must not descend, got {int(ends[at])}, {int(ends[at + 1])} at places {at}, {at + 1}"
        )
    ends = ends.unique_consecutive()  # empty documents
    if len(ends) < 2:
        raise ValueError(f"cu_seqlens must hold at least one token, got {_short(ends)}")
    return _Documents(_digest(ends), ends)


def _pairs(name: str, ranges: Sequence[Sequence[int]] | Tensor) -> list[list[int]]:
    table = _integers(name, ranges)
    table = table.reshape(0, 2) if table.shape == (0,) else table
    if table.dim() != 2 or table.shape[1] != 2:
        raise ValueError(f"{name} must be a list of (start, stop), got {_short(table)}")
    for start, stop in table.tolist():
        if not 0 <= start <= stop:
            raise ValueError(f"{name} must hold ranges 0 <= start <= stop, got ({start}, {stop})")
    found: list[list[int]] = table.tolist()
    return found


def _integers(name: str, values: object) -> Tensor:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            table = torch.as_tensor(values).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} must be integers ({error})") from None
    if table.numel() and table.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        raise ValueError(f"{name} must be integers, got {table.dtype}")
    return table.to(torch.int64).clone()


def _short(x: Tensor) -> str:
    words = str(x.tolist())
    return words if len(words) < 80 else f"{words[:76]} ..."


def _is_int(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _digest(x: Tensor) -> str:
    x = x.contiguous()
    content = ctypes.string_at(x.data_ptr(), x.nbytes) if x.numel() else b""
    return hashlib.blake2b(content + str(tuple(x.shape)).encode(), digest_size=8).hexdigest()
