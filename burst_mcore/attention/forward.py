"""Forward: K and V rotate; each tile's partial output is merged into the running softmax.

This is the algorithm "forward pass of Ring/BurstAttention" in the appendix of the BurstEngine paper.
Letters as in `call`. Tensors are [B, S or P, H, D], the statistic lse [B, H, S or P].
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from burst_mcore.attention.call import Attended, Call, Keys, sendable
from burst_mcore.attention.geometry.rows import Rows, gather, relative_to
from burst_mcore.attention.geometry.tiles import Tile
from burst_mcore.attention.numerics.merge import Block, OnlineSoftmax
from burst_mcore.attention.runtime.buffers import Lease, room_like
from burst_mcore.attention.runtime.executor import Buffer, Exchange, Executor, Transport
from burst_mcore.attention.runtime.head_exchange import Inward, Outward, pooled_like
from burst_mcore.attention.schedule.actions import Compute, Kind, Pass
from burst_mcore.dtypes import wide


class Inputs(NamedTuple):
    """The tensors of a forward."""

    q: Tensor
    keys: Keys
    sinks: Tensor | None = None
    """[H], a score of each head in every row's softmax, with a value of zero."""


def forward(call: Call, transport: Transport, inputs: Inputs) -> Attended:
    """Attend this rank's queries to the whole sequence."""
    with Lease() as lease:
        return _Forward(call, inputs, lease).run(transport)


class _Forward:
    def __init__(self, call: Call, inputs: Inputs, lease: Lease) -> None:
        q, keys, sinks = inputs
        self.call, self.lease, self.shard = call, lease, (q, *keys.tensors)
        self.inward: dict[Kind, Exchange] = {}
        if call.route.heads > 1:
            group = call.head_group
            q, k, v = (torch.empty(pooled_like(x, group), dtype=x.dtype, device=x.device) for x in self.shard)
            keys = keys._replace(k=k, v=v)
            self.inward = {
                Kind.ROTATING_IN: Inward(group, self.shard[1:], (k, v), lease),
                Kind.STAYING_IN: Inward(group, self.shard[:1], (q,), lease),
            }
            if sinks is not None:
                sinks = sinks.unflatten(0, (call.route.heads, -1))[call.member]
        self.q, self.keys, self.blocks = q, keys, keys.blocks()
        """On the ring: under head x ring, pooled rows of this member's heads."""
        self.softmax = OnlineSoftmax(q, value_dim=call.problem.value_dim, sinks=sinks)
        self.max_logit: Tensor | None = None
        if call.scores.max_logit:
            self.max_logit = q.new_full((q.shape[2],), -torch.inf, dtype=wide(q.dtype))

    def run(self, transport: Transport) -> Attended:
        outward = self.outward() if self.inward else {}
        exchanges = {**self.inward, **outward}
        home = sendable(self.call, self.keys.tensors)
        executor = Executor(transport, self.call.rank, home, self.new, self.lease.free, exchanges)
        self.call.prepare(Pass.FORWARD, self.q.device)
        executor.run(self.call.bound(Pass.FORWARD), self.compute)
        if not outward:
            out, lse = self.softmax.result()
            return Attended(out, lse, self.q, self.keys.k, self.keys.v, lse, self.max_logit)
        out, *at_home = outward[Kind.STAYING_OUT].local
        lse_at_home = at_home[0] if at_home else None
        ring_lse, max_logit = self.softmax.lse(), self.of_all_heads()
        return Attended(out, lse_at_home, self.q, self.keys.k, self.keys.v, ring_lse, max_logit)

    def compute(self, action: Compute, received: Buffer, rows: Rows | None, is_last: bool) -> None:
        """Attend the queries, of all members or of one, to one KV block, tile by tile."""
        tiles = self.call.tiles_of(Pass.FORWARD, action)
        if tiles:
            read = partial(self.call.keys_met, action.source)
            keys = self.blocks.block(action.source, Block(rows, received), read)
            for tile in tiles:
                self.attend(tile, keys)
        if is_last:
            self.blocks.close(action.source)

    def attend(self, tile: Tile, keys: Block) -> None:
        """Merge a tile's O2 = softmax(S) V and LSE2 = log sum_j exp(S_ij), S = scale Q K^T, into O1, LSE1.

        LSE = log(exp(LSE1) + exp(LSE2)), O = exp(LSE1 - LSE) O1 + exp(LSE2 - LSE) O2 (the paper's appendix;
        online softmax, Milakov and Gimelshein 2018).
        """
        kernel, k_rows = self.call.kernel, relative_to(keys.rows, tile.k)
        k, v = keys.tensors
        tensors = gather(self.q, tile.q), gather(k, k_rows), gather(v, k_rows)
        inputs = *tensors, tile.pattern, self.call.scores
        running = self.softmax.running(tile.q) if kernel.in_place else None
        if kernel.in_place and running:
            (out, lse), fresh = running
            kernel.in_place.merge_forward(*inputs, out, lse, fresh=fresh)
        else:
            self.softmax.add(tile.q, kernel.forward(*inputs))
        if self.max_logit is not None:
            self.max_logit = self.max_logit.maximum(kernel.max_logit(*inputs))

    def of_all_heads(self) -> Tensor | None:
        """Return the max logits of all heads, -inf for heads of other members; None unless requested."""
        max_logit, member, members = self.max_logit, self.call.member, self.call.route.heads
        if max_logit is None:
            return None
        blank = torch.full_like(max_logit, -torch.inf)
        return torch.cat([max_logit if each == member else blank for each in range(members)])

    def new(self, kind: Kind, rows: Rows | None) -> Buffer:
        """Return a receive buffer for these rows of a rotating block."""
        assert kind == Kind.DATA
        return room_like(self.lease, self.keys.tensors, rows)

    def outward(self) -> dict[Kind, Outward]:
        q = self.shard[0]
        out = q.new_empty((*q.shape[:3], self.call.problem.value_dim))
        lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=wide(q.dtype))
        results = (out, lse) if self.call.lse_at_home else (out,)
        return {Kind.STAYING_OUT: Outward(self.call.head_group, self.put_results, results, self.lease)}

    def put_results(self, rows: range, into: Buffer) -> None:
        """Write the output, and lse where `into` has a tensor for it, of some rows."""
        out, *lse = into
        self.softmax.put(rows, (out, lse[0] if lse else self.softmax.room_for_lse(rows)))
