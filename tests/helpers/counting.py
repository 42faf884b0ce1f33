"""Counts the work of burst attention in a process: the query-key pairs that its kernels meet."""

from collections import Counter
from dataclasses import replace
from functools import partial

from burst_mcore.attention import prepare
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
    for cached in (table.choose, prepare.call_of):
        cached.cache_clear()
    return attended
