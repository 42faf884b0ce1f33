"""Plays a schedule against the clock of a cluster: who does what when. Predicted, not measured."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from burst_mcore.attention.actions import Channel, Compute, Program, Recv, Send, Wait
from burst_mcore.attention.cost import Sizes, link_class
from burst_mcore.attention.schedule import Schedule
from burst_mcore.attention.trace import Event, lane
from burst_mcore.rates import Rates

Seconds = Callable[[int, Compute], float]
"""How long a compute takes: (rank, action) -> seconds."""


@dataclass
class _Message:
    size: int
    sender: int
    receiver: int
    link: str
    left: float
    """Bytes that are still to be carried."""
    sent: float | None = None
    posted: float | None = None
    end: float | None = None

    @property
    def begins(self) -> float:
        """When both ends are ready, as far as is known."""
        return math.inf if self.sent is None or self.posted is None else max(self.sent, self.posted)


@dataclass
class _Rank:
    number: int
    program: Program
    done: int = 0
    clock: float = 0.0
    under_way: dict[Channel, list[tuple[str, _Message, float, bool]]] = field(
        default_factory=lambda: defaultdict(list)
    )


class _Player:
    """Ranks that run their programs, and links that carry what they send."""

    def __init__(
        self,
        programs: Mapping[int, Program],
        sizes: Sizes,
        seconds: Seconds,
        intra_size: int,
        rates: Rates,
        *,
        mirror: bool = False,
    ) -> None:
        self._ranks = [_Rank(number, program) for number, program in programs.items()]
        self._sizes, self._seconds, self._intra_size, self._rates = sizes, seconds, intra_size, rates
        self._mirror = mirror
        self._mail: dict[tuple[object, ...], list[_Message]] = defaultdict(list)
        self._sent: dict[tuple[object, ...], int] = defaultdict(int)
        self._posted: dict[tuple[object, ...], int] = defaultdict(int)
        self._queues: dict[tuple[int, str], list[_Message]] = defaultdict(list)
        """Sent and not yet carried, by sender and link."""
        self._carried: dict[tuple[int, str], float] = defaultdict(float)
        """Until when that is worked out."""
        self.events: list[Event] = []

    def play(self) -> float:
        """Run all programs to their end; the time when the last is over."""
        while any(rank.done < len(rank.program) for rank in self._ranks):
            moved = [self._advance(rank) for rank in self._ranks]
            assert any(moved), "deadlock: verify the schedule"
        return max(rank.clock for rank in self._ranks)

    def _advance(self, rank: _Rank) -> bool:
        before = rank.done
        while rank.done < len(rank.program) and self._execute(rank):
            rank.done += 1
        return rank.done > before

    def _execute(self, rank: _Rank) -> bool:
        match rank.program[rank.done]:
            case Send() as send:
                message = self._message(rank, send, self._sent)
                message.sent = rank.clock
                self._queues[message.sender, message.link].append(message)
            case Recv() as recv:
                self._message(rank, recv, self._posted).posted = rank.clock
            case Wait(channel=channel):
                return self._wait(rank, channel)
            case Compute() as compute:
                start, rank.clock = rank.clock, rank.clock + self._seconds(rank.number, compute)
                self.events.append(Event(rank.number, "compute", str(compute), start, rank.clock))
        return True

    def _message(self, rank: _Rank, action: Send | Recv, count: dict[tuple[object, ...], int]) -> _Message:
        """What a send and a receive have in common; played against itself, a rank is its own peers."""
        ends = (rank.number, action.peer) if isinstance(action, Send) else (action.peer, rank.number)
        key = (*(() if self._mirror else ends), action.channel.link, action.channel.what)
        if self._mirror and action.channel.link == "heads":
            key = (*key, action.channel.part)
        mail, at = self._mail[key], count[key]
        count[key] += 1
        if at == len(mail):
            size = self._sizes.of(action)
            sender = rank.number if self._mirror else ends[0]
            mail.append(_Message(size, sender, ends[1], link_class(*ends, self._intra_size), left=size))
        if isinstance(action, Send):
            mail[at].receiver, mail[at].link = action.peer, link_class(*ends, self._intra_size)
        received = isinstance(action, Recv)
        rank.under_way[action.channel].append((str(action), mail[at], rank.clock, received))
        return mail[at]

    def _wait(self, rank: _Rank, channel: Channel) -> bool:
        messages = rank.under_way[channel]
        if any(message.sent is None or message.posted is None for _, message, _, _ in messages):
            return False
        for label, message, posted, received in messages:
            end = self._deliver(message)
            rank.clock = max(rank.clock, end)
            if received:
                self.events.append(Event(rank.number, lane(channel), label, posted, end))
        messages.clear()
        return True

    def _deliver(self, message: _Message) -> float:
        """When it arrives. Messages to one rank go one after another; those to several share the link."""
        link = message.sender, message.link
        rate = self._rates.intra if message.link == "intra" else self._rates.inter
        queue, now = self._queues[link], self._carried[link]
        while message.end is None:
            ready = [m for m in queue if m.begins <= now]
            active = list({m.receiver: m for m in reversed(ready)}.values())
            begin_later = [m.begins for m in queue if now < m.begins < math.inf]
            if not active:
                now = min(begin_later)
                continue
            share = rate / len(active)
            step = min(min(m.left for m in active) / share, min(begin_later, default=math.inf) - now)
            now += step
            for m in active:
                m.left -= step * share
                if m.left <= 1e-9 * m.size:
                    m.end = now + self._rates.latency
                    queue.remove(m)
        self._carried[link] = now
        return message.end


def play(schedule: Schedule, sizes: Sizes, seconds: Seconds, intra_size: int, rates: Rates) -> list[Event]:
    """All that happens when a schedule runs, every rank on its own clock.

    Args:
        schedule: of one pass.
        sizes: bytes of a message of each kind (`cost.message_bytes`).
        seconds: how long each compute takes.
        intra_size: ranks of a node.
        rates: how fast links are.
    """
    player = _Player(dict(enumerate(schedule.programs)), sizes, seconds, intra_size, rates)
    player.play()
    return player.events


def play_one(
    program: Program, rank: int, sizes: Sizes, seconds: Seconds, intra_size: int, rates: Rates
) -> float:
    """Seconds of a pass in which all ranks do what `rank` does, at the same time: quick, for large rings."""
    return _Player({rank: program}, sizes, seconds, intra_size, rates, mirror=True).play()
