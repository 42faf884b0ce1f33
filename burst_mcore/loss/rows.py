"""The elementwise work on a chunk's logits in torch, on any device: rows' statistics, and their gradients.

On CPU it goes by blocks of rows that stay in the cores' caches. The labels' columns are kept apart, as
vectors in at least float32, whatever the dtype of the logits; in their place LOW stands meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from burst_mcore.dtypes import wide
from burst_mcore.loss.terms import ENTROPY, LABEL, LARGEST, LSE, TOTAL, Terms
from burst_mcore.loss.vocabulary import Vocabulary

logger = logging.getLogger("burst_mcore")

BLOCK_BYTES = 2**21
"""Of a block of rows in at least float32, per thread: it stays in the caches, and calls are few."""
LOW = -1e30
"""A logit of no weight; finite, so that nothing times it is NaN."""


def logits_to_gradients(
    logits: Tensor,
    labels: Tensor,
    own: Tensor | None,
    scale: Tensor | None,
    terms: Terms,
    vocabulary: Vocabulary,
    out: Tensor,
    metrics: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Statistics of whole rows, and out_ij = scale_i dl_i/dlogits_ij; the logits are lost.

    Args:
        logits: [tokens, v], this rank's part of the vocabulary, before cap and temperature.
        labels: [tokens], columns of the logits, -1 where the label's column is not here.
        own: [tokens], the labels' logits in at least float32 if they are better than those in `logits`; then
            the labels' columns of `out` are 0.
        scale: [tokens] in at least float32. None: no gradients.
        terms: Of the loss.
        vocabulary: What this rank has of it.
        out: [tokens, v]; may be `logits` itself.
        metrics: Whether the largest logit and the entropy are wanted (zeros else).

    Returns:
        Statistics [5, tokens] over the whole vocabulary, and the labels' columns of the gradient [tokens] (0
        where they are not here), both in at least float32.
    """
    here, y = labels >= 0, labels.clamp(min=0)
    z_label = _taken(logits, here, y) if own is None else own
    z_label = _scaled(z_label.clone(), terms).where(here, LOW)
    work = _Blocks(logits, labels, out, terms, vocabulary.size)
    found = work.statistics(metrics, scale if vocabulary.group is None else None, z_label)
    found = vocabulary.whole(found)
    if scale is None:
        return found, None
    if vocabulary.group is not None:
        work.gradients(found[LSE], scale)
    columns = _columns(z_label, found[LSE], scale, terms, vocabulary.size).where(here, 0.0)
    if own is None and out.shape[1]:
        rows = here.nonzero()[:, 0]
        out[rows, y[rows]] = columns[rows].to(out.dtype)
    return found, columns


def _taken(logits: Tensor, here: Tensor, y: Tensor) -> Tensor:
    full = wide(logits.dtype)
    if logits.shape[1] == 0:
        return logits.new_zeros(len(logits), dtype=full)
    return logits.gather(1, y[:, None])[:, 0].to(full).where(here, 0.0)


def _scaled(x: Tensor, terms: Terms) -> Tensor:
    """Cap and temperature, in place."""
    if terms.softcap is not None:
        x.div_(terms.softcap).tanh_().mul_(terms.softcap)
    return x if terms.temperature == 1.0 else x.div_(terms.temperature)


def _slope(z: Tensor, terms: Terms) -> Tensor:
    """dz/dlogits times the temperature, in place of z: 1 - tanh^2."""
    assert terms.softcap is not None
    return z.mul_(terms.temperature / terms.softcap).square_().neg_().add_(1.0)


def _columns(z_label: Tensor, lse: Tensor, scale: Tensor, terms: Terms, vocabulary: int) -> Tensor:
    p = torch.exp(z_label - lse)
    if terms.z_loss:
        p = p * (1.0 + 2.0 * terms.z_loss * lse)
    smooth = terms.label_smoothing
    found = (p - (1.0 - smooth) - smooth / vocabulary) * (scale / terms.temperature)
    return found if terms.softcap is None else found * _slope(z_label.clone(), terms)


class _Blocks:
    """Goes over the rows of a chunk's logits, block by block."""

    def __init__(self, logits: Tensor, labels: Tensor, out: Tensor, terms: Terms, vocabulary: int) -> None:
        self._logits, self._labels, self._out = logits, labels, out
        self._terms, self._vocabulary = terms, vocabulary
        self._full = wide(logits.dtype)
        self._memory: list[Tensor | None] = [None, None]
        self._rest = torch.empty(len(logits), dtype=self._full, device=logits.device)
        """lse of these columns but for the labels'."""
        if terms.softcap is None and logits.shape[1]:
            rows = (labels >= 0).nonzero()[:, 0]
            logits[rows, labels[rows]] = LOW

    def statistics(self, metrics: bool, scale: Tensor | None, z_label: Tensor) -> Tensor:
        """Statistics [5, tokens] of these columns; with `scale` also the gradients, if these are all."""
        tokens, columns = self._logits.shape
        found = torch.zeros((5, tokens), dtype=self._full, device=self._logits.device)
        here = self._labels >= 0
        found[LABEL] = z_label.where(here, 0.0)
        if columns == 0:
            found[[LSE, LARGEST]] = -torch.inf
            return found
        used_again = metrics or self._terms.softcap is not None  # z, after p is made
        for at in self._blocks():
            z = self._z(at)
            largest = z.amax(1)
            if self._terms.label_smoothing:
                found[TOTAL, at] = self._sum(at) + found[LABEL, at]
            in_place = not used_again and (scale is not None or z.dtype != self._logits.dtype)
            p = torch.softmax(z, 1, out=z if in_place else self._take(1, z))  # one pass, in cache
            rest = largest - p.amax(1).log()
            nothing = largest == -torch.inf  # all of a rank's columns may be so, as padding of a vocabulary
            if bool(nothing.any()):
                p[nothing], rest = 0.0, rest.where(~nothing, -torch.inf)
            self._rest[at] = rest
            found[LSE, at] = lse = torch.logaddexp(rest, z_label[at])
            if metrics:
                found[LARGEST, at] = torch.maximum(largest, z_label[at])
                share, own = torch.exp(rest - lse), z_label[at] - lse
                apart = (z - lse[:, None]).clamp_(min=LOW)  # a logit may be -inf
                found[ENTROPY, at] = -share * torch.linalg.vecdot(p, apart) - own.exp() * own
            if scale is not None:
                self._finish(at, z, p, lse, scale[at])
        return found

    def gradients(self, lse: Tensor, scale: Tensor) -> None:
        """All but the labels' columns of the gradient, from lse over the whole vocabulary."""
        if self._logits.shape[1] == 0:
            return
        for at in self._blocks():
            z = self._z(at)
            to = z if self._terms.softcap is None else self._take(1, z)
            p = torch.softmax(z, 1, out=to)
            nothing = self._rest[at] == -torch.inf
            if bool(nothing.any()):
                p[nothing] = 0.0
            self._finish(at, z, p, lse[at], scale[at])

    def _finish(self, at: slice, z: Tensor, p: Tensor, lse: Tensor, scale: Tensor) -> None:
        """From p, the softmax of a block but for the labels, to its gradient."""
        terms = self._terms
        scale = scale / terms.temperature
        factor = scale * torch.exp(self._rest[at] - lse)
        if terms.z_loss:
            factor = factor * (1.0 + 2.0 * terms.z_loss * lse)
        p.mul_(factor[:, None])
        if terms.label_smoothing:
            p.sub_((scale * (terms.label_smoothing / self._vocabulary))[:, None])
        if terms.softcap is not None:
            p.mul_(_slope(z, terms))
        out = self._out[at]
        if out.data_ptr() != p.data_ptr():
            out.copy_(p)
        if terms.label_smoothing or terms.softcap is not None:
            self._to_labels(out, at, 0.0)

    def _z(self, at: slice) -> Tensor:
        """Logits of a block after cap and temperature, LOW for the label; in place where nothing changes."""
        logits, terms = self._logits[at], self._terms
        if logits.dtype == self._full and terms.softcap is None and terms.temperature == 1.0:
            return logits
        z = _scaled(self._take(0, logits).copy_(logits), terms)
        if terms.softcap is not None:
            self._to_labels(z, at, LOW)
        return z

    def _sum(self, at: slice) -> Tensor:
        """Of z but for the label's."""
        z = self._take(1, self._logits[at]).copy_(self._logits[at])
        z = _scaled(z, self._terms)
        self._to_labels(z, at, 0.0)
        return z.sum(1)

    def _to_labels(self, block: Tensor, at: slice, value: float) -> None:
        rows = (self._labels[at] >= 0).nonzero()[:, 0]
        block[rows, self._labels[at][rows]] = value

    def _take(self, which: int, like: Tensor) -> Tensor:
        memory = self._memory[which]
        if memory is None:
            shape = (min(self._step(), len(self._logits)), self._logits.shape[1])
            memory = self._memory[which] = torch.empty(shape, dtype=self._full, device=like.device)
        return memory[: len(like)]

    def _step(self) -> int:
        if self._logits.device.type != "cpu":
            return max(1, len(self._logits))
        row = self._logits.shape[1] * self._full.itemsize
        return max(1, torch.get_num_threads() * BLOCK_BYTES // row)

    def _blocks(self) -> Iterator[slice]:
        tokens, step = len(self._logits), self._step()
        return (slice(first, min(first + step, tokens)) for first in range(0, tokens, step))


def rows_for(weight: Tensor) -> Callable[..., Any]:
    """`logits_to_gradients`, or what does the same faster for logits of this weight."""
    if weight.is_cuda and weight.dtype != torch.float64:
        return _triton() or logits_to_gradients
    return logits_to_gradients


@lru_cache
def _triton() -> Callable[..., Any] | None:
    try:
        import burst_mcore.loss.rows_triton as rows_triton
    except ImportError as error:
        logger.warning("no Triton (%s): the elementwise work of the loss takes several passes", error)
        return None
    return rows_triton.logits_to_gradients
