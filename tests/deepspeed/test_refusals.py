"""What is refused is refused by name, on every rank, and before anything is trained."""

import copy

import pytest
import torch
import torch.distributed as dist
import transformers
from engines import TINY, VOCABULARY, config_of, dataset, model_of, quiet, start
from ranks import processes

import burst_mcore.deepspeed as burst
from burst_mcore.deepspeed.config.refusals import refuse_config, sequence_parallel_size
from burst_mcore.deepspeed.config.settings import zero
from burst_mcore.deepspeed.ranks.cpu import without_builds
from burst_mcore.transformers import errors
from burst_mcore.transformers.errors import RefusedError
from burst_mcore.transformers.models.served import use_burst


class Unit:
    """An mpu whose groups are what a test says."""

    def __init__(self, sequence, data=None, model=None, *, megatron=False):
        self.get_sequence_parallel_group = lambda: sequence
        self.get_sequence_parallel_world_size = lambda: dist.get_world_size(sequence)
        self.get_sequence_data_parallel_group = lambda: dist.group.WORLD
        self.get_model_parallel_group = lambda: model or sequence
        if megatron:
            self.get_data_parallel_group = lambda: data


def _refused(do, *args, **kwargs):
    try:
        do(*args, **kwargs)
    except RefusedError as error:
        return error.name, str(error)
    except OSError as error:  # its own, where it fails
        return str(error), type(error).__name__
    return None, "not refused"


def _model(kind, **options):
    config = getattr(transformers, f"{kind}Config")(**{**TINY, "num_attention_heads": 2, **options})
    return transformers.AutoModelForCausalLM.from_config(config)


class Unsupported(transformers.LlamaForCausalLM):
    supports_gradient_checkpointing = False


def _initialize(rank, size, _):
    quiet()
    found = []

    def attempt(name, model=None, config=None, words="", **options):
        model = model_of() if model is None else model
        found.append(
            (name, words, *_refused(burst.initialize, model, config or config_of(3, size), **options))
        )

    def here(refusing, name):
        """What this rank should be told, where rank `refusing` alone has a reason."""
        return name if rank == refusing else "another rank"

    attempt("mesh", config={**config_of(2, size), "data_parallel_size": 1})
    attempt("mesh", mesh_param=(1, size))
    attempt("sequence_parallel_size", config=config_of(2, 3))
    attempt(here(1, "sequence_parallel_size"), config=config_of(2, 3 if rank == 1 else 2))
    attempt("configuration", config=config_of(2, 2 if rank == 0 else 1))
    attempt("configuration", mpu=object() if rank else None, words="rank 1 has")
    whole, alone = dist.group.WORLD, [dist.new_group([r]) for r in range(size)][rank]
    contradicts = 'write "sequence_parallel_size": 2'
    attempt("sequence_parallel_size", config=config_of(3, 1), mpu=Unit(whole), words=contradicts)
    attempt("data-parallel group", mpu=Unit(whole, alone, alone, megatron=True))
    partitioned = {**config_of(2, size), "activation_checkpointing": {"partition_activations": True}}
    attempt("partition_activations", config=partitioned, mpu=Unit(whole))
    attempt("mpu", mpu=object())
    attempt(here(1, "mpu"), mpu=object() if rank == 1 else Unit(whole))
    recomputed = config_of(2, size, checkpointing={"policy": "segment"})
    attempt("checkpointing", Unsupported(model_of().config), recomputed, words="Unsupported does not support")
    attempt("model", _model("Rwkv"), words="carries a state along the sequence")
    experts = {"num_local_experts": 2, "output_router_logits": True}
    attempt("auxiliary loss", _model("Mixtral", **experts))
    attempt("model", torch.nn.Linear(2, 2))
    attempt(here(0, "model"), torch.nn.Linear(2, 2) if rank == 0 else None)
    model = model_of()
    if rank == 1:
        model.loss_function = test_initialize
    attempt(here(1, "loss"), model, words="test_initialize")
    attempt("dropout", _model("Llama", attention_dropout=0.1), words="attention_dropout is 0.1")
    attempt("dropout", _model("GPT2", n_embd=16, n_head=2), words="attn_pdrop is 0.1")
    attempt("model", "meta-llama/Llama-3.2-1B", words="give the model itself")
    attempt("model", _with_a_tower(), words="it has a vision_config")
    hybrid, scattered = (
        _model("Lfm2", layer_types=["conv", "full_attention"]),
        config_of(2, 2, layout="striped"),
    )
    attempt("layout", hybrid, scattered, words="layout striped shards neighbouring tokens to different ranks")
    attempt("model", model_of(heads=2 if rank else 4), words="rank 1 has a LlamaForCausalLM of")
    attempt(
        "model", model_of(sliding_window=7 + rank, kind="Mistral"), words="rank 1 has a MistralForCausalLM"
    )
    for kind, prompted in _with_learned_prompts():
        attempt("model", prompted, words=f"PEFT's {kind} puts tokens of its own beside a sequence")
    headless = transformers.LlamaModel(model_of().config)
    attempt("model", headless, words="LlamaModel has no head that makes a loss of labels")
    attempt("model", Rewards(headless), words="LlamaModel has no head")
    attempt("dropout", _model("OPT", layerdrop=0.1), words="leaves out layers at random (layerdrop is 0.1)")
    attempt("loss", _with_lora_on_the_head(), words='"fused_loss": false')
    attempt("head_parallel", config=config_of(2, size, head_parallel=3), words="head_parallel=3")
    section = config_of(2, size)
    del section["sequence_parallel_size"]
    attempt("sequence_parallel_size", config=section, words='no "sequence_parallel_size": write')
    other = {**section, "expert_parallel_size": 1}
    del other["burst_attention"]
    found.append((None, "not refused", *_refused(lambda: sequence_parallel_size(other, size) and None)))
    misspelt = {**section, "sequnce_parallel_size": size}
    attempt("sequence_parallel_size", config=misspelt, words='did you mean "sequence_parallel_size"?')
    del misspelt["burst_attention"]
    attempt("sequence_parallel_size", config=misspelt, words='did you mean "sequence_parallel_size"?')
    whole = {**config_of(2, size), "train_batch_size": 8, "gradient_accumulation_steps": 2}
    attempt("train_batch_size", config=whole, words="it is 8, but micro-batches of 1 samples, 2 accumulation")
    auto = {**config_of(2, size), "train_micro_batch_size_per_gpu": "auto"}
    attempt("configuration", config=auto, words="give train_micro_batch_size_per_gpu a value")
    odd = {**config_of(2, size), "zero_optimization": {"stage": 9}}
    attempt("configuration", config=odd, words='"zero_optimization": stage: ')
    return found


def _with_a_tower():
    """A model that was built for images as well; none comes."""
    config = transformers.Qwen2VLConfig(
        text_config={**TINY, "num_attention_heads": 2, "num_key_value_heads": 2, "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}},
        vision_config={"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 24},
    )  # fmt: skip
    return transformers.Qwen2VLForConditionalGeneration(config)


class Rewards(torch.nn.Module):
    """A reward model: a body without a head, and a number for each token."""

    def __init__(self, body):
        super().__init__()
        self.body, self.value = body, torch.nn.Linear(body.config.hidden_size, 1)

    def forward(self, input_ids, **others):
        return self.value(self.body(input_ids, **others).last_hidden_state)


def _with_learned_prompts():
    """(kind, model) of PEFT's adapters that learn tokens, or keys and values of tokens."""
    import peft

    task = {"task_type": "CAUSAL_LM"}
    for config in (
        peft.PrefixTuningConfig(num_virtual_tokens=4, **task),
        peft.PromptTuningConfig(num_virtual_tokens=4, **task),
        peft.PromptEncoderConfig(num_virtual_tokens=4, encoder_hidden_size=8, **task),
        peft.MultitaskPromptTuningConfig(num_virtual_tokens=4, num_tasks=2, **task),
        peft.AdaptionPromptConfig(adapter_len=4, adapter_layers=1, **task),
    ):
        yield config.peft_type.value, peft.get_peft_model(model_of(), config)


def _with_lora_on_the_head():
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model_of(), LoraConfig(r=2, target_modules=["lm_head", "q_proj"]))


def test_initialize():
    for found in processes(2, _initialize, None):
        for name, words, refused, said in found:
            assert refused == name and words in said, (name, words, refused, said)


class Plain(torch.nn.Module):
    def __init__(self, own):
        super().__init__()
        self.o_proj = own.o_proj

    def forward(self, hidden_states, **_):
        return self.o_proj(hidden_states.repeat_interleave(4, -1)[..., : self.o_proj.in_features]), None


class PlainAttention(Plain):
    """Attention that does not come to the interface."""


class Prefixed(torch.nn.Module):
    """Hands keys and values of four tokens to the model inside, as prefix tuning does."""

    def __init__(self, model):
        super().__init__()
        self.model, self.config = model, model.config
        self.peft_config = {}  # the mark of PEFT's wrappers, whose calls are those of the model

    def forward(self, input_ids, **others):
        cache = transformers.DynamicCache()
        for layer in range(self.config.num_hidden_layers):
            cache.update(*torch.ones(2, len(input_ids), self.config.num_key_value_heads, 4, 8), layer)
        return self.model(input_ids, past_key_values=cache, **others)


def _switched(rank, engine, batch):
    """What is said of attention that is switched after a forward: of the model, of a layer, on one rank."""
    found, model = {}, engine.module
    model.set_attn_implementation("sdpa")
    found["model switched"] = _refused(engine, **batch)
    model.set_attn_implementation("burst")
    attention = model.model.layers[1].self_attn
    config = attention.config
    attention.config = copy.deepcopy(config)
    attention.config._attn_implementation = "eager"
    found["model switched in a layer"] = _refused(engine, **batch)
    if rank == 1:
        attention.config = config
    found["another rank" if rank else "model switched on one rank"] = _refused(engine, **batch)
    attention.config = config
    return found


def _with_a_cache(size, batch):
    """What is said of a shard without labels that comes with a cache: an empty one, or one of four tokens."""
    engine = start(config_of(2, size))[0]
    bare = {name: batch[name] for name in ("input_ids", "position_ids")}
    found, config = {}, engine.module.config
    for before in (0, 4):
        cache = transformers.DynamicCache()
        for layer in range(config.num_hidden_layers if before else 0):
            cache.update(*torch.ones(2, 1, config.num_key_value_heads, before, 8), layer)
        found[f"cache of {before} tokens, beside a shard"] = _refused(engine, **bare, past_key_values=cache)
    engine.destroy()
    return found


def _long(size):
    """Of a model with embeddings of 32 positions: what is said of 40 tokens; 31 are served."""
    config = transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, n_positions=32,
                                     attn_pdrop=0.0)  # fmt: skip
    engine = start(config_of(2, size), model=transformers.GPT2LMHeadModel(config))[0]
    (batch,) = burst.shard_loader(dataset(1), engine)
    found = {"position_ids beyond the table": _refused(engine, **batch)}
    (batch,) = burst.shard_loader(dataset(1, tokens=31), engine)
    assert engine(**batch).loss.item() > 0
    engine.destroy()
    return found


class _Broken(torch.utils.data.Dataset):
    """A disk that fails on one rank: there it is its own error, elsewhere it is named."""

    def __init__(self, broken):
        self.broken = broken

    def __len__(self):
        return 1

    def __getitem__(self, _):
        if self.broken:
            raise OSError("disk is broken")
        return {"input_ids": torch.arange(3, 19)}


def _forward(rank, size, _):
    engine, _ = start(config_of(2, size))
    (batch,) = burst.shard_loader(dataset(1), engine)
    found = {"another rank" if rank else "position_ids": _refused(engine, **(
        {**batch, "position_ids": None} if rank == 0 else batch))}  # fmt: skip
    ids, labels = batch["input_ids"], batch["shift_labels"]
    found["labels"] = _refused(engine, input_ids=ids, position_ids=batch["position_ids"], labels=labels)
    local = torch.arange(ids.shape[1])[None] * 1
    found["position_ids numbered in the shard"] = _refused(engine, **{**batch, "position_ids": local + 1})
    masked = torch.ones_like(ids)
    masked[:, -1] = 0
    found["attention_mask"] = _refused(engine, **batch, attention_mask=masked)
    found["output_attentions"] = _refused(engine, **batch, output_attentions=True)
    found["labels of one rank"] = _refused(
        engine, **(batch if rank else {k: x for k, x in batch.items() if k != "shift_labels"})
    )
    broken = burst.shard_loader(_Broken(rank == 1), engine)
    found["another rank" if rank == 0 else "disk"] = _refused(list, broken)
    wide = batch["position_ids"].repeat(3, 1)
    found["another rank" if rank else "position_ids of three rows"] = _refused(
        engine, **{**batch, "position_ids": batch["position_ids"] if rank else wide}
    )
    found["loader differs"] = _refused(list, burst.shard_loader(dataset(1, seed=rank), engine))
    longer = dataset(1 + rank)
    found["loader ends"] = _refused(
        list, burst.shard_loader(iter([x["input_ids"][None] for x in longer]), engine)
    )
    loss = engine(**batch).loss.item()  # the ring is as good as before
    assert loss > 0
    found |= _switched(rank, engine, batch)
    assert engine(**batch).loss.item() == loss
    own, layers = engine.module.model.layers[1].self_attn, engine.module.model.layers
    layers[1].self_attn = PlainAttention(own)
    found["model with another layer"] = _refused(engine, **batch)
    layers[1].self_attn = own
    engine.destroy()
    prefixed = start(config_of(2, size), model=Prefixed(model_of()))[0]
    found["cache"] = _refused(prefixed, **batch)
    prefixed.destroy()
    found |= _with_a_cache(size, batch)
    found |= _long(size)
    dropping = model_of()
    dropping.model.layers[1].self_attn.attention_dropout = 0.1  # behind its configuration's back
    dropping = start(config_of(2, size), model=dropping)[0]
    found["dropout"] = _refused(dropping, **batch)
    dropping.destroy()
    model = model_of()
    model.model.layers[1].self_attn = PlainAttention(model.model.layers[1].self_attn)
    found["model"] = _refused(start(config_of(2, size), model=model)[0], **batch)
    return found


def test_forward():
    for found in processes(2, _forward, None):
        for name, (refused, words) in found.items():
            assert refused is not None and name.startswith(refused.split()[0]), (name, words)
        assert "model.layers.1.self_attn (PlainAttention)" in found["model"][1]
        assert "model.layers.1.self_attn (PlainAttention)" in found["model with another layer"][1]
        assert "model.layers.0.self_attn (LlamaAttention) has attn_impl" in found["model switched"][1]
        assert "'sdpa'" in found["model switched"][1]
        assert "model.layers.1.self_attn (" in found["model switched in a layer"][1]
        assert "4 tokens of a cache" in found["cache"][1]
        assert "embeddings of 32 positions, the sequence has 40" in found["position_ids beyond the table"][1]


def test_configurations():
    for name, config in {
        "mesh": {"data_parallel_size": 2},
        "pipeline": {"pipeline": {"stages": 2}},
        "tensor_parallel": {"tensor_parallel": {"autotp_size": 2}},
    }.items():
        with pytest.raises(RefusedError) as error:
            refuse_config(config)
        assert error.value.name == name


@pytest.mark.parametrize("name", ["pipeline", "tensor_parallel", "optimizer", "zero_optimization"])
@pytest.mark.parametrize("value", [None, "auto", 3])
def test_parts_that_are_no_objects(name, value):
    with pytest.raises(RefusedError, match=f'"{name}" must be a JSON object, got {value!r}'):
        refuse_config({name: value})
        without_builds({name: value})


def test_settings_are_read_as_deepspeed_reads_them():
    for stage, read in ((3, 3), ("3", 3), (2, 2)):
        assert zero({"zero_optimization": {"stage": stage}}).stage == read
    assert zero({"zero_optimization": True}).stage == 1 and zero({}).stage == 0
    assert zero({"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}}).stage == 3
    with pytest.raises(RefusedError, match="zero_optimization"):
        zero({"zero_optimization": {"stage": 7}})


def test_versions(monkeypatch):
    errors.refuse_versions()
    monkeypatch.setattr(errors, "version", lambda package: "0.18.9")
    with pytest.raises(
        RefusedError, match="deepspeed 0.18.9 is installed, tested are releases from 0.19 to below"
    ):
        errors.refuse_versions()


def test_masks_that_are_not_understood_are_refused():
    from transformers import masking_utils as hf

    from burst_mcore import BurstConfig, Mask, Topology
    from burst_mcore.transformers.models.attention import Sequence, attend, mask_of, running

    own = {"batch_size": 1, "q_length": 8, "kv_length": 8}
    with pytest.raises(RefusedError, match="attention outside of an engine"):
        mask_of(**own, mask_function=hf.causal_mask_function)
    with running(Sequence(Topology.single(), BurstConfig(), 8)):
        assert mask_of(**own, mask_function=hf.sliding_window_causal_mask_function(3)).window == 3
        chunks = mask_of(**own, mask_function=hf.chunked_causal_mask_function(4, torch.zeros(1)))
        assert chunks.masks == (Mask.causal() & Mask.chunked(4),)
        for function in (
            hf.chunked_overlay(4, torch.zeros(1)),  # not causal
            hf.sliding_window_bidirectional_overlay(4),
            hf.bidirectional_mask_function,
            lambda b, h, q, k: k <= q,
        ):
            with pytest.raises(RefusedError, match="mask"):
                mask_of(**own, mask_function=function)
    q = torch.randn(1, 2, 8, 4)
    with pytest.raises(RefusedError, match="Linear got no mask"):
        attend(torch.nn.Linear(1, 1), q, q, q, None)


POSITIONS_BY_TOKENS = (
    "Roberta",
    "RobertaPreLayerNorm",
    "Camembert",
    "XLMRoberta",
    "XLMRobertaXL",
    "Data2VecText",
)


@pytest.mark.parametrize("family", POSITIONS_BY_TOKENS)
def test_models_that_count_positions_by_their_tokens(family):
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = getattr(transformers, f"{family}Config")(vocab_size=32, is_decoder=True, **sizes)
    with pytest.raises(RefusedError, match="counts positions by its tokens .*from its padding token on"):
        use_burst(getattr(transformers, f"{family}ForCausalLM")(config), 1)
    other = transformers.GPT2Config(
        vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=32, attn_pdrop=0.0
    )
    use_burst(transformers.GPT2LMHeadModel(other), 1)
