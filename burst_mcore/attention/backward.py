"""Backward: one side travels, its gradient a step behind; the other side's gradient stays (algorithms 1, 2).

Letters: B batch, S rows of this rank, P rows of its position on the ring, H query heads, D head dim. P is S,
or the pooled rows of a head group. Tensors are [B, S or P, H, D], the statistics lse and delta [B, H, S or
P].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from burst_mcore.attention.call import Call, Keys, Queries, sendable
from burst_mcore.attention.geometry.rows import Rows, gather, relative_to, spans
from burst_mcore.attention.geometry.tiles import Tile
from burst_mcore.attention.kernels.kernel import BackwardInputs
from burst_mcore.attention.numerics.latent import ExpandedKeys, Expansion
from burst_mcore.attention.numerics.merge import GradientSum, GradientSums, Held, KeysOf, WaitingShares
from burst_mcore.attention.numerics.rowwise import output_stand_in
from burst_mcore.attention.runtime.buffers import Lease, room_like
from burst_mcore.attention.runtime.executor import Bundle, Exchange, Ring, Transport
from burst_mcore.attention.runtime.head_exchange import Inward, Outward, pooled_like
from burst_mcore.attention.schedule.actions import Compute, Kind, Pass


def backward(
    call: Call,
    transport: Transport,
    queries: Queries,
    keys: Keys,
    out: Tensor,
    expansion: Expansion | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv), in the dtypes of q, k and v.

    Args:
        call: the call of the forward.
        queries: q and lse as on the ring, dout and delta of the rank's own rows.
        keys: k and v as on the ring.
        out: the output of the rank's own rows; it never travels.
        expansion: where the latent travels, its weights. k and v are then the latent and the rope key.
    """
    with Lease() as lease:
        return _Backward(call, queries, keys, out, lease, expansion).run(transport)


class _Backward:
    def __init__(
        self, call: Call, queries: Queries, keys: Keys, out: Tensor, lease: Lease, expansion: Expansion | None
    ) -> None:
        self.call, self.pass_, self.lease = call, call.direction, lease
        self.query_travels = self.pass_ == Pass.QUERY
        self.out: Tensor | None = out
        """The output of the queries on the ring, where it is known."""
        self.inward: dict[Kind, Exchange] = {}
        if call.route.heads > 1:
            self.out = None
            own, group = (queries.dout, queries.delta), call.head_group
            dout, delta = (lease.empty(pooled_like(x, group), x.dtype, x.device) for x in own)
            kind = Kind.BUNDLE if self.query_travels else Kind.ROWS
            self.inward = {kind: Inward(group, own, (dout, delta), lease)}
            queries = queries._replace(dout=dout, delta=delta)
        self.queries, self.keys = queries, keys
        """As on the ring."""
        self.home: Bundle
        self.home, stays = (queries, keys) if self.query_travels else (keys, queries)
        self.returned = GradientSums(self.differentiated(self.home))
        """Of the rank's own travelling bundle: its own share, and the sums of others that come home."""
        self.staying = GradientSums(stays if self.query_travels else stays[:1])
        self.stays: Held[Any] = Held(None, stays, self.staying, None if self.query_travels else self.out)
        """The rows that stay here."""
        self.keys_of = KeysOf() if expansion is None else ExpandedKeys(expansion)
        self.waiting = WaitingShares()

    def run(self, transport: Transport) -> tuple[Tensor, Tensor, Tensor]:
        outward = self.outward() if self.inward else {}
        exchanges = {**self.inward, **outward}
        home = sendable(self.call, self.home)
        ring = Ring(transport, self.call.rank, home, self.new, self.lease.free, exchanges)
        self.call.prepare(self.pass_, self.queries.q.device)
        ring.run(self.call.bound(self.pass_), self.compute, self.accumulate, self.keep)
        if outward:
            travelled, stayed = outward[Kind.SUM].own, outward[Kind.RESULT].own
        else:
            travelled = tuple(self.lease.keep(total) for total in self.returned.results())
            self.keys_of.close(self.call.position)
            stayed = self.staying.results()
        dq, dk, dv = (*travelled, *stayed) if self.query_travels else (*stayed, *travelled)
        return dq.to(self.queries.q.dtype), dk.to(self.keys.k.dtype), dv.to(self.keys.v.dtype)

    def compute(self, action: Compute, bundle: Bundle, rows: Rows | None) -> None:
        """Compute gradients of one bundle and of rows that stay, or a member's share, tile by tile."""
        out = self.out if self.query_travels and action.source == self.call.position else None
        travels: Held[Any] = Held(rows, bundle, self.waiting, out)
        q, k = (travels, self.stays) if self.query_travels else (self.stays, travels)
        k_at = self.call.position if self.query_travels else action.source
        met = self.call.tiles_of(self.pass_, action)
        if met:
            k = self.keys_of.of(k_at, k, partial(self.keys_read, k_at))
            q = q if action.part is not None else self.with_output(q, met)
        for tile in met:
            of_queries, of_keys = self.call.kernel.shares(
                self.inputs(q, k, tile), tile.pattern, self.call.scores, queries_travel=self.query_travels,
                large=self.is_large(action, k, tile),
            )  # fmt: skip
            sides = (k.sums, tile.k, of_keys), (q.sums, tile.q, of_queries)
            for sums, its_rows, share in sides if self.query_travels else sides[::-1]:
                sums.take(its_rows, share)  # of the side that stays first: it may make the other
            del of_queries, of_keys, sides, share  # their memory is free before the next launch
        if not self.query_travels and self.keys_of.expands and self.call.is_last(self.pass_, action):
            self.keys_of.close(k_at)

    def differentiated(self, bundle: Bundle) -> Bundle:
        """Return the tensors of a travelling bundle that have a gradient: Q, or K and V."""
        return bundle[:1] if self.query_travels else bundle

    def keys_read(self, k_at: int) -> Rows:
        """Return the rows of a latent to expand: of home, where it stays, all; else those that are met."""
        return (range(self.keys.k.shape[1]),) if self.query_travels else self.call.keys_met(k_at)

    def is_large(self, action: Compute, k: Held[Any], tile: Tile) -> bool:
        """Return whether a tile of another rank's queries has results that are large, and added at once.

        A gradient of the rank's own queries waits until the end: whole, in their dtype.
        """
        keys, comes = k.bundle[0], self.query_travels and action.source != self.call.position
        large = 4 * min(tile.pattern.shape) > keys.shape[1] and keys.nbytes > GradientSum.waiting_bytes
        return comes and large and all([len(x) == x[0].step == 1 for x in tile[:2]])

    def with_output(self, q: Held[Any], met: Sequence[Tile]) -> Held[Any]:
        """Return queries with their output, or its stand-in for several tiles, where the kernel reads it."""
        if self.call.kernel.takes_delta or q.out is not None or (self.query_travels and len(met) == 1):
            return q
        queries = Queries(*q.bundle)
        if not self.query_travels:  # their output serves all bundles
            self.stays = q._replace(out=output_stand_in(queries.dout, queries.delta))
            return self.stays
        stand_in = torch.empty_like(queries.dout)
        for span in spans(tuple([relative_to(q.rows, tile.q) for tile in met])):
            output_stand_in(*[gather(x, (span,)) for x in (queries.dout, queries.delta, stand_in)])
        return q._replace(out=stand_in)

    def inputs(self, q: Held[Any], k: Held[Any], tile: Tile) -> BackwardInputs:
        """Return the inputs of a tile's backward, without an output where it is not known."""
        q_rows, k_rows = relative_to(q.rows, tile.q), relative_to(k.rows, tile.k)
        queries = Queries(*[gather(x, q_rows) for x in q.bundle])
        out = None if q.out is None or self.call.kernel.takes_delta else gather(q.out, q_rows)
        keys, values = [gather(x, k_rows) for x in k.bundle]
        return BackwardInputs(queries.dout, queries.q, keys, values, out, queries.lse, queries.delta)

    def accumulate(self, sums: Bundle, rows: Rows | None, first: bool, total: Bundle | None) -> None:
        """Add the shares of the last compute to the travelling sums, which have arrived meanwhile.

        A kernel that adds in place, and not all at once, computes the travelling share only now. The hop of
        the sums was hidden behind the share that stays.

        total: where complete sums go, in the pass over memory that adds the last shares to them.
        """
        running = GradientSums.into(sums, rows, fresh=first)
        self.waiting.add_to(running)
        running.finish(total)

    def keep(self, sums: Bundle | None, rows: Rows | None) -> None:
        """Add sums that came home, or else the shares of the last compute, to the returned gradient."""
        if sums is None:
            self.waiting.add_to(self.returned)
        else:
            self.returned.take((range(sums[0].shape[1]),) if rows is None else rows, sums)

    def new(self, kind: Kind, rows: Rows | None) -> Bundle:
        """Return a buffer for these rows of a travelling bundle, or of its gradient."""
        if kind == Kind.DATA:
            return room_like(self.lease, self.home, rows)
        dtype = self.call.total_dtype if kind == Kind.TOTAL else self.call.grad_dtype
        return room_like(self.lease, self.differentiated(self.home), rows, dtype)

    def outward(self) -> Mapping[Kind, Outward]:
        """Return the exchanges out of the head group, for the gradients that stay and that travelled."""
        q, (k, v), h = self.queries.q, self.keys, self.call.route.heads
        batch, pooled, heads, _ = q.shape
        group, shape = self.call.head_group, (batch, pooled // h)
        dq = (q.new_empty((*shape, heads * h, q.shape[-1])),)
        several = self.call.kv_heads < h  # members share a head: its gradient is their sum
        new = torch.zeros if several else torch.empty
        dtype = self.call.grad_dtype if several else k.dtype
        dkv = tuple(
            new((*shape, self.call.kv_heads, x.shape[-1]), dtype=dtype, device=x.device) for x in (k, v)
        )
        travelled, stayed = (dq, dkv) if self.query_travels else (dkv, dq)
        return {
            Kind.SUM: Outward(group, self.returned.put, travelled, self.lease),
            Kind.RESULT: Outward(group, self.put_staying, stayed, self.lease),
        }

    def put_staying(self, rows: range, into: Bundle) -> None:
        """Write the gradients of some rows that stay."""
        self.keys_of.hand_on(self.call.position, rows)
        self.staying.put(rows, into)
