"""Elementwise kernels on logits, in Triton: `rows` has the equations. A program handles one row.

A whole row takes two sweeps: for 32-bit logits with 16-bit gradients they move 10 bytes a logit, two reads
and a write. Two designs with one read less were rejected for Hopper (132 multiprocessors, 50 MB of L2):

* A row in registers, read once, compiles without spills up to 16,384 columns: 127 registers a thread of 16
  warps. Such short rows are still in L2 at the second sweep: 3 or 4 rows on each multiprocessor are 35 MB at
  most. At 32,768 columns it spills: 83 to 163 loads and stores of local memory a thread.
* A second sweep out of L2, at 128,256 columns and 513 KB a row, allows 48 rows in flight: half of L2. On 48
  multiprocessors the 57 instructions a logit (compiled, both sweeps, no softcap) take 5.3 ps at 1.755 GHz.
  There 10 bytes of memory take 3.0 ps at 3.35 TB/s. On all 132 the instructions take 1.9 ps.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from burst_mcore.loss.terms import LSE, Terms
from burst_mcore.loss.vocabulary import Vocabulary

BLOCK, WARPS = 4096, 8
"""Columns of a block, and warps of a program; not tuned: no speed was measured."""


@triton.jit
def _scaled(x, softcap, temperature, SOFTCAP: tl.constexpr):
    if SOFTCAP:
        x = softcap * (2.0 * tl.sigmoid(2.0 * x / softcap) - 1.0)
    return x / temperature


@triton.jit
def _row_gradient(
    logits, out, columns, row, label, lse, scale, softcap, temperature, z_loss, smoothing, vocabulary, size,
    logits_row, out_row, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute one row of scale dl/dlogits; the label's column also goes to `columns`."""
    row_scale = tl.load(scale + row) / temperature
    factor = row_scale * (1.0 + 2.0 * z_loss * lse)
    spread = row_scale * smoothing / vocabulary
    at_label = 0.0
    for first in range(0, size, BLOCK):
        j = first + tl.arange(0, BLOCK)
        x = tl.load(logits + row * logits_row + j, mask=j < size, other=0.0).to(tl.float32)
        z = _scaled(x, softcap, temperature, SOFTCAP)
        g = tl.exp(z - lse) * factor - spread
        g = tl.where(j == label, g - row_scale * (1.0 - smoothing), g)
        if SOFTCAP:
            t = z * temperature / softcap
            g = g * (1.0 - t * t)
        at_label += tl.sum(tl.where(j == label, g, 0.0), 0)
        tl.store(out + row * out_row + j, g.to(out.dtype.element_ty), mask=j < size)
    tl.store(columns + row, at_label)


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["labels"])
def statistics_kernel(
    logits, labels, found, scale, out, columns, softcap, temperature, z_loss, smoothing, vocabulary, size,
    tokens, logits_row, out_row, SOFTCAP: tl.constexpr, GRADIENTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute one row's statistics (online softmax), and its gradient if GRADIENTS; `out` may be `logits`.

    With base the running maximum: powers = sum exp(z - base), weighted = sum (z - base) exp(z - base), so
    lse = base + log(powers), and the entropy is log(powers) - weighted / powers.
    """
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    maximum, powers, weighted, total, label_logit = -float("inf"), 0.0, 0.0, 0.0, 0.0
    for first in range(0, size, BLOCK):
        j = first + tl.arange(0, BLOCK)
        x = tl.load(logits + row * logits_row + j, mask=j < size, other=0.0).to(tl.float32)
        z = _scaled(x, softcap, temperature, SOFTCAP)
        z = tl.where(j < size, z, -float("inf"))
        larger = tl.maximum(maximum, tl.max(z, 0))
        base = tl.where(larger == -float("inf"), 0.0, larger)
        before = tl.exp(maximum - base)
        p = tl.exp(z - base)
        finite = tl.where(j < size, z, 0.0)
        weighted = tl.where(before == 0.0, 0.0, before * (weighted + (maximum - base) * powers))
        weighted += tl.sum(tl.where(p == 0.0, 0.0, p * (finite - base)), 0)
        powers = powers * before + tl.sum(p, 0)
        total += tl.sum(finite, 0)
        label_logit += tl.sum(tl.where(j == label, finite, 0.0), 0)
        maximum = larger
    base = tl.where(maximum == -float("inf"), 0.0, maximum)
    lse = base + tl.log(powers)
    tl.store(found + row, lse)
    tl.store(found + tokens + row, label_logit)
    tl.store(found + 2 * tokens + row, total)
    tl.store(found + 3 * tokens + row, maximum)
    tl.store(found + 4 * tokens + row, tl.log(powers) - weighted / tl.where(powers == 0.0, 1.0, powers))
    if GRADIENTS:
        _row_gradient(
            logits, out, columns, row, label, lse, scale, softcap, temperature, z_loss, smoothing, vocabulary,
            size, logits_row, out_row, SOFTCAP, BLOCK,
        )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["labels"])
def gradients_kernel(
    logits, labels, lse, scale, out, columns, softcap, temperature, z_loss, smoothing, vocabulary, size,
    logits_row, out_row, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute one row's gradient, from lse over the columns of all ranks."""
    row = tl.program_id(0).to(tl.int64)
    _row_gradient(
        logits, out, columns, row, tl.load(labels + row), tl.load(lse + row), scale, softcap, temperature,
        z_loss, smoothing, vocabulary, size, logits_row, out_row, SOFTCAP, BLOCK,
    )  # fmt: skip


def logits_to_gradients(
    logits: Tensor,
    labels: Tensor,
    label_logits: Tensor | None,
    scale: Tensor | None,
    terms: Terms,
    vocabulary: Vocabulary,
    out: Tensor,
    metrics: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`rows.logits_to_gradients` in float32; `label_logits` must be None: GPUs have float32 logits."""
    assert label_logits is None
    tokens, size = logits.shape
    statistics = torch.empty((5, tokens), dtype=torch.float32, device=logits.device)
    columns = torch.zeros(tokens, dtype=torch.float32, device=logits.device)
    numbers = (terms.softcap or 1.0, terms.temperature, terms.z_loss, terms.label_smoothing, vocabulary.size)
    flags: dict[str, Any] = {
        "SOFTCAP": terms.softcap is not None,
        "BLOCK": min(BLOCK, triton.next_power_of_2(max(16, size))),
        "num_warps": WARPS,
    }
    strides = logits.stride(0), out.stride(0)
    alone = scale is not None and vocabulary.group is None
    on_device = torch.cuda.device(logits.device) if logits.is_cuda else nullcontext()
    with on_device:
        if tokens:
            scale_or_unused = columns if scale is None else scale  # a placeholder without gradients
            statistics_kernel[(tokens,)](
                logits, labels, statistics, scale_or_unused, out, columns, *numbers, size, tokens, *strides,
                GRADIENTS=alone, **flags,
            )  # fmt: skip
    statistics = vocabulary.whole(statistics)
    if scale is None:
        return statistics, None
    with on_device:
        if tokens and not alone:
            lse = statistics[LSE].contiguous()
            gradients_kernel[(tokens,)](
                logits, labels, lse, scale, out, columns, *numbers, size, *strides, **flags
            )
    return statistics, columns
