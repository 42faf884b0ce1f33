"""Masks that models of transformers say by functions and types of tokens: images, prefixes, chunks."""

import copy
import itertools
import re

import pytest
import torch
import transformers
from causal_lms import drawn
from hypothesis import given, settings
from hypothesis import strategies as st
from loops import refuses
from ranks import on_ranks, processes
from torch.nn.functional import pad
from transformers import masking_utils as hf
from zoo import TOWER, blocks, model_of, sharded, worst

from burst_mcore import BurstConfig, Topology
from burst_mcore.deepspeed.groups import unit_of
from burst_mcore.deepspeed.initialize import prepare_for_engine
from burst_mcore.deepspeed.section import Section
from burst_mcore.torch import parallelize
from burst_mcore.transformers.errors import UnsupportedError
from burst_mcore.transformers.models.attention import Sequence, attend, mask_of, running

TEXT = {"vocab_size": 80, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}  # fmt: skip
HEADS = {"num_key_value_heads": 2, "head_dim": 8}


def _paligemma():
    """Type 0 is the prefix, which includes the picture; all layers of one kind."""
    config = transformers.PaliGemmaConfig(text_config=TEXT | {"model_type": "gemma"}, vision_config=TOWER)
    return transformers.PaliGemmaForConditionalGeneration._from_config(config, attn_implementation="eager")


def _molmo2():
    """The tokens of all pictures of a row see each other."""
    adapter = TOWER | HEADS | {"vision_feature_layer": [0], "text_hidden_size": 32}
    config = transformers.Molmo2Config(
        text_config=TEXT, vision_config=TOWER | HEADS | {"image_size": [28, 28]}, adapter_config=adapter
    )
    return transformers.Molmo2ForConditionalGeneration._from_config(config, attn_implementation="eager")


OTHERS = {"paligemma": _paligemma, "molmo2": _molmo2}
COLUMNS = {"gemma3": "token_type_ids", "hrm_text": "token_type_ids", "paligemma": "token_type_ids"}


def _model(name):
    if name not in OTHERS:
        return model_of(name)
    torch.manual_seed(2)
    return drawn(OTHERS[name]())


def _types(name, types):
    """Types of tokens by the name of their column; `types` is 1 where tokens see each other."""
    return {COLUMNS.get(name, "mm_token_type_ids"): 1 - types if name == "paligemma" else types}


def _batch(seed=1):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 80, (2, 64), generator=generator)
    return {"input_ids": ids, "labels": ids.masked_fill(torch.rand(2, 64, generator=generator) < 0.3, -100)}


def _assert_alike(model, batch, want, name, **section):
    """Hold loss and gradients over shards to those of a model that has its gradients."""
    other = copy.deepcopy(model)
    other.zero_grad(set_to_none=True)
    assert sharded(other, batch, **section).item() == pytest.approx(want, rel=1e-5), (name, section)
    assert worst(other, model) < 5e-5, (name, section)


def _blocks_seen(rank, size, cells):
    for name, layout in cells:
        model, batch = _model(name), _batch()
        causal = copy.deepcopy(model)
        causal(**batch, **_types(name, torch.zeros_like(blocks()))).loss.backward()
        batch |= _types(name, blocks())
        loss = model(**batch).loss
        loss.backward()
        _assert_alike(model, batch, loss.item(), name, layout=layout)
        assert worst(causal, model) > 1e-2, name


@pytest.mark.parametrize(
    ("size", "cells"),
    [
        (2, [("hrm_text", "zigzag"), ("paligemma", "zigzag"), ("molmo2", "zigzag")]),
        (4, [("gemma3", "contiguous"), ("gemma4", "striped")]),
        pytest.param(
            4,
            [(name, x) for name in ("gemma3", "gemma4", "gemma4_unified", "hrm_text", "paligemma", "molmo2")
             for x in ("zigzag", "striped", "contiguous")],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["2", "4", "all"],
)  # fmt: skip
def test_tokens_of_a_block_see_each_other(size, cells):
    processes(size, _blocks_seen, cells)


LENGTHS = [[20, 37, 7], [41, 23]]


@on_ranks(2)
def test_blocks_of_documents_and_of_padded_rows(rank, size):
    """Packed rows, and padded rows that end with an image: against each document alone."""
    for name in ("gemma3", "hrm_text", "paligemma"):
        batch, types = _batch(), torch.zeros(2, 64, dtype=torch.int64)
        types[0, 2:19] = types[0, 22:30] = types[0, 40:53] = types[1, :40] = types[1, 41:60] = 1
        if name == "gemma3":
            types[0, 60:64] = 1  # up to the end, where a row is padded
        batch |= _types(name, types)
        model = _model(name)
        cut = [
            {k: x[row : row + 1, end - n : end].clone() for k, x in batch.items()}
            for row, lengths in enumerate(LENGTHS)
            for n, end in zip(lengths, torch.tensor(lengths).cumsum(0).tolist(), strict=True)
        ]
        for each in cut:
            each["labels"][:, 0] = -100
        labels = [(each["labels"] != -100).sum() for each in cut]
        losses = [model(**each).loss * n / sum(labels) for each, n in zip(cut, labels, strict=True)]
        want = sum(losses)
        want.backward()
        places = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in LENGTHS])
        _assert_alike(model, batch | {"position_ids": places}, want.item(), name, layout="zigzag")
        right, left = cut[0], cut[3]
        model.zero_grad(set_to_none=True)
        labels = [(each["labels"] != -100).sum() for each in (right, left)]
        want = sum(model(**each).loss * n for each, n in zip((right, left), labels, strict=True)) / sum(
            labels
        )
        want.backward()
        rows = [
            {k: pad(x, place) for k, x in {**each, "attention_mask": torch.ones_like(each["labels"])}.items()}
            for each, place in ((right, (0, 25)), (left, (4, 0)))
        ]
        padded = {k: torch.cat([row[k] for row in rows]) for k in rows[0]}
        _assert_alike(model, padded, want.item(), name, layout="striped")


@on_ranks(2)
def test_generate_sees_blocks_of_the_prompt_and_chunks(rank, size):
    """Chunks of Llama 4 end within what is generated: keys of an earlier chunk are in the cache, unseen."""
    for name in ("gemma3", "hrm_text", "llama4_text"):
        model = _model(name).eval()
        prompt = _batch()["input_ids"][:, :41]
        types = {} if name == "llama4_text" else _types(name, blocks()[:, :41])
        asked = {**types, "max_new_tokens": 9, "do_sample": False, "use_cache": True}
        want = model.generate(prompt, **asked)
        prepare_for_engine(model, Section(), unit_of(size))
        assert torch.equal(want, model.generate(prompt, **asked)), name


def _leaf(word, number):
    match word:
        case "window":
            return lambda ids: hf.sliding_window_overlay(number)
        case "chunk":
            return lambda ids: hf.chunked_overlay(number, torch.zeros(len(ids), dtype=torch.int64))
        case "blocks":
            return hf.blockwise_overlay
    return lambda ids: hf.causal_mask_function


_SIZE = st.integers(1, 9)
_ANY = st.builds(_leaf, st.sampled_from(["window", "chunk"]), _SIZE)
_SEEN = st.recursive(
    st.builds(_leaf, st.sampled_from(["causal", "blocks"]), _SIZE),
    lambda seen: st.one_of(
        st.builds(lambda a, b: lambda ids: hf.and_masks(a(ids), b(ids)), seen, st.one_of(seen, _ANY)),
        st.builds(lambda a, b: lambda ids: hf.or_masks(a(ids), b(ids)), seen, seen),
    ),
    max_leaves=6,
)
"""Functions that transformers makes of ids of blocks, in which a later key is seen within a block alone."""


@settings(max_examples=80, deadline=None)
@given(function=_SEEN, ends=st.sets(st.integers(1, 23), max_size=3), seed=st.integers(0, 999))
def test_functions_are_read_as_the_masks_that_they_are(function, ends, seed):
    ends = (0, *sorted(ends), 24)
    ids = torch.randint(-1, 2, (2, 8), generator=torch.Generator().manual_seed(seed)).repeat_interleave(3, 1)
    ids[:, list(ends[:-1])] = -1  # no block in two documents
    places = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(ends)])[None]
    packed = hf.and_masks(
        hf.remap_positions_for_packed_sequence(function(ids), places),
        hf.packed_sequence_mask_function((places == 0).cumsum(1)),
    )
    with running(Sequence(Topology.single(), BurstConfig(), 24, (ends,) * 2 if len(ends) > 2 else ())):
        masks = mask_of(batch_size=2, q_length=24, kv_length=24, mask_function=packed).masks
    for row in range(2):
        want = torch.zeros(24, 24, dtype=torch.bool)
        for a, b in itertools.pairwise(ends):
            at = torch.arange(b - a)
            want[a:b, a:b] = function(ids[:, a:b])(row, 0, at[:, None], at[None, :])
        at = torch.arange(24)
        assert torch.equal(masks[row if len(masks) > 1 else 0].allows(at, at), want)


@on_ranks(2)
def test_blocks_that_cannot_be_are_refused_on_all_ranks(rank, size):
    model, text = _model("gemma3"), model_of("gemma3_text")
    cp = parallelize(model, torch.distributed.group.WORLD, config={"layout": "zigzag"})
    batch, types = _batch(), torch.zeros(2, 64, dtype=torch.int64)
    types[1, 30:45] = 1
    whole = batch | {"token_type_ids": types}
    places = torch.arange(64).expand(2, -1).clone()
    places[:, 40:] -= 40
    of_text = parallelize(text, torch.distributed.group.WORLD).shard(batch | {"token_type_ids": types})
    assert torch.equal(cp.shard(whole)["input_ids"], batch["input_ids"])  # the model shards it
    refuses(
        ("batch: ", lambda: model(**(whole if rank else batch))),
        (
            "mask: tokens [30, 45) of row 1 are one block, and a document ends at 40",
            lambda: model(**whole, position_ids=places),
        ),
        ("tree: ", lambda: model(**whole, tree=torch.tensor([-1, 64]))),
        ("model: Gemma3Attention hands token_type_ids to its attention", lambda: text(**of_text)),
    )


def test_masks_that_are_not_supported_are_refused_by_name():
    def causal_mask_function(batch, head, q, k):
        return k <= q + 1

    causal, ids = hf.causal_mask_function, torch.zeros(1, 4, dtype=torch.int64)
    own = {"batch_size": 1, "q_length": 4, "kv_length": 4}
    with pytest.raises(UnsupportedError, match="attention outside of an engine"):
        mask_of(**own, mask_function=causal)
    for function, words in (
        (causal_mask_function, "a mask that is not supported: test_masks_of_models.test_masks_that_are_not"),
        (hf.bidirectional_mask_function, "a mask that is not supported: bidirectional_mask_function"),
        (hf.chunked_overlay(4, torch.zeros(1)), "asks for attention that is not causal"),
        (hf.and_masks(causal, hf.sliding_window_bidirectional_overlay(3)), "sliding_window_bidirectional"),
        (hf.or_masks(causal, hf.sliding_window_overlay(3)), "asks for attention that is not causal"),
        (
            hf.or_masks(causal, hf.blockwise_overlay(ids)),
            "the model makes blocks of 4 of 8 tokens",
        ),
    ):
        sequence = Sequence(Topology.single(), BurstConfig(), 8)
        with running(sequence), pytest.raises(UnsupportedError, match=re.escape(words)):
            mask_of(**own, mask_function=function)
    q = torch.randn(1, 2, 8, 4)
    with pytest.raises(UnsupportedError, match="Linear got no mask"):
        attend(torch.nn.Linear(1, 1), q, q, q, None)
