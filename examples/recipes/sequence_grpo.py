"""GRPO of TRL under FSDP2, with sequences that several ranks share (docs/frameworks/recipes-rl.md)."""

import torch.distributed as dist
from accelerate.parallelism_config import ParallelismConfig
from transformers import set_seed
from trl import GRPOTrainer

from burst_mcore.torch import replace_context_parallel


def over_sequences(args, cp_size):
    """Return a GRPOConfig with cp_size, which its constructor would refuse."""
    args.parallelism_config = ParallelismConfig(cp_size=cp_size, dp_shard_size=args.world_size // cp_size)
    args.generation_batch_size //= cp_size  # prompts: ranks of a sequence have the same
    return args


class SequenceGRPOTrainer(GRPOTrainer):
    """GRPOTrainer whose ranks of a sequence get the same rollouts, and count them once."""

    def __init__(self, model, reward_funcs, args, **options):
        rows = args.per_device_train_batch_size * args.steps_per_generation
        rows_of_evaluation = args.per_device_eval_batch_size if args.eval_strategy != "no" else 0
        if rows % args.num_generations or rows_of_evaluation % (
            args.num_generations_eval or args.num_generations
        ):
            raise ValueError("a rank must hold whole groups: per_device_..._batch_size, steps_per_generation")
        if (
            args.scale_rewards == "batch"
            or args.multi_objective_aggregation != "sum_then_normalize"
            or args.top_entropy_quantile < 1
        ):
            raise ValueError("statistics of a batch would count a row once for each rank of its sequence")
        replace_context_parallel(config={"layout": "striped"})
        super().__init__(model, reward_funcs, args, **options)
        self.sequence = self.accelerator.torch_device_mesh["cp"].get_group()
        set_seed(args.seed + dist.get_rank() // self.sequence.size())  # TRL gives each rank another

    def _generate(self, prompts):
        rollouts = [super()._generate(prompts)]
        dist.broadcast_object_list(rollouts, group=self.sequence, group_src=0)
        return rollouts[0]

    def _generate_and_score_completions(self, inputs):
        scored = super()._generate_and_score_completions(inputs)
        dist.broadcast(scored["advantages"], group=self.sequence, group_src=0)
        return scored

    def _track_num_input_tokens(self, inputs):
        """Batches of the loader are prompts as text; GRPO counts tokens itself."""
