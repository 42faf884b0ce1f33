"""Layer specs and spec providers whose core attention is burst attention.

`with_burst_attention` is the only mechanism: it returns a copy of a spec (decoder, MTP, MoE, hybrid) with
BurstCoreAttention instead of Megatron's core attention.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

from megatron.core.extensions.transformer_engine import HAVE_TE, TEDotProductAttention
from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from burst_mcore.config import BurstConfig
from burst_mcore.megatron import arguments
from burst_mcore.megatron.asked import use_burst
from burst_mcore.megatron.core_attention import BurstCoreAttention

STOCK = (DotProductAttention, TEDotProductAttention)
"""Megatron's core attentions, which burst attention replaces."""


def core_attention_spec(burst_config: BurstConfig | None = None, mla_latent: str | None = None) -> ModuleSpec:
    """Return the spec of the core attention; the default config is the command line's.

    The command line is then checked, and put in effect, if no launcher or patch has done so before.

    mla_latent: "on", "off" or "auto", as --burst-mla-latent; None: the command line's, or "off" with a
        config.
    """
    if burst_config is not None:
        params = {"burst_config": burst_config, "mla_latent": mla_latent or "off"}
        return ModuleSpec(module=BurstCoreAttention, params=params)
    arguments.from_command_line(use_burst, None)
    params = {
        "burst_config": arguments.from_command_line(arguments.burst_config, BurstConfig()),
        "rates": arguments.from_command_line(arguments.rates_of, None),
        "mla_latent": mla_latent or arguments.from_command_line(arguments.mla_latent, "off"),
    }
    return ModuleSpec(module=BurstCoreAttention, params=params)


class BurstLocalSpecProvider(LocalSpecProvider):  # type: ignore[misc]  # Megatron is untyped
    """Megatron's local modules with burst attention, for spec builders that take a backend."""

    def core_attention(self) -> ModuleSpec:
        """Return the module for core attention."""
        return core_attention_spec()


class BurstTESpecProvider(TESpecProvider):  # type: ignore[misc]
    """TransformerEngine's modules with burst attention, for spec builders that take a backend."""

    def core_attention(self) -> ModuleSpec:
        """Return the module for core attention."""
        return core_attention_spec()


def with_burst_attention(
    spec: Any, burst_config: BurstConfig | None = None, mla_latent: str | None = None
) -> Any:
    """Return a copy of `spec` (ModuleSpec, submodules, block or MTP spec) with burst attention.

    Burst attention that is already in the spec stays unchanged, unless options are given here.

    Raises:
        ValueError: the spec has no core attention of Megatron's, or needs TransformerEngine; the command line
            has an unsupported setting.
    """
    if getattr(spec, "core_attention", None) is TEDotProductAttention and not HAVE_TE:
        raise ValueError(
            "this model's spec is of TransformerEngine's modules, which is not installed: add --spec "
            "burst_mcore.megatron.spec burst_hybrid_stack_spec, or use the patch with --options"
        )
    burst = core_attention_spec(burst_config, mla_latent)
    result = _replaced(spec, burst, keeps=burst_config is None and mla_latent is None)
    if result is spec:
        raise ValueError(f"no core attention of Megatron's own to replace in this spec: {spec}")
    return result


def _replaced(node: Any, burst: ModuleSpec, keeps: bool) -> Any:
    """Return `node` with `burst` for each core attention within; the same object without any.

    keeps: existing burst attention is copied, not replaced.
    """
    module = node.module if isinstance(node, ModuleSpec) else node
    if any(module is stock for stock in STOCK):
        return burst
    if module is BurstCoreAttention:
        copy = dataclasses.replace(node) if isinstance(node, ModuleSpec) else ModuleSpec(module=module)
        return copy if keeps else burst
    if isinstance(node, FromArguments):
        return _replaced(node.resolve(), burst, keeps)
    if isinstance(node, functools.partial):
        parts = (node.func, *node.args), node.keywords
        (func, *args), keywords = replaced = _replaced(parts, burst, keeps)
        return node if replaced is parts else functools.partial(func, *args, **keywords)
    if isinstance(node, dict):
        replaced = {key: _replaced(value, burst, keeps) for key, value in node.items()}
        return node if all(replaced[key] is node[key] for key in node) else replaced
    if isinstance(node, list | tuple):
        replaced = [_replaced(value, burst, keeps) for value in node]
        return node if all(x is y for x, y in zip(replaced, node, strict=True)) else type(node)(replaced)
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        fields = {field.name: getattr(node, field.name) for field in dataclasses.fields(node) if field.init}
        replaced = _replaced(fields, burst, keeps)
        return node if replaced is fields else dataclasses.replace(node, **replaced)
    return node


def layer_spec(
    config: TransformerConfig, burst_config: BurstConfig | None = None, mla_latent: str | None = None
) -> ModuleSpec:
    """Return the spec of a GPT decoder layer of `config` (MLA, MoE, norms), with burst attention.

    Raises:
        ValueError: layers that differ (moe_layer_freq), which need the launcher's flag.
    """
    if config.num_moe_experts is not None and config.moe_layer_freq != 1:
        raise ValueError(
            f"one layer spec cannot describe layers that differ (moe_layer_freq {config.moe_layer_freq}); "
            f"use --context-parallel-attention-backend burst instead of a spec"
        )
    if config.transformer_impl == "transformer_engine":
        stock = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec
    else:
        stock = gpt_layer_specs.get_gpt_layer_local_spec
    return with_burst_attention(stock(**_asked_of(config, stock)), burst_config, mla_latent)


def hybrid_stack_spec(
    config: TransformerConfig, burst_config: BurstConfig | None = None, mla_latent: str | None = None
) -> ModuleSpec:
    """Return the spec of a HybridModel's stack with burst attention (Megatron-Core 0.19 and later).

    With TransformerEngine it is Megatron's own, with attention replaced. Without, it has local modules for
    attention (*), MLA (+), MLP (-), experts (E), gated delta net (G, with flash-linear-attention) and
    multi-token prediction (/). Mamba (M) and sparse attention (D) raise when the model is built.

    Raises:
        ValueError: this Megatron-Core has no HybridModel.
    """
    try:
        from megatron.core.models.hybrid import hybrid_block, hybrid_layer_specs
    except ImportError as error:
        raise ValueError("HybridModel needs Megatron-Core 0.19 or later") from error
    stock = hybrid_layer_specs.hybrid_stack_spec
    if config.transformer_impl == "local":
        stack = hybrid_block.HybridStackSubmodules
        kinds = [field.name for field in dataclasses.fields(stack) if field.name.endswith("_layer")]
        others = dict.fromkeys(kinds, _NotLocal)  # Megatron's default is an identity
        mtp = _with_local_modules(stock.submodules.mtp_block_spec)
        layers = stack(**{**others, **_local_layers(config)}, mtp_block_spec=mtp)
        stock = ModuleSpec(module=hybrid_block.HybridStack, submodules=layers)
    return with_burst_attention(stock, burst_config, mla_latent)


def _local_layers(config: TransformerConfig) -> dict[str, ModuleSpec]:
    """Return the layers of a hybrid stack with local modules and Megatron's own attention."""
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer

    build = gpt_layer_specs.get_gpt_layer_local_spec
    options = {**_asked_of(config, build), "num_experts": None, "multi_latent_attention": False}
    plain = build(**options).submodules
    norm = plain.input_layernorm
    attends = {"input_layernorm": norm, "self_attn_bda": plain.self_attn_bda}
    feeds = {"pre_mlp_layernorm": norm, "mlp_bda": plain.mlp_bda}

    def layer(module: type, **submodules: Any) -> ModuleSpec:
        return ModuleSpec(module=module, submodules=type(plain)(**submodules))

    delta = GatedDeltaNetSubmodules(in_proj=ColumnParallelLinear, out_norm=norm, out_proj=RowParallelLinear)
    delta_net = ModuleSpec(module=GatedDeltaNet, submodules=delta)
    layers = {
        "attention_layer": layer(TransformerLayer, self_attention=plain.self_attention, **attends),
        "gdn_layer": layer(TransformerLayer, self_attention=delta_net, **attends),
        "mlp_layer": layer(MLPLayer, mlp=plain.mlp, **feeds),
    }
    if config.multi_latent_attention:
        latent = build(**{**options, "multi_latent_attention": True}).submodules
        layers["mla_layer"] = layer(TransformerLayer, self_attention=latent.self_attention, **attends)
    if config.num_moe_experts is not None:
        experts = build(**{**options, "num_experts": config.num_moe_experts}).submodules
        layers["moe_layer"] = layer(TransformerLayer, mlp=experts.mlp, **feeds)
    return layers


def _with_local_modules(block: ModuleSpec) -> ModuleSpec:
    """Return the spec of multi-token prediction with local modules instead of TransformerEngine's."""
    replace = dataclasses.replace
    (layer,) = block.submodules.layer_specs
    norms = dict.fromkeys(("enorm", "hnorm", "layer_norm"), WrappedTorchNorm)
    layer = replace(layer, submodules=replace(layer.submodules, eh_proj=ColumnParallelLinear, **norms))
    return replace(block, submodules=replace(block.submodules, layer_specs=[layer]))


class _NotLocal:
    """A layer of a HybridModel without local modules: its constructor raises."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError(
            "--hybrid-layer-pattern has a layer that HybridModel lacks without TransformerEngine: Mamba (M), "
            "sparse attention (D), experts (E) without --num-experts or MLA (+) without its flag"
        )


class FromArguments(ModuleSpec):  # type: ignore[misc]
    """A lazy spec, resolved from Megatron's command line when its submodules are read.

    `--spec` names an object of a module, but its content depends on the other arguments, which are parsed
    only later.
    """

    def __init__(self, module: type, resolve: Callable[[TransformerConfig], ModuleSpec]) -> None:
        self.module = module
        self.params: dict[str, Any] = {}
        self.metainfo: dict[str, Any] = {}
        self._resolve = resolve

    def resolve(self) -> ModuleSpec:
        """Return the spec for the current arguments."""
        from megatron.training.arguments import core_transformer_config_from_args

        return self._resolve(core_transformer_config_from_args(arguments.megatron_arguments()))

    def __call__(self, args: Any, config: TransformerConfig, vp_stage: int | None = None) -> ModuleSpec:
        """Return the spec for `config`: slime calls the object of `--spec`, if it is callable."""
        return self._resolve(config)

    @property
    def submodules(self) -> Any:
        """The submodules of the resolved spec."""
        return self.resolve().submodules

    @submodules.setter
    def submodules(self, value: Any) -> None:
        raise AttributeError("the submodules of this spec follow Megatron's arguments")


burst_layer_spec = FromArguments(TransformerLayer, layer_spec)
"""`--spec burst_mcore.megatron.spec burst_layer_spec`: a GPT layer."""


def _hybrid() -> ModuleSpec | None:
    try:
        from megatron.core.models.hybrid.hybrid_block import HybridStack
    except ImportError:  # before 0.19
        return None
    return FromArguments(HybridStack, hybrid_stack_spec)


burst_hybrid_stack_spec = _hybrid()
"""`--spec burst_mcore.megatron.spec burst_hybrid_stack_spec`: a HybridModel's stack, None before 0.19."""


def _asked_of(config: TransformerConfig, builder: Any) -> dict[str, Any]:
    """Return the arguments of a spec builder, from the config's fields of the same names."""
    fields = {name: name for name in inspect.signature(builder).parameters}
    fields["num_experts"] = "num_moe_experts"
    fields.pop("fp8", None)  # deprecated: builders warn if it is given
    return {name: getattr(config, field) for name, field in fields.items() if hasattr(config, field)}
