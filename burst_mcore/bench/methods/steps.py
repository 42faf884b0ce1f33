"""Training steps under DeepSpeed: with DeepSpeed's own Ulysses in both its forms, and with ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from burst_mcore.attention.runtime.head_exchange import why_not_heads
from burst_mcore.bench.core import Method, World, package, ready

OURS = {"layout": "zigzag", "head_parallel": 1, "fused_loss": False}
"""The section `burst_attention` of a configuration, unless a method changes it."""
AUTO = {**OURS, "head_parallel": "auto"}


@dataclass(frozen=True)
class Recipe:
    """A method of the kind "steps"."""

    section: dict[str, Any]
    """Of the configuration: `burst_attention`."""
    attention: Callable[..., Any] | None = None
    """In the place of ours, as transformers' interface has it."""


def _theirs(build: Callable[[Any, World], Callable[..., Any]], case: Any, world: World) -> Recipe:
    return Recipe({**OURS, "layout": "contiguous"}, build(case, world))


def _ulysses_hf(case: Any, world: World) -> Callable[..., Any]:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return UlyssesSPAttentionHF(  # type: ignore[no-any-return]
        sdpa_attention_forward, 1, case.heads, case.head_dim, case.kv_heads, case.layers, world.group,
        seq_length_is_variable=True,
    ).forward  # fmt: skip


def _ulysses_layer(case: Any, world: World) -> Callable[..., Any]:
    from deepspeed.sequence.layer import DistributedAttention

    def local(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.transpose(1, 2).contiguous()

    whole = DistributedAttention(local, world.group, 2, 1)

    def attend(module: Any, q: Any, k: Any, v: Any, attention_mask: Any, **_: Any) -> tuple[Any, None]:
        return whole(*(x.transpose(1, 2).contiguous() for x in (q, k, v)), 0), None

    return attend


def _needs(case: Any, device: str) -> str | None:
    return package("deepspeed", "deepspeed") or package("transformers", "transformers")


def _hybrid_needs(case: Any, device: str) -> str | None:
    return _needs(case, device) or why_not_heads(case.heads, case.kv_heads, 2)


METHODS = (
    Method("ulysses (UlyssesSPAttentionHF)", partial(_theirs, _ulysses_hf), _needs, ours=False),
    Method("ulysses (DistributedAttention)", partial(_theirs, _ulysses_layer), _needs, ours=False),
    Method("burst ring", partial(ready, Recipe(OURS)), _needs),
    Method("burst hybrid", partial(ready, Recipe({**OURS, "head_parallel": 2})), _hybrid_needs),
    Method("burst auto", partial(ready, Recipe(AUTO)), _needs),
    Method("burst auto with fused loss", partial(ready, Recipe({**AUTO, "fused_loss": True})), _needs),
)
