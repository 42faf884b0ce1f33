"""Models over shards: hybrids, windows, sinks, chunks; layouts, packed documents, recompute, generation."""

import copy
import sys
import types

import causal_lms as plain_lms
import pytest
import torch
from ranks import on_ranks, processes
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback
from zoo import VOCABULARY, model_of, sharded, worst

from burst_mcore.agreement.claims import OthersError
from burst_mcore.recurrent import bound
from burst_mcore.torch import parallelize
from burst_mcore.transformers.errors import UnsupportedError
from burst_mcore.transformers.models.supported import use_burst

EVERY = (
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "kimi_linear", "olmo_hybrid"),
    *("mamba2", "bamba", "granitemoehybrid", "falcon_h1", "nemotron_h", "lfm2", "lfm2_moe"),
    *("mamba", "falcon_mamba", "jamba", "zamba", "zamba2", "minimax", "recurrent_gemma"),
    *("bailing_hybrid", "lara_mini", "lfm3"),
)
DOCUMENTS = [[9, 1, 2, 38, 14], [50, 14]]
"""Lengths of the documents of each of two rows."""


BARS = {"qwen3_next": 1.2e-4, "lara_mini": 5.6e-5, "bailing_hybrid": 8.6e-5}
"""Twice the error of the gradients of gates, in one process, between rules of chunks of 64 and of 16.

The worst is A_log's, a sum over all tokens that nearly cancels: 2e-3 where others are 0.4. The error is of
these documents: of [1, 1, 1, 58] and [61] tokens Qwen3-Next's is 2.2e-4 between chunks, 3.0e-4 on 3 ranks."""


def batch_of(documents):
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, VOCABULARY, (2, 64), generator=generator)
    position_ids = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in documents])
    return {"input_ids": ids, "labels": ids, "position_ids": position_ids}


def alone(model, batch, documents):
    """The mean loss of all labels, of each document alone by the unmodified model; and its gradients."""
    total, labels = torch.zeros(()), 0
    for row, ids in zip(documents, batch["input_ids"], strict=True):
        for document in ids.split(row):
            logits = model(input_ids=document[None], use_cache=False).logits[0, :-1]
            total = total + cross_entropy(logits.float(), document[1:], reduction="sum")
            labels += len(document) - 1
    (total / labels).backward()
    return (total / labels).item()


def _cells(rank, size, cells):
    torch.use_deterministic_algorithms(False)
    for cell in cells:
        name, layout, documents, recomputes = cell
        model = plain_lms.model_of(vocab_size=VOCABULARY, **ROPES[name]) if name in ROPES else model_of(name)
        other, batch = copy.deepcopy(model), batch_of(documents)
        if recomputes:
            other.gradient_checkpointing_enable()
        loss, want = sharded(other, batch, layout=layout).item(), alone(model, batch, documents)
        bar = BARS.get(name, 2e-5)
        assert loss == pytest.approx(want, rel=bar) and worst(other, model) < bar, cell


ROPES = {
    "Llama, dynamic": {
        "max_position_embeddings": 32,
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    },
    "Llama, longrope": {
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 10000.0, "factor": 2.0,
            "original_max_position_embeddings": 40, "short_factor": [1.0] * 4,
            "long_factor": [2.0, 3.0, 4.0, 5.0],
        },
    },
}  # fmt: skip
"""Rotary frequencies that depend on how long a sequence is; 64 tokens are past the first length."""


def test_layouts_documents_and_recompute():
    processes(
        3,
        _cells,
        [
            ("mistral", "striped", DOCUMENTS, False),
            ("gemma2", "zigzag", DOCUMENTS, True),
            ("gpt_oss", "striped", DOCUMENTS, False),
            ("llama4_text", "zigzag", DOCUMENTS, False),
            *((name, "zigzag", [[64], [64]], False) for name in ROPES),
            ("lfm2", "zigzag", DOCUMENTS, True),
            ("qwen3_next", "contiguous", DOCUMENTS, False),
            ("bamba", "zigzag", DOCUMENTS, True),
            ("mamba", "zigzag", DOCUMENTS, True),
            ("minimax", "zigzag", DOCUMENTS, True),
            ("recurrent_gemma", "zigzag", DOCUMENTS, True),
        ],
    )


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", EVERY)
def test_every_hybrid(name, size):
    layouts = [("zigzag", [[64], [64]]), ("contiguous", [[64], [64]])]
    packed = [("zigzag", DOCUMENTS), ("contiguous", DOCUMENTS)]
    processes(size, _cells, [(name, *cell, number == 2) for number, cell in enumerate([*layouts, *packed])])


def test_a_kernel_without_a_state_is_refused_when_a_model_is_prepared(monkeypatch):
    """transformers' wrapper shows the signature of its torch code, and would drop the state."""
    package = types.ModuleType("package_of_kernels")
    package.chunk_scan = lambda hidden_states, dt, A, B, C, chunk_size, D=None: hidden_states
    monkeypatch.setitem(sys.modules, package.__name__, package)
    model = model_of("bamba")
    (mixer,) = bound.mixers_of(model).values()
    module = sys.modules[type(mixer).__module__]
    plain = getattr(getattr(module, bound.MAMBA2), "replaces", getattr(module, bound.MAMBA2))
    wraps = use_kernel_func_from_hub_with_fallback("chunk_scan", package.__name__)
    monkeypatch.setattr(module, bound.MAMBA2, wraps(plain))
    with pytest.raises(
        UnsupportedError, match=r"\(model\): kernel <lambda> takes no initial_states or return_f"
    ):
        use_burst(model, 2)


@on_ranks(2)
def test_a_scattered_layout_and_a_mixer_of_another_way_are_refused(rank, size):
    with pytest.raises(UnsupportedError, match="layout striped shards neighbouring tokens"):
        sharded(model_of("lfm2"), batch_of([[64], [64]]), layout="striped")
    others = {
        "lfm2": ("causal_conv1d_fn", lambda hidden_states, **_: hidden_states),
        "recurrent_gemma": ("RecurrentGemmaRecurrentBlock", lambda hidden_states, **_: (hidden_states, None)),
    }
    for name, (called, forward) in others.items():
        model = model_of(name)
        next(iter(bound.mixers_of(model).values())).forward = forward
        with pytest.raises(UnsupportedError, match=f"{called}, called 0 times instead of 1"):
            sharded(model, batch_of([[64], [64]]))


@on_ranks(2)
def test_masks_that_differ_between_layers_are_refused(rank, size):
    """Rank 0 gives a mask of each kind of layers, of documents that differ: all ranks refuse."""
    model = model_of("qwen3_next")
    batch, cp = batch_of([[64], [64]]), parallelize(model, init_device_mesh("cpu", (size,)))
    packed = {"full_attention": None, "linear_attention": torch.ones(2, 64).tril()}
    words = (
        "rank 0 of the ring refused this call: .*masks by kinds of layers",
        "masks by kinds of layers are not supported: give one",
    )
    for part in cp.loader([batch]):
        with pytest.raises(OthersError if rank else UnsupportedError, match=words[rank == 0]):
            model(**part, **({"attention_mask": packed} if rank == 0 else {}))
    with pytest.raises(UnsupportedError, match="attention_mask must be a tensor, or lists of numbers"):
        next(iter(cp.loader([{**batch, "attention_mask": packed}])))


@on_ranks(2)
def test_generation(rank, size):
    """A prompt is continued as by the unmodified model."""
    for name in ("qwen3_next", "lfm2", "mamba", "minimax", "recurrent_gemma"):
        model = model_of(name).eval()
        other, ids = copy.deepcopy(model), batch_of([[64], [64]])["input_ids"][:, :11]
        sharded(other.train(), batch_of([[64], [64]]))
        other.eval()
        how = {"max_new_tokens": 4, "do_sample": False, "use_cache": True}
        assert torch.equal(other.generate(ids, **how), model.generate(ids, **how)), name
