"""Layers that mix tokens by a recurrence, by a short convolution, or by both: sizes, work and bytes.

Multiply-adds of a kernel are those of its products: within chunks, and with the state of each chunk. Bytes
follow from what the kernels of fla, mamba-ssm and causal-conv1d save for backward. No GPU has counted them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

CHUNK = 64
"""Tokens of a chunk of delta rules, in fla and in transformers."""


class RecurrenceSizes(NamedTuple):
    """The recurrence of a layer; work and bytes are those of a token."""

    kernel: int
    """Multiply-adds of a run of the kernel."""
    state: int
    """Numbers of a state."""
    decay: int
    """Numbers of A."""
    run: int
    """Numbers in 16 bits that each run keeps for backward."""
    maps: int = 0
    """Multiply-adds of the run that makes A, where A is a matrix."""


STATELESS = RecurrenceSizes(0, 0, 0, 0)
"""That of a convolution alone."""


@dataclass(frozen=True)
class Mixer:
    """Layers of one kind; all numbers are of a layer."""

    matrices: int
    """Parameters that multiply a token."""
    others: int
    """Other parameters: of the convolution, of norms, decays and biases."""
    kept: int
    """Numbers in 16 bits of a token that wait for backward around the kernel."""
    channels: int = 0
    width: int = 0
    """Tokens that the convolution of the channels reads, its own included; 0: no convolution."""
    recurrence: RecurrenceSizes = STATELESS
    kind: str = ""
    layers: int = 0

    @property
    def multiplied(self) -> int:
        """Multiply-adds of a token: of matrices, convolution and kernel, none of them done twice."""
        return self.matrices + self.width * self.channels + self.recurrence.kernel


NONE = Mixer(0, 0, 0)
"""That of models whose layers all attend."""


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
    kept = 2 * (2 * k + v) + 2 * v  # input and result of the convolution, gate, result of the norm
    return Mixer(matrices, others, kept, 2 * k + v, width, _delta(heads, key_dim, value_dim, run))


def _kimi_delta(hidden: int, heads: int, dim: int, width: int) -> Mixer:
    """Kimi Linear, whose decays are of each row of the state."""
    inner = heads * dim
    run = 5 * inner + 2 * heads * CHUNK  # as above, with decays in 32 bits and two matrices
    matrices = hidden * (4 * inner + heads + 2 * dim) + 2 * dim * inner
    others = 3 * width * inner + dim + heads + inner
    return Mixer(matrices, others, 8 * inner, 3 * inner, width, _delta(heads, dim, dim, run))


def _mamba2(
    hidden: int,
    heads: int,
    dim: int,
    columns: int,
    groups: int,
    width: int,
    chunk: int,
    bias: bool,
    norm: bool,
) -> Mixer:
    """Nemotron-H, Granite 4, Bamba, Falcon-H1; groups: of B and C, norm: whether outputs have one."""
    inner, channels = heads * dim, heads * dim + 2 * groups * columns
    matrices = hidden * (2 * inner + channels + heads)
    others = channels * (width + bias) + 3 * heads + inner * norm
    kernel = groups * chunk * columns + heads * (chunk * dim + 2 * dim * columns)
    run = inner + 4 * heads  # output; steps and decays in 32 bits
    recurrence = RecurrenceSizes(kernel, inner * columns, heads, run)
    return Mixer(matrices, others, 2 * channels + 2 * inner, channels, width, recurrence)


def _convolution(hidden: int, width: int, bias: bool) -> Mixer:
    """LFM2; kept are three products, the first gated, the convolution's result, and that gated."""
    return Mixer(4 * hidden**2, hidden * (width + 5 * bias), 6 * hidden, hidden, width)


BUILD: dict[str, Callable[..., Mixer]] = {
    "gated delta rule": _gated_delta,
    "Kimi delta attention": _kimi_delta,
    "Mamba 2": _mamba2,
    "short convolution": _convolution,
}


def mixer_of(kind: str, layers: int, sizes: Sequence[int]) -> Mixer:
    """Return layers of a kind; sizes: as families.json names them."""
    return replace(BUILD[kind](*sizes), kind=kind, layers=layers)
