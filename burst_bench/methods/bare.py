"""A kernel called bare: on tiles, with no ring and no merging around it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from burst_bench.core import Step
from burst_mcore.attention.call import Keys, Queries
from burst_mcore.attention.geometry.pattern import Pattern
from burst_mcore.attention.geometry.rows import gather
from burst_mcore.attention.geometry.tiles import Tile
from burst_mcore.attention.kernels.kernel import BackwardInputs, Kernel, Scores
from burst_mcore.attention.numerics.rowwise import row_delta
from burst_mcore.dtypes import wide


def scores_of(q: Tensor) -> Scores:
    """Return the usual options of a tile: the scale of its head dim."""
    return Scores(q.shape[-1] ** -0.5)


def both_ways(
    kernel: Kernel, pattern: Pattern, q: Tensor, k: Tensor, v: Tensor, dout: Tensor
) -> tuple[Tensor, ...]:
    """Return (out, lse, dq, dk, dv) of one call each way."""
    out, lse = kernel.forward(q, k, v, pattern, scores_of(q))
    inputs = _inputs(kernel, q, k, v, dout, out, lse)
    return out, lse, *kernel.backward(inputs, pattern, scores_of(q))


def forward_of(
    kernel: Kernel, pattern: Pattern, q: Tensor, k: Tensor, v: Tensor, dout: Tensor
) -> tuple[Tensor, ...]:
    """Return (out, lse) of one call; dout, which the other pass needs, is left out."""
    return kernel.forward(q, k, v, pattern, scores_of(q))


def inputs_of(tile: Tile, queries: Queries, keys: Keys, out: Tensor) -> BackwardInputs:
    """Return the inputs of a tile's backward, from tensors of all rows."""
    q, dout, delta, lse = (gather(x, tile.q) for x in queries)
    k, v = (gather(x, tile.k) for x in keys)
    return BackwardInputs(dout, q, k, v, gather(out, tile.q), lse, delta)


class Tiles:
    """The calls of a kernel for the tiles of q, k, v and dout."""

    def __init__(self, kernel: Kernel, tiles: Sequence[Tile], tensors: Sequence[Tensor]) -> None:
        self.kernel, self.tiles, self.tensors = kernel, tiles, tensors

    def rows(self, tile: Tile) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the rows of q, k, v and dout that a tile has."""
        q, k, v, dout = self.tensors
        return gather(q, tile.q), gather(k, tile.k), gather(v, tile.k), gather(dout, tile.q)

    def forward(self) -> None:
        """Call the forward of all tiles."""
        for tile in self.tiles:
            self._forward(tile)

    def both(self) -> None:
        """Call both passes, tile by tile."""
        for tile in self.tiles:
            both_ways(self.kernel, tile.pattern, *self.rows(tile))

    def backward(self) -> Step:
        """Run the forward, and return the backward as a step."""
        inputs = [_inputs(self.kernel, *self.rows(tile), *self._forward(tile)) for tile in self.tiles]

        def step() -> None:
            for tile, of_tile in zip(self.tiles, inputs, strict=True):
                self.kernel.backward(of_tile, tile.pattern, scores_of(of_tile.q))

        return step

    def _forward(self, tile: Tile) -> tuple[Tensor, Tensor]:
        q, k, v, _ = self.rows(tile)
        return self.kernel.forward(q, k, v, tile.pattern, scores_of(q))


def _inputs(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, out: Tensor, lse: Tensor
) -> BackwardInputs:
    lse = lse.to(wide(q.dtype))
    delta = row_delta(dout, out) if kernel.takes_delta else lse  # others form it from out themselves
    return BackwardInputs(dout, q, k, v, out, lse, delta)
