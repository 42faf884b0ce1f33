"""What Megatron's config and arguments ask of core attention: supported, or refused by name."""

import ast
import importlib.util
from argparse import ArgumentParser, Namespace
from pathlib import Path

import pytest
import torch
from models import VERSION, Case, build, in_megatron, megatron_on, needs_019, transformer_config
from test_core_attention import _core

from burst_mcore import BurstConfig
from burst_mcore.config import SETTINGS
from burst_mcore.megatron import checks
from burst_mcore.megatron.arguments import add_arguments, burst_config, flag_of, in_effect, setting

CORES = (
    ("megatron.core.transformer.dot_product_attention", "DotProductAttention"),
    ("megatron.core.extensions.transformer_engine", "TEDotProductAttention"),
    # What language models tell TransformerEngine by environment variables:
    ("megatron.core.models.common.language_module.language_module", "_set_attention_backend"),
)

ATTENTIONS = ("megatron.core.transformer.attention", "megatron.core.transformer.multi_latent_attention")


def _read_fields(module, name):
    """The fields of the config that a class or function of Megatron reads."""
    tree = ast.parse(Path(importlib.util.find_spec(module).origin).read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            for each in ast.walk(node):
                if isinstance(each, ast.Attribute) and ast.unparse(each.value) in ("config", "self.config"):
                    yield each.attr


def _passed_fields(module):
    """The fields of the config that an attention module hands to its core attention."""
    tree = ast.parse(Path(importlib.util.find_spec(module).origin).read_text())
    for node in ast.walk(tree):
        words = [ast.unparse(each) for each in (node.func, *node.args)] if isinstance(node, ast.Call) else []
        if "submodules.core_attention" in words:
            for keyword in node.keywords:
                for each in ast.walk(keyword.value):
                    if isinstance(each, ast.Attribute) and ast.unparse(each.value) == "self.config":
                        yield each.attr


def test_every_field_that_megatrons_core_attentions_read_is_supported_or_refused():
    read = {field for core in CORES for field in _read_fields(*core)}
    passed = {field for module in ATTENTIONS for field in _passed_fields(module)}
    assert len(read) > 15 and passed == {"softmax_scale", "v_head_dim"}
    known = SUPPORTED.keys() | REFUSED.keys()
    assert read | passed <= known, "say what becomes of these"
    if VERSION >= (0, 19):
        assert SUPPORTED.keys() - read - passed <= {"hierarchical_context_parallel_sizes", "init_method"}


SUPPORTED = {
    "apply_query_key_layer_scaling": "Megatron divides scores and multiplies them again: no change",
    "attention_backend": "the kernels that are allowed",
    "attention_softmax_in_fp32": "softmax is always in float32",
    "bf16": "the dtype of q",
    "context_parallel_size": "the group must have that many ranks",
    "deterministic_mode": "BurstConfig.deterministic",
    "flash_attention_version": "the flash-attn kernel that is allowed",
    "fp16": "the dtype of q",
    "hierarchical_context_parallel_sizes": "ranks of a node, and nodes",
    "init_method": "the start of learnable sinks",
    "kv_channels": "head dim",
    "log_max_attention_logit": "the largest logits are kept",
    "masked_softmax_fusion": "there is no softmax of its own to fuse",
    "num_attention_heads": "heads of a rank",
    "num_query_groups": "K/V heads of a rank",
    "params_dtype": "the dtype of learnable sinks",
    "perform_initialization": "the start of learnable sinks",
    "qk_clip": "the largest logits are kept",
    "sequence_parallel": "concerns dropout alone",
    "softmax_scale": "the scale of scores, as an argument",
    "softmax_type": "sinks",
    "tensor_model_parallel_size": "heads of a rank",
    "v_head_dim": "head dim of values, as an argument",
    "window_attn_skip_freq": "Mask.window in some layers",
    "window_size": "Mask.window",
}
"""Fields of TransformerConfig that burst attention follows, or that ask nothing of it: what each becomes."""
VARIED = {
    "apply_query_key_layer_scaling": True,
    "attention_softmax_in_fp32": True,
    "kv_channels": 8,
    "masked_softmax_fusion": True,
    "num_attention_heads": 2,
    "num_query_groups": 1,
    "softmax_type": "off-by-one",
    "window_attn_skip_freq": 2,
    "window_size": (5, 0),
}
"""Fields of which a value is tried here beside Megatron's own attention."""


def _attention(kind, config, layer):
    from megatron.core.transformer.enums import AttnMaskType

    return kind(config, layer, AttnMaskType.causal, "self", softmax_scale=0.3)


def _alike(changed):
    """Compare layers 1 and 2 with Megatron's own attention, with and without other values of these fields."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    from burst_mcore.megatron.core_attention import BurstCoreAttention

    mask = torch.ones(12, 12, dtype=torch.bool).triu(1)[None, None]
    for fields in ({}, {name: VARIED[name] for name in changed}):
        config = transformer_config(Case(fields=(*fields.items(),)))
        q = torch.randn(12, 2, config.num_attention_heads, config.kv_channels)
        k, v = (torch.randn(12, 2, config.num_query_groups, config.kv_channels) for _ in range(2))
        for layer in (1, 2):
            want = _attention(DotProductAttention, config, layer)(q, k, v, mask)
            ours = _attention(BurstCoreAttention, config, layer)(q, k, v, None)
            torch.testing.assert_close(ours, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", VARIED)
def test_supported_fields_mean_what_they_mean_in_megatrons_own_attention(name):
    beside = {"window_attn_skip_freq": ("window_size",)}.get(name, ())
    in_megatron(_alike, (name, *beside))


REFUSED = {
    "attention_dropout": (0.1, "attention dropout 0.1"),
    "fp8_dot_product_attention": (True, "FP8"),
    "fp8_multi_head_attention": (True, "FP8"),
    "batch_invariant_mode": (True, "batch-invariant"),
    "use_kitchen_attention": (True, "Kitchen"),
    "cuda_graph_impl": ("local", "CUDA graphs"),
    "enable_cuda_graph": (True, "CUDA graphs"),
    "external_cuda_graph": (True, "CUDA graphs"),
}
"""Fields that are refused, read by a core attention or by what runs it: a value, and what is said of it."""


def _changed(config, **fields):
    for name, value in fields.items():
        setattr(config, name, value)
    return config


@megatron_on(1)
def test_what_burst_does_not_do_is_refused_by_the_constructor():
    from megatron.core.transformer.enums import AttnBackend

    cases = [({name: x}, f"does not support .*{words}") for name, (x, words) in REFUSED.items()]
    for backend, words in {
        AttnBackend.unfused: "--attention-backend unfused: legal are auto, flash",
        AttnBackend.local: "--attention-backend local: legal are auto, flash",
        AttnBackend.flash: "--attention-backend flash: no kernel.*flash2: .*flash3",
        AttnBackend.fused: "--attention-backend fused: no kernel.*cudnn: ",
    }.items():
        cases.append(({"attention_backend": backend}, words))
    cases.append(({"flash_attention_version": 2}, "--flash-attention-version 2: no kernel.*not on cuda"))
    for fields, words in cases:
        with pytest.raises(ValueError, match=f"layer 1: .*{words}"):
            _core(_changed(transformer_config(Case()), **fields))
    with pytest.raises(ValueError, match="--burst-kernel reference contradicts --attention-backend flash"):
        config = _changed(transformer_config(Case()), attention_backend=AttnBackend.flash)
        _core(config, BurstConfig(kernel="reference"))
    words = "layer 1: --burst-kernel cudnn: tensors are on cpu, not on cuda; legal here: auto, aten-cpu"
    with pytest.raises(ValueError, match=words):
        _core(burst=BurstConfig(kernel="cudnn"))
    assert not _core().burst_config.deterministic
    assert _core(_changed(transformer_config(Case()), deterministic_mode=True)).burst_config.deterministic


def test_a_version_of_flash_attention_is_obeyed_or_refused(monkeypatch):
    order = ["cudnn", "flash4", "flash3"]
    stand_ins = {name: Namespace(name=name, supports=lambda problem: None) for name in order}
    monkeypatch.setattr(checks, "KERNELS", stand_ins)
    monkeypatch.setattr(checks, "by_rank", lambda *args: order)

    def kernel(word="auto", **fields):
        problem = Namespace(device="cuda", launches=None)
        return checks.kernel_of(BurstConfig(kernel=word), Namespace(**fields), problem).kernel

    pinned = {"flash_attention_version": 3}
    assert [kernel(), kernel(attention_backend="flash"), kernel(**pinned)] == ["auto", "flash4", "flash3"]
    assert kernel(attention_backend="fused", **pinned) == kernel(attention_backend="fused") == "cudnn"
    with pytest.raises(ValueError, match="flash4 contradicts --flash-attention-version 3: give one"):
        kernel("flash4", **pinned)
    stand_ins["flash3"].supports = lambda problem: "not installed"
    with pytest.raises(ValueError, match=r"version 3: no kernel supports it \(.*not installed"):
        kernel(**pinned)


def test_comm_types_fix_the_way():
    config = Namespace(context_parallel_size=4, hierarchical_context_parallel_sizes=[2, 2])
    way = {
        kind: checks.configured(BurstConfig(), config, kind)
        for kind in (None, "p2p", "a2a", "a2a+p2p", "all_gather", "allgather")
    }
    assert way[None] == way["p2p"] == BurstConfig()
    assert way["a2a"] == BurstConfig(head_parallel=4)
    assert way["a2a+p2p"] == BurstConfig(head_parallel=2, head_placement="inner")
    assert way["all_gather"] == way["allgather"] == BurstConfig(ring="direct", head_parallel=1)
    assert checks.configured(BurstConfig(head_parallel=2), config, "p2p").head_parallel == 2
    for given in (BurstConfig(head_parallel=2), BurstConfig(ring="flat")):
        with pytest.raises(ValueError, match=r"--cp-comm-type a2a .* and so does --burst-.*give one"):
            checks.configured(given, config, "a2a")
    with pytest.raises(ValueError, match="a2a.p2p needs --hierarchical-context-parallel-sizes"):
        checks.configured(BurstConfig(), Namespace(context_parallel_size=4), "a2a+p2p")
    with pytest.raises(ValueError, match="unknown --cp-comm-type ring; legal: p2p, a2a"):
        checks.configured(BurstConfig(), config, "ring")
    alone = Namespace(context_parallel_size=1)
    assert checks.configured(BurstConfig(), alone, "a2a") == BurstConfig()


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
        pipeline_model_parallel_size=1,
        micro_batch_size=1,
    )
    return Namespace(**{**defaults, **vars(given), **others})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--burst-mesh", "2x2"], "--burst-mesh: it is removed; write ring='direct'"),
        (["--burst-layuot", "striped"], "--burst-layuot striped; did you mean --burst-layout?"),
        (["--burst-layout", "stripes"], "--burst-layout: unknown layout 'stripes'; legal: "),
        (["--burst-kernel", "flash9"], "unknown kernel 'flash9'"),
        (["--context-parallel-attention-backend", "ring"], "invalid choice: 'ring'"),
        (["--burst-rates", "-1", "2", "3"], "--burst-rates: must be a positive number, got '-1'"),
        (["--burst-recompute", "some"], "invalid choice: 'some'"),
        (["--burst-recompute-keep=1.5"], "from 0 to 1, or auto, got '1.5'"),
        (["--burst-recompute-keep=nan"], "from 0 to 1, or auto, got 'nan'"),
    ],
)
def test_flags_with_illegal_values(words, said, capsys):
    with pytest.raises(SystemExit):
        _arguments(*words)
    assert said in capsys.readouterr().err


MLA = {"multi_latent_attention": True}
PACKED = {"dataloader_inter_document_masking": True}
BURST = ("--context-parallel-attention-backend", "burst")
LATENT = (*BURST, "--burst-mla-latent", "on")


def test_flags_are_the_fields_of_the_config_with_its_defaults():
    parsed = add_arguments(ArgumentParser()).parse_args([])
    assert {name: setting(parsed, name) for name in SETTINGS} == {n: s.default for n, s in SETTINGS.items()}
    assert burst_config(_arguments()) == BurstConfig()
    listed = vars(in_effect(_arguments("--burst-ring", "flat")))
    assert {name: listed[f"burst_{name}"] for name in SETTINGS} == {
        **{name: each.default for name, each in SETTINGS.items()},
        "ring": "flat",
    }
    assert listed["burst_mla_latent"] == "off" and "burst_mesh" not in listed
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
        (["--burst-no-overlap"], {}, "--burst-no-overlap has no effect"),
        (["--burst-mla-latent", "off"], {}, "--burst-mla-latent has no effect"),
        (LATENT, {}, "--burst-mla-latent does not support layers that have no latent .add --multi"),
        (LATENT, {**MLA, "apply_rope_fusion": True}, "fused rope .pass --no-rope-fusion"),
        (LATENT, {**MLA, "fp8": "e4m3"}, "does not support FP8 or FP4 weights .or pass off"),
        (
            LATENT,
            {**MLA, "recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]},
            "mla_up_proj in --recompute-modules",
        ),
        (["--burst-recompute", "attention"], {}, "needs --context-parallel-attention-backend burst"),
        (["--burst-fused-loss"], {"cross_entropy_loss_fusion": True}, "--cross-entropy-loss-fusion"),
        (BURST, {"attention_dropout": 0.1}, "attention dropout 0.1 .pass --attention-dropout 0"),
        (BURST, {"reset_attention_mask": True}, "--reset-attention-mask"),
        (BURST, {"cp_comm_type": ["p2p", "ring"]}, "unknown --cp-comm-type ring"),
        ([*BURST, "--burst-ring", "flat"], {"cp_comm_type": ["a2a"]}, "give one of them"),
        (["--burst-layout", "zigzag"], {}, "--burst-layout has no effect without burst attention"),
        (
            BURST,
            {"cp_comm_type": ["a2a"], "num_attention_heads": 3},
            "a2a: head_parallel=2 is not legal with 3 heads.*3 heads do not divide by 2; legal: .1.",
        ),
        (
            [*BURST, "--burst-layout", "striped"],
            {"mtp_num_layers": 1},
            "multi-token prediction .*but layout striped is set",
        ),
        ([*BURST, "--burst-layout", "striped"], {"sft": True}, "--sft assumes documents sharded zigzag"),
        (BURST, {"seq_length": 66}, "--seq-length 66 is no multiple of 4"),
        (BURST, {"flash_decode": True}, "--flash-decode, which goes past core attention: generate at"),
        (
            [*BURST, "--burst-kernel", "flash3"],
            {"flash_attention_version": 2},
            "--burst-kernel flash3 contradicts --flash-attention-version 2: give one of them",
        ),
        ([*BURST, "--burst-kernel", "cudnn"], {}, "--burst-kernel cudnn: tensors are on cpu, not on cuda"),
        (
            BURST,
            {**PACKED, "pipeline_model_parallel_size": 2, "micro_batch_size": 2, "context_parallel_size": 1},
            "pass --micro-batch-size 1 with --pipeline-model-parallel-size 2",
        ),
        (
            BURST,
            {**PACKED, "pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
            "inter-document-masking does not go with interleaved pipelines .*Megatron's scripts",
        ),
        (BURST, {"experimental_attention_variant": "dsa"}, "dsa attends sparsely in every layer"),
        ([], {"spec": ["burst_mcore.megatron.spec"], "attention_dropout": 0.1}, "attention dropout 0.1"),
        ([*BURST, "--burst-recompute", "segment"], {}, "--burst-recompute-keep F go together"),
    ],
)
def test_what_follows_from_arguments_is_refused_with_them(words, others, said):
    with pytest.raises(ValueError, match=said) as refused:
        checks.check_arguments(_arguments(*words, **others))
    assert "\n" not in str(refused.value)


@needs_019
@megatron_on(2)
def test_the_flag_reaches_every_attention_but_that_of_a_tower():
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    from burst_mcore.megatron import launcher

    flags = Namespace(context_parallel_size=2, context_parallel_attention_backend="burst")
    launcher.command_line = lambda: flags
    launcher.install()
    for size, core in ((2, "BurstCoreAttention"), (1, "DotProductAttention")):
        model = build(Case(attention="default", cp=size))
        cores = [m for name, m in model.named_modules() if name.endswith("core_attention")]
        assert [type(m).__name__ for m in cores] == [core] * 2
    with pytest.raises(ValueError, match="none of Megatron's attention builds DotProductAttention: put"):
        _attention(DotProductAttention, transformer_config(Case(cp=2)), 1)


def test_legal_arguments_pass():
    layout, kernel = ("--burst-layout", "striped"), ("--burst-kernel", "reference")
    for words in ([], BURST, [*BURST, *layout], [*BURST, *kernel], ["--burst-fused-loss"]):
        checks.check_arguments(_arguments(*words, cp_comm_type=["p2p"]))
    checks.check_arguments(_arguments(*BURST, cp_comm_type=["p2p", "a2a"]))
    for stages, samples in ((1, 4), (4, 1)):
        sizes = {"pipeline_model_parallel_size": stages, "micro_batch_size": samples}
        checks.check_arguments(_arguments(*BURST, **PACKED, **sizes))
    a_spec = {"spec": ["burst_mcore.megatron.spec", "burst_layer_spec"]}
    checks.check_arguments(_arguments("--burst-backward", "kv", **a_spec))
    assert flag_of("overlap") == "--burst-no-overlap"
