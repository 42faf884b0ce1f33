"""Double rings, head x ring and their product over gloo: exactness, delays, deaths and failures."""

import gc
import logging
import os
import queue
import random
import signal
import time
import weakref
from dataclasses import replace

import limits
import pytest
import torch
import torch.distributed as dist
from dense import assert_as_exact_as, dense, problem, single_kernel
from masks import MASKS, layouts
from ranks import MailboxTransport, others_turn, processes, spoil
from sharded import own_results, whole_results
from test_simulation import simulate
from torch.distributed.distributed_c10d import _get_default_store

from burst_mcore import BurstConfig, Layout, Mask, Topology
from burst_mcore.attention.geometry.shard import Ranks
from burst_mcore.attention.kernels import table
from burst_mcore.attention.kernels.table import KERNELS
from burst_mcore.attention.schedule.actions import Send
from burst_mcore.attention.schedule.heads import legal_degrees
from burst_mcore.attention.schedule.route import Route

HEADS = {"mha": (8, 8), "gqa": (8, 2), "mqa": (8, 1)}
CLUSTERS = [(1, 2), (2, 1), (1, 3), (2, 2)]
LARGER = [(3, 1), (1, 4), (4, 1), (2, 3), (3, 2), (2, 4), (4, 2)]


def _cases(nodes, intra, heads, kv_heads):
    """Every legal degree on the double ring, both directions; the rest in turn, so that all of it is met."""
    ranks = Ranks(nodes * intra, intra)
    draw = random.Random(f"{nodes} {intra} {heads} {kv_heads}")
    for degree in legal_degrees(ranks, heads, kv_heads):
        for direction in ("query", "kv"):
            yield (
                BurstConfig(
                    backward=direction,
                    head_parallel=degree,
                    head_placement=draw.choice(("inner", "outer")),
                    layout=draw.choice(layouts(nodes * intra)),
                    ring=draw.choice(("double", "double", "flat", "direct")),
                    overlap=draw.random() < 0.75,
                ),
                MASKS[draw.choice(("causal", "causal", "full"))],
            )


def _exact(rank, size, intra, dtype):
    topology = Topology.from_group(dist.group.WORLD, intra_size=intra)
    for name, (heads, kv_heads) in HEADS.items():
        for i, (config, mask) in enumerate(_cases(size // intra, intra, heads, kv_heads)):
            # On CPUs without AVX-512 the error of torch's kernel in lse, bfloat16, is on 8 keys 1.95 times
            # that on 64 (6.4e-5, 3.3e-5): tiles are longer.
            n = (8 if dtype.itemsize > 2 else 24) * Layout.of(config.layout).divisor(size)
            p = problem(size, n, batch=2, heads=heads, kv_heads=kv_heads, head_dim=32, dtype=dtype)
            got = whole_results(p, mask, rank, size, config, topology)
            if i % size != rank:  # all hold the same, and one of them looks at it
                continue
            bar = single_kernel(p, KERNELS["aten-cpu"], mask)
            try:
                assert_as_exact_as(got, bar, dense(p, mask))
            except AssertionError as e:
                raise AssertionError(f"{name} {config} {mask}: {e}") from e


@pytest.mark.parametrize(
    ("nodes", "intra", "dtype"),
    [
        *((*cluster, torch.bfloat16) for cluster in CLUSTERS),
        *(pytest.param(*cluster, torch.bfloat16, marks=pytest.mark.slow) for cluster in LARGER),
        *(pytest.param(*cluster, torch.float32, marks=pytest.mark.slow) for cluster in CLUSTERS),
    ],
    ids=str,
)
def test_as_exact_as_the_kernel_alone(nodes, intra, dtype):
    processes(nodes * intra, _exact, intra, dtype)


class ChaosTransport(MailboxTransport):
    """Every message takes its own time, and reads what it sends only when it arrives: a rendezvous."""

    def __init__(self, mail, rank):
        super().__init__(mail, rank)
        self.draw = random.Random(rank)

    def post(self, channel, messages):
        with others_turn():
            time.sleep(self.draw.random() * 0.004)
        works = []
        for action, block in messages:
            ends = (self.rank, action.peer) if isinstance(action, Send) else (action.peer, self.rank)
            box = self.mail[(*ends, channel.link, channel.kind)]
            if isinstance(action, Send):
                works.append(_Sent(queue.Queue()))
                box.put((block, works[-1].taken))
            else:
                for tensor in block:
                    spoil(tensor)
                works.append(_Late(box, block, self.draw.random() * 0.004))
        return works


class _Sent:
    def __init__(self, taken):
        self.taken = taken

    def wait(self):
        with others_turn():
            limits.taken(self.taken)


class _Late:
    def __init__(self, box, into, seconds):
        self.box, self.into, self.seconds = box, into, seconds

    def wait(self):
        with others_turn():
            time.sleep(self.seconds)
            sent, taken = limits.taken(self.box)
        for tensor, message in zip(self.into, sent, strict=True):
            tensor.copy_(message)
        taken.put(True)


@pytest.mark.parametrize("direction", ["query", "kv"])
@pytest.mark.parametrize("route", [Route(1, 4), Route(2, 3), Route(2, 2, 2), Route(3, 2)], ids=str)
def test_delays_change_nothing(route, direction):
    p = problem(3, 4 * Layout("zigzag").divisor(route.size), heads=4, kv_heads=2, head_dim=8)
    calm, _, _ = simulate(p, Mask.causal(), "zigzag", route, direction)
    wild, _, _ = simulate(p, Mask.causal(), "zigzag", route, direction, transport=ChaosTransport)
    assert all(torch.equal(a, b) for a, b in zip(calm, wild, strict=True))


def _watch_kernel(rank, at, act):
    """Let `act` happen within call number `at` of rank 1's local kernel "reference"."""
    real, calls = KERNELS["reference"], []

    def watched(function):
        def call(*args, **kwargs):
            calls.append(1)
            if rank == 1 and len(calls) == at:
                act()
            return function(*args, **kwargs)

        return call

    table.choose.cache_clear()  # of the process that this one was forked from
    forward, backward = watched(real.forward), watched(real.backward)
    KERNELS["reference"] = replace(real, forward=forward, backward=backward)


def _told(rank, size, intra, config):
    """The error of a call, with its cause, and after how long it came; that of the call behind it."""
    topology = Topology.from_group(dist.group.WORLD, intra_size=intra)
    dist.barrier, found = (
        lambda: None,
        [],
    )  # ranks.processes ends with one, and there may be nobody left to meet
    for _ in range(2):
        start = time.monotonic()
        with pytest.raises((MemoryError, RuntimeError, ValueError)) as caught:
            own_results(problem(0, 16 * size, heads=4), Mask.full(), rank, size, config, topology)
        found.append((f"{caught.value} <- {caught.value.__cause__}", time.monotonic() - start))
    return found


def _dies(rank, size, intra, config, at):
    """Rank 1 is killed in the middle of a pass; what the others see."""
    _watch_kernel(rank, at, lambda: os.kill(os.getpid(), signal.SIGKILL))
    return _told(rank, size, intra, config)[0]


@pytest.mark.parametrize(
    ("intra", "at", "head_parallel", "direction"), [(4, 2, 1, "query"), (2, 6, 1, "kv"), (2, 3, 2, "query")]
)
def test_a_rank_that_dies_in_mid_ring_is_an_error_that_says_where(intra, at, head_parallel, direction):
    config = BurstConfig(kernel="reference", head_parallel=head_parallel, backward=direction)
    with pytest.raises(AssertionError, match=r"ranks \[1\] of 4 ended without an answer") as caught:
        processes(4, _dies, intra, config, at)
    for _, (message, seconds) in caught.value.args[1].items():
        assert "has gone" in message or ("message of step" in message and "from ranks" in message), message
        assert seconds < limits.AT_ONCE
    assert any("message of step" in message for message, _ in caught.value.args[1].values())


def _out_of_memory():
    raise MemoryError("no memory left")


def _fails_once(rank, size, config, at):
    """Rank 1's local kernel fails, as when memory runs out, and the caller goes on to the next batch."""
    _watch_kernel(rank, at, _out_of_memory)
    return _told(rank, size, 2, config)


@pytest.mark.parametrize(("at", "direction"), [(1, "query"), (2, "kv"), (5, "query"), (6, "kv")])
@pytest.mark.filterwarnings("ignore")
def test_a_kernel_that_fails_on_one_rank_is_an_error_of_all_that_tells_why(at, direction):
    answers = processes(4, _fails_once, BurstConfig(kernel="reference", backward=direction), at)
    for rank, ((message, seconds), (later, _)) in enumerate(answers):
        assert seconds < limits.AT_ONCE and "no memory left" in message and "no memory left" in later, answers
        assert ("rank 1 of the ring" in message) == (rank != 1), answers


def _lets_go(rank, size, at):
    """Rank 1 fails; whether groups and tensors of the call are gone once its groups are destroyed."""
    logging.getLogger().handlers.clear()  # pytest's, which would keep the errors that are logged
    _fails_once(rank, size, BurstConfig(kernel="reference"), at)
    communicators = Topology.from_group(dist.group.WORLD, intra_size=2).communicators
    old = [weakref.ref(x) for x in (communicators, communicators.control, communicators.agreement)]
    del communicators
    store = dist.PrefixStore("anew", _get_default_store())
    dist.destroy_process_group()
    dist.init_process_group("gloo", rank=rank, world_size=size, store=store)
    own_results(problem(0, 16 * size, heads=4), Mask.full(), rank, size, BurstConfig(kernel="aten-cpu"))
    limits.until(
        lambda: gc.collect() >= 0 and not any(ref() for ref in old), "what a pass held is not let go"
    )
    return True


@pytest.mark.parametrize("at", [2, 6])
@pytest.mark.filterwarnings("ignore")
def test_a_pass_that_failed_is_not_held_for_ever(at):
    """An error that is kept has frames, and these have the tensors and the groups of the call."""
    assert all(processes(4, _lets_go, at))
