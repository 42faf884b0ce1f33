"""A call of attention that all ranks have agreed on, and the tensors of its two passes.

Letters: B batch, S rows of this rank, P rows of its ring rank, H query heads, D head dim. P is S,
or the pooled rows of a head group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from burst_mcore.agreement.claims import Signature
from burst_mcore.attention.geometry.plan import Plan
from burst_mcore.attention.geometry.rows import Rows, spans
from burst_mcore.attention.geometry.tiles import Tile, tiles_of
from burst_mcore.attention.kernels.kernel import Kernel, Problem, Scores
from burst_mcore.attention.numerics.merge import KeyBlocks
from burst_mcore.attention.runtime.binding import Bound, bind
from burst_mcore.attention.runtime.executor import Buffer
from burst_mcore.attention.runtime.head_exchange import HeadGroup
from burst_mcore.attention.schedule.actions import Compute, Pass, Program
from burst_mcore.attention.schedule.route import Route, program

Tiles = tuple[Tile, ...]


@dataclass(frozen=True, kw_only=True)
class Call:
    """Everything that forward and backward need besides tensors and the transport of messages."""

    rank: int
    route: Route
    plan: Plan
    """The query-key pairs of each pair of ring ranks."""
    scores: Scores
    problem: Problem
    """The shapes and options that the kernel supports."""
    kernel: Kernel
    direction: Pass
    """The backward pass: QUERY or KV, the side that rotates."""
    grad_dtype: torch.dtype
    kv_heads: int
    """K/V heads in all, as they rotate: 1 if the latent rotates."""
    latent_rotates: bool = False
    lse_at_home: bool = False
    """Whether lse, too, returns to the rank that owns its rows, under head x ring."""
    _bound: dict[Pass, Bound] = field(default_factory=dict, init=False, repr=False, compare=False)
    _tiles: dict[object, Tiles] = field(default_factory=dict, init=False, repr=False, compare=False)
    _variants: dict[object, Call] = field(default_factory=dict, init=False, repr=False, compare=False)
    _prepared: set[object] = field(default_factory=set, init=False, repr=False, compare=False)

    def variant(self, key: object, fields: Callable[[], dict[str, Any]]) -> Call:
        """Return the call with other fields, cached by key, with programs and tiles of its own."""
        if key not in self._variants:
            self._variants[key] = replace(self, **fields())
        return self._variants[key]

    @cached_property
    def total_dtype(self) -> torch.dtype:
        """The dtype of a complete gradient's last message: the smaller of the dtypes of q and of sums.

        Where members of a head group share a K/V head, their gradients of the head are still to be summed.
        """
        several = self.kv_heads < self.route.heads and self.direction == Pass.KV
        smaller = self.problem.dtype.itemsize <= self.grad_dtype.itemsize
        return self.problem.dtype if smaller and not several else self.grad_dtype

    @cached_property
    def ring_rank(self) -> int:
        """The ring rank of this rank, or of its head group."""
        return self.route.placement.ring_rank(self.rank)

    @cached_property
    def member(self) -> int:
        """The number of this rank in its head group."""
        return self.route.placement.member(self.rank)

    @cached_property
    def rows(self) -> int:
        """Rows of a rank, padding included."""
        return self.plan.rows // self.route.heads

    @cached_property
    def head_group(self) -> HeadGroup:
        """The ranks that share heads with this rank."""
        of_members = (self.plan.stretches(self.ring_rank, member) for member in range(self.route.heads))
        return HeadGroup(self.member, tuple(tuple(each.rows for each in of_one) for of_one in of_members))

    def keys_met(self, source: int) -> Rows:
        """Return the key rows of a ring rank that this rank's queries attend to."""
        tiles = tiles_of(self.plan, self.ring_rank, source, self.kernel.abilities)
        return spans(tuple([tile.k for tile in tiles]))

    def program(self, pass_: Pass) -> Program:
        return program(self.rank, self.route, pass_, self.plan)

    def bound(self, pass_: Pass) -> Bound:
        """Return the steps of this rank in a pass."""
        if pass_ not in self._bound:
            self._bound[pass_] = bind(self.program(pass_))
        return self._bound[pass_]

    def prepare(self, pass_: Pass, device: torch.device) -> None:
        """Let the kernel get ready for all tiles of a pass."""
        if self.kernel.prepare is None or (pass_, device) in self._prepared:
            return
        patterns = [tile.pattern for tiles in self.tiles_of_pass(pass_) for tile in tiles]
        self.kernel.prepare(patterns, self.problem, device, forward=pass_ == Pass.FORWARD)
        self._prepared.add((pass_, device))

    def tiles_of_pass(self, pass_: Pass) -> Iterator[Tiles]:
        """Yield the tiles of each compute of a pass."""
        for action in self.program(pass_):
            if isinstance(action, Compute):
                yield self.tiles_of(pass_, action)

    def tiles_of(self, pass_: Pass, action: Compute) -> Tiles:
        """Return the tiles of one compute of a pass."""
        key = pass_, action.source, action.part
        if key not in self._tiles:
            source, part, abilities = action.source, action.part, self.kernel.abilities
            if pass_ == Pass.QUERY:
                tiles = tiles_of(self.plan, source, self.ring_rank, abilities, k_part=part, keys_stay=True)
            else:
                tiles = tiles_of(self.plan, self.ring_rank, source, abilities, q_part=part)
            self._tiles[key] = tiles
        return self._tiles[key]

    @cached_property
    def signature(self) -> Signature:
        """The properties of the call, besides `Request.signature`, that all ranks must have in common."""
        return {
            "tokens": str(self.plan.n),
            "route": str(self.route),
            "rotates in backward": str(self.direction),
            "kernel used": self.kernel.name,
            "latent rotates": str(self.latent_rotates),
        }


class Queries(NamedTuple):
    """The query side of backward, in the order in which it rotates."""

    q: Tensor
    dout: Tensor
    delta: Tensor
    lse: Tensor


class Keys(NamedTuple):
    """The key side, as it rotates."""

    k: Tensor
    v: Tensor
    blocks: Callable[[], KeyBlocks] = KeyBlocks
    """Makes K and V of the blocks of a pass: from the latent, if it rotates."""

    @property
    def tensors(self) -> Buffer:
        """The rotating tensors."""
        return self.k, self.v


class Attended(NamedTuple):
    """The results of a forward, and the other tensors that its backward needs."""

    out: Tensor
    """[B, S, H, D]."""
    lse: Tensor | None
    """[B, H, S]; under head x ring only with `Call.lse_at_home`."""
    q: Tensor
    """q, k, v and lse as on the ring: under head x ring, pooled rows of this member's heads."""
    k: Tensor
    v: Tensor
    ring_lse: Tensor
    max_logit: Tensor | None = None
    """[H], if requested: the max logits of this rank's scores, -inf for heads of other members."""


def sendable(call: Call, block: Buffer) -> Buffer:
    """Return the block, contiguous if it is to be sent: messages must be contiguous."""
    if call.route.ring_size == 1:
        return tuple(block)
    return tuple([tensor.contiguous() for tensor in block])
