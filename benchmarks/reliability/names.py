"""What the command line offers, apart from what it takes to run it."""

#: jobs of the campaign of kills
JOBS = ["horovod", "horovod-gloo", "mpi", "ddp", "server", "elastic", "network"]
#: methods of the campaign of memory
METHODS = ["none", "fp16", "topk:density=0.05", "dgc:density=0.05", "powersgd", "onebit", "fp8"]
METHODS += ["ef21:density=0.05"]
