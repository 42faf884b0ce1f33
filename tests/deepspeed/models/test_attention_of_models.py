"""Windows, soft caps, sinks; packed and padded batches; evaluation, generate: against one process."""

import deepspeed
import pytest
import torch
from engines import VOCABULARY, config_of, dataset, model_of, plain, plain_loss, start, worst
from ranks import processes

import burst_mcore.deepspeed as burst
from burst_mcore.transformers.data.batches import collated

MODELS = {
    "Mistral": {"sliding_window": 7},
    "Gemma2": {"sliding_window": 7, "attn_logit_softcapping": 0.5, "final_logit_softcapping": 3.0,
               "query_pre_attn_scalar": 8},
    "Gemma3Text": {"sliding_window": 7, "query_pre_attn_scalar": 8,
                   "layer_types": ["sliding_attention", "full_attention"]},
    "Qwen3": {},
    "GptOss": {"sliding_window": 7, "num_local_experts": 2, "num_experts_per_tok": 1,
               "layer_types": ["sliding_attention", "full_attention"]},
    "Llama4Text": {"attention_chunk_size": 7, "floor_scale": 4, "attn_scale": 0.5, "num_local_experts": 2,
                   "num_experts_per_tok": 1, "intermediate_size_mlp": 40, "no_rope_layer_interval": 2},
    # Frequencies that depend on how long a sequence is; 41 tokens are past the first length.
    "Llama, dynamic": {"max_position_embeddings": 32,
                       "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
    "Llama, longrope": {"rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 2.0,
                                            "original_max_position_embeddings": 40,
                                            "short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0]}},
}  # fmt: skip


def _models(rank, size, names):
    found = {}
    for name in names:
        data = dataset(1, tokens=41)
        kind = {"kind": name.partition(",")[0], **MODELS[name]}
        engine, loader = start(config_of(2, size), data, model=model_of(**kind))
        (batch,) = loader
        loss = engine(**batch).loss
        engine.backward(loss)
        get = deepspeed.utils.safe_get_full_grad
        gradients = {n: get(p).clone() for n, p in engine.module.named_parameters() if p.requires_grad}
        engine.destroy()
        want_losses, want, *_ = plain(data, **kind)
        want = {n: g for n, g in want.items() if g.norm() > 1e-7}
        found[name] = abs(loss.item() / want_losses[0] - 1), worst({n: gradients[n] for n in want}, want)
    return found


def test_models():
    for found in processes(3, _models, list(MODELS)):
        for name, errors in found.items():
            assert max(errors) < 1e-5, (name, errors)


def _packed_rows():
    """Two rows with documents of their own."""
    generator = torch.Generator().manual_seed(3)
    lengths = [[9, 1, 20, 7], [30, 7]]
    ids = torch.randint(3, VOCABULARY, (2, 37), generator=generator)
    position_ids = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    return {"input_ids": ids, "position_ids": position_ids}, lengths


def _alone(batch, lengths, **kind):
    """Loss and gradients of documents, each alone, by the unmodified model."""
    model, total, labels = model_of(**kind), 0.0, 0
    for row, ids in zip(lengths, batch["input_ids"], strict=True):
        for document in ids.split(row):
            if len(document) > 1:
                sample = {"input_ids": document, "labels": document}
                total, labels = (
                    total + plain_loss(model, sample) * (len(document) - 1),
                    labels + len(document) - 1,
                )
    (total / labels).backward()
    return (total / labels).item(), {name: p.grad for name, p in model.named_parameters()}


def _forward(batch, size, stage=2, **kind):
    engine, _ = start(
        config_of(stage, size, micro=len(batch["input_ids"]), **kind.pop("section", {})), **kind
    )
    (part,) = burst.shard_loader(iter([batch]), engine)
    loss = engine(**part).loss
    engine.backward(loss)
    get = deepspeed.utils.safe_get_full_grad
    gradients = {name: get(p).clone() for name, p in engine.module.named_parameters()}
    engine.destroy()
    return loss.item(), gradients


WINDOW = {"kind": "Mistral", "sliding_window": 7}
CHUNKS = {"kind": "Llama4Text", **MODELS["Llama4Text"]}


def _packed(rank, size, cells):
    found = {}
    batch, lengths = _packed_rows()
    for layout, window in cells:
        loss, gradients = _forward(batch, size, section={"layout": layout}, **window)
        want, want_gradients = _alone(batch, lengths, **window)
        found[layout, *window] = abs(loss / want - 1), worst(gradients, want_gradients)
    return found


@pytest.mark.parametrize(
    "cells",
    [
        [("zigzag", {}), ("striped", WINDOW), ("zigzag", CHUNKS)],
        pytest.param([("striped", {}), ("zigzag", WINDOW)], marks=pytest.mark.slow),
    ],
    ids=["", "more"],
)
def test_packed_batches(cells):
    for found in processes(3, _packed, cells):
        for name, errors in found.items():
            assert max(errors) < 1e-5, (name, errors)


def _batches(rank, size, _):
    found = {}
    batch, lengths = _packed_rows()
    one = {"input_ids": batch["input_ids"][:1], "cu_seqlens": torch.tensor([0, 9, 10, 30, 37])}
    want, want_gradients = _alone(one, lengths[:1])
    loss, gradients = _forward(one, size)
    found["cu_seqlens"] = abs(loss / want - 1), worst(gradients, want_gradients)
    samples = [{"input_ids": batch["input_ids"][0, :n]} for n in (11, 30)]
    want, want_gradients = _alone(
        {"input_ids": torch.cat([x["input_ids"] for x in samples])[None]}, [[11, 30]]
    )
    loss, gradients = _forward(collated(samples), size)
    found["right padding"] = abs(loss / want - 1), worst(gradients, want_gradients)
    rows = collated(samples)
    rows = {name: torch.stack([x[0].roll(19), x[1]]) for name, x in rows.items()}
    assert rows["attention_mask"][0].tolist() == [0] * 19 + [1] * 11
    loss, gradients = _forward(rows, size)
    found["left padding"] = abs(loss / want - 1), worst(gradients, want_gradients)
    return found


def test_padded_batches():
    for found in processes(3, _batches, None):
        for name, errors in found.items():
            assert max(errors) < 1e-5, (name, errors)


def _evaluated(rank, size, names):
    found = {}
    for name in names:
        data = dataset(1, tokens=41)
        kind = {"kind": name, **MODELS.get(name, {})}
        engine, loader = start(config_of(3, size), data, model=model_of(**kind))
        engine.eval()
        with torch.no_grad():
            loss = [engine(**batch).loss.item() for batch in loader]
        prompt = data[0]["input_ids"][None, :21]
        answer = engine.module.generate(prompt, max_new_tokens=8, do_sample=False)
        engine.train()
        trained = engine(**next(iter(loader))).loss.item()  # nothing is left behind
        engine.destroy()
        model = model_of(**kind).eval()
        with torch.no_grad():
            want = plain_loss(model, data[0]).item()
        said = model.generate(prompt, max_new_tokens=8, do_sample=False)
        found[name] = abs(loss[0] / want - 1), abs(trained / want - 1), torch.equal(answer, said)
    return found


@pytest.mark.parametrize(
    "names", [["GptOss"], pytest.param(["Llama", "Mistral"], marks=pytest.mark.slow)], ids=" ".join
)
def test_evaluation_and_generate(names):
    for found in processes(3, _evaluated, names):
        for name, (evaluated, trained, same) in found.items():
            assert max(evaluated, trained) < 1e-5 and same, (name, evaluated, trained, same)
