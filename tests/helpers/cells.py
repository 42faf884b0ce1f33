"""Cells of a table of tests: those that differ little from others are slow."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def crossed(*axes: Iterable[Any], quick: Callable[..., bool]) -> list[Any]:
    """Every combination of the values of `axes`; those that are not `quick` are marked slow."""
    return [
        pytest.param(*cell, marks=[] if quick(*cell) else pytest.mark.slow)
        for cell in itertools.product(*axes)
    ]
