"""A device that is not there: the package's control flow on CUDA runs unmodified, and a checker looks on.

ranks      ranks as threads, each with a device; what is put in the place of torch's functions
tensors    tensors that say `cuda`: each operator is a launch, with the bytes that it reads and writes
streams    torch.cuda: streams, events, current streams and devices of each thread
memory     the caching allocator's rule, pinned memory, races
groups     groups of NCCL and of gloo between ranks, deadlocks
collectives  the functions of torch.distributed
kernels    stand-ins for the kernels of all adapters
clocks     vector clocks, and the findings
cases      what the package is made to do, held to the results of one process

Kinds of findings: race (unordered work on two streams), reuse (memory gets a new owner while in use), wait (a
host waits for its device), communicator (made in a backward, or started by a message), deadlock, order (ranks
make different collectives), message (sizes differ), device (memory of two devices), values, error.
"""
