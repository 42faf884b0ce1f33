"""The resolution of requests to calls (cached), their communicators, and plans of future batches.

Packed documents bring a new mask with every batch, but a layer's heads, dtypes and configuration stay the
same. So a loader that has the next batch calls `prepare(Mask.documents(ends), ...)`. Every earlier kind of
call is then planned for that mask, while the current batch is computed.
"""

from __future__ import annotations

import os
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product
from typing import Any, TypeVar

from burst_mcore.attention.call import Call
from burst_mcore.attention.candidates import (
    Question,
    Ranks,
    placements,
    route_for,
    searched_rings,
    why_not_placed,
)
from burst_mcore.attention.checks import check_lengths, legal_lengths
from burst_mcore.attention.choose import decide
from burst_mcore.attention.geometry.plan import plan_of
from burst_mcore.attention.geometry.shard import Shard
from burst_mcore.attention.geometry.tiles import launches_of
from burst_mcore.attention.kernels.kernel import Problem
from burst_mcore.attention.kernels.table import choose
from burst_mcore.attention.request import Request
from burst_mcore.attention.runtime.executor import GroupTransport
from burst_mcore.attention.runtime.topology import Topology
from burst_mcore.attention.schedule.actions import Pass
from burst_mcore.config import BurstConfig
from burst_mcore.layout import Layout
from burst_mcore.mask import Mask
from burst_mcore.words import brief

AnyBatch = TypeVar("AnyBatch")

CALLS = 64
"""The number of cached calls, equal to that of plans: the most recently used."""
KINDS = 32
"""The number of cached kinds of calls, for plans of other documents: the most recently used."""

_remembered: OrderedDict[Hashable, Request] = OrderedDict()
_pending: dict[Mask, Future[None]] = {}


@lru_cache(maxsize=CALLS)
def call_of(request: Request, lengths: tuple[int, ...]) -> Call:
    """Return the call of a request with lengths[r] tokens on rank r. Cached.

    Raises:
        ValueError: as `resolve`, on all ranks.
    """
    await_plan(request.mask)
    call = resolve(request, lengths)
    remember(request)
    return call


def resolve(request: Request, lengths: Sequence[int]) -> Call:
    """Return the call with lengths[r] tokens on rank r; ValueError, on all ranks, if it is not legal."""
    n, size = sum(lengths), request.ranks.size
    check_lengths(request.layout, tuple(lengths))
    request.mask.check(n)
    mask = request.mask.clipped(n)
    shard = replace(request.shard, tokens=request.layout.padded(n, size) // size)
    question = Question(shard, request.layout, mask, n, request.ranks, request.rates)
    route, direction, latent_rotates = decide(request.config, question, request.rotates)
    shard = replace(shard, latent_rotates=latent_rotates)
    problem = problem_of(
        shard.pooled(route.heads),
        device=request.device,
        launches=launches_of(mask, n),
        documents=mask.document_ends is not None,
        softcap=request.scores.softcap is not None,
        deterministic=request.scores.deterministic,
    )
    return Call(
        rank=request.rank,
        route=route,
        plan=plan_of(request.layout, mask, n, route.placement),
        scores=request.scores,
        problem=problem,
        kernel=choose(request.config.kernel, problem),
        direction=direction,
        grad_dtype=shard.grad_dtype,
        kv_heads=shard.carried[0],
        latent_rotates=shard.latent_rotates,
        lse_at_home=request.return_lse or request.sinks,
    )


def problem_of(shard: Shard, **others: Any) -> Problem:
    """Return the kernel problem of a shard on the ring, with the given other fields."""
    names = "dtype", "heads", "kv_heads", "head_dim", "value_dim"
    return Problem(**{name: getattr(shard, name) for name in names}, **others)


def connect(topology: Topology, config: BurstConfig) -> None:
    """Make the communicators of calls with `config` now, instead of in the first call.

    Collective over the ring; a no-op on gloo. Options "auto" are decided only in a call.

    Raises:
        ValueError: head_parallel does not divide the ranks.
    """
    if topology.size == 1:
        return
    degree = config.head_parallel if isinstance(config.head_parallel, int) else 1
    ranks = Ranks(topology.size, topology.intra_size)
    why_not = why_not_placed(degree, ranks)
    if why_not is not None:
        raise ValueError(
            f"head_parallel={degree} is not legal with {ranks.size} ranks, {ranks.intra} a node: {why_not}"
        )
    variants = product(searched_rings(config.ring, ranks), placements(config.head_placement, degree, ranks))
    for ring, outer in variants:
        route = route_for(degree, ranks, ring=ring, overlap=config.overlap, outer=outer)
        transport = GroupTransport(topology, route, config.max_ctas)
        for pass_ in Pass:
            transport.connect(pass_)


def prepare(
    mask: Mask | Callable[[Mask], Mask], *, tokens: int, ranks: int, layout: Layout | str | None = None
) -> list[Future[None]]:
    """Plan the calls of a future batch, in a thread. Returns at once.

    This plans every kind of call over `ranks` ranks that this process has made: with its own mask, without
    documents and trees, intersected with `mask`. A call waits for a plan of it in progress. Before the first
    call there is nothing to plan.

    Args:
        mask: the mask of the batch, such as Mask.documents(cu_seqlens). Or a function from a layer's mask to
            its mask for the batch, such as partial(tree_mask, tree); layers with a ValueError are left out.
        tokens: tokens of the whole sequence.
        ranks: ranks of the ring.
        layout: the batch's layout; default that of earlier calls.

    Returns:
        Futures of the plans, with the errors that the calls will raise.

    Raises:
        ValueError: mask is no Mask, or layout is no layout.
    """
    if not (isinstance(mask, Mask) or callable(mask)):
        raise ValueError(f"mask must be a Mask, got {brief(mask)}: Mask.documents(cu_seqlens), ...")
    new_layout = None if layout is None else Layout.of(layout)
    worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="burst-plans")
    futures = []
    for request in [kind for kind in list(_remembered.values()) if kind.ranks.size == ranks]:
        config = request.config if new_layout is None else replace(request.config, layout=new_layout)
        try:
            target = request.mask & mask if isinstance(mask, Mask) else mask(request.mask)
        except ValueError:  # batches with this mask have no such call
            continue
        future = _pending[target] = worker.submit(_plan, replace(request, mask=target, config=config), tokens)
        future.add_done_callback(partial(_forget, target))
        futures.append(future)
    worker.shutdown(wait=False)  # the thread ends with the last plan, so that forks find no thread
    return futures


def one_ahead(batches: Iterator[AnyBatch]) -> Iterator[AnyBatch]:
    """Yield the same batches, one behind the iterator, so that the next batch is planned meanwhile.

    An error of `batches` is raised after all earlier batches.
    """
    ready: deque[AnyBatch] = deque()
    while True:
        failure: Exception | None = None
        try:
            ready.append(next(batches))
        except Exception as error:
            failure = error
        if len(ready) > 1 or (failure is not None and ready):
            yield ready.popleft()
        if isinstance(failure, StopIteration):
            return
        if failure is not None:
            raise failure


def remember(request: Request) -> None:
    """Add the request's kind to the kinds that `prepare` plans."""
    request = replace(request, mask=request.mask.of_layer)
    key = replace(
        request, config=replace(request.config, layout="zigzag"), shard=replace(request.shard, tokens=0)
    )
    _remembered[key] = request
    _remembered.move_to_end(key)
    while len(_remembered) > KINDS:
        _remembered.popitem(last=False)


def await_plan(mask: Mask) -> None:
    """Wait for a plan of this mask in progress."""
    if _pending:
        future = _pending.get(mask)
        if future is not None:
            future.exception()  # the call raises the same error


def _plan(request: Request, tokens: int) -> None:
    """Plan a call; not by `call_of`, which waits for this plan."""
    lengths = legal_lengths(request.layout, tokens, request.ranks.size)
    own_request = replace(request, shard=replace(request.shard, tokens=lengths[request.rank]))
    plan_call(resolve(own_request, lengths))


def plan_call(call: Call) -> None:
    """Compute the programs, bound, and the tiles of a call, of forward and backward."""
    for pass_ in (Pass.FORWARD, call.direction):
        call.bound(pass_)
        deque(call.tiles_of_pass(pass_), maxlen=0)


def _forget(mask: Mask, future: Future[None]) -> None:
    if _pending.get(mask) is future:
        del _pending[mask]


os.register_at_fork(after_in_child=_pending.clear)  # a child process has no planning thread
