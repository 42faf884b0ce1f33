"""Mask: the query-key pairs that attention computes, by positions in the whole sequence.

A mask is an intersection of terms; one kind of term is a union of masks. For planning a mask is lowered to
`bands`: intersections and unions of masks are intersections and unions of bands, and all later code reads
bands only. A dilated mask, every d-th diagonal, is not a band: `Mask.stride` has d.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from itertools import chain

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from burst_mcore.mask.bands import UNBOUNDED, everything, intersected, tightened, united
from burst_mcore.mask.terms import (
    Blocks,
    Chunks,
    Documents,
    Images,
    Ranges,
    Stride,
    Term,
    Tree,
    Window,
    documents_of,
    images_of,
    integers,
    is_int,
    pairs_of,
    tensor_of,
    tree_of,
)
from burst_mcore.words import digest

SLICES = ("full", "causal", "inverse-causal", "bi-causal")
"""The kinds of a slice of `Mask.ranges`."""
_SPELLINGS = {"inv-causal": "inverse-causal", "bicausal": "bi-causal"}


@dataclass(frozen=True)
class Mask:
    """A mask over the global sequence, built with the class methods, `&` and `|`.

    Masks compare and hash by value, so that equal masks share cached plans.
    """

    terms: tuple[Term, ...] = ()

    def __post_init__(self) -> None:
        terms = self.terms if isinstance(self.terms, tuple) else (self.terms,)
        if not all(isinstance(term, Term) for term in terms):
            raise ValueError(
                f"{self.terms!r} is no mask: build one with Mask.causal(), full(), window(), dilated(), "
                f"chunked(), documents(), blocks(), ranges(), images(), prefix(), tree(), `&` and `|`"
            )

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
                raise ValueError(f"window {name} must be a number of tokens >= 0, or None, got {value!r}")
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
        bounds = cls.window(window - 1, window - 1)
        return bounds if dilation == 1 else bounds & cls((Stride(int(dilation)),))

    @classmethod
    def chunked(cls, size: int) -> Mask:
        """Key j is seen by query i iff both are in the same chunk of `size` tokens: i // size == j // size.

        `& Mask.causal()` is Llama 4's chunked attention.

        Raises:
            ValueError: size is not a number >= 1.
        """
        if not is_int(size) or size < 1:
            raise ValueError(f"the size of chunks must be a number of tokens >= 1, got {size!r}")
        return cls((Chunks(int(size)),))

    @classmethod
    def documents(cls, cu_seqlens: Sequence[int] | Tensor) -> Mask:
        """Packed documents: a token sees the tokens of its own document. Causal with `& Mask.causal()`.

        Args:
            cu_seqlens: the starts of documents and the end of the sequence, integers 0 <= ... <= n, as in
                flash-attn. A CUDA tensor is read once, and again if torch changed it in place; other writes
                to its memory go unnoticed.

        Raises:
            ValueError: it does not begin with 0, or descends, or is not a list of integers.
        """
        if not isinstance(cu_seqlens, Tensor) or cu_seqlens.device.type == "cpu":
            return cls((documents_of(cu_seqlens),))
        version = -1 if cu_seqlens.is_inference() else cu_seqlens._version
        entry = _READ.get(cu_seqlens)
        if entry is None or entry[0] != version or version < 0:
            entry = _READ[cu_seqlens] = version, cls((documents_of(cu_seqlens),))
        mask: Mask = entry[1]
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
        table = tensor_of("a block matrix must be a rectangle of booleans", matrix)
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
        """The union of slices: in slice s queries q_ranges[s] see keys k_ranges[s], masked by kinds[s].

        Ranges are [start, stop). Kinds: "full": all pairs; "causal": up to the diagonal that ends in the
        lower right corner; "inverse-causal": from the diagonal that begins in the upper left corner on;
        "bi-causal": both. (MagiAttention's AttnSlice, also with its spelling.) Without a slice no query sees
        a key.

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

    @classmethod
    def images(cls, blocks: Sequence[Sequence[int]] | Tensor) -> Mask:
        """Tokens of the same image block see each other; other tokens see no key.

        `Mask.causal() | Mask.images(blocks)` is Gemma 3's mask: causal, or in the same image.

        Args:
            blocks: [start, stop) of each image in the sequence, integers, in any order, without overlap;
                with documents (`&`), each within one document.

        Raises:
            ValueError: ranges that descend, are negative or overlap.
        """
        return cls((images_of(blocks),))

    @classmethod
    def prefix(
        cls, lengths: int | Sequence[int] | Tensor, cu_seqlens: Sequence[int] | Tensor | None = None
    ) -> Mask:
        """The mask of a prefix LM: causal, and tokens of the prefix see each other.

        Args:
            lengths: tokens of the prefix; with documents, one number for each document.
            cu_seqlens: as in `documents`; None: one document.

        Raises:
            ValueError: lengths that are negative or longer than their documents, or not one a document.
        """
        packed = cls() if cu_seqlens is None else cls.documents(cu_seqlens)
        ends = integers("cu_seqlens", [0, UNBOUNDED] if cu_seqlens is None else cu_seqlens)
        tokens, documents = torch.atleast_1d(integers("lengths", lengths)), ends.diff()
        if tokens.shape != documents.shape:
            shape = f"lengths of shape {tuple(tokens.shape)}"
            raise ValueError(f"a prefix for each of {len(documents)} documents is needed, got {shape}")
        for index in ((tokens < 0) | (tokens > documents)).nonzero().flatten().tolist()[:1]:
            limit, length = int(documents[index]), int(tokens[index])
            raise ValueError(f"a prefix has 0 tokens up to those of its document, {limit}, got {length}")
        prefixes = torch.stack([ends[:-1], ends[:-1] + tokens], 1)
        return packed & (cls.causal() | cls((images_of(prefixes, "prefix"),)))

    @classmethod
    def tree(cls, parents: Sequence[int] | Tensor, lengths: Sequence[int] | Tensor) -> Mask:
        """A tree of shared prefixes: a node of tokens sees all of its ancestors, and itself causally.

        The sequence is the concatenation of the nodes. In depth-first order each node is one band; other
        orders are legal, with more bands. `& Mask.window(...)` counts tokens along the sequence:
        `rollouts.tree_mask` has windows along the paths of a tree.

        Args:
            parents: the index of each node's parent, smaller than the node's; -1 for a root. Roots do not see
                each other.
            lengths: tokens of each node.

        Raises:
            ValueError: a parent that is not before its child, lengths below 0, lists of different lengths.
        """
        return cls((tree_of(parents, lengths),))

    def __or__(self, other: Mask) -> Mask:
        """The union: pairs of either mask.

        Raises:
            ValueError: a part is dilated.
        """
        if not isinstance(other, Mask):
            return NotImplemented
        parts = dict.fromkeys(part for mask in (self, other) for part in mask._parts if not part._is_empty)
        for part in parts:
            if part.stride > 1:
                raise ValueError(f"a dilated mask cannot be part of a union, got {self} | {other}")
        if len(parts) == 1 or not all(part.terms for part in parts):
            return min(parts, key=lambda part: len(part.terms))
        return Mask((Union(tuple(sorted(parts, key=str))),)) if parts else min(self, other, key=str)

    def __and__(self, other: Mask) -> Mask:
        """The intersection: pairs of both masks."""
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
        if any(isinstance(term, Tree) for term in terms):  # a tree is causal itself
            windows = [Window(window.left, None) for window in windows if window.left is not None]
        sides = [[getattr(w, side) for w in windows if getattr(w, side) is not None] for side in _SIDES]
        head: list[Term] = [Window(*(min(side, default=None) for side in sides))] if windows else []
        head += [Stride(math.lcm(*steps))] if steps else []
        return Mask((*head, *sorted(terms, key=str)))

    def __str__(self) -> str:
        return " & ".join(map(str, self.terms)) or "full"

    @property
    def _parts(self) -> tuple[Mask, ...]:
        return self.terms[0].parts if len(self.terms) == 1 and isinstance(self.terms[0], Union) else (self,)

    @property
    def _is_empty(self) -> bool:
        return any(isinstance(term, Ranges) and not len(term.ranges) for term in self.terms)

    def all_terms(self) -> Iterator[Term]:
        """Yield the terms of the mask, and of the parts of its unions."""
        for term in self.terms:
            yield term
            if isinstance(term, Union):
                for part in term.parts:
                    yield from part.all_terms()

    @property
    def has_window(self) -> bool:
        """Whether a term is a window with a left bound."""
        return any(isinstance(term, Window) and term.left is not None for term in self.terms)

    @cached_property
    def document_ends(self) -> Tensor | None:
        """cu_seqlens of its documents, int64, of several terms the longest; None without documents."""
        ends = [term.ends for term in self.terms if isinstance(term, Documents)]
        return max(ends, key=len, default=None)

    @property
    def of_layer(self) -> Mask:
        """The layer's part of the mask: without a batch's documents and tree branches."""
        stay = [(term,) if term.of_layer is None else term.of_layer for term in self.terms]
        return Mask() & Mask(tuple(chain(*stay)))

    @property
    def stride(self) -> int:
        """The number that divides the distance of every pair in `bands`; 1 without dilation."""
        return next((term.step for term in self.terms if isinstance(term, Stride)), 1)

    def check(self, n: int) -> None:
        """Check that the mask fits a sequence of n tokens.

        Raises:
            ValueError: documents or trees that do not end at n, block matrices of another size, ranges or
                images beyond n, an image in several documents.
        """
        terms = list(self.all_terms())
        for term in terms:
            term.check(n)
        for documents in (term for term in terms if isinstance(term, Documents)):
            for images in (term for term in terms if isinstance(term, Images)):
                images.check_within(documents.ends)

    def clipped(self, n: int) -> Mask:
        """Return the equal mask over n tokens, without window bounds longer than the sequence."""
        if not any(isinstance(t, Window) and t.clipped(n) != t for t in self.terms):
            return self
        shorter = (t.clipped(n) if isinstance(t, Window) else t for t in self.terms)
        return Mask(tuple(term for term in shorter if term is not None))

    def bands(self, n: int) -> Tensor:
        """Return the mask over n tokens as disjoint bands, int64 [bands, 6]: see `mask.bands`. Cached."""
        return _bands(self, n)

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        """Return bool [len(q), len(k)]: whether queries see keys, by global positions (the definition)."""
        allowed = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device)
        q, k = q.long(), k.long()  # bounds do not fit into int32
        for term in self.terms:
            allowed &= term.allows(q, k)
        return allowed


@dataclass(frozen=True)
class Union(Term):
    """The union of several masks."""

    parts: tuple[Mask, ...]

    def __str__(self) -> str:
        return f"({' | '.join(map(str, self.parts))})"

    def bands(self, n: int) -> Tensor:
        return reduce(united, (part.bands(n) for part in self.parts))

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        return torch.stack([part.allows(q, k) for part in self.parts]).any(0)


_SIDES = ("left", "right")
_READ: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""(version, mask) of live cu_seqlens tensors."""


@lru_cache(maxsize=64)
def _bands(mask: Mask, n: int) -> Tensor:
    for term in mask.terms:  # a plan may add documents that cut images of the mask
        term.check(n)
    return reduce(intersected, [term.bands(n) for term in mask.terms], everything(n))


def _as_long(term: Documents, others: Sequence[Term]) -> Documents | None:
    """Return the documents in `others` with the same end as `term`."""
    last = int(term.ends[-1])
    return next((x for x in others if isinstance(x, Documents) and int(x.ends[-1]) == last), None)
