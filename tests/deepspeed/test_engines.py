"""Engines in company: compiled ones, and plain ones that are made after."""

import logging

import deepspeed
import pytest
import torch
from engines import config_of, dataset, model_of, plain, quiet, start, trained, worst
from ranks import processes
from safetensors.torch import load_file

import burst_mcore.deepspeed as burst


def _compiled(rank, size, cases):
    found = {}
    for how, stage in cases:
        engine, loader = start(config_of(stage, size), dataset(1, tokens=41))
        (engine if how == "engine" else engine.module).compile(backend="eager")
        found[how, stage] = trained(engine, loader, 1)
        engine.destroy()
    return found


@pytest.mark.parametrize(
    "cases",
    [[("engine", 2)], pytest.param([("engine", 3), ("model", 3), ("model", 2)], marks=pytest.mark.slow)],
    ids=["an engine of ZeRO-2", "others"],
)
def test_compiled(cases):
    losses, gradients, _, parameters = plain(dataset(1, tokens=41))
    for found in processes(2, _compiled, cases):
        for ours, their_gradients, _, theirs in found.values():
            assert ours == pytest.approx(losses, rel=1e-5)
            assert worst(their_gradients, gradients) < 1e-5
            assert worst(theirs, parameters) < 1e-5


def _plain_after(rank, size, stages):
    """Gradients of a plain engine, of the same sample on both ranks, made while a burst engine lives."""
    quiet()
    burst_engine, _ = start(config_of(2, size))
    found = {}
    for stage in stages:
        config = config_of(stage, 1)
        del config["burst_attention"], config["sequence_parallel_size"]
        model = model_of()
        engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
        (sample,) = dataset(1)
        loss = engine(input_ids=sample["input_ids"][None], labels=sample["labels"][None]).loss
        engine.backward(loss)
        get = deepspeed.utils.safe_get_full_grad
        found[stage] = {name: get(p).clone() for name, p in engine.module.named_parameters()}
        engine.step()
        engine.destroy()
    burst_engine.destroy()
    return found


def _said(rank, size, _):
    lines = []

    class Note(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    quiet()
    logging.getLogger("burst_mcore").addHandler(Note())
    engine = burst.initialize(model=model_of(), config=config_of(2, size))[0]
    engine.destroy()
    return [line for line in lines if "burst_mcore" in line]


def test_the_first_rank_says_how_many_share_a_sequence():
    first, second = processes(2, _said, None)
    assert len(first) == 1 and not second
    assert "2 ranks share each sequence, 1 CP group(s); the loss is fused with the LM head" in first[0]


def test_a_plain_engine_beside_ours_keeps_its_own_groups():
    _, want, *_ = plain(dataset(1))
    for found in processes(2, _plain_after, [1, 2, 3]):
        for gradients in found.values():
            assert worst(gradients, want) < 1e-5


def _saved(rank, size, folder):
    """Save the model of an engine after a step whose learning rate is 0, as the Trainer does."""
    config = config_of(3, size, checkpointing={"policy": "segment", "keep": 0.5})
    config["optimizer"]["params"]["lr"] = 0.0
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    engine, loader = start(config, dataset(1))
    for batch in loader:
        engine.backward(engine(**batch).loss)
        engine.step()
    engine.save_16bit_model(folder, "weights.bin")
    if rank == 0:
        engine.module.save_pretrained(folder, state_dict=torch.load(f"{folder}/weights.bin"))
    engine.destroy()


def test_a_model_that_is_saved_is_a_plain_one(tmp_path):
    """Names of weights and config.json are those that vLLM and from_pretrained know."""
    processes(2, _saved, str(tmp_path / "ours"))
    model = model_of()
    model.save_pretrained(tmp_path / "plain")
    ours, plain = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "plain"))
    assert worst(ours, plain) == 0  # and the names are the same
    ours, plain = ((tmp_path / name / "config.json").read_text() for name in ("ours", "plain"))
    assert ours == plain and "burst" not in ours
