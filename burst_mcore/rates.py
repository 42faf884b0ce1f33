"""The speed of a cluster: rates of kernels, memory and links, and the rates that "auto" takes by default."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Self


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Sustained rates of one rank, in SI units. Raises ValueError for a value that is not legal.

    The first five suffice for a coarse prediction. The others refine it; by default they cost nothing.
    """

    intra: float
    """Bytes a second that a rank sends to ranks of its own node."""
    inter: float
    """Bytes a second that a rank sends to other nodes: its share of the node's NICs."""
    compute: float
    """FLOPs a second of the attention kernel in forward, for long sequences."""
    latency: float = 10e-6
    """Seconds that a message takes besides its bytes."""
    hidden: bool = True
    """Whether messages rotate while a rank computes; sockets take the cores that compute."""
    backward: float | None = None
    """FLOPs a second of the kernel in backward; None: as in forward."""
    exponentials: float = math.inf
    """Exponentials a second: the kernel needs one for each head of a query-key pair."""
    memory: float = math.inf
    """Bytes a second of the device's memory, for the passes between kernels."""
    fill: float = 0.0
    """Keys that a query row of a kernel call costs besides those it sees, while pipelines fill."""
    wave: float = 0.0
    """Rows, of all heads, that a forward kernel works on at once. At its end half of the device idles, on
    average, for as long as a row takes."""
    wave_backward: float | None = None
    """The same in backward; None: as in forward."""
    head_dims: tuple[int, ...] = ()
    """Head dims that the kernel has, in ascending order: others are padded to the next; empty: every one."""
    call: float = 0.0
    """Seconds in which the host launches a ring step, or an exchange of heads, ahead of the device."""
    crowding: float = 0.0
    """Exponent by which members of an all-to-all slow each other down where no switch joins the devices.

    Among h members of a node, a rank sends at `intra` / (h / 2) ** crowding."""
    levels: tuple[tuple[int, float], ...] = ()
    """Slower links within a node: (n, bytes a second) between ranks of different groups of n neighbours."""
    slowdown: float = 0.0
    """Share of a message's time by which it lengthens the kernel that runs beside it."""
    others: float = 0.0
    """Share of all links that other traffic takes."""

    def __post_init__(self) -> None:
        legal = (isinstance(self.hidden, bool), "hidden", "True or False", self.hidden)
        checks = [legal, *(self._check(field.name) for field in fields(self) if field.name not in _OTHER)]
        checks += [
            (_number(rate) and rate > 0 and size > 1, "levels", "pairs (ranks, bytes a second)", self.levels)
            for size, rate in self.levels
        ]
        dims = self.head_dims
        rising = all(isinstance(dim, int) for dim in dims) and [0, *dims] == sorted({0, *dims})
        checks.append((rising, "head_dims", "numbers in ascending order", dims))
        for right, name, wanted, value in checks:
            if not right:
                raise ValueError(f"Rates.{name} must be {wanted}, got {value!r}")

    def _check(self, name: str) -> tuple[bool, str, str, object]:
        value = getattr(self, name)
        if name in ("backward", "wave_backward") and value is None:
            return True, name, "", value
        if name in ("others", "slowdown"):
            return _number(value) and 0 <= value < 1, name, "from 0 to below 1", value
        if name in ("latency", "fill", "wave", "wave_backward", "call", "crowding"):
            return _number(value) and 0 <= value < math.inf, name, "a number, not negative", value
        infinite = name in ("exponentials", "memory")
        return (
            _number(value) and value > 0 and (infinite or value < math.inf),
            name,
            "a positive number",
            value,
        )

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Return the rates in a JSON file that `save` or `burst-mcore calibrate` wrote.

        Raises:
            ValueError: no such file, or not rates.
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
        """Write the rates as JSON; about: further entries, such as the machine that was measured."""
        known = {name: value for name, value in asdict(self).items() if value != math.inf}
        Path(path).write_text(json.dumps({**about, "rates": known}, indent=1) + "\n")

    def computed(self, head_dim: int) -> int:
        """Return the head dim that the kernel computes."""
        return next((dim for dim in self.head_dims if head_dim <= dim), head_dim)

    def link(self, *, inter: bool) -> float:
        """Return the bytes a second that are left to a rank, between nodes or at best within one."""
        return (self.inter if inter else self.intra) * (1 - self.others)


_OTHER = ("hidden", "head_dims", "levels")


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)


RATES_FILE = "BURST_MCORE_RATES"
"""Environment variable: a file of rates that replaces the defaults, as `burst-mcore calibrate` writes it."""

CPU = Rates(intra=1e9, inter=125e6, compute=50e9, latency=200e-6, hidden=False)
"""Processes of one machine over loopback; between machines 10 Gbit/s that ten of them share."""

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
    """Return the rates of a kind of device, "cpu" or "cuda": those of the file in `RATES_FILE`, if it is set.

    Raises:
        ValueError: the file holds no rates.
    """
    path = os.environ.get(RATES_FILE)
    if path:
        return Rates.load(path)
    return CUDA if device == "cuda" else CPU
