"""The tree of a row: nodes of tokens, their depths, and the mask of a layer.

A tree is a tensor of one dim, never sharded as tokens: parents of all nodes (-1: a root), then lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, tensor

from burst_mcore.mask import Mask
from burst_mcore.mask.bands import tightened
from burst_mcore.mask.terms import Ranges, Term, Window, integers
from burst_mcore.words import digest


@dataclass(frozen=True)
class _InWindow(Ranges):
    of_layer: tuple[Term, ...] | None

    def bands(self, n: int) -> Tensor:
        return self.slices  # no pair is in two of them


def tree_mask(tree: Sequence[int] | Tensor, window: Mask | None = None) -> Mask:
    """Return the mask of a layer over a row with a tree.

    Args:
        tree: parents and lengths of the nodes.
        window: the layer's window, if any. It counts tokens along a rollout; `Mask.tree(...) & window`
            counts along the row.

    Raises:
        ValueError: an illegal tree (see `Mask.tree`), or a mask that is not a window.
    """
    mask = Mask.tree(*nodes_of(tree))
    terms = () if window is None else getattr(window, "terms", (window,))
    lefts = [term.left for term in terms if isinstance(term, Window)]
    if len(lefts) < len(terms):
        raise ValueError(f"beside a tree a layer's mask is Mask.causal() or Mask.window(), got {window}")
    return mask if not lefts or lefts[0] is None else _in_window(mask, lefts[0])


def depths(tree: Sequence[int] | Tensor) -> Tensor:
    """Return the place of each token of the row in its rollout, [tokens]: its rotary position. Cached."""
    return _depths(Mask.tree(*nodes_of(tree)))


def padded(tree: Tensor, more: int) -> Tensor:
    """Return the tree with `more` tokens of padding at the end, a root of their own."""
    parents, lengths = nodes_of(tree)
    return torch.cat([parents, tensor([-1]), lengths, tensor([more])]) if more else tree


def nodes_of(tree: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
    """Return (parents, lengths) of the nodes. Raises ValueError for another shape, or no integers."""
    table = integers("a tree", tree)
    if table.dim() != 1 or len(table) % 2:
        raise ValueError(f"a tree has one dim, parents and then lengths, got {tuple(table.shape)}")
    return tuple(table.view(2, -1))


# Cached: layers, forwards, recomputes and the loader's plan of a batch have equal trees.
@lru_cache(maxsize=8)
def _depths(mask: Mask) -> Tensor:
    _, lengths, begins, first = _nodes(mask)
    before = tensor(first) - tensor(begins[:-1])
    return torch.arange(begins[-1]) + before.repeat_interleave(tensor(lengths))


def _nodes(mask: Mask) -> tuple[list[int], ...]:
    """Return the parent, the length, the first place in the row, and the first depth of each node."""
    tree: Any = mask.terms[0]
    parents, lengths, first = tree.parents.tolist(), tree.ends.diff().tolist(), list[int]()
    for parent in parents:
        first.append(0 if parent < 0 else first[parent] + lengths[parent])
    return parents, lengths, tree.ends.tolist(), first


@lru_cache(maxsize=16)
def _in_window(mask: Mask, left: int) -> Mask:
    """Return a tree within a window: a band for each node and interval of its ancestors in reach.

    A query at place i of the row sees a key of an ancestor at place j iff depth(i) - depth(j) <= left. With
    offset = place - depth, the same for all tokens of a node, that is j - i >= offset(j) - offset(i) - left.
    """
    if bool((_depths(mask) <= left).all()):
        return mask
    rows: list[list[int]] = []
    parents, lengths, begins, first = _nodes(mask)
    for node in range(len(parents)):
        runs: list[list[int]] = []
        above, offset = node, begins[node] - first[node]
        while above >= 0 and first[above] + lengths[above] > first[node] - left:
            if runs and runs[-1][2] == begins[above + 1]:  # parent and child are adjacent in the row
                runs[-1][2] = begins[above]
            else:
                low = begins[above] - first[above] - offset - left
                runs.append([*begins[node : node + 2], *begins[above : above + 2], low, 0])
            above = parents[above]
        rows += runs
    slices = tensor(rows)
    return Mask((_InWindow(digest(slices), tightened(slices), slices[:, :4], (Window(left, 0),)),))
