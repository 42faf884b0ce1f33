"""Hugging Face transformers: unmodified causal LMs over sharded sequences, whoever trains them.

    errors      UnsupportedError: everything that is refused has a name
    data        batches of whole sequences, sharded to the ranks
    models      which models are supported, their attention and positions over shards
    prepare     a model made ready, in place
    trainer     the Trainer's evaluation and counts of tokens

The adapters of DeepSpeed (burst_mcore.deepspeed) and of plain PyTorch (burst_mcore.torch) stand on this.
"""
