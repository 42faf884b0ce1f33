"""TRL's fused LM head over shards: log-probabilities of every token of the whole sequence, on every rank.

TRL (1.x) replaces the forward of its models. With `fused_lm_head=True` that forward returns numbers for each
token (log-probability, entropy, ...) instead of logits, and takes labels of a shard as `shift_labels`:
https://github.com/huggingface/trl, trl/trainer/utils.py, add_fused_lm_head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from burst_mcore.agreement import Collective
from burst_mcore.layout import Layout
from burst_mcore.transformers.data.batches import dealt, digest_of_batch, prepared
from burst_mcore.transformers.errors import RefusedError
from burst_mcore.transformers.models.loss import WholeTokens


def has_fused_head(model: nn.Module) -> bool:
    """Return whether TRL has replaced the model's forward."""
    forward = vars(model).get("forward")
    code = getattr(getattr(forward, "__func__", forward), "__code__", None)
    return code is not None and code.co_qualname.startswith("add_fused_lm_head.")


def asks_for_fused_head(arguments: Mapping[str, Any]) -> bool:
    """Return whether a forward with these arguments returns numbers for each token, not logits."""
    return bool(arguments.get("fused_lm_head"))


def shard_of_whole_batch(
    arguments: Mapping[str, Any], dealing: Mapping[str, Any], group: dist.ProcessGroup
) -> dict[str, Any]:
    """Return a forward's arguments with this rank's shard of their whole batch. Collective.

    Args:
        arguments: input_ids, labels and attention_mask [rows, tokens], the same on all ranks of the group;
            what is no tensor stays.
        dealing: how batches are dealt: keyword arguments of `ShardedLoader`.

    Raises:
        RefusedError: on all ranks, where a rank's batch is not legal or differs.
    """
    batch = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    layout = Layout.of(dealing["layout"])
    padding = {name: value for name, value in dealing.items() if name != "layout"}
    problem: Exception | None = None
    whole, number = {}, -1
    try:
        on_host = {name: value.cpu() for name, value in batch.items()}
        whole = prepared(on_host, multiple=layout.divisor(size), **padding)
        number = digest_of_batch(whole)
    except Exception as error:  # of any kind: the others must not wait for this rank
        problem = error
    numbers = [each for (each,) in Collective(group).integers([number])]
    if problem is not None:
        raise problem
    if len(set(numbers)) > 1:
        raise RefusedError("batch", "the ranks of a sequence group were given different whole batches")
    device = arguments["input_ids"].device
    shard = dealt(whole, rank=rank, size=size, layout=layout)
    others = {name: value for name, value in arguments.items() if name not in batch}
    return {**others, **{name: value.to(device) for name, value in shard.items()}}


def gather_tokens(
    output: Any, *, local: int, end: int | None, group: dist.ProcessGroup, layout: Layout | str
) -> Any:
    """Return the output of TRL's head with numbers for each token of the whole sequence, not of a shard.

    Args:
        local: tokens of the shard; what has another shape than [rows, local] stays.
        end: tokens to keep; None keeps all.
    """
    for name, value in output.items():
        if isinstance(value, Tensor) and value.dim() == 2 and value.shape[1] == local:
            whole = WholeTokens.apply(value, group, layout)  # type: ignore[no-untyped-call]
            output[name] = whole[:, :end]
    return output
