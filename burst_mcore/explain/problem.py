"""The shapes and tensors of one attention call, for predictions and measurements."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from burst_mcore.attention.kernels.kernel import Problem as KernelProblem
from burst_mcore.dtypes import TRAINED
from burst_mcore.mask import Mask
from burst_mcore.mask.words import mask_of, shortened

DTYPES = TRAINED


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One attention layer over the whole sequence. Raises ValueError where a field is not legal."""

    seq: int
    """Tokens in the global sequence."""
    heads: int
    kv_heads: int
    head_dim: int
    batch: int = 1
    mask: str = "causal"
    """In the words of `burst_mcore.mask.words`."""
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, int) and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads must divide heads, got {self.kv_heads} and {self.heads}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        mask_of(self.mask, self.seq)

    @property
    def seen(self) -> Mask:
        """What may attend to what: the mask over the whole sequence."""
        return mask_of(self.mask, self.seq)

    @property
    def on_kernel(self) -> KernelProblem:
        """What the kernel of this machine's CPU is asked to serve."""
        dtype = DTYPES[self.dtype]
        return KernelProblem("cpu", dtype, self.heads, self.kv_heads, self.head_dim, self.head_dim)

    def shortened(self, seq: int) -> Problem:
        """Return the same over `seq` tokens, the lengths in its mask in proportion."""
        return replace(self, seq=seq, mask=shortened(self.mask, self.seq, seq))

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return (q, k, v, dout) of the whole sequence, the same on every rank."""
        generator = torch.Generator().manual_seed(0)

        def draw(heads: int) -> Tensor:
            shape = (self.batch, self.seq, heads, self.head_dim)
            return torch.randn(shape, generator=generator).to(DTYPES[self.dtype])

        return draw(self.heads), draw(self.kv_heads), draw(self.kv_heads), draw(self.heads)
