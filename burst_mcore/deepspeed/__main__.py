"""`python -m burst_mcore.deepspeed SCRIPT ARGS...`, as `python -m burst_mcore.torch`: sp_size takes burst."""

from burst_mcore import deepspeed
from burst_mcore.scripts import launch

if __name__ == "__main__":
    launch("burst_mcore.deepspeed", deepspeed.replace_ulysses)
