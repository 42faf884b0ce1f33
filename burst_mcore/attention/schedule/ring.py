"""The program of one ring rank on a ring or a double ring, with and without overlap."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Generic

from burst_mcore.attention.schedule.actions import (
    COMES_LATE,
    HOME,
    HOME_TOTAL,
    OWN_SHARE,
    PARTIAL,
    SUM,
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
    posted_together,
)
from burst_mcore.attention.schedule.carried import Carried, Messages, T, nothing

_INTRA_DATA, _INTER_DATA = Channel(Link.INTRA, Kind.DATA), Channel(Link.INTER, Kind.DATA)
_INTRA_GRADIENT, _INTER_GRADIENT = Channel(Link.INTRA, Kind.GRADIENT), Channel(Link.INTER, Kind.GRADIENT)


def double_ring(
    ring_rank: int,
    nodes: int,
    intra: int,
    *,
    gradients: bool,
    messages: Messages[T] = Messages(),
    turn: int = 1,
) -> Program[T]:
    """Return the overlapped program of a ring rank on a double ring of nodes x intra.

    The paper's appendix has the algorithms "Overlapping for Activations" and "for Gradients"; their
    slips are corrected here.

    Data: the first block of a round rotates to the next node during the round. The block of step j + 1
    rotates within the node while step j is computed.

    Gradients: the owner keeps its local gradient. Within a round a sum starts with the block and follows it.
    The node's sum is complete one ring rank before the rank at which the block entered the node. There the
    sum of the previous nodes is added, and both leave for the next node. Blocks of the same node,
    except each rank's own block, come last (`visits`). Meanwhile the sum of the other nodes returns, and
    is added to this node's sum. A last message within the node carries it to the owner in the dtype of the
    result: only the owner's local gradient is still to be added.

    Args:
        messages: the rows of each message; messages without rows are left out.
        turn: 1 if blocks go to higher ring ranks, -1 if they go to lower ones.
    """
    return _RingWriter(ring_rank, nodes, intra, gradients, messages, turn).program()


def visits(nodes: int, intra: int, *, gradients: bool) -> list[tuple[int, range]]:
    """Return (round, places) of a block's path, in the order of computation."""
    rounds = [(i, range(intra)) for i in range(nodes)]
    if gradients and nodes > 1 and intra > 1:
        return [(0, range(1)), *rounds[1:], (0, range(1, intra))]
    return rounds


class _RingWriter(Generic[T]):
    """The writer of the program of ring rank (m, l), round by round."""

    def __init__(
        self, ring_rank: int, nodes: int, intra: int, gradients: bool, messages: Messages[T], turn: int
    ) -> None:
        self.ring_rank, self.nodes, self.intra = ring_rank, nodes, intra
        self.gradients, self.messages, self.turn = gradients, messages, turn
        self.m, self.l = divmod(ring_rank, intra)  # node m, and place l within the node
        self.actions: list[Action[T]] = []
        self.step = 0
        self.start = HOME
        """The buffer of the first block of the round."""
        self.block_sum, self.leaving = "", ""
        """The buffers of the growing sum, and of the sum being sent to the next node."""
        self.started: set[Channel] = set()
        """Channels with started messages."""

    def program(self) -> Program[T]:
        for i, places in visits(self.nodes, self.intra, gradients=self.gradients):
            self.round(i, places)
        if self.gradients:
            self.bring_home()
        return tuple(self.actions)

    def round(self, i: int, places: range) -> None:
        """Write the steps of round i, in which a block visits these places j of a node."""
        current, incoming = self.start, ""
        onward = places.start == 0 and i < self.nodes - 1  # the first block goes on to the next node
        home_next = self.gradients and 0 < i == self.nodes - 1  # the blocks of this node come next
        # A sum or a block sent between nodes needs two buffers, and both share a link. So the sum comes in
        # the first half of a round, rounded up, and the block leaves after it. In a last round of two steps,
        # the node's own block comes in the second half.
        sum_first = self.gradients and i > 1 and self.intra > 1 and (onward or self.intra == 2)
        departure = (self.intra + 1) // 2 if sum_first else 0  # the place j at which the block leaves
        for j in places:
            source, arriving = self.owner_at(i, j), ""
            if onward and j == departure:
                incoming = _free(Kind.DATA, current, self.start)
                owners = self.owner_at(i + 1, 0), self.owner_at(i, 0)
                comes, goes = (self.messages.read_from_round(owner, i + 1) for owner in owners)
                self.exchange(_INTER_DATA, incoming, self.start, comes, goes)
            if j + 1 in places or (home_next and j == self.intra - 1 > 0):
                # Receive the block of the next step; send the block that the next rank needs in that step.
                next_i, next_j, out = (i, j + 1, current) if j + 1 in places else (0, 1, HOME)
                arriving = _free(Kind.DATA, current, incoming, self.start if onward else "")
                owners = self.owner_at(next_i, next_j), self.owner_at(next_i, next_j - 1)
                comes, goes = (self.messages.read_from(owner, next_i, next_j) for owner in owners)
                self.exchange(_INTRA_DATA, arriving, out, comes, goes)
            if current == HOME or self.messages.reads(source):
                self.actions.append(Compute(self.step, source, current))
            if self.gradients:
                if j == departure - 1:
                    self.wait(_INTER_GRADIENT)
                self.follow(i, j, source, starts=j == places.start)
            if arriving:
                self.wait(_INTRA_DATA)
                current = arriving
            if incoming and j == places[-1]:
                self.wait(_INTER_DATA)
            self.step += 1
        self.start = incoming or current

    def follow(self, i: int, j: int, source: int, *, starts: bool) -> None:
        """Add this step's gradients to the block's sum, new if it `starts` here, and send it on."""
        if starts:
            self.block_sum = _free(SUM, self.leaving)
        else:
            self.wait(_INTRA_GRADIENT)
        self.accumulate(i, j, source)
        if j < self.intra - 1:
            comes, goes = (self.messages.read_until(self.owner_at(i, place), i, j) for place in (j + 1, j))
            following = _free(SUM, self.block_sum, self.leaving)
            self.exchange(_INTRA_GRADIENT, following, self.block_sum, comes, goes)
            self.block_sum = following
        elif i > 0 or self.intra > 1:
            self.leave_node(i, j, source)

    def leave_node(self, i: int, j: int, source: int) -> None:
        """Add the previous nodes' sum, and send both to the next node, unless this node owns the block."""
        self.wait(_INTER_GRADIENT)
        if not nothing(self.messages.read_until_round(source, (i or self.nodes) - 1)):
            first = nothing(self.messages.read_until(source, i, j))
            rows = self.messages.read_until_round(source, i) if i > 0 else self.messages.remote(source)
            self.actions.append(Add(self.step, self.block_sum, PARTIAL, first=first, rows=rows))
        if i > 0 and (i < self.nodes - 1 or self.intra > 1):  # nodes of one rank: `bring_home` sends last
            owners = self.owner_at(i + 1, j), self.owner_at(i, j)
            comes, goes = (self.messages.read_until_round(owner, i) for owner in owners)
            self.exchange(_INTER_GRADIENT, PARTIAL, self.block_sum, comes, goes)
            self.leaving = self.block_sum

    def accumulate(self, i: int, j: int, source: int) -> None:
        if not self.messages.reads(source):
            return
        if source == self.ring_rank:
            local_rows = self.messages.between(source, source)
            self.actions.append(Accumulate(self.step, source, OWN_SHARE, first=True, rows=local_rows))
            return
        first = nothing(self.messages.read_until(source, i, j - 1))  # no earlier rank added to the sum
        rows = self.messages.read_until(source, i, j)
        self.actions.append(Accumulate(self.step, source, self.block_sum, first=first, rows=rows))

    def bring_home(self) -> None:
        """Send every total to its owner: within the node, or between nodes of one ring rank."""
        if self.step > 1:  # sums are one ring step from home: the next ring rank owns this rank's block
            within = self.intra > 1
            channel = Channel(Link.INTRA if within else Link.INTER, Kind.TOTAL)
            owner = self.ring_rank_at(self.m + self.turn * (not within), self.l + self.turn * within)
            comes, goes = (self.messages.remote(each) for each in (self.ring_rank, owner))
            if not nothing(goes):
                self.complete(goes)
            self.exchange(channel, HOME_TOTAL, TOTAL, comes, goes)
            self.wait(channel)
        others = self.step > 1 and not nothing(self.messages.remote(self.ring_rank))
        home = (OWN_SHARE,) * self.messages.reads(self.ring_rank) + (HOME_TOTAL,) * others
        self.actions.append(Return(self.step, home))

    def complete(self, rows: Carried[T]) -> None:
        """Write the total of these rows, with the last gradients, into the buffer for the owner."""
        last = self.actions[-1]
        if isinstance(last, Accumulate) and last.buffer == self.block_sum:
            self.actions[-1] = replace(last, into=TOTAL)
        else:
            self.actions.append(Add(self.step, TOTAL, self.block_sum, first=True, rows=rows))

    def exchange(self, channel: Channel, into: str, out: str, comes: Carried[T], goes: Carried[T]) -> None:
        """Start receiving `into` from the ring rank before, and sending `out` to the one after."""
        inter = channel.link == Link.INTER
        for kind, buffer, offset, rows in ((Recv, into, -self.turn, comes), (Send, out, self.turn, goes)):
            if not nothing(rows):
                peer = self.ring_rank_at(self.m + offset * inter, self.l + offset * (not inter))
                self.actions.append(kind(self.step, channel, buffer, peer, rows))
                self.started.add(channel)

    def wait(self, channel: Channel) -> None:
        if channel in self.started:
            self.started.remove(channel)
            self.actions.append(Wait(self.step, channel))

    def owner_at(self, i: int, j: int) -> int:
        """Return the owner of the block at this rank in round i, place j: i nodes and j ranks behind."""
        return self.ring_rank_at(self.m - self.turn * i, self.l - self.turn * j)

    def ring_rank_at(self, node: int, local: int) -> int:
        return node % self.nodes * self.intra + local % self.intra


def _free(prefix: str, *taken: str) -> str:
    return next(name for index in range(4) if (name := f"{prefix}{index}") not in taken)


@cache
def kind_of(buffer: str) -> Kind:
    """Return the content of a buffer: a block (DATA), a sum of gradients, or a complete sum (TOTAL)."""
    if buffer in (TOTAL, HOME_TOTAL):
        return Kind.TOTAL
    return Kind.DATA if buffer.startswith(Kind.DATA) or buffer == HOME else Kind.GRADIENT


def at_home(program: Program) -> tuple[str, ...]:
    """Return the buffers whose sum is the gradient of a rank's own block at the end of a program."""
    return next((action.buffers for action in program if isinstance(action, Return)), ())


def without_overlap(program: Program[T]) -> Program[T]:
    """Return the program with a wait after each send: late kinds when they are sent, others when needed."""
    actions: list[Action[T]] = []
    postponed: dict[Channel, list[Action[T]]] = {}
    for channel, group in posted_together(program):
        if channel is None:
            for action in group:
                if not isinstance(action, Wait):
                    actions.append(action)
                elif action.channel.kind not in COMES_LATE:
                    now = [replace(message, step=action.step) for message in postponed.pop(action.channel)]
                    actions += [*now, action]
        elif channel.kind in COMES_LATE:
            actions += [*group, Wait(group[-1].step, channel)]
        else:
            postponed.setdefault(channel, []).extend(group)
    return tuple(actions)
