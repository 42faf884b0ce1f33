"""The speed of a cluster: rates of links and ranks, for the cost model."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Sustained rates of one rank, in SI units. Raises ValueError where one is not a positive number."""

    intra: float
    """Bytes a second that a rank sends to ranks of its own node."""
    inter: float
    """Bytes a second that a rank sends to other nodes: its share of the node's NICs."""
    compute: float
    """FLOPs a second of the local attention kernel, forward and backward."""
    latency: float = 10e-6
    """Seconds that a message takes besides its bytes."""
    hidden: bool = True
    """Whether messages travel while a rank computes; sockets take the cores that compute."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name == "hidden":
                continue
            legal = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            if not legal or value < 0 or (value == 0 and name != "latency"):
                raise ValueError(f"Rates.{name} must be a positive number, got {value!r}")


DEFAULT = {
    # A node of 8 with NVLink at 400 GB/s both ways and a 200 Gbit/s NIC a GPU: the paper's cluster
    # (section 5), its peak 312 TFLOP/s; half of the peak is what flash kernels sustain there.
    "cuda": Rates(intra=200e9, inter=25e9, compute=156e12),
    # Processes of one machine over loopback; between machines 10 Gbit/s that ten of them share.
    "cpu": Rates(intra=1e9, inter=125e6, compute=50e9, latency=200e-6, hidden=False),
}
"""Rates by device type, if the user gives none. Links between nodes are slower than links within."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """A kind of GPU, as its maker specifies it."""

    rates: Rates
    memory: float
    """Bytes."""
    capability: int
    """Major compute capability."""


def _gpu(*, tflops: float, nvlink: float, nic: float, memory: float, capability: int) -> Device:
    """tflops: dense, in bfloat16, of which flash kernels sustain half; GB/s one way of all links; GB."""
    rates = Rates(intra=nvlink * 1e9, inter=nic * 1e9, compute=tflops / 2 * 1e12)
    return Device(rates=rates, memory=memory * 1e9, capability=capability)


DEVICES = {
    # Data sheets of NVIDIA's SXM modules, and the NIC of a GPU in its DGX systems.
    "a100": _gpu(tflops=312, nvlink=300, nic=25, memory=80, capability=8),
    "h100": _gpu(tflops=989, nvlink=450, nic=50, memory=80, capability=9),
    "h200": _gpu(tflops=989, nvlink=450, nic=50, memory=141, capability=9),
    "b200": _gpu(tflops=2250, nvlink=900, nic=50, memory=180, capability=10),
}
"""By name: for predictions on a machine that has none of them."""
