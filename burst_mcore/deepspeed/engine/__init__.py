"""The entry points for users.

initialize             from a model and DeepSpeed's JSON to an engine that trains over sharded sequences
prepare                the model before DeepSpeed makes an engine of it, as the section asks
distributed_attention  a stand-in for DeepSpeed's DistributedAttention
"""
