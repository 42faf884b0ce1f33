"""Checks whether a model of transformers can be supported over shards, and gives it burst's attention."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from functools import wraps
from itertools import chain
from typing import Any

from torch import nn

from burst_mcore.recurrent.bound import MIXERS, bind, mixers_of
from burst_mcore.transformers.errors import UnsupportedError, refuse
from burst_mcore.transformers.models.attention import NAME, current, register

MIXING = ("linear_attention", "mamba", "hybrid", "conv")
"""Kinds of layers whose mixers are bound to shards, where `mixers_of` knows them."""
LAYERS = ("full_attention", "sliding_attention", "chunked_attention", "mlp", "moe", *MIXING)
"""Kinds of layers (config.layer_types) that are supported."""
TOWERS = ("vision_config", "audio_config")
"""Names in a configuration of models beside the language model."""
OWN_LOSS = 'loss="model" ("fused_loss": false in the section)'
"""How a caller says that the loss is not burst's."""
TYPES = ("token_type_ids", "mm_token_type_ids")
"""Columns of which some models make their masks: which tokens see each other, as those of an image."""
DROPOUTS = {
    **dict.fromkeys(
        ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout"),
        "drops attention weights",
    ),
    **dict.fromkeys(("layerdrop", "decoder_layerdrop"), "leaves out layers at random"),
}
"""Names in configurations of shares that are dropped at random, with what a model then does."""


def use_burst(model: nn.Module, size: int, *, headless: bool = False) -> Any:
    """Set attn_implementation="burst" on the causal LM of transformers in `model`, and return that.

    Args:
        size: how many ranks share a sequence.
        headless: whether a model that makes no loss is supported too.

    Raises:
        UnsupportedError: not a model of transformers, or one whose tokens meet elsewhere than in attention
            that is supported.
    """
    inner = _of_transformers(model)
    options = _options(inner, size, headless)
    reasons = chain(_several(model, inner), _learned_prompts(model), _where_tokens_meet(inner), options)
    refuse(*next(reasons, ("", None)))
    register()
    inner.set_attn_implementation(_implementations(inner))
    try:
        if any(kind in MIXING for kind in _kinds(inner.config.get_text_config())):
            bind(inner, lambda: sequence.mixing if (sequence := current()) else None)
    except ValueError as error:
        raise UnsupportedError("model", str(error)) from None
    return inner


def _implementations(inner: Any) -> str | dict[str, str]:
    """Return what attends by burst: a model, or its text alone where it has towers."""
    if text_tower(inner) is None:
        return NAME
    config = inner.config
    texts = [name for name in config.sub_configs if getattr(config, name) is config.get_text_config()]
    return dict.fromkeys(["", *texts], NAME)


def _several(model: nn.Module, inner: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield (name, reason) for each model of transformers beside the first that a module holds."""
    parts = {*_models_in(inner)}
    for second in (module for module in _models_in(model) if module not in parts):
        models = f"a {type(inner).__name__} and a {type(second).__name__}"
        yield "model", f"{type(model).__name__} holds {models}: parallelize the causal LM in it alone"


def _learned_prompts(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield (name, reason) for each adapter of PEFT's that learns tokens, or keys and values of tokens."""
    for module in model.modules():
        adapters = getattr(module, "peft_config", None)
        for adapter in adapters.values() if isinstance(adapters, dict) else ():
            if adapter.is_prompt_learning or adapter.is_adaption_prompt:
                kind = getattr(adapter.peft_type, "value", adapter.peft_type)
                does = f"PEFT's {kind} puts tokens of its own beside a sequence"
                yield "model", f"{does}: use LoRA, or another adapter of weights"


def _where_tokens_meet(inner: Any) -> Iterator[tuple[str, str]]:
    """Yield (name, reason) for each part of a model that is not supported, the plainest first."""
    name = type(inner).__name__
    try:
        config = inner.config.get_text_config()
    except ValueError:  # it has several
        yield "model", f"{name} is made of several language models"
        return
    towers = [tower for tower in TOWERS if getattr(inner.config, tower, None) is not None]
    if towers and text_tower(inner) is None:
        text = f"{name} has a {', '.join(towers)} within what attends to text"
        yield "model", f"{text}: give its language model alone, with {OWN_LOSS}"
    if getattr(config, "is_encoder_decoder", False):
        yield "model", f"{name} is an encoder and a decoder"
    bound = mixers_of(_text_model(inner))
    kinds = sorted(kind for kind in {*_kinds(config)} if kind not in LAYERS or (kind in MIXING and not bound))
    if kinds:
        legal = f"supported are {', '.join(LAYERS)}, with known mixers"
        yield "model", f"{name} has layers of type {', '.join(kinds)}; {legal}"
    if getattr(inner, "_is_stateful", False) and not bound:
        yield "model", f"{name} carries a state along the sequence by mixers that burst does not bind"
    mixing = [
        f"{path} ({type(module).__name__})"
        for path, module in _text_model(inner).named_modules()
        if isinstance(module, nn.RNNBase) or (isinstance(module, nn.Conv1d) and module.kernel_size != (1,))
        if path.rpartition(".")[0] not in bound
    ]
    if mixing:
        yield "model", f"{name} mixes neighbouring tokens outside of attention: {mixing[0]}"
    if not _text_model(inner)._supports_attention_backend and not bound:
        yield "model", f"{name} does not take its attention from transformers' interface"


def _kinds(config: Any) -> Iterator[str]:
    """Return the kind of each layer, where a configuration names kinds."""
    return map(str, getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ())


def _options(inner: Any, size: int, headless: bool) -> Iterator[tuple[str, str]]:
    """Yield (name, reason) for each option of a model that attention over shards does not have."""
    name, config = type(inner).__name__, inner.config.get_text_config()
    direction = getattr(config, "use_bidirectional_attention", None)
    if direction == "all" or (direction is True and types_of(inner) is None):
        yield "model", f"{name} has attention that is not causal (use_bidirectional_attention)"
    if any(map(_makes_positions_of_tokens, inner.modules())):
        yield "model", f"{name} counts positions by its tokens, from its padding token on"
    if size > 1 and getattr(config, "output_router_logits", False):
        balances = f"{name}'s loss that balances experts is no sum over tokens"
        yield "auxiliary loss", f"{balances}: set output_router_logits to False"
    if not makes_loss(inner) and not headless:
        lacks = f"{name} has no head that makes a loss of labels"
        yield "model", f"{lacks}: give the ...ForCausalLM, or, for a loss of hidden states, {OWN_LOSS}"
    parameters = inspect.signature(inner.forward).parameters.values()
    if makes_loss(inner) and not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        yield "model", f"{name}.forward takes no further arguments, so that no shift_labels reach its loss"
    for option, effect in DROPOUTS.items():
        if share := getattr(config, option, None):
            yield "dropout", f"{name} {effect} ({option} is {share}): set it to 0 before the model is made"
    loss = inner.loss_function.__name__ if makes_loss(inner) else "ForCausalLMLoss"
    if loss != "ForCausalLMLoss":
        yield "loss", f"{name} has a loss of its own, {loss}: supported is ForCausalLMLoss"


_POSITIONS = "create_position_ids_from_input_ids"


def _makes_positions_of_tokens(module: nn.Module) -> bool:
    """Return whether its positions are not 0, 1, 2, ... but begin at its padding token (RoBERTa's family)."""
    return hasattr(module, _POSITIONS) or (
        isinstance(getattr(module, "position_embeddings", None), nn.Embedding)
        and hasattr(sys.modules[type(module).__module__], _POSITIONS)
    )


def makes_loss(model: nn.Module) -> bool:
    """Return whether a model of transformers has a head that makes a loss of labels."""
    return "labels" in inspect.signature(type(model).forward).parameters


def has_fused_head(model: nn.Module) -> bool:
    """Return whether TRL (1.x) has replaced a model's forward: trl/trainer/utils.py, add_fused_lm_head.

    With `fused_lm_head=True` that forward returns numbers for each token (log-probability, entropy, ...)
    instead of logits, and takes labels of a shard as `shift_labels`.
    """
    forward = vars(model).get("forward")
    code = getattr(getattr(forward, "__func__", forward), "__code__", None)
    return code is not None and code.co_qualname.startswith("add_fused_lm_head.")


def asks_for_fused_head(arguments: Mapping[str, Any]) -> bool:
    """Return whether a forward with these arguments returns numbers for each token, not logits."""
    return bool(arguments.get("fused_lm_head"))


def called_for(model: nn.Module, inner: nn.Module) -> nn.Module:
    """Return the module in `model` whose calls run the forward of `inner`: itself, or a wrapper of it.

    PEFT and torch.compile call the forward past the hooks that are on `inner`.
    """
    wrappers = (m for m in model.modules() if hasattr(m, "peft_config") or hasattr(m, "_orig_mod"))
    return next((m for m in wrappers if any(x is inner for x in m.modules())), inner)


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the innermost modules of a model that are named ...Attention, by path."""
    return {
        path: module
        for path, module in _text_model(model).named_modules()
        if type(module).__name__.endswith("Attention")
        and type(module).__name__ not in MIXERS
        and not any(type(x).__name__.endswith("Attention") for x in list(module.modules())[1:])
    }


def types_of(model: nn.Module) -> str | None:
    """Return the column of a batch of which a model makes its masks, if it does: see `TYPES`."""
    makes = getattr(type(_of_transformers(model)), "create_masks_for_generate", None)
    arguments = () if makes is None else inspect.signature(makes).parameters
    return next((name for name in TYPES if name in arguments), None)


def text_tower(model: nn.Module) -> Any:
    """Return the text tower of a model of transformers that has others beside it; None for other models."""
    inner = _of_transformers(model)
    kinds = tuple(type(each) for name in TOWERS if (each := getattr(inner.config, name, None)) is not None)
    text = inner.get_decoder() if kinds else inner
    has_towers = any(isinstance(getattr(each, "config", None), kinds) for each in text.modules())
    return None if text is inner or has_towers else text


def _text_model(model: nn.Module) -> Any:
    """Return the part of a model that attends, without its towers."""
    text = text_tower(model)
    return model if text is None else text


def switched_attention(model: nn.Module) -> str | None:
    """Return the reason to refuse a forward, if a module's attention was switched since `use_burst`."""
    for path, module in attention_modules(model).items():
        name = getattr(getattr(module, "config", None), "_attn_implementation", NAME)
        if name != NAME:
            text = f"{path} ({type(module).__name__}) has attn_implementation {name!r}"
            return f"{text} since the model was prepared: set {NAME!r} again"
    return None


def position_table(model: nn.Module) -> int | None:
    """Return how many positions a model has embeddings for; None where they are computed (rotary) or none."""
    if mixers_of(model) or any("RotaryEmbedding" in type(module).__name__ for module in model.modules()):
        return None
    text = _of_transformers(model).config.get_text_config()
    limit: int | None = getattr(text, "max_position_embeddings", None)
    return limit


def check_loss(model: Any) -> None:
    """Wrap the model's loss function, so that a model that loses shift_labels on the way is refused."""
    loss_function, name = model.loss_function, type(model).__name__
    if hasattr(loss_function, "burst_mcore"):
        return

    @wraps(loss_function)
    def loss(*args: Any, **kwargs: Any) -> Any:
        sequence = current()
        if sequence is None or sequence.last is None:  # whole sequences: the model's own affair
            return loss_function(*args, **kwargs)
        if kwargs.get("shift_labels") is None or kwargs.get("num_items_in_batch") is None:
            raise UnsupportedError("model", f"{name} hands its loss no shift_labels and num_items_in_batch")
        has_weights = sequence.columns.weights is not None
        return (sequence.columns.loss if has_weights else loss_function)(*args, **kwargs)

    loss.burst_mcore = True  # type: ignore[attr-defined]
    model.loss_function = loss


def is_of_transformers(model: nn.Module) -> bool:
    """Return whether a model is one of transformers, or wraps one."""
    return "transformers" in sys.modules and next(_models_in(model), None) is not None


def _of_transformers(model: nn.Module) -> Any:
    for transformer in _models_in(model):
        return transformer
    raise UnsupportedError("model", f"{type(model).__name__} is no model of transformers")


def _models_in(model: nn.Module) -> Iterator[nn.Module]:
    """Yield a module's models of transformers: itself, if it is one, and all within."""
    from transformers import PreTrainedModel

    return (module for module in model.modules() if isinstance(module, PreTrainedModel))
