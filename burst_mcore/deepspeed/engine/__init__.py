"""The entry points for users: initialize, the doctor, and a stand-in for DistributedAttention."""
