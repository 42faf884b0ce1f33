"""Packed documents, other ones in every batch: the loader plans ahead."""

import itertools
import random
from functools import partial

import pytest
import torch
from engines import VOCABULARY, model_of, quiet
from ranks import on_ranks
from test_trainer import trained

import burst_mcore.deepspeed as burst
from burst_mcore.attention import prepare as prepare_module
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


@on_ranks(2)
def test_the_trainer_plans_the_next_load_while_it_works_on_one(rank, size, tmp_path):
    """The documents of each batch were planned before the batch in front of it was handed out."""
    pytest.importorskip("accelerate")
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
    trained(str(tmp_path / str(rank)), size, _packed(6), model=long, max_steps=6)
    assert len({ends for ends, _ in before}) == 6
    for (_, planned_then), (ends, _) in itertools.pairwise(before):
        assert ends in planned_then


def test_a_loader_that_fails_hands_out_what_it_had():
    def batches():
        yield {"input_ids": torch.ones(1, 8, dtype=torch.int64)}
        raise OSError("the disk is gone")

    loader = iter(ShardedLoader(batches(), group=None))
    assert next(loader)["input_ids"].shape == (1, 8)
    with pytest.raises(OSError, match="the disk is gone"):
        next(loader)
