"""Starts the ranks of a Megatron run on this machine, follows its metrics, and says what ended it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.util import tensor_util
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std, start_processes

HERE = Path(__file__).resolve().parent
logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # what it says, JobFailedError says

LOSS, NORM = "lm loss", "grad-norm"


class JobFailedError(RuntimeError):
    """A rank ended before the run did; the message says which and why."""


@dataclass(frozen=True)
class Iteration:
    """What Megatron reported of one iteration."""

    iteration: int
    loss: float
    """Mean over the iteration's tokens, in nats a token."""
    grad_norm: float
    seconds: float | None
    """Since the iteration before; None at the first of a run."""


class Job:
    """One training run.

    Args:
        folder: where its logs (`log/`), TensorBoard events (`events/`) and metrics (`metrics.jsonl`) go.
        processes: ranks to start here.
        arguments: Megatron's arguments.
    """

    def __init__(self, folder: Path, processes: int, arguments: Sequence[str]) -> None:
        self.folder, self.processes = folder, processes
        self.events = folder / "events" / time.strftime("%Y%m%d-%H%M%S")
        self.arguments = [
            *arguments,
            *("--log-interval", "1"),
            *("--tensorboard-dir", str(self.events)),
            *("--tensorboard-queue-size", "1"),
            *("--tensorboard-log-interval", "1"),
        ]

    def run(self) -> Iterator[Iteration]:
        """Start, yield each iteration as Megatron reports it, return when all ranks have ended well.

        Every iteration is appended to metrics.jsonl. Leaving the generator ends the ranks.

        Raises:
            JobFailedError: a rank failed; the others have been ended.
            KeyboardInterrupt: this process was asked to end.
        """
        self.events.mkdir(parents=True, exist_ok=True)
        log = self.folder / "log"
        log.mkdir(exist_ok=True)
        command = ("-m", "burst_mcore.megatron", str(HERE / "train_bytes_gpt.py"), *self.arguments)
        port = _free_port()
        ranks = range(self.processes)
        context = start_processes(
            name="rank",
            entrypoint=sys.executable,
            args=dict.fromkeys(ranks, command),
            envs={rank: self._environment(rank, port) for rank in ranks},
            logs_specs=DefaultLogsSpecs(log_dir=str(log), redirects=Std.ALL),
        )
        try:
            with (self.folder / "metrics.jsonl").open("a") as metrics:
                reader, ended = _Events(self.events), None
                while ended is None:
                    ended = context.wait(timeout=0.2, period=0.1)
                    for iteration in reader.new():
                        metrics.write(json.dumps(asdict(iteration)) + "\n")
                        metrics.flush()
                        yield iteration
            if ended.is_failed():
                raise JobFailedError(_why(ended.failures, ended.stderrs))
        except SignalException as signalled:  # torch's handler, in the place of Python's
            raise KeyboardInterrupt from signalled
        finally:
            pids = list(context.pids().values())
            context.close()
            # Each rank leads a session: end what it started and, if it was killed, left behind.
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)

    def _environment(self, rank: int, port: int) -> dict[str, str]:
        path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.processes),
            "LOCAL_WORLD_SIZE": str(self.processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "PYTHONPATH": path,
            "PYTHONWARNINGS": "ignore",
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // self.processes)),
        }


class _Events:
    """The iterations in a folder of TensorBoard events, as they come."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._loaders: dict[Path, EventFileLoader] = {}
        self._partial: dict[int, dict[str, float]] = {}
        self._before: float | None = None

    def new(self) -> Iterator[Iteration]:
        for path in sorted(self._folder.glob("events.*")):
            loader = self._loaders.setdefault(path, EventFileLoader(str(path)))
            for event in loader.Load():
                for value in event.summary.value:
                    if value.tag in (LOSS, NORM):
                        seen = self._partial.setdefault(event.step, {})
                        seen[value.tag] = float(tensor_util.make_ndarray(value.tensor))
                        if len(seen) == 2:
                            yield self._iteration(event.step, event.wall_time)

    def _iteration(self, step: int, now: float) -> Iteration:
        seen, before = self._partial.pop(step), self._before
        self._before = now
        return Iteration(step, seen[LOSS], seen[NORM], None if before is None else now - before)


def _free_port() -> int:
    """Return a free port, below those that systems give to connections at any time."""
    while True:
        port = random.SystemRandom().randrange(15000, 32000)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def _why(failures: dict[int, Any], logs: dict[int, str]) -> str:
    """Which rank ended the run, and how. Those that were told to end (SIGTERM) did not."""
    own = [failure for failure in failures.values() if failure.exitcode != -signal.SIGTERM]
    first = min(own or failures.values(), key=lambda failure: (failure.exitcode >= 0, failure.timestamp))
    if first.exitcode < 0:
        return f"rank {first.local_rank} was killed ({first.signal_name()})"
    log = Path(logs[first.local_rank])
    lines = [re.sub(r"^\[rank\d+\]: *", "", line) for line in log.read_text(errors="replace").splitlines()]
    said = re.compile(r"[\w.]*(Error|Exception)\b|\S+: error: ")
    words = next((line for line in reversed(lines) if said.match(line)), "no error message")
    return f"rank {first.local_rank} failed: {words} (log: {log})"
