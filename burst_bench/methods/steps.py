"""Training steps of a framework: settings of ours for both of them, and the paper's ablation among them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from burst_mcore.attention.runtime.head_exchange import why_not_heads
from burst_mcore.config import BurstConfig

VOCABULARY = 2048
WIDER = 2
"""Width of the MLP over that of the model."""
Train = Callable[[], float]
"""A step: forward, backward and optimizer, with a learning rate of 0; the mean loss of all tokens."""


class StepProblem(Protocol):
    """A small model and the ranks that train it."""

    @property
    def nodes(self) -> int: ...
    @property
    def seq(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def layers(self) -> int: ...


@dataclass(frozen=True)
class Setting:
    """What ours does in a step."""

    backward: str = "auto"
    ring: str = "auto"
    head_parallel: int | str = 1
    fused: bool = False
    """Whether the LM head and its loss are fused."""
    recompute: str = "none"
    """"none", or a policy: "full", "segment" (half of the sequence is kept) or "attention"."""

    @property
    def config(self) -> BurstConfig:
        return BurstConfig(backward=self.backward, ring=self.ring, head_parallel=self.head_parallel)


_QUERY = Setting("query", "flat", recompute="full")
_DOUBLE = replace(_QUERY, ring="double")
_FUSED = replace(_DOUBLE, fused=True)
OURS = {
    "burst ring": Setting(),
    "burst hybrid": Setting(head_parallel=2),
    "burst auto": Setting(head_parallel="auto"),
    "burst auto with fused loss": Setting(head_parallel="auto", fused=True),
    "kv, flat ring, full recompute": Setting("kv", "flat", recompute="full"),
    "+ query": _QUERY,
    "+ double ring": _DOUBLE,
    "+ fused loss": _FUSED,
    "+ segment": replace(_FUSED, recompute="segment"),
    "+ attention": replace(_FUSED, recompute="attention"),
}
"""By name. From the fifth on they are the paper's ablation: each adds to the one before, and the
last keeps attention in the place of a segment."""


def why_not(setting: Setting, problem: StepProblem) -> str | None:
    """Return what a setting needs of the problem; None if it has that."""
    if setting.ring == "double" and problem.nodes < 2:
        return "2 nodes or more: nodes=2"
    shared = setting.head_parallel
    reason = why_not_heads(problem.heads, problem.kv_heads, shared) if isinstance(shared, int) else None
    return None if reason is None else f"heads that {shared} ranks can share: {reason}"


def flops(problem: StepProblem) -> float:
    """Return the FLOPs of a step over one sequence, of the model alone: nothing recomputed, causal pairs.

    Six for each weight of a matrix and token, and six for each head, element and token before.
    """
    width, kv = problem.heads * problem.head_dim, problem.kv_heads * problem.head_dim
    weights = problem.layers * (2 * width * (width + kv) + 3 * WIDER * width * width) + VOCABULARY * width
    return problem.seq * 6.0 * (weights + problem.layers * problem.seq * width)


def sample(problem: StepProblem) -> Tensor:
    """Return the tokens of one sequence, the same every time."""
    return torch.randint(3, VOCABULARY, (1, problem.seq), generator=torch.Generator().manual_seed(1))


def options_of(problem: Any) -> dict[str, int]:
    """Return the shape of the model in transformers' words."""
    width = problem.heads * problem.head_dim
    return {
        "vocab_size": VOCABULARY, "hidden_size": width, "intermediate_size": WIDER * width,
        "num_hidden_layers": problem.layers, "num_attention_heads": problem.heads,
        "num_key_value_heads": problem.kv_heads, "head_dim": problem.head_dim,
        "max_position_embeddings": problem.seq,
    }  # fmt: skip
