"""Models with towers: a batch is whole on every rank until it enters the text tower, and sharded there.

The model's own code runs its towers, and puts features where the tokens of images stand. A hook of the text
tower takes this rank's part of what comes: embeddings, positions, features of later layers.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from burst_mcore.layout import shard
from burst_mcore.recurrent.bound import awaits_mask
from burst_mcore.transformers.data.batches import is_per_token
from burst_mcore.transformers.errors import UnsupportedError
from burst_mcore.transformers.models.attention import Sequence, current

DEEP = {"visual_pos_masks": "deepstack_visual_embeds", "vision_mask": "deepstack_features"}
"""Arguments of text towers: where tokens of images are, and features that later layers add there."""
NOT_OF_TOKENS = ("labels", "shift_labels", "num_items_in_batch", "logits_to_keep", *DEEP.values())
"""Arguments that a text tower does not read by tokens, or that are sharded apart."""


def attach_text(text: nn.Module) -> None:
    """Add the hook that shards what enters a text tower, once."""
    if not getattr(text, "_burst_mcore_text", False):
        text._burst_mcore_text = True  # type: ignore[assignment]
        text.register_forward_pre_hook(_entering, with_kwargs=True)


def _entering(text: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    sequence = current()
    if sequence is None or sequence.entering is None:
        return None
    arguments = dict(zip(inspect.signature(text.forward).parameters, args, strict=False)) | kwargs
    mask = arguments.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2:  # of padding, which positions tell
        arguments["attention_mask"] = None
    if awaits_mask(text):
        arguments["attention_mask"] = sequence.mixing
    if arguments.get("position_ids") is None:
        arguments["position_ids"] = sequence.entering
    return (), _sharded(type(text).__name__, sequence, arguments)


def _sharded(name: str, sequence: Sequence, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return this rank's part of the arguments of a text tower."""
    topology, layout = sequence.topology, sequence.config.layout

    def part(x: Tensor, dim: int = 1) -> Tensor:
        return shard(x, dim, rank=topology.rank, size=topology.size, layout=layout)

    parts = dict(arguments)
    for masks, features in DEEP.items():
        if arguments.get(features) is not None:
            parts[features] = _deep(arguments[masks], arguments[features], part)
    for key, x in arguments.items():
        if key == "position_ids":
            parts[key] = part(x, x.dim() - 1)
        elif is_per_token(x, sequence.tokens):
            parts[key] = part(x)
        elif isinstance(x, Tensor | list | tuple) and key not in NOT_OF_TOKENS and _has_numbers(x):
            shape = f"{[*x.shape]}" if isinstance(x, Tensor) else f"of {len(x)} tensors"
            text = f"{key} {shape} enters {name} whole, and nobody shards it"
            raise UnsupportedError("batch", f"{text}: leave out of the batch what the model need not have")
    return parts


def _has_numbers(x: Any) -> bool:
    return x.dim() > 0 if isinstance(x, Tensor) else any(isinstance(each, Tensor) for each in x)


def _deep(seen: Tensor, features: Any, part: Any) -> Any:
    """Return the features of this rank's tokens of images, by layer.

    Args:
        seen: bool [rows, tokens] or [rows, tokens, ...]: which tokens are of images.
        features: by layer, [tokens of images, hidden], in the order of rows and tokens.
    """
    seen = seen if seen.dim() == 2 else seen[..., 0]
    row_of_token = (seen.flatten().cumsum(0) - 1).view_as(seen)
    rows = part(row_of_token)[part(seen)]
    if isinstance(features, dict):
        return {layer: x[rows.to(x.device)] for layer, x in features.items()}
    return [x[rows.to(x.device)] for x in features]


def whole_arguments(
    columns: dict[str, Any], others: dict[str, Any], batch: dict[str, Any], device: torch.device
) -> dict[str, Any]:
    """Return what a model's own code gets of a whole batch: columns as long as the padded sequence.

    Args:
        columns, others: of `apart`.
        batch: of `prepared`.
    """
    positions, mask = columns.get("position_ids"), columns.get("attention_mask")
    n = batch["position_ids"].shape[1]
    if "position_ids" in others:  # of several dims, as the model makes them
        positions = others["position_ids"]
        positions = pad(positions, (0, n - positions.shape[-1]))
    elif positions is not None:
        positions = batch["position_ids"]
    if isinstance(mask, Tensor):
        mask = pad(mask, (0, n - mask.shape[1]))
    by_token = {
        name: x
        for name, x in batch.items()
        if is_per_token(x, n) and name not in ("position_ids", "shift_labels", "attention_mask")
    }
    by_token |= {"position_ids": positions, "attention_mask": mask}
    return {**others, **{name: None if x is None else x.to(device) for name, x in by_token.items()}}
