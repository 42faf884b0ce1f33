"""What may attend to what, as data over global positions."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

KINDS = ("causal", "full")


@dataclass(frozen=True)
class Mask:
    """A mask over the global sequence. Build it with `Mask.causal()` or `Mask.full()`."""

    kind: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown mask {self.kind!r}; legal: {', '.join(map(repr, KINDS))}")

    @classmethod
    def causal(cls) -> Mask:
        """A query sees the keys at its own and at earlier positions."""
        return cls("causal")

    @classmethod
    def full(cls) -> Mask:
        """Every query sees every key."""
        return cls("full")

    def __str__(self) -> str:
        return self.kind

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        """Bool [len(q), len(k)]: may the query at global position q see the key at k (the definition)."""
        if self.kind == "full":
            return (q[:, None] >= 0) & (k[None, :] >= 0)
        return q[:, None] >= k[None, :]
