"""The command ``hvd-compress-horovod``: Horovod 0.28.1 for the frameworks of this environment.

It imports nothing of hvd_compress, and the standard library alone.
"""
