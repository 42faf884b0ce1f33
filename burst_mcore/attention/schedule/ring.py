"""The program of one position on a ring, or on a double ring; and the same without overlap."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Generic

from burst_mcore.attention.schedule.actions import (
    COMES_LATE,
    HOME,
    HOME_TOTAL,
    KEPT,
    PARTIAL,
    TOTAL,
    Accumulate,
    Action,
    Add,
    Channel,
    Compute,
    Kind,
    Link,
    Program,
    Recv,
    Return,
    Send,
    Wait,
    by_hop,
)
from burst_mcore.attention.schedule.carried import Carried, Hops, T, nothing

_INTRA_DATA, _INTER_DATA = Channel(Link.INTRA, Kind.DATA), Channel(Link.INTER, Kind.DATA)
_INTRA_GRADIENT, _INTER_GRADIENT = Channel(Link.INTRA, Kind.GRADIENT), Channel(Link.INTER, Kind.GRADIENT)


def double_ring(
    position: int, nodes: int, intra: int, *, gradients: bool, hops: Hops[T] = Hops(), turn: int = 1
) -> Program[T]:
    """Overlapped rings over nodes x intra positions (paper appendix, algorithms 1 and 2, corrected).

    Data: the first bundle of a round travels to the next node during the whole round. The bundle of step
    j + 1 travels within the node while step j is computed.

    Gradients: the owner keeps its own share, and its node keeps the sum of its other positions. Both wait for
    the shares of other nodes. Within a round a sum starts with the bundle and follows it. It is complete for
    this node one position before the place where the bundle came in. There the sum of the nodes before, which
    travelled during the whole round, is added, and the total leaves for the next node. After the last round
    the total makes one more hop between nodes, meets the sum of its own node, and goes home by one hop within
    the node. On the last hop it has the dtype in which it is returned: only the owner's share is added.

    Args:
        position: the position, of nodes * intra, whose program is returned.
        gradients: whether gradients follow the bundles.
        hops: the rows that each hop carries; empty hops are left out.
        turn: 1 if bundles go to higher positions, -1 if they go to lower ones.
    """
    return _Position(position, nodes, intra, gradients, hops, turn).program()


class _Position(Generic[T]):
    """The writer of the program of position (m, l), round by round."""

    def __init__(
        self, position: int, nodes: int, intra: int, gradients: bool, hops: Hops[T], turn: int
    ) -> None:
        self.position, self.nodes, self.intra = position, nodes, intra
        self.gradients, self.hops, self.turn = gradients, hops, turn
        self.m, self.l = divmod(position, intra)  # node m, and place l within the node
        self.actions: list[Action[T]] = []
        self.start = HOME
        """The buffer of the first bundle of the round."""
        self.total, self.leaving, self.of_node = "", "", ""
        """The buffers of the sum that grows, of the sum on its way to the next node, and of the node's own
        sum, which waits for the others."""
        self.started: set[Channel] = set()
        """Channels with something to wait for."""

    def program(self) -> Program[T]:
        for i in range(self.nodes):
            self.round(i)
        if self.gradients:
            self.bring_home()
        return tuple(self.actions)

    def round(self, i: int) -> None:
        current, incoming, last_round = self.start, "", i == self.nodes - 1
        if not last_round:
            incoming = _free(Kind.DATA, self.start)
            comes, goes = (self.hops.ahead_of_round(self.held(at, 0), i + 1) for at in (i + 1, i))
            self.hop(i * self.intra, _INTER_DATA, incoming, self.start, comes, goes)
        for j in range(self.intra):
            step, source, arriving = i * self.intra + j, self.held(i, j), ""
            if j < self.intra - 1:
                arriving = _free(Kind.DATA, current, incoming, "" if last_round else self.start)
                # What is held at step j + 1 comes now; what is held at step j goes on to the next place.
                comes, goes = (self.hops.ahead(self.held(i, at), i, j + 1) for at in (j + 1, j))
                self.hop(step, _INTRA_DATA, arriving, current, comes, goes)
            if current == HOME or self.hops.reads(source):
                self.actions.append(Compute(step, source, current))
            if self.gradients:
                self.follow(i, j, step, source)
            if arriving:
                self.wait(step, _INTRA_DATA)
                current = arriving
        # The sum of round 0 stays at its node, the owner's. Where nodes are single, `bring_home` hops last.
        if self.gradients and i > 0 and not (last_round and self.intra == 1):
            comes, goes = (self.hops.so_far_in_rounds(self.held(at, self.intra - 1), i) for at in (i + 1, i))
            self.hop(step, _INTER_GRADIENT, PARTIAL, self.total, comes, goes)
            self.leaving = self.total
        if incoming:
            self.wait(step, _INTER_DATA)
            self.start = incoming

    def follow(self, i: int, j: int, step: int, source: int) -> None:
        """Add this step's gradients to the sum of its bundle, and pass it on within the node."""
        if j == 0:
            self.total = _free(Kind.SUM, self.leaving, self.of_node)
        else:
            self.wait(step, _INTRA_GRADIENT)
        self.accumulate(i, j, step, source)
        if j < self.intra - 1:
            comes, goes = (self.hops.so_far(self.held(i, at), i, j) for at in (j + 1, j))
            following = _free(Kind.SUM, self.total, self.leaving, self.of_node)
            self.hop(step, _INTRA_GRADIENT, following, self.total, comes, goes)
            self.total = following
        elif i == 0:
            self.of_node = self.total
        else:
            self.wait(step, _INTER_GRADIENT)
            if not nothing(self.hops.so_far_in_rounds(source, i - 1)):
                first = nothing(self.hops.so_far(source, i, j))
                total = self.hops.so_far_in_rounds(source, i)
                self.actions.append(Add(step, self.total, PARTIAL, first=first, rows=total))

    def accumulate(self, i: int, j: int, step: int, source: int) -> None:
        if not self.hops.reads(source):
            return
        if source == self.position:
            own = self.hops.between(source, source)
            self.actions.append(Accumulate(step, source, KEPT, first=True, rows=own))
            return
        first = nothing(self.hops.so_far(source, i, j - 1))  # no place before has added to the sum
        rows = self.hops.so_far(source, i, j)
        self.actions.append(Accumulate(step, source, self.total, first=first, rows=rows))

    def bring_home(self) -> None:
        """Let every total make its last hop: within the node, or between nodes of one position."""
        step = self.nodes * self.intra
        if self.nodes > 1 and self.intra > 1:
            self.wait(step, _INTER_GRADIENT)
            self.meet_other_nodes(step)
        if step > 1:  # sums have gone round but for one hop: the next position owns the bundle of this one's
            within = self.intra > 1
            channel = Channel(Link.INTRA if within else Link.INTER, Kind.TOTAL)
            owner = self.at(self.m + self.turn * (not within), self.l + self.turn * within)
            comes, goes = (self.hops.lent(each) for each in (self.position, owner))
            if not nothing(goes):
                self.complete(step, goes)
            self.hop(step, channel, HOME_TOTAL, TOTAL, comes, goes)
            self.wait(step, channel)
        self.actions.append(Return(step, self.at_home()))

    def meet_other_nodes(self, step: int) -> None:
        """Add the sum of other nodes, which came back, to that of the bundle's own node."""
        source = self.held(0, self.intra - 1)
        if nothing(self.hops.so_far(source, 0, self.intra - 1)):
            self.total = PARTIAL
            return
        self.total = self.of_node
        if not nothing(self.hops.so_far_in_rounds(source, self.nodes - 1)):
            self.actions.append(Add(step, self.total, PARTIAL, rows=self.hops.lent(source)))

    def complete(self, step: int, rows: Carried[T]) -> None:
        """Put the total, of these rows, into the buffer that goes home, together with its last share."""
        last = self.actions[-1]
        if isinstance(last, Accumulate) and last.buffer == self.total:
            self.actions[-1] = replace(last, into=TOTAL)
        else:
            self.actions.append(Add(step, TOTAL, self.total, first=True, rows=rows))

    def at_home(self) -> tuple[str, ...]:
        """Return the buffers with the gradient of the position's own bundle."""
        others = self.nodes * self.intra > 1 and not nothing(self.hops.lent(self.position))
        return (KEPT,) * self.hops.reads(self.position) + (HOME_TOTAL,) * others

    def hop(
        self, step: int, channel: Channel, into: str, out: str, comes: Carried[T], goes: Carried[T]
    ) -> None:
        """Receive `comes` and send `goes`: rows."""
        m, l, turn = self.m, self.l, self.turn  # noqa: E741
        if channel.link == Link.INTER:
            before, after = self.at(m - turn, l), self.at(m + turn, l)
        else:
            before, after = self.at(m, l - turn), self.at(m, l + turn)
        if not nothing(comes):
            self.actions.append(Recv(step, channel, into, before, comes))
            self.started.add(channel)
        if not nothing(goes):
            self.actions.append(Send(step, channel, out, after, goes))
            self.started.add(channel)

    def wait(self, step: int, channel: Channel) -> None:
        if channel in self.started:
            self.started.remove(channel)
            self.actions.append(Wait(step, channel))

    def held(self, i: int, j: int) -> int:
        """Return the owner of the bundle here: as far behind as i hops between nodes and j within go."""
        return self.at(self.m - self.turn * i, self.l - self.turn * j)

    def at(self, node: int, local: int) -> int:
        return node % self.nodes * self.intra + local % self.intra


_NAMES = {kind: tuple(f"{kind}{index}" for index in range(4)) for kind in (Kind.DATA, Kind.SUM)}


def _free(kind: Kind, *taken: str) -> str:
    """Return the first buffer of a kind that is not taken."""
    return next(name for name in _NAMES[kind] if name not in taken)


@cache
def kind_of(buffer: str) -> Kind:
    """Return whether a buffer holds a bundle (DATA), a sum of gradients (SUM) or a complete one (TOTAL)."""
    if buffer in (TOTAL, HOME_TOTAL):
        return Kind.TOTAL
    return Kind.DATA if buffer.startswith(Kind.DATA) or buffer == HOME else Kind.SUM


def at_home(program: Program) -> tuple[str, ...]:
    """Return the buffers whose sum is the gradient of a rank's own bundle at the end of a program."""
    return next((action.buffers for action in program if isinstance(action, Return)), ())


def without_overlap(program: Program[T]) -> Program[T]:
    """Return the same hops, each waited for at once: late kinds when they are sent, others when needed."""
    actions: list[Action[T]] = []
    postponed: dict[Channel, list[Action[T]]] = {}
    for channel, group in by_hop(program):
        if channel is None:
            for action in group:
                if not isinstance(action, Wait):
                    actions.append(action)
                elif action.channel.kind not in COMES_LATE:
                    now = [replace(hop, step=action.step) for hop in postponed.pop(action.channel)]
                    actions += [*now, action]
        elif channel.kind in COMES_LATE:
            actions += [*group, Wait(group[-1].step, channel)]
        else:
            postponed.setdefault(channel, []).extend(group)
    return tuple(actions)
