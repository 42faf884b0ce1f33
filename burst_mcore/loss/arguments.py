"""A call's arguments, checked on all its ranks together, and the call without its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from burst_mcore.agreement.agreement import agreement_over
from burst_mcore.agreement.claims import Claim, Signature
from burst_mcore.dtypes import DTYPES, wide
from burst_mcore.loss.checksums import checksum, fingerprint
from burst_mcore.loss.chunked import Head, automatic_chunk, chunk_bytes
from burst_mcore.loss.products import products_for
from burst_mcore.loss.terms import Terms
from burst_mcore.loss.vocabulary import Vocabulary, shard
from burst_mcore.packages import refuse_capture
from burst_mcore.words import brief

REDUCTIONS = ("mean", "sum", "none")


class LossArguments(NamedTuple):
    """The arguments of `fused_linear_cross_entropy`; `terms` has the fields of `Terms`."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    weights: Tensor | None
    bias: Tensor | None
    ignore_index: int
    reduction: str
    terms: dict[str, Any]
    tp_group: dist.ProcessGroup | None
    cp_group: dist.ProcessGroup | None = None
    sequence_parallel: bool = False
    chunk_tokens: int | str = "auto"
    grad_weight_dtype: torch.dtype = torch.float32
    main_grad: Tensor | None = None
    return_metrics: bool = False


@dataclass(frozen=True)
class LossCall:
    """A checked call, without its tensors."""

    terms: Terms
    vocabulary: Vocabulary
    ignore_index: int
    reduction: str
    cp_group: dist.ProcessGroup | None
    sequence_parallel: bool
    chunk_tokens: int | None
    grad_weight_dtype: torch.dtype
    metrics: bool
    gradients: bool
    """Whether autograd records."""
    valid_tokens: int
    """The number of labels that are not ignored."""

    def head(self, weight: Tensor, bias: Tensor | None, tokens: int) -> Head:
        """Return the head for a number of valid tokens."""
        dtype = torch.float64 if weight.dtype == torch.float64 else self.grad_weight_dtype
        products = products_for(weight.dtype, weight.device, self.terms)
        width = max(self.vocabulary.most_rows, weight.shape[1])  # ranks must have the same number of chunks
        chunk = self.chunk_tokens
        if chunk is None:
            most_bytes = chunk_bytes(weight.device, alone=self.vocabulary.group is None)
            chunk = automatic_chunk(tokens, width, products, most_bytes)
        return Head(weight, bias, self.terms, self.vocabulary, self.ignore_index, chunk, dtype, tokens)


def checked(a: LossArguments, wrong: str | None = None) -> LossCall:
    """Return the call if all ranks of its groups make the same call. wrong: an error of the caller's checks.

    First tp_group agrees, and checks that the parts of the vocabulary fit; cp_group is told of errors.

    Raises:
        ValueError: on all ranks of the groups, if an argument of any is illegal; it names rank and argument.
    """
    groups = [g for g in (a.tp_group, a.cp_group) if isinstance(g, dist.ProcessGroup)]
    groups = [g for g in groups if dist.get_world_size(g) > 1]
    tp_group, cp_group = (g if g in groups else None for g in (a.tp_group, a.cp_group))
    device = a.hidden.device if isinstance(a.hidden, Tensor) and a.hidden.is_cuda else None
    of_vocabulary, of_tokens = (agreement_over(group, device) for group in (tp_group, cp_group))
    with of_tokens.refusing():
        with of_vocabulary.refusing():
            numbers, valid_tokens = _numbers(a, tp_group, wrong)
            claim = Claim(_signature(a) if tp_group is None else _signature_of_tokens(a), numbers)
        everyones = of_vocabulary.meet(claim).numbers
        _refuse(_wrong_together(a, everyones, valid_tokens))
    of_tokens.meet(Claim(_signature(a)))
    rank = 0 if tp_group is None else dist.get_rank(tp_group)
    rows = [each[0] for each in everyones]
    return LossCall(
        terms=Terms(**a.terms),
        vocabulary=Vocabulary(sum(rows), sum(rows[:rank]), rows[rank], tp_group),
        ignore_index=a.ignore_index,
        reduction=a.reduction,
        cp_group=cp_group,
        sequence_parallel=a.sequence_parallel and tp_group is not None,
        chunk_tokens=None if isinstance(a.chunk_tokens, str) else a.chunk_tokens,
        grad_weight_dtype=a.grad_weight_dtype,
        metrics=a.return_metrics,
        gradients=torch.is_grad_enabled(),
        valid_tokens=valid_tokens,
    )


def _refuse(error: str | None) -> None:
    if error is not None:
        raise ValueError(error)


def _numbers(
    a: LossArguments, tp_group: dist.ProcessGroup | None, wrong: str | None
) -> tuple[tuple[int, ...], int]:
    """Return the numbers that tp_group compares, and the number of valid labels, if `a` is legal."""
    try:
        Terms(**a.terms)
        size = 1 if tp_group is None else dist.get_world_size(tp_group)
        reason = _wrong_tensors(a) or _wrong_weights(a.weights) or _wrong_words(a) or _wrong_shapes(a, size)
    except (TypeError, OverflowError) as error:
        raise ValueError(str(error)) from None
    _refuse(reason or wrong)
    *labels, illegal, valid_tokens = _values(a)
    if illegal and a.weights is not None:
        lowest, highest = a.weights.min().item(), a.weights.max().item()
        raise ValueError(f"weights must be finite and at least 0, got {lowest} to {highest}")
    return (len(a.weight), *labels, 0 if tp_group is None else fingerprint(a.weight)), valid_tokens


def _wrong_tensors(a: LossArguments) -> str | None:
    for name in ("hidden", "weight", "labels", "weights", "bias", "main_grad"):
        value = getattr(a, name)
        if value is None and name in ("weights", "bias", "main_grad"):
            continue
        if not isinstance(value, Tensor):
            return f"{name} must be a tensor, got {type(value).__name__}"
        if hasattr(value, "full_tensor"):  # without the import of torch.distributed.tensor
            return (
                f"{name} is a DTensor, and a plain tensor is needed: give {name}.full_tensor(), or call "
                "within the module's forward, where FSDP has gathered its parameters"
            )
        if value.device != a.hidden.device:
            return f"{name} is on {value.device}, hidden on {a.hidden.device}"
    if a.hidden.dtype not in DTYPES.values():
        return f"hidden must be one of {[str(d) for d in DTYPES.values()]}, got {a.hidden.dtype}"
    for name in ("weight", "bias"):
        value = getattr(a, name)
        if value is not None and value.dtype != a.hidden.dtype:
            return f"{name} is {value.dtype}, hidden {a.hidden.dtype}: they must be alike (or use autocast)"
    if a.labels.dtype not in (torch.int64, torch.int32):
        return f"labels must be int64 or int32, got {a.labels.dtype}"
    return None


def _wrong_weights(weights: Tensor | None) -> str | None:
    if weights is not None and weights.is_complex():
        return f"weights must be real numbers, got {weights.dtype}"
    if weights is not None and weights.requires_grad:
        return "weights require a gradient, which is not there: detach them, or weight the losses of 'none'"
    return None


def _wrong_words(a: LossArguments) -> str | None:
    for name in ("tp_group", "cp_group"):
        group = getattr(a, name)
        if group is not None and not isinstance(group, dist.ProcessGroup):
            return f"{name} must be a process group that this rank is in, or None, got {brief(group)}"
    if a.reduction not in REDUCTIONS:
        return f"reduction must be one of {REDUCTIONS}, got {brief(a.reduction)}"
    if not isinstance(a.ignore_index, int) or not -(2**63) <= a.ignore_index < 2**63:
        return f"ignore_index must be an integer of 64 bits, got {brief(a.ignore_index)}"
    whole = isinstance(a.chunk_tokens, int) and not isinstance(a.chunk_tokens, bool) and a.chunk_tokens > 0
    if a.chunk_tokens != "auto" and not whole:
        return f"chunk_tokens must be a number of tokens, at least 1, or 'auto', got {brief(a.chunk_tokens)}"
    if a.grad_weight_dtype not in (torch.float32, a.weight.dtype):
        return f"grad_weight_dtype must be torch.float32 or the weight's, got {brief(a.grad_weight_dtype)}"
    if a.sequence_parallel and a.tp_group is None:
        return "sequence_parallel needs tp_group: the ranks over which hidden is sharded"
    return None


def _wrong_shapes(a: LossArguments, tp_size: int) -> str | None:
    hidden, labels = tuple(a.hidden.shape), tuple(a.labels.shape)
    if a.hidden.ndim == 0 or a.weight.ndim != 2 or hidden[-1] != a.weight.shape[1]:
        return f"hidden [..., d] and weight [V, d] do not fit: {hidden} and {tuple(a.weight.shape)}"
    want = hidden[:-1]
    if a.sequence_parallel and tp_size > 1:
        if len(hidden) < 2:
            return f"with sequence_parallel hidden needs a first dim of tokens, got {hidden}"
        want = (hidden[0] * tp_size, *hidden[1:-1])
    if labels != want:
        return f"labels must have the shape {want} for hidden {hidden}, got {labels}"
    if a.weights is not None and tuple(a.weights.shape) != labels:
        return f"weights must have the shape of labels, {labels}, got {tuple(a.weights.shape)}"
    if a.bias is not None and tuple(a.bias.shape) != (len(a.weight),):
        return f"bias must have the shape {(len(a.weight),)}, got {tuple(a.bias.shape)}"
    if a.main_grad is not None and a.main_grad.shape != a.weight.shape:
        return f"main_grad must have the shape {tuple(a.weight.shape)}, got {tuple(a.main_grad.shape)}"
    if a.main_grad is not None and not a.main_grad.is_floating_point():
        return f"main_grad must be of a floating dtype, got {a.main_grad.dtype}"
    return None


def _values(a: LossArguments) -> tuple[int, int, int, int]:
    """Return max label, -min label, whether a weight is illegal, and the number of valid labels.

    In one transfer from the device.
    """
    if a.labels.is_cuda:
        refuse_capture("fused_linear_cross_entropy")
    if a.labels.numel() == 0:
        return 0, 0, 0, 0
    labels = a.labels.long()
    valid = labels != a.ignore_index
    valid_labels = labels.clamp(min=-(2**62)).where(valid, 0)
    illegal = labels.new_zeros(())
    if a.weights is not None:
        weights = a.weights.to(wide(a.hidden.dtype))
        illegal = (~(weights.isfinite() & (weights >= 0)).all()).long()
    counts = torch.stack([valid_labels.max(), -valid_labels.min(), illegal, valid.sum()])
    maximum, negated_minimum, is_illegal, valid_tokens = counts.tolist()
    return maximum, negated_minimum, is_illegal, valid_tokens


def _wrong_together(a: LossArguments, everyones: Sequence[Sequence[int]], valid_tokens: int) -> str | None:
    """Return the error in labels or parts of the vocabulary, the same on all ranks of tp_group."""
    rows = [numbers[0] for numbers in everyones]
    size = sum(rows)
    prints = [numbers[3] for numbers in everyones if numbers[3]]
    if len(set(prints)) < len(prints):
        return "ranks of tp_group hold the same rows of weight: each must have its own part of the vocabulary"
    sharded = [shard(size, len(rows), rank)[1] for rank in range(len(rows))]
    if rows != sharded:
        return f"weights have {rows} rows by rank of tp_group; {size} must be sharded as {sharded}"
    maximum, negated_minimum = (max(numbers[i] for numbers in everyones) for i in (1, 2))
    if maximum >= max(1, size) or negated_minimum > 0:
        label = maximum if maximum >= size else -negated_minimum
        return f"labels must be in [0, {size}) or {a.ignore_index} (ignore_index), got {label}"
    if size == 0 and valid_tokens:
        return "the vocabulary is empty, but labels are not all ignored"
    return None


def _signature(a: LossArguments) -> dict[str, str]:
    """Return the fields that must be the same on all ranks of both groups."""
    dtype, dim = getattr(a.hidden, "dtype", None), getattr(a.hidden, "shape", (None,))[-1:]
    learn = [bool(getattr(x, "requires_grad", False)) for x in (a.hidden, a.weight, a.bias)]
    return {
        "dtype": str(dtype),
        "d": str([*dim]),
        "reduction": str(a.reduction),
        "terms": str(a.terms),
        "ignore_index": str(a.ignore_index),
        "bias": str(a.bias is not None),
        "metrics": str(a.return_metrics),
        "autograd": str(torch.is_grad_enabled()),
        "hidden, weight, bias require gradients": str(learn),
    }


def _signature_of_tokens(a: LossArguments) -> Signature:
    """Return the fields that must be the same on all ranks of tp_group."""
    tensors = [a.labels] if a.weights is None else [a.labels, a.weights]
    sums = torch.stack([checksum(x) for x in tensors]).tolist()
    return {
        **_signature(a),
        "shape of labels": str([*a.labels.shape]),
        "checksums of labels, and of weights or temperatures": str(sums),
        "chunk_tokens": str(a.chunk_tokens),
        "sequence_parallel": str(a.sequence_parallel),
    }
