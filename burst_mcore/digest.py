"""Short names of contents that are equal on all ranks and in all processes, as `hash` is not."""

from __future__ import annotations

import ctypes
import hashlib

from torch import Tensor


def digest(content: str | Tensor) -> str:
    """Return 16 hexadecimal digits of a text, or of a CPU tensor's values and shape."""
    data = content.encode() if isinstance(content, str) else _bytes_of(content)
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _bytes_of(x: Tensor) -> bytes:
    x = x.contiguous()
    values = ctypes.string_at(x.data_ptr(), x.nbytes) if x.numel() else b""
    return values + str(tuple(x.shape)).encode()
