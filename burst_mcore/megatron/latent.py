"""The latent of Megatron's multi-latent attention (MLA), passed to core attention instead of K and V.

An MLA layer up-projects its latent to K and V of all heads, and calls core attention. Here the layer's own
code runs with a stand-in for the up-projection, which records its input. Core attention gets the latent as
its key, a value that ends in the rope key, and `up_weight`. Norms, rope and the regions of tensor
parallelism stay Megatron's.

This can go when Megatron passes the latent to core attention.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor

from burst_mcore.megatron.patched.groups import has_cache
from burst_mcore.wrap import around, wrap


def hand_over_latents() -> None:
    """Patch MLA layers to pass their latent to core attention with `mla_latent` "on" or "auto"."""
    wrap(MLASelfAttention, "get_query_key_value_tensors", _handing_over)


@around
def _handing_over(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap a layer's computation of query, key and value."""
    if getattr(self.core_attention, "mla_latent", "off") == "off":
        return original(self, *args, **kwargs)
    decodes = has_cache(original, self, *args, **kwargs)
    self.core_attention.up_weight = None if decodes else functools.partial(_weight, self)
    if decodes:
        return original(self, *args, **kwargs)
    with _taking_the_latent(self) as inputs:
        query, key, _, *latents = original(self, *args, **kwargs)
    (latent,) = inputs
    # As wide as a query: Megatron pads narrower values of packed sequences, and trims the output then.
    return query, latent.unsqueeze(-2), key[..., :1, :], *latents


def _weight(layer: Any) -> Tensor:
    """Return the up-projection of a layer's heads, [H, R, Dk + Dv]."""
    by_head = layer.linear_kv_up_proj.weight.unflatten(0, (layer.num_attention_heads_per_partition, -1))
    weight: Tensor = by_head.transpose(1, 2)
    return weight


@contextlib.contextmanager
def _taking_the_latent(layer: Any) -> Iterator[list[Tensor]]:
    """Replace the layer's up-projection: it records its input, and returns zeros without memory.

    The module is still called, so that its pre-hooks (which gather parameters) run.
    """
    linear, inputs = layer.linear_kv_up_proj, []

    def take(latent: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        inputs.append(_of_whole_rows(_normed(latent, linear), layer))
        latent = inputs[-1]
        return latent.new_zeros(()).expand(*latent.shape[:-1], linear.weight.shape[0]), None

    linear.forward = take
    try:
        yield inputs
    finally:
        del linear.forward


def _normed(latent: Tensor, linear: Any) -> Tensor:
    """Return the latent, normalized if TransformerEngine fuses the norm into the up-projection."""
    gamma = getattr(linear, "layer_norm_weight", None)
    if gamma is None:
        return latent
    gamma = gamma + 1 if linear.zero_centered_gamma else gamma
    if linear.normalization == "RMSNorm":
        return torch.nn.functional.rms_norm(latent, latent.shape[-1:], gamma, linear.eps)
    bias = linear.layer_norm_bias
    return torch.nn.functional.layer_norm(latent, latent.shape[-1:], gamma, bias, linear.eps)


def _of_whole_rows(latent: Tensor, layer: Any) -> Tensor:
    """Return the latent of all rows of the layer; backward sums its gradients over tensor parallelism."""
    group = layer.pg_collection.tp
    if group is None or group.size() == 1:
        return latent
    if layer.config.sequence_parallel:
        rows: Tensor = gather_from_sequence_parallel_region(latent, group=group)
        return rows
    copy: Tensor = copy_to_tensor_model_parallel_region(latent, group=group)
    if copy.requires_grad:  # Megatron-Core 0.16 loses the sum of a gradient that is not contiguous
        copy.register_hook(Tensor.contiguous)
    return copy
