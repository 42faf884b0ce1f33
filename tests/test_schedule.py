import dataclasses

import pytest

from burst_mcore.attention.schedule import (
    Accumulate,
    Compute,
    Recv,
    Schedule,
    Send,
    Wait,
    backward_schedule,
    forward_schedule,
)
from burst_mcore.attention.verify import verify

SIZES = range(1, 9)
BUILDERS = {
    "forward": forward_schedule,
    "query": lambda size: backward_schedule(size, "query"),
    "kv": lambda size: backward_schedule(size, "kv"),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", BUILDERS)
def test_schedules_are_verified(name, size):
    verify(BUILDERS[name](size))


@pytest.mark.parametrize("name", BUILDERS)
def test_two_bundles_in_flight_whatever_the_size(name):
    for program in BUILDERS[name](8).programs:
        data = {a.buffer for a in program if isinstance(a, Recv) and a.channel == "data"}
        sums = {a.buffer for a in program if isinstance(a, Recv) and a.channel == "gradient"}
        assert len(data) == 2
        assert len(sums) == (0 if name == "forward" else 2)


@pytest.mark.parametrize("name", BUILDERS)
def test_data_for_the_next_step_is_under_way_before_compute(name):
    for program in BUILDERS[name](4).programs:
        for step in range(3):
            actions = [a for a in program if a.step == step]
            compute = next(i for i, a in enumerate(actions) if isinstance(a, Compute))
            assert {type(a) for a in actions[:compute]} == {Recv, Send}


def test_a_schedule_prints_as_a_grid():
    lines = str(forward_schedule(3)).splitlines()
    assert lines[1].split(" | ")[0].strip() == "step"
    assert [cell.strip() for cell in lines[1].split("|")[1:]] == ["rank 0", "rank 1", "rank 2"]
    assert [line.split("|")[0].strip() for line in lines[2:]] == ["0", "1", "2"]
    assert "[2]" in lines[3].split("|")[1]  # at step 1 rank 0 computes with the bundle of rank 2


def _broken(edit):
    schedule = backward_schedule(3, "query")
    return Schedule("broken", tuple(tuple(edit(rank, list(p))) for rank, p in enumerate(schedule.programs)))


def _without(kind, **fields):
    def edit(rank, program):
        for index, action in enumerate(program):
            if isinstance(action, kind) and all(getattr(action, k) == v for k, v in fields.items()):
                return program[:index] + program[index + 1 :]
        return program

    return edit


def _changed(kind, change, on_rank=None, **fields):
    def edit(rank, program):
        for index, action in enumerate(program):
            matches = isinstance(action, kind) and all(getattr(action, k) == v for k, v in fields.items())
            if matches and on_rank in (None, rank):
                return [*program[:index], dataclasses.replace(action, **change), *program[index + 1 :]]
        return program

    return edit


def _swapped(first, second):
    def edit(rank, program):
        i = next(i for i, a in enumerate(program) if isinstance(a, first))
        j = next(j for j, a in enumerate(program) if isinstance(a, second) and j > i)
        program[i], program[j] = program[j], program[i]
        return program

    return edit


def _accumulated_into_what_is_sent(rank, program):
    at = next(i for i, a in enumerate(program) if isinstance(a, Send) and a.channel == "gradient")
    return [*program[: at + 1], Accumulate(0, rank, program[at].buffer, first=True), *program[at + 1 :]]


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (_without(Compute, step=1), "computed sources|gradient of"),
        (_changed(Compute, {"source": 0}, step=1), "does not hold|computed"),
        (_without(Wait, step=0, channel="data"), "while a message arrives"),
        (_without(Wait, step=3, channel="gradient"), "nobody waited"),
        (_changed(Recv, {"buffer": "home"}, step=0), "caller's"),
        (_changed(Recv, {"buffer": "data0"}, step=1, channel="data"), "while a message arrives"),
        (_accumulated_into_what_is_sent, "written while it is sent"),
        (_changed(Accumulate, {"buffer": "sum1"}, step=0), "before anything arrived|gradient of"),
        (_without(Send, step=0, channel="data"), "deadlock"),
        (_without(Accumulate, step=2), "gradient|before anything arrived"),
        (_changed(Send, {"peer": 0}, on_rank=0, step=0, channel="data"), "deadlock"),
        (_swapped(Recv, Wait), "before anything arrived|while a message arrives|deadlock"),
    ],
)
def test_verify_finds_what_is_wrong(edit, words):
    with pytest.raises(ValueError, match=words):
        verify(_broken(edit))
