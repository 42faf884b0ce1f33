"""torch.cuda without a device: the rank of a thread, its current device and stream, streams and events."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import torch

from .clocks import CHECKER, Clock, place

PROPERTIES = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    total_memory=80 * 2**30,
    multi_processor_count=132,
    shared_memory_per_block_optin=232448,
    L2_cache_size=50 * 2**20,
)


class _Thread(threading.local):
    rank: int | None = None
    """The rank that this thread works for."""
    device = 0
    in_backward = False
    """Whether this is a thread of autograd's, for a device."""
    capturing = False
    """Whether its stream is being captured in a graph."""

    def __init__(self) -> None:
        self.streams: dict[int, Stream] = {}
        """The current stream by device; its default stream if there is none."""


THREAD = _Thread()
_DEFAULTS: dict[int, Stream] = {}
_HOSTS: dict[int, int] = {}


def index_of(device: Any) -> int:
    """Return the index of a device; by default the current one."""
    if isinstance(device, int) and not isinstance(device, bool):
        return device
    device = None if device is None else torch.device(device)
    return THREAD.device if device is None or device.index is None else device.index


def host(rank: int) -> int:
    """Return the host of a rank as a stream: what it does is known to all that it launches afterwards."""
    if rank not in _HOSTS:
        with CHECKER.lock:
            _HOSTS.setdefault(rank, CHECKER.stream(f"host {rank}"))
    return _HOSTS[rank]


class Stream:
    """A stream of a device; the default one if `number` is that of a device's default stream."""

    def __init__(self, device: Any = None, priority: int = 0, *, name: str = "side stream") -> None:
        self.device_index, self.priority = index_of(device), priority
        self.number = CHECKER.stream(f"{name} of {self.device_index}")
        self.cuda_stream = self.number

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.device_index)

    def wait_stream(self, other: Stream) -> None:
        with CHECKER.lock:
            CHECKER.join(self.number, CHECKER.clocks[other.number])

    def wait_event(self, event: Event) -> None:
        with CHECKER.lock:
            CHECKER.join(self.number, event.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        waits(self.device_index, CHECKER.snapshot(self.number), "Stream.synchronize")

    def query(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.number == self.number

    def __hash__(self) -> int:
        return self.number


class Event:
    """An event: the clock of a stream when it was recorded."""

    def __init__(self, *options: Any, **more: Any) -> None:
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        with CHECKER.lock:
            self.clock = CHECKER.snapshot((stream or current_stream()).number)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        waits(THREAD.device, self.clock, "Event.synchronize")

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        return 1.0


def waits(rank: int, clock: Clock, why: str) -> None:
    """Let a rank's host wait for the device: all that it launches from now on comes after."""
    with CHECKER.lock:
        CHECKER.syncs[rank][f"{why} at [{place()}]"] += 1
        CHECKER.join(host(rank), clock)


def default_stream(device: Any = None) -> Stream:
    index = index_of(device)
    if index not in _DEFAULTS:
        with CHECKER.lock:
            _DEFAULTS.setdefault(index, Stream(index, name="default stream"))
    return _DEFAULTS[index]


def current_stream(device: Any = None) -> Stream:
    index = index_of(device)
    return THREAD.streams.get(index) or default_stream(index)


def set_stream(stream: Stream) -> None:
    THREAD.streams[stream.device_index] = stream


class stream:  # noqa: N801  # as torch's
    """Within it the stream, and its device, are the current ones."""

    def __init__(self, of: Stream | None) -> None:
        self._of = of

    def __enter__(self) -> None:
        self._before = dict(THREAD.streams), THREAD.device
        if self._of is not None:
            THREAD.streams[self._of.device_index], THREAD.device = self._of, self._of.device_index

    def __exit__(self, *error: object) -> None:
        THREAD.streams, THREAD.device = self._before


class device:  # noqa: N801
    """Within it a device is the current one."""

    def __init__(self, of: Any) -> None:
        self._of = index_of(of)

    def __enter__(self) -> None:
        self._before, THREAD.device = THREAD.device, self._of

    def __exit__(self, *error: object) -> None:
        THREAD.device = self._before


def set_device(of: Any) -> None:
    THREAD.device = index_of(of)


def synchronize(of: Any = None) -> None:
    everything: Clock = {}
    for clock in CHECKER.clocks:
        for each, count in clock.items():
            everything[each] = max(count, everything.get(each, 0))
    waits(index_of(of), everything, "torch.cuda.synchronize")


CUDA: dict[str, Any] = {
    "_lazy_init": lambda: None,
    "is_available": lambda: True,
    "device_count": lambda: 8,
    "current_device": lambda: THREAD.device,
    "get_device_capability": lambda device=None: (PROPERTIES.major, PROPERTIES.minor),
    "get_device_properties": lambda device=None: PROPERTIES,
    "get_device_name": lambda device=None: PROPERTIES.name,
    "is_current_stream_capturing": lambda: THREAD.capturing,
    "mem_get_info": lambda device=None: (2**24, PROPERTIES.total_memory),
    "memory_reserved": lambda device=None: 0,
    "memory_allocated": lambda device=None: CHECKER.bytes[index_of(device)],
    "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
    "set_rng_state": lambda state, device=None: None,
    "Stream": Stream,
    "Event": Event,
    "stream": stream,
    "set_stream": set_stream,
    "current_stream": current_stream,
    "default_stream": default_stream,
    "device": device,
    "set_device": set_device,
    "synchronize": synchronize,
    "empty_cache": lambda: None,
}
"""What stands in torch.cuda."""
