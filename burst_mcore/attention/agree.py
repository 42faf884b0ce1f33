"""How the ranks of a ring agree on a forward and its backward, so that no rank waits in vain."""

from __future__ import annotations

import torch

from burst_mcore.agreement.agreement import ALONE, Agreed, Agreement, Ring
from burst_mcore.agreement.claims import Claim
from burst_mcore.agreement.watch import DESTROYED
from burst_mcore.attention.call import Call
from burst_mcore.attention.replay import Recompute
from burst_mcore.attention.request import Request
from burst_mcore.attention.resolve import call_of
from burst_mcore.attention.runtime.executor import GroupTransport, transport_of
from burst_mcore.attention.runtime.topology import Topology
from burst_mcore.attention.schedule.actions import Pass


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
    request: Request,
    topology: Topology,
    needs_gradient: bool,
    recompute: Recompute,
    agreement: Agreement,
) -> tuple[Call, Agreed]:
    """Return the call that all ranks make, and their agreement, which says how many tokens each rank holds.

    A call like an earlier one goes ahead on CUDA, and where documents say how long the sequence is. Else only
    the other ranks know whether they hold as many tokens.

    Raises:
        ValueError: the ranks make different calls, or none that is legal.
    """
    tokens, size = request.shard.tokens, request.ranks.size
    even = (tokens,) * size
    if size == 1:
        return call_of(request, even), Agreed(lengths=even)
    signature = {**request.signature, "gradient wanted": str(needs_gradient), **recompute.signature}
    call, kind, may_go_ahead = None, None, False
    with agreement.refusing():
        try:  # as it is if all ranks hold as many tokens
            call = call_of(request, even)
            if_even = call.signature
        except ValueError as error:  # it may be legal with the lengths of the others
            if_even = {"problem": str(error)}
        of_known_length = request.device == "cuda" or request.mask.document_ends is not None
        if call is not None and of_known_length and not recompute.at_most:
            like = request.shard, request.config, request.scores, request.mask.of_layer
            results = request.return_lse, request.sinks, request.rotates, needs_gradient
            choices = call.route, call.direction, call.kernel.name
            kind = "forward", *like, *results, *choices, *recompute.signature.values()
            transport = transport_of(topology, call.route, request.config.max_ctas)
            may_go_ahead = transport.connected(passes_of(call, needs_gradient))
    claim = Claim({"pass": "forward", **signature}, (tokens,), if_even, kind, may_go_ahead)
    meeting = agreement.meet(claim)
    if call is not None and meeting.lengths == even:
        return call, meeting
    with agreement.refusing():  # perhaps of this rank alone: its kernels are its own
        call = call_of(request, meeting.lengths)
    second = agreement.meet(Claim({"pass": "forward, lengths known", **signature, **call.signature}))
    return call, meeting._replace(label=second.label)


def passes_of(call: Call, needs_gradient: bool) -> tuple[Pass, ...]:
    """Return the passes whose communicators a forward makes: its own, and that of its backward."""
    return (Pass.FORWARD, call.direction) if needs_gradient else (Pass.FORWARD,)


def agree_on_backward(
    request: Request,
    call: Call,
    forward: Agreed,
    agreement: Agreement,
    transport: GroupTransport,
    *,
    through_lse: bool,
) -> Agreed:
    """Agree on a backward; ahead of the others if its like was made before and no communicator is missing.

    A call that goes ahead is looked at before the whole backward of autograd returns.
    """
    lse = {"pass": "backward", "gradient through lse": str(through_lse)}
    in_autograd = torch._C._current_graph_task_id() != -1  # else nothing is called at the end
    claim = Claim(
        {**lse, **request.signature, **call.signature},
        kind=("backward", request.shard, request.config, request.scores, call.route, through_lse),
        may_go_ahead=in_autograd and transport.connected((call.direction,)),
        of_call=forward.number,
    )
    return agreement.meet(claim)


def meet(topology: Topology, sync_point: str, *numbers: int) -> list[list[int]]:
    """Return the numbers of all ranks of a sequence, which come to this sync point of their programs.

    The agreement of their ring is asked: a collective of the caller's own is never mistaken for it.

    Raises:
        OthersError: on all of them, at once: some call burst at another sync point.
        RuntimeError: a rank has ended, or did not come within the group's time-out; says where it was last.
    """
    return [[*each] for each in agreement_of(topology).meet(Claim({"at": sync_point}, numbers)).numbers]
