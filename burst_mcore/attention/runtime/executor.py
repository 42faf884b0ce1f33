"""The executor of a program: posts messages, waits for them, and calls back for buffers and maths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from burst_mcore.attention.geometry.rows import Rows, gather, scatter_views
from burst_mcore.attention.runtime import binding
from burst_mcore.attention.runtime.communicators import Carrier
from burst_mcore.attention.runtime.topology import Topology
from burst_mcore.attention.schedule.actions import (
    HOME,
    RECORDERS,
    Action,
    Channel,
    Compute,
    Kind,
    Link,
    Pack,
    Pass,
    Recv,
    Send,
    Unpack,
    Wait,
    posted_together,
)
from burst_mcore.attention.schedule.route import Route, communicator_of, program

Buffer = tuple[Tensor, ...]
OnCompute = Callable[[Compute, Buffer, Rows | None, bool], None]
OnAccumulate = Callable[[Buffer, Rows | None, bool, Buffer | None], None]
OnKeep = Callable[[Buffer | None, Rows | None], None]
New = Callable[[Kind, Rows | None], Buffer]
Free = Callable[[Buffer], None]


class MessageWork(Protocol):
    """A message in flight."""

    def wait(self) -> object: ...


class Transport(Protocol):
    """The messages of blocks between the ranks of one ring."""

    abandoned: list[object]
    """Messages and buffers of failed passes: the network may still write to them."""

    def post(self, channel: Channel, messages: Sequence[tuple[Send | Recv, Buffer]]) -> Sequence[MessageWork]:
        """Start all messages as one batch."""


class GroupTransport:
    """Messages over torch.distributed: on CUDA a wait blocks the current stream, never the host."""

    _TAGS = tuple(Kind)

    def __init__(self, topology: Topology, route: Route, max_ctas: int) -> None:
        self._topology, self._route, self._max_ctas = topology, route, max_ctas
        self._carriers: dict[tuple[Link, Kind], Carrier] = {}
        self._connected = set(Pass) if topology.communicators is None else set()
        self._first_tag = 0
        self.abandoned = [] if topology.communicators is None else topology.communicators.abandoned

    def labelled(self, label: int) -> GroupTransport:
        """Return the transport of one call, with tags of its own: messages of two calls never match.

        Gloo ends the process when a message is longer than its receive buffer, so a match between
        different calls would be fatal.
        """
        transport = GroupTransport.__new__(GroupTransport)
        vars(transport).update(vars(self), _first_tag=label % 2**21 * 2**9)
        return transport

    def post(self, channel: Channel, messages: Sequence[tuple[Send | Recv, Buffer]]) -> Sequence[MessageWork]:
        """Start all messages as one batch, in their order (receives first is fastest on gloo)."""
        group, place = self.carrier(channel)
        first_tag = self._first_tag + 64 * self._TAGS.index(channel.kind)
        operations = []
        for action, block in messages:
            do = dist.isend if isinstance(action, Send) else dist.irecv
            for tag, tensor in enumerate(block, first_tag):
                operations.append(dist.P2POp(do, tensor, group=group, group_peer=place[action.peer], tag=tag))
        return dist.batch_isend_irecv(operations)

    def connect(self, pass_: Pass) -> None:
        """Make the process groups of a pass. Collective, and the same on all ranks.

        A rank without messages under the mask joins, too: so groups are made ahead of the first message.
        """
        if pass_ not in self._connected:
            for channel in _channels(self._topology.rank, self._route, pass_):
                self.carrier(channel)
            self._connected.add(pass_)

    def carrier(self, channel: Channel) -> Carrier:
        """Return the process group of a channel, made at the first use."""
        key = channel.link, channel.kind
        if key not in self._carriers:
            topology = self._topology
            assert topology.communicators is not None
            communicator = communicator_of(channel, topology.rank, self._route, topology.intra_size)
            self._carriers[key] = topology.communicators.carrier(*communicator, self._max_ctas)
        return self._carriers[key]


def transport_of(topology: Topology, route: Route, max_ctas: int) -> GroupTransport:
    """Return the transport of a route over the process groups of a topology, cached by route."""
    if topology.communicators is None:
        return GroupTransport(topology, route, max_ctas)
    transports, key = topology.communicators.transports, (topology.intra_size, route, max_ctas)
    if key not in transports:
        transports[key] = GroupTransport(topology, route, max_ctas)
    transport: GroupTransport = transports[key]
    return transport


@lru_cache(maxsize=1024)
def _channels(rank: int, route: Route, pass_: Pass) -> tuple[Channel, ...]:
    """Return the channels of a pass in which every rank reads every row, in an order that all ranks share."""
    channels = (channel for channel, _ in posted_together(program(rank, route, pass_)) if channel is not None)
    return tuple(sorted({channel._replace(distance=0) for channel in channels}))


class Exchange(Protocol):
    """An all-to-all of one kind of message in a head group."""

    def pack(self, action: Pack) -> Buffer:
        """Return the parcel for a member, contiguous."""

    def empty(self) -> Buffer:
        """Return a receive buffer for the parcel of another member."""

    def unpack(self, action: Unpack, parcel: Buffer | None) -> None:
        """Copy the parcel of a member to its rows and heads; None stands for this rank's own part."""


class Executor:
    """The buffers of one pass and the execution of its program: over a ring, or a direct exchange.

    Args:
        rank: this rank's number in the ring, for error messages.
        home: the rank's own block, read only; contiguous tensors.
        new: makes an uninitialised buffer for some rows (None: all) of a block (DATA), a rotating gradient
            (GRADIENT) or a complete gradient (TOTAL).
        free: takes back a buffer after its last use.
        exchanges: by kind of message, under head x ring.
        total_dtype: of complete sums (TOTAL).
    """

    def __init__(
        self,
        transport: Transport,
        rank: int,
        home: Buffer,
        new: New,
        free: Free,
        exchanges: Mapping[Kind, Exchange] | None = None,
        total_dtype: torch.dtype | None = None,
    ) -> None:
        self._transport = transport
        self._rank = rank
        self._new, self._free = new, free
        self._exchanges = exchanges or {}
        self._total_dtype = total_dtype
        self._buffers: dict[str, Buffer] = {HOME: home}
        self._under_way: dict[Channel, tuple[list[Action], list[MessageWork], list[Buffer]]] = {}

    def run(
        self,
        bound: binding.Bound,
        compute: OnCompute,
        accumulate: OnAccumulate | None = None,
        keep: OnKeep | None = None,
    ) -> None:
        """Execute the steps of a program.

        compute(action, block, rows, is_last) attends to a block of these rows; is_last: no later compute
        reads a block of the same ring rank. Then, while the block is still in its buffer,
        accumulate(sums, rows, first, total) adds its gradients to the rotating sums, or sets them if `first`.
        With `total` the sums are complete, and are written there. Gradients of the rank's own block go to
        keep(sums, rows): the received sums of other ranks, or None after the compute of the own block.

        Raises:
            RuntimeError: a message failed; the error names its step and ranks.
        """
        self._compute, self._accumulate, self._keep_own = compute, accumulate, keep
        carry_out, record = self._CARRY_OUT, RECORDERS[-1] if RECORDERS else None
        try:
            for step in bound:
                if record is None or isinstance(step, binding.Drop):
                    carry_out[type(step)](self, step)
                elif isinstance(step, binding.Post):
                    self._post(step)
                    record.posted(step.channel, step.actions)
                else:
                    with record.span(step if isinstance(step, (Wait, Pack, Unpack)) else step.action):
                        carry_out[type(step)](self, step)
        except BaseException:
            self._transport.abandoned.append((self._under_way, self._buffers))
            raise
        self._buffers.clear()  # before the results are allocated

    def _compute_step(self, step: binding.ComputeStep) -> None:
        self._compute(step.action, self._buffers[step.action.buffer], step.rows, step.is_last)

    def _accumulate_step(self, step: binding.AccumulateStep) -> None:
        assert self._accumulate is not None
        sums = self._room(step.sums)
        total = None if step.total is None else self._total(step.total, sums)
        self._accumulate(sums, step.sums.rows, step.action.first, None if total is sums else total)

    def _keep_step(self, step: binding.KeepStep) -> None:
        assert self._keep_own is not None
        for buffer, rows in step.sums:
            self._keep_own(self._buffers.get(buffer), rows)

    def _add_step(self, step: binding.AddStep) -> None:
        first, addends = step.action.first, self._buffers[step.action.addend]
        sums = self._total(step.sums, addends) if step.sums.kind == Kind.TOTAL else self._room(step.sums)
        if sums is addends:
            return
        for total, addend in zip(sums, addends, strict=True):
            if step.places is None:
                (total.copy_ if first else total.add_)(addend)
                continue
            assert not first
            for to, values in scatter_views(total, step.places, addend):
                to.add_(values)

    def _pack(self, action: Pack) -> None:
        self._buffers[action.buffer] = self._exchanges[action.kind].pack(action)

    def _unpack(self, action: Unpack) -> None:
        self._exchanges[action.kind].unpack(action, self._buffers.get(action.buffer))

    def _total(self, room: binding.Room, sums: Buffer) -> Buffer:
        """Return a buffer for complete sums: the same memory, if the sums have the result's dtype."""
        if sums[0].dtype != self._total_dtype:
            return self._room(room)
        self._buffers[room.name] = sums
        return sums

    def _room(self, room: binding.Room) -> Buffer:
        """Return a buffer with room for its rows: with its data, or uninitialised."""
        if room.held:
            return self._buffers[room.name]
        new = self._new(room.kind, room.rows)
        if room.places is not None:
            for total, before in zip(new, self._buffers[room.name], strict=True):
                total.zero_()
                for to, values in scatter_views(total, room.places, before):
                    to.copy_(values)
            self._free(self._buffers[room.name])
        self._buffers[room.name] = new
        return new

    def _drop(self, step: binding.Drop) -> None:
        block = self._buffers.pop(step.buffer, ())  # a member's parcel to itself has no buffer
        if all([block is not buffer for buffer in self._buffers.values()]):
            self._free(block)

    def _post(self, step: binding.Post) -> None:
        messages, copies = [], []
        for action, room, cut in step.parcels:
            if room is not None:
                block = self._room(room)
            elif isinstance(action, Recv):
                block = self._buffers[action.buffer] = self._exchanges[step.channel.kind].empty()
            elif cut is None:
                block = self._buffers[action.buffer]
            else:
                block = tuple([gather(x, cut).contiguous() for x in self._buffers[action.buffer]])
                copies.append(block)  # alive until the wait for their messages
            messages.append((action, block))
        try:
            works = self._transport.post(step.channel, messages)
        except RuntimeError as error:
            raise self._broken(step.actions, error) from error
        posted, under_way, copies_under_way = self._under_way.setdefault(step.channel, ([], [], []))
        posted += step.actions
        under_way += works
        copies_under_way += copies

    def _wait(self, action: Wait) -> None:
        posted, works, _ = self._under_way.pop(action.channel)
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise self._broken(posted, error) from error

    def _broken(self, actions: Sequence[Action], error: RuntimeError) -> RuntimeError:
        first = actions[0]
        assert isinstance(first, (Send, Recv))
        sources = sorted({action.peer for action in actions if isinstance(action, Recv)})
        targets = sorted({action.peer for action in actions if isinstance(action, Send)})
        return RuntimeError(
            f"burst_attention on rank {self._rank} of the ring: the {first.channel} message of step "
            f"{first.step} (from ranks {sources}, to ranks {targets}) failed: a rank is gone or did not come "
            f"in time; see for the first error among the other ranks ({error})"
        )

    _CARRY_OUT: ClassVar[dict[type, Callable[..., None]]] = {
        binding.Post: _post,
        binding.ComputeStep: _compute_step,
        binding.AccumulateStep: _accumulate_step,
        binding.KeepStep: _keep_step,
        binding.AddStep: _add_step,
        Wait: _wait,
        Pack: _pack,
        Unpack: _unpack,
        binding.Drop: _drop,
    }
    """The method of each kind of step."""
