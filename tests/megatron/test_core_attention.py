"""What the core attention refuses, and at which moment."""

from types import SimpleNamespace

import pytest
import recipes
import torch
from models import (
    MLA,
    VERSION,
    VOCAB,
    Case,
    N,
    build,
    in_megatron,
    megatron_on,
    needs_019,
    transformer_config,
)

from burst_mcore import BurstConfig, Layout, positions, shard
from burst_mcore.megatron.layouts import use_layout


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


@megatron_on(1)
def test_what_is_not_supported_is_refused_when_the_model_is_built():
    from megatron.core.transformer.enums import AttnMaskType

    softmax = "softmax_type 'off-by-two': legal are vanilla, off-by-one, learnable"
    for fields, words in (
        ({"attention_dropout": 0.1}, "attention dropout 0.1.*--attention-dropout 0"),
        ({"attention_type": "cross"}, "cross"),
        ({"window_size": (-2, 0)}, "window left"),
        ({"softmax_type": "off-by-two"}, softmax),
        ({"mask_type": AttnMaskType.arbitrary}, "causal and no_mask.*got .*arbitrary"),
    ):
        with pytest.raises(ValueError, match=words):
            _core(**fields)


def _largest(x):
    """The maximum over the ranks of a context-parallel group."""
    torch.distributed.all_reduce(x, torch.distributed.ReduceOp.MAX)
    return x


def _of_two_microbatches(cp):
    rank, core = torch.distributed.get_rank(), _core(transformer_config(Case(cp=cp, fields=(CLIP[0],))))
    generator, want = torch.Generator().manual_seed(2), []
    for _ in range(2):
        q, k = (torch.randn(24, 2, heads, 16, generator=generator) for heads in (4, 2))
        scores = torch.einsum("mbhd,nbhd->bhmn", q.double(), k.double().repeat_interleave(2, 2)) / 4
        want.append(scores.masked_fill(torch.ones(24, 24).triu(1) > 0, -torch.inf).amax((0, 2, 3)))
        q, k = (shard(x, 0, rank=rank, size=cp, layout="zigzag") for x in (q, k))
        core(q.requires_grad_(), k, k, None)
    assert not core.current_max_attn_logits.requires_grad
    found = _largest(core.current_max_attn_logits)
    torch.testing.assert_close(found.double(), torch.stack(want).amax(0), rtol=1e-6, atol=0)


CLIP = ("qk_clip", True), ("qk_clip_threshold", 0.02)


def _clipped(cp, recompute, latent):
    """The largest logits of the first layer before and after Megatron has clipped its weights by them."""
    from megatron.core.optimizer.qk_clip import clip_qk

    fields = CLIP if latent is None else (*MLA, *CLIP)
    case = Case(cp=cp, recompute=recompute, fields=fields, mla_latent=latent or "off")
    torch.manual_seed(1)
    model, found = build(case), []
    at = positions(N, rank=torch.distributed.get_rank(), size=cp, layout="zigzag")[None]
    attention = model.decoder.layers[0].self_attention
    for _ in range(2):
        model(torch.arange(N)[at] * 7 % VOCAB, at, None, labels=at).sum().backward()
        found.append(_largest(attention.core_attention.current_max_attn_logits.clone()))
        clip_qk([SimpleNamespace(module=SimpleNamespace(module=model))])
        assert attention.core_attention.current_max_attn_logits is None
    return torch.stack(found)


@needs_019
@pytest.mark.proves("qk-clip", "GPT and MLA, also whose latent rotates; with and without recompute; CP 1, 2")
def test_largest_logits_for_qk_clip():
    in_megatron(_of_two_microbatches, 2, cp=2)
    (want,) = in_megatron(_clipped, 1, None, None)
    for recompute in (None, "full"):
        for found in in_megatron(_clipped, 2, recompute, None, cp=2):
            torch.testing.assert_close(found, want, rtol=1e-5, atol=0)
    before, after = want.view(2, 2, 2)  # by group of heads, which are clipped by their largest
    torch.testing.assert_close(after.amax(1), before.amax(1).clamp(max=0.02), rtol=1e-5, atol=0)
    assert bool((before > 0.02).any())
    (of_keys,) = in_megatron(_clipped, 1, None, "off")
    for found in in_megatron(_clipped, 2, None, "on", cp=2):
        torch.testing.assert_close(found, of_keys, rtol=1e-5, atol=0)


@megatron_on(1)
def test_inputs_that_it_would_ignore_are_refused():
    core = _core()
    q = torch.randn(8, 1, 4, 16)
    assert core(q, q, q, None).shape == (8, 1, 64)
    later = torch.ones(8, 8, dtype=torch.bool).triu(1)[None, None]
    documents = later.clone()
    documents[..., 4:, :4] = True
    with pytest.raises(ValueError, match="attention bias"):
        core(q, q, q, None, attention_bias=torch.zeros(1))
    with pytest.raises(ValueError, match="padding_causal needs packed"):
        core(q, q, q, None, attn_mask_type=type(core.attn_mask_type).padding_causal)
    with pytest.raises(ValueError, match="not causal.*--reset-attention-mask"):
        core(q, q, q, documents)
    with pytest.raises(ValueError, match=r"8, 8.*got \(1, 1, 4, 4\)"):
        core(q, q, q, later[..., :4, :4])
    core(q, q, q, later)
    with pytest.raises(ValueError, match="not causal"):
        core(q, q, q, documents)  # at a later call as well
    n = 2**14 + 1
    long, dense = q[:1].expand(n, -1, -1, -1), later[..., :1, :1].expand(1, 1, n, n)  # which take no memory
    with pytest.raises(ValueError, match=f"attention_mask asks for a dense mask of {n} x {n}: .*none"):
        core(long, long, long, dense)


@megatron_on(2)
def test_a_group_of_another_size_than_the_config_says_is_refused():
    from burst_mcore.megatron import core_attention

    with pytest.raises(ValueError, match="context_parallel_size is 4.*2 ranks"):
        _core(transformer_config(Case(cp=4)))
    with pytest.raises(ValueError, match="takes two hierarchical .*got sizes .1, 1, 2. and groups"):
        three = transformer_config(Case(cp=2, fields=(("hierarchical_context_parallel_sizes", [1, 1, 2]),)))
        groups = [SimpleNamespace(size=lambda n=n: n) for n in (1, 1, 2)]
        core_attention._levels(three, torch.distributed.group.WORLD, SimpleNamespace(hcp=groups))
    model, at = build(Case(cp=1)), torch.arange(N)[None]
    with pytest.raises(ValueError, match="layer 1: the model's context_parallel_size is 1.*2 ranks"):
        model(at, at, None)


@megatron_on(2)
def test_a_vision_tower_attends_alone_beside_a_ring():
    """A layer at CP 1 beside a language model at CP 2: it sees whole images, on every rank."""
    from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from burst_mcore.megatron.spec import with_burst_attention

    images, found = torch.randn(24, 2, 64, generator=torch.Generator().manual_seed(2)), []
    for spec in (with_burst_attention(get_vit_layer_with_local_spec()), get_vit_layer_with_local_spec()):
        torch.manual_seed(1)
        layer = TransformerLayer(transformer_config(Case(cp=1)), spec.submodules, layer_number=1)
        kept, _ = layer(images, None)
        (kept * images).sum().backward()
        found.append([kept.detach(), *(x.grad for x in layer.parameters())])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def _params(real, padded=None, keys=None, qkv_format="thd", partition=None, **fields):
    from megatron.core.packed_seq_params import PackedSeqParams

    real, padded, keys = (None if x is None else torch.tensor(x) for x in (real, padded, keys))
    keys = real if keys is None else keys
    params = PackedSeqParams(qkv_format, real, keys, padded, padded, **fields)
    if partition is not None:  # a field from Megatron-Core 0.20 on
        params.cp_partition_mode = partition
    return params


def _documents(slots, lengths, is_causal, qkv):
    """What each document gives alone, zeros at padding."""
    out = torch.zeros_like(qkv[0])
    for start, length in zip(slots, lengths, strict=True):
        q, k, v = (x[start : start + length].transpose(0, 1) for x in qkv)
        alone = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        out[start : start + length] = alone.transpose(0, 1)
    return out


REAL, SLOTS, TOKENS = [0, 7, 7, 10, 18], [0, 8, 16, 24, 32], 40


def _packed(cp):
    """Padding within the slots, a document without tokens, and padding behind the last one."""
    import torch.distributed as dist
    from megatron.core.transformer.enums import AttnMaskType

    layout = Layout("zigzag-documents", ends=(*SLOTS, TOKENS)) if cp > 1 else Layout()
    rank = dist.get_rank()
    qkv = torch.randn(3, TOKENS, 4, 16, generator=torch.Generator().manual_seed(1))
    held = [shard(x, 0, rank=rank, size=cp, layout=layout) for x in qkv]
    at = positions(TOKENS, rank=rank, size=cp, layout=layout)
    lengths = torch.tensor(REAL).diff().tolist()
    is_real = torch.cat([s + torch.arange(n) for s, n in zip(SLOTS[:-1], lengths, strict=True)])
    real = torch.isin(at, is_real)
    core = _core(transformer_config(Case(cp=cp)))
    for kind in AttnMaskType.causal, AttnMaskType.padding_causal, AttnMaskType.no_mask, AttnMaskType.padding:
        is_causal = "causal" in kind.name
        out = core(*held, None, attn_mask_type=kind, packed_seq_params=_params(REAL, SLOTS))
        assert out.shape == (TOKENS // cp, 64)
        assert out.isfinite().all()
        want = _documents(SLOTS[:-1], lengths, is_causal, qkv).flatten(1)[at]
        torch.testing.assert_close(out[real], want[real])
        with_batch = [x[:, None] for x in held]
        again = core(*with_batch, None, attn_mask_type=kind, packed_seq_params=_params(REAL, SLOTS))
        assert again.shape == (TOKENS // cp, 1, 64)
        torch.testing.assert_close(again[:, 0], out)


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_packed_documents_of_every_mask_type(cp):
    in_megatron(_packed, cp, cp=cp)


@megatron_on(2)
def test_packed_sequences_that_are_not_legal_are_refused():
    core = _core(transformer_config(Case(cp=2)))
    q = torch.randn(10, 4, 16)
    cases = [
        (_params([0, 6, 20]), "multiples of 4 tokens .cu_seqlens_q_padded., but one ends at 6"),
        (_params([0, 8, 24]), "end at 24 .*hold 20 tokens"),
        (_params([0, 8, 4, 20]), "cu_seqlens_q must ascend from 0"),
        (_params([4, 20]), "cu_seqlens_q must ascend from 0"),
        (_params([[0, 20]]), r"cu_seqlens_q must be integers \[documents \+ 1\].*\[1, 2\]"),
        (_params([0.0, 20.0]), "cu_seqlens_q must be integers"),
        (_params(None), "cu_seqlens_q .*must be a tensor"),
        (_params([0, 8, 20], keys=[0, 12, 20]), r"same documents, but cu_seqlens_kv is \[0, 12, 20\]"),
        (_params([0, 10, 20], [0, 8, 20]), "document 0 has 10 tokens .*room for 8"),
        (_params([0, 8, 12, 20], [0, 20]), "one length, got 4 and 2"),
        (_params([0, 20], qkv_format="bshd"), "'thd', or 'sbhd' .*got 'bshd'"),
        (_params([0, 8, 20], partition="contiguous"), "cp_partition_mode 'contiguous'.*zigzag"),
        (_params([0, 8, 20], qkv_format="sbhd"), "format thd, .*'sbhd' with 2 documents"),
    ]
    for params, words in cases:
        with pytest.raises(ValueError, match=f"layer 1: .*{words}"):
            core(q, q, q, None, packed_seq_params=params)
    with pytest.raises(ValueError, match="attention_mask must be None"):
        core(q, q, q, torch.zeros(1, 1, 10, 20, dtype=torch.bool), packed_seq_params=_params([0, 8, 20]))
    with pytest.raises(ValueError, match=r"must be \[tokens, heads, dim\]"):
        core(*[q[:, None].expand(-1, 2, -1, -1)] * 3, None, packed_seq_params=_params([0, 8, 20]))
    pair = core.cp_group
    for given, words in ((None, "2, but no cp_group"), (pair, "4, but a cp_group of 2 ranks")):
        params = _params([0, 8, 20], cp_group=given, local_cp_size=4 if given else 2)
        with pytest.raises(ValueError, match=f"local_cp_size {words}"):
            core(q, q, q, None, packed_seq_params=params)
    assert core(q, q, q, None, packed_seq_params=_params([0, 8, 20, 20], [0, 8, 20])).shape == (10, 64)


@megatron_on(2)
def test_documents_at_any_token_need_the_layout_of_whole_batches():
    from burst_mcore.megatron.arguments import packed_of

    masking = {"dataloader_inter_document_masking": True}
    arguments, of_sft = SimpleNamespace(**masking, sft=False), SimpleNamespace(**masking, sft=True)
    assert (packed_of(arguments), packed_of(of_sft)) == ("whole", "documents")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("burst_mcore.megatron.core_attention.command_line", lambda: arguments)
        with pytest.raises(ValueError, match=r"use_layout\('zigzag', packed='whole'\)"):
            _core(transformer_config(Case(cp=2)))
        use_layout("zigzag", packed="whole")
        q = torch.randn(8, 4, 16)
        core = _core(transformer_config(Case(cp=2)))
        assert core(q, q, q, None, packed_seq_params=_params([0, 3, 16])).shape == (8, 64)


def test_documents_are_read_once_for_all_layers():
    from burst_mcore.megatron.packed import packing

    many = torch.arange(0, 80008, 8, dtype=torch.int32)  # 10,000 documents
    params = _params([0])
    params.cu_seqlens_q = params.cu_seqlens_kv = many
    params.cu_seqlens_q_padded = params.cu_seqlens_kv_padded = None
    first = packing(params, 80000, 4)
    assert packing(params, 80000, 4) is first
    assert packing(params, 80000, 2) is not first
    assert packing(params, 80008, 2).layout.ends[-1] == 80008
    many[1:3] = 16
    assert packing(params, 80000, 4).layout.ends[:3] == (0, 16, 24)
    with torch.inference_mode():  # whose tensors have no version
        params.cu_seqlens_q = params.cu_seqlens_kv = torch.tensor([0, 8, 16])
        assert packing(params, 16, 2).layout.ends == (0, 8, 16)
        params.cu_seqlens_q[1] = 12
        assert packing(params, 16, 1).documents != packing(_params([0, 8, 16]), 16, 1).documents


@megatron_on(1)
def test_a_spec_is_copied_with_burst_attention_in_it():
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    from burst_mcore.megatron.core_attention import BurstCoreAttention
    from burst_mcore.megatron.spec import BurstLocalSpecProvider, BurstTESpecProvider, with_burst_attention

    stock = gpt_layer_specs.get_gpt_layer_local_spec()
    ours = with_burst_attention([stock, stock])
    for spec in ours:
        assert spec.submodules.self_attention.submodules.core_attention.module is BurstCoreAttention
        assert spec.submodules.mlp is stock.submodules.mlp  # what holds no attention is shared
    assert stock.submodules.self_attention.submodules.core_attention is DotProductAttention  # untouched
    again = with_burst_attention(ours[0], BurstConfig(backward="kv"))
    core = again.submodules.self_attention.submodules.core_attention
    assert core.params["burst_config"].backward == "kv"
    (kept,) = with_burst_attention([again])
    assert kept.submodules.self_attention.submodules.core_attention == core  # without options it stays
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
    for provider in (BurstLocalSpecProvider, BurstTESpecProvider):
        assert provider().core_attention().module is BurstCoreAttention
    assert get_moe_module_spec_for_backend(BurstLocalSpecProvider(), num_experts=2, moe_grouped_gemm=False)


@megatron_on(1)
def test_the_spec_can_be_called_as_a_function_that_makes_specs():
    from burst_mcore.megatron.core_attention import BurstCoreAttention
    from burst_mcore.megatron.spec import burst_layer_spec

    config = transformer_config(Case(fields=(("qk_layernorm", True),)))
    assert callable(burst_layer_spec)  # slime's condition, and its call
    attention = burst_layer_spec(None, config, None).submodules.self_attention.submodules
    assert attention.core_attention.module is BurstCoreAttention
    assert attention.q_layernorm.__name__ != "IdentityOp"  # by this config, not by Megatron's arguments
    if VERSION >= (0, 19):  # megatron.training is not in the wheels before
        with pytest.raises(RuntimeError, match="which it has not parsed yet"):
            _ = burst_layer_spec.submodules


@megatron_on(1)
def test_the_recipe_wraps_the_spec_of_a_stack():
    from megatron.core.models.gpt import gpt_layer_specs

    from burst_mcore.megatron.core_attention import BurstCoreAttention

    asked, stock = [], gpt_layer_specs.get_gpt_layer_local_spec()
    recipes.stand_in("slime_plugins.models.glm4", get_glm_spec=lambda *args: asked.append(args) or stock)
    spec = recipes.run("def burst_glm_spec")["burst_glm_spec"]("args", "config", None)
    assert asked == [("args", "config", None)]
    assert spec.submodules.self_attention.submodules.core_attention.module is BurstCoreAttention


@pytest.mark.parametrize("zero_centered", [False, True])
def test_a_norm_fused_into_the_up_projection_of_mla_is_applied(zero_centered):
    """TransformerEngine's module, which is not here, by the attributes that it has."""
    from burst_mcore.megatron.latent import _normed

    torch.manual_seed(0)
    gamma, bias, x = torch.randn(16), torch.randn(16), torch.randn(5, 2, 16)
    of_layers = torch.nn.functional.layer_norm(x, (16,), gamma, bias, eps=1e-3)
    of_squares = torch.nn.functional.rms_norm(x, (16,), gamma, eps=1e-3)
    how = {"layer_norm_weight": gamma - 1 if zero_centered else gamma, "eps": 1e-3}
    how["zero_centered_gamma"] = zero_centered
    for kind, shift, want in (("LayerNorm", bias, of_layers), ("RMSNorm", None, of_squares)):
        linear = SimpleNamespace(layer_norm_bias=shift, normalization=kind, **how)
        torch.testing.assert_close(_normed(x, linear), want)
    assert _normed(x, SimpleNamespace()) is x


@needs_019
@megatron_on(1)
def test_layers_that_need_transformer_engine_are_refused_without():
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    from burst_mcore.megatron.spec import hybrid_stack_spec

    config = transformer_config(Case())
    words = dict(vocab_size=96, max_sequence_length=64)
    HybridModel(config, hybrid_stack_spec(config), hybrid_layer_pattern="*-", **words)
    with pytest.raises(ValueError, match=r"--hybrid-layer-pattern has a layer .*: Mamba \(M\)"):
        HybridModel(config, hybrid_stack_spec(config), hybrid_layer_pattern="*M", **words)
