"""The tree of a row: nodes of tokens, their depths, and the mask of a layer.

A tree is a tensor of one dim, which nothing deals as tokens: parents of all nodes (-1: a root), then lengths.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, tensor

from burst_mcore.digest import digest
from burst_mcore.mask import Mask
from burst_mcore.mask.bands import tightened
from burst_mcore.mask.terms import Ranges, Term, Window


@dataclass(frozen=True)
class _InWindow(Ranges):
    of_layer: tuple[Term, ...] | None

    def bands(self, n: int) -> Tensor:
        return self.slices  # no pair is in two of them


def tree_mask(tree: Tensor, window: Mask | None = None) -> Mask:
    """Return the mask of a layer over a row with a tree.

    Args:
        tree: parents and lengths of the nodes.
        window: the layer's, if it has one. It counts tokens along a rollout, not along the row.

    Raises:
        ValueError: a tree that is not legal (see `Mask.tree`); another mask than a window.
    """
    mask = Mask.tree(*nodes_of(tree))
    terms = () if window is None else window.terms
    lefts = [term.left for term in terms if isinstance(term, Window)]
    if len(lefts) < len(terms):
        raise ValueError(f"beside a tree the mask of a layer is causal or a window, got {window}")
    if not lefts or lefts[0] is None or lefts[0] > int(depths(tree).max()):
        return mask
    slices = torch.tensor(_slices(tree, lefts[0]))
    return Mask((_InWindow(digest(slices), tightened(slices), slices[:, :4], (Window(lefts[0], 0),)),))


def depths(tree: Tensor) -> Tensor:
    """Return the place of each token of the row in its rollout, [tokens]: its rotary position."""
    _, lengths, begins, first = _nodes(tree)
    before = torch.tensor(first) - torch.tensor(begins[:-1])
    return torch.arange(begins[-1]) + before.repeat_interleave(torch.tensor(lengths))


def padded(tree: Tensor, more: int) -> Tensor:
    """Return the tree with `more` tokens of padding behind it, which see themselves alone."""
    parents, lengths = nodes_of(tree)
    return torch.cat([parents, tensor([-1]), lengths, tensor([more])]) if more else tree


def nodes_of(tree: Tensor) -> tuple[Tensor, Tensor]:
    """Return (parents, lengths) of the nodes. Raises ValueError for another shape."""
    if tree.dim() != 1 or len(tree) % 2:
        raise ValueError(f"a tree has one dim, parents and then lengths, got {tuple(tree.shape)}")
    return tuple(tree.cpu().view(2, -1))


def _nodes(tree: Tensor) -> tuple[list[int], ...]:
    """Return, of each node, its parent, its length, its first place in the row, and its first depth."""
    parents, lengths = (x.tolist() for x in nodes_of(tree))
    begins, first = [0], list[int]()
    for parent, length in zip(parents, lengths, strict=True):
        first.append(0 if parent < 0 else first[parent] + lengths[parent])
        begins.append(begins[-1] + length)
    return parents, lengths, begins, first


def _slices(tree: Tensor, left: int) -> list[list[int]]:
    """Return bands [q0, q1, k0, k1, low, high]: of each node and each run of its ancestors in reach.

    A query at place i of the row sees a key of an ancestor at place j iff depth(i) - depth(j) <= left. With
    offset = place - depth, the same for all tokens of a node, that is j - i >= offset(j) - offset(i) - left.
    """
    rows: list[list[int]] = []
    parents, lengths, begins, first = _nodes(tree)
    for node in range(len(parents)):
        runs: list[list[int]] = []
        above, own = node, begins[node] - first[node]
        while above >= 0 and first[above] + lengths[above] > first[node] - left:
            if runs and runs[-1][2] == begins[above + 1]:  # the child stands directly behind its parent
                runs[-1][2] = begins[above]
            else:
                low = begins[above] - first[above] - own - left
                runs.append([*begins[node : node + 2], *begins[above : above + 2], low, 0])
            above = parents[above]
        rows += runs
    return rows
