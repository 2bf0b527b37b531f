"""``DistributedOptimizer`` over Horovod, and what it registers with Horovod."""
