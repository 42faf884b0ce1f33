"""`python -m burst_mcore.megatron SCRIPT ARGS...`, under torchrun too: see `launcher`."""

import sys

from burst_mcore.megatron.launcher import launch

if __name__ == "__main__":
    launch(sys.argv[1:])
