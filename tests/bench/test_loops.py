"""Loops of other projects' rings: hops, order of blocks, and the clock of all ranks at once."""

import math
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch

from burst_bench.published.loops import INTERNEVO, MAGI_DOUBLE_RING, RING_FLASH, TRANSFORMER_ENGINE
from burst_bench.published.methods import WAYS, programs_of, seconds_of
from burst_bench.published.rows import Row
from burst_mcore import Layout, Mask
from burst_mcore.attention.candidates import kernel_seconds
from burst_mcore.attention.geometry.plan import Plan
from burst_mcore.attention.geometry.shard import Placement, Shard
from burst_mcore.attention.schedule.actions import Compute, Kind, Pass, Send
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
ROW = Row(
    hardware="A100-NVLink", gpus=8, gpus_per_node=8, heads=32, kv_heads=32, head_dim=32, batch=2, seq=8192,
    mask="causal", passes="fwd", method="usp", head_parallel=4, variant="zigzag", iterations_per_second=1.0,
)  # fmt: skip


def _gradients(loop, route):
    """Hops of gradients of one rank, by kind."""
    (program, *_) = programs_of(loop, route, Pass.KV)
    kinds = [action.channel.kind for action in program if isinstance(action, Send)]
    return {str(kind): count for kind, count in Counter(kinds).items() if kind != Kind.DATA}


def test_gradients_make_the_hops_of_the_sources():
    assert _gradients(*LOOPS["ring-flash-attention"]) == {"gradient": 6}
    assert _gradients(*LOOPS["TransformerEngine"]) == {"gradient": 5}
    assert _gradients(*LOOPS["LoongTrain"]) == {"gradient": 3, "total": 3 + 2}
    assert _gradients(*LOOPS["LoongTrain, rounded"]) == {"total": 3 * 2 + 3}
    assert _gradients(RING_FLASH, Route()) == {}


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


def test_a_host_that_is_slower_than_its_device_sets_the_pace():
    """A ring of 2 and 4 exchanges, and one launch more where the host waits after each pass."""
    way = WAYS["usp"](ROW)
    rates = Rates(intra=1e12, inter=1e12, compute=1e15, latency=0.0)
    device = seconds_of(ROW, way, rates)
    assert seconds_of(ROW, way, replace(rates, call=1.0)) == pytest.approx(2 + 4 + 1)
    packed = replace(ROW, variant="zigzag qkvpack")
    assert seconds_of(packed, WAYS["usp"](packed), replace(rates, call=1.0)) == pytest.approx(2 + 2)
    hidden = device / 100
    assert seconds_of(ROW, way, replace(rates, call=hidden)) == pytest.approx(device + hidden)


def test_the_end_of_a_kernel_costs_half_a_wave_of_rows():
    shard = Shard(batch=2, tokens=1024, heads=4, kv_heads=4, head_dim=64, value_dim=64, dtype=torch.bfloat16)
    rates = Rates(intra=1e9, inter=1e9, compute=1e12, wave=800.0, wave_backward=400.0)
    pairs = torch.tensor([1024.0 * 1024], dtype=torch.float64)
    for pass_, rows in ((Pass.FORWARD, 50.0), (Pass.KV, 25.0)):
        plain = float(kernel_seconds(shard, pass_, replace(rates, wave=0.0, wave_backward=0.0), pairs))
        per_pair = plain / float(pairs)
        assert float(kernel_seconds(shard, pass_, rates, pairs)) == pytest.approx(
            plain + 1024 * rows * per_pair
        )
    alike = kernel_seconds(shard, Pass.KV, replace(rates, wave_backward=None), pairs)
    assert math.isclose(float(alike), plain + 1024 * 50 * per_pair)
