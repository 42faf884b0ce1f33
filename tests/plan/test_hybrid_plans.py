"""Plans of hybrid models: layers with recurrences and short convolutions beside attention."""

import json
import math
from dataclasses import replace

import pytest
import torch
import zoo
from test_hybrids import EVERY
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from burst_mcore import Layout
from burst_mcore.attention.geometry.shard import Ranks
from burst_mcore.recurrent import kernels
from burst_mcore.recurrent.bound import MIXERS, mixers_of
from burst_mcore.recurrent.halo import halo
from burst_mcore.recurrent.scan import scan
from burst_plan.cli import app
from burst_plan.machines import MACHINES
from burst_plan.step.attention import LAYOUTS, UNSCATTERED, attention
from burst_plan.step.figures import Cluster, step
from burst_plan.step.memory import shard_of
from burst_plan.step.model import PRESETS, from_config, model_of
from burst_plan.step.plan import Plan, why_not
from burst_plan.step.planned import planned, text
from burst_plan.step.recurrence import exchanges
from burst_plan.step.search import search

QWEN, NEMOTRON = PRESETS["qwen3-next-80b-a3b"], PRESETS["nemotron-h-8b"]
H100 = MACHINES["H100"]
PLACE = Cluster.of(H100, Ranks(16, 8), "H100 2x8")
PLAN = Plan(framework="deepspeed", cp=16, zero=3, recompute="full")


def sizes_of(config):
    return from_config(json.loads(config.to_json_string()), "tiny")


MANY = {
    "jamba": {"num_hidden_layers": 9, "attn_layer_period": 4, "attn_layer_offset": 2,
              "expert_layer_period": 3, "mamba_proj_bias": True},
    "mamba": {"num_hidden_layers": 3, "use_bias": True, "use_conv_bias": False},
    "mamba2": {"num_hidden_layers": 3, "use_bias": True},
    "recurrent_gemma": {"num_hidden_layers": 5, "block_types": ["recurrent", "recurrent", "attention"]},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["hybrid", "linear_attention", *["hybrid"] * 2],
              "tie_word_embeddings": True},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["hybrid", "linear_attention", *["hybrid"] * 2],
               "hybrid_layer_ids": [0, 2, 3], "num_mem_blocks": 2, "adapter_rank": 8,
               "use_shared_attention_adapter": True, "tie_word_embeddings": True},
}  # fmt: skip
"""Further layers, of kinds that repeat or share their weights, and biases."""
GROUPED = ("x_proj_weight", "dt_proj_weight", "input_gate_weight", "recurrent_gate_weight")
"""Matrices in blocks, which are no module of their own."""


def built(name, further):
    config = zoo.config_of(name)
    if further:
        config = type(config).from_dict(config.to_dict() | further)
    with torch.device("meta"):
        return config, AutoModelForCausalLM.from_config(config)


def test_parameters_are_those_of_transformers():
    """And every mixer that is supported is counted, in whatever way a configuration names its layers."""
    classes = set()
    for name, further in [*((name, {}) for name in EVERY), *MANY.items()]:
        config, whole = built(name, further)
        model, mixers = sizes_of(config), mixers_of(whole).values()
        counted = sum(p.numel() for mixer in mixers for p in mixer.parameters())
        assert model.mixer.layers == len(mixers) > 0
        assert model.mixer.layers * (model.mixer.matrices + model.mixer.others) == counted, name
        linear = {m.weight for mixer in mixers for m in mixer.modules() if type(m) is torch.nn.Linear}
        grouped = {p for mixer in mixers for path, p in mixer.named_parameters() if path.endswith(GROUPED)}
        assert model.mixer.layers * model.mixer.matrices == sum(p.numel() for p in linear | grouped), name
        # OLMo's norms of queries and of keys are those of all heads together
        norms = 2 * (model.heads - 1) * model.head_dim + (model.kv_heads - model.heads) * model.head_dim
        rest = norms + 2 * model.head_dim if name == "olmo_hybrid" else 0
        assert model.parameters == sum(p.numel() for p in whole.parameters()) - rest, name
        attention = [m for m in map(type, whole.modules()) if m.__name__.endswith("Attention")]
        assert model.attending == sum(m.__name__ not in MIXERS for m in attention), name
        classes |= {type(mixer).__name__ for mixer in mixers}
    assert classes == {*MIXERS}


CHECKPOINTS = {
    "nvidia/Nemotron-H-8B-Base-8K": (8_100_852_736, 4, 24, "Mamba 2"),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": (79_674_391_296, 12, 36, "gated delta rule"),
    "ibm-granite/granite-4.0-h-small": (32_207_337_984, 4, 36, "Mamba 2"),
}


def test_presets_have_the_parameters_of_their_checkpoints():
    for name, found in CHECKPOINTS.items():
        model = model_of(name)[0]
        assert (model.parameters, model.attending, model.mixer.layers, model.mixer.kind) == found


def unused(*_, initial_states=None, return_final_states=True):
    """Stands for a kernel whose shapes alone are asked for."""


SHAPES = {
    "qwen3-next-80b-a3b": (
        kernels.delta_rule(kernels.linear_attention),
        ((16, 128), (16, 128), (32, 128), (32,), (32,)),
    ),
    "nemotron-h-8b": (kernels.mamba2(unused, torch.zeros(128)), ((128, 64), (128,), (8, 128), (8, 128))),
    "bailing_hybrid": (kernels.delta_rule(kernels.linear_attention), ((4, 8),) * 4 + ((4,),)),
    "zamba2": (kernels.mamba2(unused, torch.zeros(8)), ((8, 8), (8,), (1, 16), (1, 16))),
    "falcon_mamba": (kernels.mamba1(unused, torch.zeros(48, 16)), ((48,), (48,), (16,), (16,))),
    "jamba": (kernels.mamba1(unused, torch.zeros(64, 16)), ((64,), (64,), (16,), (16,))),
    "minimax": (kernels.gated(kernels.linear_attention), ((4, 8), (4, 8), (4, 8), (4,))),
    "recurrent_gemma": (kernels.elementwise(), ((32,), (32,))),
}
"""By model, its recurrence and the shapes of a token's tensors."""


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_bytes_are_those_of_the_programs_and_of_the_kernels_states(name, layout):
    kernel, shapes = SHAPES[name]
    mixer = (PRESETS[name] if name in PRESETS else sizes_of(zoo.config_of(name))).mixer
    tensors = tuple(torch.empty(1, 64, *shape, device="meta").movedim(1, kernel.dim) for shape in shapes)
    state, decay = (math.prod(of(tensors)) for of in (kernel.state_shape, kernel.decay_shape))
    assert (mixer.recurrence.state, mixer.recurrence.decay) == (state, decay)
    where = Layout(layout), 2**18, 32, 8
    scanned, rows = scan(*where), halo(*where, reach=max(0, mixer.width - 1))
    most = max(scanned.received(rank, state=4 * state, decay=4 * decay) for rank in range(32))
    found = exchanges(mixer, layout, 2**18, Ranks(32, 8), H100.rates)
    assert found["scan of states"][0] == most
    assert ("halo" in found) == (name != "minimax")  # which has no convolution
    if mixer.width:
        assert found["halo"][0] == max(rows.received(rank, row=2 * mixer.channels) for rank in range(32))
        assert found["halo"][0] == (2 if layout == "zigzag" else 1) * 3 * 2 * mixer.channels


def test_plans_of_hybrid_models_are_of_layouts_and_frameworks_that_serve_them():
    answer = search(NEMOTRON, 2**17, 1, PLACE, mask="causal & window:4096")
    assert {one.attention.layout for one in answer.ranked} <= {"zigzag", "contiguous"}
    assert {one.plan.framework for one in answer.ranked} == {"deepspeed"}
    reason = why_not(Plan(cp=16), NEMOTRON, 2**17, PLACE.ranks)
    assert reason == "layers with a Mamba 2 are Megatron's own there: their exchange is not predicted"
    shard = shard_of(NEMOTRON, PLAN, 2**17)
    free, whole = (
        attention(shard, 2**17, Ranks(2, 2), H100.rates, "dilated:64,2", layouts=tried)
        for tried in (LAYOUTS, UNSCATTERED)
    )
    assert (free.layout, whole.layout) == ("striped", "contiguous")
    predicted = step(NEMOTRON, replace(PLAN, cp=2), 2**17, replace(PLACE, ranks=Ranks(2, 2)), "dilated:64,2")
    assert predicted.attention.layout == whole.layout
    words = text(planned("nemotron-h-8b", "128K", "h100:2x8", None, None), 3)
    assert "layers: 4 with attention, 24 with a Mamba 2; each of these has 110 million parameters" in words
    assert "MB of a scan of states and 0.123 MB of a halo (predicted)" in words
    assert "scan of states" in words.split("exposed, s: ")[1].splitlines()[0]


def _doctor(tmp_path, model, **section):
    config = {"bf16": {"enabled": True}, "sequence_parallel_size": 4, "zero_optimization": {"stage": 2}}
    (tmp_path / "ds.json").write_text(json.dumps(config | {"burst_attention": section}))
    words = ["--model", str(model), "--seq", "64K", "--world", "4", "--device", "h100"]
    return CliRunner().invoke(app, ["doctor", str(tmp_path / "ds.json"), *words])


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2", "mamba2"])
def test_the_doctor_tells_layers_and_what_they_send(name, tmp_path):
    config = zoo.config_of(name)
    config.save_pretrained(tmp_path)
    done = _doctor(tmp_path, tmp_path, layout="contiguous")
    assert done.exit_code == 0 and "step (predicted)" in done.output, done.output
    model, attends = sizes_of(config), name != "mamba2"
    (line,) = (line for line in done.output.splitlines() if line.startswith("layers: "))
    told = f"layers: {model.attending} with attention, {model.mixer.layers} with a {model.mixer.kind};"
    assert line.startswith(told) and "MB of a halo (predicted)" in line
    assert ("of a scan of states and" in line) == (name != "lfm2")
    assert ("bytes of attention a step and rank, 1 layers" in done.output) == attends
    assert ("kernel of attention: none, no layer has attention" in done.output) == (not attends)


KIMI = {
    "model_type": "kimi_linear", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4,
    "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "vocab_size": 64,
    "intermediate_size": 128, "num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 32,
    "num_shared_experts": 1, "first_k_dense_replace": 1, "linear_attn_config": {
        "full_attn_layers": [4], "kda_layers": [1, 2, 3], "num_heads": 4, "head_dim": 16,
        "short_conv_kernel_size": 4}}  # fmt: skip
"""As the files of Kimi Linear name their sizes."""


def test_layers_are_read_as_makers_name_them():
    lfm, qwen = (json.loads(zoo.config_of(name).to_json_string()) for name in ("lfm2", "qwen3_next"))
    unnamed = {"layer_types": None}
    for config, kinds in (
        (KIMI, (1, 3, "Kimi delta attention")),
        (lfm | unnamed | {"full_attn_idxs": [0], "tie_embedding": True}, (1, 1, "short convolution")),
        (qwen | unnamed | {"num_hidden_layers": 8}, (2, 6, "gated delta rule")),
    ):
        model = from_config(config, "made")
        assert (model.attending, model.mixer.layers, model.mixer.kind) == kinds
