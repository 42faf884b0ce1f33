"""The soak itself: every kind of step once, ten minutes of it, and faults of its own that it must find."""

import io
import json
import sys

import pytest

pytest.importorskip("transformers")

import soak_steps
from soak import BOUND, WEIGHTS, drawn, report, run
from soak_figures import BOUNDS, Held, growths, slopes


def _first_of_each(seed):
    """The first step of every kind, every fault among them."""
    found = {}
    for number in range(2000):
        name, fault = drawn(seed, number)
        found.setdefault((name, fault and fault.how), number)
    assert {name for name, *_ in found} == {*WEIGHTS, "fault"}
    return sorted(found.values())


def test_every_kind_of_step():
    log = io.StringIO()
    soak = run(0, log, iter(_first_of_each(0)))
    assert not soak.failures, soak.failures
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    assert len(lines) == soak.steps == len(_first_of_each(0))
    assert soak.noticed and max(soak.noticed) < BOUND
    assert all("words" in line for line in lines) and any(line["held"] for line in lines)


@pytest.mark.slow
def test_ten_minutes(tmp_path):
    with (tmp_path / "1.jsonl").open("w") as log:
        soak = run(1, log, iter(range(10**9)), seconds=600)
    sys.stdout.write(report(soak))
    assert not soak.failures and not growths(soak.held), [*soak.failures, *growths(soak.held)]
    assert soak.noticed and slopes(soak.held), "no fault, or no process that grew old"


def _wrong(draw, team):
    assert team.rank != 2, "a wrong sum"
    return "right"


def test_a_step_that_fails_is_reported_and_the_next_goes_on(monkeypatch):
    monkeypatch.setitem(soak_steps.STEPS, "attention", _wrong)
    numbers = [n for n in range(100) if drawn(0, n)[0] in ("attention", "latent")]
    numbers = [next(n for n in numbers if drawn(0, n)[0] == name) for name in ("attention", "latent")]
    log = io.StringIO()
    soak = run(0, log, iter(numbers))
    assert len(soak.failures) == 1 and "rank 2" in soak.failures[0] and "a wrong sum" in soak.failures[0]
    assert ["error" in json.loads(line) for line in log.getvalue().splitlines()] == [True, False]


def _held(memory=0.0, threads=0.0, descriptors=0.0, jump=0):
    """A process that grows by so much a step, in waves, and by a jump."""
    for step in range(600):
        base = jump * (step > 250) + 3000 * (step % 7)
        yield (
            step,
            Held(
                7, round(500_000 + base + memory * step), 9 + round(threads * step), round(descriptors * step)
            ),
        )


@pytest.mark.parametrize("name", BOUNDS)
def test_what_grows_is_found_and_jumps_and_waves_are_none(name):
    assert growths([*_held(jump=20_000)]) == []
    rate = 2 * BOUNDS[name] / 1000
    (words,) = growths([*_held(**{name: rate}, jump=20_000)])
    assert f"process 7 holds more and more {name}" in words
    assert growths([*_held(**{name: rate})][:150]) == []  # too young
