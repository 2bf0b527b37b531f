"""The compiled loops on a GPU: kernels in Triton, and the loops that launch them."""
