"""The speed of a cluster: rates of kernels, memory and links, and the default rates of "auto"."""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Self


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Sustained rates of one rank, in SI units. Raises ValueError for a value that is not legal.

    The first five suffice for a coarse prediction. The others refine it; their defaults have no effect.
    """

    intra: float
    """Bytes a second that a rank sends to ranks of its own node."""
    inter: float
    """Bytes a second that a rank sends to other nodes: its share of the node's NICs."""
    compute: float
    """FLOPs a second of the attention kernel in forward, for long sequences."""
    latency: float = 10e-6
    """Seconds of a message in addition to its bytes."""
    hidden: bool = True
    """Whether messages overlap with compute; sockets use the cores that compute."""
    backward: float | None = None
    """FLOPs a second of the kernel in backward; None: as in forward."""
    exponentials: float = math.inf
    """Exponentials a second: the kernel computes one for each head of a query-key pair."""
    memory: float = math.inf
    """Bytes a second of the device's memory, for the passes between kernels."""
    fill: float = 0.0
    """The overhead of a query row of a kernel call, in keys, while pipelines fill."""
    wave: float = 0.0
    """The rows, of all heads, of a forward kernel's wave. In the last wave half of the device idles, on
    average, for the time of a row."""
    wave_backward: float | None = None
    """The same in backward; None: as in forward."""
    head_dims: tuple[int, ...] = ()
    """The kernel's head dims, in ascending order: others are padded to the next; empty: every head dim."""
    call: float = 0.0
    """Seconds of the host to launch a ring step, or an exchange of heads, ahead of the device."""
    crowding: float = 0.0
    """The exponent of the slowdown of an all-to-all without a switch between the devices.

    Among h members of a node, a rank sends at `intra` / (h / 2) ** crowding."""
    levels: tuple[tuple[int, float], ...] = ()
    """Slower links within a node: (n, bytes a second) between ranks of different groups of n neighbours."""
    slowdown: float = 0.0
    """The share of a message's time by which a concurrent kernel becomes longer."""
    others: float = 0.0
    """The share of all links that other traffic uses."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            legal, description = _legal(name, value)
            if not legal:
                raise ValueError(f"Rates.{name} must be {description}, got {value!r}")

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Return the rates in a JSON file of `save` or `burst-mcore calibrate`.

        Raises:
            ValueError: the file is missing, or holds no rates.
        """
        try:
            text = json.loads(Path(path).read_text())
            values = {**text["rates"]} if "rates" in text else {**text}
            values["levels"] = tuple((int(size), float(rate)) for size, rate in values.get("levels", ()))
            values["head_dims"] = tuple(values.get("head_dims", ()))
            return cls(**values)
        except (OSError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is no file of rates: {error}") from None

    def save(self, path: Path | str, **about: object) -> None:
        """Write the rates as JSON; about: further entries, such as the measured machine."""
        values = {name: value for name, value in asdict(self).items() if value != math.inf}
        Path(path).write_text(json.dumps({**about, "rates": values}, indent=1) + "\n")

    def computed(self, head_dim: int) -> int:
        """Return the head dim that the kernel computes."""
        return next((dim for dim in self.head_dims if head_dim <= dim), head_dim)

    def link(self, *, inter: bool) -> float:
        """Return a rank's available bytes a second, between nodes or at best within a node."""
        return (self.inter if inter else self.intra) * (1 - self.others)


def _legal(name: str, value: Any) -> tuple[bool, str]:
    """Return whether the value of a field is legal, and which values are."""
    if name == "hidden":
        return isinstance(value, bool), "True or False"
    if name == "levels":
        legal = all(_number(rate) and rate > 0 and size > 1 for size, rate in value)
        return legal, "pairs (ranks, bytes a second)"
    if name == "head_dims":
        rising = all(isinstance(dim, int) for dim in value) and [0, *value] == sorted({0, *value})
        return rising, "numbers in ascending order"
    if name in ("others", "slowdown"):
        return _number(value) and 0 <= value < 1, "from 0 to below 1"
    unset = value is None and name in ("backward", "wave_backward")
    if name in ("latency", "fill", "wave", "wave_backward", "call", "crowding"):
        return unset or (_number(value) and 0 <= value < math.inf), "a number, not negative"
    maximum = math.inf if name in ("exponentials", "memory") else sys.float_info.max
    return unset or (_number(value) and 0 < value <= maximum), "a positive number"


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)


RATES_FILE = "BURST_MCORE_RATES"
"""The environment variable of a file with rates (from `burst-mcore calibrate`) that replace the defaults."""

CPU = Rates(intra=1e9, inter=125e6, compute=50e9, latency=200e-6, hidden=False)
"""Processes of one machine over loopback; between machines ten processes share 10 Gbit/s."""

CUDA = Rates(
    intra=382.5e9,
    inter=42.5e9,
    compute=919_770_000_000_000,
    backward=662_630_000_000_000,
    exponentials=3.9e12,
    memory=3350e9,
    fill=300.0,
    wave=132 * 128,
    wave_backward=132 * 128,
    head_dims=(32, 64, 96, 128, 192, 256),
    call=0.15e-3,
    slowdown=0.06,
)
"""Any GPU: an H100 with NVLink and a network card of its own, as in `burst_plan.machines`."""


@lru_cache
def default_rates(device: str) -> Rates:
    """Return the rates of a device, "cpu" or "cuda", or the rates in the file of `RATES_FILE`, if set.

    Raises:
        ValueError: the file holds no rates.
    """
    if path := os.environ.get(RATES_FILE):
        return Rates.load(path)
    return CUDA if device == "cuda" else CPU
