"""Plans of hybrid models: layers with recurrences and short convolutions beside attention."""

import json
import math
from collections import Counter
from dataclasses import replace

import plain
import players
import pytest
import rules
import torch
import zoo
from test_hybrids import EVERY
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from burst_mcore import Layout
from burst_mcore.attention.candidates import Ranks
from burst_mcore.recurrent import kernels, recurrence
from burst_mcore.recurrent.bound import MIXERS, mixers_of
from burst_mcore.recurrent.fragments import fragments
from burst_mcore.recurrent.halo import halo
from burst_mcore.recurrent.scan import scan
from burst_plan.cli import app
from burst_plan.machines import MACHINES
from burst_plan.step.attention import LAYOUTS, UNSCATTERED, attention
from burst_plan.step.figures import Cluster, step
from burst_plan.step.memory import shard_of, stack
from burst_plan.step.model import PRESETS, from_config, model_of
from burst_plan.step.model.mixers import CHUNK, NONE, _lightning, _linear_unit
from burst_plan.step.parts import layers
from burst_plan.step.planned import planned, text
from burst_plan.step.recurrence import exchanges, work
from burst_plan.step.search import search
from burst_plan.step.way import Way, why_not

QWEN, NEMOTRON = PRESETS["qwen3-next-80b-a3b"], PRESETS["nemotron-h-8b"]
H100 = MACHINES["H100"]
PLACE = Cluster.of(H100, Ranks(16, 8), "H100 2x8")
WAY = Way(framework="deepspeed", cp=16, zero=3, recompute="full")


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


@pytest.mark.parametrize(
    ("name", "further"),
    [*((name, {}) for name in EVERY), *MANY.items()],
    ids=lambda x: x if x else "of the zoo",
)
def test_parameters_are_those_of_transformers(name, further):
    config, whole = built(name, further)
    model, mixers = sizes_of(config), mixers_of(whole).values()
    counted = sum(p.numel() for mixer in mixers for p in mixer.parameters())
    assert model.mixer.layers * (model.mixer.matrices + model.mixer.others) == counted
    linear = {m.weight for mixer in mixers for m in mixer.modules() if type(m) is torch.nn.Linear}
    grouped = {p for mixer in mixers for path, p in mixer.named_parameters() if path.endswith(GROUPED)}
    assert model.mixer.layers * model.mixer.matrices == sum(p.numel() for p in linear | grouped)
    # OLMo's norms of queries and of keys are those of all heads together
    norms = 2 * (model.heads - 1) * model.head_dim + (model.kv_heads - model.heads) * model.head_dim
    rest = norms + 2 * model.head_dim if name == "olmo_hybrid" else 0
    assert model.parameters == sum(p.numel() for p in whole.parameters()) - rest


def test_every_mixer_that_is_served_is_counted():
    """RecurrentGemma's configuration names its layers in a way of its own: 26 of 26 were taken to attend."""
    classes = set()
    for name in EVERY:
        config, whole = built(name, MANY.get(name))
        mixers, model = mixers_of(whole).values(), sizes_of(config)
        classes |= {type(mixer).__name__ for mixer in mixers}
        assert model.mixer.layers == len(mixers) > 0
        attention = [m for m in map(type, whole.modules()) if m.__name__.endswith("Attention")]
        assert model.attending == sum(m.__name__ not in MIXERS for m in attention)
    assert classes == {*MIXERS}


@pytest.mark.parametrize(
    ("name", "parameters", "attending", "mixer"),
    [
        ("nvidia/Nemotron-H-8B-Base-8K", 8_100_852_736, 4, (24, "Mamba 2")),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", 79_674_391_296, 12, (36, "gated delta rule")),
        ("ibm-granite/granite-4.0-h-small", 32_207_337_984, 4, (36, "Mamba 2")),
    ],
)
def test_presets_have_the_parameters_of_their_checkpoints(name, parameters, attending, mixer):
    model = model_of(name)[0]
    assert (model.parameters, model.attending) == (parameters, attending)
    assert (model.mixer.layers, model.mixer.kind) == mixer


def _solved(system, right, *_, **__):
    """FLOPs of a triangular system, as of a product with the inverse."""
    return 2 * math.prod(system) * right[-1]


@pytest.mark.parametrize(
    "name",
    "qwen3_5_text olmo_hybrid kimi_linear bailing_hybrid bamba falcon_h1 lfm2 lfm3 mamba2 zamba2 mamba "
    "falcon_mamba jamba zamba minimax recurrent_gemma".split(),
)
def test_flops_are_those_that_torch_counts(name):
    """A forward with eager attention, which computes all pairs; each head of Mamba 2 has its B and C."""
    tokens = 256
    config = zoo.config_of(name)
    heads = next((getattr(config, key) for key in HEADS if hasattr(config, key)), 0)
    for key in ("mamba_n_groups", "mamba_ngroups", "n_groups"):
        if hasattr(config, key):
            setattr(config, key, heads)
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    whole = AutoModelForCausalLM.from_config(config, **eager)
    solve = torch.ops.aten.linalg_solve_triangular
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping={solve: _solved}) as counter:
        whole(torch.zeros(1, tokens, dtype=torch.long))
    counted = counter.get_flop_counts()["Global"]
    model = sizes_of(config)
    mixer = model.mixer
    convolved = 2 * mixer.layers * mixer.channels * mixer.width * (tokens + mixer.width - 1)  # with padding
    assert counted.pop(torch.ops.aten.convolution, 0) == convolved
    want = model.flops(tokens) / 3 * tokens - 2 * mixer.layers * mixer.channels * mixer.width * tokens
    want += 2 * mixer.layers * in_torch(config, mixer, tokens)
    assert sum(counted.values()) == want


HEADS = ("mamba_n_heads", "n_mamba_heads", "num_heads")


def in_torch(config, mixer, tokens):
    """Multiply-adds of transformers' torch code beyond those of a kernel.

    Of Mamba 2 a scan over chunks, which kernels do as they go. Of Mamba 1 and of linear units torch counts
    the product of states and C alone: the others are elementwise. So are two products of Kimi's keys, within
    chunks.
    """
    if mixer.kind == "Mamba 2":
        chunk = getattr(config, "mamba_chunk_size", getattr(config, "chunk_size", tokens))
        return (tokens // chunk + 1) ** 2 * mixer.recurrence.state
    if mixer.kind == "Kimi delta attention":
        return -tokens * 2 * CHUNK * mixer.channels // 3
    products = {"Mamba 1": mixer.recurrence.state, "linear unit": 0}
    return tokens * (products.get(mixer.kind, mixer.recurrence.kernel) - mixer.recurrence.kernel)


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


def saved(run, *tensors):
    """Numbers in 16 bits that a run keeps, each storage once."""
    storages = {}

    def keep(x):
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out, _ = run(tensors, None)
    storages[out.untyped_storage().data_ptr()] = out.untyped_storage()
    return sum(each.nbytes() for each in storages.values()) / 2


def test_runs_in_plain_torch_keep_what_is_counted():
    """Of bfloat16, over 4 chunks; gates of a head, and what floats of a token are, are left out."""
    tokens, heads, dim, inner = 1024, 4, 32, 96
    attention = _lightning(64, heads, dim)
    x = [torch.randn(1, tokens, heads, dim, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    gate = -torch.rand(1, tokens, heads, requires_grad=True)
    kept = saved(kernels.gated(kernels.linear_attention).run, *x, gate)
    assert kept / tokens == pytest.approx(attention.recurrence.run, rel=0.02)
    unit = _linear_unit(64, heads, 4, inner)
    x = [torch.rand(1, tokens, inner, dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]
    assert saved(kernels.elementwise().run, *x) / tokens == pytest.approx(unit.recurrence.run, rel=0.02)


def test_a_scan_by_doublings_moves_memory_as_often_as_it_doubles():
    """RecurrentGemma's, twice in the middle; zigzag's last rank has 16K tokens in a run as well."""
    unit = _linear_unit(2560, 10, 4, 2560)
    for layout in UNSCATTERED:
        further = 2 * unit.recurrence.run  # what the run for B writes and reads
        assert work(unit, layout, 2**17, 8).moved == (2 * 14 * 26 * 2560 + further,) * 2
    assert work(unit, "zigzag", 2**17, 1).moved == (17 * 26 * 2560,) * 2
    assert work(QWEN.mixer, "zigzag", 2**17, 1).moved == (0, 0)
    run = 2 * QWEN.mixer.recurrence.run
    assert work(QWEN.mixer, "zigzag", 2**17, 8).moved == (2 * run, run)  # for B and for A; backward once more


def test_each_step_of_a_scan_waits_for_its_busiest_rank():
    """Four ranks on two nodes: within a node, across, within; by the picture of docs/features/hybrids.md."""
    mixer, rates = NEMOTRON.mixer, H100.rates
    state, decay = 4 * mixer.recurrence.state, 4 * mixer.recurrence.decay
    near, far = rates.link(inter=False), rates.link(inter=True)
    steps = [max(state, state + decay) / near, state / far, state / near]
    _, seconds = exchanges(mixer, "contiguous", 4096, Ranks(4, 2), rates)["scan of states"]
    assert seconds == pytest.approx(3 * rates.latency + sum(steps), rel=1e-12)


def test_a_fragment_in_the_middle_of_a_document_runs_its_kernel_again():
    """For B, and delta rules for A, which backward leaves out, and which keep nothing; all of it by hand."""
    delta, mamba = QWEN.mixer, NEMOTRON.mixer
    kernel = 32 * (64 * 5 * 128 + 3 * 128 * 128)
    once, zigzag = work(delta, "zigzag", 2**17, 1), work(delta, "zigzag", 2**17, 8)
    assert (delta.recurrence.kernel, delta.recurrence.maps) == (kernel, kernel)
    assert once.products == kernel + 4 * 8192 and zigzag.products == 3 * kernel + 4 * 8192
    assert once.back == once.products and zigzag.back == 2 * kernel + 4 * 8192
    assert once.kept == zigzag.kept == delta.kept + delta.recurrence.run and once.states == 0
    assert zigzag.states == 4 * 2 * 2 * 32 * 128 * 128
    # 8 groups of B and C, 128 heads of 64 x 128, chunks of 128
    scan_of_mamba = 8 * 128 * 128 + 128 * (128 * 64 + 2 * 64 * 128)
    two = work(mamba, "contiguous", 2**17, 2)
    assert two.products == scan_of_mamba + 4 * 10240
    assert work(mamba, "contiguous", 2**17, 3).products == 2 * scan_of_mamba + 4 * 10240
    middle = [each for each in fragments(Layout("contiguous"), 96, 2) if not (each.begins or each.ends)]
    assert not middle


def test_runs_of_a_kernel_and_backwards_through_them_are_as_often_as_counted():
    """Of each rank's own: threads count apart. Then a rank in the middle of zigzag, and of contiguous."""
    forward, backward = Counter(), Counter()

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, rank, *found):
            ctx.rank = rank
            return found

        @staticmethod
        def backward(ctx, *gradients):
            backward[ctx.rank] += 1
            return None, *gradients

    def kernel_of(rank):
        def rule(q, k, v, *, g, beta, initial_state=None, output_final_state=True):
            forward[rank] += 1
            return Noted.apply(rank, *plain.delta_rule(q, k, v, g=g, beta=beta, initial_state=initial_state))

        return kernels.delta_rule(rule)

    x, gradient = rules.tensors("delta rule")
    for layout, each in (("zigzag", 2), ("contiguous", 1)):
        forward.clear(), backward.clear()
        shards = players.played(layout, rules.N, 4)
        mix = lambda x, own: recurrence(kernel_of(own.topology.rank), x, own)  # noqa: E731
        players.sharded(mix, x, gradient, shards)
        own, delta = work(QWEN.mixer, layout, rules.N, 4), QWEN.mixer.recurrence
        convolution = QWEN.mixer.width * QWEN.mixer.channels
        assert forward[1] == each * (own.products - convolution) / delta.kernel == 3 * each
        assert backward[1] == each * (own.back - convolution) / delta.kernel == 2 * each


def test_time_of_a_recurrence_counts_backward_apart():
    """Where products take longer than memory: two gradients of two runs, and a forward of three."""
    slow = replace(PLACE, rates=replace(H100.rates, memory=1e18))
    seconds = step(QWEN, replace(WAY, recompute="none"), 2**18, slow).times.compute["gated delta rule"]
    own = work(QWEN.mixer, "zigzag", 2**18, 16)
    per_run = seconds / (own.products + 2 * own.back)
    again = step(QWEN, WAY, 2**18, slow).times.compute["gated delta rule"]
    assert again / per_run == pytest.approx(2 * (own.products + own.back))


def test_attention_counts_in_the_layers_that_have_it():
    """Beside the same sizes in which every layer attends."""
    dense = replace(QWEN, mixer=NONE, without_attention=0)
    hybrid, plain = (step(model, WAY, 2**18, PLACE).times for model in (QWEN, dense))
    for part in ("attention forward", "attention backward"):
        assert hybrid.compute[part] == pytest.approx(plain.compute[part] / 4)
    assert hybrid.exposed["ring"] == pytest.approx(plain.exposed["ring"] / 4)
    passes = 36 * 3  # in forward, again, in backward
    for name, (_, seconds) in exchanges(QWEN.mixer, "zigzag", 2**18, Ranks(16, 8), H100.rates).items():
        assert hybrid.exposed[name] == pytest.approx(passes * seconds)
    pairs = 6 * 36 * 16 * 512 * 2**17
    matrices = 36 * (QWEN.projections - QWEN.mixer.multiplied)
    assert dense.flops(2**17) - QWEN.flops(2**17) == pytest.approx(pairs + 6 * matrices)
    kept: dict[str, float] = {}
    shard = shard_of(NEMOTRON, replace(WAY, recompute="none"), 2**18)
    for share, parts in layers(NEMOTRON, replace(WAY, recompute="none"), shard):
        for part in parts:
            kept[part.name] = kept.get(part.name, 0.0) + 52 * share * part.kept
    own = work(NEMOTRON.mixer, "zigzag", 2**18, 16)
    assert kept["Mamba 2"] == pytest.approx(24 * (2 * shard.tokens * own.kept + own.states))
    assert kept["norms"] == pytest.approx(52 * 8 * shard.tokens * 4096)
    assert kept["MLP"] == pytest.approx(24 * 4 * shard.tokens * 21504)
    held = stack(QWEN, replace(WAY, recompute="attention"), 2**18)["kept attention"]
    assert held == pytest.approx(12 * shard_of(QWEN, WAY, 2**18).result_bytes)


def test_memory_has_the_fragments_of_the_layout_that_runs():
    """Of a rank in the middle: two fragments on zigzag, one on contiguous, each with a state and A."""
    predicted = step(NEMOTRON, replace(WAY, recompute="none"), 2**18, PLACE)
    zigzag, contiguous = (
        replace(predicted, attention=replace(predicted.attention, layout=layout)).memory["Mamba 2"]
        for layout in UNSCATTERED
    )
    assert zigzag - contiguous == 24 * 4 * (128 * 64 * 128 + 128)


def test_plans_of_hybrid_models_are_of_layouts_and_frameworks_that_serve_them():
    answer = search(NEMOTRON, 2**17, 1, PLACE, mask="causal & window:4096")
    assert {one.attention.layout for one in answer.ranked} <= {"zigzag", "contiguous"}
    assert {one.way.framework for one in answer.ranked} == {"deepspeed"}
    reason = why_not(Way(cp=16), NEMOTRON, 2**17, PLACE.ranks)
    assert reason == "layers with a Mamba 2 are Megatron's own there: their exchange is not predicted"
    shard = shard_of(NEMOTRON, WAY, 2**17)
    free, whole = (
        attention(shard, 2**17, Ranks(2, 2), H100.rates, "dilated:64,2", layouts=tried)
        for tried in (LAYOUTS, UNSCATTERED)
    )
    assert (free.layout, whole.layout) == ("striped", "contiguous")
    predicted = step(NEMOTRON, replace(WAY, cp=2), 2**17, replace(PLACE, ranks=Ranks(2, 2)), "dilated:64,2")
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


FALCON = {
    "model_type": "falcon_mamba", "num_hidden_layers": 64, "hidden_size": 4096, "intermediate_size": 8192,
    "state_size": 16, "time_step_rank": 256, "conv_kernel": 4, "expand": 16, "use_bias": False,
    "use_conv_bias": True, "vocab_size": 65024, "tie_word_embeddings": False}  # fmt: skip
"""Falcon-Mamba-7B, by its file; 7.27 billion parameters."""


def test_a_model_without_attention_is_planned_on_contiguous(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(FALCON))
    answer = planned(str(tmp_path), "128K", "h100:1x8", None, None)
    assert answer.model.parameters == 7_272_665_088 and answer.mask == "causal"
    assert {one.attention.layout for one in answer.ranked} == {"contiguous"}
    assert {one.way.recompute for one in answer.ranked} <= {"none", "full"}
    reason = "recompute attention keeps attention, which no layer has"
    assert reason in {why for _, why in answer.infeasible}
    for one in answer.ranked:
        assert not {"ring", "exchange of heads"} & {*one.times.exposed}
        assert not {"ring buffers", "exchanged heads", "kept attention"} & {*one.memory}
        assert one.times.compute["attention forward"] == one.times.compute["mlp"] == 0
    words = text(answer, 3)
    assert "layers: 0 with attention, 64 with a Mamba 1; each of these has 105 million parameters" in words


def test_the_doctor_counts_a_model_without_attention(tmp_path):
    zoo.config_of("mamba2").save_pretrained(tmp_path)
    done = _doctor(tmp_path, tmp_path, layout="contiguous")
    assert done.exit_code == 0, done.output
    assert "layers: 0 with attention, 2 with a Mamba 2; each of these has " in done.output
    assert "kernel of attention: none, no layer has attention" in done.output
    assert "bytes of attention" not in done.output and "step (predicted)" in done.output


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2"])
def test_the_doctor_tells_layers_and_what_they_send(name, tmp_path):
    config = zoo.config_of(name)
    config.save_pretrained(tmp_path)
    done = _doctor(tmp_path, tmp_path)
    assert done.exit_code == 0, done.output
    kind = sizes_of(config).mixer.kind
    (line,) = (line for line in done.output.splitlines() if line.startswith("layers: "))
    assert line.startswith(f"layers: 1 with attention, 1 with a {kind}; each of these has ")
    assert ("of a scan of states and" in line) == (
        name == "qwen3_next"
    ) and "MB of a halo (predicted)" in line
    assert "bytes of attention a step and rank, 1 layers" in done.output and "step (predicted)" in done.output


def test_the_doctor_refuses_a_striped_layout_as_the_adapter_does(tmp_path):
    done = _doctor(tmp_path, "qwen3-next-80b-a3b", layout="striped")
    assert done.exit_code == 2 and len(done.output.splitlines()) == 1
    assert "refused (layout): layout striped shards neighbouring tokens to different ranks" in done.output
    assert _doctor(tmp_path, "llama3-8b", layout="striped").exit_code == 0


KIMI = {
    "model_type": "kimi_linear", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4,
    "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "vocab_size": 64,
    "intermediate_size": 128, "num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 32,
    "num_shared_experts": 1, "first_k_dense_replace": 1, "linear_attn_config": {
        "full_attn_layers": [4], "kda_layers": [1, 2, 3], "num_heads": 4, "head_dim": 16,
        "short_conv_kernel_size": 4}}  # fmt: skip
"""As the files of Kimi Linear name their sizes."""


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        (KIMI, (1, 3, "Kimi delta attention")),
        ({**json.loads(zoo.config_of("lfm2").to_json_string()), "layer_types": None, "full_attn_idxs": [0],
          "tie_embedding": True}, (1, 1, "short convolution")),
        ({**json.loads(zoo.config_of("qwen3_next").to_json_string()), "layer_types": None,
          "num_hidden_layers": 8}, (2, 6, "gated delta rule")),
    ],
)  # fmt: skip
def test_layers_are_read_as_makers_name_them(config, layers):
    model = from_config(config, "made")
    assert (model.attending, model.mixer.layers, model.mixer.kind) == layers


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "zaya"}, "of bailing_hybrid, .*, zamba2, are not predicted: linear_attention"),
        (
            {"linear_num_value_heads": "4"},
            "linear_num_value_heads must be an integer from 1, got '4'",
        ),
        ({"layer_types": None, "full_attention_interval": None}, "does not say which layers have attention"),
        ({"layer_types": ["linear_attention", "hybrid_sliding"]}, "are not predicted: hybrid_sliding"),
        ({"num_hidden_layers": 3}, "it names the kinds of 2 layers, and has 3"),
    ],
)
def test_other_configurations_are_refused(changes, words):
    config = {**json.loads(zoo.config_of("qwen3_next").to_json_string()), **changes}
    with pytest.raises(ValueError, match=words):
        from_config(config, "made")


def test_patterns_of_megatron_are_refused():
    words = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --vocab-size 64"
    for flag in ("layer", "override"):
        with pytest.raises(ValueError, match="--hybrid-layer-pattern M-M. is not planned"):
            model_of(f"{words} --hybrid-{flag}-pattern M-M*")
