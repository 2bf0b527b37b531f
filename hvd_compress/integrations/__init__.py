"""What the bindings to frameworks share: Horovod's names, optimizers, checkpoints."""
