"""Generation with a cache: token by token as with Megatron's own attention, and refused on a ring."""

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from models import MLA, Case, build, megatron_on, needs_019, transformer_config
from test_core_attention import _core


def _generated(attention, fields=()):
    """Logits of a prompt and of each token after it, with Megatron's static cache; two prompts at once."""
    from megatron.core.inference.contexts import StaticInferenceContext

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


@pytest.mark.proves("generation with the static cache", "CP 1")
@needs_019
@pytest.mark.parametrize("fields", [(), (("softmax_type", "off-by-one"),)], ids=["plain", "sinks"])
@megatron_on(1)
def test_generation_with_a_cache_equals_megatrons_own(fields):
    want, got = (_generated(attention, fields) for attention in ("default", "burst"))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got[:, -1], got[:, -2], rtol=1e-4, atol=1e-5)  # the whole at once


@megatron_on(2)
def test_decoding_under_context_parallelism_is_refused():
    core = _core(transformer_config(Case(cp=2)))
    q, k = torch.randn(1, 1, 4, 16), torch.randn(9, 1, 4, 16)
    with pytest.raises(ValueError, match="does not decode with a cache under context parallelism.*1 tokens"):
        core(q, k, k, None)


@needs_019
@pytest.mark.parametrize("fields", [(), MLA], ids=["gqa", "mla"])
@megatron_on(2)
def test_a_prompt_with_a_cache_under_context_parallelism_is_refused(fields):
    from megatron.core.inference.contexts import StaticInferenceContext

    model = build(Case(attention="burst", cp=2, fields=fields)).eval()
    tokens, places = torch.zeros(2, 8, dtype=torch.int64), torch.arange(8).expand(2, -1)
    with torch.no_grad():
        with pytest.raises(ValueError, match="layer 1: burst attention does not generate with a cache"):
            model(tokens, places, None, inference_context=StaticInferenceContext(2, 16))
        assert model(tokens, places, None).isfinite().all()


@megatron_on(1)
def test_a_window_of_a_cache_is_that_of_the_sequence():
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
    with pytest.raises(ValueError, match="decodes by the layer's own mask.* that came is another"):
        core(q[-4:], k, v, torch.zeros_like(own), attn_mask_type=none)
