"""Packed documents and trees, other ones in every batch: the loader plans ahead, and steps do not wait."""

import random
import threading
import time
from functools import partial

import pytest
import torch
from engines import VOCABULARY, config_of, in_order, model_of, quiet, start
from ranks import processes
from test_trainer import trained

from burst_mcore.attention import agree, function
from burst_mcore.attention import call as call_module
from burst_mcore.attention import prepare as prepare_module
from burst_mcore.rollouts import fold
from burst_mcore.transformers.data.loader import ShardedLoader

TOKENS, STEPS = 4096, 8


def _packed(count):
    """Samples of documents of 128 to 384 tokens, which end elsewhere in each."""
    draw, samples = random.Random(0), []
    for _ in range(count):
        positions: list[int] = []
        while len(positions) < TOKENS:
            positions += range(draw.randint(128, 384))
        ids = torch.tensor([draw.randrange(3, VOCABULARY) for _ in range(TOKENS)])
        samples.append({"input_ids": ids, "position_ids": torch.tensor(positions[:TOKENS])})
    return samples


class _Clock:
    """Seconds that the main thread spends in functions that it was put around."""

    def __init__(self):
        self.seconds, self.depth = 0.0, 0

    def around(self, inner, now):
        def timed(*args, **kwargs):
            if threading.current_thread() is not threading.main_thread() or self.depth:
                return inner(*args, **kwargs)
            self.depth, begin = 1, now()
            try:
                return inner(*args, **kwargs)
            finally:
                self.depth, self.seconds = 0, self.seconds + now() - begin

        return timed


def _waiting(rank, size):
    """(seconds of the steps, those in which the main thread planned, and those in which it waited for plans).

    Planning is counted in the thread's own CPU seconds: four ranks share the machine's cores, and a lookup
    of microseconds that another rank interrupts takes milliseconds by the clock.
    """
    planned, waited = _Clock(), _Clock()
    prepare_module.await_plan = waited.around(prepare_module.await_plan, time.perf_counter)
    for module, names in (
        (agree, ("call_of",)),
        (function, ("call_of",)),
        (call_module, ("program", "tiles_of")),
    ):
        for name in names:
            setattr(module, name, planned.around(getattr(module, name), time.thread_time))
    torch.set_num_threads(1)
    engine, loader = start(config_of(2, size), in_order(_packed(STEPS), size), max_position_embeddings=TOKENS)
    begin = None
    for step, batch in enumerate(loader):
        if step == 2:  # the first finds out what calls are like
            begin, planned.seconds, waited.seconds = time.perf_counter(), 0.0, 0.0
        engine.backward(engine(**batch).loss)
        engine.step()
    return time.perf_counter() - begin, planned.seconds, waited.seconds


@pytest.mark.slow
def test_steps_wait_less_than_1_per_cent_for_plans():
    found = processes(4, _waiting)
    assert max((planned + waited) / total for total, planned, waited in found) < 0.01, found


def test_a_batch_is_handed_out_once_the_next_is_planned(monkeypatch):
    planned = []
    where = "burst_mcore.transformers.data.loader.prepare"
    monkeypatch.setattr(where, lambda mask, **how: planned.append(mask))
    batches = [{name: x[None] for name, x in sample.items()} for sample in _packed(3)]
    seen = []
    for batch in ShardedLoader(batches, group=None):
        seen.append((len(planned), torch.equal(batch["input_ids"], batches[len(seen)]["input_ids"])))
    assert seen == [(2, True), (3, True), (3, True)]
    assert prepare_module.prepare(planned[0], tokens=TOKENS, ranks=97) == []


def _groups(count):
    """Batches of rollouts of one prompt, which share more or less of it in each."""
    for batch in range(count):
        draw = torch.Generator().manual_seed(batch)
        prompt, *answers = (
            torch.randint(3, VOCABULARY, (n + batch,), generator=draw) for n in (30, 5, 9, 12)
        )
        yield fold([torch.cat([prompt, answer]) for answer in answers]).batch


def _of_trees(rank, size):
    """(masks of the calls of each step, masks planned until its batch was handed out)."""
    planned, called = [], []
    plan, wait = prepare_module._plan, prepare_module.await_plan
    prepare_module._plan = lambda request, tokens: (planned.append(str(request.mask)), plan(request, tokens))
    prepare_module.await_plan = lambda mask: (called.append(str(mask)), wait(mask))
    engine, loader = start(config_of(1, size), _groups(6), kind="Gemma2", sliding_window=16)
    steps = []
    for batch in loader:
        before = {*planned}
        called.clear()
        engine.backward(engine(**batch).loss)
        engine.step()
        steps.append(({*called}, before))
    return steps


def test_the_trees_of_rollouts_are_planned_ahead_with_each_window():
    for steps in processes(2, _of_trees):
        for calls, planned in steps[2:]:  # the first finds out what calls are like, when the second is there
            assert len(calls) == 2 and calls <= planned
        every = {mask for calls, _ in steps[2:] for mask in calls}
        assert len(every) == 8 and steps[-1][1] == every  # and no other plan was made


def _order(rank, size, folder):
    """Of each batch that a Trainer worked on, the documents; and those planned before it was handed out."""
    import burst_mcore.deepspeed as burst
    from burst_mcore.deepspeed.accelerate.loader import BurstSPDataLoaderAdapter
    from burst_mcore.transformers.data import loader as loader_module

    planned, before, own = [], [], BurstSPDataLoaderAdapter._part
    loader_module.prepare = lambda mask, **how: planned.append(tuple(mask.document_ends.tolist()))

    def part(self, whole):
        ends = [*(whole["position_ids"][0] == 0).nonzero().flatten().tolist(), TOKENS]
        before.append((tuple(ends), list(planned)))
        return own(self, whole)

    BurstSPDataLoaderAdapter._part = part
    quiet()
    burst.replace_ulysses()
    long = partial(model_of, max_position_embeddings=TOKENS)
    trained(f"{folder}/{rank}", size, _packed(6), model=long, max_steps=6)
    return before


def test_the_trainer_plans_the_next_load_while_it_works_on_one(tmp_path):
    pytest.importorskip("accelerate")
    for before in processes(2, _order, str(tmp_path)):
        documents = [ends for ends, _ in before]
        assert len(set(documents)) == 6
        for index, (_, planned) in enumerate(before[:-1]):
            assert documents[index + 1] in planned, index


def test_a_loader_that_fails_hands_out_what_it_had():
    def batches():
        yield {"input_ids": torch.ones(1, 8, dtype=torch.int64)}
        raise OSError("the disk is gone")

    loader = iter(ShardedLoader(batches(), group=None))
    assert next(loader)["input_ids"].shape == (1, 8)
    with pytest.raises(OSError, match="the disk is gone"):
        next(loader)
