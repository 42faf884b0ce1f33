"""`python -m burst_mcore.torch SCRIPT ARGS...`, under torchrun and accelerate launch: cp_size takes burst."""

import runpy
import sys

from burst_mcore.torch.accelerate import replace_context_parallel

if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python -m burst_mcore.torch SCRIPT [ARGUMENTS]; -m MODULE in the place of SCRIPT")
    replace_context_parallel()
    sys.argv = sys.argv[1:]
    if sys.argv[0] == "-m":
        sys.argv = sys.argv[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
