"""Training steps of a framework: our settings for all of them, with the paper's ablation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from burst_bench.core import Case, World, missing, one_of, shareable
from burst_mcore.config import BurstConfig
from burst_plan.explain.problem import DTYPES
from burst_plan.step.model import Model

VOCABULARY = 2048
WIDER = 2
"""Width of the MLP over that of the model."""
Train = Callable[[], float]
"""A step: forward, backward and optimizer, with a learning rate of 0; the mean loss of all tokens."""


class TrainedCase(Case):
    """A small model and the ranks that train it."""

    ranks: int = 4
    nodes: int = 1
    """Assumed nodes of the ranks."""
    seq: int = 4096
    """Tokens of one sequence, over all ranks."""
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    layers: int = 2
    stage: int = one_of(3, range(4))
    """The ZeRO stage, under DeepSpeed."""
    dtype: str = one_of("float32", DTYPES)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, divisor, what in (
            ("ranks", self.nodes, "nodes"), ("seq", 2 * self.ranks, "2 x ranks"),
            ("heads", self.kv_heads, "kv_heads"),
        ):  # fmt: skip
            value = getattr(self, name)
            if value % divisor:
                raise ValueError(f"{name} must be a multiple of {what}, {divisor}, got {value}")

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def sample(self) -> Tensor:
        """The tokens of one sequence, the same every time."""
        return torch.randint(3, VOCABULARY, (1, self.seq), generator=torch.Generator().manual_seed(1))

    @property
    def flops(self) -> float:
        """The FLOPs of a step over one sequence, of the model alone: nothing recomputed, causal pairs."""
        sizes: Any = {name: getattr(self, name) for name in ("layers", "heads", "kv_heads", "head_dim")}
        sizes |= {"hidden": self.width, "value_dim": self.head_dim, "ffn": WIDER * self.width}
        return self.seq * Model(name="", vocab=VOCABULARY, **sizes).flops(keys=self.seq / 2)


@dataclass(frozen=True)
class StepSetting:
    """The settings of ours in a step."""

    config: BurstConfig
    fused: bool = False
    """Whether the LM head and its loss are fused."""
    recompute: str = "none"
    """"none", or a policy: "full", "segment" (half of the sequence is kept) or "attention"."""


def first_loss(case: TrainedCase, world: World) -> float:
    """Return the loss of the model in one process."""
    with torch.no_grad():
        model, ids = llama(case).to(world.device, DTYPES[case.dtype]), case.sample.to(world.device)
        return float(model(input_ids=ids, labels=ids).loss)


def llama(case: TrainedCase) -> Any:
    """Return the model, the same every time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=case.width, intermediate_size=WIDER * case.width,
        num_hidden_layers=case.layers, num_attention_heads=case.heads, num_key_value_heads=case.kv_heads,
        head_dim=case.head_dim, max_position_embeddings=case.seq, attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def attend_by(model: Any, attention: Callable[..., Any]) -> None:
    """Set the attention of a model of transformers to a function, in the form of its interface."""
    from transformers import AttentionInterface

    word = f"burst_mcore_bench_{id(attention)}"
    AttentionInterface.register(word, attention)
    model.set_attn_implementation(word)


def causal(module: object, q: Tensor, k: Tensor, v: Tensor, *_: object, **__: object) -> tuple[Tensor, None]:
    """Attend by torch's function, in the form of transformers' interface."""
    out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2), None


_QUERY = StepSetting(BurstConfig(backward="query", ring="flat"), recompute="full")
_DOUBLE = replace(_QUERY, config=BurstConfig(backward="query", ring="double"))
_FUSED = replace(_DOUBLE, fused=True)
OURS = {
    "burst ring": StepSetting(BurstConfig()),
    "burst hybrid": StepSetting(BurstConfig(head_parallel=2)),
    "burst auto": StepSetting(BurstConfig(head_parallel="auto")),
    "burst auto with fused loss": StepSetting(BurstConfig(head_parallel="auto"), fused=True),
    "kv, flat ring, full recompute": StepSetting(BurstConfig(backward="kv", ring="flat"), recompute="full"),
    "+ query": _QUERY,
    "+ double ring": _DOUBLE,
    "+ fused loss": _FUSED,
    "+ segment": replace(_FUSED, recompute="segment"),
    "+ attention": replace(_FUSED, recompute="attention"),
}
"""Settings by name. From the fifth on they are the paper's ablation: each adds to its predecessor, and
the last keeps attention instead of a segment."""


def needs(packages: Sequence[str], setting: StepSetting | None, case: TrainedCase, device: str) -> str | None:
    """Return the unmet requirement of a framework's method, or of our setting for the case."""
    lacks = missing(*packages)
    if lacks or setting is None:
        return lacks
    if setting.config.ring == "double" and case.nodes < 2:
        return "2 nodes or more: nodes=2"
    heads = setting.config.head_parallel
    return shareable(case, heads) if isinstance(heads, int) else None
