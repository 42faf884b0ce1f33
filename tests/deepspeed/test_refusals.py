"""What is refused is refused by name, on every rank, and before anything is trained."""

import copy

import peft
import pytest
import torch
import transformers
from engines import TINY, VOCABULARY, config_of, dataset, model_of, quiet, start
from ranks import on_ranks

import burst_mcore.deepspeed as burst
from burst_mcore.agreement.claims import OthersError
from burst_mcore.deepspeed.settings import refuse_config
from burst_mcore.transformers import errors
from burst_mcore.transformers.errors import UnsupportedError


def _refused(do, *args, **kwargs):
    try:
        do(*args, **kwargs)
    except UnsupportedError as error:
        return error.name, str(error)
    except OthersError as error:
        return "another rank", str(error)
    except OSError as error:  # its own, where it fails
        return str(error), type(error).__name__
    return None, "not refused"


def _model(kind, **options):
    config = getattr(transformers, f"{kind}Config")(**{**TINY, "num_attention_heads": 2, **options})
    return transformers.AutoModelForCausalLM.from_config(config)


class Unsupported(transformers.LlamaForCausalLM):
    supports_gradient_checkpointing = False


def _own_loss(*_, **__):
    """It is not called."""


@on_ranks(2)
def test_initialize(rank, size):
    quiet()

    def attempt(name, model=None, config=None, words="", **options):
        model = model_of() if model is None else model
        refused, said = _refused(burst.initialize, model, config or config_of(3, size), **options)
        assert refused == name and words in said, (name, words, refused, said)

    def here(refusing, name):
        """What this rank should be told, where rank `refusing` alone has a reason."""
        return name if rank == refusing else "another rank"

    attempt("mesh", config={**config_of(2, size), "data_parallel_size": 1})
    attempt("sequence_parallel_size", config=config_of(2, 3))
    attempt(here(1, "sequence_parallel_size"), config=config_of(2, 3 if rank == 1 else 2))
    attempt("another rank", config=config_of(2, 2 if rank == 0 else 1), words="configuration: ")
    attempt("mpu", mpu=object(), words="the CP groups are made here")
    attempt("mesh_param", mesh_param=(1, size))
    recomputed = config_of(2, size, checkpointing={"policy": "segment"})
    attempt("checkpointing", Unsupported(model_of().config), recomputed, words="Unsupported does not support")
    attempt("model", _model("Rwkv"), words="carries a state along the sequence")
    experts = {"num_local_experts": 2, "output_router_logits": True}
    attempt("auxiliary loss", _model("Mixtral", **experts))
    attempt("model", torch.nn.Linear(2, 2))
    attempt(here(0, "model"), torch.nn.Linear(2, 2) if rank == 0 else None)
    model = model_of()
    if rank == 1:
        model.loss_function = _own_loss
    attempt(here(1, "loss"), model, words="_own_loss")
    attempt("dropout", _model("Llama", attention_dropout=0.1), words="attention_dropout is 0.1")
    attempt("model", "meta-llama/Llama-3.2-1B", words="give the model itself")
    words = "ranks make different calls: model: a LlamaForCausalLM of"
    attempt("another rank", model_of(heads=2 if rank else 4), words=words)
    words = "on ranks [0], a MistralForCausalLM"
    attempt("another rank", model_of(sliding_window=7 + rank, kind="Mistral"), words=words)
    prompted = peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    words = "PEFT's PROMPT_TUNING puts tokens of its own beside a sequence"
    attempt("model", peft.get_peft_model(model_of(), prompted), words=words)
    headless = transformers.LlamaModel(model_of().config)
    attempt("model", headless, words="LlamaModel has no head that makes a loss of labels")
    attempt("dropout", _model("OPT", layerdrop=0.1), words="leaves out layers at random (layerdrop is 0.1)")
    lora = peft.LoraConfig(r=2, target_modules=["lm_head", "q_proj"])
    attempt("loss", peft.get_peft_model(model_of(), lora), words='"fused_loss": false')
    attempt("head_parallel", config=config_of(2, size, head_parallel=3), words="head_parallel=3")
    section = config_of(2, size)
    del section["sequence_parallel_size"]
    attempt("sequence_parallel_size", config=section, words='no "sequence_parallel_size": write')
    section["sequnce_parallel_size"] = size
    attempt("sequence_parallel_size", config=section, words='did you mean "sequence_parallel_size"?')
    auto = {**config_of(2, size), "train_micro_batch_size_per_gpu": "auto"}
    attempt("configuration", config=auto, words="give train_micro_batch_size_per_gpu a value")


class PlainAttention(torch.nn.Module):
    """Attention that does not come to the interface."""

    def __init__(self, own):
        super().__init__()
        self.o_proj = own.o_proj

    def forward(self, hidden_states, **_):
        return self.o_proj(hidden_states.repeat_interleave(4, -1)[..., : self.o_proj.in_features]), None


def _broken():
    """A disk that fails: where it does it is its own error, on other ranks it is named."""
    raise OSError("disk is broken")
    yield


@on_ranks(2)
def test_forward(rank, size):
    engine, _ = start(config_of(2, size))
    (batch,) = burst.shard_loader(dataset(1), engine)

    def attempt(name, words="", do=engine, **columns):
        """Call an engine, or `do`; name: of the refusal, or by rank."""
        refused, said = _refused(do, **columns) if do is engine else _refused(do)
        assert refused == (name if isinstance(name, str) else name[rank]) and words in said, (name, said)

    def loaded(data):
        return lambda: list(burst.shard_loader(data, engine))

    ids, masked = batch["input_ids"], torch.ones_like(batch["input_ids"])
    masked[:, -1] = 0
    unlabelled = {name: x for name, x in batch.items() if name != "shift_labels"}
    here = "position_ids", "another rank"
    attempt(here, **{**batch, "position_ids": batch["position_ids"] if rank else None})
    attempt(here, **{**batch, "position_ids": batch["position_ids"].repeat(1 if rank else 3, 1)})
    attempt("position_ids", **{**batch, "position_ids": torch.arange(ids.shape[1])[None] + 1})
    attempt("labels", input_ids=ids, position_ids=batch["position_ids"], labels=ids)
    attempt("labels", **(batch if rank else unlabelled))
    attempt("attention_mask", **batch, attention_mask=masked)
    attempt("output_attentions", **batch, output_attentions=True)
    attempt("cache", **unlabelled, past_key_values=transformers.DynamicCache())
    attempt(("another rank", "disk is broken"), do=loaded(_broken() if rank else iter([ids])))
    attempt("batch", do=loaded(dataset(1, seed=rank)))
    attempt("loader", do=loaded(iter([x["input_ids"][None] for x in dataset(1 + rank)])))
    loss = engine(**batch).loss.item()  # the ring is as good as before
    assert loss > 0

    model = engine.module
    attention, layers = model.model.layers[1].self_attn, model.model.layers
    model.set_attn_implementation("sdpa")
    attempt("model", "model.layers.0.self_attn (LlamaAttention) has attn_implementation 'sdpa'", **batch)
    model.set_attn_implementation("burst")
    config = attention.config
    attention.config = copy.deepcopy(config)
    attention.config._attn_implementation = "eager"
    attempt("model", "model.layers.1.self_attn (", **batch)
    attention.config = config if rank == 1 else attention.config
    attempt(("model", "another rank"), **batch)
    attention.config = config
    assert engine(**batch).loss.item() == loss
    layers[1].self_attn = PlainAttention(attention)
    attempt("model", "model.layers.1.self_attn (PlainAttention)", **batch)
    layers[1].self_attn = attention
    attention.attention_dropout = 0.1  # behind its configuration's back
    attempt("dropout", **batch)
    engine.destroy()


@on_ranks(2)
def test_a_sequence_beyond_the_table_of_positions(rank, size):
    config = transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, n_positions=32,
                                     attn_pdrop=0.0)  # fmt: skip
    engine = start(config_of(2, size), model=transformers.GPT2LMHeadModel(config))[0]
    (batch,) = burst.shard_loader(dataset(1), engine)
    name, said = _refused(engine, **batch)
    assert name == "position_ids" and "embeddings of 32 positions, the sequence has 40" in said
    (batch,) = burst.shard_loader(dataset(1, tokens=31), engine)
    assert engine(**batch).loss.item() > 0
    engine.destroy()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"data_parallel_size": 2}, "unsupported (mesh)"),
        ({"pipeline": {"stages": 2}}, "unsupported (pipeline)"),
        ({"tensor_parallel": {"autotp_size": 2}}, "unsupported (tensor_parallel)"),
    ],
)
def test_configurations(config, said):
    with pytest.raises(UnsupportedError) as error:
        refuse_config(config)
    assert said in str(error.value)


def test_versions(monkeypatch):
    errors.refuse_versions()
    monkeypatch.setattr(errors, "version", lambda package: "0.18.9")
    with pytest.raises(UnsupportedError, match="deepspeed 0.18.9 is installed, tested are releases from 0"):
        errors.refuse_versions()
