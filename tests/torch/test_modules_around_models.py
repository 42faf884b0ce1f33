"""Modules of a user's own around a model, models without a head, embeddings in the place of tokens."""

import pytest
import torch
import transformers
from causal_lms import TINY, dataset, model_of
from loops import assert_alike, gradients_of, mesh_of, refuses
from ranks import on_ranks, processes
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from burst_mcore.torch import parallelize
from burst_mcore.transformers.models.strategies import WholeBatch
from burst_mcore.transformers.prepare import sequence_of
from burst_mcore.wrap import while_set

WIDTH, TOKENS = TINY["hidden_size"], 41


def _ids(rows=1, tokens=TOKENS):
    return torch.stack([sample["input_ids"] for sample in dataset(rows, tokens=tokens)])


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
    return loss.item(), gradients_of(model)


def _around(rank, size, prepared, wrapper, loss):
    mesh, model = mesh_of(size), Around()
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
    want = _trained(of_labels + values.pow(2).mean(), model)
    assert_alike(processes(2, _around, prepared, wrapper, loss), want, 1e-6, 2e-6)


@on_ranks(2)
def test_models_without_a_head(rank, size):
    """With loss="model" these give hidden states: of a shard, or of whole batches, which the model shards."""
    model, plain = model_of().model.double(), model_of().model.double()
    cp = parallelize(model, mesh_of(size), loss="model", checkpointing="segment")
    engine = DistributedDataParallel(model)
    part = cp.shard({"input_ids": _ids(2)})
    hidden = cp.gather(engine(**part).last_hidden_state, TOKENS)
    want = plain(input_ids=_ids(2)).last_hidden_state
    with while_set(sequence_of(model), batches=WholeBatch(sequence_of(model))), torch.no_grad():
        whole = model(input_ids=_ids(2), labels=_ids(2)).last_hidden_state
    torch.testing.assert_close(whole, want, rtol=1e-4, atol=1e-5)
    found, of_one = (
        _trained(x[:, -1].pow(2).sum() + x.mean(), m) for x, m in ((hidden, model), (want, plain))
    )
    assert_alike([found], of_one, 1e-6, 5e-6)


@on_ranks(2)
def test_what_is_refused(rank, size):
    mesh, heads = mesh_of(size), {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**TINY, **heads, num_labels=1)
    rewards = transformers.LlamaForSequenceClassification(config)
    two = nn.ModuleList([model_of(), model_of(kind="Qwen3")])
    bert = transformers.BertModel(
        transformers.BertConfig(
            hidden_size=24, num_attention_heads=4, num_hidden_layers=1, attention_probs_dropout_prob=0.0
        )
    )

    def given(model, loss="model"):
        return lambda: parallelize(model, mesh, loss=loss)

    refuses(
        ("model: LlamaModel has no head that makes a loss ... ForCausalLM", given(model_of().model, "fused")),
        ("loss: LlamaForSequenceClassification has a loss of its own", given(rewards)),
        ("model: ModuleList holds a LlamaForCausalLM and a Qwen3ForCausalLM", given(two)),
        ("mask: bidirectional_mask_function", lambda: bert(**given(bert)().shard({"input_ids": _ids()}))),
    )
    assert rewards.config._attn_implementation != "burst"


@on_ranks(2)
def test_embeddings_in_the_place_of_tokens(rank, size):
    model, plain = model_of(), model_of()
    cp = parallelize(model, mesh_of(size))
    embeds = model.get_input_embeddings()(_ids(2))
    batch = {"inputs_embeds": embeds, "labels": _ids(2)}
    assert cp.shard({"inputs_embeds": embeds})["shift_labels"].eq(-100).all()
    part = cp.shard(batch)
    assert "input_ids" not in part
    out = plain(input_ids=_ids(2), labels=_ids(2))
    found = _trained(DistributedDataParallel(model)(**part).loss, model)
    assert_alike([found], _trained(out.loss, plain), 1e-6, 2e-6)
    with while_set(sequence_of(model), batches=WholeBatch(sequence_of(model))), torch.no_grad():
        assert model(**batch).loss.item() == pytest.approx(found[0], rel=1e-6)
        torch.testing.assert_close(model(inputs_embeds=embeds).logits, out.logits, rtol=1e-4, atol=1e-5)
    words = "batch: got None, or give inputs_embeds [rows, tokens, hidden]"
    refuses((words, lambda: cp.shard({"labels": _ids(2)})))
