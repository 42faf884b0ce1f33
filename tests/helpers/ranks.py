"""Runs a function as several ranks: as processes over gloo, or as threads over mailboxes."""

from __future__ import annotations

import contextlib
import gc
import inspect
import multiprocessing
import os
import pickle
import queue
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import limits
import torch
import torch.distributed as dist

import burst_mcore.attention.choose  # noqa: F401 - with what a call imports, here once: ranks are forked


def poison(on: bool) -> None:
    """Whether torch.empty fills what it returns with NaN (torch's own switch)."""
    torch.use_deterministic_algorithms(on, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = on


def spoil(tensor: torch.Tensor) -> None:
    """NaN, in bytes as well: nobody may read it before it has arrived."""
    tensor.fill_(torch.nan if tensor.is_floating_point() else 255)


UNCONNECTED = "gloo did not connect the ranks"
"""A race of gloo's own, seen once in some ten thousand starts: "connectFullMesh failed ..."."""


def processes(
    size: int, function: Callable[..., Any], *args: Any, timeout: float = limits.SECONDS, start: str = "fork"
) -> list[Any]:
    """function(rank, size, *args) in `size` gloo processes; their results by rank.

    A rank that raises fails the caller with its traceback. A rank that ends without an answer fails it with
    an error that has the answers of the others; one that hangs is killed after `timeout` seconds.
    `function` must be importable (a module-level function of a test file). Where CUDA is in use `start` must
    be "spawn". Ranks whose connections gloo did not make, before `function` ran, are started once more.
    """
    try:
        return _started(size, function, *args, timeout=timeout, start=start)
    except ConnectionError:
        return _started(size, function, *args, timeout=timeout, start=start)


def _started(size: int, function: Callable[..., Any], *args: Any, timeout: float, start: str) -> list[Any]:
    context = multiprocessing.get_context(start)
    with tempfile.TemporaryDirectory() as folder:
        results: Any = context.Queue()
        ranks = [
            context.Process(target=_process, args=(rank, size, folder, results, function, args))
            for rank in range(size)
        ]
        for process in ranks:
            process.start()
        found: dict[int, Any] = {}
        try:
            deadline = time.monotonic() + timeout
            while len(found) < size:
                try:
                    rank, result, error = pickle.loads(results.get(timeout=1))
                except queue.Empty:
                    missing = sorted(set(range(size)) - set(found))
                    if not any(ranks[r].is_alive() for r in missing) and results.empty():
                        words = f"ranks {missing} of {size} ended without an answer"
                        raise AssertionError(words, found) from None
                    if time.monotonic() > deadline:
                        for process in ranks:
                            process.kill()
                        raise limits.hit(f"ranks {missing} of {size} did not answer", timeout) from None
                    continue
                _check(rank, size, error)
                found[rank] = result
        finally:
            for process in ranks:
                process.join(timeout=limits.TO_END)
                if process.is_alive():
                    process.kill()
    return [found[rank] for rank in range(size)]


def _check(rank: int, size: int, error: str | None) -> None:
    if error is not None and UNCONNECTED in error:
        raise ConnectionError(error)
    assert error is None, f"rank {rank} of {size}:\n{error}"


def _process(
    rank: int, size: int, folder: str, results: Any, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    gc.freeze()  # all that came with the fork: to collect among that takes a quarter of a second, each time
    torch.set_num_threads(1)
    poison(True)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    try:
        store = dist.FileStore(f"{folder}/store", size)
        try:
            dist.init_process_group(
                "gloo", rank=rank, world_size=size, store=store, timeout=limits.OF_A_GROUP
            )
        except RuntimeError as error:
            if "connectFullMesh" in str(error):
                raise ConnectionError(UNCONNECTED) from error
            raise
        answer = (rank, function(rank, size, *args), None)
        results.put(pickle.dumps(answer))  # as bytes: tensors would stay in this process's shared memory
    except BaseException:
        said = traceback.format_exc()
        if " by peer" in said:  # another rank failed, and has more to say: it is heard first
            time.sleep(3)
        results.put(pickle.dumps((rank, None, said)))
        return
    with contextlib.suppress(RuntimeError):  # messages of a failed pass that nobody read reset connections
        dist.barrier()  # so that nobody leaves while others still work


def on_ranks(size: int, *before: Any) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Make a test of a function, which `size` ranks call with (rank, size, its parameters of the test).

    before: a function that the ranks call in its place, with (rank, size, the function, ...), and the rest
    of what comes before the parameters.
    """

    def made(function: Callable[..., Any]) -> Callable[..., None]:
        place, *rest = [*before[:1], function, *before[1:]] if before else [function]

        def test(**given: Any) -> None:
            processes(size, place, *rest, *given.values())

        parameters = inspect.signature(function).parameters.values()
        given = [each for each in parameters if before or each.name not in ("rank", "size")]
        test.__name__, test.__doc__ = function.__name__, function.__doc__
        test.__wrapped__ = function  # type: ignore[attr-defined] # where pytest says that the test is
        test.__signature__ = inspect.Signature(given)  # type: ignore[attr-defined]
        return test

    return made


def torchrun(size: int, *words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """`words` run as `size` ranks of torchrun: a script, or -m and a module, and arguments."""
    start = (sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone")
    paths = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    return limits.run(
        [*start, "--nproc-per-node", size, *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
        cwd=cwd,
    )


Mailboxes = partial(defaultdict, queue.Queue)
"""Makes what the threads of one simulated ring share: queues, by ranks, link and kind of message."""


class MailboxTransport:
    """A ring's Transport between threads of one process. A message is copied when it is posted."""

    def __init__(self, mail: dict[Any, queue.Queue[Any]], rank: int) -> None:
        self.mail, self.rank = mail, rank
        self.sent: Counter[int] = Counter()  # bytes, by peer
        self.abandoned: list[Any] = []

    def post(self, channel: Any, messages: Any) -> list[Any]:
        works = []
        for action, block in messages:
            if type(action).__name__ == "Send":
                box = self.mail[self.rank, action.peer, channel.link, channel.kind]
                box.put([tensor.clone() for tensor in block])
                self.sent[action.peer] += sum(tensor.nbytes for tensor in block)
            else:
                box = self.mail[action.peer, self.rank, channel.link, channel.kind]
                works.append(_Arrival(box, block))
        return works


class _Arrival:
    def __init__(self, box: queue.Queue[Any], into: Any) -> None:
        self.box, self.into = box, into
        for tensor in into:
            spoil(tensor)

    def wait(self) -> None:
        with others_turn():
            messages = limits.taken(self.box, failed=_ring.failed)
        for tensor, message in zip(self.into, messages, strict=True):
            tensor.copy_(message)


_ring = threading.local()
"""Of a thread of `threads`: the event that one has failed, for which others do not wait, and its turn."""


@contextlib.contextmanager
def others_turn() -> Iterator[None]:
    """While a thread of `threads` waits, another runs."""
    _ring.turn.release()
    try:
        yield
    finally:
        _ring.turn.acquire()


def threads(size: int, function: Callable[[int], Any]) -> list[Any]:
    """function(rank) in `size` threads, one at a time; their results by rank. The first error is raised here.

    Threads that all run wake each other at every operation of torch: that takes four times the CPU seconds.
    """
    found: dict[int, Any] = {}
    errors: list[BaseException] = []
    failed, turn = threading.Event(), threading.Lock()

    def run(rank: int) -> None:
        _ring.failed, _ring.turn = failed, turn
        try:
            with turn:
                found[rank] = function(rank)
        except BaseException as error:
            errors.append(error)
            failed.set()

    workers = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]
    return [found[rank] for rank in range(size)]
