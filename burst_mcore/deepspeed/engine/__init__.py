"""What a user calls: initialize, the doctor, and a stand-in for DistributedAttention."""
