"""Models with towers: a batch is whole on every rank until it enters the text tower, and sharded there.

The model's own code runs its towers, and puts features where the tokens of images stand. A hook of the text
tower takes this rank's part of what comes: embeddings, positions, features of later layers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils._pytree import tree_leaves, tree_map

from burst_mcore.layout import shard
from burst_mcore.recurrent.bound import awaits_mask
from burst_mcore.transformers.data.batches import is_per_token
from burst_mcore.transformers.errors import UnsupportedError
from burst_mcore.transformers.models.attention import Sequence, current

DEEP = {"deepstack_visual_embeds": "visual_pos_masks", "deepstack_features": "vision_mask"}
"""Arguments of text towers: features that later layers add, and where: which tokens are of images."""
NOT_OF_TOKENS = ("labels", "shift_labels", "num_items_in_batch", "logits_to_keep")
"""Arguments that a text tower does not read by tokens."""


def shard_entering(text: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Give a text tower this rank's part of what enters it: a forward pre-hook."""
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
    part = partial(shard, rank=topology.rank, size=topology.size, layout=layout)
    parts = dict(arguments)
    for key, x in arguments.items():
        tensors = [each for each in tree_leaves(x) if isinstance(each, Tensor) and each.dim()]
        if key in DEEP and x is not None:
            parts[key] = _deep(arguments[DEEP[key]], x, part)
        elif key == "position_ids":
            parts[key] = part(x, x.dim() - 1)
        elif is_per_token(x, sequence.tokens):
            parts[key] = part(x, 1)
        elif tensors and key not in NOT_OF_TOKENS:
            text = f"{key} {[*tensors[0].shape]} enters {name} whole, and nobody shards it"
            raise UnsupportedError("batch", f"{text}: leave out of the batch what the model need not have")
    return parts


def _deep(seen: Tensor, features: Any, part: Callable[[Tensor, int], Tensor]) -> Any:
    """Return the features of this rank's tokens of images, by layer.

    Args:
        seen: bool [rows, tokens] or [rows, tokens, ...]: which tokens are of images.
        features: by layer, [tokens of images, hidden], in the order of rows and tokens.
    """
    seen = seen if seen.dim() == 2 else seen[..., 0]
    row_of_token = (seen.flatten().cumsum(0) - 1).view_as(seen)
    rows = part(row_of_token, 1)[part(seen, 1)]
    return tree_map(lambda x: x[rows.to(x.device)], features)


def whole_arguments(
    arguments: dict[str, Any], columns: dict[str, Any], batch: dict[str, Any], device: torch.device
) -> dict[str, Any]:
    """Return what a model's own code gets of a whole batch: columns as long as the padded sequence.

    Args:
        columns: of `of_tokens`, of the arguments.
        batch: of `prepared`, of the columns.
    """
    n, positions = batch["position_ids"].shape[1], arguments.get("position_ids")
    whole = {name: x for name, x in batch.items() if is_per_token(x, n) and name != "shift_labels"}
    whole["attention_mask"] = arguments.get("attention_mask")
    if columns.get("position_ids") is not positions or positions is None:  # the model's, of several dims
        whole["position_ids"] = positions
    for name in ("attention_mask", "position_ids"):
        x = whole[name]
        whole[name] = None if x is None else pad(x, (0, n - x.shape[-1]))
    of_towers = {name: x for name, x in arguments.items() if name not in columns}
    return of_towers | {name: None if x is None else x.to(device) for name, x in whole.items()}
