"""Checks the lists and tensors that describe masks (cu_seqlens, ranges), and returns tables of integers."""

from __future__ import annotations

import numbers
import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from burst_mcore.digest import digest
from burst_mcore.mask.bands import UNBOUNDED
from burst_mcore.mask.terms import Documents, Images, Tree


def documents_of(cu_seqlens: Sequence[int] | Tensor) -> Documents:
    """Return the term of cu_seqlens, without empty documents. Raises ValueError if they are not legal."""
    ends = integers("cu_seqlens", cu_seqlens)
    if ends.dim() != 1 or len(ends) < 2 or int(ends[0]) != 0:
        raise ValueError(
            f"cu_seqlens must be a list of integers that begins with 0 and ends with the sequence's length, "
            f"got {short(ends)}"
        )
    down = (ends.diff() < 0).nonzero().flatten().tolist()
    if down:
        place = down[0]
        raise ValueError(
            f"cu_seqlens must not descend, got {int(ends[place])}, {int(ends[place + 1])} at places {place}, "
            f"{place + 1}"
        )
    ends = ends.unique_consecutive()  # empty documents
    if len(ends) < 2:
        raise ValueError(f"cu_seqlens must hold at least one token, got {short(ends)}")
    return Documents(digest(ends), ends)


def images_of(blocks: Sequence[Sequence[int]] | Tensor, kind: str = "image block") -> Images:
    """Return the term of blocks [start, stop), in any order. Raises ValueError for bad ones."""
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
            f"parents and lengths must be lists with a number for each node, got {short(above)} and "
            f"{short(tokens)}"
        )
    for at in ((above < -1) | (above >= torch.arange(len(above)))).nonzero().flatten().tolist()[:1]:
        raise ValueError(
            f"the parent of node {at} must be a node before it, or -1 for a root, got {int(above[at])}: "
            f"parents come before their children"
        )
    for at in (tokens < 0).nonzero().flatten().tolist()[:1]:
        raise ValueError(f"lengths must be numbers of tokens >= 0, got {int(tokens[at])} for node {at}")
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), tokens.cumsum(0)])
    return Tree(digest(torch.stack([above, tokens])), above, ends)


def pairs_of(name: str, ranges: Sequence[Sequence[int]] | Tensor) -> list[list[int]]:
    """Return ranges (start, stop) as a list. Raises ValueError, with the argument's name, for all else."""
    table = integers(name, ranges)
    table = table.reshape(0, 2) if table.shape == (0,) else table
    if table.dim() != 2 or table.shape[1] != 2:
        raise ValueError(f"{name} must be a list of (start, stop), got {short(table)}")
    for start, stop in table.tolist():
        if not 0 <= start <= stop:
            raise ValueError(f"{name} must hold ranges 0 <= start <= stop, got ({start}, {stop})")
    pairs: list[list[int]] = table.tolist()
    return pairs


def integers(name: str, values: object) -> Tensor:
    """Return an int64 copy on the CPU. Raises ValueError, which names the argument, for other numbers."""
    table = tensor_of(f"{name} must be integers", values)
    if table.numel() and table.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        raise ValueError(f"{name} must be integers, got {table.dtype}")
    return table.to(torch.int64).clone()


def tensor_of(legal: str, values: object, **options: Any) -> Tensor:
    """Return a tensor on the CPU. Raises ValueError, which says what is legal, for what is no rectangle."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.as_tensor(values, **options).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{legal} ({error})") from None


def short(x: Tensor) -> str:
    """Return the first entries of a tensor, for an error message."""
    words = str(x.tolist())
    return words if len(words) < 80 else f"{words[:76]} ..."


def is_int(value: object) -> bool:
    """Return whether a value is a whole number, of Python or numpy, and no bool."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
