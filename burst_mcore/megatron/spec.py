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

from burst_mcore.config import BurstConfig
from burst_mcore.megatron import arguments
from burst_mcore.megatron.checks import use_burst
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
    command = arguments.command_line()
    use_burst(command)
    params = {
        "burst_config": arguments.burst_config(command),
        "rates": arguments.rates_of(command),
        "mla_latent": mla_latent or arguments.mla_latent(command),
    }
    return ModuleSpec(module=BurstCoreAttention, params=params)


class _BurstAttention:
    def core_attention(self) -> ModuleSpec:
        return core_attention_spec()


class BurstLocalSpecProvider(_BurstAttention, LocalSpecProvider):  # type: ignore[misc]  # Megatron is untyped
    """Megatron's local modules with burst attention, for spec builders that take a backend."""


class BurstTESpecProvider(_BurstAttention, TESpecProvider):  # type: ignore[misc]
    """TransformerEngine's modules with burst attention, for spec builders that take a backend."""


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
    if isinstance(node, FromArguments):
        return _replaced(node.resolve(), burst, keeps)
    module = node.module if isinstance(node, ModuleSpec) else node
    if any(module is stock for stock in STOCK):
        return burst
    if module is BurstCoreAttention:
        copy = dataclasses.replace(node) if isinstance(node, ModuleSpec) else ModuleSpec(module=module)
        return copy if keeps else burst
    if isinstance(node, functools.partial):
        parts = (node.func, *node.args), node.keywords
        (func, *args), keywords = new_parts = _replaced(parts, burst, keeps)
        return node if new_parts is parts else functools.partial(func, *args, **keywords)
    if isinstance(node, dict):
        table = {key: _replaced(value, burst, keeps) for key, value in node.items()}
        return node if all(table[key] is node[key] for key in node) else table
    if isinstance(node, list | tuple):
        values = [_replaced(value, burst, keeps) for value in node]
        return node if all(x is y for x, y in zip(values, node, strict=True)) else type(node)(values)
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        fields = {field.name: getattr(node, field.name) for field in dataclasses.fields(node) if field.init}
        new_fields = _replaced(fields, burst, keeps)
        return node if new_fields is fields else dataclasses.replace(node, **new_fields)
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
        from megatron.core.models.hybrid import hybrid_layer_specs
    except ImportError as error:
        raise ValueError("HybridModel needs Megatron-Core 0.19 or later") from error
    stock = hybrid_layer_specs.hybrid_stack_spec
    if config.transformer_impl == "local":
        stock = _changed(stock, **_local_layers(config, stock.submodules))
    return with_burst_attention(stock, burst_config, mla_latent)


def _local_layers(config: TransformerConfig, stock: Any) -> dict[str, Any]:
    """Return the layers of a hybrid stack with local modules and Megatron's own attention."""
    build = gpt_layer_specs.get_gpt_layer_local_spec
    options = {**_asked_of(config, build), "num_experts": None, "multi_latent_attention": False}
    layer = build(**options).submodules
    norm = layer.input_layernorm
    linear = {"in_proj": ColumnParallelLinear, "out_proj": RowParallelLinear}
    delta_net = _changed(stock.gdn_layer.submodules.self_attention, out_norm=norm, **linear)
    (mtp,) = stock.mtp_block_spec.submodules.layer_specs
    norms = dict.fromkeys(("enorm", "hnorm", "layer_norm"), WrappedTorchNorm)
    mtp = _changed(mtp, eh_proj=ColumnParallelLinear, **norms)
    kinds = [field.name for field in dataclasses.fields(stock) if field.name.endswith("_layer")]
    attention, attends = layer.self_attention, {"input_layernorm": norm}
    layers = {
        **dict.fromkeys(kinds, _NotLocal),  # Megatron's default is an identity
        "attention_layer": _changed(stock.attention_layer, self_attention=attention, **attends),
        "gdn_layer": _changed(stock.gdn_layer, self_attention=delta_net, **attends),
        "mlp_layer": _changed(stock.mlp_layer, mlp=layer.mlp, pre_mlp_layernorm=norm),
        "mtp_block_spec": _changed(stock.mtp_block_spec, layer_specs=[mtp]),
    }
    if config.multi_latent_attention:
        latent = build(**{**options, "multi_latent_attention": True}).submodules.self_attention
        layers["mla_layer"] = _changed(stock.mla_layer, self_attention=latent, **attends)
    if config.num_moe_experts is not None:
        experts = build(**{**options, "num_experts": config.num_moe_experts}).submodules.mlp
        layers["moe_layer"] = _changed(stock.moe_layer, mlp=experts, pre_mlp_layernorm=norm)
    return layers


def _changed(spec: ModuleSpec, **submodules: Any) -> ModuleSpec:
    """Return a copy of `spec` with other submodules of these names."""
    return dataclasses.replace(spec, submodules=dataclasses.replace(spec.submodules, **submodules))


class _NotLocal:
    """A layer of a HybridModel without local modules: its constructor raises."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError(
            "--hybrid-layer-pattern has a layer that HybridModel lacks without TransformerEngine: Mamba (M), "
            "sparse attention (D), experts (E) without --num-experts or MLA (+) without its flag"
        )


class FromArguments(ModuleSpec):  # type: ignore[misc]
    """A lazy spec, resolved from Megatron's command line when it is read.

    `--spec` names an object of a module, but its content depends on the other arguments, which are parsed
    only later.
    """

    def __init__(self, resolve: Callable[[TransformerConfig], ModuleSpec]) -> None:
        self.params: dict[str, Any] = {}
        self.metainfo: dict[str, Any] = {}
        self._resolve = resolve

    def resolve(self) -> ModuleSpec:
        command = arguments.command_line()
        if not vars(command):
            raise RuntimeError("this spec follows Megatron's arguments, which it has not parsed yet")
        from megatron.training.arguments import core_transformer_config_from_args

        return self._resolve(core_transformer_config_from_args(command))

    def __call__(self, args: Any, config: TransformerConfig, vp_stage: int | None = None) -> ModuleSpec:
        """Return the spec for `config`: slime calls the object of `--spec`, if it is callable."""
        return self._resolve(config)

    @property
    def module(self) -> Any:
        return self.resolve().module

    @property
    def submodules(self) -> Any:
        return self.resolve().submodules


burst_layer_spec = FromArguments(layer_spec)
"""`--spec burst_mcore.megatron.spec burst_layer_spec`: a GPT layer."""
burst_hybrid_stack_spec = FromArguments(hybrid_stack_spec)
"""`--spec burst_mcore.megatron.spec burst_hybrid_stack_spec`: a HybridModel's stack, from 0.19 on."""


def _asked_of(config: TransformerConfig, builder: Any) -> dict[str, Any]:
    """Return the arguments of a spec builder, from the config's fields of the same names."""
    fields = {name: name for name in inspect.signature(builder).parameters}
    fields["num_experts"] = "num_moe_experts"
    fields.pop("fp8", None)  # deprecated: builders warn if it is given
    return {name: getattr(config, field) for name, field in fields.items() if hasattr(config, field)}
