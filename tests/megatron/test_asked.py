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


def test_every_field_that_megatrons_core_attentions_read_is_served_or_refused():
    read = {field for core in CORES for field in _read_fields(*core)}
    passed = {field for module in ATTENTIONS for field in _passed_fields(module)}
    assert len(read) > 15 and passed == {"softmax_scale", "v_head_dim"}
    known = SERVED.keys() | REFUSED_BY_FIELD.keys()
    assert read | passed <= known, "say what becomes of these"
    if VERSION >= (0, 19):
        assert known - read - passed <= {"hierarchical_context_parallel_sizes", "init_method"}
    assert SERVED.keys() == VARIED.keys() | PROVED.keys()


SERVED = {
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
REFUSED_BY_FIELD = {
    "attention_dropout": 0.1,
    "batch_invariant_mode": True,
}
"""Fields that burst attention refuses, and a value of each."""
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
PROVED = {
    "attention_backend": "test_asked.py::test_what_burst_does_not_do_is_refused_by_the_constructor",
    "bf16": "test_asked.py::test_the_kernel_is_checked_for_the_dtype_of_the_calls",
    "context_parallel_size": "test_models.py::test_gpt",
    "deterministic_mode": "test_asked.py::test_what_burst_does_not_do_is_refused_by_the_constructor",
    "flash_attention_version": "test_asked.py::test_a_version_of_flash_attention_is_obeyed_or_refused",
    "fp16": "test_asked.py::test_the_kernel_is_checked_for_the_dtype_of_the_calls",
    "hierarchical_context_parallel_sizes": "test_models.py::test_gpt_on_other_routes",
    "init_method": "test_models.py::test_sinks",
    "log_max_attention_logit": "test_core_attention.py::test_largest_logits_for_qk_clip",
    "params_dtype": "test_asked.py::test_the_kernel_is_checked_for_the_dtype_of_the_calls",
    "perform_initialization": "test_models.py::test_sinks",
    "qk_clip": "test_core_attention.py::test_largest_logits_for_qk_clip",
    "sequence_parallel": "test_models.py::test_gpt",
    "softmax_scale": "test_asked.py::test_served_fields_mean_what_they_mean_in_megatrons_own_attention",
    "tensor_model_parallel_size": "test_models.py::test_gpt",
    "v_head_dim": "test_layouts.py::test_mla",
}
"""Where the others are tried."""


@pytest.mark.parametrize("test", sorted(set(PROVED.values())))
def test_what_is_said_to_be_proved_elsewhere_is_there(test):
    file, name = test.split("::")
    assert f"def {name}(" in (Path(__file__).parent / file).read_text()


def _own_attention(config, layer):
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    return DotProductAttention(config, layer, AttnMaskType.causal, "self", softmax_scale=0.3)


def _ours(config, layer):
    from megatron.core.transformer.enums import AttnMaskType

    from burst_mcore.megatron.core_attention import BurstCoreAttention

    return BurstCoreAttention(config, layer, AttnMaskType.causal, "self", softmax_scale=0.3)


def _alike(changed):
    """Compare layers 1 and 2 with Megatron's own attention, with and without other values of these fields."""
    from megatron.core import tensor_parallel

    tensor_parallel.model_parallel_cuda_manual_seed(1)
    mask = torch.ones(12, 12, dtype=torch.bool).triu(1)[None, None]
    for fields in ({}, {name: VARIED[name] for name in changed}):
        config = transformer_config(Case(fields=(*fields.items(),)))
        q = torch.randn(12, 2, config.num_attention_heads, config.kv_channels)
        k, v = (torch.randn(12, 2, config.num_query_groups, config.kv_channels) for _ in range(2))
        for layer in (1, 2):
            want = _own_attention(config, layer)(q, k, v, mask)
            torch.testing.assert_close(_ours(config, layer)(q, k, v, None), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", VARIED)
def test_served_fields_mean_what_they_mean_in_megatrons_own_attention(name):
    beside = {"window_attn_skip_freq": ("window_size",)}.get(name, ())
    in_megatron(_alike, (name, *beside))


WORDS = {
    "attention_dropout": "attention dropout 0.1",
    "fp8_dot_product_attention": "FP8",
    "fp8_multi_head_attention": "FP8",
    "batch_invariant_mode": "batch-invariant",
    "use_kitchen_attention": "Kitchen",
    "cuda_graph_impl": "CUDA graphs",
    "enable_cuda_graph": "CUDA graphs",
    "external_cuda_graph": "CUDA graphs",
}
"""What the refusal of a field says."""
REFUSED = {
    **REFUSED_BY_FIELD,
    **{name: True for name in WORDS if name.startswith(("fp8", "use_", "enable_", "external_"))},
    "cuda_graph_impl": "local",
}
"""Fields that are refused, read by a core attention or by what runs it, and a value of each."""


def _with(config, **fields):
    for name, value in fields.items():
        setattr(config, name, value)
    return config


def _refusals():
    from megatron.core.transformer.enums import AttnBackend

    assert REFUSED.keys() == WORDS.keys()
    for name, value in REFUSED.items():
        with pytest.raises(ValueError, match=f"layer 1: burst attention does not support .*{WORDS[name]}"):
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
        ValueError,
        match="layer 1: --burst-kernel cudnn: tensors are on cpu, not on cuda; legal here: auto, aten-cpu",
    ):
        _core(burst=BurstConfig(kernel="cudnn"))
    with pytest.raises(ValueError, match="layer 1: --flash-attention-version 2: no kernel.*not on cuda"):
        _core(_with(transformer_config(Case()), flash_attention_version=2))
    assert not _core().burst_config.deterministic
    assert _core(_with(transformer_config(Case()), deterministic_mode=True)).burst_config.deterministic


def test_what_burst_does_not_do_is_refused_by_the_constructor():
    in_megatron(_refusals)


@pytest.mark.parametrize("version", [2, 3, 4])
def test_a_version_of_flash_attention_is_obeyed_or_refused(version, monkeypatch):
    order = ["te", "cudnn", "flash4", "flash3", "flash2", "aten-flash"]
    stand_ins = {name: Namespace(name=name, supports=lambda problem: None) for name in order}
    monkeypatch.setattr(asked, "KERNELS", stand_ins)
    monkeypatch.setattr(asked, "by_rank", lambda *args: order)
    problem = Namespace(device="cuda", launches=None)

    def kernel(word="auto", **fields):
        return asked.kernel_of(BurstConfig(kernel=word), Namespace(**fields), problem).kernel

    assert kernel() == "auto" and kernel(attention_backend="flash") == "flash4"
    assert kernel(attention_backend="fused") == "te"
    pinned = {"flash_attention_version": version}
    assert kernel(**pinned) == kernel(attention_backend="flash", **pinned) == f"flash{version}"
    assert kernel(attention_backend="fused", **pinned) == "te"
    assert kernel(f"flash{version}", **pinned) == f"flash{version}"
    for other in {*order} - {f"flash{version}"}:
        with pytest.raises(
            ValueError, match=f"{other} contradicts --flash-attention-version {version}: give one"
        ):
            kernel(other, **pinned)
    stand_ins[f"flash{version}"].supports = lambda problem: "not installed"
    for fields in ({}, {"attention_backend": "flash"}):
        with pytest.raises(
            ValueError, match=rf"--flash-attention-version {version}: no kernel serves it \(.*not installed"
        ):
            kernel(**fields, **pinned)


def _kernels_for_dtypes():
    """The constructor asks kernels for the dtype of calls, whatever the parameters have yet."""
    tried = []

    def chosen(burst, config, problem):
        tried.append(problem.dtype)
        return kernel_of(burst, config, problem)

    kernel_of, asked.kernel_of = asked.kernel_of, chosen
    for fields, dtype in (
        ({"bf16": True, "params_dtype": torch.bfloat16}, torch.bfloat16),
        ({"fp16": True, "params_dtype": torch.float16}, torch.float16),
        ({"bf16": True}, torch.bfloat16),
        ({"params_dtype": torch.float64}, torch.float64),
        ({}, torch.float32),
    ):
        _core(_with(transformer_config(Case()), **fields))
        assert tried[-1] == dtype, fields


def test_the_kernel_is_checked_for_the_dtype_of_the_calls():
    in_megatron(_kernels_for_dtypes)


def test_comm_types_fix_the_way():
    config = Namespace(context_parallel_size=4, hierarchical_context_parallel_sizes=[2, 2])
    way = {
        kind: asked.configured(BurstConfig(), config, kind)
        for kind in (None, "p2p", "a2a", "a2a+p2p", "all_gather", "allgather")
    }
    assert way[None] == way["p2p"] == BurstConfig()
    assert way["a2a"] == BurstConfig(head_parallel=4)
    assert way["a2a+p2p"] == BurstConfig(head_parallel=2, head_placement="inner")
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
        pipeline_model_parallel_size=1,
        micro_batch_size=1,
    )
    return Namespace(**{**defaults, **vars(given), **others})


def test_the_flag_of_a_removed_setting_says_what_to_write(capsys):
    with pytest.raises(SystemExit):
        _arguments("--burst-mesh", "2x2")
    assert "--burst-mesh: it is removed; write ring='direct'" in capsys.readouterr().err


MLA = {"multi_latent_attention": True}
PACKED = {"dataloader_inter_document_masking": True}
BURST = ("--context-parallel-attention-backend", "burst")
LATENT = (*BURST, "--burst-mla-latent", "on")


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
        (["--burst-mla-latent", "off"], {}, "--burst-mla-latent has no effect"),
        (LATENT, {}, "--burst-mla-latent does not support layers that have no latent .add --multi"),
        (LATENT, {**MLA, "apply_rope_fusion": True}, "fused rope .pass --no-rope-fusion"),
        (
            LATENT,
            {**MLA, "fp8": "e4m3"},
            "--burst-mla-latent does not support FP8 or FP4 weights .or pass off",
        ),
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
        ([*BURST, "--burst-head-parallel", "1"], {"cp_comm_type": ["a2a"]}, "give one of them"),
        (["--burst-layout", "zigzag"], {}, "--burst-layout has no effect without burst attention"),
        (
            BURST,
            {"cp_comm_type": ["a2a"], "num_attention_heads": 3},
            "a2a: head_parallel=2 is not legal with 3 heads.*3 heads do not divide by 2; legal: .1.",
        ),
        (
            [*BURST, "--burst-head-parallel", "3"],
            {},
            "head_parallel=3 is not legal .*it does not divide the 2 ranks; legal: .1, 2",
        ),
        (
            [*BURST, "--burst-layout", "striped"],
            {"mtp_num_layers": 1},
            "multi-token prediction .*but layout striped is set",
        ),
        (BURST, {"seq_length": 66}, "--seq-length 66 is no multiple of 4"),
        (BURST, {"flash_decode": True}, "--flash-decode, which goes past core attention: generate at"),
        (
            [*BURST, "--burst-layout", "striped"],
            {"sft": True},
            "--sft assumes documents sharded zigzag, but layout striped is set: use zigzag",
        ),
        (
            [*BURST, "--burst-kernel", "reference"],
            {"attention_backend": "flash"},
            "contradicts --attention-b",
        ),
        (
            [*BURST, "--burst-kernel", "flash3"],
            {"flash_attention_version": 2},
            "--burst-kernel flash3 contradicts --flash-attention-version 2: give one of them",
        ),
        (
            [*BURST, "--burst-kernel", "te"],
            {},
            "--burst-kernel te: tensors are on cpu, not on cuda; legal here: ",
        ),
        (
            BURST,
            {"attention_backend": "flash"},
            "--attention-backend flash: no kernel serves it .*not on cuda",
        ),
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
    asked.check_arguments(_arguments(*BURST, "--burst-kernel", "reference"))
    for stages, samples in ((1, 4), (4, 1)):
        sizes = {"pipeline_model_parallel_size": stages, "micro_batch_size": samples}
        asked.check_arguments(_arguments(*BURST, **PACKED, **sizes))
    a_spec = {"spec": ["burst_mcore.megatron.spec", "burst_layer_spec"]}
    asked.check_arguments(_arguments("--burst-backward", "kv", **a_spec))
    assert flag_of("overlap") == "--burst-no-overlap"
