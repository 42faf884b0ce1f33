"""Windows as flash kernels take them."""

from __future__ import annotations

from burst_mcore.attention.geometry.pattern import Seen


def from_lower_right(seen: Seen) -> tuple[int, int]:
    """(left, right), -1 for unbounded, counted from the diagonal that ends in the lower right corner.

    FlashAttention's convention: row m sees column n iff -left <= n - (m + N - M) <= right. A tile's window
    leaves no row and no column of its rectangle unseen, so that neither bound is negative (a negative one
    would be read as unbounded), and has no more rows than columns (FlashAttention-2 takes a right bound
    of N and more as unbounded, and an unbounded one as N, which is right up to there).
    """
    if not seen.windowed:
        return -1, -1
    rows, columns = seen.shape
    assert rows <= columns, f"a window over {seen.shape}"
    apart = columns - rows
    left = -1 if seen.low is None else apart - seen.low
    right = -1 if seen.high is None else seen.high - apart
    assert left >= 0 or seen.low is None, f"a window from {seen.low} on over {seen.shape}"
    assert right >= 0 or seen.high is None, f"a window up to {seen.high} over {seen.shape}"
    return left, right
