"""Dry-runs a schedule on all ranks at once and says what is wrong with it: cover, hazards, deadlock."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from burst_mcore.attention.schedule import (
    HOME,
    Accumulate,
    Compute,
    Program,
    Recv,
    Schedule,
    Send,
    Wait,
    home_sum,
)


@dataclass
class _Rank:
    """A rank's state. A buffer holds (source, contributors); a bundle of data has no contributors."""

    program: Program
    done: int = 0
    holds: dict[str, tuple[int, frozenset[int]]] = field(default_factory=dict)
    sending: dict[str, list[Send]] = field(default_factory=lambda: defaultdict(list))
    receiving: dict[str, list[Recv]] = field(default_factory=lambda: defaultdict(list))
    computed: list[int] = field(default_factory=list)

    def in_flight(self, of: dict[str, list[Send]] | dict[str, list[Recv]]) -> set[str]:
        return {action.buffer for actions in of.values() for action in actions}


class _Mail:
    """Messages by (from, to, channel), in order; a send is complete only once its receive was posted."""

    def __init__(self) -> None:
        self.sent: dict[tuple[int, int, str], list[tuple[int, frozenset[int]]]] = defaultdict(list)
        self.posted: dict[tuple[int, int, str], int] = defaultdict(int)
        self.taken: dict[tuple[int, int, str], int] = defaultdict(int)


def verify(schedule: Schedule) -> None:
    """Check that every rank meets every bundle exactly once, and that the program is safe on any network.

    Sends are taken as rendezvous (the stricter reading): one completes only when its receive is posted.

    Raises:
        ValueError: a pair of ranks met twice or never, a wrong bundle computed, a buffer touched while in
            flight, a deadlock, a message left over, or a gradient that does not end at home complete.
    """
    size = schedule.size
    ranks = [_Rank(program, holds={HOME: (r, frozenset())}) for r, program in enumerate(schedule.programs)]
    mail = _Mail()
    while any(rank.done < len(rank.program) for rank in ranks):
        if not any([_advance(rank, r, mail) for r, rank in enumerate(ranks)]):
            stuck = {r: str(rank.program[rank.done]) for r, rank in enumerate(ranks) if _unfinished(rank)}
            raise ValueError(f"deadlock: {stuck}")
    everyone = frozenset(range(size))
    for r, rank in enumerate(ranks):
        if sorted(rank.computed) != sorted(everyone):
            raise ValueError(f"rank {r} computed sources {rank.computed}, must be each of {size} once")
        if rank.in_flight(rank.sending) | rank.in_flight(rank.receiving):
            raise ValueError(f"rank {r} ends with messages that nobody waited for")
        if any(isinstance(action, Accumulate) for action in rank.program):
            if rank.holds[home_sum(size)] != (r, everyone):
                raise ValueError(f"rank {r} ends with gradient {rank.holds[home_sum(size)]}")
    if any(mail.posted[key] != len(mail.sent[key]) for key in {*mail.posted, *mail.sent}):
        raise ValueError("a message was sent that nobody receives")


def _unfinished(rank: _Rank) -> bool:
    return rank.done < len(rank.program)


def _advance(rank: _Rank, r: int, mail: _Mail) -> bool:
    """Run `rank` until it must wait for another; whether it got anywhere."""
    before = rank.done
    while _unfinished(rank) and _execute(rank, r, mail):
        rank.done += 1
    return rank.done > before


def _execute(rank: _Rank, r: int, mail: _Mail) -> bool:
    action = rank.program[rank.done]
    match action:
        case Recv():
            _untouched(rank, r, action.buffer, writes=True)
            rank.holds.pop(action.buffer, None)
            rank.receiving[action.channel].append(action)
            mail.posted[action.peer, r, action.channel] += 1
        case Send():
            _untouched(rank, r, action.buffer, writes=False)
            mail.sent[r, action.peer, action.channel].append(_held(rank, r, action.buffer))
            rank.sending[action.channel].append(action)
        case Wait():
            return _complete(rank, r, action.channel, mail)
        case Compute():
            _untouched(rank, r, action.buffer, writes=False)
            if _held(rank, r, action.buffer)[0] != action.source:
                raise ValueError(f"rank {r}: {action.buffer} does not hold the bundle of {action.source}")
            rank.computed.append(action.source)
        case Accumulate():
            _untouched(rank, r, action.buffer, writes=True)
            source, shares = (action.source, frozenset()) if action.first else _held(rank, r, action.buffer)
            if source != action.source or r in shares or rank.computed[-1] != source:
                raise ValueError(f"rank {r}: gradient of {action.source} added to that of {source}: {shares}")
            rank.holds[action.buffer] = (source, shares | {r})
    return True


def _complete(rank: _Rank, r: int, channel: str, mail: _Mail) -> bool:
    """Finish all that `rank` started on `channel`, if its peers have come that far."""
    for recv in rank.receiving[channel]:
        key = (recv.peer, r, channel)
        if mail.taken[key] >= len(mail.sent[key]):
            return False
        rank.holds[recv.buffer] = mail.sent[key][mail.taken[key]]
        mail.taken[key] += 1
        rank.receiving[channel] = [other for other in rank.receiving[channel] if other is not recv]
    for send in rank.sending[channel]:
        key = (r, send.peer, channel)
        if mail.posted[key] < len(mail.sent[key]):
            return False
    rank.sending[channel] = []
    return True


def _held(rank: _Rank, r: int, buffer: str) -> tuple[int, frozenset[int]]:
    if buffer not in rank.holds:
        raise ValueError(f"rank {r}: {buffer} is read before anything arrived in it")
    return rank.holds[buffer]


def _untouched(rank: _Rank, r: int, buffer: str, *, writes: bool) -> None:
    if buffer in rank.in_flight(rank.receiving):
        raise ValueError(f"rank {r}: {buffer} is touched while a message arrives in it")
    if writes and (buffer == HOME or buffer in rank.in_flight(rank.sending)):
        raise ValueError(f"rank {r}: {buffer} is written while it is sent, or is the caller's")
