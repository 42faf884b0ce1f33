"""What the core attention refuses, and at which moment."""

import pytest
import torch
from models import VERSION, Case, build, transformer_config
from ranks import processes

from burst_mcore import BurstConfig
from burst_mcore.megatron import cpu


def _in_megatron(rank, size, function, cp, *args):
    cpu.enable()
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(context_parallel_size=cp)
    return function(*args)


def in_megatron(function, *args, cp=1):
    return processes(cp, _in_megatron, function, cp, *args)


def _core(config=None, burst=None, attention_type="self", mask_type=None, cp_comm_type=None, **fields):
    from megatron.core.transformer.enums import AttnMaskType

    from burst_mcore.megatron.core_attention import BurstCoreAttention

    return BurstCoreAttention(
        config or transformer_config(Case(fields=tuple(fields.items()))),
        layer_number=1,
        attn_mask_type=mask_type or AttnMaskType.causal,
        attention_type=attention_type,
        cp_comm_type=cp_comm_type,
        burst_config=burst,
    )


def _refusals():
    from megatron.core.transformer.enums import AttnMaskType

    cases = [
        ({"attention_dropout": 0.1}, "attention dropout 0.1.*--attention-dropout 0"),
        ({"attention_type": "cross"}, "cross"),
        ({"window_size": (8, 0)}, "window_size"),
        ({"softmax_type": "learnable"}, "sinks"),
        ({"qk_clip": True}, "qk_clip"),
        ({"cp_comm_type": "a2a"}, "cp_comm_type 'a2a'"),
        ({"mask_type": AttnMaskType.padding}, "causal and no_mask, got .*padding"),
    ]
    for fields, words in cases:
        with pytest.raises(ValueError, match=words):
            _core(**fields)


def test_what_is_not_supported_is_refused_when_the_model_is_built():
    in_megatron(_refusals)


def _refused_inputs():
    core = _core()
    q = torch.randn(8, 1, 4, 16)
    assert core(q, q, q, None).shape == (8, 1, 64)
    later = torch.ones(8, 8, dtype=torch.bool).triu(1)[None, None]
    documents = later.clone()
    documents[..., 4:, :4] = True
    with pytest.raises(ValueError, match="attention bias"):
        core(q, q, q, None, attention_bias=torch.zeros(1))
    with pytest.raises(ValueError, match="packed"):
        core(q, q, q, None, packed_seq_params=object())
    with pytest.raises(ValueError, match="not causal.*--reset-attention-mask"):
        core(q, q, q, documents)
    with pytest.raises(ValueError, match=r"8, 8.*got \(1, 1, 4, 4\)"):
        core(q, q, q, later[..., :4, :4])
    core(q, q, q, later)
    with pytest.raises(ValueError, match="not causal"):
        core(q, q, q, documents)  # at a later call as well


def test_inputs_that_it_would_ignore_are_refused():
    in_megatron(_refused_inputs)


def _other_layout():
    config = transformer_config(Case(cp=2))
    with pytest.raises(ValueError, match="zigzag.*contiguous"):
        _core(config, BurstConfig(layout="contiguous"))
    with pytest.raises(ValueError, match="context_parallel_size is 1.*2 ranks"):
        _core(transformer_config(Case(cp=1)))


def test_a_layout_that_megatron_does_not_deal_is_refused():
    in_megatron(_other_layout, cp=2)


def _ring_is_made_once():
    import torch.distributed as dist

    from burst_mcore.attention import communicators, topology

    made = []
    new_group, companion, backends = dist.new_group, topology.companion, dist.get_backend_config
    dist.get_backend_config = lambda *args: "cuda:nccl"  # there gradients and agreement get their own groups
    try:
        for module in (topology, communicators):
            module.companion = lambda ranks, backend, timeout: (
                made.append(backend) or companion(ranks, "gloo", timeout)
            )
        model = build(Case(cp=2))
    finally:
        dist.get_backend_config = backends
        topology.companion = communicators.companion = companion
    assert made == ["gloo", "nccl"]  # once, though the model has two layers
    dist.new_group = None  # a forward that made a group would fail
    rings = {id(m.topology.communicators) for m in model.modules() if hasattr(m, "topology")}
    assert len(rings) == 1
    for module in model.modules():
        if hasattr(module, "topology"):
            module.topology.communicators.backends = "cpu:gloo"
    at = torch.arange(16)[None]
    model(at, at, None, labels=at).sum().backward()
    dist.new_group = new_group


def test_communicators_are_made_once_and_when_the_model_is_built():
    in_megatron(_ring_is_made_once, cp=2)


def _providers():
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend

    from burst_mcore.megatron.core_attention import BurstCoreAttention
    from burst_mcore.megatron.spec import BurstLocalSpecProvider, BurstTESpecProvider

    for provider in (BurstLocalSpecProvider, BurstTESpecProvider):
        assert provider().core_attention().module is BurstCoreAttention
    assert get_moe_module_spec_for_backend(BurstLocalSpecProvider(), num_experts=2, moe_grouped_gemm=False)


def test_spec_providers_name_our_core_attention():
    in_megatron(_providers)


def _specs():
    import copy

    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    from burst_mcore.megatron.core_attention import BurstCoreAttention
    from burst_mcore.megatron.spec import with_burst_attention

    stock = gpt_layer_specs.get_gpt_layer_local_spec()
    ours = with_burst_attention([stock, stock])
    for spec in ours:
        assert spec.submodules.self_attention.submodules.core_attention.module is BurstCoreAttention
        assert spec.submodules.mlp is stock.submodules.mlp  # what holds no attention is shared
    assert stock.submodules.self_attention.submodules.core_attention is DotProductAttention  # untouched
    again = with_burst_attention(copy.deepcopy(ours[0]), BurstConfig(backward="kv"))
    core = again.submodules.self_attention.submodules.core_attention
    assert core.params["burst_config"].backward == "kv"
    if VERSION >= (0, 19):
        # Its modules are TransformerEngine's, or stand-ins for them where that is not installed.
        from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

        hybrid = with_burst_attention(hybrid_stack_spec).submodules
        for layer in (hybrid.attention_layer, hybrid.mla_layer):
            core = layer.submodules.self_attention.submodules.core_attention
            assert core.module is BurstCoreAttention
        dsa = hybrid.dsa_layer.submodules.self_attention.submodules.core_attention
        assert dsa.module is not BurstCoreAttention  # an attention of another kind is left alone
    with pytest.raises(ValueError, match="no core attention"):
        with_burst_attention(stock.submodules.mlp)


def test_a_spec_is_copied_with_burst_attention_in_it():
    in_megatron(_specs)


@pytest.mark.skipif(VERSION < (0, 19), reason="megatron.training is not in the wheels before 0.19")
def test_the_spec_without_megatron_arguments_says_what_is_missing():
    in_megatron(_spec_without_arguments)


def _spec_without_arguments():
    from burst_mcore.megatron.spec import burst_layer_spec

    with pytest.raises(RuntimeError, match="has not parsed its arguments"):
        _ = burst_layer_spec.submodules
