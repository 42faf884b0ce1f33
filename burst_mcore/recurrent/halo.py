"""Programs of the halo exchange: owners send each fragment the rows of its document before it."""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache

from burst_mcore.attention.schedule.actions import Channel, Recv, Send, Wait
from burst_mcore.layout import Layout
from burst_mcore.recurrent.fragments import Chain, Ends, chains, fragments
from burst_mcore.recurrent.programs import DATA, GRADIENT, Action, Copy, Exchange, Program

ROWS, HALO = "rows", "halo"
"""The buffers: the rows of the shard, and `reach` rows for each of its fragments."""
Pairs = dict[tuple[int, int], list[tuple[range, range]]]
"""By (sender, receiver): (rows of the sender's shard, rows of the receiver's halo)."""


@lru_cache(maxsize=256)
def halo(layout: Layout, tokens: int, size: int, intra: int, ends: Ends = (), *, reach: int) -> Exchange:
    """Return the programs that send each fragment the `reach` rows of its document before it.

    The halo of a rank has `reach` rows for each of its fragments, in the order of its shard. Rows before the
    start of the document are zero.
    """
    places, counts = {}, [0] * size
    for fragment in fragments(layout, tokens, size, ends):
        counts[fragment.rank] += reach
        places[fragment] = counts[fragment.rank]
    pairs: Pairs = defaultdict(list)
    for chain in chains(layout, tokens, size, ends):
        for number in range(1, len(chain)):
            for source, rows, into in _read(chain, number, places[chain[number]], reach):
                pairs[source, chain[number].rank].append((rows, into))
    programs = tuple(_program(rank, pairs, size) for rank in range(size))
    return Exchange(f"halo of {reach} rows", programs, intra)


def _read(chain: Chain, number: int, stop: int, reach: int) -> list[tuple[int, range, range]]:
    """Return (rank, rows of its shard, rows of the halo) for the rows before a fragment, nearest first."""
    parts = []
    while reach and number:
        number -= 1
        source = chain[number]
        rows = source.rows[-reach:]
        parts.append((source.rank, rows, range(stop - len(rows), stop)))
        reach, stop = reach - len(rows), stop - len(rows)
    return parts


def _program(rank: int, pairs: Pairs, size: int) -> Program:
    """Return the program of a rank: P2P messages from owners to the halo, and local copies."""
    others = [peer for peer in range(size) if peer != rank]
    from_peers = [(peer, pairs[peer, rank]) for peer in others if (peer, rank) in pairs]
    to_peers = [(peer, pairs[rank, peer]) for peer in others if (rank, peer) in pairs]
    recvs = [Recv(0, DATA, HALO, peer, tuple(into for _, into in moves)) for peer, moves in from_peers]
    sends = [Send(0, DATA, ROWS, peer, tuple(rows for rows, _ in moves)) for peer, moves in to_peers]
    copies = [Copy(0, *copy) for copy in pairs.get((rank, rank), ())]
    return (*recvs, *sends, *_wait(DATA, recvs, sends), *copies)


def turned(program: Program) -> Program:
    """Return the program that sends the gradients of a halo back to the shards."""
    sends = [Send(0, GRADIENT, a.buffer, a.peer, a.rows) for a in program if isinstance(a, Recv)]
    recvs = [Recv(0, GRADIENT, a.buffer, a.peer, a.rows) for a in program if isinstance(a, Send)]
    copies = [Copy(0, a.into, a.rows) for a in program if isinstance(a, Copy)]
    return (*recvs, *sends, *_wait(GRADIENT, recvs, sends), *copies)


def _wait(channel: Channel, recvs: list[Recv], sends: list[Send]) -> list[Action]:
    return [Wait(0, channel)] if recvs or sends else []
