"""Other layouts than zigzag in Megatron: the same losses, and refusals by name where zigzag is assumed."""

import importlib
import pkgutil
import sys
from argparse import Namespace
from types import ModuleType

import pytest
import torch
from models import (
    MLA,
    MOE,
    MTP,
    VERSION,
    Case,
    assert_equal,
    build,
    default,
    needs_019,
    on_this_cp_rank,
    step,
)
from models import transformer_config as config_of
from test_core_attention import _core, _params, in_megatron

from burst_mcore import BurstConfig, Layout, shard
from burst_mcore.megatron import layouts
from burst_mcore.megatron.layouts import use_layout

SLOW = pytest.mark.slow
LAYOUTS = ["contiguous", "stacked-zigzag:2", "striped", pytest.param("block-striped:16", marks=SLOW)]


@pytest.mark.proves("GPT", "other layouts at CP 2 and 4")
@pytest.mark.parametrize("cp", [pytest.param(2, marks=SLOW), 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gpt(layout, cp):
    assert_equal(step(Case(cp=cp, layout=layout, backward="query")), default())


@pytest.mark.proves("GPT", "striped with learnt positions; block-striped with windows at TP 2 x CP 2")
def test_gpt_with_other_positions_windows_and_tensor_parallelism():
    learned = {"position": "learned_absolute"}
    assert_equal(step(Case(cp=2, layout="striped", **learned)), default(**learned))
    window = {"fields": (("window_size", (9, 0)),)}
    assert_equal(step(Case(tp=2, cp=2, layout="block-striped:8", **window)), default(**window))


@pytest.mark.proves("MLA", "striped, rope and yarn")
@needs_019
@pytest.mark.parametrize("rope", ["rope", "yarn"])
def test_mla(rope):
    fields = (*MLA[:-1], ("rope_type", rope))
    assert_equal(step(Case(cp=2, fields=fields, layout="striped")), step(Case(fields=fields)))


@pytest.mark.proves("HybridModel of attention and MLP layers", "striped")
@needs_019
def test_hybrid():
    assert_equal(step(Case(model="hybrid", cp=2, layout="striped")), default(model="hybrid"))


def _names_and_caches():
    """What was imported by name, and what was cached, before the layout was chosen."""
    from megatron.core import parallel_state, utils
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    group = parallel_state.get_context_parallel_group()
    script = ModuleType("script")
    script.get_batch = utils.get_batch_on_this_cp_rank
    sys.modules["script"] = script
    rope = RotaryEmbedding(16, 1.0, use_cpu_initialization=True)
    sharded = {"zigzag": rope(8)}
    tokens = torch.arange(8)[None]
    how = {"is_hybrid_cp": False, "use_per_sequence_balancing": True} if VERSION >= (0, 19) else {}
    for layout in ("striped", "striped", "contiguous", "zigzag"):
        use_layout(layout)
        assert str(layouts._in_effect.layout) == layout
        number, sizes = torch.tensor([5]), torch.tensor([[3, 4]])
        batch = {"tokens": tokens, "labels": None, "dataset_id": number, "note": ["a blend's first set"]}
        batch["sizes"] = sizes
        batch |= {"attention_mask": torch.eye(8)[None, None], "cu_seqlens": torch.arange(4)[None]}
        batch = script.get_batch(batch, cp_group=group, **how)
        assert batch["dataset_id"] is number and batch["note"] == ["a blend's first set"]
        assert batch["sizes"] is sizes
        assert torch.equal(batch["cu_seqlens"], torch.arange(4)[None])
        share = {"rank": group.rank(), "size": 2, "layout": layout}
        assert batch["labels"] is None
        assert torch.equal(batch["tokens"], shard(tokens, 1, **share))
        assert torch.equal(batch["attention_mask"], shard(torch.eye(8)[None, None], 2, **share))
        assert torch.equal(rope(8), shard(rope.get_emb(8), 0, **share))
    assert torch.equal(rope(8), sharded["zigzag"])
    use_layout("block-striped:6")
    for positions in (lambda: rope(8), lambda: on_this_cp_rank({"tokens": tokens}, group)):
        with pytest.raises(ValueError, match=r"block-striped:6 over 2 ranks .*multiple of 6 tokens, got 8"):
            positions()


def test_functions_imported_by_name_and_cached_positions_follow_the_layout():
    in_megatron(_names_and_caches, cp=2)


def _refusals():
    config = config_of(Case(cp=2))
    striped = BurstConfig(layout="striped")
    with pytest.raises(
        ValueError, match=r"expects layout striped, but Megatron .*zigzag.*use_layout\('striped'"
    ):
        _core(config, striped)
    sharded_zigzag = _core(config)
    use_layout("striped")
    with pytest.raises(
        ValueError, match=r"expects layout zigzag, but Megatron .*striped.*use_layout\('zigzag'"
    ):
        _core(config)
    x = torch.randn(4, 1, 4, 16)
    with pytest.raises(ValueError, match="expects layout zigzag, but Megatron .*striped"):
        sharded_zigzag(x, x, x, None)
    core = _core(config, striped)
    assert core(x, x, x, None).shape == (4, 1, 64)
    with pytest.raises(ValueError, match="striped does not go with packed sequences"):
        core(x[:, 0], x[:, 0], x[:, 0], None, packed_seq_params=_params([0, 8]))
    config.apply_rope_fusion = True
    with pytest.raises(ValueError, match="fused rope .pass --no-rope-fusion. .*but layout striped is set"):
        _core(config, striped)
    with pytest.raises(ValueError, match="multi-token prediction .*but layout striped is set"):
        _core(config_of(Case(cp=2, fields=MTP)), striped)
    variant = config_of(Case(cp=2))
    for name in ("gated_delta_net", "dsa"):
        variant.experimental_attention_variant = name
        with pytest.raises(ValueError, match=f"{name}.* but layout striped is set"):
            _core(variant, striped)
    with pytest.raises(ValueError, match="is of one packed batch"):
        use_layout(Layout("zigzag-documents", ends=(0, 8)))
    with pytest.raises(ValueError, match="unknown layout 'stripes'"):
        use_layout("stripes")
    assert str(layouts._in_effect.layout) == "striped"


def test_what_assumes_zigzag_is_refused():
    in_megatron(_refusals, cp=2)


@pytest.mark.parametrize(
    ("layout", "packed", "words"),
    [
        ("striped", "documents", "use zigzag"),
        ("zigzag", "whole", r"drop --dataloader-inter-document-masking \(packed='whole'\)"),
        ("striped", "whole", r"use zigzag and drop --dataloader-inter-document-masking \(packed='whole'\)"),
    ],
)
@pytest.mark.parametrize("field", ["mtp_num_layers", "apply_rope_fusion", "experimental_attention_variant"])
def test_what_is_to_be_dropped_is_what_is_set(layout, packed, words, field):
    sharding = layouts.Sharding(Layout(layout), packed)
    with pytest.raises(
        ValueError, match=f"assumes documents sharded zigzag, but {sharding} is set: {words}$"
    ):
        layouts.refuse_assumed_zigzag(Namespace(**{field: "gdn"}), sharding)


class _Assuming(torch.nn.Module):
    """A layer of which nothing is known."""


def _models():
    from megatron.core.models.gpt import gpt_model

    use_layout("striped")
    build(Case(cp=2, layout="striped"))
    original = gpt_model.TransformerBlock

    def with_another(*args, **kwargs):
        block = original(*args, **kwargs)
        block.layers[0].mlp.add_module("mixer", _Assuming())
        return block

    gpt_model.TransformerBlock = with_another
    with pytest.raises(
        ValueError, match=r"striped does not go with _Assuming \(decoder.layers.0.mlp.mixer\)"
    ):
        build(Case(cp=2, layout="striped"))
    use_layout("zigzag", packed="whole")
    with pytest.raises(ValueError, match=r"_Assuming .* are sharded zigzag: drop --dataloader-inter-doc"):
        build(Case(cp=2))
    use_layout("zigzag")
    build(Case(cp=2))


def test_classes_are_known_by_package_and_name():
    from burst_mcore.megatron.layouts import _ignores_layouts

    def made(name, module):
        return type(name, (), {"__module__": module})

    assert _ignores_layouts(made("RMSNorm", "transformer_engine.pytorch.module.rmsnorm"))  # what TENorm makes
    assert _ignores_layouts(made("SelfAttention", "megatron.core.transformer.attention"))
    assert _ignores_layouts(torch.nn.Linear)
    linear = "megatron.core.transformer.heterogeneous.linear_replacements"
    assert _ignores_layouts(made("TELayerNormColumnParallelLinearGathered", linear))
    assert not _ignores_layouts(made("SelfAttention", "my_models.attention"))
    assert not _ignores_layouts(made("MambaMixer", "megatron.core.ssm.mamba_mixer"))


SERVED = {"GPTModel", "HybridModel", "HybridStack", "LanguageModelEmbedding"}


def _megatrons_models():
    import megatron.core.models
    from megatron.core.transformer.module import MegatronModule

    for place in pkgutil.walk_packages(megatron.core.models.__path__, "megatron.core.models."):
        for kind in vars(importlib.import_module(place.name)).values():
            if isinstance(kind, type) and issubclass(kind, MegatronModule) and kind.__module__ == place.name:
                yield kind


def _all_models():
    from megatron.core.transformer.module import MegatronModule

    ring, alone, count = config_of(Case(cp=2)), config_of(Case()), 0
    for layout, config in (("striped", ring), ("striped", alone), ("zigzag", ring)):
        use_layout(layout)
        for kind in _megatrons_models():
            mine = type("Mine", (kind,), {"__init__": lambda self, config: None, "__module__": "my_script"})
            for each in (kind, mine):
                module, count = each.__new__(each), count + 1
                if layout == "striped" and config is ring and kind.__name__ not in SERVED:
                    with pytest.raises(ValueError, match=f"striped does not go with {each.__name__}"):
                        MegatronModule.__init__(module, config)
                else:
                    MegatronModule.__init__(module, config)
    return count


def test_every_model_of_megatrons_is_served_on_other_layouts_or_refused():
    assert min(in_megatron(_all_models, cp=2)) > 100


def test_a_module_that_is_not_known_is_refused_beside_another_layout():
    in_megatron(_models, cp=2)


def test_linear_layers_in_the_place_of_an_mlp_are_known_to_work_on_any_layout():
    assert_equal(step(Case(model="linear", cp=2, layout="striped")), default(model="linear"))


@needs_019
def test_experts_are_known_to_work_on_any_layout():
    assert_equal(
        step(Case(model="moe", cp=2, fields=MOE, layout="striped")), default(model="moe", fields=MOE)
    )
