"""Processes that measure together: fresh processes over gloo, or torchrun's; and their freed memory."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
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
    """Run function(rank, size, *args) on `size` gloo ranks, one thread each. The first error ends all ranks.

    `context` makes the processes, by default `fresh_processes`. `before` is called with the rank before ranks
    are joined. Raises the error of a rank, and BrokenProcessPool if a process was ended from outside, mostly
    for lack of memory.
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


def fresh_processes(cuda: bool = False) -> BaseContext:
    """Return the context of processes with only imports done: made once, on systems that can fork.

    With `cuda` they are made anew: a process that was forked from one that touched CUDA cannot use it.
    """
    if cuda or "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["burst_bench.subjects"])
    return context


def _rank(
    rank: int,
    size: int,
    store: str,
    before: Callable[[int], None] | None,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> Any:
    threading.Thread(target=_end_with_the_first, daemon=True).start()
    if before is not None:
        before(rank)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size, store=dist.FileStore(store, size))  # type: ignore[attr-defined]
    result = function(rank, size, *args)
    dist.barrier()  # a rank that ends takes its connections with it
    dist.destroy_process_group()
    return result


def _end_with_the_first() -> None:
    """End this process as soon as its parent has ended, even if that was killed."""
    first = multiprocessing.parent_process()
    if first is not None:
        first.join()
        os._exit(1)


@contextlib.contextmanager
def joined(device: str) -> Iterator[None]:
    """Join the processes that torchrun started, for messages on CPUs over gloo and on GPUs over NCCL."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    try:
        yield
        dist.barrier()  # a rank that ends takes its connections with it
    finally:
        dist.destroy_process_group()


def keep_freed_memory() -> None:
    """Keep freed memory in the process, as torch's allocator for GPUs does, for timed steps.

    Otherwise glibc returns large tensors to the kernel and gets them back page by page, which on virtual
    machines takes about 10 us a page: up to a sixth of a short attention call, unrelated to any method.
    """
    with contextlib.suppress(OSError, AttributeError):  # another system, or C library
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        for parameter, value in ((-4, 0), (-1, 2**31 - 1), (-2, 2**27)):  # MMAP_MAX, TRIM_THRESHOLD, TOP_PAD
            mallopt(parameter, value)


def touch_memory(size: int) -> None:
    """Take memory from the system and free it: with `keep_freed_memory` it stays in the process.

    Otherwise the heap takes new pages for as long as its blocks lie elsewhere in each call. At most 1.75 GiB,
    since glibc returns blocks of 2 GiB and more.
    """
    torch.empty(min(size, 7 * 2**28), dtype=torch.uint8).fill_(0)
