"""The entry points for users.

initialize             from a model and DeepSpeed's JSON to an engine that trains over sharded sequences
distributed_attention  a stand-in for DeepSpeed's DistributedAttention
"""
