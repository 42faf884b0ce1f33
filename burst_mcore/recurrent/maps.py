"""Affine maps S -> A S + B of states: their composition, and the maps of gradients.

A is a matrix [..., K, K] that multiplies a state [..., K, V] from the left, or an elementwise factor that
broadcasts to the state. The map over the start of a document needs no A: its initial state is zero.
Composition: (A2, B2) after (A1, B1) is (A2 A1, A2 B1 + B2). Gradients: dS_before = A^T dS_after + dS_outputs,
an affine map of the gradient, so the backward is the same scan in reverse.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Map(NamedTuple):
    """An affine map of a state, decay A and state B; decay None: applied to zero, so B is the state."""

    decay: Tensor | None
    state: Tensor


class Algebra:
    """The elementwise A of gates: a number for a head, a row of the state, a channel or an entry."""

    def apply(self, decay: Tensor, state: Tensor) -> Tensor:
        """Return A S; `state` may be another A, too."""
        return decay * state

    def turned(self, decay: Tensor) -> Tensor:
        """Return A^T, the A of gradients of states."""
        return decay

    def composed(self, later: Map, earlier: Map) -> Map:
        """Return the map `later` after `earlier`: (A2 A1, A2 B1 + B2)."""
        assert later.decay is not None
        decay = None if earlier.decay is None else self.apply(later.decay, earlier.decay)
        return Map(decay, self.apply(later.decay, earlier.state) + later.state)


class Matrix(Algebra):
    """The matrix A of delta rules: products of exp(g) (I - beta k k^T)."""

    def apply(self, decay: Tensor, state: Tensor) -> Tensor:
        return decay @ state

    def turned(self, decay: Tensor) -> Tensor:
        return decay.transpose(-1, -2).contiguous()


ELEMENTWISE, MATRIX = Algebra(), Matrix()
