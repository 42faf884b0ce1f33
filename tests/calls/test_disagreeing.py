"""Ranks whose calls differ, and ranks that refuse, go or are interrupted: all get an error, none hangs."""

import os
import signal
import sys
import threading
import time

import limits
import pytest
import torch
import torch.distributed as dist
from dense import problem
from ranks import on_ranks, processes
from test_bad_input import LATENT, C, attend
from torch.distributed.distributed_c10d import _get_default_store

from burst_mcore import BurstConfig, Mask, Topology, burst_attention
from burst_mcore.agreement.agreement import Ring
from burst_mcore.attention import resolve


def _disagree(rank, size):
    """Rank 1 does something else, again and again; the message that each rank gets, and after how long.

    Right calls work before and afterwards, but for the first.
    """
    topology = Topology.from_group(dist.group.WORLD)
    odd = rank == 1
    calls = {
        "first": {"q": (1, 16 if odd else 8, 4, 16)},
        "length": {"q": (1, 16 if odd else 8, 4, 16)},
        "short": {"q": (1, 7 if odd else 8, 4, 16)},
        "shape": {"q": (2 if odd else 1, 8, 4, 16)},
        "documents": {"mask": Mask.documents([0, 30])},
        "dtype": {"dtypes": (torch.bfloat16 if odd else torch.float32,) * 3},
        "mask": {"mask": Mask.full() if odd else Mask.causal()},
        "scale": {"softmax_scale": 0.5 if odd else 0.25},
        "backward": {"config": BurstConfig(backward="kv" if odd else "query")},
        "layout": {"config": BurstConfig(layout="contiguous" if odd else "zigzag")},
        "kernel": {"config": BurstConfig(kernel="reference" if odd else "aten-cpu")},
        "grad_dtype": {"config": BurstConfig(grad_dtype=torch.bfloat16 if odd else torch.float32)},
        "ring": {"config": BurstConfig(ring="flat" if odd else "double")},
        "overlap": {"config": BurstConfig(overlap=not odd)},
        "head_parallel": {"config": BurstConfig(head_parallel=3 if odd else 1), "q": (1, 8, 6, 16)},
        "auto": {"config": BurstConfig(head_parallel="auto" if odd else 1)},
        "topology": {"topology": Topology.from_group(dist.group.WORLD, intra_size=1 if odd else 3)},
        "lse": {"return_lse": odd},
        "gradient": {"sinks": torch.zeros(4, requires_grad=odd)},
        "refusal": {"q": (1, 8, 0 if odd else 4, 16)},
        "nonsense": {"softmax_scale": [1] if odd else 1.0},
        "latent": {"latent": tuple(LATENT) if odd else LATENT},
        "bug": {"q": (1, 8, 4, 24)},  # resolved for the first time
    }
    own = resolve.decide
    found = {}
    for what, call in calls.items():
        if what == "bug" and odd:
            resolve.decide = lambda *_: 1 / 0
        start = time.monotonic()
        with pytest.raises((ValueError, TypeError, ZeroDivisionError)) as caught:
            if what == "latent":
                burst_attention(C.q, **call, topology=topology, mask=Mask.causal())
            attend(**{"topology": topology, **call})
        found[what] = str(caught.value), time.monotonic() - start
        resolve.decide = own
        attend(topology=topology)  # signatures known to everyone: a later call must be caught as well
    return found


@pytest.fixture(scope="module")
def disagreements():
    """(message, seconds) by rank, by what rank 1 does."""
    ranks = processes(3, _disagree)
    return {what: [found[what] for found in ranks] for what in ranks[0]}


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("first", ["hold [8, 16, 8] tokens, 32 in all", "zigzag on 3 ranks shards them as [8, 12, 12]"]),
        ("length", ["hold [8, 16, 8] tokens, 32 in all", "zigzag on 3 ranks shards them as [8, 12, 12]"]),
        ("short", ["hold [8, 7, 8] tokens, 23 in all", "multiple of 6"]),
        ("shape", ["q: [1, ., 4, 16] on ranks [0, 2], [2, ., 4, 16] on ranks [1]"]),
        ("documents", ["the documents of the mask end at 30", "the sequence has 24 tokens"]),
        ("dtype", ["dtype: torch.float32 on ranks [0, 2], torch.bfloat16 on ranks [1]"]),
        ("mask", ["mask: causal on ranks [0, 2], full on ranks [1]"]),
        ("scale", ["softmax_scale: 0.25 on ranks [0, 2], 0.5 on ranks [1]"]),
        ("backward", ["backward: query on ranks [0, 2], kv on ranks [1]"]),
        ("layout", ["layout: zigzag on ranks [0, 2], contiguous on ranks [1]"]),
        ("kernel", ["kernel: aten-cpu on ranks [0, 2], reference on ranks [1]"]),
        ("grad_dtype", ["grad_dtype: torch.float32 on ranks [0, 2], torch.bfloat16 on ranks [1]"]),
        ("ring", ["ring: double on ranks [0, 2], flat on ranks [1]"]),
        ("overlap", ["overlap: True on ranks [0, 2], False on ranks [1]"]),
        ("head_parallel", ["head_parallel: 1 on ranks [0, 2], 3 on ranks [1]"]),
        ("auto", ["head_parallel: 1 on ranks [0, 2], auto on ranks [1]"]),
        ("topology", ["topology: 1 x 3 on ranks [0, 2], 3 x 1 on ranks [1]"]),
        ("lse", ["lse wanted: False on ranks [0, 2], True on ranks [1]"]),
        ("gradient", ["gradient wanted: False on ranks [0, 2], True on ranks [1]"]),
    ],
)
def test_ranks_that_disagree_all_get_an_error_that_names_ranks_and_fields(what, words, disagreements):
    for message, taken in disagreements[what]:
        assert all(word in message for word in words), message
        assert taken < limits.AT_ONCE


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("refusal", r"got (1, 8, 0, 16)"),
        ("nonsense", "softmax_scale must be positive"),
        ("latent", "must be a Latent"),
        ("bug", "division by zero"),
    ],
)
def test_a_rank_that_refuses_tells_the_others_and_the_ring_goes_on(what, words, disagreements):
    messages = disagreements[what]
    assert words in messages[1][0]
    for rank in (0, 2):
        assert "rank 1 of the ring refused this call" in messages[rank][0]
        assert words in messages[rank][0]
        assert messages[rank][1] < limits.AT_ONCE


@on_ranks(3)
def test_a_rank_that_goes_on_after_a_refusal_never_meets_another_call(rank, size):
    """Rank 1 refuses its first call and makes its second at once; rank 2 is late, until rank 1 goes on."""
    topology, store = Topology.from_group(dist.group.WORLD), _get_default_store()
    if rank == 2:
        limits.keys(store, "goes on")
    if rank == 1:
        with pytest.raises(ValueError, match="heads"):
            attend(q=(1, 8, 0, 16), topology=topology)
        store.set("goes on", "")
    else:
        with pytest.raises(ValueError, match="rank 1 of the ring refused this call: ValueError.*heads"):
            attend(topology=topology)
    assert attend(topology=topology).shape == (1, 8, 4, 16)


def _one_goes_while_others_stay(rank, size):
    topology = Topology.from_group(dist.group.WORLD)
    dist.barrier()  # all have made their groups
    dist.barrier = lambda: None  # ranks.processes ends with one
    if rank == 2:
        os._exit(0)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="has gone or did not come"):
        attend(topology=topology)
    waited, store = time.monotonic() - start, dist.distributed_c10d._get_default_store()
    store.set(f"told {rank}", "")
    limits.keys(store, "told 0", "told 1", "told 3")  # nobody is told by the others' end
    return waited


@pytest.mark.filterwarnings("ignore")
def test_ranks_that_stay_are_told_of_one_that_is_gone():
    with pytest.raises(AssertionError, match=r"ranks \[2\] of 4 ended without an answer") as caught:
        processes(4, _one_goes_while_others_stay)
    assert len(caught.value.args[1]) == 3 and max(caught.value.args[1].values()) < limits.AT_ONCE


def _interrupt_waits(error, *, agreed):
    """Raise the error in the next wait for the agreement: from a signal, or once all have agreed."""

    def ring_out(*_):
        raise error

    if not agreed:
        signal.signal(signal.SIGALRM, ring_out)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        return
    leave = threading.Condition.__exit__

    def left(self, *arguments):
        leave(self, *arguments)
        if sys._getframe(1).f_code.co_name == "_answer":
            threading.Condition.__exit__ = leave
            ring_out()

    threading.Condition.__exit__ = left


def _interrupted(rank, size, who, error, agreed):
    """A rank is interrupted while it waits for the agreement; (message, seconds) of each rank's next call."""
    topology = Topology.from_group(dist.new_group(timeout=limits.OF_A_GROUP), intra_size=size)
    attend(topology=topology)
    dist.barrier()
    store = _get_default_store()
    if rank == who:
        _interrupt_waits(error, agreed=agreed)
        with pytest.raises(type(error)):
            attend(topology=topology)
        store.set("left", "")
    elif not agreed:
        limits.keys(store, "left")
    start = time.monotonic()
    with pytest.raises((ValueError, RuntimeError)) as caught:
        attend(topology=topology)
    dist.barrier = lambda: None  # connections may be closed
    return str(caught.value), time.monotonic() - start


@pytest.mark.parametrize(
    ("who", "error", "agreed"),
    [(0, KeyboardInterrupt(), False), (1, SystemExit(1), False), (1, TimeoutError("too late"), True)],
    ids=str,
)
@pytest.mark.filterwarnings("ignore")
def test_an_interrupt_while_a_rank_waits_is_told_to_the_others_at_once(who, error, agreed):
    name = type(error).__name__
    for message, seconds in processes(3, _interrupted, who, error, agreed):
        assert f"rank {who} of the ring was interrupted while it waited for the others: {name}" in message
        assert "make the process group anew" in message
        assert seconds < limits.AT_ONCE, "an error that came by the limit of the group"


def _loss(topology, **options):
    """A forward on a rank's 8 tokens, and the sum of its outputs."""
    q, k, v, _ = (x.requires_grad_() for x in problem(0, 8, dtype=torch.float32))
    return burst_attention(q, k, v, topology=topology, **{"mask": Mask.causal(), **options}).sum()


def _apart(rank, size, what, steps):
    """After some steps backwards go ahead; then one rank's backward is another than the others', or none."""
    topology = Topology.from_group(dist.group.WORLD)
    for _ in range(steps):
        _loss(topology).backward()
    losses = [_loss(topology) for _ in range(2)]
    start = time.monotonic()
    with pytest.raises((ValueError, RuntimeError)) as caught:
        if what == "forward" and rank == 1:
            _loss(topology)
        else:
            losses[rank == 1 and what == "order"].backward()
    seconds = time.monotonic() - start
    if steps:
        with pytest.raises((ValueError, RuntimeError), match="make the process group anew"):
            _loss(topology)
    dist.barrier = lambda: None  # the connections are closed
    return str(caught.value), seconds


@pytest.mark.parametrize(
    ("what", "steps", "words"),
    [
        ("order", 0, "of call: 1 on ranks [0, 2], 2 on ranks [1]"),
        ("forward", 0, "pass: backward on ranks [0, 2], forward on ranks [1]"),
        ("order", 3, "of call: 7 on ranks [0, 2], 8 on ranks [1]"),
        ("forward", 3, "pass: backward on ranks [0, 2], forward on ranks [1]"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_backward_that_meets_another_call_is_an_error_on_every_rank(what, steps, words):
    for message, seconds in processes(3, _apart, what, steps):
        assert words in message and seconds < limits.AT_ONCE


def _noted():
    """Whether each agreement of this process goes ahead, from now on."""
    looked, post = [], Ring._post
    Ring._post = lambda self, claim, *, ahead=False: looked.append(ahead) or post(self, claim, ahead=ahead)
    return looked


@pytest.mark.filterwarnings("ignore")
@on_ranks(2)
def test_the_last_backward_of_a_step_is_looked_at_before_it_returns(rank, size):
    """The last backward of a step needs no message, and differs: `backward` itself raises."""
    topology = Topology.from_group(dist.group.WORLD)
    apart = Mask.documents([0, 4, 8, 12, 16]) & Mask.window(0, 0)
    config = BurstConfig(layout="contiguous")

    def run(scale):
        q, k, v, _ = (x.requires_grad_() for x in problem(0, 8, dtype=torch.float32))
        out = burst_attention(q, k, v, topology=topology, mask=apart, config=config, return_lse=True)
        (out[0].sum() + (scale * out[1].sum() if scale else 0)).backward()

    for scale in (0, 1, 0, 1):
        run(scale)
    with pytest.raises(ValueError, match="gradient through lse: False on ranks .0., True on ranks .1."):
        run(rank)
    dist.barrier = lambda: None


@pytest.mark.filterwarnings("ignore")
@on_ranks(3)
def test_documents_that_differ_in_a_call_that_went_ahead_are_an_error(rank, size):
    """Batches of other documents go ahead; in one the ranks have different documents."""
    topology = Topology.from_group(dist.group.WORLD)
    ends = [[0, 5, 24], [0, 9, 24], [0, 24], [0, 3, 20, 24]]
    for each in ends:
        _loss(topology, mask=Mask.causal() & Mask.documents(each)).backward()
    looked, start = _noted(), time.monotonic()
    with pytest.raises(ValueError, match=r"mask: .* on ranks \[0, 2\], .* on ranks \[1\]"):
        mask = Mask.causal() & Mask.documents([0, 12, 24] if rank == 1 else [0, 1, 2, 24])
        _loss(topology, mask=mask).backward()
    dist.barrier = lambda: None
    assert looked[0]  # went ahead
    assert time.monotonic() - start < limits.AT_ONCE
