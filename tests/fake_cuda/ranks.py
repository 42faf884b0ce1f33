"""Ranks as threads of this process, each with a device of its own, and the devices' threads of autograd."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.autograd import graph
from torch.utils import _python_dispatch

from burst_mcore.attention.runtime.communicators import Communicators
from burst_mcore.attention.runtime.companions import companion
from burst_mcore.attention.runtime.topology import Topology

from . import kernels
from .clocks import CHECKER
from .collectives import DISTRIBUTED, WORLD
from .groups import NETWORK, Network
from .memory import FREED, pin
from .streams import CUDA, THREAD
from .tensors import Cuda, CudaTensor


def install(patch: pytest.MonkeyPatch) -> None:
    """Put the device and its network in the place of torch's."""
    for name, member in CUDA.items():
        patch.setattr(torch.cuda, name, member)
    for name, member in DISTRIBUTED.items():
        patch.setattr(dist, name, member)
    patch.setattr(c10d, "_world", WORLD)
    patch.setattr(torch.Tensor, "pin_memory", _pinned)
    patch.setattr(torch, "tensor", _tensor_of(torch.tensor))
    patch.setattr(threading.Thread, "start", _started(threading.Thread.start))
    for flag in [name for name in vars(_python_dispatch) if name.startswith("_is_in_")]:
        # Threads that enter modes side by side leave torch's flags of the process set.
        patch.setattr(_python_dispatch, flag, getattr(_python_dispatch, flag))
    run = _in_device_thread(graph._engine_run_backward)
    patch.setattr(graph, "_engine_run_backward", run)
    patch.setattr(torch.autograd, "_engine_run_backward", run)
    patch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=_Options), raising=False)
    kernels.install(patch)


class _Options:
    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.config, self._timeout = SimpleNamespace(), None


def _pinned(x: torch.Tensor, *device: Any) -> torch.Tensor:
    return pin(x.clone())


def _tensor_of(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def tensor(data: Any, *, pin_memory: bool = False, device: Any = None, **options: Any) -> torch.Tensor:
        made = original(data, **options)
        if device is not None and torch.device(device).type == "cuda":
            return made.to(device)
        return pin(made) if pin_memory else made

    return tensor


def _started(original: Callable[..., None]) -> Callable[..., None]:
    """Let threads work for the rank that starts them."""

    def start(self: threading.Thread) -> None:
        rank, run = THREAD.rank, self.run

        def of_rank() -> None:
            THREAD.rank, THREAD.device = rank, rank or 0
            run()

        if rank is not None:
            self.run = of_rank  # type: ignore[method-assign]
        original(self)

    return start


def _in_device_thread(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return autograd's engine as with a device: nodes run in another thread, the caller waits."""

    def run(*args: Any, **options: Any) -> Any:
        if THREAD.rank is None or THREAD.in_backward:
            return original(*args, **options)
        done: list[Any] = []

        def nodes() -> None:
            THREAD.in_backward = True
            try:
                with Cuda():
                    done.append((original(*args, **options), None))
            except BaseException as error:
                done.append((None, error))

        thread = threading.Thread(target=nodes, name=f"autograd of cuda:{THREAD.rank}")
        thread.start()
        thread.join()
        result, error = done[0]
        if error is not None:
            raise error
        return result

    return run


def ring(rank: int, size: int, intra: int | None = None) -> Topology:
    """Return the topology of a rank of a ring over the world."""
    world = NETWORK[-1].world[rank]
    control = companion(list(range(size)), "gloo", world._get_backend(torch.device("cpu")).options._timeout)
    communicators = Communicators(list(range(size)), {"whole": world}, control)
    return Topology(rank=rank, size=size, intra_size=intra or size, communicators=communicators)


def run(
    size: int, function: Callable[[int], Any], *, world: int | None = None, bound: bool = False
) -> dict[int, Any]:
    """Return function(rank) of the first `size` ranks of a world, each in a thread.

    An error of a rank is a finding, and ends the waits of the others. bound: the default group has a device.
    """
    CHECKER.begin()
    FREED.clear()
    network = Network(world or size)
    NETWORK.append(network)
    results: dict[int, Any] = {}

    def work(rank: int) -> None:
        THREAD.rank, THREAD.device = rank, rank
        try:
            if bound:
                network.world[rank].bound_device_id = torch.device("cuda", rank)
            with Cuda():
                results[rank] = function(rank)
        except BaseException as error:
            if network.broken is None:
                last = traceback.extract_tb(error.__traceback__)[-1]
                name = f"{last.filename.rsplit('/', 1)[-1]}:{last.lineno}"
                CHECKER.found("error", f"rank {rank}: {type(error).__name__}: {error} at [{name}]")
            network.fail(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    try:
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    finally:
        NETWORK.remove(network)
    return results


def cuda(x: torch.Tensor, rank: int) -> CudaTensor:
    """Return a tensor of the host as one of a rank's device, copied before the case began."""
    return CudaTensor(x.detach().clone().contiguous(), rank)
