"""An emulated cluster on one machine: every rank in a network of its own, joined by a bridge, links shaped.

What a rank sends is limited by destination: fast to its own node, slow to others. Linux, root, iproute2.

The networks have no names. They belong to the processes in them and vanish with the last one, and every
process dies with its parent, so that nothing is left behind, however the run ends.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from burst_mcore.attention.autotune.choose import Ranks
from burst_mcore.rates import Rates

_PR_SET_PDEATHSIG = 1
_COLLECTIVE_TIMEOUT = timedelta(seconds=60)
_NETWORK = "10.77"
"""Node m has 10.77.m.0/24. Nothing leaves the bridge, which is in a network without a way out."""


def missing() -> str | None:
    """Return, in words, what this machine lacks to emulate a cluster; None if nothing."""
    if sys.platform != "linux" or not hasattr(os, "unshare"):
        return "Linux and Python 3.12 (os.unshare)"
    lacking = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if lacking:
        return f"iproute2: there is no {' and no '.join(lacking)} on the PATH (Debian: apt install iproute2)"
    if os.geteuid() != 0:
        return "root, to make network namespaces and shape their links (run it with sudo)"
    return _why_not()


def require() -> None:
    """Raise a RuntimeError if this machine cannot emulate a cluster."""
    if (lacks := missing()) is not None:
        raise RuntimeError(f"the emulated cluster needs {lacks}")


@lru_cache
def _why_not() -> str | None:
    """Try all that is needed once, in a process of its own."""
    code = "from burst_mcore.bench import emulate; emulate._try()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    return f"network namespaces, bridges and htb, which fail here: {done.stderr.strip().splitlines()[-1]}"


def _try() -> None:
    os.unshare(os.CLONE_NEWNET)
    _ip(
        "link add bridge type bridge",
        "link add eth0 type veth peer name rank0",
        "link set rank0 master bridge",
    )
    _shape(0, Ranks(1, 1), Rates(intra=1e6, inter=1e6, compute=1.0))


def run(
    ranks: Ranks, rates: Rates, function: Callable[..., Any], *args: Any, timeout: float = 3600
) -> list[Any]:
    """function(rank, size, *args) on every rank of the cluster, over gloo; their results by rank.

    Args:
        ranks: how many in all, and on each node.
        rates: `intra` and `inter` are what the links carry.
        function: importable from its module.
        args: picklable.
        timeout: seconds for the whole.

    Raises:
        RuntimeError: the machine cannot emulate a cluster, or a rank failed or did not end in time.
    """
    require()
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    hub = context.Process(target=_hub, args=(os.getpid(), ranks, rates, function, args, results))
    hub.start()
    found: dict[int, Any] = {}
    try:
        deadline = time.monotonic() + timeout
        while len(found) < ranks.size:
            rank, result, error = pickle.loads(results.get(timeout=deadline - time.monotonic()))
            if error is not None:
                raise RuntimeError(f"rank {rank} of the emulated cluster failed:\n{error}")
            found[rank] = result
    except (queue.Empty, ValueError):  # ValueError: the deadline is behind us
        raise RuntimeError(f"the emulated cluster did not end within {timeout} s") from None
    finally:
        hub.kill()  # and the ranks with it
        hub.join()
    return [found[rank] for rank in range(ranks.size)]


def _hub(
    parent: int, ranks: Ranks, rates: Rates, function: Callable[..., Any], args: tuple[Any, ...], results: Any
) -> None:
    """Holds the bridge; the parent of all ranks."""
    try:
        _die_with(parent)
        os.unshare(os.CLONE_NEWNET)
        _ip("link add bridge type bridge", "link set bridge mtu 9000 up")
        with tempfile.TemporaryDirectory() as folder:
            for rank in range(ranks.size):
                ready, go = os.pipe(), os.pipe()
                pid = os.fork()
                if pid == 0:
                    _rank(rank, ranks, rates, folder, ready[1], go[0], function, args, results)
                _join(pid, rank, ready[0], go[1])
            for _ in range(ranks.size):
                pid, status = os.wait()
                if status:  # a rank that fails says so itself, and exits with 0
                    raise RuntimeError(f"a rank (process {pid}) was killed, wait status {status}")
    except BaseException:
        results.put(pickle.dumps((-1, None, traceback.format_exc())))
        raise
    signal.pause()  # until the results are read


def _join(pid: int, rank: int, ready: int, go: int) -> None:
    """Put a cable between the bridge and the rank, once it has a network."""
    os.read(ready, 1)
    _ip(
        f"link add rank{rank} type veth peer name eth0 netns {pid}",
        f"link set rank{rank} mtu 9000 master bridge up",
    )
    os.write(go, b"!")


def _rank(
    rank: int,
    ranks: Ranks,
    rates: Rates,
    folder: str,
    ready: int,
    go: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    results: Any,
) -> None:
    """Run a rank's whole life; never return."""
    answer: tuple[Any, ...]
    try:
        _die_with(os.getppid())
        os.unshare(os.CLONE_NEWNET)
        os.write(ready, b"!")
        os.read(go, 1)
        _shape(rank, ranks, rates)
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        torch.set_num_threads(1)
        store = dist.FileStore(f"{folder}/store", ranks.size)  # type: ignore[attr-defined]
        dist.init_process_group(
            "gloo", rank=rank, world_size=ranks.size, store=store, timeout=_COLLECTIVE_TIMEOUT
        )
        answer = rank, function(rank, ranks.size, *args), None
        dist.barrier()
    except BaseException:
        answer = rank, None, traceback.format_exc()
    results.put(pickle.dumps(answer))
    results.close()
    results.join_thread()
    os._exit(0)


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before we asked
        os._exit(1)


def _shape(rank: int, ranks: Ranks, rates: Rates) -> None:
    """Address and links of a rank, from inside its network."""
    node, local = divmod(rank, ranks.intra)
    _ip(
        "link set lo up",
        f"addr add {_NETWORK}.{node}.{local + 1}/16 dev eth0",
        # One packet at a time: large ones of several connections, queued before a slow link, keep each other
        # waiting until their senders take them for lost and send them again.
        "link set eth0 mtu 9000 gso_max_segs 1 up",
    )
    for name, value in (
        ("tcp_congestion_control", "reno"),
        ("tcp_slow_start_after_idle", "0"),
        # A message that is sent is on its way, not in a large buffer: else the next would share its link.
        ("tcp_wmem", "4096 32768 32768"),
    ):
        Path(f"/proc/sys/net/ipv4/{name}").write_text(value)
    # Classes: the own node, the others, and short packets (acknowledgements), which must not queue.
    intra, inter = (f"{int(rate * 8)}bit" for rate in (rates.intra, rates.inter))
    is_short = "match u16 0 0xff00 at 2 match ip protocol 6 0xff"
    filters = "filter add dev eth0 parent 1: protocol ip"
    _batch(
        "tc",
        "qdisc add dev eth0 root handle 1: htb default 0",
        f"class add dev eth0 parent 1: classid 1:1 htb rate {intra} burst 10k cburst 10k quantum 60000",
        f"class add dev eth0 parent 1: classid 1:2 htb rate {inter} burst 2k cburst 2k quantum 60000",
        "class add dev eth0 parent 1: classid 1:3 htb rate 1gbit quantum 60000",
        f"{filters} prio 1 u32 {is_short} flowid 1:3",
        f"{filters} prio 2 u32 match ip dst {_NETWORK}.{node}.0/24 flowid 1:1",
        f"{filters} prio 3 u32 match ip dst {_NETWORK}.0.0/16 flowid 1:2",
    )


def _ip(*commands: str) -> None:
    _batch("ip", *commands)


def _batch(tool: str, *commands: str) -> None:
    done = subprocess.run(
        [tool, "-batch", "-"], input="\n".join(commands), capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{tool} failed: {done.stderr.strip()} (commands: {'; '.join(commands)})")
