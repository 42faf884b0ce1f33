"""Methods of transformers' Trainer that are the same whatever trains beside it: DeepSpeed or FSDP2.

Each takes a method of the Trainer and returns the one that stands in its place. Without ranks that share
sequences, which the Trainer's `get_tp_size` counts, the method itself is called.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from burst_mcore.agreement import Collective
from burst_mcore.loss import unpatched
from burst_mcore.transformers.prepare import SEQUENCE, sequence_of
from burst_mcore.wrap import around, while_set

AnyMethod = Callable[..., Any]


@around
def with_logits(
    own: AnyMethod, self: Any, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
) -> Any:
    """Trainer.prediction_step: logits, which are of whole sequences, are made where they are asked for.

    The loss is that of one process: the labels of this rank's sequences count, also right after training.
    """
    if not _shares(self):
        return own(self, model, inputs, prediction_loss_only, ignore_keys)
    makes_logits = nullcontext() if prediction_loss_only else unpatched(self.model)
    loss_only = prediction_loss_only and type(self).compute_loss.__module__ == "transformers.trainer"
    alone = while_set(self.args, average_tokens_across_devices=False)
    with alone, makes_logits, while_set(sequence_of(self.model), loss_only=loss_only):
        return own(self, model, inputs, prediction_loss_only, ignore_keys)


@around
def inputs_of_whole_sequences(track: AnyMethod, self: Any, inputs: Any) -> None:
    """Trainer._track_num_input_tokens: of ranks that share sequences, the first counts the whole ones.

    A batch that was dealt has as `whole` what its loader gave, before the padding for the layout.
    """
    whole = getattr(inputs, "whole", inputs)
    if _shares(self) and dist.get_rank() % self.get_tp_size():
        whole = {name: x[:0] for name, x in whole.items() if isinstance(x, Tensor) and x.dim()}
    track(self, whole)


def rows_of_ranks(x: Tensor) -> list[Tensor]:
    """Return the rows that every rank has of a tensor, by rank, also where the numbers of rows differ."""
    x = x.clone()[None] if x.dim() == 0 else x.contiguous()
    rows = [count for (count,) in Collective(dist.group.WORLD).integers([len(x)])]  # type: ignore[arg-type]
    parts = [x.new_empty((max(rows), *x.shape[1:])) for _ in rows]
    dist.all_gather(parts, torch.cat([x, x.new_zeros((max(rows) - len(x), *x.shape[1:]))]))
    return [part[:count] for part, count in zip(parts, rows, strict=True)]


def _shares(trainer: Any) -> bool:
    """Return whether ranks share the sequences of a Trainer's model, compiled or not."""
    model = getattr(trainer.model, "_orig_mod", trainer.model)
    return SEQUENCE in vars(model) and sequence_of(model).group is not None
