"""What Megatron's config and arguments ask of core attention: served, or refused by name."""

import ast
import importlib.util
from argparse import ArgumentParser, Namespace
from pathlib import Path

import pytest
import torch
from models import VERSION, Case, transformer_config
from test_core_attention import _core, in_megatron

from burst_mcore import BurstConfig
from burst_mcore.config import SETTINGS
from burst_mcore.megatron import asked
from burst_mcore.megatron.arguments import add_arguments, burst_config, flag_of, setting

CORES = (
    ("megatron.core.transformer.dot_product_attention", "DotProductAttention"),
    ("megatron.core.extensions.transformer_engine", "TEDotProductAttention"),
)


def _read_fields(module, name):
    """The fields of the config that a class of Megatron reads."""
    tree = ast.parse(Path(importlib.util.find_spec(module).origin).read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == name:
            for each in ast.walk(node):
                if isinstance(each, ast.Attribute) and ast.unparse(each.value) in ("config", "self.config"):
                    yield each.attr


def test_every_field_that_megatrons_core_attentions_read_is_served_or_refused():
    read = {field for core in CORES for field in _read_fields(*core)}
    assert len(read) > 15
    assert read <= set(asked.READ_BY_MEGATRON), "say what becomes of these"
    if VERSION >= (0, 19):
        assert {*asked.READ_BY_MEGATRON} - read <= {"hierarchical_context_parallel_sizes", "init_method"}


REFUSED = {
    "attention_dropout": (0.1, "attention dropout 0.1"),
    "qk_clip": (True, "qk_clip"),
    "log_max_attention_logit": (True, "log_max_attention_logit"),
    "fp8_dot_product_attention": (True, "FP8"),
    "fp8_multi_head_attention": (True, "FP8"),
    "batch_invariant_mode": (True, "batch-invariant"),
    "use_kitchen_attention": (True, "Kitchen"),
    "cuda_graph_impl": ("local", "CUDA graphs"),
    "enable_cuda_graph": (True, "CUDA graphs"),
    "external_cuda_graph": (True, "CUDA graphs"),
}


def _with(config, **fields):
    for name, value in fields.items():
        setattr(config, name, value)
    return config


def _refusals():
    from megatron.core.transformer.enums import AttnBackend

    for name, (value, words) in REFUSED.items():
        with pytest.raises(ValueError, match=f"layer 1: burst attention does not support .*{words}"):
            _core(_with(transformer_config(Case()), **{name: value}))
    for backend in (AttnBackend.unfused, AttnBackend.local):
        with pytest.raises(ValueError, match=f"--attention-backend {backend.name}: legal are auto, flash"):
            _core(_with(transformer_config(Case()), attention_backend=backend))
    for backend, tried in ((AttnBackend.flash, "flash2: .*flash3"), (AttnBackend.fused, "te: .*cudnn")):
        with pytest.raises(
            ValueError, match=f"layer 1: --attention-backend {backend.name}: no kernel.*{tried}"
        ):
            _core(_with(transformer_config(Case()), attention_backend=backend))
    with pytest.raises(ValueError, match="--burst-kernel reference contradicts --attention-backend flash"):
        config = _with(transformer_config(Case()), attention_backend=AttnBackend.flash)
        _core(config, BurstConfig(kernel="reference"))
    with pytest.raises(
        ValueError, match="layer 1: kernel 'cudnn' cannot serve this call: tensors are on cpu"
    ):
        _core(burst=BurstConfig(kernel="cudnn"))
    assert not _core().burst_config.deterministic
    assert _core(_with(transformer_config(Case()), deterministic_mode=True)).burst_config.deterministic


def test_what_burst_does_not_do_is_refused_by_the_constructor():
    in_megatron(_refusals)


def test_comm_types_fix_the_way():
    config = Namespace(context_parallel_size=4, hierarchical_context_parallel_sizes=[2, 2])
    way = {
        kind: asked.configured(BurstConfig(), config, kind)
        for kind in (None, "p2p", "a2a", "a2a+p2p", "all_gather", "allgather")
    }
    assert way[None] == way["p2p"] == BurstConfig()
    assert way["a2a"] == BurstConfig(head_parallel=4)
    assert way["a2a+p2p"] == BurstConfig(head_parallel=2)
    assert way["all_gather"] == way["allgather"] == BurstConfig(ring="direct", head_parallel=1)
    assert asked.configured(BurstConfig(head_parallel=2), config, "p2p").head_parallel == 2
    for given in (BurstConfig(head_parallel=2), BurstConfig(ring="flat")):
        with pytest.raises(ValueError, match=r"--cp-comm-type a2a .* and so does --burst-.*give one"):
            asked.configured(given, config, "a2a")
    with pytest.raises(ValueError, match="a2a.p2p needs --hierarchical-context-parallel-sizes"):
        asked.configured(BurstConfig(), Namespace(context_parallel_size=4), "a2a+p2p")
    with pytest.raises(ValueError, match="unknown --cp-comm-type ring; legal: p2p, a2a"):
        asked.configured(BurstConfig(), config, "ring")
    alone = Namespace(context_parallel_size=1)
    assert asked.configured(BurstConfig(), alone, "a2a") == BurstConfig()


def _arguments(*words, **others):
    given = add_arguments(ArgumentParser()).parse_args(words)
    defaults = dict(
        context_parallel_size=2,
        tensor_model_parallel_size=1,
        num_attention_heads=4,
        seq_length=64,
        attention_dropout=0.0,
        recompute_granularity=None,
        recompute_modules=None,
    )
    return Namespace(**{**defaults, **vars(given), **others})


BURST = ("--context-parallel-attention-backend", "burst")


def test_flags_are_the_fields_of_the_config_with_its_defaults():
    parsed = add_arguments(ArgumentParser()).parse_args([])
    assert {name: setting(parsed, name) for name in SETTINGS} == {n: s.default for n, s in SETTINGS.items()}
    assert burst_config(_arguments()) == BurstConfig()
    words = ["--burst-grad-dtype", "bfloat16", "--burst-deterministic", "--burst-no-overlap"]
    words += ["--burst-layout", "striped", "--burst-head-parallel", "auto", "--burst-ring", "flat"]
    assert burst_config(_arguments(*words)) == BurstConfig(
        grad_dtype=torch.bfloat16,
        deterministic=True,
        overlap=False,
        layout="striped",
        head_parallel="auto",
        ring="flat",
    )


@pytest.mark.parametrize(
    ("words", "others", "said"),
    [
        (["--burst-layout", "striped"], {}, "--burst-layout has no effect without burst attention"),
        (["--burst-deterministic"], {}, "--burst-deterministic has no effect"),
        (["--burst-no-overlap"], {}, "--burst-no-overlap has no effect"),
        (["--burst-rates", "1", "1", "1"], {}, "--burst-rates has no effect"),
        (["--burst-recompute", "attention"], {}, "needs --context-parallel-attention-backend burst"),
        (["--burst-fused-loss"], {"cross_entropy_loss_fusion": True}, "--cross-entropy-loss-fusion"),
        (BURST, {"attention_dropout": 0.1}, "attention dropout 0.1 .pass --attention-dropout 0"),
        (BURST, {"reset_attention_mask": True}, "--reset-attention-mask"),
        (BURST, {"qk_clip": True}, "qk_clip"),
        (BURST, {"cp_comm_type": ["p2p", "ring"]}, "unknown --cp-comm-type ring"),
        ([*BURST, "--burst-ring", "flat"], {"cp_comm_type": ["a2a"]}, "give one of them"),
        ([*BURST, "--burst-head-parallel", "1"], {"cp_comm_type": ["a2a"]}, "give one of them"),
        (["--burst-layout", "zigzag"], {}, "--burst-layout has no effect without burst attention"),
        (
            BURST,
            {"cp_comm_type": ["a2a"], "num_attention_heads": 3},
            "a2a: 2 of 2 ranks cannot share 3 heads",
        ),
        ([*BURST, "--burst-head-parallel", "3"], {}, "--burst-head-parallel 3: 3 of 2 ranks cannot share"),
        (
            [*BURST, "--burst-layout", "striped"],
            {"mtp_num_layers": 1},
            "striped does not go with multi-token",
        ),
        (BURST, {"seq_length": 66}, "--seq-length 66 is no multiple of 4"),
        (BURST, {"flash_decode": True}, "--flash-decode goes past core attention"),
        ([*BURST, "--burst-layout", "striped"], {"sft": True}, "striped does not go with --sft"),
        (BURST, {"hierarchical_context_parallel_sizes": [2, 2, 2]}, "must be two, ranks of a node and nodes"),
        (
            [*BURST, "--burst-kernel", "reference"],
            {"attention_backend": "flash"},
            "contradicts --attention-b",
        ),
        ([*BURST, "--burst-rates", "-1", "1", "1"], {}, "Rates.intra must be a positive number"),
        ([], {"spec": ["burst_mcore.megatron.spec"], "attention_dropout": 0.1}, "attention dropout 0.1"),
        ([*BURST, "--burst-recompute", "segment"], {}, "--burst-recompute-keep F go together"),
    ],
)
def test_what_follows_from_arguments_is_refused_with_them(words, others, said):
    with pytest.raises(ValueError, match=said) as refused:
        asked.check_arguments(_arguments(*words, **others))
    assert "\n" not in str(refused.value)


class VisionModule(torch.nn.Module):
    """As Megatron's, by name."""


@pytest.mark.parametrize(
    ("model", "refused"),
    [
        (torch.nn.Linear(1, 1), True),  # BERT, say
        (VisionModule(), True),
        (torch.nn.Sequential(VisionModule()), False),  # a tower beside a GPT
    ],
)
def test_a_model_that_burst_attention_has_not_reached_is_refused(model, refused, monkeypatch):
    from burst_mcore.megatron import launcher

    monkeypatch.setattr(launcher, "burst_is_chosen", lambda: True)
    monkeypatch.setattr(launcher, "_stock_self_attentions", lambda models: [torch.nn.Identity()])
    build = launcher._refusing_stock_attention_alone(lambda: [model])
    if refused:
        with pytest.raises(ValueError, match="this model has Identity alone"):
            build()
    else:
        assert build() == [model]


def test_legal_arguments_pass():
    for words in ([], BURST, [*BURST, "--burst-layout", "striped"], ["--burst-fused-loss"]):
        asked.check_arguments(_arguments(*words, cp_comm_type=["p2p"]))
    asked.check_arguments(_arguments(*BURST, cp_comm_type=["p2p", "a2a"]))
    a_spec = {"spec": ["burst_mcore.megatron.spec", "burst_layer_spec"]}
    asked.check_arguments(_arguments("--burst-backward", "kv", **a_spec))
    assert flag_of("overlap") == "--burst-no-overlap"
