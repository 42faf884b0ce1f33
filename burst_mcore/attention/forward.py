"""Forward: K and V travel; each tile's partial output is merged into the running softmax (paper algorithm 4).

In a recomputation only the head of the sequence is attended again: the tail's results were saved in forward.
Letters: B batch, S rows of this rank, P rows of its position on the ring, H query heads, D head dim. P is S,
or the pooled rows of a head group. Tensors are [B, S or P, H, D], the statistic lse [B, H, S or P].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from burst_mcore.attention.call import Attended, Call, sendable
from burst_mcore.attention.geometry.rows import Rows, count, gather, relative_to, scatter_views
from burst_mcore.attention.numerics.latent import Expansion, LatentChunk
from burst_mcore.attention.numerics.merge import OnlineSoftmax
from burst_mcore.attention.runtime.buffers import Lease, room_like
from burst_mcore.attention.runtime.columns import Residents, Shares
from burst_mcore.attention.runtime.executor import Bundle, Exchange, Ring, Transport
from burst_mcore.attention.runtime.head_exchange import Inward, Outward, pooled_like
from burst_mcore.attention.schedule.actions import Compute, Kind, Pass
from burst_mcore.dtypes import of_parts, wide


def forward(
    call: Call,
    transport: Transport,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None = None,
    expansion: Expansion | None = None,
) -> Attended:
    """Attend this rank's queries to the whole sequence.

    Args:
        sinks: [H], a score of each head that takes part in every row's softmax, and brings no value.
        expansion: where the latent travels, its weights. k and v are then the latent and the rope key.
    """
    with Lease() as lease:
        return _Forward(call, q, k, v, sinks, expansion, lease).run(transport)


class _Resident(NamedTuple):
    """Queries that stay at a rank while keys travel past."""

    rows: Rows | None
    """Their rows at the position that owns them; None: all."""
    q: Tensor
    softmax: OnlineSoftmax


class _Forward:
    def __init__(
        self,
        call: Call,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        expansion: Expansion | None,
        lease: Lease,
    ) -> None:
        self.call, self.lease, self.expansion = call, lease, expansion
        self.chunk: LatentChunk | None = None
        """Where the latent travels: the rows that are read of the bundle that is computed."""
        self.own = q, k, v
        if sinks is not None:
            sinks = sinks.unflatten(0, (call.route.heads, -1))[call.member]
        self.exchanges: dict[Kind, Exchange] = {}
        if call.route.heads > 1:
            group = call.head_group
            q, k, v = (torch.empty(pooled_like(x, group), dtype=x.dtype, device=x.device) for x in (q, k, v))
            self.exchanges = {
                Kind.BUNDLE: Inward(group, self.own[1:], (k, v), lease),
                Kind.ROWS: Inward(group, self.own[:1], (q,), lease),
                Kind.RESULT: Outward(group, self.result_rows, self.new_results(), lease),
            }
        self.q, self.k, self.v = q, k, v
        self.softmax = OnlineSoftmax(q, value_dim=call.problem.value_dim, sinks=sinks)
        self.residents = {call.position: _Resident(None, q, self.softmax)}
        """Queries that stay here, by position: of the own, and on a mesh of others."""
        if call.route.rings > 1:
            self.exchanges |= self.along_column()

    def run(self, transport: Transport) -> Attended:
        home = sendable(self.call, (self.k, self.v))
        ring = Ring(transport, self.call.rank, home, self.new, self.free, self.exchanges)
        self.call.prepare(Pass.FORWARD, self.q.device)
        ring.run(self.call.bound(Pass.FORWARD), self.compute)
        if self.call.route.heads == 1:
            out, lse = self.softmax.result()
            return Attended(out, lse, self.q, self.k, self.v, lse)
        home_lse = self.results[1] if self.call.lse_at_home else None
        return Attended(self.results[0], home_lse, self.q, self.k, self.v, self.softmax.lse())

    def compute(self, action: Compute, bundle: Bundle, rows: Rows | None) -> None:
        """Attend queries, or a member's, to the keys of one bundle, tile by tile."""
        kernel, scores = self.call.kernel, self.call.scores
        position = self.call.position if action.resident is None else action.resident
        stored, q, softmax = self.residents[position]
        met = self.call.tiles(position, action.source, q_part=action.part)
        if self.expansion and met:
            if self.chunk is None:
                read = self.call.met(Pass.FORWARD, action.source)
                self.chunk = LatentChunk(self.expansion, bundle, rows, read)
            rows, bundle = self.chunk.rows, self.chunk.keys
        k, v = bundle
        for tile in met:
            queries, keys = relative_to(stored, tile.q), relative_to(rows, tile.k)
            q_tile, k_tile, v_tile = gather(q, queries), gather(k, keys), gather(v, keys)
            running = softmax.running(queries) if kernel.in_place else None
            if kernel.in_place and running:
                out, lse, fresh = running
                kernel.in_place.merge_forward(
                    q_tile, k_tile, v_tile, tile.pattern, scores, out, lse, fresh=fresh
                )
                continue
            out, lse = kernel.forward(q_tile, k_tile, v_tile, tile.pattern, scores)
            softmax.add(queries, out, lse)
        if self.chunk and self.call.is_last(Pass.FORWARD, action):
            self.chunk = None

    def along_column(self) -> dict[Kind, Exchange]:
        """Return the exchanges along the column of a mesh: of queries, and of shares of out and lse."""
        return {
            Kind.RESIDENT: Residents((self.q,), self.arrived, self.lease),
            Kind.SHARE: Shares(self.room_for_share, self.share, self.add_share),
        }

    def arrived(self, member: int, rows: Rows | None, queries: Bundle) -> None:
        (q,) = queries
        position = self.call.resident(Pass.FORWARD, member)
        self.residents[position] = _Resident(rows, q, OnlineSoftmax(q, value_dim=self.call.problem.value_dim))

    def room_for_share(self, rows: Rows | None) -> Bundle:
        """Return room for out and lse of some own rows: partial results, as exact as those of a tile."""
        batch, every, heads, _ = self.q.shape
        size = every if rows is None else count(rows)
        shape, dtype = (batch, size, heads, self.call.problem.value_dim), self.q.dtype
        out = self.q.new_empty(shape, dtype=wide(dtype))
        return out, self.q.new_empty((batch, heads, size), dtype=of_parts(dtype))

    def share(self, member: int, into: Bundle) -> None:
        softmax = self.residents.pop(self.call.resident(Pass.FORWARD, member)).softmax
        softmax.put(range(into[0].shape[1]), into)

    def add_share(self, rows: Rows, share: Bundle) -> None:
        self.softmax.add(rows, *share)

    def new(self, kind: Kind, rows: Rows | None) -> Bundle:
        """Return a buffer for these rows of a travelling bundle."""
        assert kind == Kind.DATA
        return room_like(self.lease, (self.k, self.v), rows)

    def free(self, bundle: Bundle) -> None:
        """Take back a buffer that is not needed any more."""
        for tensor in bundle:
            self.lease.free(tensor)

    def new_results(self) -> Bundle:
        q = self.own[0]
        out = q.new_empty((*q.shape[:3], self.call.problem.value_dim))
        lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=wide(q.dtype))
        self.results: Bundle = (out, lse) if self.call.lse_at_home else (out,)
        return self.results

    def result_rows(self, rows: range, into: Bundle) -> None:
        out, *lse = into
        self.softmax.put(rows, (out, lse[0] if lse else self.softmax.room_for_lse(rows)))


def forward_of_head(
    call: Call,
    transport: Transport,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    expansion: Expansion | None,
    *,
    cut: int,
    tail: Sequence[Tensor],
    tokens: int,
) -> Attended:
    """As `forward`, but only queries before the global position `cut` are attended.

    Under head x ring q, k and v still go through the head groups whole: the backward needs them there.

    Args:
        tail: the results from `cut` on, as `tail_of` returned them in forward.
        tokens: the tokens of this rank; the rest of its rows is padding.

    Raises:
        ValueError: the tail's shapes do not fit the cut.
    """
    own = _own_tail(call, cut, tokens)
    on_ring = _tail_on_ring(call, cut, own)
    out, lse, *home = tail
    if (out.shape[1], lse.shape[2]) != (count(own), count(on_ring)):
        raise ValueError(
            f"out and lse of {count(own)} and {count(on_ring)} rows are after the cut at {cut} of "
            f"{call.plan.n}, but the saved tail has {out.shape[1]} and {lse.shape[2]}"
        )
    if cut == 0 and call.route.heads == 1:
        lse = lse.clone()
        return Attended(out.clone(), lse, q, k, v, lse)
    attended = forward(replace(call, plan=call.plan.head(cut)), transport, q, k, v, sinks, expansion)
    _fill(attended.out, own, out)
    _fill(attended.ring_lse, on_ring, lse)
    for values in home:
        assert attended.lse is not None
        _fill(attended.lse, own, values)
    return attended


def tail_of(call: Call, cut: int, attended: Attended, tokens: int) -> list[Tensor]:
    """Return the results from the global position `cut` on, in memory of their own.

    These are out and lse on the ring of this rank's rows. Under head x ring lse at home follows, if the call
    wants it there.

    tokens: the tokens of this rank; the rest of its rows is padding.
    """
    own = _own_tail(call, cut, tokens)
    tail = [gather(attended.out, own), gather(attended.ring_lse, _tail_on_ring(call, cut, own))]
    if call.route.heads > 1 and attended.lse is not None:
        tail.append(gather(attended.lse, own))
    return [x.clone(memory_format=torch.contiguous_format) for x in tail]


def _own_tail(call: Call, cut: int, tokens: int) -> Rows:
    """Return this rank's own rows after the cut."""
    runs = call.plan.runs(call.position, call.member)
    head = sum(len(range(run.start, min(run.stop, cut), run.step)) for run in runs)
    return (range(min(tokens, head), tokens),)


def _tail_on_ring(call: Call, cut: int, own: Rows) -> Rows:
    """Return the rows after the cut on the ring: of this rank, or of its head group, with padding."""
    rows = call.plan.rows_from(call.position, cut) if call.route.heads > 1 else own
    return rows or (range(0),)


def _fill(x: Tensor, rows: Rows, values: Tensor) -> None:
    for destination, share in scatter_views(x, rows, values):
        destination.copy_(share)
