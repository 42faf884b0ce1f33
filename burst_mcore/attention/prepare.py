"""Plans calls ahead of their batch, in the background: packed documents bring a new mask with every batch.

What a call is like (heads, dtypes, configuration, the mask of its layer) is known once it was made; what
comes with the next batch is documents, and where they end. So a loader that has the next batch says
`prepare(Mask.documents(ends), ...)`, and by the time that the batch is attended to, its plans are there.
"""

from __future__ import annotations

import os
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TypeVar

from burst_mcore.attention.arguments import Asked, call_for, legal_lengths, without_layout
from burst_mcore.attention.passes import Call
from burst_mcore.attention.runtime.topology import Topology
from burst_mcore.attention.schedule.actions import Compute
from burst_mcore.attention.schedule.route import program
from burst_mcore.layout import Layout
from burst_mcore.mask import Mask

Batch = TypeVar("Batch")

KINDS = 32
"""Kinds of calls that are remembered."""

_remembered: OrderedDict[Hashable, Asked] = OrderedDict()
_pending: dict[Mask, Future[None]] = {}


def prepare(mask: Mask, *, tokens: int, ranks: int, layout: Layout | str | None = None) -> list[Future[None]]:
    """Plan calls like those that were made, for a batch that will come. Returns at once.

    Planned is every kind of call over so many ranks that this process has made, its own mask but for
    documents intersected with `mask`. A call that comes before its plan is made waits for it. Before the
    first call there is nothing to plan.

    Args:
        mask: what the batch brings, such as Mask.documents(cu_seqlens).
        tokens: of the whole sequence.
        ranks: of the ring.
        layout: the batch's own, if it is dealt by another than the calls before.

    Returns:
        What is under way, to wait for; its errors are those that the calls will have.

    Raises:
        ValueError: mask is no Mask, or the layout is none.
    """
    if not isinstance(mask, Mask):
        raise ValueError(f"mask must be a Mask, got {mask!r}: Mask.documents(cu_seqlens), ...")
    dealt = None if layout is None else Layout.of(layout)
    worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="burst-plans")
    found = []
    for asked in [kind for kind in list(_remembered.values()) if kind.topology.size == ranks]:
        config = asked.config if dealt is None else replace(asked.config, layout=dealt)
        asked = replace(asked, mask=asked.mask & mask, config=config)
        future = worker.submit(_plan, asked, tokens)
        _pending[asked.mask] = future
        future.add_done_callback(partial(_forget, asked.mask))
        found.append(future)
    worker.shutdown(wait=False)  # its thread ends with the last plan: none is left for forks to trip over
    return found


def one_ahead(batches: Iterator[Batch]) -> Iterator[Batch]:
    """The same batches, each handed out once the next was taken, whose plans are made meanwhile.

    An error of `batches` comes behind the batches before it.
    """
    ready: deque[Batch] = deque()
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


def remember(asked: Asked) -> None:
    """Let `prepare` plan calls like this one."""
    bare = Topology(
        asked.topology.rank, asked.topology.size, asked.topology.intra_size, asked.topology.rates
    )  # without process groups, which may be gone by then
    asked = replace(asked, topology=bare, mask=asked.mask.without_documents)
    key = replace(asked, config=without_layout(asked.config), shard=replace(asked.shard, tokens=0))
    _remembered[key] = asked
    _remembered.move_to_end(key)
    while len(_remembered) > KINDS:
        _remembered.popitem(last=False)


def await_plan(mask: Mask) -> None:
    """Wait for plans of this mask that are being made."""
    if _pending:
        future = _pending.get(mask)
        if future is not None:
            future.exception()  # an error is the call's own, and comes again


def _plan(asked: Asked, tokens: int) -> None:
    """Find all that a call needs besides its tensors."""
    size = asked.topology.size
    lengths = legal_lengths(asked.layout, tokens, size)
    own = replace(asked, shard=replace(asked.shard, tokens=lengths[asked.topology.rank]))
    plan_call(call_for(own, lengths))


def plan_call(call: Call) -> None:
    """Find the programs and the tiles of a call, of forward and backward."""
    here = call.position
    for name in ("forward", call.direction):
        for action in program(call.rank, call.route, name, call.plan):
            if isinstance(action, Compute) and name == "query":
                call.tiles(action.source, here, k_part=action.part)
            elif isinstance(action, Compute):
                call.tiles(here, action.source, q_part=action.part)


def _forget(mask: Mask, done: Future[None]) -> None:
    if _pending.get(mask) is done:
        del _pending[mask]


os.register_at_fork(after_in_child=_pending.clear)  # the thread that would have planned stays behind
