"""From batches of whole sequences to the part of a rank: pure functions.

A batch is a dict of tensors [rows, tokens, ...]; what has no such shape goes to every rank as it is. Labels
are shifted before the sequence is sharded, and one index selects tokens, positions and labels.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from burst_mcore.agreement.agreement import digest_of
from burst_mcore.layout import Layout, shard
from burst_mcore.mask import Mask
from burst_mcore.rollouts.columns import IGNORED, TREE, WEIGHTS, Columns
from burst_mcore.rollouts.trees import depths, nodes_of, padded
from burst_mcore.transformers.errors import UnsupportedError, refuse
from burst_mcore.words import digest

logger = logging.getLogger("burst_mcore")

CUMULATED = ("cu_seqlens", "cu_seq_lens_q")
"""Names in a batch of the table of its documents (cu_seqlens); Hugging Face has one for keys too."""
SOURCES = ("labels", "attention_mask", *CUMULATED)
"""Columns of which `prepared` makes positions and shifted labels."""
READ = ("input_ids", "position_ids", "shift_labels", TREE, WEIGHTS, *SOURCES)
"""Columns that `prepared` reads: tensors, or lists of numbers."""
DROPPED = (*SOURCES, "seq_idx", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Columns that no rank gets."""
OF_TOWERS = ("pixel_values", "pixel_values_videos", "image_patches", "input_features")
"""Columns of which the towers of a model make features."""


def collated(samples: Sequence[Any]) -> dict[str, Any]:
    """Return samples of any lengths as one batch, padded on the right by 0, on which no result depends.

    Args:
        samples: dicts of sequences of numbers (lists, arrays, tensors), or the token ids alone. Columns that
            are no numbers (text, None, dicts) are left out, as the Trainer leaves them out; a warning names
            them.

    Raises:
        UnsupportedError: a sample has no input_ids, or other columns than the first.
    """
    rows = [_numbers(sample if isinstance(sample, Mapping) else {"input_ids": sample}) for sample in samples]
    lengths = [len(row["input_ids"]) for row in rows]
    longest = max(lengths)
    fill = {"labels": IGNORED, "shift_labels": IGNORED}
    batch: dict[str, Any] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        if not all(name in row for row in rows):
            raise UnsupportedError("batch", f"some samples of a batch have numbers as {name}, some have not")
        if name in CUMULATED and len(rows) > 1:
            raise UnsupportedError("packed rows", f"{name} is of one row: {len(rows)} rows need position_ids")
        values = [
            pad(row[name], (0, longest - n), value=fill.get(name, 0))
            if row[name].dim() == 1 and len(row[name]) == n and name not in CUMULATED
            else row[name]
            for row, n in zip(rows, lengths, strict=True)
        ]
        batch[name] = values[0] if name in CUMULATED else torch.stack(values)
    if "attention_mask" not in batch and min(lengths) < longest:
        batch["attention_mask"] = (torch.arange(longest) < torch.tensor(lengths)[:, None]).long()
    return batch


def _numbers(row: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the columns of a sample that are numbers, as tensors."""
    columns, left_out = {}, []
    for name, value in row.items():
        try:
            columns[name] = torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError):
            left_out.append(name)
    if "input_ids" not in columns:
        raise UnsupportedError("batch", f"a sample has no input_ids of numbers, but columns {', '.join(row)}")
    if left_out:
        _warn_of_left_out(tuple(left_out))
    return columns


@lru_cache(maxsize=64)  # once for each set of columns
def _warn_of_left_out(names: tuple[str, ...]) -> None:
    logger.warning("columns that are no numbers are left out of batches: %s", ", ".join(names))


def prepared(
    batch: Mapping[str, Any], *, multiple: int, max_positions: int | None = None, types: str | None = None
) -> dict[str, Any]:
    """Return the whole sequence to be sharded: input_ids, position_ids, shift_labels, and all other columns.

    Documents are what `cu_seqlens` says (one row), or begin where given position_ids restart; padding in
    front of tokens (attention_mask 0) is one of its own. The first token of a document is nobody's label.

    Args:
        batch: input_ids [rows, tokens], or inputs_embeds [rows, tokens, hidden]; labels as Hugging Face has
            them (not shifted; without, the tokens themselves, of embeddings none), or shift_labels.
        multiple: of which the number of tokens is made one, by padding at the end: the layout's divisor.
        max_positions: no position may be as high; padding that would go there starts again from 0.
        types: the column of which the model makes its masks. In padding it is -1: no type, which sees no
            later token, and is seen by no earlier one.

    Raises:
        UnsupportedError: shapes that do not fit, or a mask that is more than padding.
    """
    columns = ((name, x) for name, x in batch.items() if x is not None or name not in READ)
    batch = {name: _numbers_of(name, x) if name in READ else x for name, x in columns}
    ids, embeds = batch.get("input_ids"), batch.get("inputs_embeds")
    if ids is None and isinstance(embeds, Tensor) and embeds.dim() == 3:
        ids = torch.full(embeds.shape[:2], IGNORED)
    if not isinstance(ids, Tensor) or ids.dim() != 2 or not ids.numel() or ids.is_floating_point():
        value = f"{tuple(ids.shape)} {ids.dtype}" if isinstance(ids, Tensor) else repr(ids)
        text = f"input_ids must be a tensor of integers [rows, tokens], got {value}"
        raise UnsupportedError("batch", f"{text}, or give inputs_embeds [rows, tokens, hidden]")
    for name in ("position_ids", "labels", "shift_labels", WEIGHTS):
        column, kind = batch.get(name, ids), "" if name == WEIGHTS else "whole "
        if column.shape != ids.shape or (kind and column.is_floating_point()):
            value = f"{tuple(ids.shape)} as input_ids are, got {tuple(column.shape)} {column.dtype}"
            raise UnsupportedError(name.removeprefix("shift_"), f"{name} must be {kind}numbers, {value}")
    real = _real(batch.get("attention_mask"), ids)
    positions = _positions(batch, ids, real)
    shift_labels = batch.get("shift_labels")
    if shift_labels is None:
        labels = batch.get("labels", ids)
        _refuse_shifted(labels, ids)
        labels = labels.masked_fill(~real | starts(positions), IGNORED)
        shift_labels = pad(labels, (0, 1), value=IGNORED)[:, 1:]
    n = ids.shape[1]
    more = -n % multiple
    result = {
        name: pad(x, (0,) * (2 * x.dim() - 3) + (more,)) if is_per_token(x, n) else x
        for name, x in batch.items()
        if name not in ("position_ids", "shift_labels", *DROPPED)
    }
    for name in (x for x in result if more and is_per_token(batch[x], n + more)):  # would be sharded as it is
        raise UnsupportedError("batch", f"{name} has {n + more} entries a row, as if padded: give it {n}")
    if TREE in result:
        result[TREE] = padded(result[TREE], more)
    if types in result and is_per_token(batch[types], n):
        result[types] = pad(batch[types].masked_fill(~real, -1), (0, more), value=-1)
    beyond = positions[:, -1:] + torch.arange(1, more + 1)
    if more and (TREE in result or (max_positions is not None and int(beyond.max()) >= max_positions)):
        beyond = torch.arange(more).expand(len(ids), -1)
    result["position_ids"] = torch.cat([positions, beyond], 1)
    result["shift_labels"] = pad(shift_labels, (0, more), value=IGNORED)
    return result


def sharded(batch: Mapping[str, Any], *, rank: int, size: int, layout: Layout | str) -> dict[str, Any]:
    """Return a rank's part of a prepared batch: every [rows, tokens, ...] by the same index."""
    n = batch["position_ids"].shape[1]
    return {
        name: shard(x, 1, rank=rank, size=size, layout=layout) if is_per_token(x, n) else x
        for name, x in batch.items()
    }


def of_tokens(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of tokens of a whole batch: all others are for the code of a model with towers.

    Positions of several dims are for that, too; of [4, rows, tokens] the first are those of text.
    """
    ids = batch.get("input_ids", batch.get("inputs_embeds"))
    shape = getattr(ids, "shape", ())[:2]
    columns = {
        name: x
        for name, x in batch.items()
        if name in (*READ, "inputs_embeds", "logits_to_keep")
        or (name not in OF_TOWERS and not isinstance(x, Tensor))
        or (isinstance(x, Tensor) and (not x.dim() or (x.shape == shape and not x.is_floating_point())))
    }
    positions = batch.get("position_ids")
    if isinstance(positions, Tensor) and positions.dim() == 3:
        columns["position_ids"] = positions[0] if len(positions) > 3 else None
    return columns


def digest_of_batch(batch: Mapping[str, Any]) -> int:
    """Return a number, not negative, by which ranks compare the batches that they shard."""
    return digest_of(*((name, digest(x.cpu())) for name, x in batch.items() if isinstance(x, Tensor)))


def is_per_token(x: Any, n: int) -> bool:
    """Return whether a value of a batch of n tokens has one entry for each of them."""
    return isinstance(x, Tensor) and x.dim() >= 2 and x.shape[1] == n


def starts(position_ids: Tensor) -> Tensor:
    """Bool [rows, tokens]: where documents begin, which is where positions do not go on by one."""
    first = torch.ones_like(position_ids[:, :1], dtype=torch.bool)
    return torch.cat([first, position_ids.diff(dim=1) != 1], 1)


def documents(position_ids: Tensor) -> tuple[tuple[int, ...], ...]:
    """cu_seqlens of each row of whole-sequence positions [rows, tokens].

    Raises:
        UnsupportedError: a document after the first of a row does not begin at position 0.
    """
    ends = []
    for row, begins in zip(position_ids, starts(position_ids), strict=True):
        at = begins.nonzero().flatten()
        jumps = at[1:][row[at[1:]] != 0].tolist()
        if jumps:
            before, position = row[jumps[0] - 1 : jumps[0] + 1].tolist()
            jump = f"{before} at token {jumps[0] - 1} is followed by {position}"
            text = f"they must go on by one, or start again at 0; of the whole sequence {jump}"
            raise UnsupportedError("position_ids", f"{text}. Was the batch sharded by another layout?")
        ends.append((*at.tolist(), len(row)))
    return tuple(ends)


def _numbers_of(name: str, column: Any) -> Tensor:
    try:
        return torch.as_tensor(column)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UnsupportedError("batch", f"{name} must be a tensor, or lists of numbers: {error}") from None


def why_not_its_row(batch: Mapping[str, Any], real: Tensor) -> str | None:
    """Return why a whole batch does not go with its tree. real: whether tokens are no padding, as rows."""
    try:
        Mask.tree(*nodes_of(batch[TREE])).check(real.shape[1])
    except ValueError as error:
        return str(error)
    if len(real) != 1:
        return f"a tree is of one packed row, the batch has {len(real)}: fold all groups into one"
    if not bool(real.all()) or any(batch.get(name) is not None for name in CUMULATED):
        return "a row with a tree has no padding and no cu_seqlens: its roots are its documents"
    if batch.get("shift_labels") is None:
        return "it needs shift_labels, as fold makes them: behind a token may stand another branch"
    positions = batch.get("position_ids")
    return None if positions is None else Columns(batch[TREE]).why_not_its_depths(positions.cpu())


def _refuse_shifted(labels: Tensor, ids: Tensor) -> None:
    """Raise UnsupportedError for labels that are each the next token, and not the token of their place."""
    valid = labels[:, :-1] != IGNORED
    of_next, of_place = (labels[:, :-1] == x for x in (ids[:, 1:], ids[:, :-1]))
    if bool(valid.any()) and bool(of_next[valid].all()) and not bool(of_place[valid].all()):
        raise UnsupportedError("labels", "they are shifted already, each the next token: give shift_labels")


def _real(attention_mask: Tensor | None, ids: Tensor) -> Tensor:
    if attention_mask is None:
        return torch.ones_like(ids, dtype=torch.bool)
    if attention_mask.shape != ids.shape or not bool(((attention_mask == 0) | (attention_mask == 1)).all()):
        value = f"{tuple(attention_mask.shape)} {attention_mask.dtype}"
        text = f"it may say which tokens are padding: 0 or 1, {tuple(ids.shape)}, got {value}"
        raise UnsupportedError("attention_mask", f"{text}. Documents are told by position_ids or cu_seqlens")
    return attention_mask.bool()


def _positions(batch: Mapping[str, Any], ids: Tensor, real: Tensor) -> Tensor:
    rows, n = ids.shape
    if batch.get(TREE) is not None:
        refuse("tree", why_not_its_row(batch, real))
        return depths(batch[TREE])[None]
    ends = next((batch[name] for name in CUMULATED if name in batch), None)
    position_ids: Tensor | None = batch.get("position_ids")
    after_padding = real & ~pad(real, (1, 0), value=True)[:, :-1]
    if bool((after_padding & (real.cumsum(1) > 1)).any()):
        raise UnsupportedError("attention_mask", "padding between tokens of a row is not supported")
    at = torch.arange(n)
    begins = torch.zeros(rows, n, dtype=torch.bool)
    begins[:, 0] = True
    if ends is not None:
        are_integers, ends = not ends.is_floating_point(), ends.flatten().tolist()
        if not are_integers or rows != 1 or not ends or ends[0] != 0 or ends != sorted(ends) or ends[-1] > n:
            text = f"whole numbers must ascend from 0 to at most {n}, for one row; got {ends[:8]}"
            raise UnsupportedError("cu_seqlens", text)
        begins[0, [end for end in ends if end < n]] = True
    elif position_ids is not None:
        return _beside_padding(position_ids.long(), real)
    begins |= after_padding  # padding in front would be seen by the tokens behind it: a document of its own
    start: Tensor = torch.where(begins, at, 0).cummax(1).values
    return at - start


def _beside_padding(positions: Tensor, real: Tensor) -> Tensor:
    """Given positions; padding in front becomes a document of its own, padding behind goes on."""
    at = torch.arange(real.shape[1]).expand_as(positions)
    first = real.long().argmax(1, keepdim=True)
    last = real.shape[1] - 1 - real.flip(1).long().argmax(1, keepdim=True)
    begin = positions.gather(1, first)
    if bool(((first > 0) & (begin != 0)).any()):
        text = "behind padding in front they must begin at 0: number the tokens from 0, or leave them out"
        raise UnsupportedError("position_ids", text)
    continuation = positions.gather(1, last) + at - last
    numbers = torch.where(at < first, at, torch.where(at > last, continuation, positions))
    return torch.where(real.any(1, keepdim=True), numbers, at)
