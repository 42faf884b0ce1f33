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

from burst_mcore.bench.core import Method, World, package
from burst_mcore.dtypes import wide
from burst_mcore.loss import fused_linear_cross_entropy

IGNORED = -100
"""The label of tokens without loss: the one way to mask that every method has."""
DEEPSPEED_SHARD_BYTES = 2**30
"""Of a shard's logits in float32: DeepSpeed has no default; its own training recipes aim at this."""

HeadLoss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Mean loss over the labels that are not IGNORED, of hidden [N, d], weight [V, d], labels [N]."""


@dataclass(frozen=True)
class Head:
    """A method of the kind "heads"."""

    loss: HeadLoss
    compiled: bool = False
    """It is compiled anew for each shape, which must not be measured."""
    visible: bool = True
    """Whether a dispatch mode of torch sees every tensor that it makes."""


def _naive_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = functional.linear(hidden, weight)
    return functional.cross_entropy(logits.to(wide(logits.dtype)), labels, ignore_index=IGNORED)


def _burst(case: Any, world: World) -> Head:
    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        found = fused_linear_cross_entropy(hidden, weight, labels, ignore_index=IGNORED, chunk_tokens="auto")
        assert isinstance(found, Tensor)
        return found

    return Head(loss)


def _naive(case: Any, world: World) -> Head:
    return Head(_naive_loss)


def _compiled_naive(case: Any, world: World) -> Head:
    return Head(torch.compile(_naive_loss, dynamic=False), compiled=True, visible=False)


def _torch(case: Any, world: World) -> Head:
    options = nn.LinearCrossEntropyOptions()
    return Head(
        partial(functional.linear_cross_entropy, ignore_index=IGNORED, options=options), visible=False
    )


def _torch_needs(case: Any, device: str) -> str | None:
    return None if hasattr(functional, "linear_cross_entropy") else f"torch 2.13, got {torch.__version__}"


def _deepspeed(case: Any, world: World) -> Head:
    os.environ.setdefault("DS_ACCELERATOR", world.device)  # else it says at length that it looks for one
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        counted = (labels != IGNORED).sum()

        def share(head: object, x: Tensor, y: Tensor) -> Tensor:  # a shard's part of the mean
            logits = functional.linear(x, weight).to(wide(x.dtype))
            return functional.cross_entropy(logits, y, ignore_index=IGNORED, reduction="sum") / counted

        shards = math.ceil(len(hidden) * len(weight) * 4 / DEEPSPEED_SHARD_BYTES)
        whole: Tensor = TiledFusedLogitsLoss.apply(
            share, None, hidden[None], labels[None], None, shards, [weight], "sum"
        )
        return whole

    return Head(loss)


def _deepspeed_needs(case: Any, device: str) -> str | None:
    return package("deepspeed", "deepspeed")


def on_gpu(module: str, name: str, case: Any, device: str) -> str | None:
    """Return the need of a package for GPUs; None if this machine meets the need."""
    lacking = ["a GPU"] if device != "cuda" else []
    return " and ".join([*lacking, *filter(None, [package(module, name)])]) or None


def _liger(case: Any, world: World) -> Head:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    fused = LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORED)
    return Head(lambda hidden, weight, labels: fused(weight, hidden, labels))


def _cce(case: Any, world: World) -> Head:
    from cut_cross_entropy import linear_cross_entropy

    return Head(partial(linear_cross_entropy, ignore_index=IGNORED), visible=False)


METHODS = (
    Method("burst", _burst),
    Method("naive", _naive, ours=False),
    Method("compiled-naive", _compiled_naive, ours=False),
    Method("torch", _torch, _torch_needs, ours=False),
    Method("deepspeed", _deepspeed, _deepspeed_needs, ours=False),
    Method("liger", _liger, partial(on_gpu, "liger_kernel", "liger-kernel"), ours=False),
    Method("cce", _cce, partial(on_gpu, "cut_cross_entropy", "cut-cross-entropy"), ours=False),
)
