"""The two passes of distributed attention: tiles x kernel x merge, driven by the ring.

Letters: B batch, S rows of this rank, P rows of its position on the ring (S, or those of its head group
pooled), H query heads, D head dim. Tensors are [B, S or P, H, D], the statistics lse and delta
[B, H, S or P].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from burst_mcore.attention.geometry.plan import Plan
from burst_mcore.attention.geometry.rows import Rows, axis, count, pieces, take, within
from burst_mcore.attention.geometry.tiles import Tile, tiles_of
from burst_mcore.attention.kernels.kernel import Kernel, Problem, RowGradients, Scores
from burst_mcore.attention.numerics.merge import GradientSum, OnlineSoftmax
from burst_mcore.attention.numerics.rowwise import output_stand_in
from burst_mcore.attention.runtime.buffers import Lease
from burst_mcore.attention.runtime.executor import Bundle, Exchange, Ring, Transport
from burst_mcore.attention.runtime.head_exchange import HeadGroup, Inward, Outward, pooled_like
from burst_mcore.attention.schedule.actions import BUNDLE, DATA, RESULT, ROWS, SUM
from burst_mcore.attention.schedule.ring import home_sum
from burst_mcore.attention.schedule.route import Route, program
from burst_mcore.dtypes import wide


@dataclass(frozen=True)
class Call:
    """Everything that forward and backward need besides tensors."""

    rank: int
    route: Route
    plan: Plan
    """What meets what, by positions of the route."""
    scores: Scores
    problem: Problem
    """What the kernel is asked to serve."""
    kernel: Kernel
    direction: str
    """What travels in backward: "query" or "kv"."""
    grad_dtype: torch.dtype
    transport: Transport
    kv_heads: int
    """K/V heads in all."""
    lse_at_home: bool = False
    """Under head x ring lse, too, goes back to the rank that owns its rows."""

    @property
    def position(self) -> int:
        """The place on the ring of this rank's head group."""
        return self.rank // self.route.heads

    def tiles(
        self, q_at: int, k_at: int, *, q_part: int | None = None, k_part: int | None = None
    ) -> tuple[Tile, ...]:
        """Where the queries of one position, or of a member there, meet the keys of another."""
        return tiles_of(self.plan, q_at, k_at, self.kernel.abilities, q_part=q_part, k_part=k_part)

    @property
    def rows(self) -> int:
        """Rows of a rank, padding included."""
        return self.plan.rows // self.route.heads

    @property
    def head_group(self) -> HeadGroup:
        """The ranks that share heads with this one."""
        h = self.route.heads
        rows = (self.plan.member_rows(self.position, member) for member in range(h))
        return HeadGroup(self.rank % h, tuple(rows))


class Queries(NamedTuple):
    """The query side of backward, in the order in which it travels."""

    q: Tensor
    dout: Tensor
    delta: Tensor
    lse: Tensor


class Keys(NamedTuple):
    """The key side."""

    k: Tensor
    v: Tensor


class Attended(NamedTuple):
    """What a forward returns, and what its backward needs besides."""

    out: Tensor
    """[B, S, H, D]."""
    lse: Tensor | None
    """[B, H, S]; under head x ring only if the call wants it at home."""
    q: Tensor
    """q, k, v and lse as they are on the ring: rows pooled, heads shared."""
    k: Tensor
    v: Tensor
    ring_lse: Tensor


def forward(call: Call, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Attended:
    """Attention of this rank's queries over the whole sequence: K, V travel (paper algorithm 4).

    sinks [H]: a score of each head that takes part in every row's softmax, and brings no value.
    """
    with Lease() as lease:
        return _Forward(call, q, k, v, sinks, lease).run()


class _Forward:
    def __init__(
        self, call: Call, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, lease: Lease
    ) -> None:
        self.call, self.lease = call, lease
        self.own = q, k, v
        if sinks is not None:
            sinks = sinks.unflatten(0, (call.route.heads, -1))[call.rank % call.route.heads]
        self.exchanges: dict[str, Exchange] = {}
        if call.route.heads > 1:
            group = call.head_group
            q, k, v = (torch.empty(pooled_like(x, group), dtype=x.dtype, device=x.device) for x in (q, k, v))
            self.exchanges = {
                BUNDLE: Inward(group, self.own[1:], (k, v), lease),
                ROWS: Inward(group, self.own[:1], (q,), lease),
                RESULT: Outward(group, self.result_rows, self.new_results(), lease),
            }
        self.q, self.k, self.v = q, k, v
        self.softmax = OnlineSoftmax(q, value_dim=v.shape[-1], sinks=sinks)

    def run(self) -> Attended:
        home = _sendable(self.call, (self.k, self.v))
        ring = Ring(self.call.transport, self.call.rank, home, self.new, self.free, self.exchanges)
        ring.run(program(self.call.rank, self.call.route, "forward", self.call.plan), self.compute)
        out, lse = self.softmax.result()
        if not self.exchanges:
            return Attended(out, lse, self.q, self.k, self.v, lse)
        own = self.results
        return Attended(own[0], own[1] if self.call.lse_at_home else None, self.q, self.k, self.v, lse)

    def compute(self, source: int, part: int | None, bundle: Bundle, held: Rows | None) -> None:
        """Attend the queries, or a member's, to the keys of one bundle, tile by tile."""
        k, v = bundle
        for tile in self.call.tiles(self.call.position, source, q_part=part):
            at = within(held, tile.k)
            rows, kernel = (take(self.q, tile.q), take(k, at), take(v, at)), self.call.kernel
            running = self.softmax.running(tile.q) if kernel.in_place else None
            if kernel.in_place and running:
                out, lse, fresh = running
                kernel.in_place.merge_forward(*rows, tile.seen, self.call.scores, out, lse, fresh=fresh)
                continue
            out, lse = kernel.forward(*rows, tile.seen, self.call.scores)
            self.softmax.add(tile.q, out, lse)

    def new(self, kind: str, rows: Rows | None) -> Bundle:
        assert kind == DATA
        return _room(self.lease, (self.k, self.v), rows)

    def free(self, bundle: Bundle) -> None:
        for tensor in bundle:
            self.lease.free(tensor)

    def new_results(self) -> Bundle:
        q, _, v = self.own
        out = q.new_empty((*q.shape[:3], v.shape[-1]))
        lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=wide(q.dtype))
        self.results: Bundle = (out, lse) if self.call.lse_at_home else (out,)
        return self.results

    def result_rows(self, at: range) -> Bundle:
        out, lse = self.softmax.rows(at)
        return (out, lse) if self.call.lse_at_home else (out,)


def backward(call: Call, queries: Queries, keys: Keys, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv): one side travels, its gradient a step behind; the other stays (algorithms 1 and 2).

    Args:
        call: that of the forward.
        queries: q and lse as on the ring, dout and delta of the rank's own rows.
        keys: as on the ring.
        out: of the rank's own rows; it never travels.
    """
    with Lease() as lease:
        return _Backward(call, queries, keys, out, lease).run()


Share = Bundle | Callable[..., None]
"""A tile's gradients: tensors, or a deferred kernel call that accumulates into the buffers it is given."""


class _Backward:
    def __init__(self, call: Call, queries: Queries, keys: Keys, out: Tensor, lease: Lease) -> None:
        self.call, self.lease = call, lease
        self.query_travels = call.direction == "query"
        self.heads_shared = call.route.heads > 1
        self.inward: dict[str, Exchange] = {}
        self.out = None if self.heads_shared else out
        if self.heads_shared:
            own = queries.dout, queries.delta
            group = call.head_group
            dout, delta = (lease.empty(pooled_like(x, group), x.dtype, x.device) for x in own)
            self.inward[BUNDLE if self.query_travels else ROWS] = Inward(group, own, (dout, delta), lease)
            queries = Queries(queries.q, dout, delta, queries.lse)
        self.queries, self.keys = queries, keys
        q_side: Bundle = (queries.q,)
        k_side: Bundle = (keys.k, keys.v)
        self.travelling, self.stays = (q_side, k_side) if self.query_travels else (k_side, q_side)
        self.staying = tuple(GradientSum(like=tensor) for tensor in self.stays)
        self.shares: list[tuple[Rows, Share]] = []
        """Gradients of the travelling bundle from the last compute, by its rows."""
        self.went: Bundle | None = None

    def run(self) -> tuple[Tensor, Tensor, Tensor]:
        home: Bundle = self.queries if self.query_travels else self.keys
        outward = self.outward() if self.heads_shared else {}
        ring = Ring(
            self.call.transport,
            self.call.rank,
            _sendable(self.call, home),
            self.new,
            self.free,
            {**self.inward, **outward},
        )
        self.ring = ring
        self.steps = program(self.call.rank, self.call.route, self.call.direction, self.call.plan)
        ring.run(self.steps, self.compute, self.accumulate)
        if self.heads_shared:
            went, stayed = outward[SUM].own, outward[RESULT].own
        else:
            went = self._went()
            for total, like in zip(went, self.travelling, strict=True):
                if total.dtype == like.dtype:  # it is returned itself, not a copy
                    self.lease.keep(total)
            stayed = tuple(total.result() for total in self.staying)
        dq, dk, dv = (*went, *stayed) if self.query_travels else (*stayed, *went)
        return dq.to(self.queries.q.dtype), dk.to(self.keys.k.dtype), dv.to(self.keys.v.dtype)

    def compute(self, source: int, part: int | None, bundle: Bundle, held: Rows | None) -> None:
        """The gradients of one bundle against this rank's own tensors, or a member's share, tile by tile."""
        here = self.call.position
        if self.query_travels:
            queries, keys = Queries(*bundle), self.keys
            met = self.call.tiles(source, here, k_part=part)
        else:
            queries, keys = self.queries, Keys(*bundle)
            met = self.call.tiles(here, source, q_part=part)
        out = self.out if source == here or not self.query_travels else None
        if out is None and part is None and met and not self.call.kernel.takes_delta:
            out = output_stand_in(queries.dout, queries.delta)  # once for all tiles
            self.out = self.out if self.query_travels else out  # queries that stay, all there by now
        for tile in met:
            q_at = within(held, tile.q) if self.query_travels else tile.q
            k_at = tile.k if self.query_travels else within(held, tile.k)
            x = self._rows(q_at, k_at, queries, keys, out)
            goes, stays = (tile.q, tile.k) if self.query_travels else (tile.k, tile.q)
            share, stay = self._shares(x, tile)
            self._add(stay, self.staying, stays)
            self.shares.append((goes, share))

    def _shares(self, x: RowGradients, tile: Tile) -> tuple[Share, Share]:
        """A tile's gradients for the side that travels, and for the side that stays."""
        given, kernel = (x, tile.seen, self.call.scores), self.call.kernel
        of_queries: Share
        of_keys: Share
        if kernel.in_place:
            of_queries = partial(kernel.in_place.add_dq, *given)
            of_keys = partial(kernel.in_place.add_dkv, *given)
        else:
            dq, dk, dv = kernel.backward(*given)
            of_queries, of_keys = (dq,), (dk, dv)
        return (of_queries, of_keys) if self.query_travels else (of_keys, of_queries)

    def accumulate(self, sums: Bundle, held: Rows | None, first: bool) -> None:
        """Add the shares of the last compute to the travelling sums, which have come meanwhile.

        A kernel that adds to them computes its share only now, after what stays, behind which their hop hid.
        """
        shares, self.shares = self.shares, []
        totals = [GradientSum.into(total, fresh=first) for total in sums]
        for rows, share in shares:
            self._add(share, totals, within(held, rows))
        for total in totals:
            total.complete()

    def _add(self, share: Share, totals: Sequence[GradientSum], rows: Rows) -> None:
        """Add a tile's gradients of these rows."""
        if not callable(share):
            for total, gradient in zip(totals, share, strict=True):
                total.add(rows, gradient)
            return
        running = [found for total in totals if (found := total.running(rows))]
        if running:
            share(*(total for total, _ in running), fresh=all(fresh for _, fresh in running))
            return
        apart = tuple(total.apart(rows) for total in totals)
        share(*apart, fresh=True)
        self._add(apart, totals, rows)

    def _rows(self, q_at: Rows, k_at: Rows, queries: Queries, keys: Keys, out: Tensor | None) -> RowGradients:
        """What a tile's backward needs."""
        dout, delta = take(queries.dout, q_at), take(queries.delta, q_at)
        if self.call.kernel.takes_delta:
            out = None
        else:
            out = output_stand_in(dout, delta) if out is None else take(out, q_at)
        return RowGradients(
            dout=dout,
            q=take(queries.q, q_at),
            k=take(keys.k, k_at),
            v=take(keys.v, k_at),
            out=out,
            lse=take(queries.lse, q_at),
            delta=delta,
        )

    def new(self, kind: str, rows: Rows | None) -> Bundle:
        """A buffer for these rows of a travelling bundle, or of its gradient."""
        if kind == DATA:
            return _room(self.lease, self.queries if self.query_travels else self.keys, rows)
        return _room(self.lease, self.travelling, rows, self.call.grad_dtype)

    def free(self, bundle: Bundle) -> None:
        """A buffer that is not needed any more."""
        for tensor in bundle:
            self.lease.free(tensor)

    def _went(self) -> Bundle:
        """The complete gradient of the rank's own bundle, of all its rows."""
        buffer = home_sum(self.steps)
        if buffer is not None and self.ring.rows(buffer) is None:
            return self.ring.buffer(buffer)
        whole = _room(self.lease, self.travelling, None, self.call.grad_dtype)
        for total in whole:
            total.zero_()
        if buffer is not None:
            rows = self.ring.rows(buffer)
            assert rows is not None
            for total, some in zip(whole, self.ring.buffer(buffer), strict=True):
                for to, values in pieces(total, rows, some):
                    to.copy_(values)
        return whole

    def outward(self) -> Mapping[str, Outward]:
        """The ways out of the head group, for what stays and for what travelled."""
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
        own = (dq, dkv) if self.query_travels else (dkv, dq)
        return {
            SUM: Outward(group, self._arrived, own[0], self.lease),
            RESULT: Outward(group, self._stayed, own[1], self.lease),
        }

    def _arrived(self, at: range) -> Bundle:
        if self.went is None:
            self.went = self._went()
        return tuple(take(x, (at,)) for x in self.went)

    def _stayed(self, at: range) -> Bundle:
        return tuple(total.rows(at) for total in self.staying)


def _room(lease: Lease, like: Bundle, rows: Rows | None, dtype: torch.dtype | None = None) -> Bundle:
    """Uninitialised tensors like these, but for `rows` of them alone."""
    room = []
    for x in like:
        shape = list(x.shape)
        if rows is not None:
            shape[axis(x)] = count(rows)
        room.append(lease.empty(shape, dtype or x.dtype, x.device))
    return tuple(room)


def _sendable(call: Call, bundle: Bundle) -> Bundle:
    """Contiguous, as messages must be, if there is anybody to send to."""
    return tuple(x.contiguous() for x in bundle) if call.route.positions > 1 else tuple(bundle)
