"""Takes out of a schedule what nobody reads: messages shrink to the rows that have a reader left, or vanish.

A bundle carries on only the rows that positions further on its way read; a sum of gradients carries the rows
that positions so far have read. A position that reads nothing of a bundle neither computes it nor waits for
it, unless it must pass it on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

from burst_mcore.attention.actions import (
    DATA,
    HOME,
    HOME_SUM,
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
)
from burst_mcore.attention.rows import Rows, union

Needed = Callable[[int, int], Rows]
"""(position that owns a bundle, position that reads it) -> the rows that it reads."""
Mail = tuple[int, int, Channel, int]
"""(from, to, channel, which of them in order)."""


def pruned(programs: Sequence[Program], needed: Needed, rows: int) -> tuple[Program, ...]:
    """The programs of all positions without what nobody reads.

    Args:
        programs: by position, in which everybody reads everything.
        needed: what is read.
        rows: of a position.
    """
    whole: Rows = (range(rows),)
    carried = _carried(programs, needed)
    alone = {p for p in range(len(programs)) if not any(needed(p, q) for q in range(len(programs)) if q != p)}
    ranks = [_Position(p, steps, needed, carried, alone, whole) for p, steps in enumerate(programs)]
    sums: dict[Mail, Rows] = {}
    while any([rank.advance(sums) for rank in ranks]):
        pass
    assert all(rank.finished for rank in ranks), "a program that cannot run"
    return tuple(rank.result() for rank in ranks)


def _carried(programs: Sequence[Program], needed: Needed) -> dict[Mail, Rows]:
    """The rows of each message of a bundle that are read where it goes, or further on."""
    read: dict[Mail, list[range]] = defaultdict(list)
    follows: dict[Mail, Mail] = {}
    sent_at: dict[Mail, int] = {}
    for position, program in enumerate(programs):
        held: dict[str, Mail] = {}
        count: dict[tuple[int, int, Channel], int] = defaultdict(int)
        for action in program:
            match action:
                case Recv() if action.channel.what == DATA:
                    held[action.buffer] = _mail(action.peer, position, action.channel, count)
                case Send() if action.channel.what == DATA:
                    mail = _mail(position, action.peer, action.channel, count)
                    sent_at[mail] = action.step
                    if action.buffer != HOME:
                        follows[mail] = held[action.buffer]
                case Compute() if action.buffer != HOME:
                    read[held[action.buffer]] += needed(action.source, position)
    rows: dict[Mail, Rows] = {}
    for mail in sorted(sent_at, key=lambda mail: -sent_at[mail]):  # those that follow leave later
        rows[mail] = union(read[mail])
        if mail in follows:
            read[follows[mail]] += rows[mail]
    return rows


def _mail(sender: int, receiver: int, channel: Channel, count: dict[tuple[int, int, Channel], int]) -> Mail:
    key = sender, receiver, channel
    count[key] += 1
    return (*key, count[key])


class _Position:
    """Runs a program on sets of rows, and writes down what is left of it."""

    def __init__(
        self,
        position: int,
        program: Program,
        needed: Needed,
        carried: dict[Mail, Rows],
        alone: set[int],
        whole: Rows,
    ) -> None:
        self.position, self.program, self.needed, self.carried = position, program, needed, carried
        self.alone, self.whole = alone, whole
        self.done = 0
        self.left: list[Action | None] = []
        self.count: dict[tuple[int, int, Channel], int] = defaultdict(int)
        self.sums: dict[str, Rows] = defaultdict(tuple)
        self.started: dict[Channel, bool] = defaultdict(bool)
        """Whether anything is left of what the next Wait would wait for."""
        self.expected: dict[Channel, list[tuple[int, Recv, Mail]]] = defaultdict(list)
        """Sums under way: (place in `left`, action, mail)."""

    @property
    def finished(self) -> bool:
        return self.done == len(self.program)

    def result(self) -> Program:
        return tuple(action for action in self.left if action is not None)

    def advance(self, sums: dict[Mail, Rows]) -> bool:
        before = self.done
        while not self.finished and self.execute(self.program[self.done], sums):
            self.done += 1
        return self.done > before

    def execute(self, action: Action, sums: dict[Mail, Rows]) -> bool:
        match action:
            case Send() | Recv() if action.channel.what == DATA:
                ends = (
                    (self.position, action.peer) if isinstance(action, Send) else (action.peer, self.position)
                )
                self.message(action, self.carried[_mail(*ends, action.channel, self.count)])
            case Send():
                mail = _mail(self.position, action.peer, action.channel, self.count)
                sums[mail] = self.sums[action.buffer]
                self.message(action, sums[mail])
            case Recv():
                mail = _mail(action.peer, self.position, action.channel, self.count)
                self.expected[action.channel].append((len(self.left), action, mail))
                self.left.append(None)
            case Wait():
                return self.wait(action, sums)
            case Compute():
                if action.buffer == HOME or self.needed(action.source, self.position):
                    self.left.append(action)
            case Accumulate():
                self.accumulate(action)
            case Add():
                self.add(action)
            case Return():
                buffer = HOME_SUM if self.position in self.alone else action.buffer
                assert buffer is not None
                self.left.append(replace(action, buffer=buffer if self.sums[buffer] else None))
            case _:
                self.left.append(action)
        return True

    def message(self, action: Send | Recv, rows: Rows) -> None:
        if rows:
            self.left.append(replace(action, rows=self.some(rows)))
            self.started[action.channel] = True

    def wait(self, action: Wait, sums: dict[Mail, Rows]) -> bool:
        expected = self.expected[action.channel]
        if any(mail not in sums for _, _, mail in expected):
            return False
        for place, recv, mail in expected:
            self.sums[recv.buffer] = sums[mail]
            if sums[mail]:
                self.left[place] = replace(recv, rows=self.some(sums[mail]))
                self.started[action.channel] = True
        expected.clear()
        if self.started.pop(action.channel, False):
            self.left.append(action)
        return True

    def accumulate(self, action: Accumulate) -> None:
        share = self.needed(action.source, self.position)
        buffer = HOME_SUM if action.source == self.position and self.position in self.alone else action.buffer
        before: Rows = () if action.first else self.sums[buffer]
        if buffer != action.buffer:
            self.sums[action.buffer] = ()
        self.sums[buffer] = union([*before, *share])
        if share:
            rows = self.some(self.sums[buffer])
            self.left.append(replace(action, buffer=buffer, first=not before, rows=rows))

    def add(self, action: Add) -> None:
        before, other = self.sums[action.buffer], self.sums[action.other]
        self.sums[action.buffer] = union([*before, *other])
        if other:
            rows = self.some(self.sums[action.buffer])
            self.left.append(replace(action, first=not before, rows=rows))

    def some(self, rows: Rows) -> Rows | None:
        return None if rows == self.whole else rows
