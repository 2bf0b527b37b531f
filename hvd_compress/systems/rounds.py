"""Methods with local steps between exchanges, in which all ranks meet."""

from hvd_compress.optimizers.outer import OuterSGD
from hvd_compress.systems.base import methods_in
from hvd_compress.systems.diloco import DiLoCo
from hvd_compress.systems.easgd import EASGD
from hvd_compress.systems.leader_sgd import LeaderSGD
from hvd_compress.systems.local_sgd import LocalSGD
from hvd_compress.systems.sparse_loco import SparseLoCo

__all__ = ["EASGD", "DiLoCo", "LeaderSGD", "LocalSGD", "OuterSGD", "SparseLoCo"]

#: the training methods
METHODS = methods_in(globals())
