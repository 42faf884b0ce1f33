"""The fused LM head and loss in Megatron's models: the same per-token losses, without logits.

In a forward with labels the output layer returns `UnmadeLogits`, from which `compute_language_model_loss`
computes losses. Without labels the output layer returns logits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer import multi_token_prediction
from torch import Tensor

from burst_mcore.loss import fused_linear_cross_entropy
from burst_mcore.megatron.rules import Settings, judge, of_fused_loss
from burst_mcore.wrap import around, wrap


class UnmadeLogits:
    """Deferred logits: hidden states, the head's weight, and a factor."""

    def __init__(self, hidden: Tensor, weight: Tensor | None, factor: float = 1.0) -> None:
        self.hidden, self.weight, self.factor = hidden, weight, factor
        self.correct: Tensor | None = None
        """[s, b], whether the label had the maximum logit; set by the loss."""

    def __mul__(self, factor: float) -> UnmadeLogits:
        return UnmadeLogits(self.hidden, self.weight, self.factor * factor)

    def __getattr__(self, name: str) -> Any:
        asks = f"the fused loss makes no logits, but something asks for their {name!r}"
        raise AttributeError(f"{asks}: train without --burst-fused-loss")


def fuse_loss(model: Any) -> None:
    """Make `model` (a GPTModel or HybridModel) compute its losses without logits. Idempotent.

    Losses and gradients equal those of Megatron's vocab_parallel_cross_entropy. The gradient of the head's
    weight is added to `main_grad`, if DistributedDataParallel has set it.

    Raises:
        ValueError: the model has a setting that this loss does not support.
    """
    if not model.post_process or isinstance(getattr(model, "_burst_loss", None), _FusedLoss):
        return
    remat = getattr(model.output_layer, "gtp_remat_size", 1)
    judge(of_fused_loss(Settings(model.config, gtp_remat_size=remat)))
    if hasattr(multi_token_prediction, _MTP_COUNT):
        wrap(multi_token_prediction, _MTP_COUNT, _counting_deferred)
    object.__setattr__(model, "_burst_loss", _FusedLoss(model))  # not a submodule: it refers to the model


class _FusedLoss:
    """The fused loss of one model, which replaces the model's functions for head and loss."""

    def __init__(self, model: Any) -> None:
        self._model, self._head = model, model.output_layer
        self._labels: Tensor | None = None
        self._mask: Tensor | None = None
        """The labels, and their loss mask, of the current forward."""
        self._signature = inspect.signature(type(model).forward)
        self._logits: Callable[..., Any] = model.output_layer.forward
        self._loss: Callable[..., Tensor] = model.compute_language_model_loss
        model.output_layer.forward = self._forward_head
        model.compute_language_model_loss = self._language_model_loss
        model.register_forward_pre_hook(self._before, with_kwargs=True)
        model.register_forward_hook(self._after, always_call=True)

    def _before(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = self._signature.bind(model, *args, **kwargs).arguments
        labels, mask = arguments.get("labels"), arguments.get("loss_mask")
        if labels is None:
            return
        if arguments.get("output_processor") is not None:
            raise ValueError("--burst-fused-loss does not go with an output_processor: it makes no logits")
        self._labels = labels
        self._mask = mask if mask is not None and mask.shape == labels.shape else None

    def _after(self, *_: Any) -> None:
        self._labels = self._mask = None

    def _forward_head(self, input_: Tensor, weight: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        if self._labels is None:
            return self._logits(input_, weight, *args, **kwargs)
        return UnmadeLogits(input_, weight), None

    def _language_model_loss(self, labels: Tensor, logits: Any) -> Tensor:
        """Return per-token losses [b, s] of labels [b, s]."""
        if not isinstance(logits, UnmadeLogits):
            return self._loss(labels, logits)
        main, head = labels is self._labels, self._head
        weight = head.weight if logits.weight is None else logits.weight
        mask = self._mask if main else None
        main_grad = getattr(weight, "main_grad", None) if torch.is_grad_enabled() else None
        if getattr(weight, "__fsdp_param__", False):
            main_grad = None  # Megatron-FSDP allocates it in backward
        if main_grad is not None and weight.requires_grad:
            weight = _ToMainGrad.apply(weight, logits.weight is not None)  # type: ignore[no-untyped-call]
        result = fused_linear_cross_entropy(
            logits.hidden,
            weight,
            labels.transpose(0, 1).clamp(min=_IGNORED),
            None if mask is None else mask.transpose(0, 1).clamp(min=0),  # expected upstream gradients
            None if head.skip_bias_add else head.bias,
            ignore_index=_IGNORED,
            reduction="none",
            temperature=1.0 / logits.factor,
            tp_group=head.tp_group,
            sequence_parallel=head.sequence_parallel,
            main_grad=main_grad if weight.requires_grad else None,
            return_metrics=not main,
        )
        losses: Tensor
        losses, logits.correct = (result, None) if main else (result[0], result[1].correct)
        return losses.transpose(0, 1).contiguous()


_IGNORED = -1
"""The ignored label: datasets mark tokens without a label by negative numbers, and mask their loss."""


class _ToMainGrad(torch.autograd.Function):
    """A weight with a gradient that the loss adds to main_grad; it informs DistributedDataParallel.

    DDP's hook on the parameter must still run, so autograd gets a gradient of zeros, which does not change
    the gradients of other users of a tied weight.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, tied: bool) -> Tensor:
        ctx.weight, ctx.tied = weight, tied
        ctx.set_materialize_grads(False)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, none: None) -> tuple[Tensor, None]:
        weight = ctx.weight
        is_only_user = not ctx.tied or getattr(weight, "zero_out_wgrad", False)
        if is_only_user and hasattr(weight, "grad_added_to_main_grad"):
            weight.grad_added_to_main_grad = True
        return weight.new_zeros(()).expand_as(weight), None


_MTP_COUNT = "_compute_mtp_acceptance_counts"
"""Megatron's count of hits of multi-token prediction, which from 0.19 on reads logits."""


@around
def _counting_deferred(
    count: Callable, mtp_logits: Any, mtp_labels: Tensor, loss_mask: Tensor, *args: Any, **kwargs: Any
) -> Any:
    if not isinstance(mtp_logits, UnmadeLogits):
        return count(mtp_logits, mtp_labels, loss_mask, *args, **kwargs)
    assert mtp_logits.correct is not None
    valid = loss_mask.transpose(0, 1).bool()
    return (mtp_logits.correct & valid).sum().float(), valid.sum().float()
