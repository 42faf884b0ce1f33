"""How much memory a rank needs in training, by arithmetic: states of parameters, activations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from burst_mcore.attention.shard import Shard
from burst_mcore.deepspeed.config.section import Checkpointing
from burst_mcore.deepspeed.config.settings import zero
from burst_mcore.deepspeed.models.served import use_burst


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Of the model and the batch that a configuration is explained for; the configuration has none of it."""

    seq: int = 131072
    """Tokens of a sequence."""
    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocabulary: int = 128256
    hidden: int = 4096
    intermediate: int = 14336
    """Width of the MLP."""
    counted: int | None = None
    """Parameters, where the model was there to count them."""

    @property
    def parameters(self) -> int:
        """As counted, or those of a Llama of this shape."""
        if self.counted is not None:
            return self.counted
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.layers * layer + 2 * self.vocabulary * self.hidden + self.hidden


def shape_of(folder: Path, seq: int) -> Shape:
    """Return the shape of a model of transformers, from the config.json in a folder; no weight is loaded.

    Raises:
        RefusedError: attention over shards cannot serve the model.
        ValueError: there is no such model.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError) as error:
        raise ValueError(f"no causal LM in {folder}: {str(error).splitlines()[0]}") from None
    use_burst(model, 2)
    text: Any = config.get_text_config()
    heads = text.num_attention_heads
    return Shape(
        seq=seq,
        layers=text.num_hidden_layers,
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        vocabulary=text.vocab_size,
        hidden=text.hidden_size,
        intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        counted=sum(p.numel() for p in model.parameters()),
    )


def states(config: Mapping[str, Any], parameters: int, world: int, itemsize: int) -> dict[str, float]:
    """Bytes of weights, gradients and Adam's states on a rank, by ZeRO stage (arXiv 1910.02054, section 3).

    In 16 bits Adam keeps a float32 copy of the weights besides; what is offloaded is left out.
    """
    settings = zero(config)
    stage = int(settings.stage)
    adam = parameters * (8 if itemsize == 4 else 12)
    elsewhere = {
        name: found is not None and found.device not in (None, "none")
        for name in ("offload_param", "offload_optimizer")
        for found in [getattr(settings, name)]
    }
    weights = parameters * itemsize / (world if stage >= 3 else 1)
    return {
        "weights": 0.0 if elsewhere["offload_param"] else weights,
        "gradients": parameters * itemsize / (world if stage >= 2 else 1),
        "optimizer": 0.0 if elsewhere["offload_optimizer"] else adam / (world if stage >= 1 else 1),
    }


def activations(asked: Checkpointing, shape: Shape, shard: Shard) -> float:
    """Bytes that backward reads of all layers, besides what a policy keeps of attention.

    A layer stores its input, two normalised copies, what attention and MLP take and give (q, k, v, O, LSE;
    gate, up, their product); a checkpointed one its input alone, and all of that for one layer at a time.
    """
    tokens = shard.batch * shard.tokens
    attention = shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    numbers = 4 * shape.hidden + attention + 4 * shape.intermediate
    layer = tokens * (numbers * shard.itemsize + shape.heads * shard.statistic)
    if asked.policy == "none":
        return float(shape.layers * layer)
    return float(shape.layers * tokens * shape.hidden * shard.itemsize + layer)
