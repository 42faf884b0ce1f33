"""The dtypes that attention and the loss take, and the dtype in which they sum."""

from __future__ import annotations

import torch

TRAINED = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Dtypes by name that models are trained in."""
DTYPES = {**TRAINED, "float64": torch.float64}
"""All dtypes of inputs by name; float64 is for checks."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of `dtype` are summed: at least float32."""
    return torch.promote_types(dtype, torch.float32)
