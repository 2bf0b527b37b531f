"""The command ``hvd-compress``: look at an environment, build Horovod, list methods."""
