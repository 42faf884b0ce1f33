"""The methods to compare: each file adds rows to METHODS when imported, by the kind of their task.

attention     the kind "attention": attention of a sharded sequence, ours and DeepSpeed's Ulysses; `peers` has
              torch's context_parallel, and libraries for GPUs
heads         the kind "heads": LM heads with their loss
layers        the kind "layers": checkpointing of a model's layers; "offload": with results on the host
kernels       the kind "kernels": local attention kernels, and bare calls of one
steps         our settings in training steps; `steps_deepspeed`, `steps_fsdp` and `steps_megatron`
              have the kinds "deepspeed", "fsdp" and "megatron"
virtual_rank  one rank of a ring, alone on a device, for the subject virtual-ring

A new method is a row in one of these files, and is measured by every subject of its kind.
"""

# ruff: noqa: F401
import burst_bench.methods.attention
import burst_bench.methods.heads
import burst_bench.methods.kernels
import burst_bench.methods.layers
import burst_bench.methods.peers
import burst_bench.methods.steps_deepspeed
import burst_bench.methods.steps_fsdp
import burst_bench.methods.steps_megatron
from burst_bench.core import METHODS as METHODS
