"""The dtypes of attention's and the loss's inputs, and of their sums."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

TRAINED = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Training dtypes by name."""
DTYPES = {**TRAINED, "float64": torch.float64}
"""All dtypes of inputs by name; float64 is for checks."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of `dtype` are summed: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def autocast(*tensors: Any) -> tuple[Any, ...]:
    """Cast tensors like torch.autocast before a product, if it is on; float64 and others stay unchanged."""
    first = tensors[0]
    if not isinstance(first, Tensor) or first.is_meta or not torch.is_autocast_enabled(first.device.type):
        return tensors
    dtype = torch.get_autocast_dtype(first.device.type)
    cast = [isinstance(x, Tensor) and x.dtype in TRAINED.values() for x in tensors]
    return tuple(x.to(dtype) if floating else x for x, floating in zip(tensors, cast, strict=True))


def of_parts(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the log-sum-exp of a partial result, which sets its weight in a merge.

    A rounded lse_i changes the weight exp(lse_i - lse) by the factor 1 + eps |lse_i|. If the keys of a row
    share a score of 1000, this is 500 times the rounding error of a float32 output. Errors common to all
    parts cancel.
    """
    return torch.float64 if dtype.itemsize >= torch.float32.itemsize else torch.float32
