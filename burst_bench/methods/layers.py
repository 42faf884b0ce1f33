"""Checkpointing of a model's layers: none, our policies, torch's and Megatron's; and offload."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor

from burst_bench.core import Method, World, add, installed, ready
from burst_mcore.attention.compiled import attention_forward
from burst_mcore.checkpointing import Full, KeepAttention, Offload, Policy, Segment, checkpoint


def as_it_is(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    """Call a function without recomputation."""
    return function(*args)


@dataclass(frozen=True)
class LayerMethod:
    """A method of the kind "layers"."""

    layer: Callable[..., Tensor] = as_it_is
    """Calls a layer, its first argument, on the other arguments."""
    attention: Callable[..., Tensor] = as_it_is
    """The same for attention alone, which is called as part of its layer unless `layer` is `as_it_is`."""


def _selective(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    """Apply torch's selective activation checkpointing: matrix products and attention are kept."""
    operators = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, attention_forward._opoverload]
    contexts = partial(torch.utils.checkpoint.create_selective_checkpoint_contexts, operators)
    out: Tensor = torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, context_fn=contexts)
    return out


def _megatron(part: str, case: Any, world: World) -> LayerMethod:
    from megatron.core import tensor_parallel

    if not torch.cuda.is_available():
        from burst_mcore.megatron import cpu

        cpu.enable()
    tensor_parallel.get_cuda_rng_tracker()

    def recomputed(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
        out: Tensor = tensor_parallel.checkpoint(function, False, *args)
        return out

    return LayerMethod(layer=recomputed) if part == "layer" else LayerMethod(attention=recomputed)


SEGMENTS = {f"segment {kept:g}": Segment(kept) for kept in (0.25, 0.5, 0.75)}
POLICIES: dict[str, Policy] = {"full": Full(), **SEGMENTS, "attention": KeepAttention()}
"""Our policies, by the method's name."""


def _ours(name: str, policy: Policy) -> Method:
    return Method(name, partial(ready, LayerMethod(partial(checkpoint, policy=policy))))


KEPT, OFFLOADED = "kept", "offloaded"
"""Methods of the kind "offload": results stay on the device, or wait on the host."""
IN_MEGATRON = partial(installed, "megatron-core")
add(
    "layers",
    Method("none", partial(ready, LayerMethod())),
    *(_ours(name, policy) for name, policy in POLICIES.items()),
    Method("torch selective", partial(ready, LayerMethod(_selective)), ours=False),
    Method("megatron full", partial(_megatron, "layer"), IN_MEGATRON, ours=False),
    Method("megatron selective", partial(_megatron, "attention"), IN_MEGATRON, ours=False),
)
add("offload", _ours(KEPT, KeepAttention()), _ours(OFFLOADED, Offload(KeepAttention())))
