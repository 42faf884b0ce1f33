"""Writes the table of docs/troubleshooting.md: what a rank does, what another is told, after how long.

Each scenario runs on two processes over gloo, with a time-out of ten minutes that none waits for. Seconds
count from the deed of rank 1, or from the call of rank 0 if that is later.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from tables import with_rows

from burst_mcore import BurstConfig, Mask, Topology, burst_attention
from burst_mcore.attention.kernels.table import KERNELS
from burst_mcore.loss import fused_linear_cross_entropy
from burst_mcore.torch import parallelize
from burst_mcore.transformers.data.loader import ShardedLoader

PAGE = Path(__file__).parents[1] / "troubleshooting.md"
HEAD = "| rank 1 | rank 0 is told | seconds | before |\n|---|---|---|---|\n"
BEFORE = {"is in another call": "no error", "waits in a collective of its own": "over 120"}
"""Seconds in release 0.2.0, by these scenarios with its names; of the others at most 0.1."""
MOST = 60
"""Characters of an error in the table."""
DOCUMENTS = [0, 5, 16], [0, 16], [0, 3, 9, 16]


class Ranks(NamedTuple):
    """What a scenario has on its rank, 0 or 1."""

    rank: int
    did: Callable[[], None]
    """Notes the time of the deed of rank 1, and lets rank 0 go on from `until_it_did`."""
    until_it_did: Callable[[], None]

    @property
    def odd(self) -> bool:
        return self.rank == 1


def _attend(topology: Topology, heads: int = 4, kernel: str = "auto", **options: Any) -> torch.Tensor:
    q, k, v = (torch.ones(1, 8, heads, 16, requires_grad=True) for _ in range(3))
    how = {"mask": Mask.causal(), "config": BurstConfig(kernel=kernel), **options}
    out: Any = burst_attention(q, k, v, topology=topology, **how)
    return out.sum()


def _ring() -> Topology:
    return Topology.from_group(dist.group.WORLD)


def _gives_another_mask(ranks: Ranks) -> None:
    topology = _ring()
    _attend(topology)
    ranks.did()
    _attend(topology, mask=Mask.full() if ranks.odd else Mask.causal())


def _has_other_documents(ranks: Ranks) -> None:
    topology = _ring()
    for ends in DOCUMENTS[:2]:
        _attend(topology, mask=Mask.causal() & Mask.documents(ends)).backward()
    ranks.did()
    _attend(topology, mask=Mask.causal() & Mask.documents(DOCUMENTS[2 * ranks.odd])).backward()


def _gives_illegal_arguments(ranks: Ranks) -> None:
    topology = _ring()
    _attend(topology)
    ranks.did()
    try:
        _attend(topology, heads=0 if ranks.odd else 4)
    finally:
        time.sleep(ranks.rank)  # its process goes on


def _within_a_kernel(ranks: Ranks, deed: Callable[[], Any]) -> None:
    real = KERNELS["reference"]

    def backward(*args: Any, **kwargs: Any) -> Any:
        if ranks.odd:
            ranks.did()
            deed()
        return real.backward(*args, **kwargs)

    KERNELS["reference"] = replace(real, backward=backward)
    _attend(_ring(), kernel="reference", mask=Mask.full()).backward()


def _runs_out_of_memory(ranks: Ranks) -> None:
    def full() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    _within_a_kernel(ranks, full)


def _is_killed_in_a_pass(ranks: Ranks) -> None:
    _within_a_kernel(ranks, lambda: os.kill(os.getpid(), signal.SIGKILL))


def _is_killed_between_calls(ranks: Ranks) -> None:
    topology = _ring()
    _attend(topology)
    ranks.did()
    if ranks.odd:
        os.kill(os.getpid(), signal.SIGKILL)
    _attend(topology)


def _is_interrupted(ranks: Ranks) -> None:
    topology = _ring()
    _attend(topology)
    if not ranks.odd:
        ranks.until_it_did()
    else:
        threading.Timer(0.3, lambda: (ranks.did(), os.kill(os.getpid(), signal.SIGINT))).start()
    _attend(topology)


def _parallel() -> Any:
    model = torch.nn.Linear(2, 2)
    return parallelize(model, dist.group.WORLD, loss="model")  # type: ignore[arg-type]


def _is_in_another_call(ranks: Ranks) -> None:
    cp, ids = _parallel(), torch.arange(16)[None]
    ranks.did()
    next(iter(cp.loader([ids]))) if ranks.odd else cp.shard({"input_ids": ids})


def _waits_in_a_collective(ranks: Ranks) -> None:
    cp, ids = _parallel(), torch.arange(16)[None]
    ranks.did()
    dist.all_reduce(torch.ones(1)) if ranks.odd else cp.shard({"input_ids": ids})


def _has_other_batches(ranks: Ranks) -> None:
    loader = ShardedLoader([torch.arange(16)[None] + ranks.rank], group=dist.group.WORLD)
    ranks.did()
    next(iter(loader))


def _has_an_illegal_label(ranks: Ranks) -> None:
    labels = torch.full((8,), 3.0 if ranks.odd else 3, dtype=torch.float32 if ranks.odd else torch.int64)
    hidden, weight = torch.ones(8, 4), torch.ones(16, 4)
    ranks.did()
    fused_linear_cross_entropy(hidden, weight, labels, cp_group=dist.group.WORLD)


SCENARIOS: dict[str, Callable[[Ranks], None]] = {
    "gives another mask": _gives_another_mask,
    "differs in a call that went ahead": _has_other_documents,
    "gives illegal arguments": _gives_illegal_arguments,
    "gives the loss illegal labels": _has_an_illegal_label,
    "has another batch": _has_other_batches,
    "is in another call": _is_in_another_call,
    "waits in a collective of its own": _waits_in_a_collective,
    "runs out of memory in a kernel": _runs_out_of_memory,
    "is interrupted (Ctrl-C)": _is_interrupted,
    "is killed in a pass": _is_killed_in_a_pass,
    "is killed between calls": _is_killed_between_calls,
}
"""What rank 1 does."""


def _process(rank: int, name: str, folder: str, told: Any) -> None:
    torch.set_num_threads(1)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - what threads and killed ranks log
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=store, timeout=timedelta(minutes=10))
    deed, began = f"{folder}/deed", [time.time()]

    def did() -> None:
        began[0] = time.time()
        if rank == 1:
            Path(deed).write_text(str(began[0]))

    def until_it_did() -> None:
        while not os.path.exists(deed):
            time.sleep(0.01)
        began[0] = time.time()

    text = "no error"
    try:
        SCENARIOS[name](Ranks(rank, did, until_it_did))
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
    end = time.time()
    if rank == 0:
        of_deed = float(Path(deed).read_text())
        told.put((text, end - max(began[0], of_deed)))
        time.sleep(0.2)
    os._exit(0)


def run(name: str) -> tuple[str, float]:
    """Return what rank 0 is told in a scenario, and after how many seconds."""
    context = multiprocessing.get_context("fork")
    told: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=_process, args=(rank, name, folder, told)) for rank in range(2)]
        for process in processes:
            process.start()
        with _ended(processes):
            answer: tuple[str, float] = told.get(timeout=120)
    return answer


@contextlib.contextmanager
def _ended(processes: Iterable[Any]) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def row(name: str) -> str:
    """Return the row of a scenario."""
    text, seconds = run(name)
    return f"| {name} | `{_brief(text)}` | {_rounded(seconds)} | {BEFORE.get(name, '0.1')} |"


def _brief(text: str) -> str:
    text = re.sub(r"\S*/(\w+\.py:)\d+", r"\1...", " ".join(text.split())).replace("|", "/").replace("`", "'")
    return textwrap.shorten(text, MOST, placeholder=" ...")


def _rounded(seconds: float) -> str:
    return f"{seconds:.0f}" if seconds >= 1 else "0.1" if seconds < 0.1 else f"{seconds:.1f}"


if __name__ == "__main__":
    if sys.argv[1:] == ["--print"]:
        for name in SCENARIOS:
            sys.stdout.write(f"{name} | {run(name)}\n")
            sys.stdout.flush()
    else:
        PAGE.write_text(with_rows(PAGE.read_text(), HEAD, map(row, SCENARIOS)))
