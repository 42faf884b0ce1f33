"""Batches: what a rank gets of a sequence. Pure functions."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from live import LiveBytes

from burst_mcore.layout import unshard
from burst_mcore.transformers.data.batches import collated, documents, prepared, sharded
from burst_mcore.transformers.data.loader import ShardedLoader
from burst_mcore.transformers.errors import UnsupportedError


def _ids(*rows):
    return torch.tensor(rows)


@given(
    n=st.integers(1, 40),
    size=st.integers(1, 5),
    layout=st.sampled_from(["zigzag", "striped", "contiguous", "stacked-zigzag:2"]),
    rows=st.integers(1, 3),
)
def test_shards_are_the_sequence_and_labels_were_shifted_before(n, size, layout, rows):
    from burst_mcore.layout import Layout

    ids = torch.arange(1, rows * n + 1).view(rows, n)
    whole = prepared({"input_ids": ids}, multiple=Layout.of(layout).divisor(size))
    parts = [sharded(whole, rank=r, size=size, layout=layout) for r in range(size)]
    together = {name: unshard([part[name] for part in parts], 1, layout=layout) for name in whole}
    assert torch.equal(together["input_ids"][:, :n], ids)
    assert torch.equal(together["position_ids"][:, :n], torch.arange(n).expand(rows, -1))
    assert torch.equal(together["shift_labels"][:, : n - 1], ids[:, 1:])
    assert (together["shift_labels"][:, n - 1 :] == -100).all()
    assert len({part["input_ids"].shape for part in parts}) == 1


@pytest.mark.parametrize("kind", ["whole", "padded", "packed", "packed by positions"])
def test_a_batch_of_a_million_tokens_takes_bytes_by_the_token(kind):
    n = 2**20
    sample = {"input_ids": torch.ones(n, dtype=torch.int64), "labels": torch.ones(n, dtype=torch.int64)}
    if kind == "padded":
        sample["attention_mask"] = (torch.arange(n) < n - 1000).long()
    if kind == "packed":
        sample["cu_seqlens"] = torch.arange(0, n + 1, 2**10)
    if kind == "packed by positions":
        sample["position_ids"] = torch.arange(n) % 2**10
    with LiveBytes() as made:
        whole = prepared(collated([sample]), multiple=16)
        part = sharded(whole, rank=3, size=8, layout="zigzag")
        assert len(documents(whole["position_ids"])[0]) == (2**10 + 1 if "packed" in kind else 2)
    assert part["input_ids"].shape == (1, n // 8)
    assert 24 * n <= made.peak <= 192 * n


def test_no_document_predicts_the_first_token_of_the_next():
    whole = prepared({"input_ids": _ids([5, 6, 7, 8, 9]), "cu_seqlens": torch.tensor([0, 2, 5])}, multiple=4)
    assert whole["shift_labels"].tolist() == [[6, -100, 8, 9, -100, -100, -100, -100]]
    assert whole["position_ids"].tolist() == [[0, 1, 0, 1, 2, 3, 4, 5]]
    assert documents(whole["position_ids"]) == ((0, 2, 8),)


def test_padding_that_would_have_too_high_a_position_starts_again():
    whole = prepared({"input_ids": _ids([5, 6, 7])}, multiple=4, max_positions=3)
    assert whole["position_ids"].tolist() == [[0, 1, 2, 0]]


def test_given_labels_positions_and_others_are_kept_and_sharded():
    batch = {
        "input_ids": _ids([1, 2, 3, 4]),
        "labels": _ids([-100, -100, 3, 4]),
        "weights": torch.rand(1, 4, 2),
        "name": "x",
        "attention_mask": _ids([1, 1, 1, 1]),
    }
    part = sharded(prepared(batch, multiple=4), rank=1, size=2, layout="zigzag")
    assert part["input_ids"].tolist() == [[2, 3]] and part["shift_labels"].tolist() == [[3, 4]]
    assert torch.equal(part["weights"], batch["weights"][:, 1:3]) and part["name"] == "x"
    assert "attention_mask" not in part and "labels" not in part


def test_samples_of_any_length_are_padded_on_the_right():
    batch = collated([{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}, {"input_ids": [4], "labels": [4]}])
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 0, 0]]
    assert batch["labels"].tolist() == [[1, 2, 3], [4, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert collated([torch.tensor([1, 2])])["input_ids"].tolist() == [[1, 2]]


@pytest.mark.parametrize(
    ("mask", "positions", "want"),
    [
        ([1, 1, 1, 0, 0], [0, 1, 2, 2, 2], [0, 1, 2, 3, 4]),  # behind: they go on
        ([0, 0, 1, 1, 1], [1, 1, 0, 1, 2], [0, 1, 0, 1, 2]),  # as transformers numbers padding in front
        ([0, 1, 1, 1, 0], [0, 0, 1, 0, 7], [0, 0, 1, 0, 1]),  # and two documents
        ([0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 1, 2, 3, 4]),
    ],
)
def test_padding_beside_given_positions(mask, positions, want):
    batch = {
        "input_ids": _ids([5, 6, 7, 8, 9]),
        "attention_mask": _ids(mask),
        "position_ids": _ids(positions),
    }
    whole = prepared(batch, multiple=1)
    assert whole["position_ids"].tolist() == [want]
    documents(whole["position_ids"])  # are legal
    labels = whole["shift_labels"][0]
    assert all(label == -100 for label, real in zip(labels, mask[1:], strict=False) if not real)


PADDED_IN_FRONT = {"input_ids": _ids([1, 2, 3]), "attention_mask": _ids([0, 1, 1])}


@pytest.mark.parametrize(
    ("batch", "name"),
    [
        ({"input_ids": torch.ones(4, dtype=torch.int64)}, "batch"),
        ({"input_ids": torch.ones(1, 4)}, "batch"),
        ({"input_ids": torch.ones(0, 4, dtype=torch.int64)}, "batch"),
        ({"input_ids": _ids([1, 2, 3]), "labels": _ids([1, 2])}, "labels"),
        ({"input_ids": _ids([1, 2, 3]), "shift_labels": _ids([1, 2])}, "labels"),
        ({"input_ids": _ids([1, 2, 3]), "labels": torch.rand(1, 3)}, "labels"),
        ({"input_ids": _ids([1, 2, 3]), "cu_seqlens": torch.tensor([0.0, 1.5, 3.0])}, "cu_seqlens"),
        ({**PADDED_IN_FRONT, "position_ids": _ids([0, 1, 2])}, "position_ids"),
        ({"input_ids": _ids([1, 2, 3]), "attention_mask": _ids([1, 1, 2])}, "attention_mask"),
        ({"input_ids": _ids([1, 2, 3]), "attention_mask": _ids([1, 0, 1])}, "attention_mask"),
        ({"input_ids": _ids([1, 2, 3]), "position_ids": _ids([0, 1])}, "position_ids"),
        ({"input_ids": _ids([1, 2], [3, 4]), "cu_seqlens": torch.tensor([0, 2])}, "cu_seqlens"),
        ({"input_ids": _ids([1, 2, 3]), "cu_seqlens": torch.tensor([0, 5])}, "cu_seqlens"),
        ({"input_ids": _ids([1, 2, 3]), "of_a_picture": torch.ones(1, 4)}, "batch"),  # as if padded
    ],
)
def test_what_is_refused_of_a_batch(batch, name):
    with pytest.raises(UnsupportedError) as error:
        prepared(batch, multiple=4)
    assert error.value.name == name


def test_lists_are_read_as_tensors_are():
    lists = {"input_ids": [[5, 6, 7, 8, 9]], "labels": [[-100, 6, 7, 8, 9]]}
    lists |= {"attention_mask": [[1, 1, 1, 1, 0]], "position_ids": [[0, 1, 0, 1, 2]]}
    whole = prepared(lists, multiple=2)
    assert whole["shift_labels"].tolist() == [[6, -100, 8, -100, -100, -100]]
    assert whole["position_ids"].tolist() == [[0, 1, 0, 1, 2, 3]]
    with pytest.raises(
        UnsupportedError, match="labels must be a tensor, or lists of numbers: expected sequence"
    ):
        prepared({**lists, "labels": [[1], [2, 3]]}, multiple=2)


def test_columns_that_are_no_numbers_are_left_out_and_named(caplog):
    rows = [{"text": "a b", "input_ids": [3, 4 + n][: n + 1], "meta": {"n": n}, "none": None} for n in (0, 1)]
    with caplog.at_level("WARNING", logger="burst_mcore"):
        batch = collated(rows)
    assert batch.keys() == {"input_ids", "attention_mask"} and batch["input_ids"].tolist() == [[3, 0], [3, 5]]
    assert [r.message for r in caplog.records] == [
        "columns that are no numbers are left out of batches: text, meta, none"
    ]
    with pytest.raises(UnsupportedError, match="no input_ids of numbers, but columns text, labels"):
        collated([{"text": "a", "labels": [1]}])
    with pytest.raises(
        UnsupportedError, match="some samples of a batch have numbers as labels, some have not"
    ):
        collated([{"input_ids": [1], "labels": [1]}, {"input_ids": [1], "labels": None}])


def test_positions_that_were_sharded_otherwise_are_found():
    with pytest.raises(UnsupportedError, match="5 at token 1 is followed by 2"):
        documents(_ids([4, 5, 2, 3]))
    assert documents(_ids([4, 5, 6, 0, 1])) == ((0, 3, 5),)


def test_a_loader_of_one_rank_goes_on_for_epochs():
    loader = ShardedLoader([{"input_ids": _ids([1, 2])}, _ids([3, 4])], group=None)
    for _ in range(2):
        assert [part["input_ids"].tolist() for part in loader] == [[[1, 2]], [[3, 4]]]
    with pytest.raises(UnsupportedError, match="a dict with input_ids"):
        list(ShardedLoader([3], group=None))
