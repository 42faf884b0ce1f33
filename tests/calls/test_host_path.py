"""Work of the host in each step of a ring, beside kernels, passes over memory and messages."""

from functools import partial
from pathlib import Path

import pytest
import torch
from counting import count_calls

import burst_mcore
from burst_bench.methods.virtual_rank import Copies, VirtualRank
from burst_mcore import Mask, Topology, burst_attention
from burst_mcore.attention import backward as backward_module
from burst_mcore.attention import call as call_module
from burst_mcore.attention.backward import backward
from burst_mcore.attention.call import Keys
from burst_mcore.attention.geometry.shard import Shard
from burst_mcore.attention.kernels import kernel as kernel_module
from burst_mcore.attention.numerics import merge

PACKAGE = str(Path(burst_mcore.__file__).parent)
SIZE = 8


class Arrived:
    """A message that is there."""

    def wait(self):
        pass


@pytest.fixture
def passes(monkeypatch):
    """A forward, and a backward of each direction, of a rank in the middle of a causal zigzag ring.

    Kernels, passes over memory and messages are done at once: functions that return.
    """
    monkeypatch.setattr(merge.OnlineSoftmax, "_combine", staticmethod(lambda *args: None))
    monkeypatch.setattr(merge, "add_up", lambda *args: None)
    for module in (backward_module, kernel_module):
        monkeypatch.setattr(module, "output_stand_in", lambda dout, delta, into=None: dout)
    monkeypatch.setattr(Copies, "post", lambda *args: [Arrived()])
    shape = {"batch": 1, "tokens": 64, "heads": 4, "kv_heads": 4, "head_dim": 64, "value_dim": 64}
    shard, runs = Shard(**shape, dtype=torch.bfloat16), {}
    for direction in ("query", "kv"):
        rank = VirtualRank(shard, SIZE, mask=Mask.causal(), direction=direction, device="cpu", works=False)
        done = rank.forward()
        queries, keys = rank.queries(done), Keys(done.k, done.v)
        runs["forward"] = rank.forward
        inputs = queries, keys, done.out
        runs[direction] = partial(backward, rank.call, rank.transport, *inputs)
    for run in runs.values():
        run()
    return runs


@pytest.mark.parametrize(("name", "most"), [("forward", 36), ("query", 128), ("kv", 140)])
def test_a_step_calls_few_functions(passes, name, most):
    """Before programs were bound: 77, 222 and 230."""
    assert most / 2 < count_calls(passes[name], PACKAGE) / SIZE <= most


@pytest.mark.parametrize(("backward", "most"), [(False, 104), (True, 260)])
def test_a_call_of_one_token_runs_few_functions(backward, most):
    """Of attention, since other tests may have wrapped functions of torch: a call that plans nothing."""
    tensors = [torch.randn(1, 1, 4, 64, requires_grad=True) for _ in range(3)]
    topology, mask = Topology.single(), Mask.causal()

    def step():
        out = burst_attention(*tensors, topology=topology, mask=mask)
        if backward:
            out.backward(torch.ones_like(out))

    step()
    step()
    assert most / 2 < count_calls(step, f"{PACKAGE}/attention/") <= most


def test_a_program_is_bound_once(passes, monkeypatch):
    monkeypatch.setattr(call_module, "bind", None)  # nobody may make another
    for run in passes.values():
        run()
