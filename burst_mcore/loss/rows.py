"""Statistics and gradients of rows of logits, elementwise, in plain torch on any device.

A CPU processes blocks of rows that fit the cores' caches. The labels' columns are separate vectors in at
least float32, whatever the dtype of the logits, which hold LOW there meanwhile.
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
"""Size of a block of rows in at least float32, per thread: small enough for caches, and few blocks."""
LOW = -1e30
"""A logit with zero probability; finite, so that 0 * LOW is not NaN."""


def logits_to_gradients(
    logits: Tensor,
    labels: Tensor,
    label_logits: Tensor | None,
    scale: Tensor | None,
    terms: Terms,
    vocabulary: Vocabulary,
    out: Tensor,
    metrics: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return the statistics of whole rows, and set out_ij = scale_i dl_i/dlogits_ij; destroys the logits.

    With z the logits after cap and temperature T, p = softmax(z), e the smoothing, V the vocabulary:
    dl_i/dz_ij = p_ij (1 + 2 z_loss lse_i) - (1 - e) [j = y_i] - e / V, and dz/dlogits = (1 - tanh^2) / T.

    Args:
        logits: [tokens, v], this rank's part of the vocabulary, before cap and temperature.
        labels: [tokens], columns of the logits, -1 for a column of another rank.
        label_logits: [tokens], in at least float32 if `separates_labels`: `out` has 0 in the labels' columns.
        scale: [tokens] in at least float32. None: no gradients.
        out: [tokens, v]; may be `logits` itself.
        metrics: whether to compute the maximum and the entropy, else 0.

    Returns:
        Statistics [5, tokens] over the whole vocabulary, and the labels' columns of the gradient [tokens] (0
        for another rank's columns), both in at least float32.
    """
    if logits.shape[1] == 0:  # a small vocabulary has fewer parts than ranks
        table = torch.zeros((5, len(logits)), dtype=wide(logits.dtype), device=logits.device)
        table[[LSE, LARGEST]] = -torch.inf
        return vocabulary.whole(table), None if scale is None else torch.zeros_like(scale)
    is_local, y = labels >= 0, labels.clamp(min=0)
    z_label = logits.gather(1, y[:, None])[:, 0] if label_logits is None else label_logits.clone()
    z_label = scaled(z_label.to(wide(logits.dtype)), terms).where(is_local, LOW)
    work = _Blocks(logits, labels, out, terms, vocabulary.size)
    statistics = work.statistics(metrics, scale if vocabulary.group is None else None, z_label)
    statistics = vocabulary.whole(statistics)
    if scale is None:
        return statistics, None
    if vocabulary.group is not None:
        work.gradients(statistics[LSE], scale)
    columns = _columns(z_label, statistics[LSE], scale, terms, vocabulary.size).where(is_local, 0.0)
    if label_logits is None:
        rows = is_local.nonzero()[:, 0]
        out[rows, y[rows]] = columns[rows].to(out.dtype)
    return statistics, columns


def scaled(x: Tensor, terms: Terms) -> Tensor:
    """Apply cap and temperature, in place."""
    if terms.softcap is not None:
        x.div_(terms.softcap).tanh_().mul_(terms.softcap)
    return x if terms.temperature == 1.0 else x.div_(terms.temperature)


def slope(z: Tensor, terms: Terms) -> Tensor:
    """Set z to T dz/dlogits = 1 - tanh^2(logits / softcap) = 1 - (z T / softcap)^2."""
    assert terms.softcap is not None
    return z.mul_(terms.temperature / terms.softcap).square_().neg_().add_(1.0)


def _columns(z_label: Tensor, lse: Tensor, scale: Tensor, terms: Terms, vocabulary: int) -> Tensor:
    p = torch.exp(z_label - lse)
    if terms.z_loss:
        p = p * (1.0 + 2.0 * terms.z_loss * lse)
    smooth = terms.label_smoothing
    gradient = (p - (1.0 - smooth) - smooth / vocabulary) * (scale / terms.temperature)
    return gradient if terms.softcap is None else gradient * slope(z_label.clone(), terms)


class _Blocks:
    """The rows of a chunk's logits, in blocks, with the memory that a block needs."""

    def __init__(self, logits: Tensor, labels: Tensor, out: Tensor, terms: Terms, vocabulary: int) -> None:
        self._logits, self._labels, self._out = logits, labels, out
        self._terms, self._vocabulary = terms, vocabulary
        self._full = wide(logits.dtype)
        self._memory: list[Tensor | None] = [None, None]
        self._rest = torch.empty(len(logits), dtype=self._full, device=logits.device)
        """[tokens]: logsumexp of these columns without the labels'."""
        if terms.softcap is None:
            rows = (labels >= 0).nonzero()[:, 0]
            logits[rows, labels[rows]] = LOW

    def statistics(self, metrics: bool, scale: Tensor | None, z_label: Tensor) -> Tensor:
        """Return the statistics [5, tokens] of these columns; with `scale`, write the gradients, too.

        With `scale` the columns must be the whole vocabulary.
        """
        table = torch.zeros((5, len(self._logits)), dtype=self._full, device=self._logits.device)
        is_local = self._labels >= 0
        table[LABEL] = z_label.where(is_local, 0.0)
        used_again = metrics or self._terms.softcap is not None  # z is read after p
        for rows in self._blocks():
            z = self._z(rows)
            largest = z.amax(1)
            if self._terms.label_smoothing:
                self._to_labels(z, rows, 0.0)
                table[TOTAL, rows] = z.sum(1) + table[LABEL, rows]
                self._to_labels(z, rows, LOW)
            in_place = not used_again and (scale is not None or z.dtype != self._logits.dtype)
            p = torch.softmax(z, 1, out=z if in_place else self._take(1, z))  # one pass, in cache
            rest = largest - p.amax(1).log()
            nothing = largest == -torch.inf  # padding of a vocabulary may fill all of a rank's columns
            if bool(nothing.any()):
                p[nothing], rest = 0.0, rest.where(~nothing, -torch.inf)
            self._rest[rows] = rest
            table[LSE, rows] = lse = torch.logaddexp(rest, z_label[rows])
            if metrics:
                table[LARGEST, rows] = torch.maximum(largest, z_label[rows])
                share, log_py = torch.exp(rest - lse), z_label[rows] - lse
                log_p = (z - lse[:, None]).clamp_(min=LOW)  # a logit may be -inf
                table[ENTROPY, rows] = -share * torch.linalg.vecdot(p, log_p) - log_py.exp() * log_py
            if scale is not None:
                self._finish(rows, z, p, lse, scale[rows])
        return table

    def gradients(self, lse: Tensor, scale: Tensor) -> None:
        """Write all but the labels' columns of the gradient, from lse over the whole vocabulary."""
        for rows in self._blocks():
            z = self._z(rows)
            to = z if self._terms.softcap is None else self._take(1, z)
            p = torch.softmax(z, 1, out=to)
            nothing = self._rest[rows] == -torch.inf
            if bool(nothing.any()):
                p[nothing] = 0.0
            self._finish(rows, z, p, lse[rows], scale[rows])

    def _finish(self, rows: slice, z: Tensor, p: Tensor, lse: Tensor, scale: Tensor) -> None:
        """Set p, the softmax of a block without the labels, to the gradient of the block."""
        terms = self._terms
        scale = scale / terms.temperature
        factor = scale * torch.exp(self._rest[rows] - lse)
        if terms.z_loss:
            factor = factor * (1.0 + 2.0 * terms.z_loss * lse)
        p.mul_(factor[:, None])
        if terms.label_smoothing:
            p.sub_((scale * (terms.label_smoothing / self._vocabulary))[:, None])
        if terms.softcap is not None:
            p.mul_(slope(z, terms))
        out = self._out[rows]
        if out.data_ptr() != p.data_ptr():
            out.copy_(p)
        if terms.label_smoothing or terms.softcap is not None:
            self._to_labels(out, rows, 0.0)

    def _z(self, rows: slice) -> Tensor:
        """Return z of a block, LOW for the label; without a copy if there is no cap, temperature or cast."""
        logits, terms = self._logits[rows], self._terms
        if logits.dtype == self._full and terms.softcap is None and terms.temperature == 1.0:
            return logits
        z = scaled(self._take(0, logits).copy_(logits), terms)
        if terms.softcap is not None:
            self._to_labels(z, rows, LOW)
        return z

    def _to_labels(self, block: Tensor, rows: slice, value: float) -> None:
        places = (self._labels[rows] >= 0).nonzero()[:, 0]
        block[places, self._labels[rows][places]] = value

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
    """Return `logits_to_gradients` for logits of this weight, by Triton on CUDA."""
    kernel = _triton() if weight.is_cuda and weight.dtype != torch.float64 else None
    return kernel or logits_to_gradients


@lru_cache
def _triton() -> Callable[..., Any] | None:
    try:
        import burst_mcore.loss.rows_triton as rows_triton
    except ImportError as error:
        logger.warning("no Triton (%s): the elementwise work of the loss takes several passes", error)
        return None
    return rows_triton.logits_to_gradients
