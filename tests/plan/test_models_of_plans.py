"""Models that a plan reads from a config.json: their sizes, their windows, and those that are refused."""

import json

import pytest

from burst_plan.step.advice import of_windows
from burst_plan.step.model import from_config, model_of
from burst_plan.step.planned import planned

LLAMA = dict(
    model_type="llama", hidden_size=1024, num_attention_heads=16, num_key_value_heads=4, vocab_size=32000,
    intermediate_size=2816, num_hidden_layers=8,
)  # fmt: skip
KINDS = (
    "bloom cohere2 deepseek_v2 falcon gemma2 gpt2 gpt_bigcode gptj gpt_oss llama mistral mixtral olmoe opt "
    "phi phi3 qwen2_moe qwen3 qwen3_moe starcoder2"
).split()


def _folder(tmp_path, config):
    (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return str(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_those_of_transformers(kind, tmp_path):
    transformers = pytest.importorskip("transformers")
    import torch

    config = transformers.CONFIG_MAPPING[kind]()
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    positions = [
        m.weight.numel() for name, m in model.named_modules() if name.endswith((".wpe", "positions"))
    ]
    counted = sum({id(p): p.numel() for p in model.parameters()}.values()) - sum(positions)
    assert model_of(str(tmp_path))[0].parameters == pytest.approx(counted, rel=2e-3)


BILLIONS = {
    7.62: ["Qwen/Qwen2.5-7B-Instruct"],
    72.7: ["Qwen2.5-72B"],
    8.19: ["Qwen3-8B"],
    32.8: ["Qwen/Qwen3-32B"],
    30.5: ["Qwen3-30B-A3B-Instruct-2507"],
    235.1: ["qwen3-235b-a22b"],
    46.7: ["mistralai/Mixtral-8x7B-Instruct-v0.1"],
    671.0: ["deepseek-ai/DeepSeek-V3-0324"],
    20.9: ["openai/gpt-oss-20b"],
    116.8: ["GPT-OSS-120B"],
    8.03: ["meta-llama/Llama-3.1-8B", "Llama3-8B"],
    70.6: ["meta-llama/Llama-3.3-70B-Instruct"],
    405.8: ["llama3-405b"],
    6.74: ["meta-llama/Llama-2-7b-hf", "7B"],
}


def test_models_have_the_names_and_the_parameters_that_their_makers_print():
    for billions, names in BILLIONS.items():
        for name in names:
            assert model_of(name)[0].parameters / 1e9 == pytest.approx(billions, rel=5e-3), name
    for name in ("Llama-3.2-8B", "Qwen2-57B", "qwen3", "llama3-8b/", "Llama-4-8B"):
        with pytest.raises(ValueError, match="unknown model .*: give one of 7b, .*gpt-oss-120b"):
            model_of(name)


SLIDING = {"sliding_window": 4096}
KINDS_OF_LAYERS = ["sliding_attention"] * 3 + ["full_attention"] * 5


@pytest.mark.parametrize(
    ("changes", "windowed"),
    [
        ({"model_type": "mistral"}, 8),
        ({"model_type": "mistral", "sliding_window": None}, 0),
        ({"model_type": "qwen2"}, 0),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 6}, 2),
        ({"model_type": "gemma2"}, 4),
        ({"model_type": "gemma3_text"}, 7),
        ({"layer_types": KINDS_OF_LAYERS}, 3),
    ],
)
def test_layers_with_a_window_are_counted(changes, windowed):
    model = from_config({**LLAMA, **SLIDING, **changes}, "model")
    assert model.windowed == windowed and model.window == (4096 if windowed else 0)


def test_a_models_window_is_the_mask_of_its_plan(tmp_path):
    mistral = _folder(tmp_path, {**LLAMA, "model_type": "mistral", "sliding_window": 4096})
    answer = planned(mistral, "64K", "a800:1x4", 1, None)
    causal = planned(mistral, "64K", "a800:1x4", 1, None, "causal")
    assert answer.mask == "window:4096" and answer.chosen.seconds < causal.chosen.seconds
    assert not of_windows(answer.chosen) and "asks for sliding_window 4096" in of_windows(causal.chosen)[0]
    assert planned(mistral, "4K", "a800:1x4", 1, None).mask == "causal"
    gemma = _folder(tmp_path, {**LLAMA, "model_type": "gemma2", "sliding_window": 4096})
    answer = planned(gemma, "64K", "a800:1x4", 1, None)
    assert answer.mask == "causal" and "4 of 8 layers have a window" in of_windows(answer.chosen)[0]
