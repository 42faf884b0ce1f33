"""`python -m burst_mcore.torch SCRIPT ARGS...`, under torchrun and accelerate launch: cp_size takes burst."""

from burst_mcore.scripts import launch
from burst_mcore.torch import replace_context_parallel

if __name__ == "__main__":
    launch("burst_mcore.torch", replace_context_parallel)
