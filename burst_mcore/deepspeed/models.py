"""Which models of transformers can be served, by name; and what is set on those that can."""

from __future__ import annotations

import inspect
import sys
from typing import Any

from torch import nn

from burst_mcore.deepspeed.attention import NAME, register
from burst_mcore.deepspeed.errors import RefusedError

LAYERS = ("full_attention", "sliding_attention")
"""Kinds of layers (config.layer_types) that are served."""


def use_burst(model: nn.Module, size: int) -> nn.Module:
    """Set attn_implementation="burst" on a causal LM of transformers; `size` ranks share a sequence.

    Returns:
        The model of transformers, where `model` wraps one.

    Raises:
        RefusedError: not a model of transformers, or one whose tokens meet elsewhere than in the attention
            that is served.
    """
    inner = _of_transformers(model)
    name, config = type(inner).__name__, inner.config.get_text_config()
    if not inner._supports_attention_backend:
        raise RefusedError("model", f"{name} does not take its attention from transformers' interface")
    if getattr(config, "is_encoder_decoder", False):
        raise RefusedError("model", f"{name} is an encoder and a decoder")
    if getattr(inner, "_is_stateful", False):
        raise RefusedError("model", f"{name} carries a state along the sequence, beside attention")
    odd = sorted({str(kind) for kind in getattr(config, "layer_types", None) or ()} - {*LAYERS})
    if odd:
        raise RefusedError(
            "model", f"{name} has layers of type {', '.join(odd)}; served are {', '.join(LAYERS)}"
        )
    if getattr(config, "use_bidirectional_attention", None):
        raise RefusedError("model", f"{name} has attention that is not causal (use_bidirectional_attention)")
    counts_from = next((type(m).__name__ for m in inner.modules() if _makes_positions_of_tokens(m)), None)
    if counts_from is not None:
        raise RefusedError(
            "model",
            f"{name} counts positions by its tokens ({counts_from}.{_POSITIONS}), from its padding token on: "
            "those of a shard would be others",
        )
    mixers = [
        f"{path} ({type(module).__name__})"
        for path, module in inner.named_modules()
        if isinstance(module, nn.RNNBase) or (isinstance(module, nn.Conv1d) and module.kernel_size != (1,))
    ]
    if mixers:
        raise RefusedError("model", f"{name} mixes neighbouring tokens outside of attention: {mixers[0]}")
    if size > 1 and getattr(config, "output_router_logits", False):
        raise RefusedError(
            "auxiliary loss",
            f"{name}'s loss that balances experts is no sum over tokens: set output_router_logits to False",
        )
    parameters = inspect.signature(inner.forward).parameters.values()
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        raise RefusedError(
            "model", f"{name}.forward takes no further arguments, so that no shift_labels reach its loss"
        )
    register()
    inner.set_attn_implementation(NAME)
    found: nn.Module = inner
    return found


_POSITIONS = "create_position_ids_from_input_ids"


def _makes_positions_of_tokens(module: nn.Module) -> bool:
    """Whether its positions are not 0, 1, 2, ... but begin at its padding token (RoBERTa's family)."""
    return hasattr(module, _POSITIONS) or (
        isinstance(getattr(module, "position_embeddings", None), nn.Embedding)
        and hasattr(sys.modules[type(module).__module__], _POSITIONS)
    )


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of a model that are named ...Attention and hold no other, by path."""
    return {
        path: module
        for path, module in model.named_modules()
        if type(module).__name__.endswith("Attention")
        and not any(type(x).__name__.endswith("Attention") for x in list(module.modules())[1:])
    }


def checked_loss(model: Any, size: int) -> None:
    """Wrap the model's loss function, so that a model that loses shift_labels on the way is refused."""
    own = model.loss_function
    if getattr(own, "burst_mcore", False):
        return
    name = type(model).__name__
    if own.__name__ != "ForCausalLMLoss":
        raise RefusedError(
            "loss", f"{name} has a loss function of its own, {own.__name__}: served is ForCausalLMLoss"
        )

    def loss(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("shift_labels") is None or kwargs.get("num_items_in_batch") is None:
            raise RefusedError(
                "model", f"{name} does not hand shift_labels and num_items_in_batch to its loss"
            )
        return own(*args, **kwargs)

    loss.burst_mcore = True  # type: ignore[attr-defined]
    model.loss_function = loss


def _of_transformers(model: nn.Module) -> Any:
    from transformers import PreTrainedModel

    found = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
    if found is None:
        raise RefusedError("model", f"{type(model).__name__} is no model of transformers")
    return found
