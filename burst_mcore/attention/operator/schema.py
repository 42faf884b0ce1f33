"""The arguments, results and saved tensors of the torch operators, named: their flat schemas in one place.

An operator takes and returns tensors, numbers and strings only. So what a call is asked for travels as one
handle, and each operator's schema is made of the fields of two NamedTuples.
"""

from __future__ import annotations

from typing import NamedTuple, Self

from torch import Tensor


class ForwardArgs(NamedTuple):
    """The arguments of `attention_forward`, in the order of its schema."""

    q: Tensor
    k: Tensor
    """With `up` the latent, [B, S, 1, R]."""
    v: Tensor
    """With `up` the rope key, [B, S, 1, Dr]."""
    sinks: Tensor | None
    options: str
    """The handle of the call's `Options`."""
    needs_gradient: bool
    """Whether a backward will follow."""
    keep: float = 0.0
    """The share of the sequence whose results are kept: see `cut_for`, and `saves`."""
    at_most: bool = False
    """Whether no more than `keep`, of which the least of all ranks counts."""
    tail: list[Tensor] = []  # noqa: RUF012  # a named tuple's: nobody writes to it
    """In a recomputation, the tail that the forward returned, from position `cut` on."""
    cut: int = 0
    up: Tensor | None = None
    """The weights that make K and V of a latent: see `Latent`."""

    @property
    def value_dim(self) -> int:
        """The width of a value, and of a result."""
        if self.up is None:
            return self.v.shape[-1]
        return self.up.shape[2] - (self.q.shape[-1] - self.v.shape[-1])

    @property
    def whole(self) -> bool:
        """Whether all results are kept: as they are, without a copy."""
        return self.keep == 1 and not self.at_most

    @property
    def saves(self) -> bool:
        """Whether a tail is returned, in memory of its own."""
        return self.keep > 0 and not self.whole and not self.tail


class ForwardResults(NamedTuple):
    """The results of `attention_forward`."""

    out: Tensor
    lse: Tensor
    """[B, H, S]; empty under head x ring, unless the call wants it at home."""
    on_ring: list[Tensor]
    """q, k, v and lse as they are on the ring, if heads are shared; else empty: they are as they came."""
    record: Tensor
    """A packed `CallRecord`, on the device of q."""
    tail: list[Tensor]
    """The results after the cut, in memory of their own: see `recompute.replay.SavedTail`."""
    max_logit: Tensor
    """[H]; empty unless the call wants it."""

    def whole(self, *, lse_at_home: bool) -> list[Tensor]:
        """Return all results in the form of a tail, without a copy."""
        max_logit = [self.max_logit] if self.max_logit.numel() else []
        if not self.on_ring:
            return [self.out, self.lse, *max_logit]
        return [self.out, self.on_ring[3], *([self.lse] if lse_at_home else []), *max_logit]


class BackwardArgs(NamedTuple):
    """The arguments of `attention_backward`, in the order of its schema."""

    dout: Tensor
    dlse: Tensor | None
    q: Tensor
    """As on the ring, and so the next three."""
    k: Tensor
    v: Tensor
    ring_lse: Tensor
    sinks: Tensor | None
    out: Tensor
    lse: Tensor
    record: Tensor
    kv_heads: int
    options: str
    latent: Tensor | None = None
    """The rank's own latent, with `up`."""
    up: Tensor | None = None


class BackwardResults(NamedTuple):
    """The results of `attention_backward`; dsinks is empty without sinks, and dup without a latent."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsinks: Tensor
    dup: Tensor


class Saved(NamedTuple):
    """The tensors that autograd saves between forward and backward: so fields of `BackwardArgs`."""

    q: Tensor
    k: Tensor
    v: Tensor
    ring_lse: Tensor
    sinks: Tensor | None
    out: Tensor
    lse: Tensor
    record: Tensor
    latent: Tensor | None
    up: Tensor | None

    @classmethod
    def of(cls, args: ForwardArgs, results: ForwardResults) -> Self:
        """Return the tensors that the backward of a forward needs."""
        q, k, v, ring_lse = results.on_ring or (args.q, args.k, args.v, results.lse)
        latent = None if args.up is None else args.k
        return cls(q, k, v, ring_lse, args.sinks, results.out, results.lse, results.record, latent, args.up)
