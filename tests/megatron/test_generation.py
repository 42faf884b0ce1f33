"""Generation with a cache: token by token as with Megatron's own attention, and refused on a ring."""

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from models import MLA, Case, build, needs_019, transformer_config
from test_core_attention import _core, in_megatron


def _generated(attention, fields=()):
    """Logits of a prompt and of each token after it, with Megatron's static cache; two prompts at once."""
    from megatron.core import tensor_parallel
    from megatron.core.inference.contexts import StaticInferenceContext

    tensor_parallel.model_parallel_cuda_manual_seed(1)
    torch.manual_seed(0)
    model = build(Case(attention=attention, fields=fields)).eval()
    tokens = torch.randint(0, 96, (2, 12), generator=torch.Generator().manual_seed(2))
    context, found = StaticInferenceContext(2, 16), []
    with torch.no_grad():
        for first, last in ((0, 6), *((at, at + 1) for at in range(6, 12))):
            at = torch.arange(first, last).expand(2, -1)
            later = torch.ones(last - first, last, dtype=torch.bool).triu(1 + first)[None, None]
            part = tokens[:, first:last]
            logits = model(part, at, later if first == 0 else None, inference_context=context)
            context.increment_sequence_len_offset(last - first)
            found.append(logits[:, -1])
    whole = torch.ones(12, 12, dtype=torch.bool).triu(1)[None, None]
    with torch.no_grad():
        found.append(model(tokens, torch.arange(12).expand(2, -1), whole)[:, -1])
    return torch.stack(found, 1)


def _generation(fields):
    want, got = (_generated(attention, fields) for attention in ("default", "burst"))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got[:, -1], got[:, -2], rtol=1e-4, atol=1e-5)  # the whole at once


@pytest.mark.proves("generation with the static cache", "CP 1")
@needs_019
@pytest.mark.parametrize("fields", [(), (("softmax_type", "off-by-one"),)], ids=["plain", "sinks"])
def test_generation_with_a_cache_equals_megatrons_own(fields):
    in_megatron(_generation, fields)


def _decoding_on_a_ring():
    core = _core(transformer_config(Case(cp=2)))
    q, k = torch.randn(1, 1, 4, 16), torch.randn(9, 1, 4, 16)
    with pytest.raises(ValueError, match="does not decode with a cache under context parallelism.*1 tokens"):
        core(q, k, k, None)


def test_decoding_under_context_parallelism_is_refused():
    in_megatron(_decoding_on_a_ring, cp=2)


def _prompt_on_a_ring(fields):
    from megatron.core.inference.contexts import StaticInferenceContext

    model = build(Case(attention="burst", cp=2, fields=fields)).eval()
    tokens, places = torch.zeros(2, 8, dtype=torch.int64), torch.arange(8).expand(2, -1)
    with torch.no_grad():
        with pytest.raises(ValueError, match="layer 1: burst attention does not generate with a cache"):
            model(tokens, places, None, inference_context=StaticInferenceContext(2, 16))
        assert model(tokens, places, None).isfinite().all()


@needs_019
@pytest.mark.parametrize("fields", [(), MLA], ids=["gqa", "mla"])
def test_a_prompt_with_a_cache_under_context_parallelism_is_refused(fields):
    in_megatron(_prompt_on_a_ring, fields, cp=2)


def _window_of_a_cache():
    core = _core(window_size=(3, 0))
    q, k, v = (torch.randn(9, 2, 4, 16) for _ in range(3))
    whole = core(q, k, v, None)
    torch.testing.assert_close(core(q[-1:], k, v, None), whole[-1:])
    torch.testing.assert_close(core(q[-4:], k, v, None), whole[-4:])
    none = AttnMaskType.no_mask  # what Megatron says of a call that decodes
    torch.testing.assert_close(core(q[-4:], k, v, None, attn_mask_type=none), whole[-4:])
    ahead = torch.arange(9)[None] - torch.arange(5, 9)[:, None]
    own = ((ahead > 0) | (ahead < -3))[None, None]
    torch.testing.assert_close(core(q[-4:], k, v, own, attn_mask_type=none), whole[-4:])
    with pytest.raises(
        ValueError, match="decodes by the layer's own mask.*attention_mask that came is another"
    ):
        core(q[-4:], k, v, torch.zeros_like(own), attn_mask_type=none)


def test_a_window_of_a_cache_is_that_of_the_sequence():
    in_megatron(_window_of_a_cache)


class _Letters:
    """A tokenizer: a letter is a token."""

    vocab_size, eod, bos = 96, 95, 0

    def tokenize(self, text, add_BOS=False):
        return [ord(letter) % 90 for letter in text]

    def detokenize(self, tokens, **_):
        return "".join(chr(65 + token % 26) for token in tokens)


def _by_the_engine(attention):
    """Tokens and log-probabilities of two prompts, by Megatron's static engine."""
    from megatron.core import tensor_parallel
    from megatron.core.inference.contexts import StaticInferenceContext
    from megatron.core.inference.engines.static_engine import StaticInferenceEngine
    from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
    from megatron.core.inference.sampling_params import SamplingParams
    from megatron.core.inference.text_generation_controllers import text_generation_controller

    tensor_parallel.model_parallel_cuda_manual_seed(1)
    torch.manual_seed(0)
    model = GPTInferenceWrapper(build(Case(attention=attention)).eval(), StaticInferenceContext(2, 64))
    controller = text_generation_controller.TextGenerationController(model, _Letters())
    engine = StaticInferenceEngine(controller, max_batch_size=2, legacy=True)
    sampling = SamplingParams(num_tokens_to_generate=10, top_k=1, return_log_probs=True)
    done = engine.generate(["hello world", "another"], sampling_params=sampling)
    return [(request.generated_tokens.tolist(), request.generated_log_probs) for request in done]


def _engines():
    for ours, theirs in zip(_by_the_engine("burst"), _by_the_engine("default"), strict=True):
        assert ours[0] == theirs[0] and len(ours[0]) == 10
        assert ours[1] == pytest.approx(theirs[1], rel=1e-5)


@pytest.mark.proves("generation with the static cache", "the static engine at CP 1")
@needs_019
def test_megatrons_static_engine_generates_the_same_tokens():
    in_megatron(_engines)
