"""Windows in the convention of flash kernels."""

from __future__ import annotations

from burst_mcore.attention.geometry.pattern import Pattern


def from_lower_right(pattern: Pattern) -> tuple[int, int]:
    """Return (left, right), -1 for unbounded, counted from the diagonal into the lower right corner.

    FlashAttention's convention: row m sees column n iff -left <= n - (m + N - M) <= right. A tile's window
    leaves no row and no column of its rectangle unseen. So neither bound is negative; a negative one would be
    read as unbounded. A window has no more rows than columns: FlashAttention-2 takes a right bound of N and
    more as unbounded, and an unbounded one as N.
    """
    if pattern.packed:
        return pattern.packed.left, pattern.packed.right
    if not pattern.windowed:
        return -1, -1
    rows, columns = pattern.shape
    assert rows <= columns, f"a window over {pattern.shape}"
    apart = columns - rows
    left = -1 if pattern.low is None else apart - pattern.low
    right = -1 if pattern.high is None else pattern.high - apart
    assert left >= 0 or pattern.low is None, f"a window from {pattern.low} on over {pattern.shape}"
    assert right >= 0 or pattern.high is None, f"a window up to {pattern.high} over {pattern.shape}"
    return left, right
