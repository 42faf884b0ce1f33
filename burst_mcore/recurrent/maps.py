"""Affine maps S -> A S + B of states: how they compose, and how gradients go back.

A is a matrix [..., K, K] that multiplies a state [..., K, V] from the left, or it is multiplied elementwise,
as a tensor that broadcasts to the state. Maps that start from a state of zero have no A.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Map(NamedTuple):
    """An affine map of a state; decay None: of the state zero, so that it is a state itself."""

    decay: Tensor | None
    state: Tensor


class Algebra:
    """What A is: a number a head, a row of the state, a channel or an entry, as gates decay."""

    def apply(self, decay: Tensor, state: Tensor) -> Tensor:
        """Return A S; of another A in place of the state, the product of both."""
        return decay * state

    def turned(self, decay: Tensor) -> Tensor:
        """Return the A by which gradients of states go back."""
        return decay

    def composed(self, later: Map, earlier: Map) -> Map:
        """Return the map that is `earlier` and then `later`: (A2 A1, A2 B1 + B2)."""
        assert later.decay is not None
        decay = None if earlier.decay is None else self.apply(later.decay, earlier.decay)
        return Map(decay, self.apply(later.decay, earlier.state) + later.state)


class Matrix(Algebra):
    """A is a matrix: delta rules, whose steps reflect the state at their keys."""

    def apply(self, decay: Tensor, state: Tensor) -> Tensor:
        return decay @ state

    def turned(self, decay: Tensor) -> Tensor:
        return decay.transpose(-1, -2).contiguous()


ELEMENTWISE, MATRIX = Algebra(), Matrix()
