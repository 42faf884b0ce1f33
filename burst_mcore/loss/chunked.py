"""The fused LM head and loss over chunks of tokens, with one chunk's logits in memory at a time.

BurstEngine (SC'25), "sequence-level fusion of LM head and loss", algorithm 3. A chunk's logits z = h W^T are
overwritten by their gradient, dl_i/dz_ij = p_ij - [j = y_i], and dl_i/dh_i = sum_j dl_i/dz_ij W_j and
dl_i/dW_j = dl_i/dz_ij h_i follow at once: three products a token. (The paper prints + for the minus.)
u_i = dl_i/dh_i is kept unweighted, so that g_i u_i is exact for every upstream gradient g_i; the weight's
gradient is summed with the expected weights w_i, g_i = c w_i. Tokens with another g_i are repaired: their
logits are computed again, and (g_i - c w_i) dl_i/dW is added, at two products each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from burst_mcore.dtypes import wide
from burst_mcore.loss.products import TILE, Products, products_for
from burst_mcore.loss.rows import rows_for
from burst_mcore.loss.terms import ENTROPY, LABEL, LARGEST, LSE, Terms, losses
from burst_mcore.loss.vocabulary import Vocabulary

CHUNK_BYTES = 2**28
"""The approximate maximum size of a chunk's logits on a CPU, with chunk_tokens="auto"."""
CHUNK_SHARE = 16
"""The divisor of a GPU's memory for that size, where ranks share the vocabulary: they need equal chunks, and
their free memory differs. Else the size is a quarter of the free memory, as a power of two, so that it seldom
changes between steps, and at most twice as large. A larger chunk is faster, since each chunk reads and writes
the weight's gradient once: 8 V d bytes for 6 T V d operations. If a byte of memory takes the time of 200
operations (Hopper), that is 267 / T of the products' time: 5 % at 5500 tokens, 2 % at 13,000. An estimate,
not measured."""
ALIGNED = 8
"""The alignment of rows of logits, in elements. Fast products and loads need 16 bytes, and a vocabulary may
be odd (50257, or a rank's part)."""


@dataclass(frozen=True)
class Head:
    """An LM head and the terms of its loss, constant over chunks."""

    weight: Tensor
    bias: Tensor | None
    terms: Terms
    vocabulary: Vocabulary
    ignore_index: int
    chunk_tokens: int
    grad_weight_dtype: torch.dtype
    valid_tokens: int
    """The number of labels that are not ignored."""
    exact: bool = False
    """Logits are in at least float32, see `products_for`."""

    @property
    def products(self) -> Products:
        return products_for(self.weight.dtype, self.weight.device, self.terms, self.exact)

    def chunks(self, valid: Tensor) -> Iterator[slice | Tensor]:
        """Yield the places of each chunk's tokens, all valid, without a wait for the device."""
        places = None
        if self.valid_tokens < len(valid):
            places = torch.nonzero_static(valid, size=self.valid_tokens)[:, 0]
        for first in range(0, self.valid_tokens, self.chunk_tokens):
            rows = slice(first, min(first + self.chunk_tokens, self.valid_tokens))
            yield rows if places is None else places[rows]


class Needs(NamedTuple):
    """The requested gradients, and whether metrics are requested."""

    hidden: bool
    weight: bool
    bias: bool
    metrics: bool

    @property
    def any_gradient(self) -> bool:
        return self.hidden or self.weight or self.bias


class Weights(NamedTuple):
    """Weights as mantissa * power, so that each factor of dlogits^T hidden is rounded once.

    Mantissas, from 1 to 2, scale dlogits before the rounding to 16 bits; powers of two, 0 for a weight of 0,
    scale hidden states exactly.
    """

    mantissa: Tensor
    power: Tensor

    @classmethod
    def of(cls, weights: Tensor) -> Weights:
        mantissa = torch.where(weights == 0, 1.0, 2 * torch.frexp(weights)[0])
        return cls(mantissa, (weights / mantissa).nan_to_num(nan=1.0))  # exact; inf and NaN: mantissas


def chunk_bytes(device: torch.device, *, alone: bool) -> int:
    """Return the maximum bytes of a chunk's logits; alone: no other rank needs the same size."""
    if device.type != "cuda":
        return CHUNK_BYTES
    share = int(torch.cuda.get_device_properties(device).total_memory) // CHUNK_SHARE
    if not alone:
        return share
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by torch, unused
    free = int(torch.cuda.mem_get_info(device)[0]) + unused
    return min(1 << (free // 4).bit_length() >> 1, 2 * share)


def automatic_chunk(tokens: int, width: int, products: Products, most_bytes: int) -> int:
    """Return the tokens of a chunk: even chunks of at most `most_bytes`, or two tiles.

    There are always several chunks: memory never grows with tokens x vocabulary. All but the last have whole
    tiles, unless one tile would hold all tokens.

    Args:
        tokens: number of tokens that have a loss.
        width: columns of the logits, or the hidden size, if larger: chunks have buffers of both.
        most_bytes: the maximum size of a chunk's logits, unless two tiles are larger.
    """
    itemsize = products.logits.itemsize
    itemsize += products.gradients.itemsize if products.gradients != products.logits else 0
    limit = most_bytes // max(1, width * itemsize)
    limit = max(2, limit // TILE) * TILE
    chunks = max(2, -(-tokens // limit))
    even = max(1, -(-tokens // chunks))
    whole = -(-even // TILE) * TILE
    return whole if whole < tokens else even


def forward(
    hidden: Tensor, labels: Tensor, weights: Tensor | None, head: Head, needs: Needs
) -> tuple[Tensor, Tensor | None, Gradients]:
    """Return losses [tokens], metrics [3, tokens] if requested, and the requested gradients.

    Metrics: the label's log-probability, entropy, whether the label has the maximum. Chunks have only valid
    tokens: tokens with ignored labels are not computed, and all their numbers are 0.

    Args:
        hidden: [tokens, d].
        labels: [tokens], of the whole vocabulary, or the ignored index.
        weights: [tokens] in at least float32: expected upstream gradients, up to a scalar. None: all equal.
    """
    tokens, vocabulary, full = len(hidden), head.vocabulary, wide(hidden.dtype)
    valid = labels != head.ignore_index
    columns = vocabulary.columns(labels, head.ignore_index)
    chunk = LogitsChunk(head, needs.any_gradient)
    split = None if weights is None else Weights.of(weights)
    token_losses = torch.zeros(tokens, dtype=full, device=hidden.device)
    metrics = torch.zeros((3, tokens), dtype=full, device=hidden.device) if needs.metrics else None
    gradients = Gradients(hidden, head, needs)
    scale = torch.ones_like(token_losses) if split is None else split.mantissa
    for rows in head.chunks(valid):
        of_chunk = scale[rows] if needs.any_gradient else None
        statistics = chunk.run(hidden[rows], columns[rows], of_chunk, needs.metrics)
        token_losses[rows] = losses(statistics, head.terms, vocabulary.size)
        if metrics is not None:
            z = statistics[LABEL]
            correct = (z >= statistics[LARGEST]).to(full)
            metrics[:, rows] = torch.stack([z - statistics[LSE], statistics[ENTROPY], correct])
        gradients.add(chunk, rows, None if split is None else split.power[rows])
    return token_losses, metrics, gradients


class Gradients:
    """The requested gradients of hidden states, weight and bias, summed over chunks."""

    def __init__(self, hidden: Tensor, head: Head, needs: Needs) -> None:
        self.hidden: Tensor | None = None
        """[tokens, d]: m_i u_i, with u_i = dl_i/dh_i and m_i the mantissa of token i's weight: rounded to 16
        bits only once. If ranks share the vocabulary, this rank's summand, in at least float32."""
        self.weight: Tensor | None = None
        """sum_i w_i dl_i/dW [v, d]."""
        self.bias: Tensor | None = None
        """sum_i w_i dl_i/db [v]."""
        full = wide(hidden.dtype)
        if needs.hidden:  # summands of ranks are rounded once, after the sum
            dtype = hidden.dtype if head.vocabulary.group is None else full
            self.hidden = torch.zeros_like(hidden, dtype=dtype)
        self._is_fresh = head.valid_tokens > 0
        """Whether the weight's gradient is uninitialised: the first chunk sets it."""
        if needs.weight:
            make = torch.empty_like if self._is_fresh else torch.zeros_like
            self.weight = make(
                head.weight, dtype=head.grad_weight_dtype, memory_format=torch.contiguous_format
            )
        if needs.bias and head.bias is not None:
            self.bias = torch.zeros_like(head.bias, dtype=full)

    def add(self, chunk: LogitsChunk, rows: slice | Tensor, power: Tensor | None = None) -> None:
        """Add the gradients of a chunk of the tokens `rows`. power: of the tokens' weights."""
        if self.hidden is not None:
            out = self.hidden[rows] if isinstance(rows, slice) else torch.empty_like(self.hidden[: len(rows)])
            chunk.hidden_gradient(out)
            if not isinstance(rows, slice):
                self.hidden[rows] = out
        chunk.add_to(self.weight, self.bias, power, fresh=self._is_fresh)
        self._is_fresh = False


def repair(
    d_weight: Tensor | None,
    d_bias: Tensor | None,
    hidden: Tensor,
    labels: Tensor,
    missing: Tensor,
    head: Head,
) -> None:
    """Add sum_i missing_i dl_i/dW to d_weight, likewise for the bias: two products a token.

    Args:
        d_weight, d_bias: [v, d] and [v].
        hidden, labels: [tokens, d] and [tokens], of the tokens to repair; `head` is of these tokens, too.
        missing: [tokens] in at least float32, of any sign.
    """
    alpha = 2.0 ** (torch.frexp(missing.abs().max())[1].item() - 1)
    # Divide by alpha: float16 holds hidden states times 1, not times 1e-6. A tensor divides exactly; for a
    # Python number CUDA multiplies by its inverse.
    missing = missing / torch.full_like(missing[:1], alpha)
    columns = head.vocabulary.columns(labels, head.ignore_index)
    chunk = LogitsChunk(head, gradients=True)
    split = Weights.of(missing)
    for rows in head.chunks(labels != head.ignore_index):
        chunk.run(hidden[rows], columns[rows], split.mantissa[rows], False)
        chunk.add_to(d_weight, d_bias, split.power[rows], alpha=alpha)


class LogitsChunk:
    """One chunk's logits, overwritten by their gradient, in memory that all chunks share."""

    def __init__(self, head: Head, gradients: bool) -> None:
        self._head, self._products = head, head.products
        self._rows = rows_for(head.weight)
        recipe = self._products
        rows = recipe.padded(min(head.valid_tokens, head.chunk_tokens))
        columns = head.vocabulary.rows
        self._all_logits = _aligned(rows, columns, recipe.logits, head.weight.device)
        self._all_gradients = self._all_logits
        if gradients and recipe.gradients != recipe.logits:
            self._all_gradients = _aligned(rows, columns, recipe.gradients, head.weight.device)

    def logits(self, hidden: Tensor, columns: Tensor) -> Tensor:
        """Return the logits [tokens, v]; `gradients` for their gradients may be the same memory."""
        head, recipe, tokens = self._head, self._products, len(hidden)
        padded = recipe.padded(tokens)
        self._padded_gradients, self.gradients = self._all_gradients[:padded], self._all_gradients[:tokens]
        self._hidden, self._labels = hidden, columns
        self._columns = columns
        recipe.first(hidden, head.weight, head.bias, self._all_logits[:padded])
        return self._all_logits[:tokens]

    def run(self, hidden: Tensor, columns: Tensor, scale: Tensor | None, metrics: bool) -> Tensor:
        """Return statistics [5, tokens] of logits; with `scale` compute gradients scale_i dl_i/dlogits."""
        head, recipe = self._head, self._products
        logits = self.logits(hidden, columns)
        label_logits = recipe.of_labels(hidden, head.weight, head.bias, columns)
        scale = None if scale is None else scale * recipe.gain
        statistics: Tensor
        statistics, self._columns = self._rows(
            logits, columns, label_logits, scale, head.terms, head.vocabulary, self.gradients, metrics
        )
        return statistics

    def hidden_gradient(self, out: Tensor) -> None:
        """out = dlogits weight."""
        self._products.second(self._padded_gradients, self._columns, self._labels, self._head.weight, out)

    def add_to(
        self,
        d_weight: Tensor | None,
        d_bias: Tensor | None,
        power: Tensor | None,
        alpha: float = 1.0,
        fresh: bool = False,
    ) -> None:
        """d_weight += alpha (dlogits)^T (power hidden), d_bias += alpha (dlogits)^T power.

        A fresh d_weight is uninitialised.
        """
        dlogits, columns, labels, hidden = self.gradients, self._columns, self._labels, self._hidden
        if d_weight is not None:
            if power is not None:
                hidden = (hidden * power[:, None]).to(self._products.gradients)
            self._products.third(dlogits, columns, labels, hidden, d_weight, alpha, fresh)
        if d_bias is not None:
            power = d_bias.new_ones(len(hidden)) if power is None else power.to(d_bias.dtype)
            self._products.bias(dlogits, columns, labels, alpha * power, d_bias)


def _aligned(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialised matrix whose rows begin at multiples of ALIGNED elements.

    The gaps between rows hold zeros. With an odd number of columns, oneDNN's products in bfloat16 read one
    element of the gap and multiply it by zero (CPUs with AMX, torch 2.13), which makes NaN of NaN.
    """
    whole = torch.empty((rows, -(-columns // ALIGNED) * ALIGNED), dtype=dtype, device=device)
    whole[:, columns:].zero_()
    return whole[:, :columns]
