"""The simulator of a schedule: runs all programs on the clock of a cluster. Predicted, not measured.

Every rank runs its program. A message starts when both of its ends are posted. A rank has one link within
its node and one to all others. Messages to one receiver go one after another. Messages to several share
its link. All events happen in the order of time, so the prediction does not depend on the order of ranks.
`lockstep` simulates large rings faster.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from burst_mcore.attention.schedule.actions import (
    Action,
    Channel,
    Compute,
    Kind,
    Link,
    Program,
    Recv,
    Send,
    Wait,
)
from burst_mcore.attention.schedule.route import Schedule
from burst_mcore.rates import Rates
from burst_plan.simulate.cost import Sizes, farther, link_class, stretched
from burst_plan.simulate.trace import Event, lane
from burst_plan.simulate.walk import walk

Seconds = Callable[[int, Compute], float]
"""The time of a compute: (rank, action) -> seconds."""


class Exposed(NamedTuple):
    """A rank's wait for a message: communication that no compute hides."""

    rank: int
    step: int
    """The step of the schedule in which the rank waits."""
    lane: str
    """Link and kind of the last message to arrive."""
    label: str
    """That message, as the rank's program prints it."""
    posted: int
    """The step in which the rank's program posts that message."""
    peer: int
    """The rank at its other end."""
    began: float
    seconds: float

    def __str__(self) -> str:
        direction = "to" if ">" in self.label else "from"
        return (
            f"rank {self.rank} waits {self.seconds * 1e3:.3g} ms in step {self.step} for {self.lane} "
            f"{direction} rank {self.peer} ({self.label}, posted in step {self.posted})"
        )


class Timeline(NamedTuple):
    """The events and the waits of a simulated schedule."""

    events: list[Event]
    waits: list[Exposed]

    @property
    def seconds(self) -> float:
        """Time at which the slowest rank ends."""
        return max(event.ended for event in self.events)

    def exposed(self) -> list[Exposed]:
        """Return the waits of the rank that ends last, the longest first.

        Of several ranks that end together, this is the rank that waits longest.
        """
        total: dict[int, float] = defaultdict(float)
        for wait in self.waits:
            total[wait.rank] += wait.seconds
        rank = max(self.events, key=lambda event: (event.ended, total[event.rank], -event.rank)).rank
        waits = (wait for wait in self.waits if wait.rank == rank)
        return sorted(waits, key=lambda wait: (-wait.seconds, wait.began))


@dataclass(eq=False)
class _Message:
    remaining: float
    """Bytes that are not transferred yet."""
    receiver: int
    link: _Link
    ends: list[_Rank] = field(default_factory=list)
    """The ranks that have posted the message; it starts with the second."""
    arrived: bool = False
    started: float = -1.0
    """Time at which the link began the transfer."""
    ended: float = 0.0
    """Time of arrival."""


@dataclass(eq=False)
class _Rank:
    number: int
    program: Program
    executed: int = 0
    under_way: dict[Channel, list[tuple[Send | Recv, _Message, float]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    missing: int = 0
    """Messages that its wait has not received yet."""
    waits_since: float | None = None
    computes: bool = False


@dataclass(eq=False)
class _Link:
    """A rank's link within its node, or to other nodes, with its messages by receiver, in order."""

    rate: float
    queues: dict[int, deque[_Message]] = field(default_factory=dict)
    now: float = 0.0
    version: int = 0
    """Number of changes: events that were planned for an earlier version are void."""

    def carry(self, until: float) -> None:
        """Advance the transfers of the link to a time."""
        if self.queues:
            share = (until - self.now) * self.rate / len(self.queues)
            for queue in self.queues.values():
                queue[0].remaining -= share
        self.now = until

    def first_end(self) -> tuple[float, int]:
        """Return (time at which the next message is complete, its receiver), if no other message starts."""
        receiver = min(self.queues, key=lambda to: self.queues[to][0].remaining)
        remaining = max(0.0, self.queues[receiver][0].remaining)
        return self.now + remaining * len(self.queues) / self.rate, receiver  # queues share the rate equally


class _Player:
    def __init__(self, schedule: Schedule, sizes: Sizes, seconds: Seconds, intra: int, rates: Rates) -> None:
        self.ranks = [_Rank(number, program) for number, program in enumerate(schedule.programs)]
        self.sizes, self.seconds, self.intra, self.rates = sizes, seconds, intra, rates
        self.heads = schedule.route.heads
        rate_of = {link: rates.link(inter=link == Link.INTER) for link in (Link.INTRA, Link.INTER)}
        self.links = {(r.number, link): _Link(rate) for r in self.ranks for link, rate in rate_of.items()}
        self.mail: dict[tuple[int, int, Link, Kind], tuple[deque[_Message], deque[_Message]]] = defaultdict(
            lambda: (deque(), deque())
        )
        """Messages that only their sender or only their receiver has posted."""
        self.agenda: list[tuple[float, int, Callable[[], None]]] = []
        self.events: list[Event] = []
        self.order = 0
        self.now = 0.0
        self.woken: list[_Rank] = []
        self.waits: list[Exposed] = []

    def play(self) -> Timeline:
        stuck = walk(self.ranks, self.execute, self.tick)
        assert not stuck, "deadlock: verify the schedule"
        return Timeline(self.events, self.waits)

    def tick(self) -> list[_Rank] | None:
        """Advance time until a rank can go on."""
        while self.agenda and not self.woken:
            self.now, _, happen = heapq.heappop(self.agenda)
            happen()
        ranks, self.woken = self.woken, []
        return ranks or None

    def later(self, when: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self.agenda, (when, self.order, happen))
        self.order += 1

    def execute(self, rank: _Rank, action: Action) -> bool:
        """Execute the next action of a rank; False if it takes time, or waits for messages."""
        if isinstance(action, Wait):
            return self.wait(rank, action.channel)
        if isinstance(action, Compute):
            return self.compute(rank, action)
        if isinstance(action, (Send, Recv)):
            self.post(rank, action, self.now)
        return True

    def compute(self, rank: _Rank, action: Compute) -> bool:
        rank.computes = not rank.computes
        if not rank.computes:  # its compute has ended
            return True
        end = self.now + self.seconds(rank.number, action)
        self.events.append(Event(rank.number, "compute", str(action), self.now, self.now, end))
        self.later(end, lambda: self.woken.append(rank))
        return False

    def wait(self, rank: _Rank, channel: Channel) -> bool:
        if rank.waits_since is None:
            rank.missing = sum(not message.arrived for _, message, _ in rank.under_way[channel])
            if rank.missing:
                rank.waits_since = self.now
                return False
        rank.waits_since = None
        for action, message, posted in rank.under_way.pop(channel, ()):
            if isinstance(action, Recv):
                started = max(posted, message.started)
                event = Event(rank.number, lane(channel), str(action), posted, started, message.ended)
                self.events.append(event)
        return True

    def post(self, rank: _Rank, action: Send | Recv, now: float) -> None:
        sends = isinstance(action, Send)
        sender, receiver = (rank.number, action.peer) if sends else (action.peer, rank.number)
        queues = self.mail[sender, receiver, action.channel.link, action.channel.kind]
        same_end, other_end = queues if sends else queues[::-1]
        if other_end:
            message = other_end.popleft()
        else:
            where = link_class(sender, receiver, self.intra)
            size = self.sizes.of(action) * self.stretch(action.channel.link, where, sender, receiver)
            message = _Message(size, receiver, self.links[sender, where])
            same_end.append(message)
        message.ends.append(rank)
        rank.under_way[action.channel].append((action, message, now))
        if len(message.ends) == 2:  # posted at both ends
            message.link.carry(now)
            queue = message.link.queues.setdefault(receiver, deque())
            if not queue:  # else it waits for its predecessors
                message.started = now
            queue.append(message)
            self.expect(message.link)

    def stretch(self, link: Link, where: Link, sender: int, receiver: int) -> float:
        """Return the slowdown of a message against the rate of its link."""
        if where == Link.INTER or not (self.rates.crowding or self.rates.levels):
            return 1.0
        members = min(self.intra, self.heads if link == Link.HEADS else len(self.ranks))
        distance = float(farther(torch.tensor([sender]), torch.tensor([receiver]), self.rates))
        return stretched(link, members, self.rates) * distance

    def expect(self, link: _Link) -> None:
        """Plan the event at which the next message of a link is complete, unless the link changes before."""
        link.version += 1
        if link.queues:
            version, (when, receiver) = link.version, link.first_end()
            self.later(when, lambda: self.through(link, version, receiver))

    def through(self, link: _Link, version: int, receiver: int) -> None:
        if link.version != version:
            return
        link.carry(self.now)
        queue = link.queues[receiver]
        message = queue.popleft()
        if queue:
            queue[0].started = self.now
        else:
            del link.queues[receiver]
        self.expect(link)
        self.later(self.now + self.rates.latency, lambda: self.arrive(message))

    def arrive(self, message: _Message) -> None:
        message.arrived, message.ended = True, self.now
        for rank in message.ends:
            if rank.waits_since is None:
                continue
            wait = rank.program[rank.executed]
            assert isinstance(wait, Wait)
            action = next((a for a, its, _ in rank.under_way[wait.channel] if its is message), None)
            if action is not None:
                rank.missing -= 1
                if rank.missing == 0:
                    self.note(rank, wait, action)
                    self.woken.append(rank)

    def note(self, rank: _Rank, wait: Wait, last: Send | Recv) -> None:
        """Record that a rank waited, if any time passed."""
        assert rank.waits_since is not None
        seconds = self.now - rank.waits_since
        if seconds > 0:
            where, message = lane(wait.channel), (str(last), last.step, last.peer)
            self.waits.append(Exposed(rank.number, wait.step, where, *message, rank.waits_since, seconds))


def play(schedule: Schedule, sizes: Sizes, seconds: Seconds, intra_size: int, rates: Rates) -> Timeline:
    """Simulate a schedule, every rank on its own clock.

    Args:
        schedule: of one pass.
        sizes: bytes of a message of each kind (`cost.message_bytes`).
        seconds: time of each compute.
        intra_size: ranks of a node.
        rates: speeds of links and kernels.
    """
    return _Player(schedule, sizes, seconds, intra_size, rates).play()
