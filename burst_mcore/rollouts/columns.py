"""Tree and weights as columns of a batch, for the forward of a prepared model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from burst_mcore.mask import Mask
from burst_mcore.recurrent.bound import mixers_of
from burst_mcore.rollouts.trees import depths, nodes_of
from burst_mcore.words import digest

TREE, WEIGHTS, IGNORED = "tree", "label_weights", -100


@dataclass(frozen=True)
class Columns:
    """The columns in a forward's arguments."""

    tree: Tensor | None = None
    weights: Tensor | None = None
    """Factors of the losses of this rank's labels."""

    @classmethod
    def taken(cls, arguments: dict[str, Any]) -> Columns:
        """Return the columns, removed from the arguments, since models do not accept them."""
        return cls(arguments.pop(TREE, None), arguments.pop(WEIGHTS, None))

    @property
    def number(self) -> int:
        """A digest >= 0 by which ranks compare their trees; 0 without a tree."""
        return 0 if self.tree is None else int(digest(torch.stack(nodes_of(self.tree)))[1:], 16)

    def loss(self, logits: Any, *_: Any, **options: Any) -> Tensor:
        """Return the weighted losses of labels over num_items_in_batch; arguments as in transformers."""
        assert self.weights is not None
        flat, labels = logits.float().view(-1, logits.shape[-1]), options["shift_labels"].reshape(-1)
        losses = cross_entropy(flat, labels, ignore_index=IGNORED, reduction="none")
        return (losses * self.weights.reshape(-1)).sum().div(options["num_items_in_batch"])

    def why_unsupported(self, model: nn.Module, obstacles: Mapping[str, object]) -> str | None:
        """Return why a forward does not support a tree. obstacles: by name, whether it is there."""
        if self.tree is None:
            return None
        try:
            Mask.tree(*nodes_of(self.tree))
        except ValueError as error:
            return str(error)
        names = [type(mixer).__name__ for mixer in mixers_of(model).values()]
        chunks = any(getattr(getattr(m, "config", 0), "attention_chunk_size", 0) for m in model.modules())
        names += [
            name for name, is_there in (("attention in chunks", chunks), *obstacles.items()) if is_there
        ]
        return f"{names[0]} does not know its branches: use rows apart" if names else None

    def why_not_its_depths(self, positions: Tensor) -> str | None:
        """Return why positions of a whole row, [1, tokens], differ from the tree's depths; None if equal."""
        if self.tree is None or torch.equal(positions, (places := depths(self.tree))[None]):
            return None
        return (
            f"position_ids of the whole row, {list(positions.shape)}, are not the depths of its tree of "
            f"{len(places)} tokens: shard the batch of fold by a loader or by cp.shard"
        )
