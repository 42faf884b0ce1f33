"""fold: rollouts that share prefixes -> one packed row; unfold: statistics of its tokens -> rollouts.

Rollouts share a token as long as they share its label, too, the next token. So every token of the row has one
label, and any loss of labels can be used. The last shared token is copied into each branch: so a row has less
than one token more for each rollout than a tree of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from burst_mcore.mask import Mask
from burst_mcore.mask.terms import integers, tensor_of
from burst_mcore.rollouts.columns import IGNORED, TREE, WEIGHTS
from burst_mcore.words import brief

Numbers = Sequence[float] | Tensor


@dataclass(frozen=True, eq=False)
class Folded:
    """Rollouts as one packed row."""

    batch: dict[str, Tensor]
    """input_ids, position_ids, shift_labels and label_weights [1, tokens], tree, num_items_in_batch."""
    places: Tensor
    """The place in the row of each token of each rollout, [rollouts, longest]; -1 after a rollout's end."""
    labelled: Tensor
    """Whether the next token of the rollout is a label, bool [rollouts, longest]."""

    @property
    def tokens(self) -> int:
        """Tokens of the row."""
        return self.batch["input_ids"].shape[1]

    def unfold(self, x: Tensor, *, labels_only: bool = True) -> Tensor:
        """Return [rollouts, longest, ...] of [1, tokens, ...] of the row, padded or not. Differentiable.

        labels_only: entry t of a rollout is of its token t + 1, such as a log-probability, and 0 if that is
        not a label of the rollout. Else entry t is of token t, and 0 after the rollout.
        Raises ValueError for several rows, and for a rank's part of the row.
        """
        if x.dim() < 2 or len(x) != 1 or x.shape[1] < self.tokens:
            raise ValueError(f"numbers of the row are [1, {self.tokens} or more, ...], got {[*x.shape]}")
        valid = (self.labelled if labels_only else self.places >= 0).to(x.device)
        of_places = x[0, self.places.clamp(min=0).to(x.device)]
        return torch.where(valid.view(*valid.shape, *[1] * (of_places.dim() - 2)), of_places, 0)


def fold(
    rollouts: Sequence[Numbers],
    labelled: Sequence[Numbers] | None = None,
    weights: Sequence[float | Numbers] | None = None,
    *,
    parents: Sequence[int] | None = None,
) -> Folded:
    """Fold rollouts, of one group or several, into one packed row with each shared prefix once.

    The row's loss, sum(label_weights * loss) / num_items_in_batch, is the mean over the labels of all
    rollouts, each times its weight.

    Args:
        rollouts: token ids of each rollout, with the prompt. Shared prefixes are found by comparison.
        labelled: a number for each token of each rollout: 0 if it is not a label, as in a prompt. A first
            token is never a label. By default all others are.
        weights: a number for each rollout, or for each token: factors of the losses of labels.
        parents: if given, `rollouts` are the nodes of a tree with these parents, -1 for a root. Rollouts are
            then the paths to the leaves, in the order of leaves, and share tokens as in the tree; labelled
            and weights are of nodes.

    Raises:
        ValueError: no rollouts, or no tokens; numbers that do not fit; a child before its parent.
    """
    rows = [integers(f"token ids of rollout {i}", rollout) for i, rollout in enumerate(rollouts)]
    if illegal := [i for i, row in enumerate(rows) if row.dim() != 1]:
        raise ValueError(f"token ids of rollouts {illegal} must be in one dim")
    label_flags = [numbers.bool() for numbers in _numbers("labelled", rows, labelled)]
    factors = _numbers("weights", rows, weights)
    keys = rows
    if parents is not None:
        keys = list(torch.arange(sum(map(len, rows))).split([*map(len, rows)]))
        keys, rows, label_flags, factors = _along_paths(parents, keys, rows, label_flags, factors)
    if not rows or not all(map(len, rows)):
        indices = [i for i, row in enumerate(rows) if not len(row)]
        raise ValueError(f"rollouts {indices} have no tokens" if rows else "there are no rollouts to fold")
    places, tree = _packed(keys)
    ids, positions, labels = (torch.full((int(tree.view(2, -1)[1].sum()),), x) for x in (0, 0, IGNORED))
    factor_of = torch.zeros(len(ids))
    where = torch.full((len(rows), max(map(len, rows))), -1)
    of_rollouts = torch.zeros_like(where, dtype=torch.bool)
    for i, (row, count, factor, place) in enumerate(zip(rows, label_flags, factors, places, strict=True)):
        ids[place], positions[place] = row, torch.arange(len(row))
        before = place[:-1][count[1:]]  # the tokens before labels
        labels[before] = row[1:][count[1:]]
        factor_of[before] += factor[1:][count[1:]]
        where[i, : len(row)], of_rollouts[i, : len(row) - 1] = place, count[1:]
    batch = {"input_ids": ids, "position_ids": positions, "shift_labels": labels, WEIGHTS: factor_of}
    of_row = {TREE: tree, "num_items_in_batch": of_rollouts.sum().clamp(min=1)}
    return Folded({name: x[None] for name, x in batch.items()} | of_row, where, of_rollouts)


def _packed(keys: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Return the places of each rollout's tokens in the row, and the tree.

    In lexicographic order a rollout has the longest common prefix with its predecessor. Its other tokens
    go to the end of the row, as a child of its last shared token: the row is the tree, depth first.
    """
    order = sorted(range(len(keys)), key=[key.tolist() for key in keys].__getitem__)
    places: list[Tensor] = [torch.empty(0, dtype=torch.int64)] * len(keys)
    hangs_on, n, last = {}, 0, order[0]
    for i in order:
        prefix = _shared(keys[last], keys[i]) if i != last else 0
        tokens = torch.arange(n, n + len(keys[i]) - prefix)
        places[i] = torch.cat([places[last][:prefix], tokens])
        if len(tokens):
            hangs_on[n] = int(places[i][prefix - 1]) if prefix else -1
        n, last = n + len(tokens), i
    begins = sorted({*hangs_on, *(above + 1 for above in hangs_on.values() if above >= 0)})
    above = torch.tensor([hangs_on.get(place, place - 1) for place in begins])
    parents = torch.searchsorted(torch.tensor(begins), above, right=True) - 1
    return places, torch.cat([parents, torch.tensor([*begins, n]).diff()])


def _shared(a: Tensor, b: Tensor) -> int:
    """Return the number of tokens that two rollouts share with their labels. A last token has no label."""
    length = min(len(a), len(b))
    differences = (a[:length] != b[:length]).nonzero()
    return max(0, int(differences[0]) - 1) if len(differences) else length


def _along_paths(parents: Sequence[int], *of_nodes: list[Tensor]) -> list[list[Tensor]]:
    """Return the concatenated values of nodes on the path from a root to each leaf."""
    Mask.tree(parents, [len(node) for node in of_nodes[0]])  # raises for illegal trees
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else ()), node])
    inner = {int(parent) for parent in parents}
    leaves = [path for path in paths if path[-1] not in inner]
    return [[torch.cat([values[node] for node in path]) for path in leaves] for values in of_nodes]


def _numbers(name: str, rows: list[Tensor], every: Sequence[Any] | Tensor | None) -> list[Tensor]:
    """Return the numbers of each rollout's tokens, float32; default 1."""
    try:
        entries = [1.0] * len(rows) if every is None else [*every]
    except TypeError:
        raise ValueError(f"{name} must be a list, with an entry for each rollout, got {every}") from None
    if len(entries) != len(rows):
        raise ValueError(f"{name} must have an entry for each of {len(rows)} rollouts, got {len(entries)}")
    numbers = []
    for i, (row, entry) in enumerate(zip(rows, entries, strict=True)):
        values = tensor_of(f"{name} of rollout {i} must be numbers", entry, dtype=torch.float32)
        if values.shape not in ((), row.shape) or not bool(values.isfinite().all()):
            value = brief(values.tolist())
            raise ValueError(f"{name} of rollout {i} are 1 or {len(row)} finite numbers, got {value}")
        numbers.append(values.expand(row.shape))
    return numbers
