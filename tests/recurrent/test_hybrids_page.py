"""The picture and the table of docs/features/hybrids.md are what the programs say."""

from pathlib import Path

import pytest

from burst_mcore import Layout
from burst_mcore.recurrent.scan import scan

PAGE = (Path(__file__).parents[2] / "docs" / "features" / "hybrids.md").read_text()
FLOAT, HALF = 4, 2

LAYERS = {
    "Qwen3.5-35B, gated delta rule": (32 * 128 * 128, 32 * 128 * 128, 2 * 16 * 128 + 2 * 32 * 128 + 2 * 32),
    "Kimi Linear, KDA": (32 * 128 * 128, 32 * 128 * 128, 5 * 32 * 128 + 32),
    "Nemotron-H-8B, Mamba 2": (128 * 64 * 128, 128, 2 * 128 * 64 + 2 * 8 * 128 + 128),
}
"""By layer: numbers of a state, of A, and of a token's rows that an exchange of heads moves (in and out)."""
CELLS = [(name, *cell) for name in LAYERS for cell in ((2**17, 8), (2**18, 32), (2**20, 64))]


def megabytes(name, tokens, ranks):
    """Megabytes that the busiest rank receives in forward: heads, all-gather and scan, of two layouts."""
    state, decay, rows = LAYERS[name]
    heads = rows * HALF * tokens // ranks * (ranks - 1) // ranks
    yield heads
    for step in ("gather", "scan"):
        for layout in ("contiguous", "zigzag"):
            fragments = 1 if layout == "contiguous" else 2
            if step == "gather":
                yield fragments * (ranks - 1) * (state + decay) * FLOAT
                continue
            exchange = scan(Layout(layout), tokens, ranks, 8)
            yield max(
                exchange.received(rank, state=state * FLOAT, decay=decay * FLOAT) for rank in range(ranks)
            )


def row(name, tokens, ranks):
    heads, *others = (f"{bytes_ / 1e6:.0f}" for bytes_ in megabytes(name, tokens, ranks))
    gather, scanned = " / ".join(others[:2]), " / ".join(others[2:])
    return f"| {name} | {tokens // 1024}K | {ranks} | {heads} | {gather} | {scanned} |"


@pytest.mark.parametrize(("name", "tokens", "ranks"), CELLS)
def test_the_table_of_bytes_is_that_of_the_programs(name, tokens, ranks):
    assert row(name, tokens, ranks) in PAGE.splitlines()


def test_the_picture_is_a_program_that_prints():
    shown = PAGE.split("```text\n")[1].split("```")[0]
    assert shown == f"{scan(Layout('contiguous'), 4096, 4, 2)}\n"


if __name__ == "__main__":
    print(*(row(*cell) for cell in CELLS), scan(Layout("contiguous"), 4096, 4, 2), sep="\n")  # noqa: T201
