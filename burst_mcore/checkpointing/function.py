"""checkpoint, torch.utils.checkpoint.checkpoint with a policy; recorded, for other implementations."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch.utils.checkpoint

from burst_mcore.attention.replay import RecomputeError
from burst_mcore.checkpointing.policy import Full
from burst_mcore.checkpointing.scope import Policy, Record, in_backward, is_recorded
from burst_mcore.words import brief

T = TypeVar("T")


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    policy: Policy | None = None,
    use_reentrant: bool = False,
    **kwargs: Any,
) -> Any:
    """Return `function(*args)`, recomputed in backward, except attention results that `policy` saves.

    Args:
        function: one or several layers, which make the same calls of `burst_attention` each time.
        policy: default `Full()`.
        use_reentrant: as in torch, which recommends False.
        kwargs: the other options of `torch.utils.checkpoint.checkpoint` (preserve_rng_state, context_fn,
            determinism_check, debug, early_stop), and, unless reentrant, keyword arguments of the function.

    Raises:
        ValueError: policy is not a Policy.
        RecomputeError: in backward, if the recomputation does not repeat the forward.
    """
    run = recorded(function, Full() if policy is None else policy)
    return torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=use_reentrant, **kwargs)


def recorded(function: Callable[..., T], policy: Policy) -> Callable[..., T]:
    """Wrap `function` for ONE call of any implementation of checkpointing: Megatron's, DeepSpeed's, ...

    Its first call is the forward, which records; later calls, in backward, are recomputations::

        y = deepspeed.checkpointing.checkpoint(recorded(layer, policy), x)

    Raises:
        ValueError: policy is not a Policy.
        RecomputeError: a second call outside of a backward; or as `checkpoint`.
    """
    if not isinstance(policy, Policy):
        legal = "Full(), KeepAttention(), Segment(keep=...) or Offload(...)"
        raise ValueError(f"policy must be {legal}, got {brief(policy)}")
    if not is_recorded(policy):
        return function
    record, has_run = Record(policy, _name(function)), False

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> T:
        nonlocal has_run
        if not has_run:
            has_run = True
            with record.forward():
                return function(*args, **kwargs)
        if not in_backward():
            twice = f"{record.name} was recorded for one forward, and is called a second time"
            raise RecomputeError(f"{twice}: call recorded once for each call of the checkpoint function")
        with record.recomputation():
            return function(*args, **kwargs)

    return run


def _name(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    owner = getattr(function, "__self__", function)
    for number in ("layer_number", "layer_idx"):
        if hasattr(owner, number):
            return f"{type(owner).__name__} {getattr(owner, number)}"
    name: str = getattr(function, "__qualname__", type(owner).__name__)
    return name.replace(".<locals>", "")
