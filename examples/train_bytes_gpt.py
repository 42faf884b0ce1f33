"""Train a GPT or a hybrid model on bytes with Megatron: an ordinary training script for Megatron-Core 0.19.

    torchrun --nproc-per-node 8 examples/train_bytes_gpt.py --data-path data/stdlib ...

Megatron's own builder makes the model from the command line: a HybridModel if `--hybrid-layer-pattern` is
given, else a GPT; `--spec` is read, too. Nothing here knows of burst_mcore: `python -m burst_mcore.megatron
examples/train_bytes_gpt.py ...` runs the same file with burst attention, and on a CPU.
`examples/prepare_bytes.py` writes the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.enums import ModelType
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import (
    flatten_batch_for_packed_sequences,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args, get_timers, pretrain, print_rank_0
from megatron.training.argument_utils import (
    gpt_config_from_args,
    hybrid_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

Batch = dict[str, torch.Tensor | None]
FIELDS = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask")
PACKED = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen")  # with --dataloader-inter-document-masking
DEFAULTS = {
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 257,
}  # the bytes and, last, the end of a document


def get_batch(data_iterator: Iterator, vp_stage: int | None) -> Batch:
    """Return this rank's part of the next micro batch: fields [b, s / cp], packed ones [1, b s / cp]."""
    args = get_args()
    is_packed = args.dataloader_inter_document_masking
    names = (*FIELDS, *PACKED)
    if not is_packed and not is_first_or_last_pipeline_stage(vp_stage):
        return dict.fromkeys(names)
    batch: Batch = {}
    if mpu.get_tensor_model_parallel_rank() == 0:
        batch = next(data_iterator)  # with `dataset_id`, too, of a blend: as in Megatron's pretrain_gpt.py
        batch |= {key: batch[key].cuda(non_blocking=True) if key in batch else None for key in names}
    batch = get_batch_on_this_tp_rank(
        batch,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        has_cu_seqlens=is_packed,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        cp_size=args.context_parallel_size,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    return get_batch_on_this_cp_rank(
        flatten_batch_for_packed_sequences(batch),
        is_hybrid_cp=False,
        cp_group=mpu.get_context_parallel_group(),
        use_per_sequence_balancing=is_packed,
    )


def packed_seq_params(batch: Batch) -> PackedSeqParams | None:
    """Return the documents of a packed batch as Megatron's models take them; None if it is not packed."""
    if batch["cu_seqlens"] is None:
        return None
    ends, longest = batch["cu_seqlens"][0], int(batch["max_seqlen"])
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest
    )


def loss_func(
    loss_mask: torch.Tensor, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Megatron's contract: the sum over this rank's tokens, their number, and both to report as a mean."""
    loss_mask = loss_mask.reshape(-1).float()
    loss = torch.sum(losses.reshape(-1).float() * loss_mask)
    tokens = loss_mask.sum().detach().to(torch.int)
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens.to(loss.dtype)])}


def forward_step(data_iterator: Iterator, model: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    timers("batch-generator").stop()
    losses = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
        packed_seq_params=packed_seq_params(batch),
    )
    return losses, partial(loss_func, batch["loss_mask"])


def is_dataset_built_on_rank(vp_stage: int | None = None) -> bool:
    every_stage = get_args().dataloader_inter_document_masking  # each needs the ends of documents
    return mpu.get_tensor_model_parallel_rank() == 0 and (
        every_stage or is_first_or_last_pipeline_stage(vp_stage)
    )


def datasets_provider(samples: list[int], vp_stage: int | None = None) -> tuple:
    """The training, validation and test sets with these numbers of samples."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        inter_document_masking=args.dataloader_inter_document_masking,
    )
    print_rank_0("> building the datasets ...")
    on_rank = partial(is_dataset_built_on_rank, vp_stage=vp_stage)
    return BlendedMegatronDatasetBuilder(GPTDataset, samples, on_rank, config).build()


datasets_provider.is_distributed = True  # each rank asks for its own


def main() -> None:
    args = parse_and_validate_args(args_defaults=DEFAULTS)
    model_config = hybrid_config_from_args if args.hybrid_layer_pattern else gpt_config_from_args
    config = pretrain_cfg_container_from_args(args, model_config(args))
    pretrain(config, datasets_provider, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    main()
