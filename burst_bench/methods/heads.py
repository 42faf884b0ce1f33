"""LM heads with their loss: ours, plain PyTorch, and the fused losses of other packages."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from burst_bench.core import Method, World, add, installed, nothing, ready
from burst_mcore.dtypes import wide
from burst_mcore.loss import fused_linear_cross_entropy

IGNORED = -100
"""The label of tokens without loss: every method supports it, and no other mask."""
DEEPSPEED_SHARD_BYTES = 2**30
"""Bytes of a shard's logits in float32: DeepSpeed has no default; its training recipes aim at this."""

HeadLoss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Mean loss over the labels that are not IGNORED, of hidden [N, d], weight [V, d], labels [N]."""


@dataclass(frozen=True)
class HeadMethod:
    """A method of the kind "heads"."""

    loss: HeadLoss
    compiled: bool = False
    """Whether it is compiled anew for each shape, which must not be measured."""
    visible: bool = True
    """Whether a dispatch mode of torch records every tensor that it makes."""


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss from all logits, in at least float32."""
    logits = functional.linear(hidden, weight)
    return functional.cross_entropy(logits.to(wide(logits.dtype)), labels, ignore_index=IGNORED)


def _compiled(case: Any, world: World) -> HeadMethod:
    return HeadMethod(torch.compile(plain, dynamic=False), compiled=True, visible=False)


def _burst(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    mean = fused_linear_cross_entropy(hidden, weight, labels, ignore_index=IGNORED, chunk_tokens="auto")
    assert isinstance(mean, Tensor)
    return mean


def _torch(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    options = nn.LinearCrossEntropyOptions()
    return functional.linear_cross_entropy(hidden, weight, labels, ignore_index=IGNORED, options=options)


def _torch_needs(case: Any, device: str) -> str | None:
    return None if hasattr(functional, "linear_cross_entropy") else f"torch 2.13, got {torch.__version__}"


def _deepspeed(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    os.environ.setdefault("DS_ACCELERATOR", hidden.device.type)  # else it prints its search
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss

    tokens = (labels != IGNORED).sum()

    def share(head: object, x: Tensor, y: Tensor) -> Tensor:  # a shard's part of the mean
        logits = functional.linear(x, weight).to(wide(x.dtype))
        return functional.cross_entropy(logits, y, ignore_index=IGNORED, reduction="sum") / tokens

    shards = math.ceil(len(hidden) * len(weight) * 4 / DEEPSPEED_SHARD_BYTES)
    mean: Tensor = TiledFusedLogitsLoss.apply(
        share, None, hidden[None], labels[None], None, shards, [weight], "sum"
    )
    return mean


def _liger(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    mean: Tensor = LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORED)(weight, hidden, labels)
    return mean


def _cce(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy

    mean: Tensor = linear_cross_entropy(hidden, weight, labels, ignore_index=IGNORED)
    return mean


def _method(
    name: str, loss: HeadLoss, needs: Callable[[Any, str], str | None] = nothing, visible: bool = True
) -> Method:
    return Method(name, partial(ready, HeadMethod(loss, visible=visible)), needs, ours=name == "burst")


add(
    "heads",
    _method("burst", _burst),
    _method("naive", plain),
    Method("compiled-naive", _compiled, ours=False),
    _method("torch", _torch, _torch_needs, visible=False),
    _method("deepspeed", _deepspeed, partial(installed, "deepspeed")),
    _method("liger", _liger, partial(installed, "liger-kernel", on_gpu=True)),
    _method("cce", _cce, partial(installed, "cut-cross-entropy", on_gpu=True), visible=False),
)
