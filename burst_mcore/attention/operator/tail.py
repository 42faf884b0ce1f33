"""The tail of a sequence, whose results a checkpoint keeps: a recomputation attends only the queries before.

Under a causal mask the last tokens cost most to attend again, and their results take no more memory than
those of others (BurstEngine, "Sequence-level Selective Checkpointing").
"""

from __future__ import annotations

import torch
from torch import Tensor

from burst_mcore.attention.call import Attended, Call
from burst_mcore.attention.forward import Inputs, forward
from burst_mcore.attention.geometry.cuts import cut_for
from burst_mcore.attention.geometry.rows import Rows, count, gather, scatter_views
from burst_mcore.attention.operator.replay import Recompute, SavedTail
from burst_mcore.attention.request import Request
from burst_mcore.attention.runtime.executor import Transport


def forward_of_head(
    call: Call, transport: Transport, inputs: Inputs, saved: SavedTail, tokens: int
) -> Attended:
    """As `forward`, but only queries before the cut of a saved tail are attended.

    Under head x ring q, k and v still go through the head groups whole: the backward needs them there.

    tokens: the tokens of this rank; the rest of its rows is padding.

    Raises:
        ValueError: the tail's shapes do not fit the cut.
    """
    cut = saved.cut
    own = _own_tail(call, cut, tokens)
    on_ring = _tail_on_ring(call, cut, own)
    out, lse, *home = saved.tensors
    max_logit = home.pop().clone() if call.scores.max_logit else None
    if (out.shape[1], lse.shape[2]) != (count(own), count(on_ring)):
        raise ValueError(
            f"out and lse of {count(own)} and {count(on_ring)} rows are after the cut at {cut} of "
            f"{call.plan.n}, but the saved tail has {out.shape[1]} and {lse.shape[2]}"
        )
    if cut == 0 and call.route.heads == 1:
        lse = lse.clone()
        keys = inputs.keys
        return Attended(out.clone(), lse, inputs.q, keys.k, keys.v, lse, max_logit)
    attended = forward(call.variant(cut, lambda: {"plan": call.plan.head(cut)}), transport, inputs)
    _fill(attended.out, own, out)
    _fill(attended.ring_lse, on_ring, lse)
    for values in home:
        assert attended.lse is not None
        _fill(attended.lse, own, values)
    return attended._replace(max_logit=max_logit)


def tail_of(request: Request, call: Call, recompute: Recompute, attended: Attended, tokens: int) -> SavedTail:
    """Return copies of the results from a cut on, so that the share `recompute.keep` of the work is saved.

    These are out and lse on the ring of this rank's rows. Under head x ring lse at home follows, if the call
    wants it there, and then the largest scores, of all rows, if it wants them.

    tokens: the tokens of this rank; the rest of its rows is padding.
    """
    layout, mask, size = request.layout, request.mask, request.ranks.size
    cut = cut_for(recompute.keep, layout, mask, call.plan.n, size, at_most=recompute.at_most).position
    own = _own_tail(call, cut, tokens)
    tail = [gather(attended.out, own), gather(attended.ring_lse, _tail_on_ring(call, cut, own))]
    if call.route.heads > 1 and attended.lse is not None:
        tail.append(gather(attended.lse, own))
    if attended.max_logit is not None:
        tail.append(attended.max_logit)
    copies = [x.clone(memory_format=torch.contiguous_format) for x in tail]
    return SavedTail(cut, copies, copied=True)


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
