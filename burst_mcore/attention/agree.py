"""How the ranks of a ring agree on a forward and its backward, so that no rank waits in vain."""

from __future__ import annotations

import torch

from burst_mcore.agreement.agreement import ALONE, Agreed, Agreement, Ring, digest_of
from burst_mcore.agreement.claims import Claim
from burst_mcore.agreement.watch import DESTROYED
from burst_mcore.attention.call import Call
from burst_mcore.attention.replay import Recompute
from burst_mcore.attention.request import Request
from burst_mcore.attention.resolve import call_of
from burst_mcore.attention.runtime.topology import Topology


def agreement_of(topology: Topology) -> Agreement:
    """Return the agreement of a ring's ranks, made at its first use."""
    ring = topology.communicators
    if ring is None:
        return ALONE
    if ring.destroyed:
        raise RuntimeError(DESTROYED)
    if ring.agreement is None:
        ring.agreement = Ring(ring.control, ring.ranks, topology.rank, ring.abort)
    return ring.agreement


def agree_on_call(
    request: Request, needs_gradient: bool, recompute: Recompute, agreement: Agreement
) -> tuple[Call, Agreed]:
    """Return the call that all ranks make, and their agreement, which says how many tokens each rank holds.

    A call like an earlier one goes ahead on CUDA, and where documents say how long the sequence is. Else only
    the other ranks know whether they hold as many tokens. ValueError: calls differ, or are not legal.
    """
    size = request.ranks.size
    even = (request.shard.tokens,) * size
    if size == 1:
        return call_of(request, even), Agreed(0, (even,))
    wanted = {"gradient wanted": str(needs_gradient), **recompute.signature}
    signature = {"pass": "forward", **request.signature, **wanted}
    call, kind = None, None
    with agreement.refusing():
        try:
            call = call_of(request, even)
            details = call.signature
        except ValueError as error:  # with the lengths of others it may be legal
            details = {"problem": str(error)}
        digest = digest_of(*details.items())
        of_known_length = request.device == "cuda" or request.mask.document_ends is not None
        if call is not None and of_known_length and not recompute.at_most:
            kind = *{**signature, "mask": request.mask.of_layer}.values(), digest  # with any documents
    meeting = agreement.meet(Claim(signature, (even[0], digest), details, kind))
    if call is not None and meeting.numbers.count(meeting.numbers[0]) == size:
        return call, meeting
    with agreement.refusing():  # perhaps of this rank alone: its kernels are its own
        call = call_of(request, meeting.lengths)
    second = agreement.meet(Claim({**signature, "pass": "forward, lengths known", **call.signature}))
    return call, meeting._replace(label=second.label)


def agree_on_backward(
    request: Request, call: Call, forward: Agreed, agreement: Agreement, *, of_lse: bool
) -> Agreed:
    """Agree on a backward, `of_lse` too or of out alone; one like an earlier one goes ahead in autograd."""
    own = {"pass": "backward", "gradient through lse": str(of_lse)}
    signature = {**own, **request.signature, **call.signature}
    in_autograd = torch._C._current_graph_task_id() != -1  # else nothing settles it at its end
    kind = tuple({**signature, "mask": "any"}.values()) if in_autograd else None
    return agreement.meet(Claim(signature, kind=kind, of_call=forward.number))


def meet(topology: Topology, sync_point: str, *numbers: int) -> list[list[int]]:
    """Return the numbers of all ranks of a sequence, which come to this sync point of their programs.

    OthersError: some make another call. RuntimeError: one has ended, or is late; says where it was last.
    """
    return [[*each] for each in agreement_of(topology).meet(Claim({"at": sync_point}, numbers)).numbers]
