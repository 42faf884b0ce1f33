"""The program of a position that gets what it reads from its owner, and sends gradients straight back.

Where masks leave little to read, this moves least: every row to its readers and to nobody else, once.
"""

from __future__ import annotations

from burst_mcore.attention.actions import (
    DATA,
    GRADIENT,
    HOME,
    HOME_SUM,
    PARTIAL,
    SUM,
    Accumulate,
    Action,
    Add,
    Channel,
    Compute,
    Program,
    Recv,
    Return,
    Send,
    Wait,
)


def direct(position: int, size: int, *, gradients: bool) -> Program:
    """Everything to everybody; what nobody reads is taken out by `prune`.

    At step t the bundle of the t-th position before is computed, while that of the next comes from its owner
    and the gradient of the one before is on its way back.
    """
    actions: list[Action] = []
    for t in range(size):
        source, after = (position - t) % size, (position + t) % size
        buffer = HOME if t == 0 else f"{DATA}{t % 2}"
        if t < size - 1:
            following, nearer = (position - t - 1) % size, (position + t + 1) % size
            channel = Channel("direct", DATA, t + 1)
            actions.append(Recv(t, channel, f"{DATA}{(t + 1) % 2}", following))
            actions.append(Send(t, channel, HOME, nearer))
        actions.append(Compute(t, source, buffer))
        if gradients and t == 0:
            actions.append(Accumulate(t, source, HOME_SUM, first=True))
        elif gradients:
            share, comes = f"{SUM}{t % 2}", f"{PARTIAL}{t % 2}"
            actions.append(Accumulate(t, source, share, first=True))
            actions += _add(t, t - 1)
            back = Channel("direct", GRADIENT, t)
            actions += [Recv(t, back, comes, after), Send(t, back, share, source)]
        if t < size - 1:
            actions.append(Wait(t, channel))
    if gradients:
        actions += [*_add(size, size - 1), Return(size, HOME_SUM)]
    return tuple(actions)


def _add(step: int, shift: int) -> list[Action]:
    """Take in what came back from the position `shift` places on."""
    if shift < 1:
        return []
    return [Wait(step, Channel("direct", GRADIENT, shift)), Add(step, HOME_SUM, f"{PARTIAL}{shift % 2}")]
