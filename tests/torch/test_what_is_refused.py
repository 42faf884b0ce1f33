"""What a loop by hand can get wrong: one clear error on every rank, by its name."""

import logging
import re
import time
from datetime import timedelta

import limits
import pytest
import torch
from causal_lms import dataset, model_of
from ranks import processes
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from burst_mcore.agreement import watch
from burst_mcore.torch import parallelize
from burst_mcore.transformers.data.batches import prepared
from burst_mcore.transformers.errors import RefusedError


def _named(do):
    """The error of `do`, as text."""
    with pytest.raises(RefusedError) as caught:
        do()
    return str(caught.value)


def _meshes():
    logging.getLogger("burst_mcore").setLevel("ERROR")
    return init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))


def _arguments(rank, size):
    mesh, model, plain = _meshes(), model_of(), torch.nn.Linear(2, 2)
    parallelize(model, mesh)  # the dim is called "cp"
    sharded, odd = fully_shard(model_of(), mesh=mesh["cp"]), model_of()
    odd.lm_head = torch.nn.Sequential(odd.lm_head)
    return [
        _named(lambda: parallelize(model_of(), mesh._flatten("all"), loss="fussed")),
        _named(lambda: parallelize(model_of(), init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "sp")))),
        _named(lambda: parallelize(model_of(), init_device_mesh("cpu", (1, 2)))),
        _named(lambda: parallelize(model_of(), "cp")),
        _named(lambda: parallelize(model, mesh["cp"])),
        _named(lambda: parallelize(torch.nn.Sequential(model), mesh["cp"])),
        _named(lambda: parallelize(sharded, mesh["cp"])),
        _named(lambda: parallelize(DistributedDataParallel(plain), mesh["cp"], loss="model")),
        _named(lambda: parallelize(plain, mesh["cp"])),
        _named(lambda: parallelize(odd, mesh["cp"])),
        _named(lambda: parallelize(plain, mesh["cp"], loss="model", checkpointing="full")),
        _named(lambda: parallelize(model_of(), mesh["cp"], config={"lay_out": "striped"})),
        _named(lambda: parallelize(model_of(), mesh["cp"], checkpointing="some")),
        _named(lambda: parallelize(model_of(), mesh["cp"], reduction="average")),
        _named(lambda: parallelize(model_of(num_hidden_layers=1 + rank), mesh["cp"])),
        _named(lambda: parallelize(model_of(), mesh["cp"], loss="fused" if rank else "model")),
    ]


def test_arguments():
    want = [
        r"refused \(loss\): it must be one of fused, model, got 'fussed'",
        r"refused \(mesh\): it has the dims dp, sp, none of them 'cp'.*mesh\[\"sp\"\]",
        r"refused \(mesh\): it has 2 dims without names: name them.*mesh_dim_names=\(\"dp\", \"cp\"\)",
        r"refused \(mesh\): give the dim of a DeviceMesh, mesh\[\"cp\"\], got 'cp'",
        r"refused \(model\): it was prepared before",
        r"refused \(model\): it was prepared before",
        r"refused \(order\): call parallelize\(model, ...\) first, then fully_shard or DDP",
        r"refused \(order\)",
        r"refused \(loss\): Linear is no causal LM of transformers: pass loss=\"model\"",
        r"refused \(loss\): output embeddings of LlamaForCausalLM must be .* or loss=\"model\"",
        r"refused \(checkpointing\): Linear",
        r"refused \(config\): .*lay_out.*layout",
        r"refused \(checkpointing\): it must be one of none, full, attention, segment, or a .*, got 'some'",
        r"refused \(reduction\): it must be one of auto, mean, sum",
        r"refused \(model\): rank 0 has .* of 12 parameters .*, rank 1 has .* of 21 parameters",
        r"refused \(configuration\): rank 0 has",
    ]
    for errors in processes(2, _arguments):
        for pattern, error in zip(want, errors, strict=True):
            assert re.search(pattern, error), (pattern, error)


@pytest.mark.parametrize("mesh", [None, "cp"])
def test_no_mesh_is_refused_by_name_before_any_process_group(mesh):
    assert not torch.distributed.is_initialized()
    with pytest.raises(RefusedError) as caught:
        parallelize(model_of(), mesh)
    assert str(caught.value) == f'refused (mesh): give the dim of a DeviceMesh, mesh["cp"], got {mesh!r}'


class Recomputed(torch.nn.Module):
    """A model whose forward is made again in backward, where DDP does not know of it."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, outer, batch):
        return checkpoint(lambda _: self.model(**batch).loss, outer, use_reentrant=True)


def _in_training(rank, size):
    mesh = _meshes()
    ids = dataset(1, tokens=40)[0]["input_ids"][None]
    batch = {"input_ids": ids, "labels": ids.clone()}
    found = []
    bare = model_of()
    cp = parallelize(bare, mesh["cp"])
    loss = bare(**cp.shard(batch)).loss  # an evaluation needs nobody who reduces
    found += [_named(loss.backward)]
    elsewhere = model_of()
    parallelize(elsewhere, mesh["cp"])
    fully_shard(elsewhere, mesh=mesh["dp"])
    found += [_named(lambda: elsewhere(**cp.shard(batch)).loss.backward())]
    partly = model_of()
    parallelize(partly, mesh["cp"])
    fully_shard(partly.model, mesh=mesh["cp"])
    found += [_named(lambda: partly(**cp.shard(batch)).loss.backward())]
    found += [
        _named(lambda: cp.shard({"input_ids": ids + rank, "labels": ids})),
        _named(lambda: cp.shard({"input_ids": ids} if rank else {"labels": ids})),
        _named(lambda: cp.shard({"input_ids": ids.double()} if rank else None)),
        _named(lambda: cp.shard({"input_ids": ids, "advantages": ids + rank})),
        _named(lambda: cp.shard({"input_ids": ids, "of_rows": torch.ones(1) + rank})),
        _named(lambda: bare(input_ids=ids, labels=ids)),
    ]
    striped = model_of()
    other = parallelize(striped, mesh["cp"], config={"layout": "striped"})
    found += [_named(lambda: bare(**other.shard(batch)))]
    unfused = parallelize(model_of(), mesh["cp"], loss="model")
    found += [_named(lambda: unfused.token_stats(unfused.model, unfused.shard(batch)))]
    found += [_named(lambda: cp.token_stats(bare, {"input_ids": ids}))]
    odd = ids.clone()
    odd[0, 1] = 999  # of the first rank
    found += [
        _named(lambda: cp.token_stats(model_of(), cp.shard(batch))),
        _named(lambda: cp.token_stats(bare, cp.shard(batch), temperature=torch.ones(20, 1))),
        _named(lambda: cp.token_stats(bare, cp.shard(batch), temperature=-1.0 if rank else 1.0)),
        _named(lambda: cp.shard({**batch, "labels": [[1], [2, 3]]})),
        _named(lambda: bare(**cp.shard({**batch, "labels": odd}))),
        _named(lambda: bare(**cp.shard({"input_ids": odd}))),
    ]
    lists = {"input_ids": ids.tolist(), "labels": ids.tolist(), "cu_seqlens": [0, 15, 40]}
    tensors = cp.shard({name: torch.as_tensor(x) for name, x in lists.items()})
    assert all(torch.equal(x, tensors[name]) for name, x in cp.shard(lists).items())
    for documents in ([], [0, 3.7, 9], torch.tensor([1, 9]), range(0)):
        with pytest.raises(ValueError, match="cu_seqlens must be"):
            cp.mask(documents=documents)
    found += [_named(lambda: cp.mask(documents=[0, 13, 31], tokens=20))]
    assert cp.mask(documents=[0, 13, 31]).document_ends.tolist() == [0, 13, 31, 32]  # padded to 2 x 16
    assert cp.mask(documents=[0, 13, 31], tokens=37).document_ends.tolist() == [0, 13, 31, cp.padded(37)]
    trained, outer = model_of(), torch.zeros((), requires_grad=True)
    by_ddp = parallelize(trained, mesh["cp"])
    engine, mine = DistributedDataParallel(Recomputed(trained)), by_ddp.shard(batch)
    engine(outer, mine).backward()
    trained.zero_grad()
    found += [_named(lambda: trained(**mine).loss.backward())]  # past DDP, which was there before
    loss = engine(outer, mine)
    with torch.no_grad():
        trained(**mine)  # an evaluation past DDP, before the backward
    loss.backward()
    summed = model_of()
    by_hand = parallelize(summed, mesh["cp"], reduction="sum")
    summed(**by_hand.shard(batch)).loss.backward()
    gradient = summed.lm_head.weight.grad
    torch.distributed.all_reduce(gradient)
    return found, gradient, trained.lm_head.weight.grad


def test_in_training():
    want = [
        "refused (reduction): nothing reduces model.embed_tokens.weight",
        "refused (reduction): the mesh of fully_shard has not all ranks of cp",
        "refused (reduction): nothing reduces lm_head.weight",
        "refused (batch): ranks of a CP group were given different whole batches",
        (
            "refused (batch): input_ids must be a tensor of integers [rows, tokens], got None",
            "refused (another rank): rank 0 of the group has no batch",
        ),
        "refused (batch): input_ids must be a tensor of integers [rows, tokens], got ",
        "refused (batch): ranks of a CP group were given different whole batches",
        "refused (batch): ranks of a CP group were given different whole batches",
        "refused (position_ids): a forward over sharded sequences needs",
        "refused (position_ids): they must go on by one, or start again at 0",
        "refused (loss): the model's loss is not fused",
        "refused (labels): token_stats needs a batch",
        "refused (model): token_stats takes the model of this",
        "refused (temperature): temperature must be a number, or one for each label, (1, 20), got (20, 1)",
        (
            "refused (temperature): temperature must be finite and above 0, got -1.0",
            "refused (another rank): rank 1",
        ),
        "refused (batch): labels must be a tensor, or lists of numbers",
        ("refused (labels): tokens and labels must be in [0, 61)", "refused (another rank): ranks [0]"),
        ("refused (labels): tokens and labels must be in [0, 61)", "refused (another rank): ranks [0]"),
        "refused (mask): documents end at 31, beyond the sequence's 20 tokens",
        "refused (reduction): nothing reduces model.embed_tokens.weight",
    ]
    ids = dataset(1, tokens=40)[0]["input_ids"][None]
    model = model_of()
    model(input_ids=ids, labels=ids).loss.backward()
    for errors, *gradients in processes(2, _in_training):
        for text, error in zip(want, errors, strict=True):
            assert error.startswith(text), error
        for gradient in gradients:
            torch.testing.assert_close(gradient, model.lm_head.weight.grad, rtol=2e-5, atol=1e-6)


def _go(elsewhere, cp, model, batch, group):
    """Do what another place of a program does."""
    if elsewhere == "forward":
        model(**batch)
    elif elsewhere == "statistics":
        cp.token_stats(model, batch)
    elif elsewhere == "another's collective":
        torch.distributed.all_reduce(torch.ones(()), group=group)
    elif elsewhere == "loss of its own":
        cp.whole_loss(torch.ones(()), 1)


def _fewer_batches(rank, size):
    """Rank 1 has one batch fewer, and goes on to something else: (error, seconds, warnings) of each rank."""
    watch.WARN_AFTER = 1.0
    warned = []
    told = logging.Handler()
    told.emit = lambda record: warned.append(record.getMessage())
    logger = logging.getLogger("burst_mcore")
    logger.handlers, logger.propagate = [told], False
    ids, found = dataset(1, tokens=40)[0]["input_ids"][None], []
    for elsewhere in ("forward", "statistics", "another's collective", "loss of its own", "the end"):
        told = elsewhere != "the end"  # else the time-out is waited for
        limit = limits.OF_A_GROUP if told else timedelta(seconds=limits.TO_END / 3)
        group = torch.distributed.new_group(timeout=limit)
        model = model_of()
        cp = parallelize(model, group)
        batch = cp.shard({"input_ids": ids})
        began = time.monotonic()
        warned.clear()
        try:
            if rank == 0:
                cp.shard({"input_ids": ids})
            else:
                _go(elsewhere, cp, model, batch, group)
        except Exception as error:
            found += [(f"{type(error).__name__}: {error}", time.monotonic() - began, [*warned])]
            if rank == 0 and elsewhere in ("another's collective", "loss of its own"):
                _go(elsewhere, cp, model, batch, group)  # rank 1 waits in it still
    return found


def test_ranks_with_fewer_batches_in_a_loop_by_hand():
    """The error comes at once if the other rank calls burst, or waits for this one; else after a warning."""
    (forward, statistics, foreign, own, end), (their_forward, their_statistics, *_) = processes(
        2, _fewer_batches
    )
    for (error, seconds, _), place in (
        (forward, "a forward over shards"),
        (their_forward, "a forward over shards"),
        (statistics, "cp.token_stats"),
        (their_statistics, "cp.token_stats"),
    ):
        assert error.startswith("RefusedError: refused (another rank): the ranks of the ring make different")
        assert f"at: cp.shard on ranks [0], {place} on ranks [1]. All ranks of a sequence" in error
        assert seconds < limits.AT_ONCE
    absent = "RuntimeError: rank 0 of the sequence is at cp.shard, and waits for rank 1, last at cp.shard: "
    for (error, seconds, _), collective in ((foreign, "all_reduce"), (own, "all_reduce")):
        assert error.startswith(f"{absent}rank 1 of the ring, in {collective} at ")
        assert error.endswith(", waits for rank 0, which waits here")
        assert seconds < limits.AT_ONCE
    error, _, warned = end
    assert warned[0] == "rank 0 of the sequence has waited for 1 s at cp.shard, for rank 1, last at cp.shard"
    assert error.startswith(absent)


def test_labels_that_were_shifted_before():
    ids = torch.arange(3, 23)[None]
    shifted = torch.cat([ids[:, 1:], torch.full((1, 1), -100)], 1)
    with pytest.raises(RefusedError, match=r"labels.*shifted already.*shift_labels"):
        prepared({"input_ids": ids, "labels": shifted}, multiple=4)
    prepared({"input_ids": ids, "shift_labels": shifted}, multiple=4)
    same = torch.full((1, 20), 7)  # of equal tokens nobody can tell
    prepared({"input_ids": same, "labels": same}, multiple=4)
