"""A hybrid stack of local modules with Megatron's own attention: `--spec stock_hybrid stack_spec`."""

from models import with_stock_attention

from burst_mcore.megatron.spec import FromArguments, hybrid_stack_spec

stack_spec = FromArguments(lambda config: with_stock_attention(hybrid_stack_spec(config)))
