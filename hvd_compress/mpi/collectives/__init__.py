"""Collectives over MPI: what users call, the algorithms, and the choice among them.

``dense_*`` sends arrays whole, ``sparse_*`` vectors given by indices and values, and ``payloads``
bytes.  An algorithm has one file.  ``choosing`` goes by times that ``measuring`` has taken.
"""
