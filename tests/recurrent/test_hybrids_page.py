"""The picture and the table of docs/features/hybrids.md are what the programs say."""

from pathlib import Path

import pytest

from burst_mcore import Layout
from burst_mcore.recurrent.scan import scan

PAGE = (Path(__file__).parents[2] / "docs" / "features" / "hybrids.md").read_text()
FLOAT = 4

LAYERS = {
    "Qwen3.5-35B, Kimi Linear": (32 * 128 * 128, 32 * 128 * 128),
    "Nemotron-H-8B, Mamba 2": (128 * 64 * 128, 128),
}
"""By layer: numbers of a state, and of A."""
CELLS = [(name, *cell) for name in LAYERS for cell in ((2**17, 8), (2**18, 32), (2**20, 64))]


def received(exchange, ranks, **sizes):
    """Bytes that the busiest rank receives."""
    return max(exchange.received(rank, **sizes) for rank in range(ranks))


def megabytes(name, tokens, ranks):
    """Megabytes that the busiest rank receives in forward: all-gather and scan, of two layouts."""
    state, decay = LAYERS[name]
    sizes = {"state": state * FLOAT, "decay": decay * FLOAT}
    for fragments in (1, 2):
        yield fragments * (ranks - 1) * sum(sizes.values()) / 1e6
    for layout in ("contiguous", "zigzag"):
        yield received(scan(Layout(layout), tokens, ranks, 8), ranks, **sizes) / 1e6


def row(name, tokens, ranks):
    others = [f"{each:.0f}" for each in megabytes(name, tokens, ranks)]
    cells = " / ".join(others[:2]), " / ".join(others[2:])
    return f"| {name} | {tokens // 1024}K | {ranks} | {' | '.join(cells)} |"


@pytest.mark.parametrize(("name", "tokens", "ranks"), CELLS)
def test_the_table_of_bytes_is_that_of_the_programs(name, tokens, ranks):
    assert row(name, tokens, ranks) in PAGE.splitlines()


def test_the_picture_is_a_program_that_prints():
    shown = PAGE.split("```text\n")[1].split("```")[0]
    assert shown == f"{scan(Layout('contiguous'), 4096, 4, 2)}\n"


if __name__ == "__main__":
    print(*(row(*cell) for cell in CELLS), scan(Layout("contiguous"), 4096, 4, 2), sep="\n")  # noqa: T201
