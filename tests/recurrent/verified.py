"""The verifiers of scans and of programs of rows: they play all programs symbolically."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

from burst_mcore.attention.schedule.actions import Recv, Send
from burst_mcore.recurrent.programs import Action, Compose, Copy, Exchange, Span


def verify_scan(exchange: Exchange, owners: Sequence[Sequence[int]]) -> None:
    """Check that each rank ends with the state before each of its fragments, in any order of messages.

    Args:
        exchange: the programs of all ranks.
        owners: by chain, the rank of each fragment in the order of the scan.

    Raises:
        ValueError: a rank sends or composes a map that it does not have, or maps that do not follow one
            another; a message has no other end in its step; a rank lacks the state before a fragment.
    """
    holds: list[set[Span]] = [set() for _ in exchange.programs]
    for chain, ranks in enumerate(owners):
        for place, rank in enumerate(ranks):
            holds[rank].add(Span(chain, place, place + 1))
    for step in sorted({action.step for program in exchange.programs for action in program}):
        _deliver(exchange, step, holds)
        for rank, program in enumerate(exchange.programs):
            for action in program:
                if isinstance(action, Compose) and action.step == step:
                    _compose(rank, action, holds[rank])
    for chain, ranks in enumerate(owners):
        for place, rank in enumerate(ranks[1:], 1):
            if Span(chain, 0, place) not in holds[rank]:
                raise ValueError(f"rank {rank} lacks {Span(chain, 0, place)}, the state before its fragment")


def _deliver(exchange: Exchange, step: int, holds: list[set[Span]]) -> None:
    """Match the messages of a step: NCCL and gloo keep the order of those between the same two ranks."""
    wires: dict[tuple[int, int], deque[Span]] = defaultdict(deque)
    for rank, program in enumerate(exchange.programs):
        for action in messages(program, step):
            span = Span.of(action.buffer)
            if isinstance(action, Send):
                if span not in holds[rank]:
                    raise ValueError(f"rank {rank}, step {step}: {span} is sent before it is there")
                wires[rank, action.peer].append(span)
    for rank, program in enumerate(exchange.programs):
        for action in messages(program, step):
            if isinstance(action, Recv):
                wire, wanted = wires[action.peer, rank], Span.of(action.buffer)
                came = wire.popleft() if wire else None
                if came != wanted:
                    words = f"rank {rank}, step {step}: expects {wanted} of rank {action.peer}"
                    raise ValueError(f"{words}, gets {came if came else 'nothing'}")
                holds[rank].add(wanted)
    left = [f"{source}>{target}" for (source, target), wire in wires.items() if wire]
    if left:
        raise ValueError(f"step {step}: messages {', '.join(left)} are received by nobody")


def messages(program: Sequence[Action], step: int) -> list[Send | Recv]:
    """Return the messages of a step, in the order in which they start."""
    return [action for action in program if isinstance(action, (Send, Recv)) and action.step == step]


def _compose(rank: int, action: Compose, holds: set[Span]) -> None:
    earlier, later = action.earlier, action.later
    if not {earlier, later} <= holds:
        raise ValueError(f"rank {rank}, step {action.step}: {action} before both are there")
    if earlier.chain != later.chain or earlier.stop != later.first:
        raise ValueError(f"rank {rank}, step {action.step}: {later} does not follow {earlier}")
    holds.add(action.span)


def brought(exchange: Exchange, rank: int, rows: int, held: Sequence[Sequence[int]]) -> list[int]:
    """Return which token lies in each of a rank's rows after a program of rows; -1 where nothing came.

    held: by rank, the tokens of its shard.
    """
    got = [-1] * rows
    for action in exchange.programs[rank]:
        if isinstance(action, Copy):
            pairs = [(rank, action.rows, action.into)]
        elif isinstance(action, Recv):
            sends = [a for a in exchange.programs[action.peer] if isinstance(a, Send) and a.peer == rank]
            assert len(sends) == 1
            pairs = [(action.peer, *each) for each in zip(sends[0].rows, action.rows, strict=True)]
        else:
            continue
        for source, from_rows, into in pairs:
            for row, place in zip(from_rows, into, strict=True):
                assert got[place] == -1
                got[place] = held[source][row]
    return got
