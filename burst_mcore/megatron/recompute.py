"""Recompute policies under Megatron's activation checkpointing.

Megatron checkpoints layers (full recompute, uniform or block) and core attention (selective) through one
function, `tensor_parallel.checkpoint`, or with FP8 weights TransformerEngine's. `use_recompute` wraps the
checkpointed functions; Megatron chooses what to checkpoint. A patched Megatron (see the folder patches/) has
a hook there.

This can go when Megatron has one setting for a recompute policy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from burst_mcore.checkpointing import Full, Policy, recorded
from burst_mcore.wrap import around, wrap_everywhere

_in_effect: Policy = Full()


def use_recompute(policy: Policy) -> None:
    """Set the recompute policy of attention in Megatron's checkpointed layers, for this process.

    Call it on every rank; the launcher does it for `--burst-recompute`. `Full()` is Megatron's own behaviour.

    Raises:
        ValueError: policy is not a Policy.
    """
    global _in_effect
    if not isinstance(policy, Policy):
        raise ValueError(f"policy must be one of burst_mcore.checkpointing, got {policy!r}")
    from megatron.core.extensions import transformer_engine
    from megatron.core.tensor_parallel import random

    if hasattr(random, "around_checkpointed"):  # in a patched Megatron
        random.around_checkpointed = lambda function: recorded(function, _in_effect)
    else:
        wrap_everywhere(random, "checkpoint", _keeping)
        wrap_everywhere(transformer_engine, "te_checkpoint", _keeping)
    _in_effect = policy


@around
def _keeping(checkpoint: Callable, function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Wrap Megatron's checkpoint: attention in the checkpointed function is recorded."""
    return checkpoint(recorded(function, _in_effect), *args, **kwargs)
