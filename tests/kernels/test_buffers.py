import threading

import pytest
import torch

from burst_mcore.attention.geometry.plan import plan_of
from burst_mcore.attention.runtime import buffers
from burst_mcore.attention.runtime.binding import (
    AccumulateStep,
    AddStep,
    ComputeStep,
    Drop,
    Pack,
    Post,
    Recv,
    Unpack,
    Wait,
    bind,
)
from burst_mcore.attention.runtime.buffers import Lease
from burst_mcore.attention.schedule.actions import HOME, Kind, Pass
from burst_mcore.attention.schedule.ring import at_home, kind_of
from burst_mcore.attention.schedule.route import Route, program
from burst_mcore.layout import Layout
from burst_mcore.mask import Mask

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _own_pool(monkeypatch):
    monkeypatch.setattr(buffers, "_POOL", buffers._Pool())


def test_a_buffer_is_used_again_and_comes_poisoned():
    with Lease() as lease:
        first = lease.empty((2, 3), torch.float32, CPU)
        first.zero_()
    with Lease() as lease:
        second = lease.empty((2, 3), torch.float32, CPU)
        assert second is first
        assert second.isnan().all()
        assert lease.empty((2, 3), torch.float32, CPU) is not first
        assert lease.empty((2, 3), torch.bfloat16, CPU) is not first


def test_two_passes_never_share_a_buffer():
    with Lease() as earlier:
        earlier.empty((4,), torch.float32, CPU)
    with Lease() as one, Lease() as two:
        assert one.empty((4,), torch.float32, CPU) is not two.empty((4,), torch.float32, CPU)


def test_what_is_kept_or_was_held_at_an_error_is_not_used_again():
    with Lease() as lease:
        kept = lease.keep(lease.empty((4,), torch.float32, CPU))
    with Lease() as lease:
        assert lease.empty((4,), torch.float32, CPU) is not kept
    with pytest.raises(RuntimeError, match="step"), Lease() as lease:
        lost = lease.empty((4,), torch.float32, CPU)
        raise RuntimeError("step")
    with Lease() as lease:
        assert lease.empty((4,), torch.float32, CPU) is not lost


def test_buffers_of_inference_mode_stay_there():
    with torch.inference_mode(), Lease() as lease:
        lease.empty((4,), torch.float32, CPU)
    with Lease() as lease:
        assert not lease.empty((4,), torch.float32, CPU).is_inference()


def test_the_pool_forgets_shapes_that_are_not_used():
    for size in range(1, 3 * buffers.SHAPES):
        with Lease() as lease:
            lease.empty((size,), torch.float32, CPU)
    assert len(buffers._POOL._free) == buffers.SHAPES


def test_threads_share_the_pool():
    seen = []

    def use():
        for _ in range(200):
            with Lease() as lease:
                x = lease.empty((8,), torch.float32, CPU)
                x.fill_(threading.get_ident() % 1000)
                seen.append((x == x[0]).all().item())

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(seen) and len(seen) == 800


def _held(steps):
    """Yield the names of the buffers that are held after each step; a step may use no others."""
    held, under_way, read = {HOME}, {}, HOME
    for step in steps:
        match step:
            case Post(channel=channel):
                held |= {each.action.buffer for each in step.parcels if isinstance(each.action, Recv)}
                under_way.setdefault(channel, set()).update(each.action.buffer for each in step.parcels)
            case Wait(channel=channel):
                assert under_way.pop(channel) <= held
            case ComputeStep():
                read = step.action.buffer
                assert read in held
            case AccumulateStep():
                assert read in held
                held |= {room.name for room in (step.sums, step.total) if room}
            case AddStep():
                assert step.action.other in held
                held.add(step.sums.name)
            case Pack():
                held.add(step.buffer)
            case Unpack(buffer=buffer):
                assert buffer in held or step.member == _OWN_MEMBER
            case Drop(buffer=buffer):
                assert not any(buffer in names for names in under_way.values())
                held.discard(buffer)
        yield step, {*held}
    assert not under_way


_OWN_MEMBER = 0  # of rank 0: its share is in no buffer


@pytest.mark.parametrize(
    ("route", "mask"),
    [
        (Route(1, 8), Mask.causal()),
        (Route(2, 4), Mask.causal()),
        (Route(4, 2), Mask.window(40, 0)),
        (Route(1, 6, direct=True), Mask.causal()),
        (Route(1, 4, 2), Mask.causal()),
    ],
    ids=str,
)
@pytest.mark.parametrize("pass_", Pass)
def test_a_buffer_ends_as_soon_as_nothing_uses_what_it_holds(route, mask, pass_):
    plan = plan_of(Layout("zigzag"), mask, 192, route.placement)
    steps = program(0, route, pass_, plan)
    states = list(_held(bind(steps)))
    *_, last = (held for step, held in states if isinstance(step, ComputeStep))
    assert sum(kind_of(name) == Kind.DATA for name in last - {HOME}) <= 1
    end = set(states[-1][1])
    assert end - {HOME} <= {*at_home(steps)}
