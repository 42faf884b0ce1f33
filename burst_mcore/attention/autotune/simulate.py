"""Plays a schedule against the clock of a cluster: who does what when. Predicted, not measured.

Every rank runs its program. A message starts when both of its ends are posted. Those from one rank to another
go one after another; those from one rank to several share the link that they have in common, of which a rank
has one to its own node and one to all others. Everything happens in the order of time, so that what is
predicted does not depend on the order in which ranks are looked at. `lockstep` plays large rings faster.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from burst_mcore.attention.autotune.cost import Sizes, link_class
from burst_mcore.attention.schedule.actions import Channel, Compute, Program, Recv, Send, Wait
from burst_mcore.attention.schedule.route import Schedule
from burst_mcore.attention.schedule.trace import Event, lane
from burst_mcore.rates import Rates

Seconds = Callable[[int, Compute], float]
"""How long a compute takes: (rank, action) -> seconds."""


@dataclass(eq=False)
class _Message:
    left: float
    """Bytes that are still to be carried."""
    receiver: int
    link: _Link
    ends: list[_Rank] = field(default_factory=list)
    """Who posted it so far; it starts with the second."""
    arrived: bool = False
    at: float = 0.0
    """When it arrived."""


@dataclass(eq=False)
class _Rank:
    number: int
    program: Program
    done: int = 0
    under_way: dict[Channel, list[tuple[Send | Recv, _Message, float]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    missing: int = 0
    """Messages that its wait still waits for."""
    waits: bool = False
    clock: float = 0.0


@dataclass(eq=False)
class _Link:
    """What a rank sends to its own node, or to others: by receiver, in order."""

    rate: float
    queues: dict[int, deque[_Message]] = field(default_factory=dict)
    now: float = 0.0
    version: int = 0
    """Of what it carries: what was said of another is out of date."""

    def carry(self, until: float) -> None:
        """Let time pass."""
        if self.queues:
            share = (until - self.now) * self.rate / len(self.queues)
            for queue in self.queues.values():
                queue[0].left -= share
        self.now = until

    def first_end(self) -> tuple[float, int]:
        """(when the next message is through, its receiver), if nothing else comes."""
        receiver = min(self.queues, key=lambda to: self.queues[to][0].left)
        left = max(0.0, self.queues[receiver][0].left)
        return self.now + left * len(self.queues) / self.rate, receiver


class _Player:
    def __init__(self, schedule: Schedule, sizes: Sizes, seconds: Seconds, intra: int, rates: Rates) -> None:
        self.ranks = [_Rank(number, program) for number, program in enumerate(schedule.programs)]
        self.sizes, self.seconds, self.intra, self.rates = sizes, seconds, intra, rates
        of = {"intra": rates.intra, "inter": rates.inter}
        self.links = {(r.number, name): _Link(rate) for r in self.ranks for name, rate in of.items()}
        self.mail: dict[tuple[int, int, str, str], tuple[deque[_Message], deque[_Message]]] = defaultdict(
            lambda: (deque(), deque())
        )
        """Messages that only their sender, or only their receiver, has posted."""
        self.agenda: list[tuple[float, int, Callable[[float], None]]] = []
        self.events: list[Event] = []
        self.order = 0

    def play(self) -> list[Event]:
        for rank in self.ranks:
            self.run(rank, 0.0)
        while self.agenda:
            now, _, happen = heapq.heappop(self.agenda)
            happen(now)
        assert all(rank.done == len(rank.program) for rank in self.ranks), "deadlock: verify the schedule"
        return self.events

    def later(self, when: float, happen: Callable[[float], None]) -> None:
        heapq.heappush(self.agenda, (when, self.order, happen))
        self.order += 1

    def run(self, rank: _Rank, now: float) -> None:
        """Go on until it computes, or waits for what has not come."""
        rank.clock = now
        while rank.done < len(rank.program):
            action = rank.program[rank.done]
            match action:
                case Send() | Recv():
                    self.post(rank, action, now)
                case Compute():
                    took = self.seconds(rank.number, action)
                    self.events.append(Event(rank.number, "compute", str(action), now, now + took))
                    rank.done += 1
                    self.later(now + took, lambda then: self.run(rank, then))
                    return
                case Wait(channel=channel):
                    rank.missing = sum(not message.arrived for _, message, _ in rank.under_way[channel])
                    rank.waits = rank.missing > 0
                    if rank.waits:
                        return
                    self.note(rank, channel)
            rank.done += 1

    def note(self, rank: _Rank, channel: Channel) -> None:
        """Write down what came on a channel."""
        for action, message, posted in rank.under_way.pop(channel, ()):
            if isinstance(action, Recv):
                self.events.append(Event(rank.number, lane(channel), str(action), posted, message.at))

    def post(self, rank: _Rank, action: Send | Recv, now: float) -> None:
        sends = isinstance(action, Send)
        sender, receiver = (rank.number, action.peer) if sends else (action.peer, rank.number)
        both = self.mail[sender, receiver, action.channel.link, action.channel.what]
        ours, theirs = both if sends else both[::-1]
        if theirs:
            message = theirs.popleft()
        else:
            link = self.links[sender, link_class(sender, receiver, self.intra)]
            message = _Message(self.sizes.of(action), receiver, link)
            ours.append(message)
        message.ends.append(rank)
        rank.under_way[action.channel].append((action, message, now))
        if len(message.ends) == 2:
            message.link.carry(now)
            message.link.queues.setdefault(receiver, deque()).append(message)
            self.expect(message.link)

    def expect(self, link: _Link) -> None:
        """Look again when the next message is through, unless something changes before."""
        link.version += 1
        if link.queues:
            version, (when, receiver) = link.version, link.first_end()
            self.later(when, lambda now: self.through(link, version, receiver, now))

    def through(self, link: _Link, version: int, receiver: int, now: float) -> None:
        if link.version != version:
            return
        link.carry(now)
        message = link.queues[receiver].popleft()
        if not link.queues[receiver]:
            del link.queues[receiver]
        self.expect(link)
        self.later(now + self.rates.latency, lambda then: self.arrive(message, then))

    def arrive(self, message: _Message, now: float) -> None:
        message.arrived, message.at = True, now
        for rank in message.ends:
            if not rank.waits:
                continue
            wait = rank.program[rank.done]
            assert isinstance(wait, Wait)
            if any(message is other for _, other, _ in rank.under_way[wait.channel]):
                rank.missing -= 1
                if rank.missing == 0:
                    rank.waits = False
                    self.run(rank, now)


def play(schedule: Schedule, sizes: Sizes, seconds: Seconds, intra_size: int, rates: Rates) -> list[Event]:
    """All that happens when a schedule runs, every rank on its own clock.

    Args:
        schedule: of one pass.
        sizes: bytes of a message of each kind (`cost.message_bytes`).
        seconds: how long each compute takes.
        intra_size: ranks of a node.
        rates: how fast links are.
    """
    return _Player(schedule, sizes, seconds, intra_size, rates).play()
