"""Layers that mix tokens by a recurrence, by a short convolution, or by both: sizes, work and bytes.

Multiply-adds of a kernel are its products': within chunks, and with the state of each chunk. Bytes
follow from the tensors that fla, mamba-ssm and causal-conv1d save for backward. No GPU has counted them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

CHUNK = 64
"""Tokens of a chunk of delta rules, in fla and in transformers."""


class RecurrenceSizes(NamedTuple):
    """The recurrence of a layer; work and bytes are per token."""

    kernel: int = 0
    """Multiply-adds of a kernel call."""
    state: int = 0
    """Elements of a state."""
    decay: int = 0
    """Elements of A."""
    run: int = 0
    """Elements in 16 bits that each call saves for backward."""
    maps: int = 0
    """Multiply-adds of the call that makes A, if A is a matrix."""
    doubled: int = 0
    """Elements in 16 bits that a doubling moves, in a scan by doublings: log2 of its tokens."""


@dataclass(frozen=True)
class Mixer:
    """Layers of one kind; all numbers are for one layer."""

    matrices: int
    """Parameters that multiply a token."""
    others: int
    """Other parameters: of the convolution, of norms, decays and biases."""
    kept: int
    """Elements in 16 bits per token that are saved around the kernel for backward."""
    channels: int = 0
    width: int = 0
    """Tokens in the window of the channels' convolution, with the current token; 0: no convolution."""
    recurrence: RecurrenceSizes = field(default_factory=RecurrenceSizes)
    kind: str = ""
    layers: int = 0

    @property
    def multiplied(self) -> int:
        """Multiply-adds per token, without recomputation: of matrices, convolution and kernel."""
        return self.matrices + self.width * self.channels + self.recurrence.kernel


NONE = Mixer(0, 0, 0)
"""The mixer of models whose layers all attend."""


def _delta(heads: int, key_dim: int, value_dim: int, run: int) -> RecurrenceSizes:
    """Delta rules: five products within a chunk, three with the state."""
    of_keys, of_values = (CHUNK * (3 * key_dim + 2 * dim) + 3 * key_dim * dim for dim in (key_dim, value_dim))
    state, decay = heads * key_dim * value_dim, heads * key_dim**2
    return RecurrenceSizes(heads * of_values, state, decay, run, heads * of_keys)


def _gated_delta(hidden: int, keys: int, heads: int, key_dim: int, value_dim: int, width: int) -> Mixer:
    """Qwen3-Next, Qwen3.5, OLMo-Hybrid; keys: heads of queries and of keys."""
    k, v = keys * key_dim, heads * value_dim
    run = 2 * k + v + heads * CHUNK  # normalised queries and keys, output, the inverse within chunks
    matrices = hidden * (2 * k + 3 * v + 2 * heads)
    others = width * (2 * k + v) + 2 * heads + value_dim
    saved_elements = 2 * (2 * k + v) + 2 * v  # input and result of the convolution, gate, result of the norm
    return Mixer(matrices, others, saved_elements, 2 * k + v, width, _delta(heads, key_dim, value_dim, run))


def _kimi_delta(hidden: int, heads: int, dim: int, width: int, full: bool) -> Mixer:
    """Kimi Linear and Bailing, with decays of each row; full: whether gates are of full rank."""
    inner = heads * dim
    run = 5 * inner + 2 * heads * CHUNK  # as above, with decays in 32 bits and two matrices
    gates = hidden * inner if full else dim * (hidden + inner)
    matrices = hidden * (4 * inner + heads) + 2 * gates
    others = 3 * width * inner + dim + heads + inner
    return Mixer(matrices, others, 8 * inner, 3 * inner, width, _delta(heads, dim, dim, run))


def _mamba2(
    hidden: int, heads: int, dim: int, columns: int, groups: int, width: int, chunk: int,
    bias: bool, biases: bool, norm: bool,
) -> Mixer:  # fmt: skip
    """Nemotron-H, Granite 4, Bamba, Falcon-H1, Zamba 2; groups: of B and C, bias: of the convolution.

    biases: of the matrices, norm: whether outputs have a norm.
    """
    inner, channels = heads * dim, heads * dim + 2 * groups * columns
    matrices = hidden * (2 * inner + channels + heads)
    others = channels * (width + bias) + inner * norm + biases * (hidden + inner + channels + heads)
    kernel = groups * chunk * columns + heads * (chunk * dim + 2 * dim * columns)
    run = inner + 4 * heads  # output; steps and decays in 32 bits
    recurrence = RecurrenceSizes(kernel, inner * columns, heads, run)
    return Mixer(matrices, others + 3 * heads, 2 * channels + 2 * inner, channels, width, recurrence)


def _mamba1(
    hidden: int, inner: int, columns: int, rank: int, width: int, bias: bool, biases: bool, norm: bool
) -> Mixer:
    """Mamba, Falcon Mamba, Jamba, Zamba; columns: of a state, rank: of the steps, norm: of steps, B and C.

    A call takes 9 FLOPs per element of the state (state-spaces/mamba#110), on copies in float32.
    """
    products = rank + 2 * columns
    others = inner * (width + bias + columns + 2) + norm * products + biases * (hidden + 2 * inner)
    run = 7 * inner + 4 * columns  # u, steps before and behind softplus, B and C in 32 bits; output
    recurrence = RecurrenceSizes(9 * inner * columns // 2, inner * columns, inner * columns, run)
    matrices = inner * (3 * hidden + rank + products)
    # Input and result of the convolution, steps, gate, its SiLU, the gated output; the product of steps, B, C
    return Mixer(matrices, others, 6 * inner + products, inner, width, recurrence)


def _lightning(hidden: int, heads: int, dim: int) -> Mixer:
    """MiniMax, by `linear_attention`: it keeps four float32 matrices per head for each chunk of 256.

    Also in float32 are q, k, v, a product of gates with q, a product with k, and the state before a chunk.
    """
    inner, chunk = heads * dim, 256
    run = 11 * inner + heads * (8 * chunk + 2 * dim**2 // chunk)
    recurrence = RecurrenceSizes(2 * inner * (chunk + dim), inner * dim, heads, run)
    # q, k and v before and behind SiLU; result of the norm, gate, its sigmoid, the gated output
    return Mixer(5 * hidden * inner, inner, 10 * inner, recurrence=recurrence)


def _linear_unit(hidden: int, heads: int, width: int, inner: int) -> Mixer:
    """RecurrentGemma, by a scan of doublings over h and a in float32: 13 reads and writes of a channel each.

    heads: blocks of the matrices of gates.
    """
    matrices = 3 * hidden * inner + 2 * inner**2 // heads
    recurrence = RecurrenceSizes(inner, inner, inner, 4 * inner, doubled=26 * inner)  # a, h, output
    # Gate, GELU, product; input and result of the convolution; gates, a, its logarithm and root, inputs
    return Mixer(matrices, hidden + inner * (width + 6), 12 * inner, inner, width, recurrence)


def _convolution(hidden: int, width: int, bias: bool) -> Mixer:
    """LFM2; saved are three products, the first gated, the convolution's result, and its gated result."""
    return Mixer(4 * hidden**2, hidden * (width + 5 * bias), 6 * hidden, hidden, width)


BUILD: dict[str, Callable[..., Mixer]] = {
    "gated delta rule": _gated_delta,
    "Kimi delta attention": _kimi_delta,
    "Mamba 1": _mamba1,
    "Mamba 2": _mamba2,
    "lightning attention": _lightning,
    "linear unit": _linear_unit,
    "short convolution": _convolution,
}
"""The function that makes a mixer from the sizes in families.json, by kind."""
