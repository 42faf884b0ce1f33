"""What a loop by hand can get wrong: one clear error on every rank, by its name."""

import pytest
import torch
from causal_lms import dataset, model_of
from loops import mesh_of, refused, refuses
from ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from burst_mcore.torch import parallelize
from burst_mcore.transformers.data.batches import prepared
from burst_mcore.transformers.errors import UnsupportedError


@on_ranks(2)
def test_arguments(rank, size):
    mesh, model, plain = mesh_of(2), model_of(), torch.nn.Linear(2, 2)
    parallelize(model, mesh)  # the dim is called "cp"
    sharded, odd = fully_shard(model_of(), mesh=mesh), model_of()
    odd.lm_head = torch.nn.Sequential(odd.lm_head)
    unnamed, of_others = (
        init_device_mesh("cpu", (1, 2), mesh_dim_names=names) for names in (None, ("dp", "sp"))
    )

    def given(model=None, mesh=mesh, **options):
        return lambda: parallelize(model_of() if model is None else model, mesh, **options)

    refuses(
        ("loss: it must be one of fused, model, got 'fussed'", given(loss="fussed")),
        ("mesh: give the dim of a DeviceMesh ... got DeviceMesh((dp=1, sp=2)", given(mesh=of_others)),
        ("mesh: give the dim of a DeviceMesh ... got DeviceMesh(", given(mesh=unnamed)),
        ("mesh: give the dim of a DeviceMesh ... got 'cp'", given(mesh="cp")),
        ("model: it was prepared before", given(model)),
        ("order: call parallelize(model, ...) first, then full", given(sharded)),
        ('loss: Linear is no causal LM of ... : pass loss="model"', given(plain)),
        ("loss: output embeddings of LlamaForCausalLM must be ... The model's own loss: loss", given(odd)),
        ("checkpointing: Linear", given(plain, loss="model", checkpointing="full")),
        ("config: ... lay_out ... layout", given(config={"lay_out": "striped"})),
        ("checkpointing: it must be one of ... , got 'some'", given(checkpointing="some")),
        ("reduction: it must be one of auto, mean, sum", given(reduction="average")),
        (
            "another rank: ... different calls: model: ... 12 parameters ... on ranks [0], ... 21 parameters",
            given(model_of(num_hidden_layers=1 + rank)),
        ),
        (
            "another rank: ranks make different calls: configuration: ",
            given(loss="fused" if rank else "model"),
        ),
    )


def test_no_mesh_is_refused_by_name_before_any_process_group():
    assert not torch.distributed.is_initialized()
    said = refused(lambda: parallelize(model_of(), None))
    assert said.startswith("unsupported (mesh): give the dim of a DeviceMesh") and said.endswith("got None")


class Recomputed(torch.nn.Module):
    """A model whose forward is made again in backward, where DDP does not know of it."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, outer, batch):
        return checkpoint(lambda _: self.model(**batch).loss, outer, use_reentrant=True)


OTHERS = "batch: ranks of a CP group were given different whole batches"
NOT_INTEGERS = "batch: input_ids must be a tensor of integers [rows, tokens], got"


@on_ranks(2)
def test_batches_and_statistics(rank, size):
    mesh, bare = mesh_of(2), model_of()
    ids = dataset(1, tokens=40)[0]["input_ids"][None]
    batch = {"input_ids": ids, "labels": ids.clone()}
    cp = parallelize(bare, mesh)
    striped = parallelize(model_of(), mesh, config={"layout": "striped"})
    unfused = parallelize(model_of(), mesh, loss="model")
    odd = ids.clone()
    odd[0, 1] = 999  # of the first rank

    def sharded(*batches):
        return lambda: cp.shard(batches[rank % len(batches)])

    def statistics(model=bare, cp=cp, **options):
        return lambda: cp.token_stats(model, cp.shard(batch), **options)

    numbers = torch.ones(20, 1)
    refuses(
        (OTHERS, sharded({"input_ids": ids + rank, "labels": ids})),
        (OTHERS, sharded({"input_ids": ids, "of_rows": torch.ones(1) + rank})),
        (
            (NOT_INTEGERS, "another rank: rank 0: unsupported (batch): input_ids must be"),
            sharded({"labels": ids}, {"input_ids": ids}),
        ),
        (NOT_INTEGERS, sharded(None, {"input_ids": ids.double()})),
        ("batch: labels must be a tensor, or", sharded({**batch, "labels": [[1], [2, 3]]})),
        ("position_ids: a forward over sharded sequences needs", lambda: bare(**batch)),
        ("position_ids: they must go on by one", lambda: bare(**striped.shard(batch))),
        (
            ("labels: tokens and labels must be in [0, 61)", "another rank"),
            lambda: bare(**cp.shard({**batch, "labels": odd})),
        ),
        ("loss: the model's loss is not fused", statistics(unfused.model, unfused)),
        ("labels: token_stats needs a b", lambda: cp.token_stats(bare, {"input_ids": ids})),
        ("model: token_stats takes the model of this", statistics(model_of())),
        ("temperature: ... or one for each label, (1, 20)", statistics(temperature=numbers)),
        (
            ("temperature: ... above 0, got -1.0", "another rank: rank 0"),
            statistics(temperature=1.0 if rank else -1.0),
        ),
        (
            "mask: documents end at 31, beyond the 20 tokens",
            lambda: cp.mask(documents=[0, 13, 31], tokens=20),
        ),
    )
    lists = {"input_ids": ids.tolist(), "labels": ids.tolist(), "cu_seqlens": [0, 15, 40]}
    tensors = cp.shard({name: torch.as_tensor(x) for name, x in lists.items()})
    assert all(torch.equal(x, tensors[name]) for name, x in cp.shard(lists).items())
    for documents in ([], [0, 3.7, 9], torch.tensor([1, 9])):
        with pytest.raises(ValueError, match="cu_seqlens must be"):
            cp.mask(documents=documents)
    assert cp.mask(documents=[0, 13, 31]).document_ends.tolist() == [0, 13, 31, 32]  # padded to 2 x 16
    assert cp.mask(documents=[0, 13, 31], tokens=37).document_ends.tolist() == [0, 13, 31, cp.padded(37)]


@on_ranks(2)
def test_reductions(rank, size):
    """Gradients of the head that are summed by hand, and of a model that is recomputed under DDP."""
    mesh = mesh_of(2)
    ids = dataset(1, tokens=40)[0]["input_ids"][None]
    batch = {"input_ids": ids, "labels": ids.clone()}
    bare, elsewhere, trained, summed = (model_of() for _ in range(4))
    cp = parallelize(bare, mesh)
    loss = bare(**cp.shard(batch)).loss  # an evaluation needs nobody who reduces
    said = refused(loss.backward)
    assert said.startswith("unsupported (reduction): nothing reduces model.embed_tokens.weight")
    parallelize(elsewhere, mesh)
    fully_shard(elsewhere, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("cp", "dp"))["dp"])
    said = refused(lambda: elsewhere(**cp.shard(batch)).loss.backward())
    assert said.startswith("unsupported (reduction): fully_shard's mesh has not all ranks of cp")
    by_ddp = parallelize(trained, mesh)
    engine, mine, outer = DistributedDataParallel(Recomputed(trained)), by_ddp.shard(batch), torch.zeros(())
    engine(outer.requires_grad_(), mine).backward()
    trained.zero_grad()
    said = refused(lambda: trained(**mine).loss.backward())  # past DDP, which was there before
    assert said.startswith("unsupported (reduction): nothing reduces")
    loss = engine(outer, mine)
    with torch.no_grad():
        trained(**mine)  # an evaluation past DDP, before the backward
    loss.backward()
    by_hand = parallelize(summed, mesh, reduction="sum")
    summed(**by_hand.shard(batch)).loss.backward()
    torch.distributed.all_reduce(summed.lm_head.weight.grad)
    model = model_of()
    model(**batch).loss.backward()
    for found in (summed, trained):
        torch.testing.assert_close(found.lm_head.weight.grad, model.lm_head.weight.grad, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("elsewhere", ["a forward over shards", "cp.token_stats"])
@on_ranks(2)
def test_ranks_with_fewer_batches_in_a_loop_by_hand(rank, size, elsewhere):
    """Rank 1 has one batch fewer, and goes on to something else."""
    model, mesh = model_of(), mesh_of(size)
    ids = dataset(1, tokens=40)[0]["input_ids"][None]
    cp = parallelize(model, mesh)
    batch = cp.shard({"input_ids": ids})

    def goes_on():
        if rank == 0:
            cp.shard({"input_ids": ids})
        elif elsewhere == "cp.token_stats":
            cp.token_stats(model, batch)
        else:
            model(**batch)

    places = f"at: cp.shard on ranks [0], {elsewhere} on ranks [1]"
    refuses((f"another rank: ranks make different calls: ... {places}", goes_on))


def test_labels_that_were_shifted_before():
    ids = torch.arange(3, 23)[None]
    shifted = torch.cat([ids[:, 1:], torch.full((1, 1), -100)], 1)
    with pytest.raises(UnsupportedError, match=r"labels.*shifted already.*shift_labels"):
        prepared({"input_ids": ids, "labels": shifted}, multiple=4)
    prepared({"input_ids": ids, "shift_labels": shifted}, multiple=4)
    same = torch.full((1, 20), 7)  # of equal tokens nobody can tell
    prepared({"input_ids": same, "labels": same}, multiple=4)
