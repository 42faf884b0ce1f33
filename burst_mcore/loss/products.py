"""The three matrix products of a chunk of tokens, with the device's best precision for their dtype.

First z = h W^T (logits), second dh = dz W, third dW += dz^T h, in at least float32. A GPU multiplies 16-bit
numbers into float32, the third by apex's extension if installed. A CPU rounds products in bfloat16 to
bfloat16: there the labels' columns, the only large entries of dz, are separate, in float32. CPUs multiply
float16 as float32, which is faster.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from burst_mcore.dtypes import wide
from burst_mcore.loss.terms import Terms
from burst_mcore.packages import loaded, missing

VOCABULARY_BLOCK = 4096
"""Rows of the weight in one product, if a product needs separate memory."""
TILE = 128
"""The multiple of tokens with the fastest products: measured on a CPU; GPUs have tiles of this size."""
LINE = 16
"""The multiple of tokens with the fastest 16-bit products on a CPU."""
PADDED_FROM = 512
"""The minimum tokens of chunks that are padded to a multiple of LINE, at most 3 % more."""
CACHED_ROWS = 512
"""Rows of the weight's gradient in one step, if a step copies them: the copies stay in cache."""


@dataclass(frozen=True)
class Products:
    """The dtypes and options of the products; see `products_for`."""

    logits: torch.dtype
    """Dtype of the logits."""
    gradients: torch.dtype
    """Dtype of dlogits, the input of the other two products."""
    separates_labels: bool = False
    """Whether the labels' columns are not in dlogits, but separate, in float32."""
    gain: float = 1.0
    """A factor of dlogits, by which their products are divided: float16 has no small numbers."""

    def padded(self, tokens: int) -> int:
        """Return the tokens of the first two products, padding included.

        In bfloat16 on a CPU 1796 tokens take 1.3 times as long as 1808; in float32 there is no such effect.
        """
        return -(-tokens // LINE) * LINE if self.separates_labels and tokens >= PADDED_FROM else tokens

    def first(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """Set out = hidden weight^T + bias, [tokens, v]; further rows of `out` are padding."""
        if len(out) > len(hidden):
            hidden = functional.pad(hidden, (0, 0, 0, len(out) - len(hidden)))
        if self.logits == weight.dtype and bias is not None:
            torch.addmm(bias, hidden, weight.t(), out=out)  # rounded once
            return
        if self.logits == weight.dtype:
            torch.mm(hidden, weight.t(), out=out)
        elif self.logits == self.gradients:  # as float32
            wider = hidden.to(self.logits)
            for block in blocks(weight):
                torch.mm(wider, weight[block].to(self.logits).t(), out=out[:, block])
        else:
            torch.mm(hidden, weight.t(), out_dtype=self.logits, out=out)
        if bias is not None:
            out += bias

    def of_labels(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor | None:
        """Return the labels' logits [tokens] in float32, if separate; 0 if another rank has the label."""
        if not self.separates_labels:
            return None
        if len(weight) == 0:
            return torch.zeros(len(labels), dtype=wide(weight.dtype), device=weight.device)
        y = labels.clamp(min=0)
        logits: Tensor = torch.linalg.vecdot(hidden.to(wide(hidden.dtype)), weight[y].to(wide(weight.dtype)))
        if bias is not None:
            logits = logits + bias[y]
        return logits.where(labels >= 0, 0.0)

    def second(self, dlogits: Tensor, columns: Tensor, labels: Tensor, weight: Tensor, out: Tensor) -> None:
        """Set out = dlogits weight, [tokens, d], in the dtype of out; further rows of dlogits are padding."""
        if self.gradients != weight.dtype:
            total = torch.zeros(out.shape, dtype=self.gradients, device=out.device)
            for block in blocks(weight):
                torch.addmm(total, dlogits[:, block], weight[block].to(self.gradients), out=total)
        elif dlogits.is_cuda and (out.dtype != weight.dtype or self.gain != 1.0):
            total = torch.mm(dlogits, weight, out_dtype=torch.float32)
        elif self.separates_labels:
            # A CPU is 5 % faster at weight^T dlogits^T of whole tiles; of 1808 tokens it takes 1.4 x.
            turned = len(dlogits) % TILE == 0
            product = torch.mm(weight.t(), dlogits.t()).t() if turned else torch.mm(dlogits, weight)
            total = torch.empty_like(out, dtype=wide(weight.dtype)).copy_(product[: len(out)])
            if len(weight):
                total.addcmul_(columns[:, None], weight[labels.clamp(min=0)].to(total.dtype))
        else:
            torch.mm(dlogits, weight, out=out)
            total = out
        if self.gain != 1.0:
            total.div_(self.gain)
        if total is not out:
            out.copy_(total)

    def third(
        self,
        dlogits: Tensor,
        columns: Tensor,
        labels: Tensor,
        hidden: Tensor,
        out: Tensor,
        alpha: float = 1.0,
        fresh: bool = False,
    ) -> None:
        """Out += alpha dlogits^T hidden, [v, d] in at least float32; a fresh `out` is uninitialised."""
        alpha, beta = alpha / self.gain, 0.0 if fresh else 1.0
        if self.gradients == out.dtype:
            torch.addmm(out, dlogits.t(), hidden.to(out.dtype), alpha=alpha, beta=beta, out=out)
        elif dlogits.is_cuda and out.dtype == torch.float32:
            apex = loaded("fused_weight_gradient_mlp_cuda", "apex")
            plain = dlogits.is_contiguous() and hidden.is_contiguous()  # apex has neither strides nor factors
            if missing(apex) is None and plain and (alpha, beta) == (1.0, 1.0):
                apex.wgrad_gemm_accum_fp32(hidden, dlogits, out)
                return
            torch.addmm(out, dlogits.t(), hidden, out_dtype=out.dtype, alpha=alpha, beta=beta, out=out)
        else:
            for block in blocks(out):
                product = torch.mm(dlogits[:, block].t(), hidden.to(dlogits.dtype))
                if fresh:
                    out[block] = product if alpha == 1.0 else product.mul_(alpha)
                else:
                    for part in blocks(product, CACHED_ROWS):  # add_ first copies the part to float32
                        out[block][part].add_(product[part], alpha=alpha)
        if self.separates_labels:
            is_local = labels >= 0
            rows = columns[is_local, None] * hidden[is_local]
            out.index_add_(0, labels[is_local], rows.to(out.dtype), alpha=alpha)

    def bias(self, dlogits: Tensor, columns: Tensor, labels: Tensor, weights: Tensor, out: Tensor) -> None:
        """Out += dlogits^T weights, [v] in at least float32."""
        weights = weights / self.gain
        for block in blocks(out):
            out[block] += weights @ dlogits[:, block].to(weights.dtype)
        if self.separates_labels:
            is_local = labels >= 0
            out.index_add_(0, labels[is_local], (columns * weights)[is_local])


def products_for(dtype: torch.dtype, device: torch.device, terms: Terms, exact: bool = False) -> Products:
    """Return the products for hidden states and weights of this dtype on this device.

    exact: logits are in at least float32; so are gradients, except bfloat16 on CUDA.
    """
    if wide(dtype) == dtype or (exact and (device.type != "cuda" or dtype != torch.bfloat16)):
        return Products(wide(dtype), wide(dtype))
    if device.type == "cuda":
        largest = (1.0 + 2.0 * 64.0 * terms.z_loss) / terms.temperature  # of dlogits, about: lse <= 64
        gain = 2.0 ** math.floor(math.log2(2.0**12 / largest)) if dtype == torch.float16 else 1.0
        return Products(torch.float32, dtype, gain=gain)
    if dtype == torch.float16:
        return Products(torch.float32, torch.float32)
    return Products(dtype, dtype, separates_labels=True)


def blocks(rows: Tensor, step: int = VOCABULARY_BLOCK) -> Iterator[slice]:
    """Return slices of `step` rows of the vocabulary."""
    return (slice(i, i + step) for i in range(0, len(rows), step))
