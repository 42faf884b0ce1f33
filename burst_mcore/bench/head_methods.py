"""The LM heads that are compared, behind one interface. A new one is a new entry of METHODS."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor, nn
from torch.nn import functional

from burst_mcore.dtypes import wide
from burst_mcore.loss import fused_linear_cross_entropy

OURS = "burst"
IGNORED = -100
"""The label of tokens without loss: the one way to mask that every method has."""
DEEPSPEED_SHARD_BYTES = 2**30
"""Of a shard's logits in float32: DeepSpeed has no default; its own training recipes aim at this."""

HeadLoss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Mean loss over the labels that are not IGNORED, of hidden [N, d], weight [V, d], labels [N]."""


def _nothing(device: str) -> None:
    return None


@dataclass(frozen=True)
class Method:
    """One way to get from hidden states to the loss. Processes are handed it: its functions have names."""

    name: str
    build: Callable[[str], HeadLoss]
    """The method on "cpu" or "cuda", ready to be called."""
    needs: Callable[[str], str | None] = _nothing
    """What it lacks on such a device, in words; None if nothing."""
    compiled: bool = False
    """It is compiled anew for each shape, which must not be measured."""
    visible: bool = True
    """Whether a dispatch mode of torch sees every tensor that it makes."""


def _naive_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = functional.linear(hidden, weight)
    return functional.cross_entropy(logits.to(wide(logits.dtype)), labels, ignore_index=IGNORED)


def _burst_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    loss = fused_linear_cross_entropy(hidden, weight, labels, ignore_index=IGNORED, chunk_tokens="auto")
    assert isinstance(loss, Tensor)
    return loss


def _torch_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    loss: Tensor = functional.linear_cross_entropy(
        hidden, weight, labels, ignore_index=IGNORED, options=nn.LinearCrossEntropyOptions()
    )
    return loss


def _torch_needs(device: str) -> str | None:
    return None if hasattr(functional, "linear_cross_entropy") else f"torch 2.13, got {torch.__version__}"


def _needs_package(module: str, package: str, gpu: bool, device: str) -> str | None:
    lacking = ["a GPU"] if gpu and device != "cuda" else []
    if find_spec(module) is None:
        lacking.append(f"the package {package}")
    return " and ".join(lacking) or None


def _package(module: str, package: str, gpu: bool = False) -> Callable[[str], str | None]:
    return partial(_needs_package, module, package, gpu)


def _burst(device: str) -> HeadLoss:
    return _burst_loss


def _naive(device: str) -> HeadLoss:
    return _naive_loss


def _compiled_naive(device: str) -> HeadLoss:
    return torch.compile(_naive_loss, dynamic=False)


def _torch(device: str) -> HeadLoss:
    return _torch_loss


def _deepspeed(device: str) -> HeadLoss:
    os.environ.setdefault("DS_ACCELERATOR", device)  # else it says at length that it looks for one
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

    return loss


def _liger(device: str) -> HeadLoss:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    fused = LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORED)

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        found: Tensor = fused(weight, hidden, labels)
        return found

    return loss


def _cce(device: str) -> HeadLoss:
    from cut_cross_entropy import linear_cross_entropy

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        found: Tensor = linear_cross_entropy(hidden, weight, labels, ignore_index=IGNORED)
        return found

    return loss


METHODS = {
    method.name: method
    for method in (
        Method(OURS, _burst),
        Method("naive", _naive),
        Method("compiled-naive", _compiled_naive, compiled=True, visible=False),
        Method("torch", _torch, _torch_needs, visible=False),
        Method("deepspeed", _deepspeed, _package("deepspeed", "deepspeed")),
        Method("liger", _liger, _package("liger_kernel", "liger-kernel", gpu=True)),
        Method("cce", _cce, _package("cut_cross_entropy", "cut-cross-entropy", gpu=True), visible=False),
    )
}
