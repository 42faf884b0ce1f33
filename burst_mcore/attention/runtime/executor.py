"""The executor of a program: it posts and awaits messages, and calls back for buffers, copies and maths."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from functools import lru_cache
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from burst_mcore.attention.geometry.rows import Rows, gather, relative_to, scatter_views
from burst_mcore.attention.runtime.communicators import Carrier
from burst_mcore.attention.runtime.topology import Topology
from burst_mcore.attention.schedule.actions import (
    HOME,
    Accumulate,
    Action,
    Add,
    Channel,
    Compute,
    Kind,
    Link,
    Pack,
    Pass,
    Program,
    Recv,
    Return,
    Send,
    Unpack,
    Wait,
    hops,
)
from burst_mcore.attention.schedule.communicator import communicator_of
from burst_mcore.attention.schedule.ring import kind_of
from burst_mcore.attention.schedule.route import Route, program
from burst_mcore.attention.schedule.trace import Recorder, recorder

Bundle = tuple[Tensor, ...]
OnCompute = Callable[[int, int | None, Bundle, Rows | None], None]
OnAccumulate = Callable[[Bundle, Rows | None, bool], None]
New = Callable[[Kind, Rows | None], Bundle]
Free = Callable[[Bundle], None]


class Work(Protocol):
    """A message under way."""

    def wait(self) -> object: ...


class Transport(Protocol):
    """Carries bundles between the ranks of one ring."""

    def connect(self, pass_: Pass) -> None:
        """Get ready for a pass; every rank does, also one that will send and receive nothing."""
        ...

    def post(self, channel: Channel, messages: Sequence[tuple[Send | Recv, Bundle]]) -> Sequence[Work]:
        """Start all messages as one batch."""
        ...


class ProcessGroups:
    """Messages over torch.distributed: on CUDA a wait holds back the current stream, never the host."""

    _TAGS = tuple(Kind)

    def __init__(self, topology: Topology, route: Route, max_ctas: int) -> None:
        self._topology, self._route, self._max_ctas = topology, route, max_ctas
        self._carriers: dict[tuple[Link, Kind], Carrier] = {}
        self._connected: set[Pass] = set()
        self._first_tag = 0

    def labelled(self, label: int) -> ProcessGroups:
        """Return the transport of one call: gloo matches no message of it with one of another label.

        gloo ends the process when a message is longer than the buffer that awaits it, as those of different
        calls may be.
        """
        transport = copy(self)
        transport._first_tag = label % 2**21 * 2**9
        return transport

    def connected(self, passes: Iterable[Pass]) -> bool:
        """Return whether `connect` has nothing left to make for these passes."""
        return self._connected.issuperset(passes)

    def post(self, channel: Channel, messages: Sequence[tuple[Send | Recv, Bundle]]) -> Sequence[Work]:
        """Start all messages as one batch, in their order (receives first is fastest on gloo)."""
        group, place = self.carrier(channel)
        first_tag = self._first_tag + 64 * self._TAGS.index(channel.kind)
        return dist.batch_isend_irecv(
            [
                dist.P2POp(
                    dist.isend if isinstance(action, Send) else dist.irecv,
                    tensor,
                    group=group,
                    group_peer=place[action.peer],
                    tag=first_tag + index,
                )
                for action, bundle in messages
                for index, tensor in enumerate(bundle)
            ]
        )

    def connect(self, pass_: Pass) -> None:
        """Make the process groups that carry a pass. Collective, and the same on all ranks.

        Masks leave some ranks without messages, so that it cannot wait for the first of them.
        """
        for channel in _channels(self._topology.rank, self._route, pass_):
            self.carrier(channel)
        self._connected.add(pass_)

    def carrier(self, channel: Channel) -> Carrier:
        """Return the process group of a channel, made at its first use."""
        key = channel.link, channel.kind
        if key not in self._carriers:
            topology = self._topology
            assert topology.communicators is not None
            wanted = communicator_of(channel, topology.rank, self._route, topology.intra_size)
            self._carriers[key] = topology.communicators.carrier(*wanted, self._max_ctas)
        return self._carriers[key]


def transport_of(topology: Topology, route: Route, max_ctas: int) -> ProcessGroups:
    """Return the transport of a route over the process groups of a topology, made at its first call."""
    if topology.communicators is None:
        return ProcessGroups(topology, route, max_ctas)
    transports, key = topology.communicators.transports, (topology.intra_size, route, max_ctas)
    if key not in transports:
        transports[key] = ProcessGroups(topology, route, max_ctas)
    transport: ProcessGroups = transports[key]
    return transport


@lru_cache(maxsize=1024)
def _channels(rank: int, route: Route, pass_: Pass) -> tuple[Channel, ...]:
    """Return the channels of a pass in which every rank reads every row, in an order that all ranks share."""
    channels = (channel for channel, _ in hops(program(rank, route, pass_)) if channel is not None)
    return tuple(sorted({channel._replace(part=0) for channel in channels}))


_ABANDONED: list[object] = []
"""Messages and buffers of passes that failed: the network may still write there."""


class Exchange(Protocol):
    """One kind of message of the all-to-all over a head group."""

    def pack(self, member: int) -> Bundle:
        """Return the share of `member` as one contiguous tensor: a message has a cost besides its bytes."""
        ...

    def empty(self) -> Bundle:
        """Return room for the share that comes from another member."""
        ...

    def unpack(self, member: int, parcel: Bundle | None) -> None:
        """Copy the share of `member` to its place; None stands for this rank's own share."""
        ...


class Ring:
    """The buffers of one pass over the ring and the execution of its program.

    Args:
        rank: this rank's number in the ring, for error messages.
        home: the rank's own bundle, read only; contiguous tensors.
        new: makes an uninitialised buffer for some rows (None: all), of a bundle (DATA) or of a travelling
            gradient (SUM).
        free: takes back a buffer that is not needed any more.
        exchanges: by kind of message, if heads are shared.
    """

    def __init__(
        self,
        transport: Transport,
        rank: int,
        home: Bundle,
        new: New,
        free: Free,
        exchanges: Mapping[Kind, Exchange] | None = None,
    ) -> None:
        self._transport = transport
        self._rank = rank
        self._new, self._free = new, free
        self._exchanges = exchanges or {}
        self._buffers: dict[str, Bundle] = {HOME: home}
        self._rows: dict[str, Rows | None] = {}
        """Which rows the buffers hold, if not all."""
        self._under_way: dict[Channel, tuple[list[Action], list[Work], list[Bundle]]] = {}

    def run(self, program: Program, compute: OnCompute, accumulate: OnAccumulate | None = None) -> None:
        """Execute `program`.

        compute(source, part, bundle, rows) attends to a bundle of these rows. Then, while the bundle is still
        in its buffer, accumulate(sums, rows, first) adds its gradients to the travelling sums, or sets them
        if `first`.

        Raises:
            RuntimeError: a hop failed; the message names its step and ranks.
        """
        record = recorder()
        try:
            for channel, actions in hops(program):
                if channel is not None:
                    self._post(channel, actions, record)
                    continue
                for action in actions:
                    with record.span(action):
                        match action:
                            case Compute():
                                rows = self._rows.get(action.buffer)
                                compute(action.source, action.part, self.buffer(action.buffer), rows)
                            case Accumulate():
                                assert accumulate is not None
                                sums = self._room(action.buffer, action.rows, action.first)
                                accumulate(sums, action.rows, action.first)
                            case _:
                                self._execute(action)
        except BaseException:
            _ABANDONED.append((self._under_way, self._buffers))
            raise

    def _execute(self, action: Action) -> None:
        match action:
            case Wait():
                self._wait(action)
            case Add():
                self._add(action)
            case Return():
                pass
            case Pack():
                self._buffers[action.buffer] = self._exchanges[action.kind].pack(action.member)
            case Unpack():
                piece = self._buffers.get(action.buffer)
                self._exchanges[action.kind].unpack(action.member, piece)

    def buffer(self, name: str) -> Bundle:
        """Return the bundle in the buffer `name`, made at its first use."""
        if name not in self._buffers:
            self._buffers[name] = self._new(kind_of(name), self._rows.get(name))
        return self._buffers[name]

    def rows(self, name: str) -> Rows | None:
        """Return which rows the buffer holds; None: all."""
        return self._rows.get(name)

    def _room(self, name: str, rows: Rows | None, fresh: bool) -> Bundle:
        """Return the buffer with room for `rows`: uninitialised if `fresh`, else with its data and zeros."""
        if self._rows.get(name) == rows:
            return self.buffer(name)
        old_rows, old = self._rows.get(name), self._buffers.pop(name, None)
        self._rows[name] = rows
        new = self.buffer(name)
        if old is not None and not fresh:
            assert old_rows is not None  # a buffer with room for all rows never grows
            for total, before in zip(new, old, strict=True):
                total.zero_()
                for to, values in scatter_views(total, relative_to(rows, old_rows), before):
                    to.copy_(values)
        if old is not None:
            self._free(old)
        return new

    def _add(self, action: Add) -> None:
        other_rows = self._rows.get(action.other)
        sums = self._room(action.buffer, action.rows, action.first)
        for total, other in zip(sums, self.buffer(action.other), strict=True):
            if other_rows == action.rows:
                (total.copy_ if action.first else total.add_)(other)
                continue
            assert other_rows is not None and not action.first
            for to, values in scatter_views(total, relative_to(action.rows, other_rows), other):
                to.add_(values)

    def _post(self, channel: Channel, actions: list[Action], record: Recorder) -> None:
        messages, copies = [], []
        for action in actions:
            assert isinstance(action, (Send, Recv))
            if isinstance(action, Send):
                bundle = self._part(action)
                if bundle is not self.buffer(action.buffer):
                    copies.append(bundle)
            elif channel.link == Link.HEADS:
                bundle = self._buffers[action.buffer] = self._exchanges[channel.kind].empty()
            else:
                bundle = self._room(action.buffer, action.rows, fresh=True)
            messages.append((action, bundle))
        try:
            works = self._transport.post(channel, messages)
        except RuntimeError as error:
            raise self._broken(actions, error) from error
        posted, under_way, copies_under_way = self._under_way.setdefault(channel, ([], [], []))
        posted += actions
        under_way += works
        copies_under_way += copies
        record.posted(channel, actions)

    def _part(self, action: Send) -> Bundle:
        """Return the rows that are sent: the buffer itself, or a copy of some of its rows."""
        bundle, buffer_rows = self.buffer(action.buffer), self._rows.get(action.buffer)
        if action.channel.link == Link.HEADS or buffer_rows == action.rows:
            return bundle
        assert action.rows is not None
        copy = self._new(kind_of(action.buffer), action.rows)
        for to, x in zip(copy, bundle, strict=True):
            to.copy_(gather(x, relative_to(buffer_rows, action.rows)))
        return copy

    def _wait(self, action: Wait) -> None:
        posted, works, copies = self._under_way.pop(action.channel)
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise self._broken(posted, error) from error
        for bundle in copies:
            self._free(bundle)

    def _broken(self, actions: Sequence[Action], error: RuntimeError) -> RuntimeError:
        hop = actions[0]
        assert isinstance(hop, (Send, Recv))
        sources = sorted({action.peer for action in actions if isinstance(action, Recv)})
        targets = sorted({action.peer for action in actions if isinstance(action, Send)})
        return RuntimeError(
            f"burst_attention on rank {self._rank} of the ring: the {hop.channel} hop of step {hop.step} "
            f"(from ranks {sources}, to ranks {targets}) failed: a rank is gone or did not come in time; see "
            f"for the first error among the other ranks ({error})"
        )
