"""Backward: one side travels, its gradient a step behind; the other side's gradient stays (algorithms 1, 2).

Letters: B batch, S rows of this rank, P rows of its position on the ring, H query heads, D head dim. P is S,
or the pooled rows of a head group. Tensors are [B, S or P, H, D], the statistics lse and delta [B, H, S or
P].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from burst_mcore.attention.call import Call, Keys, Queries, sendable
from burst_mcore.attention.geometry.rows import Rows, count, gather, relative_to, spans
from burst_mcore.attention.geometry.tiles import Tile
from burst_mcore.attention.kernels.kernel import BackwardInputs
from burst_mcore.attention.numerics.latent import Expansion, LatentChunk
from burst_mcore.attention.numerics.merge import GradientSum
from burst_mcore.attention.numerics.rowwise import output_stand_in
from burst_mcore.attention.runtime.buffers import Lease, room_like
from burst_mcore.attention.runtime.columns import Residents, Shares
from burst_mcore.attention.runtime.executor import Bundle, Exchange, Ring, Transport
from burst_mcore.attention.runtime.head_exchange import Inward, Outward, pooled_like
from burst_mcore.attention.schedule.actions import Compute, Kind, Pass
from burst_mcore.dtypes import wide


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


GradientShare = Bundle | Callable[..., None]
"""A tile's gradients: tensors, or a deferred kernel call that accumulates into the buffers it is given."""


@dataclass
class _Resident:
    """Rows that stay at a rank while bundles travel past, and the sums of their gradients."""

    rows: Rows | None
    """Their rows at the position that owns them; None: all."""
    bundle: Bundle
    """`Queries` or `Keys`."""
    sums: tuple[GradientSum, ...]
    out: Tensor | None = None
    """The output of staying queries, or a stand-in; None where it is not known yet."""
    chunk: LatentChunk | None = None
    """The K and V of home's latent, where it stays."""


class _Backward:
    def __init__(
        self,
        call: Call,
        queries: Queries,
        keys: Keys,
        out: Tensor,
        lease: Lease,
        expansion: Expansion | None,
    ) -> None:
        self.call, self.lease, self.expansion = call, lease, expansion
        self.query_travels = call.direction == Pass.QUERY
        self.heads_shared = call.route.heads > 1
        self.inward: dict[Kind, Exchange] = {}
        self.out = None if self.heads_shared else out
        if self.heads_shared:
            own = queries.dout, queries.delta
            group = call.head_group
            dout, delta = (lease.empty(pooled_like(x, group), x.dtype, x.device) for x in own)
            self.inward[Kind.BUNDLE if self.query_travels else Kind.ROWS] = Inward(
                group, own, (dout, delta), lease
            )
            queries = Queries(queries.q, dout, delta, queries.lse)
        self.queries, self.keys = queries, keys
        """As on the ring."""
        q_side: Bundle = (queries.q,)
        k_side: Bundle = keys
        self.travelling, self.stays = (q_side, k_side) if self.query_travels else (k_side, q_side)
        self.staying = tuple(GradientSum(like=tensor) for tensor in self.stays)
        self.home: LatentChunk | None = None
        """Home's own latent, where it stays."""
        if expansion and self.query_travels:
            self.home = LatentChunk(expansion, keys, None, (range(keys.k.shape[1]),))
        stays: Bundle = keys if self.query_travels else queries
        self.residents = {call.position: _Resident(None, stays, self.staying, self.out, self.home)}
        """By position: the own rows that stay, and on a mesh those of others."""
        self.shares: list[tuple[Rows, GradientShare]] = []
        """Gradients of the travelling bundle from the last compute, by its rows."""
        self.chunk: LatentChunk | None = None
        """Where the latent travels: the rows that are read of the bundle that is computed."""
        self.of_column: tuple[GradientSum, ...] = ()
        """On a mesh the sums of the shares that all rows which stay here have for that bundle."""
        self.returned = tuple(GradientSum(like=tensor) for tensor in self.travelling)
        """Gradients of the rank's own travelling bundle: its own share, and sums of others that come home."""

    def run(self, transport: Transport) -> tuple[Tensor, Tensor, Tensor]:
        home: Bundle = self.queries if self.query_travels else self.keys
        outward = self.outward() if self.heads_shared else {}
        ring = Ring(
            transport,
            self.call.rank,
            sendable(self.call, home),
            self.new,
            self.free,
            {**self.inward, **outward, **self.along_column()},
        )
        self.call.prepare(self.call.direction, self.queries.q.device)
        ring.run(self.call.bound(self.call.direction), self.compute, self.accumulate, self.keep)
        if self.heads_shared:
            travelled, stayed = outward[Kind.SUM].own, outward[Kind.RESULT].own
        else:
            travelled = tuple(self.lease.keep(total.result()) for total in self.returned)
            if self.home:
                self._add(self.home.gradients(), self.staying, self.home.rows)
            stayed = tuple(total.result() for total in self.staying)
        dq, dk, dv = (*travelled, *stayed) if self.query_travels else (*stayed, *travelled)
        return dq.to(self.queries.q.dtype), dk.to(self.keys.k.dtype), dv.to(self.keys.v.dtype)

    def compute(self, action: Compute, bundle: Bundle, rows: Rows | None) -> None:
        """Compute gradients of one bundle and of rows that stay, or a member's share, tile by tile."""
        source, part, own = action.source, action.part, self.call.position
        position = own if action.resident is None else action.resident
        resident = self.residents[position]
        if self.query_travels:
            met = self.call.tiles(source, position, k_part=part)
            queries, keys, q_stored, k_stored = bundle, resident.bundle, rows, resident.rows
            out = self.out if source == own else None
        else:
            met = self.call.tiles(position, source, q_part=part)
            queries, keys, q_stored, k_stored = resident.bundle, bundle, resident.rows, rows
            out = resident.out
        chunk = self._chunk(source, resident, keys, k_stored, met) if self.expansion and met else None
        keys, k_stored = (chunk.keys, chunk.rows) if chunk else (keys, k_stored)
        if out is None and part is None and met and not self.call.kernel.takes_delta:
            out = self._stand_in(Queries(*queries), met, rows, resident)
        stay_sums = chunk.sums if chunk and self.query_travels else resident.sums
        if self.chunk:
            sums, stored = self.chunk.sums, k_stored
        else:
            sums, stored = self._sums_of_column(action, bundle), rows
        for tile in met:
            q_rows, k_rows = relative_to(q_stored, tile.q), relative_to(k_stored, tile.k)
            inputs = self._inputs(q_rows, k_rows, Queries(*queries), Keys(*keys), out)
            goes, stays = (tile.q, k_rows) if self.query_travels else (tile.k, q_rows)
            share, stay = self._shares(inputs, tile)
            self._add(stay, stay_sums, stays)
            if sums:
                self._add(share, sums, relative_to(stored, goes))
            else:
                self.shares.append((goes, share))
        if chunk and self.query_travels and chunk is not self.home:
            self._add(chunk.gradients(), resident.sums, relative_to(resident.rows, chunk.rows))
        if sums and self.call.is_last(self.call.direction, action):
            self._share_of_all(source, rows)

    def _chunk(
        self, source: int, resident: _Resident, keys: Bundle, rows: Rows | None, met: Sequence[Tile]
    ) -> LatentChunk:
        """Return the K and V of a latent: of one that travels for all rows that stay, else for this bundle.

        Home's latent, where it stays, was expanded once for all bundles.
        """
        assert self.expansion
        if self.query_travels:
            return resident.chunk or LatentChunk(self.expansion, keys, rows, spans(tuple([t.k for t in met])))
        if self.chunk is None:
            self.chunk = LatentChunk(self.expansion, keys, rows, self.call.met(Pass.KV, source))
        return self.chunk

    def _sums_of_column(self, action: Compute, bundle: Bundle) -> tuple[GradientSum, ...]:
        """Return the sums over all rows that stay here; none where these are the rank's own alone."""
        if action.resident is not None and not self.of_column:
            travels = bundle[:1] if self.query_travels else bundle
            self.of_column = tuple(GradientSum(like=x) for x in travels)
        return self.of_column

    def _share_of_all(self, source: int, rows: Rows | None) -> None:
        """Make one share of those that all rows which stay here have for a bundle."""
        if self.chunk:
            self.shares.append((self.chunk.rows, self.chunk.gradients()))
            self.chunk = None
            return
        for span in self.call.met(self.call.direction, source):
            running = (total.running(relative_to(rows, (span,))) for total in self.of_column)
            self.shares.append(((span,), tuple(pair[0] for pair in running if pair)))
        self.of_column = ()

    def _stand_in(
        self, queries: Queries, met: Sequence[Tile], rows: Rows | None, resident: _Resident
    ) -> Tensor:
        """Return the stand-in for O, once for all tiles: of the rows that they read, or of all that stay."""
        if not self.query_travels:
            resident.out = output_stand_in(queries.dout, queries.delta)  # they are all there by now
            return resident.out
        stand_in = torch.empty_like(queries.dout)
        for span in spans(tuple([relative_to(rows, tile.q) for tile in met])):
            dout, delta, into = (gather(x, (span,)) for x in (queries.dout, queries.delta, stand_in))
            output_stand_in(dout, delta, into)
        return stand_in

    def _shares(self, inputs: BackwardInputs, tile: Tile) -> tuple[GradientShare, GradientShare]:
        """Return a tile's gradients for the side that travels, and for the side that stays."""
        arguments, kernel = (inputs, tile.pattern, self.call.scores), self.call.kernel
        of_queries: GradientShare
        of_keys: GradientShare
        if kernel.in_place and kernel.in_place.at_once(inputs, self.call.scores):
            return self._shares_at_once(inputs, tile)
        if kernel.in_place:
            of_queries = partial(kernel.in_place.add_dq, *arguments)
            of_keys = partial(kernel.in_place.add_dkv, *arguments)
        else:
            dq, dk, dv = kernel.backward(*arguments)
            of_queries, of_keys = (dq,), (dk, dv)
        return (of_queries, of_keys) if self.query_travels else (of_keys, of_queries)

    def _shares_at_once(self, inputs: BackwardInputs, tile: Tile) -> tuple[GradientShare, GradientShare]:
        """Return the gradients of a tile that one launch makes, for the side that travels, and that stays.

        The sums that travel are not here yet: their share waits for them in memory of its own.
        """
        assert self.call.kernel.in_place
        add_all = self.call.kernel.in_place.add_all
        assert add_all
        travels = (inputs.q,) if self.query_travels else (inputs.k, inputs.v)
        apart = tuple(
            torch.empty_like(x, dtype=wide(x.dtype), memory_format=torch.contiguous_format) for x in travels
        )

        def stay(*totals: Tensor, fresh: bool) -> None:
            dq, dk, dv = (*apart, *totals) if self.query_travels else (*totals, *apart)
            arguments = inputs, tile.pattern, self.call.scores, dq, dk, dv
            if self.query_travels:
                add_all(*arguments, fresh_dq=True, fresh_dkv=fresh)
            else:
                add_all(*arguments, fresh_dq=fresh, fresh_dkv=True)

        return apart, stay

    def accumulate(self, sums: Bundle, sum_rows: Rows | None, first: bool, total: Bundle | None) -> None:
        """Add the shares of the last compute to the travelling sums, which have arrived meanwhile.

        A kernel that adds in place, and not all at once, computes the travelling share only now. The hop of
        the sums was hidden behind the share that stays.

        total: where complete sums go, in the pass over memory that adds the last shares to them.
        """
        shares, self.shares = self.shares, []
        running = [GradientSum.into(each, fresh=first) for each in sums]
        for rows, share in shares:
            self._add(share, running, relative_to(sum_rows, rows))
        for gradient, result in zip(running, total or (None,) * len(running), strict=True):
            gradient.finish(result)

    def keep(self, sums: Bundle | None, rows: Rows | None) -> None:
        """Add sums that came home, or else the shares of the last compute, to the returned gradient."""
        if sums is not None:
            self._add(sums, self.returned, (range(sums[0].shape[1]),) if rows is None else rows)
            return
        shares, self.shares = self.shares, []
        for place, share in shares:
            self._add(share, self.returned, place)

    def _add(self, share: GradientShare, totals: Sequence[GradientSum], rows: Rows) -> None:
        """Add a tile's gradients of these rows."""
        if not callable(share):
            for total, gradient in zip(totals, share, strict=True):
                total.add(rows, gradient)
            return
        running = [pair for total in totals if (pair := total.running(rows))]
        if running:
            share(*(total for total, _ in running), fresh=all(fresh for _, fresh in running))
            return
        apart = tuple(total.apart(rows) for total in totals)
        share(*apart, fresh=True)
        self._add(apart, totals, rows)

    def _inputs(
        self, q_rows: Rows, k_rows: Rows, queries: Queries, keys: Keys, out: Tensor | None
    ) -> BackwardInputs:
        """Return the inputs of a tile's backward."""
        dout, delta = gather(queries.dout, q_rows), gather(queries.delta, q_rows)
        if self.call.kernel.takes_delta:
            out = None
        else:
            out = output_stand_in(dout, delta) if out is None else gather(out, q_rows)
        return BackwardInputs(
            dout=dout,
            q=gather(queries.q, q_rows),
            k=gather(keys.k, k_rows),
            v=gather(keys.v, k_rows),
            out=out,
            lse=gather(queries.lse, q_rows),
            delta=delta,
        )

    def new(self, kind: Kind, rows: Rows | None) -> Bundle:
        """Return a buffer for these rows of a travelling bundle, or of its gradient."""
        if kind == Kind.DATA:
            return room_like(self.lease, self.queries if self.query_travels else self.keys, rows)
        dtype = self.call.total_dtype if kind == Kind.TOTAL else self.call.grad_dtype
        return room_like(self.lease, self.travelling, rows, dtype)

    def free(self, bundle: Bundle) -> None:
        """Take back a buffer that is not needed any more."""
        for tensor in bundle:
            self.lease.free(tensor)

    def along_column(self) -> dict[Kind, Exchange]:
        """Return the exchanges along the column of a mesh: of rows that stay, and of their gradients."""
        if self.call.route.of(self.call.direction).rings == 1:
            return {}
        return {
            Kind.RESIDENT: Residents(self.residents[self.call.position].bundle, self._came, self.lease),
            Kind.SHARE: Shares(self._room_for_share, self._share, self._add_share),
        }

    def _came(self, member: int, rows: Rows | None, bundle: Bundle) -> None:
        stays = bundle if self.query_travels else bundle[:1]
        sums = tuple(GradientSum(like=tensor) for tensor in stays)
        position = self.call.resident(self.call.direction, member)
        self.residents[position] = _Resident(rows, bundle, sums)

    def _room_for_share(self, rows: Rows | None) -> Bundle:
        """Return room for gradients of some own rows that stay, in the dtype of travelling sums."""
        shapes = [(len(x), x.shape[1] if rows is None else count(rows), *x.shape[2:]) for x in self.stays]
        return tuple(
            x.new_empty(s, dtype=self.call.grad_dtype) for x, s in zip(self.stays, shapes, strict=True)
        )

    def _share(self, member: int, into: Bundle) -> None:
        resident = self.residents.pop(self.call.resident(self.call.direction, member))
        for to, total in zip(into, resident.sums, strict=True):
            total.put(range(to.shape[1]), (to,))

    def _add_share(self, rows: Rows, share: Bundle) -> None:
        self._add(share, self.staying, rows)

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
        own = (dq, dkv) if self.query_travels else (dkv, dq)
        return {
            Kind.SUM: Outward(group, self._arrived, own[0], self.lease),
            Kind.RESULT: Outward(group, self._stayed, own[1], self.lease),
        }

    def _arrived(self, rows: range, into: Bundle) -> None:
        for to, total in zip(into, self.returned, strict=True):
            total.put(rows, (to,))

    def _stayed(self, rows: range, into: Bundle) -> None:
        if self.home:
            self._add(self.home.gradients(rows), self.staying, (rows,))
        for to, total in zip(into, self.staying, strict=True):
            total.put(rows, (to,))
