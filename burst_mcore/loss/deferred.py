"""Deferred logits: a stand-in that records a model's operations on its logits, up to the loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

ALIKE = {"multiply": "mul", "rmul": "mul", "divide": "div", "true_divide": "div", "truediv": "div"}
"""Torch's aliases of operations."""
TAKEN = ("mul", "div", "tanh", "float", "to", "contiguous", "view", "reshape", "cross_entropy")
"""The supported operations on logits, besides slices of tokens."""
AS_HIDDEN = ("ndim", "dim", "device", "dtype")
"""The attributes that logits share with hidden states."""
ALL_OTHERS = (
    "add radd sub rsub rtruediv neg pos abs pow rpow matmul rmatmul mod floordiv eq ne lt le gt ge "
    "and or xor invert bool len iter setitem contains float int"
)
"""The unsupported operators that Python looks up on the class."""


class DeferredHead(Protocol):
    """The LM head of a DeferredLogits; raises errors that name the model."""

    columns: int
    """V, the size of the vocabulary."""

    def loss(self, hidden: Tensor, labels: Tensor, **options: Any) -> Tensor:
        """Cross-entropy of the logits of `hidden` [..., d]; options are `fused_linear_cross_entropy`'s."""

    def refuse(self, use: str) -> NoReturn:
        """Raise an error that names the model and its unsupported operation."""


@dataclass(frozen=True, eq=False)
class DeferredLogits:
    """A stand-in for the logits [..., V] of `hidden` [..., d] in a model's own code, up to its cross-entropy.

    Its value is cap(head(hidden)) * multiplier / divisor; cap(x) is x, or tanh(x / softcap). The two factors
    are separate, so that 30 * tanh(x / 30) has a temperature of exactly 1. Unsupported operations raise the
    TypeError of `head.refuse`.
    """

    hidden: Tensor
    head: DeferredHead
    softcap: float | None = None
    multiplier: float = 1.0
    divisor: float = 1.0

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.hidden.shape[:-1], self.head.columns))

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    def mul(self, other: Any) -> DeferredLogits:
        return replace(self, multiplier=self.multiplier * self._number(other, "multiplies"))

    def div(self, other: Any) -> DeferredLogits:
        return replace(self, divisor=self.divisor * self._number(other, "divides"))

    __mul__ = __rmul__ = mul
    __truediv__ = div

    def tanh(self) -> DeferredLogits:
        if self.softcap is not None:
            self.head.refuse("takes tanh twice of")
        return replace(self, softcap=self._scale(), multiplier=1.0, divisor=1.0)

    def view(self, *shape: Any) -> DeferredLogits:
        sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if not isinstance(sizes, tuple | list) or len(sizes) == 0 or sizes[-1] not in (-1, self.head.columns):
            self.head.refuse(f"asks for the shape {sizes} of")
        return replace(self, hidden=self.hidden.reshape(*sizes[:-1], self.hidden.shape[-1]))

    reshape = view

    def __getitem__(self, key: Any) -> DeferredLogits:
        keys = key if isinstance(key, tuple) else (key,)
        if not all(isinstance(k, slice | int) or k is Ellipsis for k in keys):
            text = f"a tensor of shape {[*key.shape]}" if isinstance(key, Tensor) else key
            self.head.refuse(f"takes [{text}] of")
        of_tokens = Ellipsis not in keys and len(keys) < self.ndim
        if not of_tokens and keys[-1] is not Ellipsis:
            last, columns = keys[-1], range(self.head.columns)
            if not isinstance(last, slice) or columns[last] != columns:
                self.head.refuse(f"takes a part of the vocabulary, {key}, of")
            keys = (*keys[:-1], slice(None))
        return replace(self, hidden=self.hidden[keys])

    def cross_entropy(
        self,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """Compute torch.nn.functional.cross_entropy of logits [N, V] or [V]."""
        if weight is not None or size_average is not None or reduce is not None:
            self.head.refuse("weights classes, or uses deprecated options, in cross_entropy of")
        if self.ndim > 2 or target.is_floating_point():
            self.head.refuse("takes the cross-entropy over other classes than the vocabulary of")
        temperature = self._scale() * (1.0 if self.softcap is None else self.softcap)
        return self.head.loss(
            self.hidden, target, ignore_index=ignore_index, reduction=reduction,
            label_smoothing=label_smoothing, softcap=self.softcap, temperature=temperature,
        )  # fmt: skip

    def _scale(self) -> float:
        scale = self.divisor / self.multiplier if self.multiplier else math.inf
        if not 0 < scale < math.inf:
            self.head.refuse(f"multiplies by {self.multiplier:g}, divides by {self.divisor:g}")
        return scale

    def _number(self, factor: Any, use: str) -> float:
        if isinstance(factor, Tensor) and factor.ndim == 0 and not factor.requires_grad:
            return float(factor)
        if not isinstance(factor, int | float):
            self.head.refuse(f"{use} by what is no plain number")
        return float(factor)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # Python probes for optional protocols
        if name not in AS_HIDDEN:
            self.head.refuse(f"does '{name}' to")
        return getattr(self.hidden, name)

    @classmethod
    def __torch_function__(
        cls, function: Callable, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        logits = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, cls))
        name = function.__name__.strip("_")
        name = ALIKE.get(name, name)
        if name == "mul" and len(args) == 2 and args[1] is logits:
            args = (logits, args[0])
        if name not in TAKEN or not args or args[0] is not logits:
            logits.head.refuse(f"does '{name}' to")
        return getattr(logits, name)(*args[1:], **kwargs)


def _same(self: DeferredLogits, *_: Any, **__: Any) -> DeferredLogits:
    return self  # the loss is summed in at least float32, on the head's device


def _refused(name: str) -> Callable[..., NoReturn]:
    def operator(self: DeferredLogits, *_: Any) -> NoReturn:
        self.head.refuse(f"does '{name}' to")

    return operator


# Set here, since a method named float would hide the type in the class.
for _name in ("float", "to", "contiguous"):
    setattr(DeferredLogits, _name, _same)
for _name in ALL_OTHERS.split():
    setattr(DeferredLogits, f"__{_name}__", _refused(_name))
