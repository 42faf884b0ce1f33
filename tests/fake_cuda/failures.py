"""Cases of a rank that fails, refuses its call, or does not come: all ranks get an error, and none waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch

from burst_mcore import BurstConfig, Mask, burst_attention
from burst_mcore.agreement import watch

from . import ranks
from .cases import TOKENS
from .clocks import CHECKER
from .groups import TIMEOUT
from .streams import THREAD
from .tensors import FAILS

SOON = timedelta(seconds=0.02)
FAILURES: dict[str, dict[str, Any]] = {
    "a rank fails in forward": {
        "fails": ("triton forward", 0),
        "others": "rank 1 of the ring failed in mid-ring",
    },
    "a rank fails in backward": {
        "fails": ("triton all", 2),
        "others": "rank 1 of the ring failed in mid-ring",
    },
    "a rank refuses its call": {"refuses": True, "others": "rank 1 of the ring refused this call"},
    "ranks make different calls": {"mask": Mask.full(), "others": "make different calls"},
    "a rank captures a graph": {"captures": True, "others": "rank 1 of the ring refused this call"},
    "a rank has fewer tokens": {"fewer": True, "others": "on ranks [1]; a rank went ahead"},
    "a rank does not come": {"absent": True, "others": "did not come to this call"},
}
"""By name: what rank 1 of three does, and what the error of each other rank says."""


def failure(
    size: int,
    *,
    others: str,
    fails: tuple[str, int] | None = None,
    refuses: bool = False,
    absent: bool = False,
    fewer: bool = False,
    captures: bool = False,
    mask: Mask | None = None,
) -> Counter[str]:
    """A call of attention of which rank 1 does something else, and then the same call of all.

    fewer: rank 1 holds fewer tokens, in the second call, which goes ahead on the others.
    """
    told: dict[int, list[str]] = {rank: [] for rank in range(size)}
    settings, odd = BurstConfig(kernel="triton", backward="query"), 1

    def rank(me: int) -> None:
        topology = ranks.ring(me, size)
        try:
            for step in range(2):
                x = torch.ones(1, TOKENS - (fewer and me == odd and step == 1), 2, 16)
                q, k, v = (ranks.cuda(x, me).requires_grad_() for _ in range(3))
                mine = mask if mask is not None and me == odd and not step else Mask.causal()
                THREAD.capturing = captures and me == odd and not step
                if absent and me == odd:
                    return
                try:
                    keys = k[:, :3] if refuses and me == odd and not step else k
                    out = burst_attention(q, keys, v, topology=topology, mask=mine, config=settings)
                    out.backward(out.detach())
                except (RuntimeError, ValueError) as error:
                    told[me].append(f"{type(error).__name__}: {error}")
        finally:
            topology.communicators.close()

    with _soon(fails and (odd, *fails), SOON * (10 if absent else 250)):
        ranks.run(size, rank)
    found = Counter(CHECKER.findings)
    for each, errors in told.items():
        if absent and each == odd:
            continue
        if not errors or (each != odd and not any(others in text for text in errors)):
            found[f"error: rank {each} is told {errors}"] += 1
        if bool(fails or absent) != (len(errors) == 2):  # nothing follows a pass that failed
            found[f"error: rank {each} is told of {len(errors)} calls: {errors}"] += 1
    return found


@contextmanager
def _soon(fails: tuple[int, str, int] | None, timeout: timedelta) -> Iterator[None]:
    """Let ranks look for errors often, a launch of a rank fail, and gloo wait no longer than this."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch, "LOOK_EVERY", SOON)
        if fails:
            patch.setitem(FAILS, fails[:2], fails[2])
        patch.setitem(TIMEOUT, "gloo", timeout)
        yield
