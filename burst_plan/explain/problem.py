"""The shapes and tensors of one attention call, for predictions and measurements."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from burst_mcore.attention.kernels.kernel import Problem as KernelProblem
from burst_mcore.dtypes import TRAINED
from burst_mcore.mask import Mask
from burst_plan.machines import HEAD_DIMS
from burst_plan.words import mask_of, shortened

DTYPES = TRAINED
MOST_HEADS = 2**16
"""Most heads: the least traffic is computed head by head."""


@dataclass(frozen=True, kw_only=True)
class LayerProblem:
    """An attention layer over the whole sequence. Raises ValueError for an illegal field."""

    seq: int
    """Tokens in the global sequence."""
    heads: int
    kv_heads: int
    head_dim: int
    batch: int = 1
    mask: str = "causal"
    """In the syntax of `burst_plan.words`."""
    dtype: str = "float32"
    value_dim: int | None = None
    """The size of a head of V; None: as of Q and K."""
    latent: tuple[int, int] | None = None
    """Multi-latent attention: widths of the latent and of the rope key, which rotate instead of K and V."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, int) and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.heads > MOST_HEADS:
            raise ValueError(f"heads must be at most {MOST_HEADS}, got {self.heads}")
        if (wide := max(self.head_dim, self.of_values)) > HEAD_DIMS[-1]:
            raise ValueError(f"kernels support heads of at most {HEAD_DIMS[-1]}, got one of {wide}")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads must divide heads, got {self.kv_heads} and {self.heads}")
        if self.latent and self.kv_heads != self.heads:
            raise ValueError(
                f"a latent makes K and V of all {self.heads} heads, got kv_heads={self.kv_heads}"
            )
        if self.latent and not 0 < self.latent[1] < self.head_dim:
            raise ValueError(
                f"a rope key is a part of a head of {self.head_dim} numbers, got a latent {self.latent}"
            )
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        mask_of(self.mask, self.seq)

    @property
    def seen(self) -> Mask:
        """The mask over the whole sequence."""
        return mask_of(self.mask, self.seq)

    @property
    def of_values(self) -> int:
        """The size of a head of V."""
        return self.value_dim or self.head_dim

    @property
    def on_kernel(self) -> KernelProblem:
        """The problem for the kernel of this machine's CPU."""
        dtype = DTYPES[self.dtype]
        return KernelProblem("cpu", dtype, self.heads, self.kv_heads, self.head_dim, self.of_values)

    def shortened(self, seq: int) -> LayerProblem:
        """Return the same problem over `seq` tokens, with lengths of its mask in proportion."""
        return replace(self, seq=seq, mask=shortened(self.mask, self.seq, seq))

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return (q, k, v, dout) of the whole sequence, the same on every rank."""
        generator = torch.Generator().manual_seed(0)

        def draw(heads: int, width: int) -> Tensor:
            shape = (self.batch, self.seq, heads, width)
            return torch.randn(shape, generator=generator).to(DTYPES[self.dtype])

        q, k = draw(self.heads, self.head_dim), draw(self.kv_heads, self.head_dim)
        return q, k, draw(self.kv_heads, self.of_values), draw(self.heads, self.of_values)


def latent_of(text: str) -> tuple[int, int]:
    """Return the widths of a latent and its rope key, such as 512+64.

    Raises:
        ValueError: another text.
    """
    if (widths := re.fullmatch(r"(0*[1-9]\d*)\+(0*[1-9]\d*)", text)) is None:
        raise ValueError(f"a latent is its width + that of the rope key, such as 512+64, got {text!r}")
    return int(widths[1]), int(widths[2])
