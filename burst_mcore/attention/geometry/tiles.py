"""Tiles: the rectangles of single kernel calls, made from the pieces of a plan.

Any piece becomes rectangles that are full, causal, or, if the kernel supports them, windows (with no more
rows than columns). A triangle in the other corner becomes a causal tile with rows and columns in reverse.
Pieces that cost less than a kernel call share one tile: as packed sequences, or with a mask, if the kernel
supports either.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import log2
from typing import NamedTuple

import torch
from torch import Tensor

from burst_mcore.attention.geometry.pattern import Abilities, Packed, Pattern, Piece, band_pairs_of, listed
from burst_mcore.attention.geometry.plan import Plan, cached_on_plan
from burst_mcore.attention.geometry.rows import Rows, ascending, count, indices_of, union
from burst_mcore.mask import Mask
from burst_mcore.mask.bands import UNBOUNDED

CALL = 1024
"""The overhead of a kernel call, in pairs."""
DIAGONAL = 512
"""Query rows of a tile along a window's diagonal: shorter tiles waste less work, longer tiles need fewer
calls."""
GATHERED = 2048
"""The maximum mean keys of full pieces of the same query rows that become one tile."""
PACKED = 2**23
"""The maximum pairs of a packed piece: a larger piece fills a GPU by itself."""
FAR = 2**31
"""A number above any bound of a sequence, by which two bounds are coded as one number."""


class Tile(NamedTuple):
    """Query rows x key rows of two ring ranks for one call of the kernel.

    The rows may have gaps and may descend; the pattern counts rows in the order of `q` and `k`.
    """

    q: Rows
    k: Rows
    pattern: Pattern


def _tile(
    q: Rows, k: Rows, low: int | None = None, high: int | None = None, parts: tuple[Piece, ...] = ()
) -> Tile:
    """Return the tile of these rows; see `Pattern` for the diagonals and the parts."""
    return Tile(q, k, Pattern((count(q), count(k)), low, high, parts))


def tiles(pieces: Tensor, abilities: Abilities) -> tuple[Tile, ...]:
    """Return the tiles of a table of pieces for a kernel of these abilities.

    The tiles cover every pair of the pieces exactly once, and no other pair.
    """
    windows, masks, whole, packs = abilities
    if whole:
        return _as_one(listed(pieces), windows)
    large: list[Tile] = []
    if packs:
        packed, pieces = _packed(pieces)
        large += packed
    small: list[Piece] = []
    for piece in listed(pieces):
        if masks and _area(piece) < 16 * CALL:
            small.append(piece)
        elif masks and _narrow(piece) and not (windows and piece.step == 1):
            large += [_masked([strip]) for strip in _strips(piece)]
        else:
            large += _lowered(piece, windows, masks)
    for group in _groups(small):
        large += [_masked(group)] if len(group) > 1 else _lowered(group[0], windows, masks)
    return tuple(_gathered(large))


@cached_on_plan
def tiles_of(
    plan: Plan,
    q_at: int,
    k_at: int,
    abilities: Abilities,
    *,
    q_part: int | None = None,
    k_part: int | None = None,
    keys_stay: bool = False,
) -> tuple[Tile, ...]:
    """Return the tiles of queries of a ring rank, or one of its members, and keys of another. Cached.

    keys_stay: as in `Plan.pieces`.
    """
    pieces = plan.pieces(q_at, k_at, q_part=q_part, k_part=k_part, keys_stay=keys_stay)
    result = tiles(pieces, abilities)
    if not plan.by_class or not result:
        return result
    q = plan.order(q_at, q_part, plan.needed(q_at, k_at, of_queries=True))
    k = plan.order(k_at, k_part, plan.needed(k_at, q_at, of_queries=False))
    return tuple(Tile(q.rows(tile.q), k.rows(tile.k), tile.pattern) for tile in result)


def _as_one(pieces: list[Piece], windows: bool) -> tuple[Tile, ...]:
    """Return one tile of all pieces: full, causal or a window if possible, else masked."""
    if len(pieces) == 1:
        lowered = tuple(_lowered(pieces[0], windows, False))
        if len(lowered) == 1:
            return lowered
    return (_masked(pieces),) if pieces else ()


def _packed(pieces: Tensor) -> tuple[list[Tile], Tensor]:
    """Return tiles of packed sequences, and the remaining pieces."""
    sequences, piece = _sequences(pieces)
    chains = list(_chains(sequences))
    chained = torch.zeros(len(pieces), dtype=torch.bool)
    for chain, _ in chains:
        chained[piece[chain]] |= len(chain) > 1
    packed = [
        _one_after_another(sequences[chain], *bounds) for chain, bounds in chains if chained[piece[chain[0]]]
    ]
    return packed, pieces[~chained]


def _sequences(pieces: Tensor) -> tuple[Tensor, Tensor]:
    """Return small pieces as sequences of packed calls, sorted by rows, and the piece of each sequence.

    A sequence is a row (m0, m1, n0, n1, left, right): queries [m0, m1) and keys [n0, n1) within the bounds
    of `Packed`.
    """
    m0, m1, n0, n1, low, high, step, _ = pieces.unbind(1)
    rows, columns = m1 - m0, n1 - n0
    surplus = columns - rows
    left = torch.where(low > -UNBOUNDED, surplus - low, -1)
    right = torch.where(high < UNBOUNDED, high - surplus, -1)
    small = (step == 1) & (rows * columns <= PACKED) & ((left < 0) | ((surplus >= 0) & (right <= 0)))
    ramp = right > 0  # the first rows are causal, the other rows see all keys
    ramp_end = torch.where(ramp, m1 - right, m1)
    first = torch.stack([m0, ramp_end, n0, n1, left, right.clamp(max=0)], 1)
    rest = torch.stack([ramp_end, m1, n0, n1, *torch.full_like(pieces[:, :2], -1).unbind(1)], 1)
    sequences, number = torch.cat([first[small], rest[small & ramp]]), torch.arange(len(pieces))
    piece = torch.cat([number[small], number[small & ramp]])
    for column in (2, 0):
        order = sequences[:, column].argsort(stable=True)
        sequences, piece = sequences[order], piece[order]
    return sequences, piece


def _bounded(sequences: Tensor, left: Tensor | int, right: Tensor | int) -> Tensor:
    """Return the bounds of each sequence, coded as one number, with -1 for a bound that excludes nothing."""
    m0, m1, n0, n1 = sequences[:, :4].unbind(1)
    left, right = torch.where(left < n1 - n0 - 1, left, -1), torch.where(right < m1 - m0 - 1, right, -1)
    return left * FAR + right


def _chains(sequences: Tensor) -> Iterator[tuple[list[int], tuple[int, int]]]:
    """Yield chains of sequences, as numbers, that one packed call can take, and the bounds of the call.

    Rows and columns ascend in a chain. Bounds are equal where they exclude a pair; frequent bounds go first.
    """
    left, right = sequences[:, 4:].unbind(1)
    bounds, counts = (left * FAR + right).unique(return_counts=True)
    rest, codes = torch.arange(len(sequences)), _bounded(sequences, left, right)
    for bound in bounds[counts.argsort(descending=True)].tolist():
        left, right = (bound + 1) // FAR, (bound + 1) % FAR - 1
        within = _bounded(sequences[rest], left, right) == codes[rest]
        numbers, rest = rest[within], rest[~within]
        rows = sequences[numbers]
        if bool(((rows[1:, 0] >= rows[:-1, 1]) & (rows[1:, 2] >= rows[:-1, 3])).all()):
            chains = [numbers.tolist()] if len(rows) else []
        else:
            chains = _chained(numbers.tolist(), rows.tolist())
        yield from ((chain, (left, right)) for chain in chains)


def _chained(numbers: list[int], sequences: list[list[int]]) -> list[list[int]]:
    """Return the numbers in chains of ascending rows and columns."""
    chains: list[list[int]] = []
    ends: list[tuple[int, int]] = []
    for number, (m0, m1, n0, n1, *_) in zip(numbers, sequences, strict=True):
        chain = next((i for i, (m, n) in enumerate(ends) if m0 >= m and n0 >= n), len(chains))
        if chain == len(chains):
            chains.append([])
            ends.append((0, 0))
        chains[chain].append(number)
        ends[chain] = m1, n1
    return chains


def _one_after_another(sequences: Tensor, left: int, right: int) -> Tile:
    """Return the tile of packed sequences, or of a single one, within these bounds."""
    m0, m1, n0, n1, _, _ = sequences.unbind(1)
    rows, columns = (m1 - m0).tolist(), (n1 - n0).tolist()
    q, k = ascending(m0, m1), ascending(n0, n1)
    if len(rows) == 1:
        surplus = columns[0] - rows[0]
        return _tile(q, k, None if left < 0 else surplus - left, None if right < 0 else surplus + right)
    packed = Packed(tuple(rows), tuple(columns), left, right)
    return Tile(q, k, Pattern((sum(rows), sum(columns)), packed=packed))


def _area(piece: Piece) -> int:
    return (piece.m1 - piece.m0) * (piece.n1 - piece.n0)


def _narrow(piece: Piece) -> bool:
    """Return whether a piece is a band too narrow for triangles."""
    return piece.low > -UNBOUNDED and piece.high < UNBOUNDED and piece.high - piece.low + 1 < DIAGONAL


def _strips(piece: Piece) -> Iterator[Piece]:
    """Cut a narrow band into pieces of DIAGONAL query rows."""
    rows, columns = piece.m1 - piece.m0, piece.n1 - piece.n0
    for first in range(0, rows, DIAGONAL):
        last = min(first + DIAGONAL, rows)
        left, right = max(0, first + piece.low), min(columns, last + piece.high)
        shift = left - first
        corners = piece.m0 + first, piece.m0 + last, piece.n0 + left, piece.n0 + right
        low, high = piece.low - shift, piece.high - shift
        yield Piece(*corners, low, high, piece.step, (piece.shift - shift) % piece.step)


def _lowered(piece: Piece, windows: bool, masks: bool) -> Iterator[Tile]:
    if piece.step == 1:
        q, k = range(piece.m0, piece.m1), range(piece.n0, piece.n1)
        yield from _band(q, k, piece.low, piece.high, windows, masks)
        return
    for q, k, low, high in piece.residues():
        at_q = range(piece.m0 + q.start, piece.m0 + q.stop, q.step)
        at_k = range(piece.n0 + k.start, piece.n0 + k.stop, k.step)
        yield from _band(at_q, at_k, low, high, windows, masks)


def _band(q: range, k: range, low: int, high: int, windows: bool, masks: bool) -> Iterator[Tile]:
    """Yield tiles of the rectangle q x k within two diagonals, counted from its corner."""
    first, last = max(0, -high), min(len(q), len(k) - low)  # rows that see a key
    q, low, high = q[first:last], _moved(low, first), _moved(high, first)
    left, right = max(0, low), min(len(k), len(q) + high)
    k, low, high = k[left:right], _moved(low, -left), _moved(high, -left)
    if not q or not k or low > high:
        return
    bounded_low, bounded_high = low > 1 - len(q), high < len(k) - 1
    if not bounded_low and not bounded_high:
        yield _tile((q,), (k,))
    elif windows and len(q) <= len(k):
        yield _tile((q,), (k,), low if bounded_low else None, high if bounded_high else None)
    elif not bounded_low:
        yield from _causal(q, k, high)
    elif not bounded_high:
        yield from _causal(q[::-1], k[::-1], len(k) - len(q) - low)
    elif windows:  # more rows than columns: split until every row has its column on the diagonal
        half = len(q) // 2
        yield from _band(q[:half], k, low, high, windows, masks)
        yield from _band(q[half:], k, low + half, high + half, windows, masks)
    else:
        yield from _along(q, k, low, high, masks)


def _moved(diagonal: int, by: int) -> int:
    return diagonal if abs(diagonal) >= UNBOUNDED else diagonal + by


def _causal(q: range, k: range, high: int) -> Iterator[Tile]:
    """Yield the tiles of n - m <= high: a causal square, and full rectangles on its sides."""
    square = len(k) - high
    if high > 0:
        yield _tile((q,), (k[:high],))
    yield _tile((q[:square],), (k[high:],), None, 0)
    if len(q) > square:
        yield _tile((q[square:],), (k[high:],))


def _along(q: range, k: range, low: int, high: int, masks: bool) -> Iterator[Tile]:
    """Yield the tiles of a window: for each block of query rows a full rectangle between two triangles."""
    rows = min(DIAGONAL, high - low + 2)  # a narrower band has no rectangle between its triangles
    for start in range(0, len(q), rows):
        block = q[start : start + rows]
        block_low, block_high = low + start, high + start
        edges = block_low, block_low + len(block) - 1, block_high + 1, block_high + len(block)
        a, b, c, d = (min(len(k), max(0, edge)) for edge in edges)
        if b < c:
            yield _tile((block,), (k[b:c],))
        if masks:
            yield from _triangles(block, k[a:b], k[c:d], block_low - a, block_high - c)
            continue
        for left, right in ((a, b), (c, d)):
            yield from _band(block, k[left:right], block_low - left, block_high - left, False, False)


def _triangles(q: range, left: range, right: range, low: int, high: int) -> Iterator[Tile]:
    """Yield a window's two triangles as one tile: `left` from diagonal `low` on, `right` up to `high`."""
    parts = []
    if left:
        parts.append(Piece(0, len(q), 0, len(left), low, UNBOUNDED))
    if right:
        parts.append(Piece(0, len(q), len(left), len(left) + len(right), -UNBOUNDED, high))
    if parts:
        yield _tile((q,), tuple(k for k in (left, right) if k), parts=tuple(parts))


def _groups(small: list[Piece]) -> Iterator[list[Piece]]:
    """Group neighbours while a mask over all of them is cheaper than a call for each."""
    group: list[Piece] = []
    box, calls = (0, 0, 0, 0), 0
    for piece in sorted(small, key=lambda p: (p.m0, p.n0)):
        cost = _area(piece) + CALL * min(piece.step, piece.m1 - piece.m0)
        m0, m1, n0, n1 = box if group else piece[:4]
        union_box = min(m0, piece.m0), max(m1, piece.m1), min(n0, piece.n0), max(n1, piece.n1)
        if group and (union_box[1] - union_box[0]) * (union_box[3] - union_box[2]) + CALL > calls + cost:
            yield group
            group, union_box, calls = [], piece[:4], 0
        group.append(piece)
        box, calls = union_box, calls + cost
    if group:
        yield group


def _masked(group: list[Piece]) -> Tile:
    """Return one masked tile over the rows and columns of a group."""
    q = union([range(piece.m0, piece.m1) for piece in group])
    k = union([range(piece.n0, piece.n1) for piece in group])
    parts = []
    corners = zip(indices_of(q, [p.m0 for p in group]), indices_of(k, [p.n0 for p in group]), strict=True)
    for piece, (m0, n0) in zip(group, corners, strict=True):
        rows, columns = piece.m1 - piece.m0, piece.n1 - piece.n0
        parts.append(piece._replace(m0=m0, m1=m0 + rows, n0=n0, n1=n0 + columns))
    return _tile(q, k, parts=tuple(parts))


def _gathered(tiles: list[Tile]) -> Iterator[Tile]:
    """Join full tiles of the same query rows to one tile of gathered keys."""
    keys: dict[range, list[range]] = {}
    for tile in tiles:
        if tile.pattern.full and len(tile.q) == 1:
            keys.setdefault(tile.q[0], []).extend(tile.k)
        else:
            yield tile
    for q, ranges in keys.items():
        if sum(map(len, ranges)) > GATHERED * len(ranges):
            yield from (_tile((q,), (k,)) for k in ranges)
        else:
            yield _tile((q,), tuple(sorted(ranges, key=lambda k: k.start)))


ROW = 256
"""The time of one more row in a launch (its output is written and merged), in pairs."""
LAUNCH = 2**19
"""The overhead of a launch and the merge after it, in pairs: about 10 us of 32 heads."""


class Launches(NamedTuple):
    """The mean pairs of a launch, as powers of two, by the abilities of a kernel."""

    alone: int
    """Of a kernel that takes one rectangle, full or causal."""
    windows: int
    """Of a kernel that takes one band within any two diagonals."""
    packed: int
    """Of a kernel that takes packed sequences."""
    whole: int
    """Of a kernel that takes any pieces."""

    def of(self, abilities: Abilities) -> int:
        """Return the mean pairs of a launch of a kernel of these abilities, as a power of two."""
        if abilities.pieces:
            return self.whole
        if abilities.packed:
            return self.packed
        return self.windows if abilities.windows else self.alone


LARGE = Launches(40, 40, 40, 40)
"""Launches with a negligible overhead."""


def launches_of(mask: Mask, n: int) -> Launches:
    """Return the sizes of launches under a mask of n tokens.

    Rows in several pieces count as launches, too: each time their results are merged.
    """
    q0, q1, k0, k1, low, high = mask.bands(n).unbind(1)
    rows, columns, offset = q1 - q0, k1 - k0, k0 - q0
    pairs = band_pairs_of(rows, columns, low - offset, high - offset)
    cut = (low > k0 - (q1 - 1)) & (high < (k1 - 1) - q0)  # both diagonals cut the rectangle
    blocks = torch.where(cut, 3 * -(-rows // (high - low + 2).clamp(1, DIAGONAL)), 1)
    step, small = mask.stride, (pairs <= PACKED) & (mask.stride == 1)
    repeats = max(0, int(rows.sum()) - n) * ROW / LAUNCH
    chains = max(int(x[small].sum()) for x in (rows, columns)) / n
    counts = (
        int(blocks.sum()) * step + repeats,
        len(pairs) * step + repeats,
        int((~small).sum()) * step + chains + repeats,
        1,
    )
    total = max(1.0, float(pairs.sum()) / step)
    return Launches(*(round(log2(total / max(count, 1))) for count in counts))
