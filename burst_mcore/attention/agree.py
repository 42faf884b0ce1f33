"""How the ranks of a ring agree on a forward, its backward, and errors, so that no rank waits in vain."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch

from burst_mcore.agreement import DESTROYED, Agreed, Agreement
from burst_mcore.attention.call import Call
from burst_mcore.attention.prepare import call_of
from burst_mcore.attention.replay import Recompute
from burst_mcore.attention.request import Request
from burst_mcore.attention.runtime.executor import GroupTransport, transport_of
from burst_mcore.attention.runtime.topology import Topology
from burst_mcore.attention.schedule.actions import Pass


class CallRecord(NamedTuple):
    """The properties of a forward on which the ranks agreed, for its backward."""

    number: int
    """The number of the call."""
    lengths: tuple[int, ...]
    """The tokens of each rank."""


def agreement_of(topology: Topology) -> Agreement | None:
    """Return the agreement of a ring, made at its first use; None for one rank, which agrees with nobody."""
    communicators = topology.communicators
    if communicators is None:
        return None
    if communicators.destroyed:
        raise RuntimeError(DESTROYED)
    if communicators.agreement is None:
        communicators.agreement = Agreement(
            communicators.control, communicators.ranks, topology.rank, communicators.abort
        )
    return communicators.agreement


@contextlib.contextmanager
def refusing(agreement: Agreement | None) -> Iterator[None]:
    """Tell the other ranks if the block fails, so that none of them waits."""
    try:
        yield
    except BaseException as error:
        if agreement is not None:
            agreement.refuse(error)
        raise


def agree_on_call(
    request: Request,
    topology: Topology,
    needs_gradient: bool,
    recompute: Recompute,
    agreement: Agreement | None,
) -> tuple[Call, Agreed, tuple[int, ...]]:
    """Return the call that all ranks make, their agreement, and how many tokens each rank holds.

    A call like an earlier one goes ahead on CUDA, and where documents say how long the sequence is. Else only
    the other ranks know whether they hold as many tokens.

    Raises:
        ValueError: the ranks make different calls, or none that is legal.
    """
    tokens, size = request.shard.tokens, request.ranks.size
    even = (tokens,) * size
    if agreement is None:
        return call_of(request, even), Agreed(0, None, 0), even
    manner = {"gradient wanted": str(needs_gradient), **recompute.signature}
    signature = {**request.signature, **manner}
    call, problem, details = None, None, {}
    description, ahead = None, False
    with refusing(agreement):
        try:  # as it is if all ranks hold as many tokens
            call = call_of(request, even)
            details = call.signature
        except ValueError as error:  # it may be legal with the lengths of the others
            problem, details = error, {"problem": str(error)}
        of_known_length = request.device == "cuda" or request.mask.document_ends is not None
        if call is not None and not recompute.at_most and of_known_length:
            description = "forward", *_alike(request, call), *manner.values()
            transport = transport_of(topology, call.route, request.config.max_ctas)
            ahead = description in agreement.seen and transport.connected(passes_of(call, needs_gradient))
    agreed = agreement.meet({"pass": "forward", **signature}, details, tokens, ahead=ahead)
    if description is not None and agreed.lengths is None:
        agreement.seen[description] = True
    lengths = agreed.lengths
    if lengths is not None:
        with refusing(agreement):  # perhaps of this rank alone: its kernels are its own
            call = call_of(request, tuple(lengths))
        known = agreement.agree({"pass": "forward, lengths known", **signature, **call.signature})
        agreed = agreed._replace(label=known.label)
    elif problem is not None:
        raise problem
    assert call is not None
    return call, agreed, even if lengths is None else tuple(lengths)


def passes_of(call: Call, needs_gradient: bool) -> tuple[Pass, ...]:
    """Return the passes whose communicators a forward makes: its own, and that of its backward."""
    return (Pass.FORWARD, call.direction) if needs_gradient else (Pass.FORWARD,)


def _alike(request: Request, call: Call) -> tuple[object, ...]:
    """Return the properties by which a call is like an earlier one, whatever the documents."""
    own = request.shard, request.config, request.scores, request.mask.of_layer
    wanted = request.return_lse, request.sinks, request.rotates
    return *own, *wanted, call.route, call.direction, call.kernel.name


def agree_on_backward(
    request: Request,
    call: Call,
    record: CallRecord,
    agreement: Agreement | None,
    transport: GroupTransport,
    *,
    through_lse: bool,
) -> Agreed:
    """Agree on a backward; ahead of the others if its like was made before and no communicator is missing.

    A call that goes ahead is looked at before the whole backward of autograd returns.
    """
    if agreement is None:
        return Agreed(0, None, 0)
    signature = {
        "pass": "backward",
        "gradient through lse": str(through_lse),
        **request.signature,
        **call.signature,
    }
    description = "backward", request.shard, request.config, request.scores, call.route, through_lse
    in_autograd = torch._C._current_graph_task_id() != -1  # else nothing is called at the end
    ahead = in_autograd and description in agreement.seen and transport.connected((call.direction,))
    agreed = agreement.meet(signature, {}, 0, ahead=ahead, of_call=record.number)
    agreement.seen[description] = True
    if ahead:
        torch.autograd.Variable._execution_engine.queue_callback(agreement.settle)
    return agreed
