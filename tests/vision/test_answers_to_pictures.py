"""Evaluation, generation, costs and bad input of vision-language models over a CP group."""

import copy

import pytest
import torch
import torch.distributed as dist
from equal import ROWS, TOKENS, batch_for
from families import PLACE, model_of
from ranks import processes
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from burst_mcore.torch import UnsupportedError, parallelize
from burst_mcore.transformers.models.strategies import LoadedBatch
from burst_mcore.transformers.models.towers import Images
from burst_mcore.transformers.prepare import sequence_of

FAMILIES = ("qwen3_vl", "gemma3", "llava")


def _answers(rank, size):
    """Errors of logits of an evaluation, and whether tokens are those of one process."""
    found = {}
    for name in FAMILIES:
        model = model_of(name).eval()
        batch, _ = batch_for(model, "plain")
        inputs = {key: x for key, x in batch.items() if key != "labels"}
        other = copy.deepcopy(model)
        parallelize(other, dist.group.WORLD, reduction="sum", loss="model")
        with torch.no_grad():
            want, got = (each(**batch, use_cache=False) for each in (model, other))
            last = other(**inputs, logits_to_keep=3, use_cache=False).logits
        how = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": 79}
        tokens = [each.generate(**inputs, **how) for each in (model, other)]
        found[name] = (
            abs(float(got.loss / want.loss) - 1),
            float((got.logits - want.logits).abs().max() / want.logits.abs().max()),
            float((last - want.logits[:, -3:]).abs().max() / want.logits.abs().max()),
            torch.equal(*tokens) and tokens[0].shape[1] == TOKENS + 5,
        )
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_evaluation_and_generate_are_those_of_one_process(size):
    for found in processes(size, _answers):
        for name, (loss, logits, last, alike) in found.items():
            assert loss < 1e-5 and logits < 1e-5 and last < 1e-5 and alike, (name, loss, logits, last)


class _Moved(TorchDispatchMode):
    """Counts the bytes of floating-point numbers that come in, by kind of collective, DTensor's included."""

    def __init__(self):
        super().__init__()
        self.bytes = {"all_gather": 0, "reduce_scatter": 0}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # its collectives come here again
        out = func(*args, **(kwargs or {}))
        name = str(func).replace("allgather", "all_gather")
        tensors = [[x for x in tree_leaves(each) if isinstance(x, torch.Tensor)] for each in (*args, out)]
        sizes = [sum(x.nbytes for x in each if x.is_floating_point()) for each in tensors]
        for kind in self.bytes:
            if kind in name and any(sizes):
                self.bytes[kind] += max(sizes) - min(filter(None, sizes))
        return out


def _costs(rank, size, towers):
    """(patches that this rank's tower saw, bytes of features that came in, bytes of their gradients)."""
    model = model_of("qwen3_vl")
    batch, _ = batch_for(model, "plain")
    parallelize(model, dist.group.WORLD, reduction="mean", towers=towers)
    patches = []
    model.model.visual.register_forward_pre_hook(lambda _, args: patches.append(len(args[0])))
    with _Moved() as moved:
        model(**batch).loss.backward()
    return sum(patches), moved.bytes


def test_ranks_share_patches_and_gather_features_once():
    """Of 16 + 8 + 24 patches each rank makes those of whole images; features are 4 + 2 + 6 rows."""
    found = processes(2, _costs, "shared")
    assert [patches for patches, _ in found] == [24, 24]
    rows = 3 * 6 * 32 * 4  # pooled and two layers, of 6 features of 32 float32 from the other rank
    assert all(moved == {"all_gather": rows, "reduce_scatter": rows} for _, moved in found)
    whole = processes(2, _costs, "whole")
    assert whole == [(48, {"all_gather": 0, "reduce_scatter": 0})] * 2


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("patches", [[7], [5, 5, 5, 5], [100, 1, 1, 1], [1, 2, 3, 4, 50, 6, 7]])
def test_whole_images_go_to_ranks_in_order(patches, size):
    ranks = Images({}, patches).ranks(size)
    assert {*ranks} <= {*range(size)} and ranks == sorted(ranks) and len(ranks) == len(patches)
    most = max(sum(x for x, owner in zip(patches, ranks, strict=True) if owner == r) for r in range(size))
    assert most <= sum(patches) / size + max(patches)


def _alone(rank, size):
    """The worst error of logits where each rank evaluates a batch of its own, as Accelerate may."""
    model = model_of("qwen3_vl").eval()
    batch, _ = batch_for(model, "plain")
    batch["pixel_values"] = batch["pixel_values"] * (1 + rank)
    del batch["labels"]
    other = copy.deepcopy(model)
    parallelize(other, dist.group.WORLD, reduction="mean")
    sequence_of(other).batches = LoadedBatch(sequence_of(other), alone=True)
    with torch.no_grad():
        want, got = (each(**batch, use_cache=False).logits for each in (model, other))
    return float((got - want).abs().max() / want.abs().max())


def test_a_rank_that_evaluates_alone_makes_its_own_features():
    assert max(processes(2, _alone)) < 1e-5


def test_a_tensor_with_an_entry_a_row_is_not_taken_for_one_of_images():
    pixels, sizes = torch.zeros(2, 3, 4, 4), torch.tensor([[4, 4], [4, 4]])
    arguments = {"pixel_values": pixels, "image_sizes": sizes}
    assert Images.of(arguments, [*arguments]) is not None
    arguments["batch_num_images"] = torch.tensor([2, 0])
    assert Images.of(arguments, [*arguments]) is None


def _bad(rank, size, kind):
    model = model_of("qwen3_vl")
    batch, _ = batch_for(model, "plain")
    cp = parallelize(model, dist.group.WORLD, reduction="mean")
    if kind == "placeholders":
        batch["input_ids"][0, 60] = PLACE
        batch["mm_token_type_ids"][0, 60] = 1
    if kind == "images" and rank == 1:
        batch |= {"pixel_values": batch["pixel_values"][:24], "image_grid_thw": batch["image_grid_thw"][:2]}
    if kind == "pixels" and rank == 1:
        batch["pixel_values"] = batch["pixel_values"] * 1.5
    if kind == "lists":  # of pixels
        batch["pixel_values"] = [[x + rank] for x in batch["pixel_values"].split(24)]
    if kind == "column":
        batch["boxes"] = torch.zeros(3, 4)
    if kind == "tree":
        batch = {name: x[:1] if len(x) == len(ROWS) else x for name, x in batch.items()}
        batch |= {"tree": torch.tensor([-1, TOKENS]), "shift_labels": batch.pop("labels")}
    try:
        cp.token_stats(model, batch) if kind == "statistics" else model(**batch)
    except (UnsupportedError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


BAD = {
    "placeholders": "Image features and image tokens do not match, tokens: 13, features: 12",
    "images": "ranks of a CP group were given different whole batches",
    "pixels": "ranks of a CP group were given different whole batches",
    "lists": "ranks of a CP group were given different whole batches",
    "column": "boxes [3, 4] enters Qwen3VLTextModel whole, and nobody shards it",
    "tree": "does not know its branches: use rows apart",
    "statistics": "token_stats is of shards, and batches with images are whole",
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_input_is_an_error_on_all_ranks(kind):
    for found in processes(2, _bad, kind):
        assert BAD[kind] in found, found
