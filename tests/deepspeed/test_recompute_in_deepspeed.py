"""Recompute policies of the section: the same gradients, and no more attention than a policy leaves."""

import gc
import json
import os
import weakref
from pathlib import Path

import deepspeed
import pytest
import torch
from engines import config_of, dataset, model_of, plain, quiet, start, worst
from kernel_calls import rows_of_kernel_calls
from ranks import on_ranks, poison

import burst_mcore.deepspeed as burst
from burst_mcore.deepspeed.section import Checkpointing
from burst_mcore.transformers.prepare import attach_checkpointing

TOKENS, LAYERS = 32, 2
SEGMENT = {"policy": "segment", "keep": 0.5}


def _step(engine, batch, rows):
    """(loss, gradients, rows attended in the forward, rows attended again in backward)."""
    rows.clear()
    loss = engine(**batch).loss
    forward = sum(rows)
    engine.backward(loss)
    again = sum(rows) - forward
    get = deepspeed.utils.safe_get_full_grad
    gradients = {name: get(p).clone() for name, p in engine.module.named_parameters()}
    engine.step()
    return loss.item(), gradients, forward, again


def _packed():
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 61, (1, TOKENS), generator=generator)
    return {"input_ids": ids, "cu_seqlens": torch.tensor([0, 9, 10, TOKENS])}


HALF = LAYERS * TOKENS * 4 * (8 * 4 + 4) / 2 / 2 / 1e9
"""GB of half of O and LSE of a rank of two."""
ZERO_2 = {
    "none": {"policy": "none"},
    "segment": SEGMENT,
    "auto": {"policy": "segment", "keep": "auto", "memory_gb": HALF},
    "full": {"policy": "full"},
    "none again": {"policy": "none"},
}
ZERO_3 = {
    "none": {"policy": "none"},
    "attention": {"policy": "attention"},
    "offload": {**SEGMENT, "offload": True},
}


@pytest.mark.parametrize(("stage", "policies"), [(2, ZERO_2), (3, ZERO_3)], ids=["ZeRO-2", "ZeRO-3"])
@on_ranks(2)
def test_gradients_and_rows(rank, size, stage, policies):
    """Hold losses and gradients of each policy to those without, and the rows that it attends again."""
    kept = 2 * LAYERS * TOKENS // 4  # the last half of the queries of a rank attends in both steps of two
    rows, without = rows_of_kernel_calls(), {}
    model = model_of()
    section = {"layout": "striped", "kernel": "aten-cpu", "head_parallel": 1, "backward": "query"}
    for name, checkpointing in policies.items():
        config = config_of(stage, size, checkpointing=checkpointing, **section)
        config["optimizer"]["params"]["lr"] = 0.0
        engine, _ = start(config, model=model if stage < 3 else None)  # the same, set to another policy
        for batch in ("one", "packed"):
            data = dataset(1, TOKENS) if batch == "one" else iter([_packed()])
            (part,) = burst.shard_loader(data, engine)
            for _ in range(2 if name == "auto" else 1):  # it learns in the first step
                loss, gradients, forward, again = _step(engine, part, rows)
            want_loss, want = without.setdefault(batch, (loss, gradients))
            assert loss == pytest.approx(want_loss, rel=1e-5), (name, batch)
            assert worst(gradients, want) < 1e-5, (name, batch)
            attends_again = {"full": forward, "segment": forward - kept}.get(checkpointing["policy"], 0)
            assert forward > kept and again == attends_again, (name, batch, forward)
        engine.destroy()


def test_policies_replace_each_other_and_leave_what_the_user_had():
    def checkpointed(model):
        layer = model.model.layers[0]
        return layer.gradient_checkpointing, getattr(layer, "_gradient_checkpointing_func", None)

    model = model_of()
    for policy in (None, Checkpointing(policy="full").recomputed(), None):
        attach_checkpointing(model, policy)
        assert checkpointed(model)[0] == (policy is not None)
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": True})
    users = checkpointed(model)
    for policy in ("attention", "segment"):
        attach_checkpointing(model, Checkpointing(policy=policy).recomputed())
        on, function = checkpointed(model)
        assert on and function is not users[1] and not function.keywords["use_reentrant"]
    attach_checkpointing(model, None)
    assert checkpointed(model) == users and users[0]
    attach_checkpointing(model, Checkpointing(policy="segment").recomputed())
    gone = weakref.ref(model)
    del model, enable
    gc.collect()
    assert gone() is None  # nothing of ours keeps a model alive


@on_ranks(4)
def test_the_section_of_the_docs_word_for_word(rank, size):
    page = (Path(__file__).parents[2] / "docs" / "frameworks" / "deepspeed.md").read_text()
    config = json.loads(page.split("```json\n")[1].split("```")[0])
    poison(False)  # buffers of DeepSpeed's default sizes are never touched
    quiet()
    os.environ["PATH"] = "/nowhere"  # no compiler is found, and none is needed
    data = dataset(1)
    engine, _, loader, _ = burst.initialize(model=model_of(), config=config, training_data=data)
    (batch,) = loader
    loss = engine(**batch).loss
    engine.backward(loss)
    get = deepspeed.utils.safe_get_full_grad
    gradients = {name: get(p).clone() for name, p in engine.module.named_parameters()}
    before = deepspeed.utils.safe_get_full_fp32_param(engine.module.lm_head.weight).clone()
    engine.step()
    after = deepspeed.utils.safe_get_full_fp32_param(engine.module.lm_head.weight)
    assert (after - before).abs().max() == pytest.approx(1e-3, rel=0.01)  # AdamW's first step
    assert os.listdir(os.environ["TORCH_EXTENSIONS_DIR"]) == []
    (want,), truth, *_ = plain(data)
    assert loss.item() == pytest.approx(want, rel=1e-5) and worst(gradients, truth) < 1e-5
