"""Counts work: the query-key pairs that kernels meet, the bytes that ranks send, the functions that run."""

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist

from burst_mcore.attention import resolve
from burst_mcore.attention.kernels import table
from burst_mcore.checkpointing.scope import in_backward


def count_pairs() -> Counter[str]:
    """From now on, query-key pairs that burst attention's forward meets in this process.

    By "forward", and "backward", where it meets them again. Calls that an earlier test resolved, in the
    process that this one was forked from, have kernels that do not count: they are forgotten.
    """
    attended: Counter[str] = Counter()

    def counting(forward, q, k, v, pattern, scores):
        attended["backward" if in_backward() else "forward"] += len(q) * pattern.pairs
        return forward(q, k, v, pattern, scores)

    for name in table.by_rank("cpu"):
        kernel = table.KERNELS[name]
        table.KERNELS[name] = replace(kernel, forward=partial(counting, kernel.forward))
    for cached in (table.choose, resolve.call_of):
        cached.cache_clear()
    return attended


def count_bytes() -> list[int]:
    """The bytes of each message that this process sends from now on; clear the list to begin anew."""
    sent: list[int] = []
    batch = dist.batch_isend_irecv

    def counting(operations):
        sent.extend(op.tensor.nbytes for op in operations if op.op is dist.isend)
        return batch(operations)

    dist.batch_isend_irecv = counting
    return sent


def count_calls(function: Callable[[], Any], folder: str = "") -> int:
    """How many functions are called meanwhile: of Python and of C, or of Python in the files of a folder."""
    count, before = 0, sys.getprofile()

    def profile(frame, event, arg):
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(folder)
        count += event == "c_call" and not folder

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count
