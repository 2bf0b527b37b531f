"""Scenarios inside MPI jobs, one module per topic: every public function without arguments.

Each is valid for any number of ranks; expectations are computed from rank and size.
"""

WITHOUT_TORCH = (
    "dense",
    "agreement",
    "algorithms",
    "sparse",
    "training",
    "hierarchical",
)
MODULES = (*WITHOUT_TORCH, "tensors")
