"""Log-probabilities and entropies of labels under an LM head, with gradients of both, without its logits.

For policy gradients and distillation, whose upstream gradients differ from token to token. Forward makes one
chunk's logits at a time and keeps three numbers a token; backward makes the logits again: four products a
token in all, where the fused loss with such gradients takes five.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from burst_mcore.dtypes import autocast, wide
from burst_mcore.loss.arguments import LossArguments, LossCall, checked
from burst_mcore.loss.causal_lm import patch_of
from burst_mcore.loss.checksums import same_on_all
from burst_mcore.loss.products import Products
from burst_mcore.loss.rows import LOW
from burst_mcore.loss.terms import ENTROPY, LABEL, LSE
from burst_mcore.transformers.errors import RefusedError
from burst_mcore.words import brief


@torch.compiler.disable  # type: ignore[untyped-decorator]
def token_statistics(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: Tensor | float = 1.0,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    tp_group: dist.ProcessGroup | None = None,
    chunk_tokens: int | str = "auto",
) -> tuple[Tensor, Tensor]:
    """Return (log-probability of the label, entropy) of every token; 0 where the label is ignored.

    Both are of softmax(z), z = cap(hidden @ weight.T + bias) / temperature, in nats and at least float32,
    and both have gradients.

    Args:
        hidden, weight, labels, bias, ignore_index, softcap, tp_group, chunk_tokens: As
            `fused_linear_cross_entropy` has them.
        temperature: A number above 0, or one for each token, in the shape of labels; that of an ignored label
            is not read. It gets no gradient.

    Raises:
        ValueError: on every rank of tp_group, if an argument of any of them is not as above.
        RuntimeError: in backward where upstream gradients differ between ranks of `tp_group`, or with
            create_graph.
    """
    hidden, weight, bias = autocast(hidden, weight, bias)
    terms: dict[str, Any] = {"z_loss": 0.0, "label_smoothing": 0.0, "softcap": softcap, "temperature": 1.0}
    divisors, wrong = divisors_of(temperature, labels, ignore_index)
    call = checked(
        LossArguments(
            hidden, weight, labels, divisors, bias, ignore_index, "none", terms, tp_group, None,
            False, chunk_tokens, torch.float32, None, False,
        ),
        wrong,
    )  # fmt: skip
    assert divisors is not None
    divisors = divisors.to(wide(hidden.dtype)).reshape(-1)
    with torch.autocast(hidden.device.type, enabled=False):
        both: Tensor = _Statistics.apply(hidden, weight, bias, labels, divisors, call)  # type: ignore[no-untyped-call]
    return both[0].view(labels.shape), both[1].view(labels.shape)


class TokenStats(NamedTuple):
    """Of every token, in the shape of shift_labels; 0 where the label is ignored. Both have gradients."""

    log_probability: Tensor
    """Of the label."""
    entropy: Tensor
    """Of the softmax of the logits, in nats."""


@contextmanager
def returning_statistics(model: nn.Module, temperature: Tensor | float) -> Iterator[None]:
    """Have forwards of a model with a fused loss return statistics of tokens, [2, tokens].

    Raises:
        RefusedError: the loss is not fused.
    """
    patched = patch_of(model)
    if patched is None:
        raise RefusedError(
            "loss",
            'the model\'s loss is not fused, and its logits would be made: parallelize(..., loss="fused")',
        )
    _, patch = patched
    patch.compute = partial(_of_head, temperature)
    try:
        yield
    finally:
        patch.compute = None


def _of_head(
    beside: Tensor | float, hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, **options: Any
) -> Tensor:
    """Return the statistics [2, tokens] of a model's loss call, at a temperature beside its own."""
    if options["label_smoothing"]:
        raise ValueError("the model smooths labels: statistics of tokens are those of its logits alone")
    divisors = torch.as_tensor(beside).to(labels.device) * temperature
    known = {name: options[name] for name in ("bias", "tp_group", "ignore_index", "softcap", "chunk_tokens")}
    each = divisors.reshape(-1) if divisors.dim() else divisors
    return torch.stack(token_statistics(hidden, weight, labels, each, **known))


def divisors_of(
    temperature: Tensor | float, labels: Tensor, ignore_index: int = -100
) -> tuple[Tensor | None, str | None]:
    """Return (the temperature of each label, 1 where that is ignored; None), or (None, what is wrong)."""
    legal = "temperature must be a number, or one for each label"
    try:
        each = torch.as_tensor(temperature, dtype=torch.float64, device=labels.device).detach()
        shape = tuple(labels.shape)
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return None, f"{legal}, got {brief(temperature)}"
    if each.dim() and each.shape != shape:
        return None, f"{legal}, {shape}, got {tuple(each.shape)}"
    each = each.where(labels != ignore_index, 1.0)  # padding, for which a batch's column has 0
    odd = each[~((each > 0) & each.isfinite())]
    if len(odd):
        return None, f"temperature must be finite and above 0, got {odd[0].item()}"
    return each, None


class _Statistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        divisors: Tensor,
        call: LossCall,
    ) -> Tensor:
        flat, y = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1).long()
        full, vocabulary = wide(hidden.dtype), call.vocabulary
        places = (y != call.ignore_index).nonzero()[:, 0]
        columns = vocabulary.columns(y, call.ignore_index)
        statistics = torch.zeros((2, len(y)), dtype=full, device=hidden.device)
        lse = torch.zeros(len(y), dtype=full, device=hidden.device)
        for at in _chunks(places, call, weight):
            z = _scaled_logits(flat[at], weight, bias, divisors[at], call)
            table = z.new_zeros((5, len(at)))
            table[LSE] = z.logsumexp(1)
            apart = (z - table[LSE][:, None]).clamp_(min=LOW)  # a logit may be -inf
            table[ENTROPY] = -torch.linalg.vecdot(apart.exp(), apart)
            here = (columns[at] >= 0).nonzero()[:, 0]
            table[LABEL, here] = z[here, columns[at][here]]
            table = vocabulary.whole(table)
            statistics[0, at], statistics[1, at] = table[LABEL] - table[LSE], table[ENTROPY]
            lse[at] = table[LSE]
        ctx.call, ctx.shape = call, hidden.shape
        ctx.save_for_backward(flat, weight, bias, columns, places, divisors, lse, statistics[1].clone())
        return statistics

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("token_statistics has no second derivative: backward without create_graph")
        flat, weight, bias, columns, places, divisors, lse, entropy = ctx.saved_tensors
        call: LossCall = ctx.call
        group = call.vocabulary.group
        if group is not None and not same_on_all(group, upstream):
            raise RuntimeError("upstream gradients of token statistics differ between ranks of tp_group")
        of_hidden, of_weight, of_bias, *_ = ctx.needs_input_grad
        made, full = _products(weight), wide(weight.dtype)
        d_hidden = torch.zeros_like(flat, dtype=flat.dtype if group is None else full)
        d_weight = torch.zeros_like(weight, dtype=full, memory_format=torch.contiguous_format)
        d_bias = None if bias is None else torch.zeros_like(bias, dtype=full)
        for at in _chunks(places, call, weight):
            rows, labels = flat[at], columns[at]
            dlogits = _gradient(
                _scaled_logits(rows, weight, bias, divisors[at], call),
                labels, upstream[:, at], lse[at], entropy[at], divisors[at], call.terms.softcap,
            ).to(made.gradients)  # fmt: skip
            if of_hidden:
                part = d_hidden.new_empty(rows.shape)
                made.second(dlogits, labels, labels, weight, part)
                d_hidden[at] = part
            if of_weight:
                made.third(dlogits, labels, labels, rows, d_weight)
            if d_bias is not None and of_bias:
                made.bias(dlogits, labels, labels, d_bias.new_ones(len(at)), d_bias)
        return (
            call.vocabulary.summed(d_hidden, False).to(flat.dtype).view(ctx.shape) if of_hidden else None,
            d_weight.to(weight.dtype) if of_weight else None,
            d_bias.to(bias.dtype) if d_bias is not None and of_bias else None,
            None, None, None,
        )  # fmt: skip


def _chunks(places: Tensor, call: LossCall, weight: Tensor) -> Iterator[Tensor]:
    """Yield the places of the valid tokens whose logits are alive at once."""
    return iter(places.split(call.head(weight, None, len(places)).chunk_tokens) if len(places) else ())


def _products(weight: Tensor) -> Products:
    """Return the products: logits, and sums over ranks of 16-bit numbers, are at least float32."""
    full = wide(weight.dtype)
    return Products(full, weight.dtype if weight.is_cuda and weight.dtype == torch.bfloat16 else full)


def _scaled_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, divisors: Tensor, call: LossCall
) -> Tensor:
    """Return z [tokens, v], capped and divided by the temperature, in at least float32."""
    made = _products(weight)
    z = torch.empty((len(hidden), len(weight)), dtype=made.logits, device=hidden.device)
    made.first(hidden, weight, bias, z)
    cap = call.terms.softcap
    if cap is not None:
        z.div_(cap).tanh_().mul_(cap)
    return z.div_(divisors[:, None])


def _gradient(
    z: Tensor,
    labels: Tensor,
    upstream: Tensor,
    lse: Tensor,
    entropy: Tensor,
    divisors: Tensor,
    softcap: float | None,
) -> Tensor:
    """Return the gradient of the logits, from those of log-probability and entropy, [2, tokens].

    With p = softmax(z): d log p_y / dz_j = [j = y] - p_j, and dH / dz_j = -p_j (log p_j + H).
    """
    of_label, of_entropy = upstream.to(z.dtype)
    log_p = (z - lse[:, None]).clamp_(min=LOW)
    d = (log_p + entropy[:, None]).mul_(of_entropy[:, None]).add_(of_label[:, None])
    d.mul_(log_p.exp_()).neg_()
    here = (labels >= 0).nonzero()[:, 0]
    d[here, labels[here]] += of_label[here]
    if softcap is not None:
        d.mul_(1.0 - (z * (divisors[:, None] / softcap)).square_())
    return d.div_(divisors[:, None])
