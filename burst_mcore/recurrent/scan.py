"""Programs of the exclusive scan: each fragment of a chain gets the state before it.

Three levels, each with a reach that doubles a step. Within a segment, consecutive fragments on one node,
fragment i gets the map over the earlier fragments. Between nodes, the last fragment of each segment gets the
state before its segment. This state then goes to the other ranks of the segment, and is composed with the
maps of the first level. A map from the chain's start on is only a state: half the bytes of a map, or less.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby

from burst_mcore.attention.schedule.actions import Channel, Recv, Send, Wait
from burst_mcore.layout import Layout
from burst_mcore.recurrent.fragments import Ends, chains
from burst_mcore.recurrent.programs import DATA, GRADIENT, Action, Compose, Exchange, Span


@lru_cache(maxsize=256)
def scan(
    layout: Layout, tokens: int, size: int, intra: int, ends: Ends = (), *, backward: bool = False
) -> Exchange:
    """Return the programs of the scan of states; `backward`: of the gradients of last states.

    In backward the order of each chain is reversed: place 0 is the last fragment of the document.
    """
    order = slice(None, None, -1 if backward else 1)
    owners = [[fragment.rank for fragment in chain][order] for chain in chains(layout, tokens, size, ends)]
    return scan_of(owners, size, intra, backward=backward)


def scan_of(owners: Sequence[Sequence[int]], size: int, intra: int, *, backward: bool = False) -> Exchange:
    """Return the programs of chains, given the ranks of their fragments in the order of the scan."""
    writer = _Writer(size, GRADIENT if backward else DATA)
    levels = [_Level(writer, chain, ranks, intra) for chain, ranks in enumerate(owners)]
    for run in (_Level.within, _Level.between, _Level.back):
        first = writer.steps
        writer.steps = max((run(level, first) for level in levels), default=first)
    title = "gradient behind each fragment" if backward else "state before each fragment"
    return Exchange(f"scan: the {title}", writer.programs(), intra)


class _Writer:
    """The writer of all ranks' programs; it tracks the spans that each rank holds."""

    def __init__(self, size: int, channel: Channel) -> None:
        self.channel, self.steps = channel, 0
        self._steps = [defaultdict[int, list[Action]](list) for _ in range(size)]
        """The actions of each rank in each step."""
        self._holds: set[tuple[int, Span]] = set()

    def send(self, step: int, span: Span, source: int, target: int) -> None:
        """Add the message of a span, unless the target holds it."""
        if source != target and (target, span) not in self._holds:
            self._steps[source][step].append(Send(step, self.channel, str(span), target))
            self._steps[target][step].append(Recv(step, self.channel, str(span), source))
        self._holds.add((target, span))

    def compose(self, step: int, rank: int, earlier: Span, later: Span | None) -> Span:
        """Add the composition of both spans on a rank; return the new span."""
        if later is None:
            return earlier
        action = Compose(step, earlier, later)
        if (rank, action.span) not in self._holds:
            self._steps[rank][step].append(action)
            self._holds.add((rank, action.span))
        return action.span

    def programs(self) -> tuple[tuple[Action, ...], ...]:
        """Return each rank's program: in each step the messages, one wait, and the compositions."""
        return tuple(map(self._program, self._steps))

    def _program(self, steps: dict[int, list[Action]]) -> tuple[Action, ...]:
        program: list[Action] = []
        for step, actions in sorted(steps.items()):
            messages = [x for kind in (Recv, Send) for x in actions if isinstance(x, kind)]
            program += [*messages, Wait(step, self.channel)] if messages else []
            program += [x for x in actions if isinstance(x, Compose)]
        return tuple(program)


class _Level:
    """The levels of the scan of one chain.

    owners: the rank of each fragment, in the order of the scan.
    """

    def __init__(self, writer: _Writer, chain: int, owners: Sequence[int], intra: int) -> None:
        self.writer, self.chain, self.owners = writer, chain, owners
        nodes = groupby(range(len(owners)), key=lambda place: owners[place] // intra)
        self.segments = [list(places) for _, places in nodes]
        self.before: list[Span | None] = [None] * len(owners)
        """The map over the fragments before each fragment, so far."""
        self.totals: list[Span] = []
        """The map over each segment, at its last fragment."""

    def within(self, first: int) -> int:
        """Scan within each segment; return the next step."""
        steps = first
        for number, places in enumerate(self.segments):
            spans = [Span(self.chain, place, place + 1) for place in places]
            wants_total = number < len(self.segments) - 1
            owners = [self.owners[place] for place in places]
            before, totals, after = self._double(first, spans, owners, wants_total)
            for place, span in zip(places, before, strict=True):
                self.before[place] = span
            self.totals.append(totals)
            steps = max(steps, after)
        return steps

    def between(self, first: int) -> int:
        """Scan over segments: the last fragment of each gets the state before the segment."""
        owners = [self.owners[places[-1]] for places in self.segments]
        self.states, _, steps = self._double(first, self.totals, owners, False)
        return steps

    def back(self, first: int) -> int:
        """Send the state before each segment to its other ranks, and compose it with their maps."""
        steps = first
        for places, state in zip(self.segments, self.states, strict=True):
            if state is None:
                continue
            ranks = list(dict.fromkeys(self.owners[place] for place in reversed(places)))
            reach = 1
            step = first
            while reach < len(ranks):
                for to in range(reach, min(2 * reach, len(ranks))):
                    self.writer.send(step, state, ranks[to - reach], ranks[to])
                reach, step = 2 * reach, step + 1
            for place in places:
                self.writer.compose(step, self.owners[place], state, self.before[place])
            steps = max(steps, step + 1)
        return steps

    def _double(
        self, first: int, spans: Sequence[Span], owners: Sequence[int], wants_total: bool
    ) -> tuple[list[Span | None], Span, int]:
        """Scan over neighbouring spans: (the map before each, the map over all, the next step).

        The owner of the last span computes the map over all, if `wants_total`.
        """
        before: list[Span | None] = [None] * len(spans)
        reached = list(spans)  # the map that ends with each span, over `reach` spans
        reach, step = 1, first
        while reach < len(spans):
            messages = [(to, reached[to - reach]) for to in range(reach, len(spans))]
            for to, span in messages:
                self.writer.send(step, span, owners[to - reach], owners[to])
            for to, span in messages:
                before[to] = self.writer.compose(step, owners[to], span, before[to])
                is_last = to == len(spans) - 1
                if to + 2 * reach < len(spans) or (is_last and wants_total):
                    reached[to] = self.writer.compose(step, owners[to], span, reached[to])
            reach, step = 2 * reach, step + 1
        return before, reached[-1], step
