"""Mask: which queries attend to which keys, as data over global positions.

A mask is an intersection of terms. For planning it is lowered to `bands`; intersecting two masks intersects
their bands, so that everything after this file knows bands only. Every d-th diagonal (`dilated`) is no band
and stands beside them as `Mask.stride`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from burst_mcore.digest import digest
from burst_mcore.mask.bands import UNBOUNDED, everything, intersected, tightened
from burst_mcore.mask.tables import documents_of, is_int, pairs_of
from burst_mcore.mask.terms import Blocks, Documents, Ranges, Stride, Term, Window
from burst_mcore.registry import Registered, register

SLICES = ("full", "causal", "inverse-causal", "bi-causal")
"""The kinds of a slice of `Mask.ranges`."""
_SPELLINGS = {"inv-causal": "inverse-causal", "bicausal": "bi-causal"}


@dataclass(frozen=True)
class Mask(Registered):
    """A mask over the global sequence. Build it with the class methods, intersect with `&`.

    Masks compare and hash by value, so that plans are made once for equal masks.
    """

    terms: tuple[Term, ...] = ()

    def __post_init__(self) -> None:
        terms = self.terms if isinstance(self.terms, tuple) else (self.terms,)
        if not all(isinstance(term, Term) for term in terms):
            raise ValueError(
                f"{self.terms!r} is no mask: build one with Mask.causal(), full(), window(), dilated(), "
                f"documents(), blocks(), ranges(), and `&`"
            )
        register(self, f"Mask({self})")

    @classmethod
    def full(cls) -> Mask:
        """Every query sees every key."""
        return cls()

    @classmethod
    def causal(cls) -> Mask:
        """A query sees the keys at its own and at earlier positions."""
        return cls((Window(None, 0),))

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
            if value is not None and (not is_int(value) or value < 0):
                raise ValueError(
                    f"window {name} must be a number of tokens >= 0, or None (or -1) for unbounded, got "
                    f"{value!r}"
                )
        left, right = (None if value is None else int(value) for value in bounds)
        return cls() if left is right is None else cls((Window(left, right),))

    @classmethod
    def dilated(cls, window: int, dilation: int) -> Mask:
        """Key j is seen by query i iff |i - j| < window and i - j is a multiple of dilation.

        `& Mask.causal()` looks back only; with dilation 1 that is window(window - 1, 0).

        Raises:
            ValueError: window or dilation is not a number >= 1.
        """
        for name, value in (("window", window), ("dilation", dilation)):
            if not is_int(value) or value < 1:
                raise ValueError(f"{name} of a dilated mask must be a number >= 1, got {value!r}")
        near = cls.window(window - 1, window - 1)
        return near if dilation == 1 else near & cls((Stride(int(dilation)),))

    @classmethod
    def documents(cls, cu_seqlens: Sequence[int] | Tensor) -> Mask:
        """Packed documents: a token sees the tokens of its own document. `& Mask.causal()` for causal ones.

        Args:
            cu_seqlens: where documents begin, and at last where the sequence ends: 0 <= ... <= n, integers,
                as flash-attn takes them. A CUDA tensor is read once, and again if torch changed it in place;
                other writes to its memory go unnoticed.

        Raises:
            ValueError: it does not begin with 0, or descends, or is not a list of integers.
        """
        if not isinstance(cu_seqlens, Tensor) or cu_seqlens.device.type == "cpu":
            return cls((documents_of(cu_seqlens),))
        version = -1 if cu_seqlens.is_inference() else cu_seqlens._version
        known = _READ.get(cu_seqlens)
        if known is None or known[0] != version or version < 0:
            known = version, cls((documents_of(cu_seqlens),))
            _READ[cu_seqlens] = known
        mask: Mask = known[1]
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
        if not is_int(block_size) or block_size < 1:
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
        return cls((Blocks(int(block_size), digest(table), table),))

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
        q, k = pairs_of("q_ranges", q_ranges), pairs_of("k_ranges", k_ranges)
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
        slices = torch.tensor(rows, dtype=torch.int64).reshape(-1, 6)
        return cls((Ranges(digest(slices), tightened(slices), slices[:, :4]),))

    def __and__(self, other: Mask) -> Mask:
        """Both must allow a pair."""
        if not isinstance(other, Mask):
            return NotImplemented
        terms: list[Term] = []
        windows: list[Window] = []
        steps: list[int] = []
        for term in (*self.terms, *other.terms):
            if isinstance(term, Window):
                windows.append(term)
            elif isinstance(term, Stride):
                steps.append(term.step)
            elif isinstance(term, Documents) and (same := _as_long(term, terms)) is not None:
                ends = torch.cat([term.ends, same.ends]).unique()
                terms[terms.index(same)] = Documents(digest(ends), ends)
            elif term not in terms:
                terms.append(term)
        sides = [[getattr(w, side) for w in windows if getattr(w, side) is not None] for side in _SIDES]
        head: list[Term] = [Window(*(min(side, default=None) for side in sides))] if windows else []
        head += [Stride(math.lcm(*steps))] if steps else []
        return Mask((*head, *sorted(terms, key=str)))

    def __str__(self) -> str:
        return " & ".join(map(str, self.terms)) or "full"

    @property
    def has_window(self) -> bool:
        """Whether a window that ends on the left is among its terms."""
        return any(isinstance(term, Window) and term.left is not None for term in self.terms)

    @property
    def is_window(self) -> bool:
        """Whether it is a window that ends on the left, and nothing else."""
        return self.has_window and len(self.terms) == 1

    @cached_property
    def document_ends(self) -> Tensor | None:
        """cu_seqlens of its documents, int64; None if it has none. Of several, those cut finest."""
        ends = [term.ends for term in self.terms if isinstance(term, Documents)]
        return max(ends, key=len, default=None)

    @property
    def without_documents(self) -> Mask:
        """The same mask without documents: they see each other."""
        return Mask(tuple(term for term in self.terms if not isinstance(term, Documents)))

    def with_documents(self, ends: Tensor) -> Mask:
        """Return the same mask with other documents in the place of its own."""
        return self.without_documents & Mask.documents(ends)

    @property
    def stride(self) -> int:
        """Pairs must also be in `bands`, and their distance a multiple of this number."""
        return next((term.step for term in self.terms if isinstance(term, Stride)), 1)

    def check(self, n: int) -> None:
        """Check that the mask goes with a sequence of n tokens.

        Raises:
            ValueError: documents that do not end at n, block matrices of another size, ranges beyond n.
        """
        for term in self.terms:
            term.check(n)

    def clipped(self, n: int) -> Mask:
        """Return the same over n tokens: a window at least as long as the sequence has no end there."""
        long = [t for t in self.terms if isinstance(t, Window) and t.clipped(n) != t]
        if not long:
            return self
        shorter = (t.clipped(n) if isinstance(t, Window) else t for t in self.terms)
        return Mask(tuple(term for term in shorter if term is not None))

    def bands(self, n: int) -> Tensor:
        """Return the mask over n tokens as disjoint bands, int64 [bands, 6]: see `mask.bands`. Cached."""
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


def _as_long(term: Documents, others: Sequence[Term]) -> Documents | None:
    """Return the documents among `others` that end where `term` ends."""
    last = int(term.ends[-1])
    return next((x for x in others if isinstance(x, Documents) and int(x.ends[-1]) == last), None)
