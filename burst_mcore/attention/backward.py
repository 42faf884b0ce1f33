"""Backward: one side rotates, followed by its gradient; the other side and its gradient stay.

Algorithms 1 (RingAttention) and 2 (BurstAttention) of the BurstEngine paper.
Letters as in `call`. Tensors are [B, S or P, H, D], lse and delta [B, H, S or P].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from burst_mcore.attention.call import Call, Keys, Queries, Tiles, sendable
from burst_mcore.attention.geometry.rows import Rows, gather, relative_to, spans
from burst_mcore.attention.geometry.tiles import Tile
from burst_mcore.attention.kernels.kernel import BackwardInputs, Gradients, Shares
from burst_mcore.attention.numerics.merge import Block, GradientSum, GradientSums, PendingGradients
from burst_mcore.attention.numerics.rowwise import output_stand_in
from burst_mcore.attention.runtime.buffers import Lease, room_like
from burst_mcore.attention.runtime.executor import Buffer, Exchange, Executor, Transport
from burst_mcore.attention.runtime.head_exchange import Inward, Outward, pooled_like
from burst_mcore.attention.schedule.actions import Compute, Kind, Pass


def backward(call: Call, transport: Transport, queries: Queries, keys: Keys, out: Tensor) -> Gradients:
    """Return (dq, dk, dv), in the dtypes of q, k and v.

    Args:
        queries: q and lse as on the ring, dout and delta of this rank's rows.
        keys: k and v as on the ring.
        out: the output of this rank's rows; the output never rotates.
    """
    own_out: Tensor | None = out
    inward: dict[Kind, Exchange] = {}
    with Lease() as lease:
        if call.route.heads > 1:
            sources, own_out = (queries.dout, queries.delta), None
            dout, delta = (lease.empty(pooled_like(x, call.head_group), x.dtype, x.device) for x in sources)
            kind = Kind.ROTATING_IN if call.direction == Pass.QUERY else Kind.STAYING_IN
            inward = {kind: Inward(call.head_group, sources, (dout, delta), lease)}
            queries = queries._replace(dout=dout, delta=delta)
        algorithm = _QueriesRotate if call.direction == Pass.QUERY else _KeysRotate
        return algorithm(call, queries, keys, own_out, lease).run(transport, inward)


class _Sides(NamedTuple):
    rotating: Buffer
    differentiated: Buffer
    """The rotating tensors with a gradient, which follows them."""
    staying: Buffer
    """The staying tensors with a gradient."""


class _Backward(ABC):
    """The backward of one rank: of a tile, the gradients of `kernels.kernel.Backward`.

    O never rotates. Kernels that read O only to form D get a stand-in for the O of other ranks: a tensor
    with rowsum(dO * stand-in) = D (`output_stand_in`).
    """

    pass_: ClassVar[Pass]

    def __init__(self, call: Call, queries: Queries, keys: Keys, out: Tensor | None, lease: Lease) -> None:
        self.call, self.lease, self.out = call, lease, out
        self.queries, self.keys, self.blocks = queries, keys, keys.blocks()
        """On the ring: under head x ring, pooled rows of this member's heads."""
        sides = self.sides
        self.own_sums = GradientSums(sides.differentiated)
        """The gradient of this rank's rotating block: the local part, at the end with the others' sum."""
        self.staying = GradientSums(sides.staying)
        self.pending = PendingGradients()

    @property
    @abstractmethod
    def sides(self) -> _Sides:
        """The tensors of the rotating side and of the staying side."""

    @abstractmethod
    def compute(self, action: Compute, received: Buffer, rows: Rows | None, is_last: bool) -> None:
        """Add the gradients of a received block and of the rows that stay, tile by tile."""

    def run(self, transport: Transport, inward: Mapping[Kind, Exchange]) -> Gradients:
        outward = self.outward() if inward else {}
        home = sendable(self.call, self.sides.rotating)
        exchanges, dtype = {**inward, **outward}, self.call.total_dtype
        executor = Executor(transport, self.call.rank, home, self.new, self.lease.free, exchanges, dtype)
        self.call.prepare(self.pass_, self.queries.q.device)
        executor.run(self.call.bound(self.pass_), self.compute, self.accumulate, self.keep)
        if outward:
            rotated, stayed = outward[Kind.ROTATING_OUT].local, outward[Kind.STAYING_OUT].local
        else:
            rotated = tuple(self.lease.keep(total) for total in self.own_sums.results())
            self.blocks.close(self.call.ring_rank)
            stayed = self.staying.results()
        dq, dk, dv = (*rotated, *stayed) if self.pass_ == Pass.QUERY else (*stayed, *rotated)
        return dq.to(self.queries.q.dtype), dk.to(self.keys.k.dtype), dv.to(self.keys.v.dtype)

    def of_tile(self, q: Block, k: Block, tile: Tile, *, large: bool = False) -> Shares:
        """Return the gradients of a tile, of the side that stays and of the side that rotates."""
        q_rows, k_rows = relative_to(q.rows, tile.q), relative_to(k.rows, tile.k)
        queries = Queries(*[gather(x, q_rows) for x in q.tensors])
        out = None if q.out is None or self.call.kernel.takes_delta else gather(q.out, q_rows)
        keys, values = [gather(x, k_rows) for x in k.tensors]
        inputs = BackwardInputs(queries.dout, queries.q, keys, values, out, queries.lse, queries.delta)
        rotate, scores = self.pass_ == Pass.QUERY, self.call.scores
        return self.call.kernel.shares(inputs, tile.pattern, scores, queries_rotate=rotate, large=large)

    def accumulate(self, sums: Buffer, rows: Rows | None, first: bool, total: Buffer | None) -> None:
        """Add the pending gradients to the block's sums, received from the previous ring rank.

        Runs once for each block of other ranks, between its compute and the send of the sums. A deferred
        kernel that adds in place runs only now: the sums arrived while it computed the other side.

        Args:
            first: the sums are uninitialised: this rank is the first to add to them.
            total: memory for the complete sums, written in the pass that adds the last gradients.
        """
        running = GradientSums.into(sums, rows, fresh=first)
        self.pending.add_to(running)
        running.finish(total)

    def keep(self, sums: Buffer | None, rows: Rows | None) -> None:
        """Add to the gradient of this rank's own block.

        Runs after the block's compute, for the pending gradients (sums is None), and once for the sums of
        the other ranks, received at the end.
        """
        if sums is None:
            self.pending.add_to(self.own_sums)
        else:
            self.own_sums.take((range(sums[0].shape[1]),) if rows is None else rows, sums)

    def new(self, kind: Kind, rows: Rows | None) -> Buffer:
        """Return a receive buffer for these rows of a rotating block, or of its gradient."""
        if kind == Kind.DATA:
            return room_like(self.lease, self.sides.rotating, rows)
        dtype = self.call.total_dtype if kind == Kind.TOTAL else self.call.grad_dtype
        return room_like(self.lease, self.sides.differentiated, rows, dtype)

    def outward(self) -> Mapping[Kind, Outward]:
        """Return the exchanges of gradients out of the head group, of the staying and the rotating side."""
        q, h = self.queries.q, self.call.route.heads
        batch, pooled, heads, _ = q.shape
        group, shape = self.call.head_group, (batch, pooled // h)
        dq = (q.new_empty((*shape, heads * h, q.shape[-1])),)
        several = self.call.kv_heads < h  # members share a K/V head: its gradient is their sum
        new = torch.zeros if several else torch.empty
        dtype = self.call.grad_dtype if several else self.keys.k.dtype
        widths = [x.shape[-1] for x in self.keys.tensors]
        dkv = tuple(new((*shape, self.call.kv_heads, n), dtype=dtype, device=q.device) for n in widths)
        rotated, stayed = (dq, dkv) if self.pass_ == Pass.QUERY else (dkv, dq)
        return {
            Kind.ROTATING_OUT: Outward(group, self.own_sums.put, rotated, self.lease),
            Kind.STAYING_OUT: Outward(group, self.put_staying, stayed, self.lease),
        }

    def put_staying(self, rows: range, into: Buffer) -> None:
        self.blocks.settle(self.call.ring_rank, rows)
        self.staying.put(rows, into)


class _QueriesRotate(_Backward):
    """Q, dO, D and LSE rotate, dQ follows; K and V stay (BurstAttention, algorithm 2)."""

    pass_ = Pass.QUERY

    @property
    def sides(self) -> _Sides:
        return _Sides(self.queries, self.queries[:1], self.keys.tensors)

    def compute(self, action: Compute, received: Buffer, rows: Rows | None, is_last: bool) -> None:
        tiles, ring_rank = self.call.tiles_of(self.pass_, action), self.call.ring_rank
        if not tiles:
            return
        is_own = action.source == ring_rank
        own_keys = Block(None, self.keys.tensors, self.staying)
        keys = self.blocks.block(ring_rank, own_keys, lambda: (range(self.keys.k.shape[1]),))
        queries = Block(rows, received, self.pending, self.out if is_own else None)
        if len(tiles) > 1:
            queries = self.with_output(queries, tiles)
        for tile in tiles:
            dkv, dq = self.of_tile(queries, keys, tile, large=not is_own and self.is_large(keys, tile))
            keys.take(tile.k, dkv)
            queries.take(tile.q, dq)
            del dq, dkv  # their memory is free before the next launch

    def with_output(self, queries: Block, tiles: Tiles) -> Block:
        """Return received queries with a stand-in for O, for all tiles, if the kernel reads O."""
        if self.call.kernel.takes_delta or queries.out is not None:
            return queries
        _, dout, delta, _ = queries.tensors
        stand_in = torch.empty_like(dout)
        for span in spans(tuple([relative_to(queries.rows, tile.q) for tile in tiles])):
            output_stand_in(*[gather(x, (span,)) for x in (dout, delta, stand_in)])
        return queries._replace(out=stand_in)

    def is_large(self, keys: Block, tile: Tile) -> bool:
        """Return whether dK and dV of a tile are large: they are then added at once, not kept pending."""
        k = keys.tensors[0]
        large = 4 * min(tile.pattern.shape) > k.shape[1] and k.nbytes > GradientSum.waiting_bytes
        return large and all([len(x) == x[0].step == 1 for x in tile[:2]])


class _KeysRotate(_Backward):
    """K and V rotate, dK and dV follow; Q, dO, D and LSE stay (RingAttention, algorithm 1)."""

    pass_ = Pass.KV

    @property
    def sides(self) -> _Sides:
        return _Sides(self.keys.tensors, self.keys.tensors, self.queries[:1])

    def compute(self, action: Compute, received: Buffer, rows: Rows | None, is_last: bool) -> None:
        tiles = self.call.tiles_of(self.pass_, action)
        if tiles:
            all_are_here = action.part is None  # else rows of other members of the head group may be missing
            if self.out is None and all_are_here and not self.call.kernel.takes_delta:
                self.out = output_stand_in(self.queries.dout, self.queries.delta)  # for all blocks
            queries = Block(None, self.queries, self.staying, self.out)
            keys = Block(rows, received, self.pending)
            keys = self.blocks.block(action.source, keys, partial(self.call.keys_met, action.source))
            for tile in tiles:
                dq, dkv = self.of_tile(queries, keys, tile)
                queries.take(tile.q, dq)
                keys.take(tile.k, dkv)
                del dq, dkv  # their memory is free before the next launch
        if is_last:
            self.blocks.close(action.source)
