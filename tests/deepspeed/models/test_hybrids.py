"""Hybrid models over shards: each layout, packed documents, recompute, generation, and what is refused."""

import copy
import re
import sys
import types
from pathlib import Path

import installed
import pytest
import torch
from ranks import processes
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback
from zoo import VOCABULARY, model_of, sharded, worst

from burst_mcore.recurrent import bound
from burst_mcore.torch import parallelize
from burst_mcore.transformers.errors import RefusedError
from burst_mcore.transformers.models.served import use_burst

EVERY = (
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "kimi_linear", "olmo_hybrid"),
    *("mamba2", "bamba", "granitemoehybrid", "falcon_h1", "nemotron_h", "lfm2", "lfm2_moe"),
    *("mamba", "falcon_mamba", "jamba", "zamba", "zamba2", "minimax", "recurrent_gemma"),
    *("bailing_hybrid", "lara_mini", "lfm3"),
)
DOCUMENTS = [[9, 1, 2, 38, 14], [50, 14]]
"""Lengths of the documents of each of two rows."""


BARS = {"qwen3_next": 1.2e-4, "lara_mini": 5.6e-5, "bailing_hybrid": 8.6e-5}
"""Twice the error of the gradients of gates, in one process, between rules of chunks of 64 and of 16.

The worst is A_log's, a sum over all tokens that nearly cancels: 2e-3 where others are 0.4. The error is of
these documents: of [1, 1, 1, 58] and [61] tokens Qwen3-Next's is 2.2e-4 between chunks, 3.0e-4 on 3 ranks."""


def batch_of(documents):
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, VOCABULARY, (2, 64), generator=generator)
    position_ids = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in documents])
    return {"input_ids": ids, "labels": ids, "position_ids": position_ids}


def alone(model, batch, documents):
    """The mean loss of all labels, of each document alone by the unmodified model; and its gradients."""
    total, labels = torch.zeros(()), 0
    for row, ids in zip(documents, batch["input_ids"], strict=True):
        for document in ids.split(row):
            logits = model(input_ids=document[None], use_cache=False).logits[0, :-1]
            total = total + cross_entropy(logits.float(), document[1:], reduction="sum")
            labels += len(document) - 1
    (total / labels).backward()
    return (total / labels).item()


def cells(rank, size, cells):
    found = {}
    for name, layout, documents, recomputes in cells:
        model = model_of(name)
        other, batch = copy.deepcopy(model), batch_of(documents)
        if recomputes:
            other.gradient_checkpointing_enable()
        loss, want = sharded(other, batch, layout=layout).item(), alone(model, batch, documents)
        found[name, layout, len(documents[0]), recomputes] = abs(loss / want - 1), worst(other, model)
    return found


def check(size, some):
    torch.use_deterministic_algorithms(False)
    for found in processes(size, cells, some):
        wrong = {cell: errors for cell, errors in found.items() if not max(errors) < BARS.get(cell[0], 2e-5)}
        assert not wrong, wrong


def test_layouts_documents_and_recompute():
    check(
        3,
        [
            ("lfm2", "zigzag", DOCUMENTS, True),
            ("qwen3_next", "contiguous", DOCUMENTS, False),
            ("bamba", "zigzag", DOCUMENTS, True),
            ("mamba", "zigzag", DOCUMENTS, True),
            ("minimax", "zigzag", DOCUMENTS, True),
            ("recurrent_gemma", "zigzag", DOCUMENTS, True),
        ],
    )


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", EVERY)
def test_every_hybrid(name, size):
    layouts = [("zigzag", [[64], [64]]), ("contiguous", [[64], [64]])]
    packed = [("zigzag", DOCUMENTS), ("contiguous", DOCUMENTS)]
    check(size, [(name, *cell, number == 2) for number, cell in enumerate([*layouts, *packed])])


def test_the_page_of_models_has_every_hybrid_among_those_that_are_equal():
    """A slow test compares the page with new results."""
    page = (Path(__file__).parents[3] / "docs" / "frameworks" / "models.md").read_text()
    equal = re.findall(r"`([^`]+)`", page.split("**Equal (")[1].split("**Refused**")[0])
    assert {*EVERY} <= {*equal} and len(equal) >= 113


def partly_trained(rank, size):
    """Errors of the loss and of the gradient of x_proj, which alone is trained, as by LoRA."""
    model, batch = model_of("mamba").requires_grad_(False), batch_of([[64], [64]])
    path = next(path for path, _ in model.named_modules() if path.endswith("x_proj"))
    model.get_submodule(path).requires_grad_()
    other = copy.deepcopy(model)
    loss = sharded(other, batch, layout="contiguous").item() / alone(model, batch, [[64], [64]]) - 1
    assert getattr(bound._LAYER, "mixing", None) is None, "a layer's sequences are kept behind its forward"
    found, want = (each.get_submodule(path).weight.grad for each in (other, model))
    return abs(loss), float((found - want).abs().max() / want.abs().max())


def test_one_matrix_alone_is_trained():
    """Rank 1 ends the sequence: no state is made there that would need gradients."""
    for errors in processes(2, partly_trained):
        assert max(errors) < 2e-5


def recomputed(rank, size):
    """Errors of a loop with burst_mcore.torch, by policy of recompute."""
    torch.use_deterministic_algorithms(False)
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
    model, batch, found = model_of("bamba"), batch_of(DOCUMENTS), {}
    want = alone(model, batch, DOCUMENTS)
    for policy in ("full", "attention", "segment"):
        other = copy.deepcopy(model)
        other.zero_grad()
        cp = parallelize(other, mesh, config={"layout": "zigzag"}, reduction="mean", checkpointing=policy)
        loss = other(**cp.shard(batch)).loss
        loss.backward()
        for p in other.parameters():
            torch.distributed.all_reduce(p.grad)
            p.grad /= size
        found[policy] = abs(loss.item() / want - 1), worst(other, model)
    return found


def test_own_loops_with_each_policy_of_recompute():
    for found in processes(2, recomputed):
        assert len(found) == 3 and max(map(max, found.values())) < 2e-5, found


def test_a_kernel_without_a_state_is_refused_when_a_model_is_prepared(monkeypatch):
    """transformers' wrapper shows the signature of its torch code, and would drop the state."""
    package = types.ModuleType("package_of_kernels")
    package.chunk_scan = lambda hidden_states, dt, A, B, C, chunk_size, D=None: hidden_states
    monkeypatch.setitem(sys.modules, package.__name__, package)
    model = model_of("bamba")
    (mixer,) = bound.mixers_of(model).values()
    module = sys.modules[type(mixer).__module__]
    plain = getattr(getattr(module, bound.MAMBA2), "replaces", getattr(module, bound.MAMBA2))
    wraps = use_kernel_func_from_hub_with_fallback("chunk_scan", package.__name__)
    monkeypatch.setattr(module, bound.MAMBA2, wraps(plain))
    with pytest.raises(RefusedError, match=r"\(model\): kernel <lambda> takes no initial_states or return_f"):
        use_burst(model, 2)


KERNELS = {
    "qwen3_next": "gated delta rule",
    "kimi_linear": "Kimi's delta rule",
    "mamba": "Mamba 1",
    "bamba": "Mamba 2",
    "lfm2": "convolution",
}
"""By model, the kernel of a package that its mixers call where the package is installed."""


def with_packages(rank, size):
    """By model: errors of loss and gradients, and the kernels that ran, those of packages."""
    installed.install()
    torch.use_deterministic_algorithms(False)
    found, batch = {}, batch_of(DOCUMENTS)
    for name in KERNELS:
        installed.CALLS.clear()
        model = model_of(name)
        other = copy.deepcopy(model)
        loss, ran = sharded(other, batch).item(), {*installed.CALLS}
        want = alone(model.eval(), batch, DOCUMENTS)  # in training it would call the fused functions
        found[name] = abs(loss / want - 1), worst(other, model), ran
    return found


@pytest.mark.slow
def test_kernels_of_installed_packages_run_and_fused_functions_do_not():
    """In processes of their own: transformers looks for the packages when it imports a model's code."""
    for found in processes(2, with_packages, start="spawn"):
        for name, (*errors, ran) in found.items():
            assert KERNELS[name] in ran and max(errors) < 2e-5, (name, errors, ran)
        assert len(found) == 5


def mutants(rank, size):
    """Errors of a model whose halos are a row short, and of one whose states pass between documents."""
    model, batch = model_of("qwen3_next"), batch_of(DOCUMENTS)
    alone(model, batch, DOCUMENTS)
    right, found = (bound.convolution, bound.recurrence), []

    def short(convolve, x, width, shards, dim):
        return right[0](convolve, x, width - 1, shards, dim)

    def joined(kernel, x, shards):
        whole = type(shards)(shards.topology, shards.layout, shards.tokens)
        return right[1](kernel, x, whole)

    for mutant in ({"convolution": short}, {"recurrence": joined}):
        other = copy.deepcopy(model)
        other.zero_grad()
        for name, function in mutant.items():
            setattr(bound, name, function)
        sharded(other, batch)
        bound.convolution, bound.recurrence = right
        found.append(worst(other, model))
    return found


def test_a_short_halo_and_a_state_of_another_document_are_wrong():
    for found in processes(2, mutants):
        assert min(found) > 1e-2


def refusals(rank, size):
    model = model_of("lfm2")
    with pytest.raises(RefusedError, match="layout striped shards neighbouring tokens"):
        sharded(model, batch_of([[64], [64]]), layout="striped")
    others = {
        "lfm2": ("causal_conv1d_fn", lambda hidden_states, **_: hidden_states),
        "recurrent_gemma": ("RecurrentGemmaRecurrentBlock", lambda hidden_states, **_: (hidden_states, None)),
    }
    for name, (called, forward) in others.items():
        model = model_of(name)
        next(iter(bound.mixers_of(model).values())).forward = forward
        with pytest.raises(RefusedError, match=f"{called}, called 0 times instead of 1"):
            sharded(model, batch_of([[64], [64]]))


def masked_by_kinds(rank, size):
    """Rank 0 gives a mask of each kind of layers, of documents that differ: all ranks refuse."""
    model = model_of("qwen3_next")
    batch, cp = batch_of([[64], [64]]), parallelize(model, init_device_mesh("cpu", (size,)))
    packed = {"full_attention": None, "linear_attention": torch.ones(2, 64).tril()}
    words = (r"ranks \[0\] of the group refused", "masks by kinds of layers are not served: give one, of all")
    for part in cp.loader([batch]):
        with pytest.raises(RefusedError, match=words[rank == 0]):
            model(**part, **({"attention_mask": packed} if rank == 0 else {}))
    with pytest.raises(RefusedError, match="attention_mask must be a tensor, or lists of numbers"):
        next(iter(cp.loader([{**batch, "attention_mask": packed}])))
    return True


def test_masks_that_differ_between_layers_are_refused():
    assert processes(2, masked_by_kinds) == [True, True]


def test_a_scattered_layout_and_a_mixer_of_another_way_are_refused():
    processes(2, refusals)


def generated(rank, size):
    """Whether a prompt is continued as by the unmodified model."""
    found = []
    for name in ("qwen3_next", "lfm2", "mamba", "minimax", "recurrent_gemma"):
        model = model_of(name).eval()
        other, ids = copy.deepcopy(model), batch_of([[64], [64]])["input_ids"][:, :11]
        sharded(other.train(), batch_of([[64], [64]]))
        other.eval()
        how = {"max_new_tokens": 4, "do_sample": False, "use_cache": True}
        found.append(torch.equal(other.generate(ids, **how), model.generate(ids, **how)))
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_generation(size):
    assert all(all(found) for found in processes(size, generated))


def test_functions_outside_of_a_sharded_forward_are_transformers_own():
    model = model_of("qwen3_next")
    before = model(**batch_of([[64], [64]]), use_cache=False).loss
    bound.bind(model, lambda: None)
    bound.bind(model, lambda: None)
    assert torch.equal(before, model(**batch_of([[64], [64]]), use_cache=False).loss)
    (mixer,) = bound.mixers_of(model).values()
    names = vars(sys.modules[type(mixer).__module__])
    ours = {name: x for name, x in names.items() if hasattr(x, "replaces")}
    names |= {name: x.replaces for name, x in ours.items()}  # other tests bind them to forwards over shards
    assert {*ours} == {bound.CONVOLUTION, bound.DELTA, bound.MASK, bound.MASKED}
    assert not any(hasattr(names[name], "replaces") for name in ours)
