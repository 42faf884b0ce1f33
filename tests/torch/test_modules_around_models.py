"""Modules of a user's own around a model, models without a head, embeddings in the place of tokens."""

import logging

import pytest
import torch
import transformers
from causal_lms import TINY, dataset, model_of, worst
from ranks import processes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from burst_mcore.torch import parallelize
from burst_mcore.transformers.errors import RefusedError
from burst_mcore.transformers.models.strategies import WholeBatch
from burst_mcore.transformers.prepare import sequence_of
from burst_mcore.wrap import while_set

WIDTH, TOKENS = TINY["hidden_size"], 41


def _ids(rows=1, tokens=TOKENS):
    return torch.stack([sample["input_ids"] for sample in dataset(rows, tokens=tokens)])


def _mesh(size):
    logging.getLogger("burst_mcore").setLevel("ERROR")
    return init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))


def _refused(do):
    with pytest.raises(RefusedError) as caught:
        do()
    return str(caught.value)


def _features():
    return torch.randn(1, TOKENS, 6, generator=torch.Generator().manual_seed(9))


class Around(nn.Module):
    """A causal LM between a projector of features and a head of values."""

    def __init__(self, lm=None):
        super().__init__()
        self.lm = model_of() if lm is None else lm
        torch.manual_seed(3)
        self.project, self.values = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, input_ids, features, **others):
        embeds = self.lm.get_input_embeddings()(input_ids) + self.project(features)
        out = self.lm(inputs_embeds=embeds, output_hidden_states=True, **others)
        return out.loss, self.values(out.hidden_states[-1])


def _trained(loss, model):
    loss.backward()
    whole = {name: p.grad for name, p in model.named_parameters()}
    whole = {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in whole.items()}
    return loss.item(), whole


def _around(rank, size, prepared, wrapper, loss):
    mesh, model = _mesh(size), Around()
    cp = parallelize(model.lm if prepared == "inside" else model, mesh, loss=loss)
    engine = model
    if wrapper == "fsdp":
        for layer in model.lm.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        engine = DistributedDataParallel(model)
    batch = cp.shard({"input_ids": _ids(), "features": _features()})
    of_labels, values = engine(**batch)
    return _trained(of_labels + cp.gather(values, TOKENS).pow(2).mean(), model)


@pytest.mark.parametrize(
    ("prepared", "wrapper", "loss"),
    [
        ("inside", "fsdp", "fused"),
        ("outside", "fsdp", "model"),
        ("outside", "ddp", "fused"),
        pytest.param("inside", "fsdp", "model", marks=pytest.mark.slow),
    ],
)
def test_around_a_causal_lm(prepared, wrapper, loss):
    """The LM in it is prepared, or all of it; FSDP2's root is the module around."""
    model = Around()
    of_labels, values = model(_ids(), _features(), labels=_ids())
    want, gradients = _trained(of_labels + values.pow(2).mean(), model)
    for found, theirs in processes(2, _around, prepared, wrapper, loss):
        assert found == pytest.approx(want, rel=1e-6)
        assert worst(theirs, gradients) < 2e-6


def _where_fsdp_has_not_all(rank, size):
    mesh, found = _mesh(size), []
    alone = init_device_mesh("cpu", (size, 1), mesh_dim_names=("cp", "one"))["one"]
    for part, over in (("lm", alone), ("values", mesh)):
        model = Around()
        cp = parallelize(model, mesh)
        fully_shard(getattr(model, part), mesh=over)
        loss, _ = (
            model(**cp.shard({"input_ids": _ids(), "features": _features()}))
            if part == "values"
            else (model.lm(**cp.shard({"input_ids": _ids()})).loss, None)
        )
        found += [_refused(loss.backward)]
    return found


def test_fsdp_that_does_not_reduce():
    for of_lm, of_rest in processes(2, _where_fsdp_has_not_all):
        assert of_lm.startswith("refused (reduction): the mesh of fully_shard has not all ranks of cp")
        assert of_rest.startswith("refused (reduction): nothing reduces lm.model.embed_tokens.weight")


def _base(kind="Llama"):
    return model_of(kind=kind).model


def _vlm():
    text = {
        k: TINY[k]
        for k in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim")
    }
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}
    merged = {"spatial_merge_size": 2, "temporal_patch_size": 1, "num_position_embeddings": 16}
    sizes = {"hidden_size": 32, "out_hidden_size": WIDTH, "depth": 1, "num_heads": 2, "intermediate_size": 32}
    vision = {**sizes, **merged, "patch_size": 4, "deepstack_visual_indexes": [0]}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "rope_parameters": rope}
    torch.manual_seed(0)
    return transformers.Qwen3VLForConditionalGeneration(
        transformers.Qwen3VLConfig(text_config={**text, **heads}, vision_config=vision)
    )


MODELS = {
    "Llama": _base,
    "Gemma2": lambda: _base("Gemma2"),
    "Qwen3-VL's": lambda: _vlm().model.language_model,
}


def _headless(rank, size, name):
    mesh, model = _mesh(size), MODELS[name]().double()
    cp = parallelize(model, mesh, loss="model", checkpointing="segment" if name == "Llama" else "none")
    engine = DistributedDataParallel(model)
    part = cp.shard({"input_ids": _ids(2)})
    hidden = cp.gather(engine(**part).last_hidden_state, TOKENS)
    with while_set(sequence_of(model), batches=WholeBatch(sequence_of(model))), torch.no_grad():
        whole = model(input_ids=_ids(2), labels=_ids(2)).last_hidden_state
    return whole, *_trained(hidden[:, -1].pow(2).sum() + hidden.mean(), model)


@pytest.mark.parametrize("name", MODELS)
def test_models_without_a_head(name):
    """With loss="model" these give hidden states: of a shard, or of whole batches, which the model shards."""
    model = MODELS[name]().double()
    hidden = model(input_ids=_ids(2)).last_hidden_state
    want, gradients = _trained(hidden[:, -1].pow(2).sum() + hidden.mean(), model)
    for whole, loss, theirs in processes(2, _headless, name):
        torch.testing.assert_close(whole, hidden, rtol=1e-4, atol=1e-5)
        assert loss == pytest.approx(want, rel=1e-6)
        assert worst(theirs, gradients) < 5e-6


def _refusals(rank, size):
    mesh, heads = _mesh(size), {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**TINY, **heads, num_labels=1)
    rewards = transformers.LlamaForSequenceClassification(config)
    two = nn.ModuleList([model_of(), model_of(kind="Qwen3")])
    bert = transformers.BertModel(
        transformers.BertConfig(
            hidden_size=24, num_attention_heads=4, num_hidden_layers=1, attention_probs_dropout_prob=0.0
        )
    )
    found = [
        _refused(lambda: parallelize(_base(), mesh)),
        _refused(lambda: parallelize(_vlm(), mesh)),
        _refused(lambda: parallelize(rewards, mesh, loss="model")),
        _refused(lambda: parallelize(two, mesh, loss="model")),
        _refused(lambda: bert(**parallelize(bert, mesh, loss="model").shard({"input_ids": _ids()}))),
    ]
    assert rewards.config._attn_implementation != "burst"
    return found


def test_what_is_refused():
    want = [
        "LlamaModel has no head that makes a loss of labels: give the causal LM (of class ...ForCausalLM), "
        'or, for hidden states of which you make a loss, loss="model"',
        'Give its language model alone, with loss="model"',
        "LlamaForSequenceClassification has a loss of its own",
        "ModuleList holds a LlamaForCausalLM and a Qwen3ForCausalLM: parallelize the causal LM in it alone",
        "refused (mask): the model asks for a mask that is not served: bidirectional_mask_function",
    ]
    for found in processes(2, _refusals):
        for text, error in zip(want, found, strict=True):
            assert text in error


def _embedded(rank, size):
    mesh, model = _mesh(size), model_of()
    cp = parallelize(model, mesh)
    embeds = model.get_input_embeddings()(_ids(2))
    batch = {"inputs_embeds": embeds, "labels": _ids(2)}
    assert cp.shard({"inputs_embeds": embeds})["shift_labels"].eq(-100).all()
    part = cp.shard(batch)
    assert "input_ids" not in part
    engine = DistributedDataParallel(model)
    found = _trained(engine(**part).loss, model)
    with while_set(sequence_of(model), batches=WholeBatch(sequence_of(model))), torch.no_grad():
        assert model(**batch).loss.item() == pytest.approx(found[0], rel=1e-6)
        logits = model(inputs_embeds=embeds).logits
    return *found, logits, _refused(lambda: cp.shard({"labels": _ids(2)}))


def test_embeddings_in_the_place_of_tokens():
    model = model_of()
    out = model(input_ids=_ids(2), labels=_ids(2))
    want, gradients = _trained(out.loss, model)
    for loss, theirs, logits, words in processes(2, _embedded):
        assert loss == pytest.approx(want, rel=1e-6)
        assert worst(theirs, gradients) < 2e-6
        torch.testing.assert_close(logits, out.logits, rtol=1e-4, atol=1e-5)
        assert words.endswith("got None. In their place may stand inputs_embeds [rows, tokens, hidden]")
