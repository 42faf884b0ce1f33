"""The program of one position on a ring, or on a double ring; and the same without overlap."""

from __future__ import annotations

from dataclasses import replace

from burst_mcore.attention.actions import (
    COMES_LATE,
    DATA,
    GRADIENT,
    HOME,
    PARTIAL,
    SUM,
    Accumulate,
    Action,
    Add,
    Channel,
    Compute,
    Program,
    Recv,
    Return,
    Send,
    Wait,
    hops,
)

_INTRA_DATA, _INTER_DATA = Channel("intra", DATA), Channel("inter", DATA)
_INTRA_GRADIENT, _INTER_GRADIENT = Channel("intra", GRADIENT), Channel("inter", GRADIENT)


def double_ring(position: int, nodes: int, intra: int, *, gradients: bool) -> Program:
    """Overlapped rings over nodes x intra positions (paper appendix, algorithms 1 and 2, corrected).

    Data: the bundle that a round begins with is on its way to the next node for all of that round, and the
    bundle of step j + 1 on its way within the node while step j is computed.

    Gradients: within a round a sum starts with the bundle and follows it, so that it ends, complete for this
    node, one position before the place where the bundle came in. There the sum of the nodes before, under way
    for all of that round, is added, and the total leaves for the next node. After the last round it makes one
    more hop between nodes and one within the node, and is at home.
    """
    return _Position(position, nodes, intra, gradients).program()


class _Position:
    """Position (m, l): writes down one round after another."""

    def __init__(self, position: int, nodes: int, intra: int, gradients: bool) -> None:
        self.nodes, self.intra, self.gradients = nodes, intra, gradients
        self.m, self.l = divmod(position, intra)
        self.actions: list[Action] = []
        self.start = HOME
        """The bundle that the round began with."""
        self.total, self.leaving = "", ""
        """The sum that grows, and the one on its way to the next node."""

    def program(self) -> Program:
        for i in range(self.nodes):
            self.round(i)
        if self.gradients:
            self.bring_home()
            self.actions.append(Return(self.nodes * self.intra, self.total))
        return tuple(self.actions)

    def round(self, i: int) -> None:
        current, incoming, last_round = self.start, "", i == self.nodes - 1
        if not last_round:
            incoming = _free(DATA, self.start)
            self.hop(i * self.intra, _INTER_DATA, incoming, self.start)
        for j in range(self.intra):
            step, source, arriving = i * self.intra + j, self.at(self.m - i, self.l - j), ""
            if j < self.intra - 1:
                arriving = _free(DATA, current, incoming, "" if last_round else self.start)
                self.hop(step, _INTRA_DATA, arriving, current)
            self.actions.append(Compute(step, source, current))
            if self.gradients:
                self.follow(i, j, step, source)
            if arriving:
                self.actions.append(Wait(step, _INTRA_DATA))
                current = arriving
        if self.gradients and self.nodes > 1:
            self.hop(step, _INTER_GRADIENT, PARTIAL, self.total)
            self.leaving = self.total
        if incoming:
            self.actions.append(Wait(step, _INTER_DATA))
            self.start = incoming

    def follow(self, i: int, j: int, step: int, source: int) -> None:
        """Add this step's gradients to the sum of its bundle, and pass it on within the node."""
        if j == 0:
            self.total = _free(SUM, self.leaving)
        else:
            self.actions.append(Wait(step, _INTRA_GRADIENT))
        self.actions.append(Accumulate(step, source, self.total, first=j == 0))
        if j < self.intra - 1:
            self.pass_on(step)
        elif i > 0:
            self.actions += [Wait(step, _INTER_GRADIENT), Add(step, self.total, PARTIAL)]

    def bring_home(self) -> None:
        step = self.nodes * self.intra
        if self.nodes > 1:
            self.actions.append(Wait(step, _INTER_GRADIENT))
            self.total = PARTIAL
        if self.intra > 1:
            self.pass_on(step)
            self.actions.append(Wait(step, _INTRA_GRADIENT))

    def pass_on(self, step: int) -> None:
        following = _free(SUM, self.total, self.leaving)
        self.hop(step, _INTRA_GRADIENT, following, self.total)
        self.total = following

    def hop(self, step: int, channel: Channel, into: str, out: str) -> None:
        m, l = self.m, self.l  # noqa: E741
        if channel.link == "inter":
            before, after = self.at(m - 1, l), self.at(m + 1, l)
        else:
            before, after = self.at(m, l - 1), self.at(m, l + 1)
        self.actions += [Recv(step, channel, into, before), Send(step, channel, out, after)]

    def at(self, node: int, local: int) -> int:
        return node % self.nodes * self.intra + local % self.intra


def _free(kind: str, *taken: str) -> str:
    """The first buffer of this kind that is not taken."""
    return next(name for index in range(4) if (name := f"{kind}{index}") not in taken)


def kind_of(buffer: str) -> str:
    """What the program keeps in a buffer: a bundle (DATA) or a sum of gradients (SUM)."""
    return DATA if buffer.startswith(DATA) or buffer == HOME else SUM


def home_sum(program: Program) -> str | None:
    """Where a rank's own gradient, complete, lies when its program of the ring ends; None: nobody read it."""
    return next(action.buffer for action in program if isinstance(action, Return))


def mirrored(program: Program, size: int) -> Program:
    """The program of position size - 1 - p, from that of position p: the ring the other way round."""
    changed: list[Action] = []
    for action in program:
        match action:
            case Send() | Recv():
                changed.append(replace(action, peer=size - 1 - action.peer))
            case Compute() | Accumulate():
                changed.append(replace(action, source=size - 1 - action.source))
            case _:
                changed.append(action)
    return tuple(changed)


def without_overlap(program: Program) -> Program:
    """The same hops, each waited for at once: what comes late when it is sent, the rest when it is needed."""
    actions: list[Action] = []
    held: dict[Channel, list[Action]] = {}
    for channel, group in hops(program):
        if channel is None:
            for action in group:
                if not isinstance(action, Wait):
                    actions.append(action)
                elif action.channel.what not in COMES_LATE:
                    now = [replace(hop, step=action.step) for hop in held.pop(action.channel)]
                    actions += [*now, action]
        elif channel.what in COMES_LATE:
            actions += [*group, Wait(group[-1].step, channel)]
        else:
            held.setdefault(channel, []).extend(group)
    return tuple(actions)
