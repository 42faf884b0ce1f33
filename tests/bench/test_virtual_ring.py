"""The virtual ring runs a real rank's program; here on the CPU, where its copies are done at once."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from burst_bench.methods.virtual_rank import Copies, VirtualRank
from burst_bench.subjects import virtual_ring
from burst_mcore import Mask
from burst_mcore.attention.geometry.rows import gather
from burst_mcore.attention.geometry.shard import Shard
from burst_mcore.attention.kernels.kernel import BackwardInputs
from burst_mcore.attention.schedule.actions import Channel, Kind, Link, Recv
from burst_mcore.attention.schedule.route import program
from burst_plan.simulate.cost import message_bytes

SHARD = Shard(batch=1, tokens=32, heads=4, kv_heads=2, head_dim=16, value_dim=16, dtype=torch.float32)


def _rank(size, direction="query", *, dtype=torch.float32, **given):
    shard = replace(SHARD, dtype=dtype)
    more = {"mask": Mask.causal(), "device": "cpu", **given}
    return VirtualRank(shard, size, direction=direction, **more)


@pytest.mark.parametrize("direction", ["query", "kv"])
@pytest.mark.parametrize("size", [1, 4])
def test_it_receives_what_its_program_says(size, direction):
    rank = _rank(size, direction)
    assert rank.pairs == (32 * size) * (32 * size + 1) // 2 // size  # zigzag is even to the last pair
    done = rank.forward()
    per_row = 2 * 2 * 16 * 4  # K and V
    steps = program(rank.call.rank, rank.call.route, "forward", rank.call.plan)
    rows = sum(32 if a.rows is None else sum(map(len, a.rows)) for a in steps if isinstance(a, Recv))
    assert rank.transport.bytes == rows * per_row
    gradients = rank.backward(done)
    assert [x.shape for x in gradients] == [rank.q.shape, rank.k.shape, rank.v.shape]
    assert all(x.isfinite().all() for x in gradients)
    rank.bare_forward()
    rank.bare_backward(rank.queries(done), done.out)


@pytest.mark.parametrize("latent", [None, (24, 4)])
@pytest.mark.parametrize("direction", ["query", "kv"])
def test_keys_and_latents_receive_what_their_programs_say(direction, latent):
    shape = Shard(
        batch=1, tokens=32, heads=4, kv_heads=4, head_dim=16, value_dim=12, dtype=torch.float32,
        latent=latent, latent_rotates=latent is not None,
    )  # fmt: skip
    rank = VirtualRank(shape, 4, mask=Mask.causal(), direction=direction, device="cpu")
    done = rank.forward()
    came = rank.transport.bytes
    gradients = rank.backward(done)
    for pass_, size in (("forward", came), (direction, rank.transport.bytes - came)):
        sizes = message_bytes(shape, rank.call.route, pass_)
        steps = program(rank.call.rank, rank.call.route, pass_, rank.call.plan)
        assert size == sum(sizes.of(action) for action in steps if isinstance(action, Recv))
    assert [x.shape for x in gradients] == [rank.q.shape, rank.k.shape, rank.v.shape]
    assert all(x.isfinite().all() for x in gradients)
    rank.bare_forward()
    rank.bare_backward(rank.queries(done), done.out)


def _told(rank):
    """Names and shapes of tiles, as `rank`'s kernel is called with them from now on."""
    tiles, kernel = [], rank.call.kernel

    def tell(name):
        def call(*args):
            tiles.append((name, args[-2].shape))
            return getattr(kernel, name)(*args)

        return call

    told = replace(kernel, forward=tell("forward"), backward=tell("backward"))
    rank.call = replace(rank.call, kernel=told)
    return tiles


@pytest.mark.parametrize("direction", ["query", "kv"])
def test_an_idle_kernel_is_called_as_one_that_works_is(direction):
    found = []
    for works in (True, False):
        rank = _rank(4, direction, works=works)
        found.append(_told(rank))
        rank.backward(rank.forward())
    assert found[0] == found[1] and len(found[0]) == 2 * 4  # causal zigzag: a tile for each pair of ranks


@pytest.mark.parametrize("direction", ["query", "kv"])
def test_around_an_idle_kernel_its_results_are_merged_and_summed(direction):
    rank = _rank(4, direction, dtype=torch.float64, works=False)
    here, kernel, scores = rank.call.ring_rank, rank.call.kernel, rank.call.scores
    out, total = torch.zeros_like(rank.q), torch.zeros(1, 4, 32, dtype=torch.float64)
    for source in range(4):
        for tile in rank.call.tiles(here, source):
            rows = gather(rank.q, tile.q), gather(rank.k, tile.k), gather(rank.v, tile.k)
            given, lse = kernel.forward(*rows, tile.pattern, scores)
            weights = lse.exp()
            gather(total, tile.q).add_(weights)
            gather(out, tile.q).add_(weights.transpose(1, 2).unsqueeze(-1) * given)
    done = rank.forward()
    torch.testing.assert_close(done.ring_lse, total.log(), rtol=0, atol=1e-12)
    torch.testing.assert_close(done.out, out / total.transpose(1, 2).unsqueeze(-1), rtol=1e-12, atol=1e-12)
    queries = rank.queries(done)
    want = [torch.zeros_like(x) for x in (rank.q, rank.k, rank.v)]
    pair = (lambda source: (source, here)) if direction == "query" else (lambda source: (here, source))
    for source in range(4):
        for tile in rank.call.tiles(*pair(source), keys_stay=direction == "query"):
            of_q = [gather(x, tile.q) for x in (queries.dout, queries.q)]
            of_k = [gather(x, tile.k) for x in (rank.k, rank.v)]
            x = BackwardInputs(*of_q, *of_k, None, gather(queries.lse, tile.q), gather(queries.delta, tile.q))
            given = kernel.backward(x, tile.pattern, scores)
            for total, rows, gradient in zip(want, (tile.q, tile.k, tile.k), given, strict=True):
                gather(total, rows).add_(gradient)
    got = rank.backward(done)
    stays = (1, 2) if direction == "query" else (0,)  # what comes to the others' share is random
    for index in stays:
        torch.testing.assert_close(got[index], want[index], rtol=1e-12, atol=1e-12)


def test_what_comes_once_is_left_as_the_reader_leaves_it():
    copies, channel = Copies(torch.device("cpu"), once=True), Channel(Link.INTRA, Kind.DATA)
    buffers = [torch.full((1, 8, 2, 4), torch.nan) for _ in range(2)]

    def receive(x):
        copies.post(channel, [(Recv(0, channel, "data0", 1), (x,))])

    for x in buffers:
        receive(x)
        assert x.isfinite().all() and x.std() > 0.1
        x.zero_()
        receive(x)
        assert (x == 0).all()
    assert copies.bytes == 4 * buffers[0].nbytes


def test_launches_are_what_the_device_ran_not_what_the_host_called(monkeypatch):
    of_device, of_host = DeviceType.CUDA, DeviceType.CPU
    events = [SimpleNamespace(key="attention", device_type=of_device, count=3)]
    events += [
        SimpleNamespace(key=f"cuda{x}", device_type=of_host, count=5) for x in ("LaunchKernel", "EventRecord")
    ]
    seen = SimpleNamespace(key_averages=lambda: events)
    monkeypatch.setattr(virtual_ring, "profile", lambda activities: nullcontext(seen))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert virtual_ring.launches(lambda: None, SimpleNamespace(device="cuda")) == 3
