"""The simulator of all ranks in lockstep: the same results as `simulate.play`, but quick for large rings.

Without omitted messages the programs of all ranks are one program, shifted (`counted.moved`). So one
program is enough, and every rank does its n-th action together. Clocks and numbers of rows are vectors over
the ranks. A message without rows is no message. Passes whose programs differ by numbers alone, such as both
backwards, and a ring and its mirror image, are simulated together. Messages to several receivers share
a link as in `simulate`.

Letters: W passes, G ranks, P ring ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import torch
from torch import Tensor

from burst_mcore.attention.geometry.plan import Plan
from burst_mcore.attention.geometry.shard import Placement
from burst_mcore.attention.schedule.actions import Channel, Compute, Kind, Link, Pass, Program, Send, Wait
from burst_mcore.attention.schedule.heads import Moves, with_heads
from burst_mcore.attention.schedule.ring import without_overlap
from burst_mcore.attention.schedule.route import PASSES, Route, on_ring
from burst_mcore.rates import Rates
from burst_plan.simulate.cost import Sizes, farther, stretched
from burst_plan.simulate.counted import UNSENT, Counted, OfAll, RowCounts, moved

NEVER = -torch.inf
"""The time at which an empty message arrives."""


@dataclass(frozen=True)
class PlayedPass:
    """The cost of a simulated pass."""

    seconds: float
    """Time at which the slowest rank ends; inf where all passes of a program take longer than the limit."""
    compute: float
    """Seconds of the kernel on the busiest rank."""
    sent: dict[Link, float]
    """Bytes that a rank sends within its node (INTRA) and to other nodes (INTER), on average."""


@dataclass(frozen=True, eq=False)
class RoutedPass:
    """A pass over a route, with the bytes and the seconds for its simulation."""

    route: Route
    """If `direct`, all ring ranks must read each other (`Reading.meets`)."""
    pass_: Pass
    sizes: Sizes
    work: KernelWork
    program: Program | None = None
    """The program of rank 0, which all ranks run, shifted; None: the route's program."""

    @property
    def of_queries(self) -> bool:
        return self.pass_ == Pass.QUERY

    @property
    def kind(self) -> tuple[object, ...]:
        """The key of passes with the same program, up to numbers and omitted messages.

        Rows that come part by part change the order in which parts are computed, where heads are shared, and
        gradients change the order of blocks, on several nodes.
        """
        route, moves = self.route, PASSES[self.pass_]
        by_part, of_nodes = route.heads > 1 and moves.rows, route.nodes > 1 and moves.gradients
        return replace(route, mirrored=False), by_part, of_nodes, self.program


class KernelWork:
    """Seconds of the kernel, by rank and source.

    Args:
        pairs: query-key pairs, [ranks, ranks], of rows that stay and rows that rotate.
        placement: the ranks of each ring rank.
        seconds: the seconds of kernel calls, by their pairs.
    """

    def __init__(self, pairs: Tensor, placement: Placement, seconds: Callable[[Tensor], Tensor]) -> None:
        self._pairs, self._placement, self._seconds = pairs, placement, seconds

    @cached_property
    def _by_member(self) -> Tensor:
        """Return the pairs, [ring rank, member, source]."""
        ring_size, heads = self._placement.ring_size, self._placement.heads
        if self._placement.outer:
            pairs = self._pairs.reshape(heads, ring_size, heads, ring_size).sum(2)
            return pairs.transpose(0, 1)
        return self._pairs.reshape(ring_size, heads, ring_size, heads).sum(3)

    @cached_property
    def parts(self) -> Tensor:
        """The seconds of a member's rows, [ring rank, member, source]: parts of one step."""
        return self._seconds(self._by_member)

    @cached_property
    def whole(self) -> Tensor:
        """The seconds of all rows, [ring rank, source]; contiguous."""
        pairs = self._by_member.sum(1) if self._placement.heads > 1 else self._pairs
        return self._seconds(pairs).contiguous()

    @cached_property
    def _by_place(self) -> dict[tuple[int, int], float]:
        """The nonzero seconds by ring rank and source: a dict, as entries of tensors are slow (tenfold)."""
        ring_rank, source = self.whole.nonzero(as_tuple=True)
        seconds = self.whole[ring_rank, source].double().tolist()
        return dict(zip(zip(ring_rank.tolist(), source.tolist(), strict=True), seconds, strict=True))

    def of_action(self, rank: int, action: Compute) -> float:
        """Return the seconds of one rank's compute, in that rank's program."""
        ring_rank = self._placement.ring_rank(rank)
        if action.part is None:
            return self._by_place.get((ring_rank, action.source), 0.0)
        return float(self.parts[ring_rank, action.part, action.source])

    @cached_property
    def calls(self) -> int:
        """The kernel calls of the rank with the most."""
        return int((self.whole > 0).sum(1).max())

    @cached_property
    def busiest(self) -> float:
        """The seconds of the busiest rank, over all sources."""
        return float(self.whole.sum(1).max())


def play_all(
    plan: Plan, passes: Sequence[RoutedPass], intra_size: int, rates: Rates, limit: float = torch.inf
) -> list[PlayedPass]:
    """Simulate passes over ring ranks of `plan`, on nodes of `intra_size` ranks, to the end or to `limit`."""
    kinds: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for index, request in enumerate(passes):
        kinds[request.kind].append(index)
    played_by_index: dict[int, PlayedPass] = {}
    for of_kind in kinds.values():
        results = _Lockstep(plan, [passes[index] for index in of_kind], intra_size, rates).play(limit)
        played_by_index.update(zip(of_kind, results, strict=True))
    return [played_by_index[index] for index in range(len(passes))]


@dataclass(eq=False)
class _Peers:
    """The receivers and links of one action, for every rank."""

    to: Tensor
    back: Tensor
    """The rank from which each rank receives."""
    inter: Tensor
    """Whether the link is between nodes, [G, W]."""
    rate: Tensor
    volume: Tensor
    """Bytes, [G, W]."""
    busy: Tensor
    """Time until which a message that has the link to itself occupies it."""


@dataclass(eq=False)
class _Message:
    """The messages of all ranks with one action, [G, W]."""

    peers: _Peers
    begin: Tensor
    remaining: Tensor
    """Bytes that are still to be carried."""
    end: Tensor
    """Time of arrival without latency: `NEVER` for no message, inf until it is known."""


class _Lockstep:
    def __init__(self, plan: Plan, passes: Sequence[RoutedPass], intra: int, rates: Rates) -> None:
        self.passes, self.intra, self.rates = passes, intra, rates
        self.route = route = passes[0].route
        self.heads, self.ring_size, self.placement = route.heads, route.ring_size, route.placement
        self.rank = torch.arange(self.route.size)
        self.ring_rank, self.member = self.placement.ring_rank(self.rank), self.placement.member(self.rank)
        other_end = self.placement.rank(self.ring_size - 1 - self.ring_rank, self.member)
        self.number = torch.stack([other_end if x.route.mirrored else self.rank for x in passes], 1)
        """The ranks, [G, W]: a mirrored ring is counted from the other end, but nodes are not."""
        self.clock = torch.zeros(self.route.size, len(passes), dtype=torch.float64)
        self.program = passes[0].program or self.of_all(plan)
        self.scale, self.absent = self.of_kinds()
        self.peers: dict[int, _Peers] = {}
        self.together = self.rivals()
        self.links = torch.zeros(2, *self.clock.shape, dtype=torch.float64)
        """Time up to which the links of each rank, within its node and between nodes, are simulated."""
        self.under_way: dict[Channel, list[_Message]] = defaultdict(list)
        self.pending: list[_Message] = []
        """Messages on shared links that are not complete, in the order in which they were sent."""
        self.crowd: _Crowd | None = None
        """The same as tensors; None after a new message."""

    def of_all(self, plan: Plan) -> Program[Counted]:
        """Return the program of rank 0 with every message, and with numbers of rows for all ranks."""
        row_counts = [RowCounts(plan, each.route, of_queries=each.of_queries) for each in self.passes]
        route, moves = self.route, [PASSES[request.pass_] for request in self.passes]
        every = Moves(
            "all passes",
            gradients=any(each.gradients for each in moves),
            block=any(each.block for each in moves),
            rows=any(each.rows for each in moves),
        )
        route = replace(route, mirrored=False)
        ring = on_ring(0, route, every, OfAll(row_counts))
        if self.heads > 1:
            last = torch.stack([each.last_steps(gradients=every.gradients) for each in row_counts], 1)
            none = torch.full(last.shape, UNSENT, dtype=torch.float64)
            steps_of_results = last.unique().tolist()
            leaving = {x: (Counted(none.masked_fill(last == x, plan.rows), 0),) for x in steps_of_results}
            ring = with_heads(ring, 0, self.placement, every, by_part=route.overlap, leaving=leaving)
        return ring if route.overlap else without_overlap(ring)

    def of_kinds(self) -> tuple[dict[Kind, Tensor], dict[Kind, Tensor]]:
        """Return by kind of message, [W]: bytes of all rows, and 0; in passes without it 1, and `UNSENT`."""
        sizes = [request.sizes.whole for request in self.passes]
        dtype = torch.float64
        scale = {kind: torch.tensor([x.get(kind, 1) for x in sizes], dtype=dtype) for kind in Kind}
        marks = {kind: [0.0 if kind in x else UNSENT for x in sizes] for kind in Kind}
        return scale, {kind: torch.tensor(marks[kind], dtype=dtype) for kind in Kind}

    def rivals(self) -> set[int]:
        """Return the sends, by index, that may share a link with the same rank's messages to other ranks."""
        open_: dict[int, _Peers] = {}
        under_way: dict[Channel, list[int]] = defaultdict(list)
        last_rival: dict[int, int] = {}
        behind: list[tuple[int, int]] = []
        one_link = cache(lambda peers, its: bool((peers.inter == its.inter).any()))  # for some rank
        for index, action in enumerate(self.program):
            if isinstance(action, Send):
                peers = self.peers_of(action.peer)
                for earlier, its in open_.items():
                    if its is peers:
                        behind.append((earlier, index))
                    elif one_link(peers, its):
                        last_rival[earlier] = last_rival[index] = index
                open_[index] = peers
                under_way[action.channel].append(index)
            elif isinstance(action, Wait):
                for earlier in under_way.pop(action.channel, ()):
                    del open_[earlier]
        for earlier, later in behind:  # in order: a send queues behind a send whose rivals are still to come
            if last_rival.get(earlier, -1) > later:
                last_rival[later] = max(last_rival.get(later, -1), last_rival[earlier])
        return set(last_rival)

    def peers_of(self, peer: int) -> _Peers:
        """Return the receivers of all ranks for a send of rank 0 to `peer`."""
        if peer not in self.peers:
            ring_rank = self.counterparts(self.placement.ring_rank(peer))
            to = self.placement.rank(ring_rank, (self.member + self.placement.member(peer)) % self.heads)
            back = torch.empty_like(to)
            back[to] = self.rank
            inter = self.number[to] // self.intra != self.number // self.intra
            rates = [self.rates.link(inter=False), self.rates.link(inter=True)]
            rate = torch.tensor(rates, dtype=torch.float64)[inter.long()]
            none = torch.zeros_like(self.clock)
            self.peers[peer] = _Peers(to, back, inter, rate, none, none.clone())
        return self.peers[peer]

    def play(self, limit: float) -> list[PlayedPass]:
        waited: list[Channel] = []  # awaited together, until another action
        for index, action in enumerate(self.program):
            match action:
                case Wait(channel=channel):
                    waited.append(channel)
                case Send() if not self.empty(action):
                    self.wait(waited)
                    self.post(action, shares=index in self.together)
                case Compute():
                    self.wait(waited)
                    self.clock = self.clock + self.seconds(action)
                    if limit < torch.inf and float(self.clock.amax(0).amin()) > limit:
                        return [PlayedPass(torch.inf, torch.inf, {})] * len(self.passes)
        self.wait(waited)
        volumes = torch.zeros(2, len(self.passes), dtype=torch.float64)
        for peers in self.peers.values():
            between = peers.volume * peers.inter
            volumes += torch.stack([peers.volume - between, between]).mean(1)
        busiest = [routed.work.busiest for routed in self.passes]
        by_link = [{Link.INTRA: intra, Link.INTER: inter} for intra, inter in volumes.T.tolist()]
        slowest: list[float] = self.clock.amax(0).tolist()
        return [PlayedPass(*each) for each in zip(slowest, busiest, by_link, strict=True)]

    def seconds(self, action: Compute) -> Tensor:
        """Return the seconds of a compute for every rank and pass."""
        source = self.counterparts(action.source)
        if action.part is None:
            return self.seconds_by_place.index_select(0, self.ring_rank * self.ring_size + source)
        member, per_pass = (self.member + action.part) % self.heads, []  # the program is that of member 0
        for request in self.passes:  # a mirrored ring is counted from the other end
            x, y = (-1 - self.ring_rank, -1 - source) if request.route.mirrored else (self.ring_rank, source)
            per_pass.append(request.work.parts[x, member, y])
        return torch.stack(per_pass, 1)

    @cached_property
    def seconds_by_place(self) -> Tensor:
        """The seconds by ring rank and source, of every pass: [P * P, W]."""
        columns = [request.work.whole.view(-1).double() for request in self.passes]
        flips = [request.route.mirrored for request in self.passes]
        return torch.stack([x.flip(0) if flip else x for x, flip in zip(columns, flips, strict=True)], 1)

    def counterparts(self, ring_rank: int) -> Tensor:
        """Return the counterpart that each rank has of rank 0's `ring_rank`, [G]."""
        return moved(self.route.nodes, self.route.intra, ring_rank).index_select(0, self.ring_rank)

    def bytes_of(self, send: Send | Send[Counted]) -> Tensor:
        """Return the bytes of a send, [G, W]; below zero for no message."""
        kind = send.channel.kind
        size = self.scale[kind].expand_as(self.clock)
        if send.rows is not None:
            (entry,) = send.rows
            assert isinstance(entry, Counted)  # the program of a caller moves whole blocks
            rows = entry.rows.index_select(0, self.counterparts(entry.owner))
            size = rows * (self.scale[kind] / self.passes[0].sizes.rows)
        return size + self.absent[kind]

    def empty(self, send: Send | Send[Counted]) -> bool:
        """Return whether no rank has a row to send, in any pass."""
        entry = send.rows and send.rows[0]
        return isinstance(entry, Counted) and float(entry.rows.amax()) <= 0

    def post(self, send: Send | Send[Counted], *, shares: bool) -> None:
        """Start a message at both ends: each rank receives with the same action as it sends."""
        peers, size = self.peers_of(send.peer), self.bytes_of(send)
        peers.volume += size.clamp(min=0)
        if self.rates.crowding or self.rates.levels:
            size = size * self.stretch(send.channel.link, peers)
        begin = torch.maximum(self.clock, self.clock.index_select(0, peers.to))  # once both ends are posted
        if not shares:
            self.deliver([each for each in self.pending if each.peers is peers])
        begin = torch.maximum(begin, peers.busy)
        message = _Message(peers, begin, size, begin + size / peers.rate)
        if shares:
            message.end = torch.full_like(begin, torch.inf).masked_fill_(size <= 0, NEVER)
            self.pending.append(message)
            self.crowd = None
        else:
            peers.busy = torch.maximum(peers.busy, message.end)
        self.under_way[send.channel].append(message)

    def stretch(self, link: Link, peers: _Peers) -> Tensor:
        """Return the slowdown of messages against the rates of their links, [G, W]."""
        members = min(self.intra, self.heads if link == Link.HEADS else self.route.size)
        times = farther(self.number, self.number[peers.to], self.rates)
        return (times * stretched(link, members, self.rates)).masked_fill(peers.inter, 1.0)

    def wait(self, channels: list[Channel]) -> None:
        messages = [message for channel in channels for message in self.under_way.pop(channel, ())]
        channels.clear()
        self.deliver(messages)
        for message in messages:
            arrival = message.end + self.rates.latency
            arrival_back = arrival.index_select(0, message.peers.back)  # a wait is for a send and a receive
            self.clock = torch.maximum(self.clock, torch.maximum(arrival, arrival_back, out=arrival_back))

    def deliver(self, messages: list[_Message]) -> None:
        """Advance time until messages arrive, if their arrival is not known yet."""
        unknown = [message for message in messages if message in self.pending]
        if unknown and self.crowd is None:
            self.crowd = _Crowd(self.pending)
            self.pending = self.crowd.messages
        rows = [row for row, message in enumerate(self.pending) if message in unknown]
        for link, rate in ((0, self.rates.link(inter=False)), (1, self.rates.link(inter=True))):
            if self.crowd and rows:
                self.links[link] = self.crowd.carry(rows, bool(link), self.links[link], rate)
        for message in unknown:
            message.peers.busy = torch.maximum(message.peers.busy, message.end)


class _Crowd:
    """The incomplete messages on shared links, as tensors [messages, G, W].

    Messages to one receiver go one after another; messages to several receivers share the rate equally.
    """

    def __init__(self, pending: Sequence[_Message]) -> None:
        queues: dict[int, list[_Message]] = defaultdict(list)
        under_way = [each for each in pending if bool((each.end == torch.inf).any())]
        for each in under_way or pending:
            queues[id(each.peers)].append(each)
        longest_first = sorted(queues.values(), key=len, reverse=True)
        places = range(len(longest_first[0]))
        self.messages = [queue[place] for place in places for queue in longest_first if len(queue) > place]
        """First the first message to each receiver, then the second, and so on."""
        self.as_long = [sum(len(queue) > place for queue in longest_first) for place in places]
        """The number of receivers with a message at each place."""
        self.inter = torch.stack([each.peers.inter for each in self.messages])
        self.begin, self.remaining, self.end = (
            torch.stack([getattr(x, name) for x in self.messages]) for name in ("begin", "remaining", "end")
        )
        for each, remaining, end in zip(self.messages, self.remaining, self.end, strict=True):
            each.remaining, each.end = remaining, end  # views, which change with the crowd

    def carry(self, awaited: list[int], between_nodes: bool, now: Tensor, rate: float) -> Tensor:
        """Advance one link of each rank until these messages arrive; return the time."""
        on = (self.inter[awaited] == between_nodes) & (self.end[awaited] == torch.inf)
        where = on.any(0).view(-1).nonzero().squeeze(1)  # for other ranks no time passes
        if not len(where):
            return now
        inter, begin, remaining, end = (
            x.flatten(1).index_select(1, where) for x in (self.inter, self.begin, self.remaining, self.end)
        )
        on, time = (inter == between_nodes) & (end == torch.inf), now.view(-1)[where]
        while bool((waiting := on[awaited].any(0)).any()):  # in steps to the next begin or end of a message
            begun = on & (begin <= time)
            following = begin.masked_fill(~on | begun, torch.inf).amin(0)
            transfers = self.first_of(begun).double()
            share = rate / transfers.sum(0).clamp(min=1)
            through = (time + remaining / share).masked_fill_(transfers == 0, torch.inf)
            until = torch.where(waiting, torch.minimum(through.amin(0), following), time)
            remaining.addcmul_(transfers, (until - time) * share, value=-1)
            ended = (through <= until) & waiting
            end = torch.where(ended, until, end)
            on, time = on & ~ended, until
        self.remaining.flatten(1).index_copy_(1, where, remaining)
        self.end.flatten(1).index_copy_(1, where, end)
        return now.flatten().index_copy(0, where, time).view_as(now)

    def first_of(self, begun: Tensor) -> Tensor:
        """Return the messages in transfer: the first begun message to each receiver."""
        start, *others = self.as_long
        first, ahead = begun.clone(), begun[:start].clone()
        for count in others:
            places = slice(start, start + count)
            first[places] &= ~ahead[:count]
            ahead[:count] |= begun[places]
            start += count
        return first
