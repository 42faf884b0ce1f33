"""BurstConfig, the settings of attention; each field is also a flag of Megatron and a key of DeepSpeed."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, Self

import torch

from burst_mcore.dtypes import DTYPES
from burst_mcore.layout import NAMES, Layout
from burst_mcore.words import brief, no_argument

BACKWARDS = ("auto", "query", "kv")
RINGS = ("auto", "double", "flat", "direct")
"""The words of `ring`; "auto" searches only `SEARCHED` of attention/schedule/route.py."""
PLACEMENTS = ("auto", "inner", "outer")
GRAD_DTYPES = {name: DTYPES[name] for name in ("float32", "bfloat16")}


class Setting(NamedTuple):
    """The description of a field of `BurstConfig`, for flags, keys and docs."""

    default: Any
    legal: tuple[str, ...] | str
    """All legal options, or a description of the legal values."""
    meaning: str
    """A sentence."""


def setting(default: Any, legal: tuple[str, ...] | str, meaning: str, *, hashed: bool = True) -> Any:
    """Return the field of a dataclass for a `Setting`."""
    return field(default=default, hash=hashed, metadata={"legal": legal, "meaning": meaning})


@dataclass(frozen=True, kw_only=True)
class BurstConfig:
    """The settings of attention. Each field is a flag of Megatron and a key of DeepSpeed's section, too.

    Raises ValueError if a field is not legal. The first call checks names of kernels and degrees of head
    parallelism, which depend on the call.
    """

    layout: Layout | str = setting("zigzag", NAMES, "How tokens are sharded over the ranks.", hashed=False)
    """A `Layout`, or its name. Not hashed, for speed: few configs differ only in the layout."""

    backward: str = setting(
        "auto",
        BACKWARDS,
        "The side that rotates in backward: queries, or keys and values; auto: the cost model chooses.",
    )
    """"query" sends Q, dO, D, LSE and dQ (BurstAttention, paper algorithm 2), "kv" K, V and dK, dV
    (RingAttention, paper algorithm 1)."""

    ring: str = setting(
        "auto",
        RINGS,
        "The route between ranks: double: a ring in each node and one between nodes; flat: one ring over "
        "all ranks; direct: every row straight to its readers; auto: the cost model chooses.",
    )
    """On one node "double" and "flat" are the same."""

    head_parallel: int | str = setting(
        1,
        "a number of ranks, auto",
        "The number of ranks that divide the heads among them, in a ring over the other ranks: 1 is a "
        "pure ring, all ranks are Ulysses; auto: the cost model chooses.",
    )
    """Divides the ranks and the heads, and divides or is a multiple of the K/V heads."""

    head_placement: str = setting(
        "auto",
        PLACEMENTS,
        "The ranks that divide heads: inner: neighbours, and the ring goes from node to node; outer: one "
        "of each ring of neighbours, and heads cross the nodes; auto: the cost model chooses.",
    )
    """Without effect if `head_parallel` is 1 or all ranks. On one node "auto" is "inner"."""

    overlap: bool = setting(
        True, "true, false", "Communicate while ranks compute (off: wait for each ring step)."
    )
    """Results are the same; only times differ."""

    kernel: str = setting("auto", "auto, or a kernel's name", "The local attention kernel.")
    """A name in the kernel table (`burst_mcore.attention.kernels.table`), or "auto"."""

    deterministic: bool = setting(
        False,
        "true, false",
        "Make gradients bitwise equal between runs; kernels without that property are not used.",
    )
    """On one device, with one number of threads."""

    grad_dtype: torch.dtype = setting(
        torch.float32, tuple(GRAD_DTYPES), "The dtype in which rotating gradients are summed and sent."
    )
    """A name is converted to a torch.dtype. Inputs in float64 always use float64."""

    max_ctas: int = setting(
        8,
        "a number of at least 1",
        "The thread blocks of a GPU that each NCCL communicator of the ring may use, at most, and never "
        "more than 4 between nodes; the others are left to attention.",
    )
    """NCCL's `maxCTAs`. Eight suffice for a ring with 8K tokens a rank: an estimate, not measured."""

    def __new__(cls, **fields: Any) -> Self:
        if not fields.keys() <= SETTINGS.keys():
            unknown = [name for name in fields if name not in SETTINGS]
            ours = {name: f"{name}=..." for name in ("softmax_scale", "softcap", "sinks", "mask", "topology")}
            raise no_argument(cls.__name__, unknown, SETTINGS, ours)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        object.__setattr__(self, "layout", Layout.of(self.layout))
        for name, words in (("backward", BACKWARDS), ("ring", RINGS), ("head_placement", PLACEMENTS)):
            word = getattr(self, name)
            if word not in words:
                raise ValueError(f"unknown {name} {brief(word)}; legal: {', '.join(map(repr, words))}")
        if not isinstance(self.kernel, str):
            raise ValueError(f"kernel must be the name of a kernel or 'auto', got {brief(self.kernel)}")
        self._check_numbers()
        dtype = GRAD_DTYPES.get(str(self.grad_dtype), self.grad_dtype)
        if dtype not in GRAD_DTYPES.values():
            raise ValueError(f"grad_dtype is one of {', '.join(GRAD_DTYPES)}, got {brief(self.grad_dtype)}")
        object.__setattr__(self, "grad_dtype", dtype)

    def _check_numbers(self) -> None:
        for name in ("overlap", "deterministic"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {brief(getattr(self, name))}")
        degree = self.head_parallel
        if degree != "auto" and (not isinstance(degree, int) or isinstance(degree, bool) or degree < 1):
            raise ValueError(f"head_parallel must be a number of ranks >= 1, or 'auto', got {brief(degree)}")
        if not isinstance(self.max_ctas, int) or isinstance(self.max_ctas, bool) or self.max_ctas < 1:
            raise ValueError(f"max_ctas must be a number of at least 1, got {brief(self.max_ctas)}")


def _word(default: Any) -> Any:
    return str(default).removeprefix("torch.") if isinstance(default, torch.dtype) else default


def settings_of(kind: type[Any]) -> dict[str, Setting]:
    """Return the settings of a dataclass with fields made by `setting`."""
    return {each.name: Setting(_word(each.default), **each.metadata) for each in fields(kind)}


SETTINGS: dict[str, Setting] = settings_of(BurstConfig)
"""The default, the legal values and a sentence for each field of BurstConfig: the only place for them."""
