"""Dry-runs a schedule on all ranks at once and says what is wrong with it: cover, hazards, deadlock."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from burst_mcore.attention.geometry.rows import Rows, union
from burst_mcore.attention.schedule.actions import (
    BUNDLE,
    HOME,
    RESULT,
    ROWS,
    SUM,
    Accumulate,
    Add,
    Channel,
    Compute,
    Pack,
    Program,
    Recv,
    Return,
    Send,
    Unpack,
    Wait,
)
from burst_mcore.attention.schedule.ring import home_sum
from burst_mcore.attention.schedule.route import Schedule

Token = tuple[Any, ...]
"""What a buffer holds: ("data", source, rows), ("sum", source, contributors, rows), in a head group (what,
from, to). Rows None are all."""
Mail = tuple[int, int, str, str]
"""A message's (from, to, link, what): a network keeps the order of those that have these in common."""


@dataclass
class _Rank:
    number: int
    position: int
    member: int
    program: Program
    reads: dict[int, Rows | None]
    """What it must compute: rows of each source."""
    readers: frozenset[int]
    """Who reads its own bundle."""
    members: frozenset[int]
    done: int = 0
    holds: dict[str, Token] = field(default_factory=dict)
    sending: dict[Channel, list[Send]] = field(default_factory=lambda: defaultdict(list))
    receiving: dict[Channel, list[Recv]] = field(default_factory=lambda: defaultdict(list))
    computed: list[tuple[int, int]] = field(default_factory=list)
    """(source, part)."""
    attended: str = HOME
    """Where the bundle lies that was computed last."""
    unpacked: list[tuple[str, int]] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return self.done == len(self.program)

    def fail(self, words: str) -> ValueError:
        return ValueError(f"rank {self.number}: {words}")

    def read(self, buffer: str) -> Token:
        self._not_arriving(buffer)
        if buffer not in self.holds:
            raise self.fail(f"{buffer} is read before anything arrived in it")
        return self.holds[buffer]

    def write(self, buffer: str, token: Token | None) -> None:
        self._not_arriving(buffer)
        if buffer == HOME or buffer in {send.buffer for sends in self.sending.values() for send in sends}:
            raise self.fail(f"{buffer} is written while it is sent, or is the caller's")
        if token is None:
            self.holds.pop(buffer, None)
        else:
            self.holds[buffer] = token

    def _not_arriving(self, buffer: str) -> None:
        if buffer in {recv.buffer for recvs in self.receiving.values() for recv in recvs}:
            raise self.fail(f"{buffer} is touched while a message arrives in it")

    def has(self, what: str) -> set[int]:
        """The members whose share of `what` is in place; all, if it never comes through the head group."""
        comes = any(isinstance(action, Unpack) and action.what == what for action in self.program)
        return {member for w, member in self.unpacked if w == what} if comes else set(self.members)


class _Network:
    """Messages, in order; a send is complete only once its receive was posted (rendezvous)."""

    def __init__(self) -> None:
        self.sent: dict[Mail, list[Token]] = defaultdict(list)
        self.posted: dict[Mail, int] = defaultdict(int)
        self.taken: dict[Mail, int] = defaultdict(int)


def verify(schedule: Schedule) -> None:
    """Check that every rank meets what it must read exactly once, and that no network breaks the program.

    Raises:
        ValueError: rows and a bundle that meet twice or never, a wrong bundle computed or one without the
            rows that are read, or lost before its gradient is added, a buffer touched while in flight, a
            deadlock, a message left over or of rows that its receiver does not expect, a gradient that does
            not end at home complete, or a share of the head group that is missing, early or twice.
    """
    members = frozenset(range(schedule.route.heads))
    reads = [_reads(schedule, position) for position in range(schedule.route.positions)]
    ranks = []
    for number, program in enumerate(schedule.programs):
        position, member = divmod(number, len(members))
        readers = frozenset(reader for reader, of in enumerate(reads) if of.get(position, None) != ())
        rank = _Rank(number, position, member, program, reads[position], readers, members)
        rank.holds[HOME] = ("data", position, None)
        ranks.append(rank)
    network = _Network()
    while not all(rank.finished for rank in ranks):
        if not any([_advance(rank, network) for rank in ranks]):
            stuck = {rank.number: str(rank.program[rank.done]) for rank in ranks if not rank.finished}
            raise ValueError(f"deadlock: {stuck}")
    for rank in ranks:
        _check_end(rank)
    if any(network.posted[mail] != len(network.sent[mail]) for mail in {*network.posted, *network.sent}):
        raise ValueError("a message was sent that nobody receives")


def _reads(schedule: Schedule, position: int) -> dict[int, Rows | None]:
    """The rows that a position reads of each; None: all."""
    sources, plan = range(schedule.route.positions), schedule.plan
    if plan is None:
        return dict.fromkeys(sources)
    return {s: plan.needed(s, position, of_queries=schedule.queries_travel) for s in sources}


def _check_end(rank: _Rank) -> None:
    sources = {source for source, rows in rank.reads.items() if rows != ()} | {rank.position}
    pairs = sorted((source, part) for source in sources for part in rank.members)
    if sorted(rank.computed) != pairs:
        raise rank.fail(f"computed sources {rank.computed}, must be each of {sorted(sources)} once")
    if any(rank.sending.values()) or any(rank.receiving.values()):
        raise rank.fail("ends with messages that nobody waited for")
    if any(isinstance(action, Return) for action in rank.program):
        _check_sum(rank)
    for what in {what for what, _ in rank.unpacked}:
        if sorted(member for w, member in rank.unpacked if w == what) != sorted(rank.members):
            raise rank.fail(f"{what} of the head group: got {rank.unpacked}")
    if len(rank.members) > 1 and RESULT not in {what for what, _ in rank.unpacked}:
        raise rank.fail("its results stay with its head group")


def _check_sum(rank: _Rank) -> None:
    buffer = home_sum(rank.program)
    if buffer is None:
        if rank.readers:
            raise rank.fail(f"no gradient comes home, but {sorted(rank.readers)} read its bundle")
        return
    found = rank.read(buffer)
    if found[:3] != ("sum", rank.position, rank.readers):
        raise rank.fail(f"gradient of {rank.position} at home is {found}")


def _cover(held: Rows | None, rows: Rows | None) -> bool:
    """Whether rows that are held include `rows`."""
    if held is None or rows == ():
        return True
    return rows is not None and union([*held, *rows]) == union(list(held))


def _advance(rank: _Rank, network: _Network) -> bool:
    """Run `rank` until it must wait for another; whether it got anywhere."""
    before = rank.done
    while not rank.finished and _execute(rank, network):
        rank.done += 1
    return rank.done > before


def _execute(rank: _Rank, network: _Network) -> bool:
    action = rank.program[rank.done]
    match action:
        case Send() | Recv():
            _post(rank, action, network)
        case Wait():
            return _complete(rank, action.channel, network)
        case Compute():
            _compute(rank, action)
        case Accumulate():
            _accumulate(rank, action)
        case Add():
            _add(rank, action)
        case Return():
            pass
        case Pack():
            _pack(rank, action)
        case Unpack():
            _unpack(rank, action)
    return True


def _post(rank: _Rank, action: Send | Recv, network: _Network) -> None:
    if isinstance(action, Recv):
        rank.write(action.buffer, None)
        rank.receiving[action.channel].append(action)
        network.posted[_mail(action.peer, rank.number, action.channel)] += 1
        return
    token = _home_complete(rank) if action.buffer == HOME else rank.read(action.buffer)
    if action.channel.link != "heads":
        if not _cover(token[-1], action.rows):
            raise rank.fail(f"{action.buffer} does not hold the rows that it sends")
        token = (*token[:-1], action.rows)
    network.sent[_mail(rank.number, action.peer, action.channel)].append(token)
    rank.sending[action.channel].append(action)


def _mail(sender: int, receiver: int, channel: Channel) -> Mail:
    return sender, receiver, channel.link, channel.what


def _complete(rank: _Rank, channel: Channel, network: _Network) -> bool:
    """Finish all that `rank` started on `channel`, if its peers have come that far."""
    while rank.receiving[channel]:
        recv = rank.receiving[channel][0]
        mail = _mail(recv.peer, rank.number, channel)
        if network.taken[mail] >= len(network.sent[mail]):
            return False
        token = network.sent[mail][network.taken[mail]]
        if channel.link != "heads" and token[-1] != recv.rows:
            raise rank.fail(f"{recv.buffer} expects rows {recv.rows}, gets {token[-1]}")
        rank.holds[recv.buffer] = token
        network.taken[mail] += 1
        rank.receiving[channel].pop(0)
    for send in rank.sending[channel]:
        mail = _mail(rank.number, send.peer, channel)
        if network.posted[mail] < len(network.sent[mail]):
            return False
    rank.sending[channel] = []
    return True


def _home_complete(rank: _Rank) -> Token:
    if rank.has(BUNDLE) != rank.members:
        raise rank.fail("its bundle is used before all of the head group gave its share")
    return rank.read(HOME)


def _compute(rank: _Rank, action: Compute) -> None:
    held = _home_complete(rank) if action.buffer == HOME else rank.read(action.buffer)
    if held[:2] != ("data", action.source) or not _cover(held[2], rank.reads[action.source]):
        raise rank.fail(f"{action.buffer} does not hold the bundle of {action.source}")
    parts = rank.members if action.part is None else {action.part}
    if not parts <= rank.has(ROWS):
        raise rank.fail(f"computes rows of members {sorted(parts)} before they came")
    rank.computed += [(action.source, part) for part in sorted(parts)]
    rank.attended = action.buffer


def _accumulate(rank: _Rank, action: Accumulate) -> None:
    held = ("sum", action.source, frozenset(), ()) if action.first else rank.read(action.buffer)
    rank.write(action.buffer, None)
    kind, source, shares, rows = held
    last = rank.computed[-len(rank.members) :]
    if source != action.source or rank.position in shares or {s for s, _ in last} != {source}:
        raise rank.fail(f"gradient of {action.source} added to that of {source}: {shares}")
    if rank.read(rank.attended)[:2] != ("data", source):  # kernels that add to the sum read it only now
        raise rank.fail(f"{rank.attended} is lost before the gradient of {source} is added")
    if not _cover(action.rows, rows) or not _cover(action.rows, rank.reads[source]):
        raise rank.fail(f"{action.buffer} has no room for all rows of the gradient")
    rank.holds[action.buffer] = (kind, source, shares | {rank.position}, action.rows)


def _add(rank: _Rank, action: Add) -> None:
    kind, other, more, other_rows = rank.read(action.other)
    shares: frozenset[int] = frozenset()
    source, rows = other, ()
    if not action.first:
        _, source, shares, rows = rank.read(action.buffer)
    if (
        source != other
        or shares & more
        or not (_cover(action.rows, rows) and _cover(action.rows, other_rows))
    ):
        raise rank.fail(f"gradient of {other} with {more} added to that of {source} with {shares}")
    rank.write(action.buffer, (kind, source, shares | more, action.rows))


def _pack(rank: _Rank, action: Pack) -> None:
    sources = {source for source, rows in rank.reads.items() if rows != ()} | {rank.position}
    if action.what == RESULT and {s for s, p in rank.computed if p == action.member} != sources:
        raise rank.fail(f"results of member {action.member} leave before they are complete")
    if action.what == SUM:
        _check_sum(rank)
    rank.write(action.buffer, (action.what, rank.member, action.member))


def _unpack(rank: _Rank, action: Unpack) -> None:
    own = action.member == rank.member
    if not own and rank.read(action.buffer) != (action.what, action.member, rank.member):
        raise rank.fail(f"{action.buffer} does not hold the {action.what} of member {action.member}")
    rank.unpacked.append((action.what, action.member))
