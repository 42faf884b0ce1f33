"""Engines in company: compiled ones, and plain ones that are made after."""

from itertools import product

import deepspeed
import pytest
import torch
from engines import config_of, dataset, model_of, plain, plain_loss, start, trained, worst
from ranks import on_ranks


@pytest.mark.slow
@on_ranks(2)
def test_compiled(rank, size):
    losses, gradients, _, parameters = plain(dataset(1, tokens=41))
    for how, stage in product(("engine", "model"), (2, 3)):
        engine, loader = start(config_of(stage, size), dataset(1, tokens=41))
        (engine if how == "engine" else engine.module).compile(backend="eager")
        ours, found, _, stepped = trained(engine, loader, 1)
        engine.destroy()
        assert ours == pytest.approx(losses, rel=1e-5)
        assert worst(found, gradients) < 1e-5
        assert worst(stepped, parameters) < 1e-5


@on_ranks(2)
def test_a_plain_engine_beside_ours_keeps_its_own_groups(rank, size):
    """A plain engine gets the same sample on both ranks, and is made while a burst engine lives."""
    _, want, *_ = plain(dataset(1))
    burst_engine, _ = start(config_of(2, size))
    for stage in (1, 2, 3):
        config = config_of(stage, 1)
        del config["burst_attention"], config["sequence_parallel_size"]
        model = model_of()
        engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
        (sample,) = dataset(1)
        loss = engine(input_ids=sample["input_ids"][None], labels=sample["labels"][None]).loss
        engine.backward(loss)
        get = deepspeed.utils.safe_get_full_grad
        assert worst({name: get(p) for name, p in engine.module.named_parameters()}, want) < 1e-5, stage
        engine.step()
        engine.destroy()
    burst_engine.destroy()


@on_ranks(3)
def test_evaluation_and_generate(rank, size):
    """Under ZeRO-3, as by one process."""
    kind = {"kind": "GptOss", "sliding_window": 7, "num_local_experts": 2, "num_experts_per_tok": 1,
            "layer_types": ["sliding_attention", "full_attention"]}  # fmt: skip
    data = dataset(1, tokens=41)
    engine, loader = start(config_of(3, size), data, model=model_of(**kind))
    engine.eval()
    with torch.no_grad():
        (evaluated,) = (engine(**batch).loss.item() for batch in loader)
    asked = {"max_new_tokens": 8, "do_sample": False}
    answer = engine.module.generate(data[0]["input_ids"][None, :21], **asked)
    engine.train()
    again = engine(**next(iter(loader))).loss.item()  # nothing is left behind
    engine.destroy()
    model = model_of(**kind).eval()
    with torch.no_grad():
        assert [evaluated, again] == pytest.approx([plain_loss(model, data[0]).item()] * 2, rel=1e-5)
    assert torch.equal(answer, model.generate(data[0]["input_ids"][None, :21], **asked))
