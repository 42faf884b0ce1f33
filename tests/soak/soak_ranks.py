"""A rank of a soak: a process that makes steps as it is told, and says what it holds on to."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import itertools
import logging
import os
import random
import signal
import sys
import time
import traceback
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import limits
import torch
import torch.distributed as dist
from ranks import poison
from soak_figures import Held
from soak_steps import STEPS, Fault, Team

from burst_mcore import Topology
from burst_mcore.attention.runtime.topology import _forget_destroyed

_LIBC = ctypes.CDLL(None)


EVERY = 10
"""Orders after which a rank says what it holds."""


def held() -> Held:
    """Return what this process holds, without what the caches of the package may hold: they have bounds."""
    for name, module in list(sys.modules.items()):
        if name.startswith("burst_mcore."):
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear") and value.cache_parameters()["maxsize"]:
                    value.cache_clear()
    gc.collect()
    _LIBC.malloc_trim(0)  # memory that is free, but that malloc has kept, is no leak
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    descriptors = len(os.listdir("/proc/self/fd")) - 1  # one lists them
    return Held(os.getpid(), int(status["VmRSS"].split()[0]), int(status["Threads"]), descriptors)


def work(rank: int, size: int, pipe: Connection, stacks: Path) -> None:
    """Be a rank: answer each order of the supervisor, until it hangs up."""
    os.setsid()  # an interrupt of the supervisor's terminal is the supervisor's
    gc.freeze()  # what came with the fork
    faulthandler.register(signal.SIGUSR1, stacks.open("w"), all_threads=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    warnings.simplefilter("ignore")
    logging.disable()
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = False  # oneDNN keeps 0.5 MB for each shape in bfloat16, of 1024 shapes
    poison(True)
    for count in itertools.count(1):
        try:
            order = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            answer = ORDERS[order[0]](rank, size, pipe, *order[1:])
        except BaseException:
            answer = {"error": traceback.format_exc()}
        gc.collect()  # what an error left may hold connections, in which other ranks wait for this one
        pipe.send(answer if count % EVERY else answer | {"held": held()})


def _join(rank: int, size: int, pipe: Connection, address: str) -> dict[str, Any]:
    """Make the process groups anew, with whoever is here now."""
    _leave()
    dist.init_process_group(
        "gloo", init_method=address, rank=rank, world_size=size, timeout=limits.OF_A_GROUP
    )
    Topology.from_group(dist.group.WORLD, intra_size=1)
    return {}


def _leave() -> None:
    """Close all connections, as the end of this process would."""
    if dist.is_initialized():
        dist.destroy_process_group()
    _forget_destroyed()
    gc.collect()


def _step(rank: int, size: int, pipe: Connection, seed: str, name: str) -> dict[str, Any]:
    """Make a step that ends well on every rank."""
    return {"words": STEPS[name](random.Random(seed), Team(rank, size, pipe.send))}


def _fault(rank: int, size: int, pipe: Connection, seed: str, fault: Fault) -> dict[str, Any]:
    """Make calls until the fault is noticed; they go on in new groups."""

    def tell(how: str) -> None:
        pipe.send({"strikes": time.monotonic(), "how": how})

    words, when = fault.run(random.Random(seed), Team(rank, size, tell))
    _leave()  # ranks that wait in a collective of torch for this one
    return {"words": words, "noticed": when}


ORDERS = {"join": _join, "step": _step, "fault": _fault}
