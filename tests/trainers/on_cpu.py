"""Run a script in which Accelerate shards a model by FSDP2 on a CPU, which it does by itself on
accelerators only: ``python tests/trainers/on_cpu.py SCRIPT``."""

import runpy
import sys

from accelerate.state import AcceleratorState, DistributedType

_begin = AcceleratorState.__init__


def _on_cpu(state, *arguments, fsdp_plugin=None, **options):
    _begin(state, *arguments, fsdp_plugin=fsdp_plugin, **options)
    if fsdp_plugin is not None:
        state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, fsdp_plugin


AcceleratorState.__init__ = _on_cpu
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
