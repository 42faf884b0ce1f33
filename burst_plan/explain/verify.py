"""The verifier: dry-runs a schedule on all ranks at once, and reports missing work, hazards and deadlocks.

Messages move by NCCL's rule, under which fewer schedules pass than under gloo's. Neighbouring sends and
receives of a channel are one batch. The batches of a rank on a communicator run one after another, in the
order of posting. A message completes once the batches of both its ends are at the heads of their queues.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import product
from typing import Any

from burst_mcore.attention.geometry.rows import Rows, union
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
    Program,
    Recv,
    Return,
    Send,
    Unpack,
    Wait,
)
from burst_mcore.attention.schedule.ring import at_home
from burst_mcore.attention.schedule.route import Communicator, Schedule, communicator_of
from burst_plan.simulate.walk import walk

Token = tuple[Any, ...]
"""The contents of a buffer: (DATA, source, rows), (SUM, source, contributors, rows), or in a head group
(kind, from, to); the first is a `Kind`. Rows None are all."""
Posted = tuple[Send | Recv, Token | None]
"""A message of a batch, and the token that a send carries."""
Wire = tuple[Communicator, int, int, int]
"""A message's (communicator, from, to, number among these): NCCL matches messages by their order."""


@dataclass
class _Rank:
    number: int
    ring_rank: int
    member: int
    program: Program
    reads: dict[int, Rows | None]
    """The rows of each source that the rank must compute with."""
    readers: frozenset[int]
    """The ring ranks that read its home block."""
    members: frozenset[int]
    sources: frozenset[int]
    """The ring ranks whose blocks have allowed pairs with its rows."""
    executed: int = 0
    holds: dict[str, Token] = field(default_factory=dict)
    sending: dict[Channel, list[Send]] = field(default_factory=lambda: defaultdict(list))
    receiving: dict[Channel, list[Recv]] = field(default_factory=lambda: defaultdict(list))
    open: Counter[Channel] = field(default_factory=Counter)
    """Batches that are not complete."""
    computed: list[tuple[int, int]] = field(default_factory=list)
    """(source, part)."""
    attended: str = HOME
    """The buffer of the last computed block."""
    unpacked: list[tuple[Kind, int]] = field(default_factory=list)
    batch: list[Posted] = field(default_factory=list)
    """Messages of the ring step that is being posted."""

    def __str__(self) -> str:
        if self.executed == len(self.program):
            return f"rank {self.number}, after its last step"
        action = self.program[self.executed]
        return f"rank {self.number}, step {action.step}: {action}"

    def fail(self, words: str) -> ValueError:
        return ValueError(f"{self}: {words}")

    def read(self, buffer: str) -> Token:
        self._not_in(self.receiving, buffer, "touched while a message arrives in it")
        if buffer not in self.holds:
            raise self.fail(f"{buffer} is read before anything arrived in it")
        return self.holds[buffer]

    def write(self, buffer: str, token: Token | None) -> None:
        self._not_in(self.receiving, buffer, "touched while a message arrives in it")
        self._not_in(self.sending, buffer, "written while it is sent")
        if buffer == HOME:
            raise self.fail(f"{buffer} is written, but is the caller's")
        if token is None:
            self.holds.pop(buffer, None)
        else:
            self.holds[buffer] = token

    def _not_in(self, started: Mapping[Channel, Sequence[Send | Recv]], buffer: str, words: str) -> None:
        """Raise ValueError if a started message has the buffer, and name its channel."""
        for channel, messages in started.items():
            if buffer in {message.buffer for message in messages}:
                raise self.fail(f"{buffer} is {words}: no wait for {channel} since")

    def has(self, kind: Kind) -> set[int]:
        """Return the members whose share of a kind has arrived; all members without a head group."""
        comes = kind in self._coming
        return {member for its, member in self.unpacked if its == kind} if comes else set(self.members)

    @cached_property
    def _coming(self) -> set[Kind]:
        return {action.kind for action in self.program if isinstance(action, Unpack)}


@dataclass(eq=False)
class _Batch:
    """The messages that a rank posts together."""

    rank: _Rank
    channel: Channel
    queue: deque[_Batch]
    """The rank's batches on the communicator, in the order of posting."""
    messages: dict[Wire, Posted]
    """The messages that are not complete."""

    def __str__(self) -> str:
        return ", ".join(str(action) for action, _ in self.messages.values())


class _Network:
    """Batches of messages in flight, by communicator."""

    def __init__(self, schedule: Schedule, intra_size: int) -> None:
        self._route, self._intra = schedule.route, intra_size
        self.queues: dict[tuple[int, Communicator], deque[_Batch]] = defaultdict(deque)
        self._posted: Counter[tuple[Communicator, int, int, bool]] = Counter()
        self._ready: dict[Wire, _Batch] = {}
        """Messages with one end at the head of its queue."""
        self._woken: list[_Rank] = []

    def post(self, rank: _Rank, batch: Sequence[Posted]) -> None:
        """Start the messages of a ring step."""
        channel = batch[0][0].channel
        communicator = communicator_of(channel, rank.number, self._route, self._intra)
        queue = self.queues[rank.number, communicator]
        pending = {self._wire(communicator, rank, action): (action, token) for action, token in batch}
        queue.append(_Batch(rank, channel, queue, pending))
        rank.open[channel] += 1
        if len(queue) == 1:
            self._come_to_head(queue[0])

    def _wire(self, communicator: Communicator, rank: _Rank, action: Send | Recv) -> Wire:
        sends = isinstance(action, Send)
        ends = (rank.number, action.peer) if sends else (action.peer, rank.number)
        count = self._posted[communicator, *ends, sends]
        self._posted[communicator, *ends, sends] += 1
        return communicator, *ends, count

    def _come_to_head(self, batch: _Batch) -> None:
        """Complete all messages whose other end is at the head, and then messages that become possible."""
        heads = [batch]
        while heads:
            batch, partners = heads.pop(), []
            for wire in list(batch.messages):
                partner = self._ready.pop(wire, None)
                if partner is None:
                    self._ready[wire] = batch
                else:
                    _deliver(batch.messages.pop(wire), partner.messages.pop(wire), batch.rank, partner.rank)
                    partners.append(partner)
            for posted in (batch, *partners):
                if not posted.messages and posted.queue and posted.queue[0] is posted:
                    posted.queue.popleft()
                    posted.rank.open[posted.channel] -= 1
                    self._woken.append(posted.rank)
                    heads += list(posted.queue)[:1]

    def tick(self) -> list[_Rank] | None:
        """Return the ranks with a completed batch since the last call."""
        woken, self._woken = self._woken, []
        return woken or None


def _deliver(first: Posted, second: Posted, first_rank: _Rank, second_rank: _Rank) -> None:
    """Put the token of a message into the buffer of its receiver."""
    (send, token), (recv, _), rank = (
        (first, second, second_rank) if isinstance(first[0], Send) else (second, first, first_rank)
    )
    assert token is not None
    if send.channel.kind != recv.channel.kind:
        raise rank.fail(
            f"{recv.buffer} expects {recv.channel}, gets {send.channel}: they share a communicator"
        )
    if recv.channel.link != Link.HEADS and token[-1] != recv.rows:
        raise rank.fail(f"{recv.buffer} expects rows {recv.rows}, gets {token[-1]}")
    rank.holds[recv.buffer] = token


def verify(schedule: Schedule, intra_size: int | None = None) -> None:
    """Check that every rank computes each block that it reads exactly once, in any order of messages.

    Args:
        schedule: the programs of all ranks.
        intra_size: ranks of a node; by default as on the route.

    Raises:
        ValueError: a rank computes a block twice, never, without the rows that are read, or loses it before
            its gradient is added. A buffer is touched while in flight. Ranks wait for each other. A message
            is left over, or carries rows that its receiver does not expect. A gradient does not end at home
            complete. A share of the head group is missing, early or there twice.
    """
    route = schedule.route
    members = frozenset(range(route.heads))
    needs = [_needs(schedule, ring_rank) for ring_rank in range(route.ring_size)]
    ranks = []
    for number, program in enumerate(schedule.programs):
        ring_rank, member = route.placement.ring_rank(number), route.placement.member(number)
        readers = frozenset(reader for reader, (rows, _) in enumerate(needs) if rows[ring_rank] != ())
        reads, sources = needs[ring_rank]
        rank = _Rank(number, ring_rank, member, program, reads, readers, members, sources)
        rank.holds[HOME] = (Kind.DATA, ring_rank, None)
        ranks.append(rank)
    network = _Network(schedule, intra_size or route.span)
    stuck = walk(ranks, partial(_execute, network), network.tick)
    if stuck:
        raise ValueError(f"deadlock: {_waiting(stuck, network)}")
    for rank in ranks:
        _check_end(rank)
    if any(network.queues.values()):
        raise ValueError("a message was sent that nobody receives")


def _waiting(stuck: Sequence[_Rank], network: _Network) -> str:
    """Describe the messages that each rank waits for, and the batches at the heads of its queues."""
    heads = defaultdict(list)
    for (number, (link, kind, _)), queue in network.queues.items():
        if queue:
            heads[number].append(f"at the head of {link} {kind}: {queue[0]}")
    return "; ".join(f"{rank}{''.join(f' ({head})' for head in heads[rank.number])}" for rank in stuck)


def _needs(schedule: Schedule, ring_rank: int) -> tuple[dict[int, Rows | None], frozenset[int]]:
    """Return the rows of each block that a ring rank reads, None: all; and the sources that it computes.

    Of the sources allowed pairs are computed, and of the home block even none.
    """
    sources, plan, of_queries = range(schedule.route.ring_size), schedule.plan, schedule.queries_rotate
    if plan is None:
        return dict.fromkeys(sources), frozenset(sources)
    meets = plan.reading(of_queries=of_queries).meets[:, ring_rank].tolist()
    rows: dict[int, Rows | None] = {s: plan.needed(s, ring_rank, of_queries=of_queries) for s in sources}
    return rows, frozenset(s for s in sources if s == ring_rank or meets[s])


def _check_end(rank: _Rank) -> None:
    pairs = sorted(product(rank.sources, rank.members))
    if sorted(rank.computed) != pairs:
        raise rank.fail(f"computed {rank.computed}, must be each of {pairs} once")
    if any(rank.sending.values()) or any(rank.receiving.values()):
        raise rank.fail("ends with messages that nobody waited for")
    if any(isinstance(action, Return) for action in rank.program):
        _check_sum(rank)
    kinds = {kind for kind, _ in rank.unpacked}
    for kind in kinds:
        if sorted(member for its, member in rank.unpacked if its == kind) != sorted(rank.members):
            raise rank.fail(f"{kind} of the head group: got {rank.unpacked}")
    if len(rank.members) > 1 and Kind.STAYING_OUT not in kinds:
        raise rank.fail("its results stay with its head group")


def _check_sum(rank: _Rank) -> None:
    """Check that the home buffers have every reader's share of the gradient, once."""
    tokens = [rank.read(buffer) for buffer in at_home(rank.program)]
    shares = sorted(reader for token in tokens for reader in token[2])
    if shares != sorted(rank.readers) or {token[:2] for token in tokens} - {(Kind.GRADIENT, rank.ring_rank)}:
        raise rank.fail(f"gradient of {rank.ring_rank} at home is {tokens}, readers {sorted(rank.readers)}")


def _cover(present: Rows | None, rows: Rows | None) -> bool:
    """Return whether the present rows include `rows`."""
    if present is None or rows == ():
        return True
    return rows is not None and union([*present, *rows]) == union(list(present))


def _execute(network: _Network, rank: _Rank, action: Action) -> bool:
    """Execute the next action of a rank; False if its messages are not complete yet."""
    match action:
        case Send() | Recv():
            _post(rank, action, network)
        case Wait():
            return _complete(rank, action.channel)
        case Compute():
            _compute(rank, action)
        case Accumulate():
            _accumulate(rank, action)
        case Add():
            _add(rank, action)
        case Pack():
            _pack(rank, action)
        case Unpack():
            _unpack(rank, action)
    return True


def _post(rank: _Rank, action: Send | Recv, network: _Network) -> None:
    """Record a message; with the last message of its ring step, post all of them."""
    token: Token | None = None
    if isinstance(action, Recv):
        rank.write(action.buffer, None)
        rank.receiving[action.channel].append(action)
    else:
        token = _home_complete(rank) if action.buffer == HOME else rank.read(action.buffer)
        if action.channel.link != Link.HEADS:
            if not _cover(token[-1], action.rows):
                raise rank.fail(f"{action.buffer} does not hold the rows that it sends")
            token = (*token[:-1], action.rows)
        rank.sending[action.channel].append(action)
    rank.batch.append((action, token))
    following = rank.program[rank.executed + 1] if rank.executed + 1 < len(rank.program) else None
    if not isinstance(following, (Send, Recv)) or following.channel != action.channel:
        network.post(rank, rank.batch)
        rank.batch = []


def _complete(rank: _Rank, channel: Channel) -> bool:
    """Complete all that `rank` started on `channel`, if it has arrived."""
    if rank.open[channel]:
        return False
    rank.receiving[channel], rank.sending[channel] = [], []
    return True


def _home_complete(rank: _Rank) -> Token:
    if rank.has(Kind.ROTATING_IN) != rank.members:
        raise rank.fail("its block is used before all of the head group gave its share")
    return rank.read(HOME)


def _compute(rank: _Rank, action: Compute) -> None:
    token = _home_complete(rank) if action.buffer == HOME else rank.read(action.buffer)
    if token[:2] != (Kind.DATA, action.source) or not _cover(token[2], rank.reads[action.source]):
        raise rank.fail(f"{action.buffer} does not hold the block of {action.source}")
    parts = rank.members if action.part is None else {action.part}
    if not parts <= rank.has(Kind.STAYING_IN):
        raise rank.fail(f"computes rows of members {sorted(parts)} before they came")
    rank.computed += [(action.source, part) for part in sorted(parts)]
    rank.attended = action.buffer


def _accumulate(rank: _Rank, action: Accumulate) -> None:
    token = (Kind.GRADIENT, action.source, frozenset(), ()) if action.first else rank.read(action.buffer)
    rank.write(action.buffer, None)
    kind, source, shares, rows = token
    last = rank.computed[-len(rank.members) :]
    if source != action.source or rank.ring_rank in shares or {s for s, _ in last} != {source}:
        raise rank.fail(f"gradient of {action.source} added to that of {source}: {shares}")
    if rank.read(rank.attended)[:2] != (Kind.DATA, source):  # kernels that accumulate read it only now
        raise rank.fail(f"{rank.attended} is lost before the gradient of {source} is added")
    if not _cover(action.rows, rows) or not _cover(action.rows, rank.reads[source]):
        raise rank.fail(f"{action.buffer} has no room for all rows of the gradient")
    rank.write(action.into or action.buffer, (kind, source, shares | {rank.ring_rank}, action.rows))


def _add(rank: _Rank, action: Add) -> None:
    kind, owner, more, added_rows = rank.read(action.addend)
    shares: frozenset[int] = frozenset()
    source, rows = owner, ()
    if not action.first:
        _, source, shares, rows = rank.read(action.buffer)
    if (
        source != owner
        or shares & more
        or not (_cover(action.rows, rows) and _cover(action.rows, added_rows))
    ):
        raise rank.fail(f"gradient of {owner} with {more} added to that of {source} with {shares}")
    rank.write(action.buffer, (kind, source, shares | more, action.rows))


def _pack(rank: _Rank, action: Pack) -> None:
    sources = {s for s, part in rank.computed if part == action.member}
    if action.kind == Kind.STAYING_OUT and sources != rank.sources:
        raise rank.fail(f"results of member {action.member} leave before they are complete")
    if action.kind == Kind.ROTATING_OUT:
        _check_sum(rank)
    rank.write(action.buffer, (action.kind, rank.member, action.member))


def _unpack(rank: _Rank, action: Unpack) -> None:
    is_home = action.member == rank.member
    if not is_home and rank.read(action.buffer) != (action.kind, action.member, rank.member):
        raise rank.fail(f"{action.buffer} does not hold the {action.kind} of member {action.member}")
    rank.unpacked.append((action.kind, action.member))
