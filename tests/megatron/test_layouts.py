"""Other layouts than zigzag in Megatron: the same losses, and refusals by name where zigzag is assumed."""

import importlib
import pkgutil
import sys
from contextlib import nullcontext
from types import ModuleType

import pytest
import torch
from models import VERSION, Case, build, megatron_on, on_this_cp_rank
from models import transformer_config as config_of
from test_core_attention import _core, _params

from burst_mcore import BurstConfig, Layout, shard
from burst_mcore.megatron import layouts
from burst_mcore.megatron.layouts import use_layout


@megatron_on(2)
def test_functions_imported_by_name_and_cached_positions_follow_the_layout():
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
        kept = {"dataset_id": torch.tensor([5]), "note": ["a blend's first set"], "sizes": torch.eye(2)}
        batch = {"tokens": tokens, "attention_mask": torch.eye(8)[None, None], "labels": None, **kept}
        batch["cu_seqlens"] = torch.arange(4)[None]
        batch = script.get_batch(batch, cp_group=group, **how)
        assert all(batch[name] is x for name, x in kept.items()) and batch["labels"] is None
        assert torch.equal(batch["cu_seqlens"], torch.arange(4)[None])
        share = {"rank": group.rank(), "size": 2, "layout": layout}
        assert torch.equal(batch["tokens"], shard(tokens, 1, **share))
        assert torch.equal(batch["attention_mask"], shard(torch.eye(8)[None, None], 2, **share))
        assert torch.equal(rope(8), shard(rope.get_emb(8), 0, **share))
    assert torch.equal(rope(8), sharded["zigzag"])
    use_layout("block-striped:6")
    for positions in (lambda: rope(8), lambda: on_this_cp_rank({"tokens": tokens}, group)):
        with pytest.raises(ValueError, match=r"block-striped:6 over 2 ranks .*multiple of 6 tokens, got 8"):
            positions()


@megatron_on(2)
def test_what_assumes_zigzag_is_refused():
    config = config_of(Case(cp=2))
    striped = BurstConfig(layout="striped")
    with pytest.raises(ValueError, match=r"layout striped, but Megatron .*zigzag.*use_layout\('striped'"):
        _core(config, striped)
    sharded_zigzag = _core(config)
    use_layout("striped")
    with pytest.raises(ValueError, match=r"layout zigzag, but Megatron .*striped.*use_layout\('zigzag'"):
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
    variant = config_of(Case(cp=2))
    variant.experimental_attention_variant = "dsa"
    with pytest.raises(ValueError, match="dsa.* but layout striped is set: use zigzag$"):
        _core(variant, striped)
    use_layout("zigzag", packed="whole")
    with pytest.raises(ValueError, match=r"set: drop --dataloader-inter-document-masking \(packed='whole'\)"):
        _core(variant)
    use_layout("striped")
    with pytest.raises(ValueError, match="is of one packed batch"):
        use_layout(Layout("zigzag-documents", ends=(0, 8)))
    with pytest.raises(ValueError, match="unknown layout 'stripes'"):
        use_layout("stripes")
    with pytest.raises(ValueError, match="packed must be one of documents, whole, got 'thd'"):
        use_layout("zigzag", packed="thd")
    assert str(layouts._in_effect.layout) == "striped"


class _Assuming(torch.nn.Module):
    """A layer of which nothing is known."""


SUPPORTED = {"GPTModel", "HybridModel", "HybridStack", "LanguageModelEmbedding"}


def _megatrons_models():
    import megatron.core.models
    from megatron.core.transformer.module import MegatronModule

    for place in pkgutil.walk_packages(megatron.core.models.__path__, "megatron.core.models."):
        for kind in vars(importlib.import_module(place.name)).values():
            if isinstance(kind, type) and issubclass(kind, MegatronModule) and kind.__module__ == place.name:
                yield kind


@megatron_on(2)
def test_every_model_of_megatrons_is_supported_on_other_layouts_or_refused():
    from megatron.core.transformer.module import MegatronModule

    ring, models = config_of(Case(cp=2)), [*_megatrons_models()]
    assert len(models) > 16
    for layout, config in (("striped", ring), ("striped", config_of(Case())), ("zigzag", ring)):
        use_layout(layout)
        for kind in models:
            module, refuses = kind.__new__(kind), layout == "striped" and config is ring
            words = f"striped does not go with {kind.__name__}"
            is_refused = refuses and kind.__name__ not in SUPPORTED
            with pytest.raises(ValueError, match=words) if is_refused else nullcontext():
                MegatronModule.__init__(module, config)


@megatron_on(2)
def test_a_module_that_is_not_known_is_refused_beside_another_layout():
    from megatron.core.models.gpt import gpt_model

    use_layout("striped")
    build(Case(cp=2, layout="striped"))
    original = gpt_model.TransformerBlock

    def with_another(*args, **kwargs):
        block = original(*args, **kwargs)
        block.layers[0].mlp.add_module("mixer", _Assuming())
        return block

    gpt_model.TransformerBlock = with_another
    with pytest.raises(ValueError, match=r"striped does not go with _Assuming \(decoder.layers.0.mlp.m"):
        build(Case(cp=2, layout="striped"))
    use_layout("zigzag", packed="whole")
    with pytest.raises(ValueError, match=r"_Assuming .* are sharded zigzag: drop --dataloader-inter-doc"):
        build(Case(cp=2))
    use_layout("zigzag")
    build(Case(cp=2))
