"""Models that have a name, and the names that people write for them."""

from __future__ import annotations

import re
from typing import Any

from burst_plan.step.model.sizes import Model

SUFFIXES = re.compile(r"(-(hf|base|chat|instruct|thinking|v0\.\d|\d{4}))+$")
"""Ends of names of trained models, which say nothing of sizes."""
SAME_SIZES = re.compile(r"^(llama-?3)\.[13]|^(deepseek-v3)\.1")
"""Releases with the sizes of an older one: Llama 3.1 and 3.3, DeepSeek-V3.1."""


def named(text: str) -> Model | None:
    """Return the preset of a name, in any case or as Hugging Face spells it; None if there is none."""
    return PRESETS.get(text) or SPELLED.get(_spelled(text))


def _spelled(text: str) -> str:
    name = SUFFIXES.sub("", text.lower().rpartition("/")[2].removeprefix("meta-"))
    return re.sub("[-_ ]", "", SAME_SIZES.sub(lambda found: found[1] or found[2], name))


def _llama(
    name: str, layers: int, hidden: int, heads: int, kv: int, ffn: int, vocab: int, dim: int = 0, **more: Any
) -> Model:
    sizes = {"head_dim": dim or hidden // heads, "value_dim": dim or hidden // heads, **more}
    return Model(
        name=name, layers=layers, hidden=hidden, heads=heads, kv_heads=kv, ffn=ffn, vocab=vocab, **sizes
    )


def _gpt(name: str, layers: int, hidden: int, heads: int) -> Model:
    return _llama(name, layers, hidden, heads, heads, 4 * hidden, 50304, gated=False, tied=True)


def _qwen3(
    name: str, layers: int, hidden: int, heads: int, kv: int, ffn: int, experts: int = 0, width: int = 0
) -> Model:
    return _llama(name, layers, hidden, heads, kv, ffn, 151936, 128, qk_norm=True, experts=experts,
                  active=8 if experts else 0, expert_ffn=width)  # fmt: skip


def _gpt_oss(name: str, layers: int, experts: int) -> Model:
    return _llama(name, layers, 2880, 64, 8, 2880, 201088, 64, experts=experts, active=4, expert_ffn=2880,
                  window=128, windowed=layers // 2)  # fmt: skip


PRESETS = {
    model.name: model
    for model in (
        _llama("7b", 32, 4096, 32, 32, 11008, 32000),
        _llama("14b", 40, 5120, 40, 40, 13824, 120000),
        _llama("llama2-7b", 32, 4096, 32, 32, 11008, 32000),
        _llama("llama3-8b", 32, 4096, 32, 8, 14336, 128256),
        _llama("llama3-70b", 80, 8192, 64, 8, 28672, 128256),
        _llama("llama3-405b", 126, 16384, 128, 8, 53248, 128256),
        _gpt("gpt-2.7b", 32, 2560, 32),
        _gpt("gpt-6.7b", 32, 4096, 32),
        _gpt("gpt-13b", 40, 5120, 40),
        _gpt("gpt-30b", 48, 7168, 64),  # of DeepSpeed's figures, in which 16 ranks share its heads
        _llama("qwen2.5-7b", 28, 3584, 28, 4, 18944, 152064),
        _llama("qwen2.5-72b", 80, 8192, 64, 8, 29568, 152064),
        _qwen3("qwen3-8b", 36, 4096, 32, 8, 12288),
        _qwen3("qwen3-32b", 64, 5120, 64, 8, 25600),
        _qwen3("qwen3-30b-a3b", 48, 2048, 32, 4, 6144, 128, 768),
        _qwen3("qwen3-235b-a22b", 94, 4096, 64, 4, 12288, 128, 1536),
        _llama("mixtral-8x7b", 32, 4096, 32, 8, 14336, 32000, experts=8, active=2, expert_ffn=14336),
        _llama("deepseek-v3", 61, 7168, 128, 128, 18432, 129280, 192, experts=256, active=8, expert_ffn=2048,
               value_dim=128, shared_ffn=2048, dense_layers=3, q_rank=1536, kv_rank=512, rope_dim=64),
        _gpt_oss("gpt-oss-20b", 24, 32),
        _gpt_oss("gpt-oss-120b", 36, 128),
    )
}  # fmt: skip
"""7b and 14b are those of the BurstEngine paper, the others as their makers publish them in config.json.

Biases and sinks of attention are not counted. Tests hold the parameters to those that makers print."""
SPELLED = {_spelled(name): model for name, model in PRESETS.items()}
