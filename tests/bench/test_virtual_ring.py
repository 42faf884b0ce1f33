"""The virtual ring runs a real rank's program; here on the CPU, where its copies are done at once."""

import pytest
import torch

from burst_bench.methods.virtual_rank import VirtualRank
from burst_mcore import Mask
from burst_mcore.attention.geometry.shard import Shard
from burst_mcore.attention.schedule.actions import Pass, Recv
from burst_mcore.attention.schedule.route import program
from burst_plan.simulate.cost import message_bytes


@pytest.mark.parametrize(("size", "kv_heads", "latent"), [(1, 2, None), (4, 2, None), (4, 4, (24, 4))])
@pytest.mark.parametrize("direction", ["query", "kv"])
def test_it_receives_what_its_program_says(direction, size, kv_heads, latent):
    shape = Shard(
        batch=1, tokens=32, heads=4, kv_heads=kv_heads, head_dim=16, value_dim=12, dtype=torch.float32,
        latent=latent, latent_rotates=latent is not None,
    )  # fmt: skip
    rank = VirtualRank(shape, size, mask=Mask.causal(), direction=direction, device="cpu")
    assert rank.pairs == (32 * size) * (32 * size + 1) // 2 // size  # zigzag is even to the last pair
    done = rank.forward()
    came = rank.transport.bytes
    gradients = rank.backward(done)
    for pass_, received in (("forward", came), (direction, rank.transport.bytes - came)):
        sizes = message_bytes(shape, rank.call.route, pass_)
        steps = program(rank.call.rank, rank.call.route, pass_, rank.call.plan)
        assert received == sum(sizes.of(action) for action in steps if isinstance(action, Recv))
    assert [x.shape for x in gradients] == [rank.q.shape, rank.k.shape, rank.v.shape]
    assert all(x.isfinite().all() for x in gradients)
    rank.bare(Pass.FORWARD).forward()
    rank.bare(Pass(direction)).backward()()
