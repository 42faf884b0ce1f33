"""An emulated cluster on one machine: each rank has its own network, joined by a bridge with shaped links.

A rank's traffic is limited by destination: fast to its node, slow to others. Needs Linux, root, iproute2.

The networks have no names. They belong to the processes in them and vanish with the last one, and every
process dies with its parent, so that nothing is left behind, however the run ends.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from burst_bench.core import first_line
from burst_bench.launch import in_processes
from burst_mcore.attention.geometry.shard import Ranks
from burst_mcore.rates import Rates

_PR_SET_PDEATHSIG = 1
_NETWORK = "10.77"
"""Node m has 10.77.m.0/24. Nothing leaves the bridge: its network has no route out."""


def missing() -> str | None:
    """Return, as text, the requirement that this machine lacks; None if it can emulate a cluster."""
    if sys.platform != "linux" or not hasattr(os, "unshare"):
        return "Linux and Python 3.12 (os.unshare)"
    lacking = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if lacking:
        return f"iproute2: there is no {' and no '.join(lacking)} on the PATH (Debian: apt install iproute2)"
    if os.geteuid() != 0:
        return "root, to make network namespaces and shape their links (run it with sudo)"
    return _why_not()


@lru_cache
def _why_not() -> str | None:
    """Try all requirements once, in a separate process."""
    code = "from burst_bench import emulate; emulate._try()"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if process.returncode == 0:
        return None
    return f"network namespaces, bridges and htb, which fail here: {process.stderr.strip().splitlines()[-1]}"


def _try() -> None:
    os.unshare(os.CLONE_NEWNET)
    cable = "link add eth0 type veth peer name rank0"
    _ip("link add bridge type bridge", cable, "link set rank0 master bridge")
    _shape(0, Ranks(1, 1), Rates(intra=1e6, inter=1e6, compute=1.0))


def run(
    ranks: Ranks, rates: Rates, function: Callable[..., Any], *args: Any, timeout: float = 3600
) -> list[Any]:
    """Run function(rank, size, *args) on every rank of the cluster, over gloo; return results by rank.

    Links carry the `intra` and `inter` of `rates`; `timeout` is in seconds, for the whole. Raises a
    RuntimeError if a rank failed or did not end in time. The machine must not lack anything: see `missing`.
    """
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, initializer=_die_with, initargs=(os.getpid(),)) as pool:
        hub, results = pool.submit(os.getpid).result(), pool.submit(_hub, ranks, rates, function, args)
        try:
            return results.result(timeout)
        except TimeoutError:
            os.kill(hub, signal.SIGKILL)  # and the ranks with it
            raise RuntimeError(
                f"the emulated cluster did not end within {timeout:g} s: a rank hangs, or the machine is slow"
            ) from None


def _hub(ranks: Ranks, rates: Rates, function: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
    """Own the bridge, as the parent of all ranks."""
    os.unshare(os.CLONE_NEWNET)
    _ip("link add bridge type bridge", "link set bridge mtu 9000 up")
    plug_in, fork = partial(_plug_in, os.getpid(), ranks, rates), multiprocessing.get_context("fork")
    try:
        return in_processes(ranks.size, function, *args, context=fork, before=plug_in)
    except BrokenProcessPool:
        raise RuntimeError("a rank of the emulated cluster was killed") from None
    except Exception as error:
        raise RuntimeError(f"the emulated cluster failed: {first_line(error)}") from error


def _plug_in(hub: int, ranks: Ranks, rates: Rates, rank: int) -> None:
    """Move this process to a new network, with a cable to the bridge."""
    _die_with(hub)
    bridged = os.open("/proc/self/ns/net", os.O_RDONLY)
    os.unshare(os.CLONE_NEWNET)
    network = os.open("/proc/self/ns/net", os.O_RDONLY)
    _ip(f"link add eth0 type veth peer name rank{rank} netns {hub}")
    os.setns(bridged)
    _ip(f"link set rank{rank} mtu 9000 master bridge up")
    os.setns(network)
    _shape(rank, ranks, rates)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before this check
        os._exit(1)


def _shape(rank: int, ranks: Ranks, rates: Rates) -> None:
    """Set the address and the links of a rank, from inside its network."""
    node = rank // ranks.intra
    others = (other for other in range(ranks.size) if other != rank)
    _ip(
        "link set lo up",
        f"addr add {_address(rank, ranks)}/16 dev eth0",
        # Nobody asks for addresses: Linux remembers 1024 answers for all networks, and 32 ranks ask for 992.
        f"link set eth0 address {_hardware(rank)}",
        *(f"neigh add {_address(o, ranks)} lladdr {_hardware(o)} dev eth0 nud permanent" for o in others),
        # One packet at a time: large ones of several connections, queued before a slow link, keep each other
        # waiting until their senders take them for lost and send them again.
        "link set eth0 mtu 9000 gso_max_segs 1 up",
    )
    for name, value in (
        ("tcp_congestion_control", "reno"),
        ("tcp_slow_start_after_idle", "0"),
        # A sent message is in flight, not in a large buffer: else the next would share its link.
        ("tcp_wmem", "4096 32768 32768"),
    ):
        Path(f"/proc/sys/net/ipv4/{name}").write_text(value)
    # Classes: the rank's node, the others, and short packets (acknowledgements), which must not queue.
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


def _address(rank: int, ranks: Ranks) -> str:
    return f"{_NETWORK}.{rank // ranks.intra}.{rank % ranks.intra + 1}"


def _hardware(rank: int) -> str:
    """Return the hardware address of a rank's end of its cable; 02: it is given by hand."""
    return f"02:00:00:00:{rank // 256:02x}:{rank % 256:02x}"


def _batch(tool: str, *commands: str) -> None:
    process = subprocess.run(
        [tool, "-batch", "-"], input="\n".join(commands), capture_output=True, text=True, check=False
    )
    if process.returncode != 0:
        raise RuntimeError(f"{tool} failed: {process.stderr.strip()} (commands: {'; '.join(commands)})")


_ip = partial(_batch, "ip")
