"""The dtypes that attention and the loss take, and the dtype in which they sum."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

TRAINED = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Dtypes by name that models are trained in."""
DTYPES = {**TRAINED, "float64": torch.float64}
"""All dtypes of inputs by name; float64 is for checks."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of `dtype` are summed: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def autocast(*tensors: Any) -> tuple[Any, ...]:
    """Cast tensors as torch.autocast casts those of products, if it is on; float64 and others are left."""
    first = tensors[0]
    if not isinstance(first, Tensor) or first.is_meta or not torch.is_autocast_enabled(first.device.type):
        return tensors
    dtype = torch.get_autocast_dtype(first.device.type)
    cast = [isinstance(x, Tensor) and x.dtype in TRAINED.values() for x in tensors]
    return tuple(x.to(dtype) if floating else x for x, floating in zip(tensors, cast, strict=True))


def of_parts(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the log-sum-exp of a partial result, from which its weight in a merge follows.

    Rounding changes a weight exp(lse_i - lse) by eps * |lse_i|. Where the keys of a row share a score of
    1000, that is 500 roundings of an output in float32. An error that all parts have in common cancels.
    """
    return torch.float64 if dtype.itemsize >= torch.float32.itemsize else torch.float32
