"""Computes attention again for the front of the sequence only; the results of its end were kept in forward.

The kept tensors are those of `recompute.replay.Kept`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from burst_mcore.attention.geometry.rows import Rows, count, pieces, take
from burst_mcore.attention.passes import Attended, Call, forward


def behind(call: Call, at: int, done: Attended, held: int) -> list[Tensor]:
    """The results behind the cut, in memory of their own.

    held: tokens that this rank has; the rest of its rows is padding.
    """
    own = (range(_first(call, at, held), held),)
    kept = [take(done.out, own), take(done.ring_lse, _on_ring(call, at, own))]
    if call.route.heads > 1 and done.lse is not None:
        kept.append(take(done.lse, own))
    return [x.clone(memory_format=torch.contiguous_format) for x in kept]


def forward_of_front(
    call: Call,
    at: int,
    kept: Sequence[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    held: int,
) -> Attended:
    """As `forward`, with `kept` behind the cut: only queries before it are attended.

    Under head x ring q, k and v still go through the head groups whole: the backward needs them there.

    Raises:
        ValueError: what was kept is of another shape.
    """
    own = (range(_first(call, at, held), held),)
    on_ring = _on_ring(call, at, own)
    out, lse, *home = kept
    if (out.shape[1], lse.shape[2]) != (count(own), count(on_ring)):
        raise ValueError(
            f"out and lse of {count(own)} and {count(on_ring)} rows are behind the cut at {at} of "
            f"{call.plan.n}, but what was kept has {out.shape[1]} and {lse.shape[2]}"
        )
    if at == 0 and call.route.heads == 1:
        lse = lse.clone()
        return Attended(out.clone(), lse, q, k, v, lse)
    done = forward(replace(call, plan=call.plan.front(at)), q, k, v, sinks)
    _fill(done.out, own, out)
    _fill(done.ring_lse, on_ring, lse)
    for values in home:
        assert done.lse is not None
        _fill(done.lse, own, values)
    return done


def _first(call: Call, at: int, held: int) -> int:
    """The first of this rank's own rows behind the cut."""
    runs = call.plan.runs(call.position, call.rank % call.route.heads)
    return min(held, sum(len(range(run.start, min(run.stop, at), run.step)) for run in runs))


def _on_ring(call: Call, at: int, own: Rows) -> Rows:
    """The rows behind the cut on the ring: those of this rank, or of its head group, with padding."""
    rows = call.plan.rows_from(call.position, at) if call.route.heads > 1 else own
    return rows or (range(0),)


def _fill(x: Tensor, rows: Rows, values: Tensor) -> None:
    for to, share in pieces(x, rows, values):
        to.copy_(share)
