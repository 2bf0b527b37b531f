"""The names of algorithms over MPI, each that of a file ``dense_*`` or ``sparse_*`` in
``hvd_compress/mpi/collectives``.  Options are checked where there is no MPI, too."""

DENSE = ("direct", "halving_doubling", "ring")
SPARSE = ("allgather", "split_allgather")
#: that choose among these, or are made of them
_COMPOSED = ("auto", "hierarchical")
#: for ``Sum.algorithm`` and ``SparseSum.algorithm``
SUMS = (None, *sorted((*DENSE, *_COMPOSED)))
SPARSE_SUMS = tuple(sorted((*SPARSE, *_COMPOSED)))
