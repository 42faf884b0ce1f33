"""Lists of blocks hold every pair of a tile once, whichever side is walked."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from masks import random_layout, random_mask, randoms

from burst_mcore.attention.geometry.pattern import Abilities
from burst_mcore.attention.geometry.plan import plan_of
from burst_mcore.attention.geometry.shard import Placement
from burst_mcore.attention.geometry.tiles import tiles_of
from burst_mcore.attention.kernels.blocks import blocks


def _bytes(word):
    return list((word & 0xFFFFFFFF).to_bytes(4, "little"))


def _walked(pattern, block_m, block_n, by_columns):
    """How often each pair is seen, and where, by the lists."""
    rows, columns = pattern.shape
    met = torch.zeros(rows, columns, dtype=torch.int)
    starts, full, entries = (x.tolist() for x in blocks(pattern, block_m, block_n, by_columns=by_columns))
    m, n = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
    for block in range(len(full)):
        whole = [other for other, *_ in entries[starts[block] : full[block]]]
        assert len(set(whole)) == len(whole)
        for entry in range(starts[block], starts[block + 1]):
            other, spans, diagonals, factor = entries[entry]
            bm, bn = (other, block) if by_columns else (block, other)
            inside = (m // block_m == bm) & (n // block_n == bn)
            if entry < full[block]:
                assert (bn + 1) * block_n <= columns  # columns beyond the end are never read unmasked
                met += inside.int()
                continue
            own0, own1, others0, others1 = _bytes(spans)
            low, high, step, _ = _bytes(diagonals)
            low, high = ((x ^ 128) - 128 for x in (low, high))
            assert (factor - -(-(2**32) // step) - 256) % 2**32 == 0
            own, others = (n % block_n, m % block_m) if by_columns else (m % block_m, n % block_n)
            ahead = others - own
            seen_here = (own >= own0) & (own < own1) & (others >= others0) & (others < others1)
            met += (inside & seen_here & (ahead >= low) & (ahead <= high) & ((ahead - low) % step == 0)).int()
    return met


@settings(max_examples=150, deadline=None)
@given(
    randoms, st.integers(1, 80), st.integers(1, 3), st.sampled_from([4, 8, 16]), st.sampled_from([4, 8, 16])
)
def test_every_pair_is_walked_once(draw, n, size, block_m, block_n):
    layout, mask = random_layout(draw, size, n), random_mask(draw, n)
    plan = plan_of(layout, mask, n, Placement(size))
    for q_at in range(size):
        for tile in tiles_of(plan, q_at, draw.randrange(size), Abilities(draw.random() < 0.5, pieces=True)):
            for by_columns in (False, True):
                assert torch.equal(
                    _walked(tile.pattern, block_m, block_n, by_columns), tile.pattern.table.int()
                )
