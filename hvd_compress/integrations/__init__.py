"""The parts that the bindings to frameworks share: Horovod's names, optimizers, checkpoints."""
