"""Resolves requests to calls, once for each; and plans calls ahead of their batch, in the background.

Packed documents bring a new mask with every batch, but a layer's heads, dtypes and configuration stay the
same. So a loader that has the next batch calls `prepare(Mask.documents(ends), ...)`. Every kind of call that
was made before is then planned for that mask, while the batch before is computed.
"""

from __future__ import annotations

import os
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache, partial
from typing import TypeVar

from burst_mcore.attention.call import Call
from burst_mcore.attention.checks import legal_lengths
from burst_mcore.attention.request import Request, resolve
from burst_mcore.attention.schedule.actions import Pass
from burst_mcore.layout import Layout
from burst_mcore.mask import Mask
from burst_mcore.words import brief

AnyBatch = TypeVar("AnyBatch")

CALLS = 64
"""Calls that are remembered, as many as plans: those used last."""
KINDS = 32
"""Kinds of calls that are remembered, to be planned for other documents: those used last."""

_remembered: OrderedDict[Hashable, Request] = OrderedDict()
_pending: dict[Mask, Future[None]] = {}


@lru_cache(maxsize=CALLS)
def call_of(request: Request, lengths: tuple[int, ...]) -> Call:
    """Return the call that a request resolves to where rank r holds lengths[r] tokens. Cached.

    Raises:
        ValueError: as `resolve`, on all ranks.
    """
    await_plan(request.mask)
    call = resolve(request, lengths)
    remember(request)
    return call


def prepare(
    mask: Mask | Callable[[Mask], Mask], *, tokens: int, ranks: int, layout: Layout | str | None = None
) -> list[Future[None]]:
    """Plan calls like those that were made, for a batch that will come. Returns at once.

    This plans every kind of call over so many ranks that this process has made. Each keeps its own mask but
    for documents and trees, intersected with `mask`. A call that comes before its plan is made waits for the
    plan. Before the first call there is nothing to plan.

    Args:
        mask: the mask of the batch, such as Mask.documents(cu_seqlens). Or a function that returns the mask
            of a layer, such as partial(tree_mask, tree), of the layer's own. Its ValueErrors are left out.
        tokens: tokens of the whole sequence.
        ranks: ranks of the ring.
        layout: the batch's own layout, if it is not that of the calls before.

    Returns:
        Futures of the plans, to wait for; their errors are those that the calls will have.

    Raises:
        ValueError: mask is no Mask, or the layout is no layout.
    """
    if not (isinstance(mask, Mask) or callable(mask)):
        raise ValueError(f"mask must be a Mask, got {brief(mask)}: Mask.documents(cu_seqlens), ...")
    dealt = None if layout is None else Layout.of(layout)
    worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="burst-plans")
    futures = []
    for request in [kind for kind in list(_remembered.values()) if kind.ranks.size == ranks]:
        config = request.config if dealt is None else replace(request.config, layout=dealt)
        try:
            own = request.mask & mask if isinstance(mask, Mask) else mask(request.mask)
        except ValueError:  # batches like this one have no such call
            continue
        future = _pending[own] = worker.submit(_plan, replace(request, mask=own, config=config), tokens)
        future.add_done_callback(partial(_forget, own))
        futures.append(future)
    worker.shutdown(wait=False)  # its thread ends with the last plan: none is left for forks to trip over
    return futures


def one_ahead(batches: Iterator[AnyBatch]) -> Iterator[AnyBatch]:
    """Yield the same batches, each once the next was taken, so that its plans are made meanwhile.

    An error of `batches` is raised after the batches before it.
    """
    ready: deque[AnyBatch] = deque()
    while True:
        ended: Exception | None = None
        try:
            ready.append(next(batches))
        except Exception as error:
            ended = error
        if len(ready) > 1 or (ended is not None and ready):
            yield ready.popleft()
        if isinstance(ended, StopIteration):
            return
        if ended is not None:
            raise ended


def remember(request: Request) -> None:
    """Let `prepare` plan calls like this one."""
    request = replace(request, mask=request.mask.of_layer)
    key = replace(
        request, config=replace(request.config, layout="zigzag"), shard=replace(request.shard, tokens=0)
    )
    _remembered[key] = request
    _remembered.move_to_end(key)
    while len(_remembered) > KINDS:
        _remembered.popitem(last=False)


def await_plan(mask: Mask) -> None:
    """Wait for plans of this mask that are being made."""
    if _pending:
        future = _pending.get(mask)
        if future is not None:
            future.exception()  # an error is the call's own, and comes again


def _plan(request: Request, tokens: int) -> None:
    """Plan a call; not by `call_of`, which waits for this plan."""
    lengths = legal_lengths(request.layout, tokens, request.ranks.size)
    own = replace(request, shard=replace(request.shard, tokens=lengths[request.rank]))
    plan_call(resolve(own, lengths))


def plan_call(call: Call) -> None:
    """Make the programs, bound, and the tiles of a call, of forward and backward."""
    for pass_ in (Pass.FORWARD, call.direction):
        call.bound(pass_)
        deque(call.tiles_of_pass(pass_), maxlen=0)


def _forget(mask: Mask, future: Future[None]) -> None:
    if _pending.get(mask) is future:
        del _pending[mask]


os.register_at_fork(after_in_child=_pending.clear)  # the thread that would have planned stays behind
