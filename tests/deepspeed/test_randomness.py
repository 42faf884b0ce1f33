"""Ranks of a sequence draw random numbers of their own: dropout masks, NEFTune's noise."""

import math

import deepspeed
import torch
import transformers
from engines import VOCABULARY, config_of, dataset, model_of, quiet
from peft import LoraConfig, get_peft_model
from ranks import on_ranks, processes
from test_trainer import arguments_of
from trainers import forget

import burst_mcore.deepspeed as burst
from burst_mcore.transformers.data.batches import collated

DROPPED = 0.5


def _gpt2():
    """Drops entries of embeddings and of both branches of each layer."""
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=64, attn_pdrop=0.0,
        embd_pdrop=DROPPED, resid_pdrop=DROPPED,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel._from_config(config, attn_implementation="eager").train()


def _seen(module):
    """A list that gets each output of a module."""
    outputs = []
    module.register_forward_hook(lambda _, args, out: outputs.append(out.detach().clone()))
    return outputs


def _engine(size, model, policy):
    config = config_of(2, size, checkpointing={"policy": policy})
    config["optimizer"]["params"]["lr"] = 0.0
    quiet()
    return burst.initialize(model=model, config=config)[0]


def _step(engine, batch, seed=None):
    """(loss, gradients); with `seed` from that state of the generator."""
    if seed is not None:
        torch.manual_seed(seed)
    loss = engine(**batch).loss
    engine.backward(loss)
    get = deepspeed.utils.safe_get_full_grad
    gradients = {name: get(p).clone() for name, p in engine.module.named_parameters()}
    engine.step()
    return loss.item(), gradients


def _dropout(rank, size):
    found = {}
    for policy in ("none", "full"):
        model = _gpt2()
        engine = _engine(size, model, policy)
        (batch,) = burst.shard_loader(dataset(1), engine)
        outputs = _seen(model.transformer.drop)
        found[policy] = [_step(engine, batch, 7), _step(engine, batch), _step(engine, batch, 7)]
        found[policy].append([out == 0 for out in outputs])
        found["state", policy] = torch.get_rng_state()
        engine.eval()
        engine(**batch)
        found["after evaluation", policy] = torch.get_rng_state()
        engine.destroy()
    return found


def test_ranks_drop_entries_of_their_own_and_recomputation_the_same_again():
    one, other = processes(2, _dropout)
    for found in (one, other):
        (first, later, again, masks), recomputed = found["none"], found["full"]
        assert first[0] == again[0] == recomputed[0][0] and later[0] == recomputed[1][0] != first[0]
        for name, gradient in first[1].items():
            assert torch.equal(gradient, again[1][name]), name
            assert torch.equal(gradient, recomputed[0][1][name]), name  # the same masks were drawn again
        assert torch.equal(masks[0], masks[2])
        assert 0.4 < (masks[0] == masks[1]).double().mean() < 0.6
        for policy in ("none", "full"):
            assert torch.equal(found["state", policy], found["after evaluation", policy])
            assert torch.equal(found["state", policy], one["state", "none"])  # on both ranks
    assert one["none"][0][0] == other["none"][0][0]
    mine, others = one["none"][3][0], other["none"][3][0]
    assert 0.4 < mine.double().mean() < 0.6
    assert 0.4 < (mine == others).double().mean() < 0.6


ALPHA, TOKENS = 5.0, 40


def _noises(model):
    """A list that gets, of each forward, how far the first layer's input is from the tokens' embeddings."""
    tokens, noises = [], []
    embeddings = model.get_input_embeddings()
    embeddings.register_forward_pre_hook(lambda _, args: tokens.append(args[0]))
    layer = next(module for module in model.modules() if type(module).__name__ == "LlamaDecoderLayer")
    layer.register_forward_pre_hook(
        lambda _, args: noises.append((args[0] - embeddings.weight[tokens[-1]]).detach())
    )
    return noises


@on_ranks(2)
def test_neftune_is_as_strong_as_over_the_whole_sequence(rank, size, tmp_path):
    """Noise of a step of a Trainer with adapters, and of an evaluation behind it."""
    quiet()
    burst.replace_ulysses()
    model = get_peft_model(model_of(), LoraConfig(r=2, target_modules=["q_proj"]))
    noises = _noises(model)
    trainer = transformers.Trainer(
        model, arguments_of(str(tmp_path / str(rank)), size, max_steps=1, neftune_noise_alpha=ALPHA),
        train_dataset=dataset(2, TOKENS), data_collator=collated,
    )  # fmt: skip
    trainer.train()
    model.eval()
    with torch.no_grad():
        trainer.evaluate(dataset(1, TOKENS))
    trainer.model_wrapped.destroy()
    forget()
    strength, noise = ALPHA / math.sqrt(TOKENS * 24), noises[0]
    assert noise.shape == (1, TOKENS // 2, 24) and not noises[-1].any()
    assert 0.97 * strength < noise.abs().max() < 1.001 * strength  # of a uniform distribution up to it
    of_both = [torch.empty_like(noise) for _ in range(size)]
    torch.distributed.all_gather(of_both, noise.contiguous())
    assert (of_both[0] - of_both[1]).abs().max() > 0.5 * strength
