"""The command ``hvd-compress-horovod``: Horovod 0.28.1 for the frameworks of this environment.

Its modules import nothing else of hvd_compress, and the standard library alone.
"""
