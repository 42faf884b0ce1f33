"""Recompute policies: the share of the sequence with saved results in each attention call."""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass, field

from burst_mcore.attention.geometry.cuts import check_keep
from burst_mcore.attention.replay import SavedSuffix
from burst_mcore.checkpointing.offload import OffloadedResults, SavedResults
from burst_mcore.checkpointing.scope import Policy
from burst_mcore.words import brief


@dataclass(frozen=True)
class Full(Policy):
    """Save nothing: recompute attention."""

    def share(self, size: int) -> tuple[float, bool]:
        return 0.0, False


@dataclass(frozen=True)
class KeepAttention(Policy):
    """Save O and LSE of the whole sequence: no recompute (selective checkpointing ++ of the paper)."""

    def share(self, size: int) -> tuple[float, bool]:
        return 1.0, False


@dataclass(frozen=True)
class Segment(Policy):
    """Save O and LSE of a suffix of the global sequence, and recompute the prefix.

    BurstEngine, "Sequence-level Selective Checkpointing".

    keep: the saved share, from 0 (`Full`) to 1 (`KeepAttention`); of a causal forward's pairs (1 - keep)^2
        are recomputed. The share moves to the nearest cut that the layout balances (`cuts.cut_for` in
        attention/geometry). Or "auto": the largest share that fits `memory_gb`.
    memory_gb: with "auto", the GB (10^9 bytes) of saved results on this rank. The first step saves nothing,
        and counts the calls that share this memory: use one Segment for all steps.

    Raises ValueError if a field is not legal.
    """

    keep: float | str = 0.5
    memory_gb: float | None = None
    _live: _Live = field(default_factory=lambda: _Live(), init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.keep, str):
            if self.keep != "auto":
                raise ValueError(f"keep must be a share from 0 to 1, or 'auto', got {brief(self.keep)}")
            budget = self.memory_gb
            if isinstance(budget, bool) or not isinstance(budget, (int, float)) or not 0 < budget < math.inf:
                raise ValueError(f"keep='auto' needs memory_gb, the GB kept, above 0; got {brief(budget)}")
        else:
            check_keep(self.keep)
            if self.memory_gb is not None:
                raise ValueError(f"memory_gb is for keep='auto', got {self.memory_gb!r}, keep={self.keep!r}")

    def share(self, size: int) -> tuple[float, bool]:
        if not isinstance(self.keep, str):
            return float(self.keep), False
        assert self.memory_gb is not None
        return self._live.share(self.memory_gb * 1e9, size), True

    def watch(self, results: SavedResults, suffix: SavedSuffix) -> None:
        if isinstance(self.keep, str):
            self._live.count(results, sum(x.numel() * x.element_size() for x in suffix.tensors))


class _Live:
    """The number of calls with saved results in each step, and their current bytes."""

    def __init__(self) -> None:
        self.calls = self.bytes = 0
        self.most_calls: int | None = None
        """The maximum of the last step; None in the first step."""
        self._most = 0

    def share(self, budget: float, size: int) -> float:
        """Return the largest share of each call that fits the budget, for results of `size` bytes."""
        if self.most_calls is None:
            return 0.0
        if not size:  # of a rank without tokens
            return 1.0
        share = min(1.0, budget / (self.most_calls * size))
        return share if self.bytes + share * size <= budget * (1 + 1e-9) else 0.0

    def count(self, results: SavedResults, size: int) -> None:
        self.calls, self.bytes = self.calls + 1, self.bytes + size
        self._most = max(self._most, self.calls)
        weakref.finalize(results, self._gone, size).atexit = False

    def _gone(self, size: int) -> None:
        self.calls, self.bytes = self.calls - 1, self.bytes - size
        if self.calls == 0:  # a step is over
            self.most_calls, self._most = self._most, 0

    def __reduce__(self) -> tuple[type[_Live], tuple[()]]:
        """Reset the count in a copy of a policy: the tensors belong to the original."""
        return _Live, ()


@dataclass(frozen=True)
class Offload(Policy):
    """Save the results of `policy` in pinned host memory, and prefetch them in backward.

    CUDA tensors are copied on a separate stream during the forward. Backward takes results in reverse order:
    a call that takes its results prefetches the results of the call before it. CPU tensors stay in place.
    """

    policy: Policy

    def __post_init__(self) -> None:
        if not isinstance(self.policy, Policy) or isinstance(self.policy, Offload):
            raise ValueError(f"Offload takes Full(), KeepAttention(), Segment(...), got {brief(self.policy)}")

    def share(self, size: int) -> tuple[float, bool]:
        return self.policy.share(size)

    def hold(self, suffix: SavedSuffix) -> SavedResults:
        if not any(x.is_cuda for x in suffix.tensors):
            return self.policy.hold(suffix)
        results = OffloadedResults(suffix)
        self.policy.watch(results, suffix)
        return results
