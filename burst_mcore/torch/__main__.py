"""`python -m burst_mcore.torch SCRIPT ARGS...`, under torchrun and accelerate launch: cp_size takes burst."""

import sys

from burst_mcore.scripts import script_of

USAGE = "usage: python -m burst_mcore.torch SCRIPT [ARGUMENTS]; -m MODULE in the place of SCRIPT"

if __name__ == "__main__":
    run = script_of(sys.argv[1:], "burst_mcore.torch", USAGE)
    from burst_mcore.torch.accelerate import replace_context_parallel

    replace_context_parallel()
    run()
