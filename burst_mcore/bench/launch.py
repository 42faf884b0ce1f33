"""Fresh processes of this machine, joined over gloo, and the memory that they keep."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from multiprocessing.context import BaseContext
from typing import Any

import torch
import torch.distributed as dist


def in_processes(
    size: int,
    function: Callable[..., Any],
    *args: Any,
    context: BaseContext | None = None,
    before: Callable[[int], None] | None = None,
) -> list[Any]:
    """function(rank, size, *args) on `size` gloo ranks, one thread each. The first error ends all ranks.

    Args:
        size: how many ranks.
        function: importable from its module.
        args: picklable.
        context: makes the processes; default: `fresh_processes`.
        before: called with the rank before the ranks are joined.

    Raises:
        BrokenProcessPool: a process was ended from outside, for want of memory above all.
        Exception: whatever a rank raised.
    """
    others = multiprocessing.active_children()
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(size, mp_context=context or fresh_processes()) as pool,
    ):
        store = f"{folder}/store"
        ranks = [pool.submit(_rank, rank, size, store, before, function, args) for rank in range(size)]
        try:
            for rank in as_completed(ranks):
                rank.result()
        except BaseException:
            for process in multiprocessing.active_children():
                if process not in others:  # it may wait for the rank that failed
                    process.kill()
            raise
        return [rank.result() for rank in ranks]


def torchrun() -> tuple[int, int] | None:
    """Return (rank, size) if torchrun started this process as one of several."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def in_torchrun(function: Callable[..., Any], cuda: bool, *args: Any) -> Any:
    """function(rank, size, *args) on the processes that torchrun started, this one among them.

    Messages between GPUs go over NCCL, figures over gloo.
    """
    started = torchrun()
    assert started is not None
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    rank, size = started
    store = dist.PrefixStore(f"burst_mcore/bench/{next(_SETS)}", _store())  # type: ignore[attr-defined]
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=size, store=store)
    try:
        result = function(rank, size, *args)
        dist.barrier()
        return result
    finally:
        dist.destroy_process_group()


_SETS = itertools.count()


@cache
def _store() -> Any:
    """Return the store that torchrun gives its processes; what one group wrote there stays."""
    store, _, _ = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]
    return store


def fresh_processes(cuda: bool = False) -> BaseContext:
    """Processes in which nothing ran but imports: those are made once, where the system can fork.

    With `cuda` they are made anew: a process that was forked from one that touched CUDA cannot use it.
    """
    if cuda or "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["burst_mcore.bench.subjects"])
    return context


def _rank(
    rank: int,
    size: int,
    store: str,
    before: Callable[[int], None] | None,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> Any:
    if before is not None:
        before(rank)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size, store=dist.FileStore(store, size))  # type: ignore[attr-defined]
    result = function(rank, size, *args)
    dist.barrier()  # a rank that ends takes its connections with it
    dist.destroy_process_group()
    return result


def keep_freed_memory() -> None:
    """Freed memory stays in the process, as in torch's allocator for GPUs, for whatever is timed in it.

    Otherwise glibc returns large tensors to the kernel and gets them back page by page, which on virtual
    machines takes about 10 us a page: up to a sixth of a short attention call, and nothing that is compared.
    """
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        for parameter, value in ((-4, 0), (-1, 2**31 - 1), (-2, 2**27)):  # MMAP_MAX, TRIM_THRESHOLD, TOP_PAD
            mallopt(parameter, value)


def touch_memory(size: int) -> None:
    """Take so many bytes from the system and free them: with `keep_freed_memory` they stay in the process.

    Otherwise the heap takes new pages for as long as its blocks lie elsewhere in each call. At most 1.75 GiB,
    since glibc gives back what is 2 GiB and more.
    """
    torch.empty(min(size, 7 * 2**28), dtype=torch.uint8).fill_(0)
