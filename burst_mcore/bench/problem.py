"""What is measured: the shapes of one attention call, and its tensors."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from burst_mcore.attention.mask import Mask

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One attention layer over the whole sequence. Raises ValueError where a field is not legal."""

    seq: int
    """Tokens in the global sequence."""
    heads: int
    kv_heads: int
    head_dim: int
    batch: int = 1
    causal: bool = True
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, int) and not isinstance(value, bool) and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads must divide heads, got {self.kv_heads} and {self.heads}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")

    @property
    def mask(self) -> Mask:
        return Mask.causal() if self.causal else Mask.full()

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(q, k, v, dout) of the whole sequence, the same on every rank."""
        generator = torch.Generator().manual_seed(0)

        def draw(heads: int) -> Tensor:
            shape = (self.batch, self.seq, heads, self.head_dim)
            return torch.randn(shape, generator=generator).to(DTYPES[self.dtype])

        return draw(self.heads), draw(self.kv_heads), draw(self.kv_heads), draw(self.heads)
