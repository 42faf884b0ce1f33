"""The token-mixing functions of models of transformers, bound to shards: no forward is copied.

A mixer of transformers calls functions of its own module by name, with the signatures of kernels: of fla,
mamba-ssm and causal-conv1d if installed, else of torch code. `bind` replaces the names in the module. A
`Mixing` is passed in place of the padding mask of such layers, also through checkpoints. With another mask a
mixer calls the original functions.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from burst_mcore.attention.runtime.topology import Topology
from burst_mcore.config import BurstConfig
from burst_mcore.layout import Layout
from burst_mcore.recurrent import kernels
from burst_mcore.recurrent.api import convolution, recurrence
from burst_mcore.recurrent.fragments import Ends, fragments
from burst_mcore.recurrent.sequence import Shards
from burst_mcore.wrap import while_set

Function = Callable[..., Any]
Rows = tuple[Shards, ...]
"""The sequences of a forward: one for all rows, or one a row."""

CONVOLUTION, DELTA, KIMI = "causal_conv1d_fn", "torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention"
MAMBA1, MAMBA2 = "mamba_selective_scan", "mamba2_chunk_scan"
STATES = {DELTA: kernels.LAST, KIMI: kernels.LAST, MAMBA2: kernels.LASTS}
FUSED = ("mamba_inner_fn", "mamba2_split_conv1d_scan_combined")
MASK, MASKED = "create_recurrent_attention_mask", "apply_mask_to_padding_states"
_KINDS = {
    "Qwen3NextGatedDeltaNet Qwen3_5GatedDeltaNet Qwen3_5MoeGatedDeltaNet OlmoHybridGatedDeltaNet "
    "LaraMiniGatedDeltaNet": DELTA,
    "KimiLinearDeltaAttention BailingHybridDeltaAttention": KIMI,
    "Mamba2Mixer BambaMixer GraniteMoeHybridMambaLayer FalconH1Mixer NemotronHMamba2Mixer "
    "Zamba2MambaMixer": MAMBA2,
    "MambaMixer FalconMambaMixer JambaMambaMixer ZambaMambaMixer": MAMBA1,
    "Lfm2ShortConv Lfm2MoeShortConv Lfm3ShortConv": "",
}
MIXERS = {
    name: (CONVOLUTION, *([rule] if rule else [])) for names, rule in _KINDS.items() for name in names.split()
}
"""The functions that each class of mixer calls once in a forward."""


@dataclass(frozen=True)
class Mixing:
    """The sequences of a token-mixing layer, passed as the layer's padding mask."""

    rows: Rows
    calls: Counter[str] = field(default_factory=Counter, compare=False)
    """The number of calls of each function."""

    @classmethod
    def of(cls, topology: Topology, config: BurstConfig, tokens: int, ends: tuple[Ends, ...]) -> Mixing:
        """Return the sequences of a forward; ends: cu_seqlens of each row, () for a row without packing."""
        rows = ends if len({*ends}) > 1 else ends[:1] or ((),)
        layout = Layout.of(config.layout)
        return cls(tuple(Shards(topology, layout, tokens, each, config.max_ctas) for each in rows))


def mixers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the supported mixers of a model, by path."""
    return {path: module for path, module in model.named_modules() if type(module).__name__ in MIXERS}


def awaits_mask(model: nn.Module) -> bool:
    """Return whether a model passes its attention_mask unchanged to its mixers (Mamba, Falcon Mamba)."""
    modules = {type(mixer).__module__ for mixer in mixers_of(model).values()}
    return any({MASK, MASKED} & {*vars(sys.modules[module])} == {MASKED} for module in modules)


def missing_calls(model: nn.Module, mixing: Mixing) -> list[str]:
    """Return the functions with a number of calls in a forward that differs from the mixers' number."""
    counts, due = mixing.calls, Counter[str]()
    for mixer in mixers_of(model).values():
        due.update(MIXERS[type(mixer).__name__])
        due[MAMBA1] += getattr(mixer, "n_mamba_heads", 1) - 1  # Zamba scans each head separately
    return [
        f"{name}, called {counts[name]} times instead of {n}" for name, n in due.items() if counts[name] != n
    ]


def why_scattered(model: nn.Module, layout: Layout | str, size: int) -> str | None:
    """Return why a layout does not fit a model's mixers; None if it does, or without mixers."""
    try:
        if mixers_of(model):
            fragments(Layout.of(layout), Layout.of(layout).divisor(size), size)
    except ValueError as error:
        return str(error)
    return None


def bind(model: nn.Module, mixing: Callable[[], Mixing | None]) -> None:
    """Bind the functions of a model's mixers, in the modules of their classes. Idempotent.

    mixing: called when a forward makes the padding mask of its mixers; None leaves the forward unchanged.
    Raises ValueError for a function that takes no states.
    """
    for mixer in {type(mixer) for mixer in mixers_of(model).values()}:
        module = sys.modules[mixer.__module__]
        for name in {*_BOUND, MASK, MASKED} & {*vars(module)}:
            _replace(module, name, partial(_bound, name, mixing))
        within = _WITHIN.get(mixer.__name__)
        _replace(mixer, "forward", partial(_within, within) if within else _forgotten())


def _replace(owner: Any, name: str, bound: Callable[[Function], Function]) -> None:
    original = getattr(owner, name)
    if not hasattr(original, "replaces"):
        replacement = wraps(original)(bound(original))
        replacement.replaces = original  # type: ignore[attr-defined]
        setattr(owner, name, replacement)


def _bound(name: str, mixing: Callable[[], Mixing | None], original: Function) -> Function:
    if name == MASK:
        return lambda *args, **kwargs: mixing() or original(*args, **kwargs)
    if name == MASKED:
        return partial(_masked, original)
    replacement = _BOUND[name]
    if name in STATES:
        kernels.check_states(original, STATES[name])

    def function(*args: Any, **kwargs: Any) -> Any:
        of_layer: Mixing | None = getattr(_LAYER, "mixing", None)
        if of_layer is None:
            return original(*args, **kwargs)
        of_layer.calls[name] += 1
        return replacement(original, of_layer.rows, *args, **kwargs)

    disabled: Function = torch.compiler.disable(function)
    return disabled


_LAYER = threading.local()
"""The `Mixing` of the mixer whose forward runs, by thread: checkpoints recompute in threads of autograd."""


@contextmanager
def _forgotten() -> Iterator[None]:
    """Unset the `Mixing` after the forward of a mixer."""
    try:
        yield
    finally:
        _LAYER.mixing = None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _masked(original: Function, hidden_states: Tensor, attention_mask: Any) -> Tensor:
    """Set the `Mixing` at the start of a mixer's forward; a `Mixing` has no padding to be zeroed."""
    _LAYER.mixing = attention_mask if isinstance(attention_mask, Mixing) else None
    if _LAYER.mixing is not None:
        return hidden_states
    states: Tensor = original(hidden_states, attention_mask)
    return states


def _convolution(
    original: Function,
    rows: Rows,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    """causal-conv1d's causal_conv1d_fn: hidden_states [B, C, S], weight [C, W]."""
    convolve = partial(original, weight=weight, bias=bias, activation=activation)
    sequences, width = _split(rows, (hidden_states,)), weight.shape[-1]
    return torch.cat([convolution(convolve, x, width, shards, dim=-1) for shards, (x,) in sequences])


def _delta(
    original: Function, rows: Rows, *qkv: Tensor, g: Tensor, beta: Tensor, **keywords: Any
) -> tuple[Tensor, None]:
    """fla's chunk_gated_delta_rule and chunk_kda."""
    options = _options(original, keywords, kernels.LAST, "use_qk_l2norm_in_kernel", "chunk_size")
    return _recurrence(kernels.delta_rule(original, **options), rows, (*qkv, g, beta)), None


def _mamba2(original: Function, rows: Rows, *tensors: Tensor, **keywords: Any) -> Tensor:
    x, dt, A, B, C = tensors
    names = "chunk_size", "D", "dt_bias", "dt_softplus", "dt_limit"
    options = _options(original, keywords, kernels.LASTS, *names)
    return _recurrence(kernels.mamba2(original, A, **options), rows, (x, dt, B, C))


def _mamba1(
    original: Function, rows: Rows, *tensors: Tensor, z: Tensor | None = None, **keywords: Any
) -> Tensor:
    u, dt, A, B, C = tensors
    names = "D", "delta_bias", "delta_softplus", "use_associative_scan"
    options = _options(original, keywords, ("return_last_state",), *names)
    out = _recurrence(kernels.mamba1(original, A, **options), rows, (u, dt, B, C))
    return out if z is None else out * silu(z)


_BOUND: dict[str, Function] = {
    CONVOLUTION: _convolution,
    DELTA: _delta,
    KIMI: _delta,
    MAMBA2: _mamba2,
    MAMBA1: _mamba1,
    **dict.fromkeys(FUSED, lambda *_, **__: None),  # without a fused function mixers call those above
}


def _within(mixing_of: Function, original: Function) -> Function:
    """Return the forward of a mixer with its recurrence inline, not in a function."""

    def forward(mixer: Any, *args: Any, **kwargs: Any) -> Any:
        mask = kwargs.get("attention_mask")
        mixing = mask if isinstance(mask, Mixing) else getattr(mask, "mixing", None)
        if mixing is None:
            return original(mixer, *args, **kwargs)
        mixing.calls[type(mixer).__name__] += 1
        with mixing_of(mixer, mixing.rows):
            return original(mixer, *args, **kwargs)

    disabled: Function = torch.compiler.disable(forward)
    return disabled


@contextmanager
def _lightning(mixer: Any, rows: Rows) -> Iterator[None]:
    """Replace MiniMax's lightning attention, from its activation to its norm; its loop's result is unused."""
    outputs: list[Tensor] = []

    def mix(_: nn.Module, __: Any, qkv: Tensor) -> Tensor:
        q, k, v = qkv.unflatten(-1, (mixer.num_attention_heads, -1)).chunk(3, -1)
        gate = -mixer.slope_rate.flatten().expand(q.shape[:3])
        outputs.append(_recurrence(kernels.gated(kernels.linear_attention), rows, (q, k, v, gate)).flatten(2))
        return qkv.detach()

    at_norm = mixer.norm.register_forward_pre_hook(lambda *_: outputs.pop())
    with mixer.act_fn.register_forward_hook(mix), at_norm:
        yield


@contextmanager
def _griffin(mixer: Any, rows: Rows) -> Iterator[None]:
    """Replace RecurrentGemma's convolution and scan."""

    def convolve(conv: nn.Conv1d, args: tuple[Tensor], _: Any) -> Tensor:
        return _convolution(lambda x, **_: conv.forward(x)[..., : x.shape[-1]], rows, *args, conv.weight)

    def scan(hidden_states: Tensor, recurrent_gate: Tensor, **_: Any) -> tuple[Tensor, None]:
        return _recurrence(kernels.elementwise(), rows, (hidden_states, recurrent_gate)), None

    with while_set(mixer.rg_lru, _rnn_scan=scan), mixer.conv_1d.register_forward_hook(convolve):
        yield


_WITHIN = {"MiniMaxLightningAttention": _lightning, "RecurrentGemmaRecurrentBlock": _griffin}
MIXERS |= {name: (name,) for name in _WITHIN}


def _recurrence(kernel: kernels.Recurrence, rows: Rows, tensors: kernels.Tensors) -> Tensor:
    return torch.cat([recurrence(kernel, x, shards) for shards, x in _split(rows, tensors)])


def _split(rows: Rows, tensors: Sequence[Tensor]) -> Iterator[tuple[Shards, kernels.Tensors]]:
    for row, shards in enumerate(rows):
        yield shards, tuple(x if len(rows) == 1 else x[row : row + 1] for x in tensors)


def _options(kernel: Function, values: dict[str, Any], cache: Sequence[str], *options: str) -> dict[str, Any]:
    """Return a mixer's options for a kernel. Raises ValueError for a cache, and for unsupported options.

    Keywords that the kernel does not take are the model's: transformers passes them through.
    """
    settings = {key for key, value in values.items() if value is not None and value is not False}
    if settings & {*cache}:
        raise ValueError("a cache in a forward over shards or documents is unsupported: set use_cache=False")
    name, parameters = kernels.signature_of(kernel)
    if others := (settings & {*parameters}) - {*options}:
        legal, illegal = ", ".join(options), ", ".join(sorted(others))
        raise ValueError(f"{name} over shards takes the options {legal}, and the mixer sets {illegal}")
    return {key: values[key] for key in options if key in values}
