"""The picture and the table of docs/features/hybrids.md are what the programs say."""

from dataclasses import replace
from pathlib import Path

import pytest

from burst_mcore import Layout
from burst_mcore.recurrent.halo import turned
from burst_mcore.recurrent.heads import heads
from burst_mcore.recurrent.scan import scan

PAGE = (Path(__file__).parents[2] / "docs" / "features" / "hybrids.md").read_text()
FLOAT, HALF = 4, 2

LAYERS = {
    "Qwen3.5-35B, gated delta rule": (32 * 128 * 128, 32 * 128 * 128, [(16, 256), (32, 130)], (32, 128)),
    "Kimi Linear, KDA": (32 * 128 * 128, 32 * 128 * 128, [(32, 4 * 128 + 1)], (32, 128)),
    "Nemotron-H-8B, Mamba 2": (128 * 64 * 128, 128, [(8, 256), (128, 65)], (128, 64)),
}
"""By layer: numbers of a state, of A; (heads, numbers of a token in each) of inputs and of outputs."""
CELLS = [(name, *cell) for name in LAYERS for cell in ((2**17, 8), (2**18, 32), (2**20, 64))]


def received(exchange, ranks, **sizes):
    """Bytes that the busiest rank receives."""
    return max(exchange.received(rank, **sizes) for rank in range(ranks))


def by_heads(name, tokens, ranks):
    """Megabytes by heads in forward; none where the ranks do not divide the heads."""
    *_, groups, (many, numbers) = LAYERS[name]
    if many % ranks:
        return "none"
    forth = heads(Layout("zigzag"), tokens, ranks, 8)
    back = replace(forth, programs=tuple(map(turned, forth.programs)))
    into = sum(HALF * max(1, each // ranks) * width for each, width in groups)
    out = HALF * many // ranks * numbers
    return f"{(received(forth, ranks, row=into) + received(back, ranks, row=out)) / 1e6:.0f}"


def megabytes(name, tokens, ranks):
    """Megabytes that the busiest rank receives in forward: all-gather and scan, of two layouts."""
    state, decay, *_ = LAYERS[name]
    sizes = {"state": state * FLOAT, "decay": decay * FLOAT}
    for fragments in (1, 2):
        yield fragments * (ranks - 1) * sum(sizes.values()) / 1e6
    for layout in ("contiguous", "zigzag"):
        yield received(scan(Layout(layout), tokens, ranks, 8), ranks, **sizes) / 1e6


def row(name, tokens, ranks):
    others = [f"{each:.0f}" for each in megabytes(name, tokens, ranks)]
    cells = by_heads(name, tokens, ranks), " / ".join(others[:2]), " / ".join(others[2:])
    return f"| {name} | {tokens // 1024}K | {ranks} | {' | '.join(cells)} |"


@pytest.mark.parametrize(("name", "tokens", "ranks"), CELLS)
def test_the_table_of_bytes_is_that_of_the_programs(name, tokens, ranks):
    assert row(name, tokens, ranks) in PAGE.splitlines()


def test_the_picture_is_a_program_that_prints():
    shown = PAGE.split("```text\n")[1].split("```")[0]
    assert shown == f"{scan(Layout('contiguous'), 4096, 4, 2)}\n"


if __name__ == "__main__":
    print(*(row(*cell) for cell in CELLS), scan(Layout("contiguous"), 4096, 4, 2), sep="\n")  # noqa: T201
