"""Loops of other projects' rings: steps, order of blocks, and the clock of all ranks at once."""

from functools import partial

import pytest
import torch

from burst_bench.published.loops import INTERNEVO, MAGI_DOUBLE_RING, RING_FLASH, TRANSFORMER_ENGINE
from burst_bench.published.methods import programs_of
from burst_mcore import Layout, Mask
from burst_mcore.attention.candidates import kernel_seconds
from burst_mcore.attention.geometry.plan import Plan
from burst_mcore.attention.geometry.shard import Placement, Shard
from burst_mcore.attention.schedule.actions import Compute, Pass
from burst_mcore.attention.schedule.route import Route, Schedule
from burst_mcore.rates import Rates
from burst_plan.simulate.cost import message_bytes
from burst_plan.simulate.lockstep import KernelWork, RoutedPass, play_all
from burst_plan.simulate.play import play

RATES = Rates(intra=2e9, inter=3e8, compute=1e12, latency=1e-6)
LOOPS = {
    "ring-flash-attention": (RING_FLASH, Route(intra=6)),
    "TransformerEngine": (TRANSFORMER_ENGINE, Route(intra=6)),
    "LoongTrain": (INTERNEVO, Route(nodes=2, intra=3)),
    "LoongTrain, rounded": (MAGI_DOUBLE_RING[9], Route(nodes=3, intra=2)),
    "LoongTrain, a node": (INTERNEVO, Route(intra=6)),
}


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("pass_", [Pass.FORWARD, Pass.KV])
def test_every_rank_attends_to_every_block_once_and_first_to_its_own_where_it_starts_there(name, pass_):
    loop, route = LOOPS[name]
    for rank, program in enumerate(programs_of(loop, route, pass_)):
        sources = [action.source for action in program if isinstance(action, Compute)]
        assert sorted(sources) == list(range(route.ring_size))
        at = -1 if loop is TRANSFORMER_ENGINE and pass_ == Pass.KV else 0
        assert sources[at] == rank


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("pass_", [Pass.FORWARD, Pass.KV])
@pytest.mark.parametrize("node", [2, 6])
def test_loops_played_at_once_are_every_rank_played(name, pass_, node):
    loop, route = LOOPS[name]
    shard = Shard(batch=1, tokens=64, heads=4, kv_heads=2, head_dim=32, value_dim=32, dtype=torch.bfloat16)
    size = route.ring_size
    pairs = (torch.rand(size, size, generator=torch.Generator().manual_seed(7)) * 4000 + 100).double()
    work = KernelWork(pairs, Placement(size), partial(kernel_seconds, shard, pass_, RATES))
    programs = tuple(programs_of(loop, route, pass_))
    routed = RoutedPass(route, pass_, message_bytes(shard, route, pass_), work, programs[0])
    plan = Plan(Layout("zigzag"), Mask.full(), 64 * size, Placement(size))
    (played,) = play_all(plan, [routed], node, RATES)
    timeline = play(Schedule(name, route, programs), routed.sizes, work.of_action, node, RATES)
    assert played.seconds == pytest.approx(timeline.seconds, rel=1e-6)
    assert played.seconds > work.busiest
