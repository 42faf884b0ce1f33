"""Steps of a soak: what four ranks do together, drawn from a seed, and the reference that holds it."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from causal_lms import worst
from dense import Result, assert_as_exact_as, dense, error, single_kernel
from loops import Case, by_hand, one_process
from sharded import whole, whole_results
from test_latent import Gradients, on_ring, through
from test_latent import _random as random_latent
from test_masks_on_rings import DTYPES, KERNEL, random_call
from test_recompute_on_ranks import _local as recomputed

from burst_mcore import Topology
from burst_mcore.attention.geometry.shard import Ranks
from burst_mcore.checkpointing import Full, KeepAttention, Segment

Draw = random.Random
TIMES = 4.0
"""The errors of a call beside those of one kernel, at most. Of few numbers, twice is luck: 2 of 400 calls had
2.0 and 2.4. A row that is missing makes hundreds."""
EXACT = 1e-10
"""The relative error that a call in float64 is held to: its sums are of another order."""
CLOSE = 1e-6
"""That of a training in float64: transformers has norms, and its own attention's softmax, in float32."""


@dataclass(frozen=True)
class Team:
    """A rank among the ranks of a step."""

    rank: int
    size: int
    tell: Callable[[str], None]
    """Tells the supervisor that this rank ends now, or fails, and how."""

    def topology(self, draw: Draw) -> Topology:
        intra = draw.choice([n for n in range(1, self.size + 1) if self.size % n == 0])
        return Topology.from_group(dist.group.WORLD, intra_size=intra)


def attention(draw: Draw, team: Team) -> str:
    """A call of any layout, mask, dtype, route and shape, as exact as one kernel alone; words for it."""
    topology = team.topology(draw)
    p, mask, config = random_call(draw, Ranks(team.size, topology.intra_size), draw.choice(DTYPES))
    policy = draw.choice((None, None, Full(), KeepAttention(), Segment(draw.random())))
    words = f"{tuple(p.q.shape)} {p.k.shape[2]} K/V heads {p.q.dtype} {mask} {config} {policy} {topology}"
    with telling(words):
        if policy is None:
            got = whole_results(p, mask, team.rank, team.size, config, topology)
        else:
            reentrant = draw.random() < 0.5
            local = recomputed(p, mask, team.rank, team.size, config, topology, policy, reentrant)
            got = Result(*(whole(x, team.size, config.layout) for x in local))
        if draw.randrange(team.size) == team.rank:  # all hold the same, and one of them looks at it
            assert_as_exact_as(got, single_kernel(p, KERNEL, mask), dense(p, mask), TIMES)
    return words


def latent(draw: Draw, team: Team) -> str:
    """A call of multi-latent attention in float64."""
    topology = team.topology(draw)
    c, mask, config, rotates = random_latent(draw, Ranks(team.size, topology.intra_size), torch.float64)
    words = f"{tuple(c.q.shape)} {mask} {config} latent rotates: {rotates} {topology}"
    with telling(words):
        got = on_ring(c, mask, team.rank, team.size, config, topology, rotates)
        if draw.randrange(team.size) == team.rank:
            for name, g, w in zip(Gradients._fields, got, through(c, lambda p: dense(p, mask)), strict=True):
                held(name, g, w)
    return words


@contextlib.contextmanager
def telling(words: str) -> Iterator[None]:
    """Say of a result that is wrong which case it belongs to."""
    try:
        yield
    except AssertionError as wrong:
        raise AssertionError(f"{words}: {wrong}") from wrong


def held(name: str, got: torch.Tensor, want: torch.Tensor, bound: float = EXACT) -> None:
    """Raise unless a tensor in float64 is that of the reference."""
    if want.norm() < 1e-10:
        assert got.norm() < bound, f"{name} is {got.norm()}, not 0"
    else:
        assert error(got, want) < bound, f"{name}: a relative error of {error(got, want):.3e}"


CALLS: tuple[Callable[[Draw, Team], str], ...] = (attention, attention, attention, latent)


def training(draw: Draw, team: Team) -> str:
    """Three steps of a causal LM under FSDP2 or DDP in float64, losses, norms and weights of one process."""
    cp = draw.choice((2, 4))
    case = Case(
        {"dp": team.size // cp, "cp": cp} if draw.random() < 0.5 else {"cp": cp, "dp": team.size // cp},
        draw.choice(("fsdp", "ddp")),
        accumulated=draw.choice((1, 2)),
        packed=draw.random() < 0.5,
        options={
            "checkpointing": draw.choice(("none", "attention", "segment", "full")),
            "config": {"layout": draw.choice(("contiguous", "zigzag", "striped"))},
            "loss": draw.choice(("fused", "model")),
        },
        model=draw.choice(({}, {"kind": "Qwen3"}, {"kind": "Gemma2", "sliding_window": 8})),
    )
    with telling(str(case)), in_float64():
        losses, norms, weights = by_hand(team.rank, team.size, case)
        if draw.randrange(team.size) == team.rank:
            want = one_process(case)
            held("the losses", torch.tensor(losses), torch.tensor(want[0]), CLOSE)
            held("the norms", torch.tensor(norms), torch.tensor(want[1]), CLOSE)
            assert worst(weights, want[2]) < CLOSE
    return str(case)


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Make models in float64."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


STEPS: dict[str, Callable[[Draw, Team], str]] = {
    "attention": attention,
    "latent": latent,
    "training": training,
}
"""The steps that end well on every rank; `Fault` has the others."""
ANEW = ("training",)
"""Steps that make process groups of their own: the ranks make all anew afterwards."""


@dataclass(frozen=True)
class Fault:
    """Ranks that die, are interrupted or fail in the midst of a step."""

    how: str
    """killed: by SIGKILL; interrupted: by SIGINT; failed: no memory is left."""
    ranks: tuple[int, ...]
    where: str
    """step: at message number `at` of this rank; clock: after so many seconds."""
    at: float

    @classmethod
    def drawn(cls, draw: Draw, size: int, spared: int | None) -> Fault:
        """A fault that spares a rank, or none."""
        how = draw.choice(("killed", "interrupted", "failed"))
        most = draw.choice((1, 1, 1, 2, 3, 4)) if how == "killed" else 1
        others = [rank for rank in range(size) if rank != spared]
        ranks = tuple(sorted(draw.sample(others, min(most, len(others)))))
        where = draw.choice(("step", "clock")) if how == "killed" else "step"
        at = draw.uniform(0.02, 1.0) if where == "clock" else draw.randint(1, 40)
        return cls(how, ranks, where, at)

    def plant(self, team: Team) -> Callable[[], None]:
        """Let it happen on this rank, if it is one of `ranks`; return what takes it out again."""
        if team.rank not in self.ranks:
            return lambda: None
        if self.where == "clock":
            timer = threading.Timer(self.at, self._strike, (team,))
            timer.daemon = True
            timer.start()
            return timer.cancel
        batch, count = dist.batch_isend_irecv, 0

        def counting(operations: list[dist.P2POp]) -> list[dist.Work]:
            nonlocal count
            count += 1
            if count == self.at:
                self._strike(team)
            return batch(operations)

        dist.batch_isend_irecv = counting
        return partial(setattr, dist, "batch_isend_irecv", batch)

    def _strike(self, team: Team) -> None:
        team.tell(self.how)
        if self.how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "interrupted":
            signal.raise_signal(signal.SIGINT)
        raise MemoryError("no memory left")

    def run(self, draw: Draw, team: Team) -> tuple[str, float]:
        """Make calls until the fault has been noticed: the words of the error, and when it was raised."""
        planted = self.plant(team)
        try:
            while True:
                draw.choice(CALLS)(draw, team)
        except (RuntimeError, ValueError, MemoryError, KeyboardInterrupt) as end:
            return f"{type(end).__name__}: {end}"[:2000], time.monotonic()
        finally:
            planted()
