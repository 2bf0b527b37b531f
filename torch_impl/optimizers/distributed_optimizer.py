"""``DistributedOptimizer``: checks its options and makes a :class:`CompressedOptimizer`, or with a
training method a :class:`LocalStepsOptimizer`."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch

from hvd_compress.config import check_choice, check_process_set, is_one_of
from hvd_compress.engines.base import Engine
from hvd_compress.errors import ConfigError, UnsupportedError
from hvd_compress.integrations.environment import HOROVODS, compare
from hvd_compress.integrations.horovod import bind_call, hand_on, in_place_of, is_ours, with_options
from hvd_compress.integrations.options import HorovodOptions
from hvd_compress.methods import as_compressor
from hvd_compress.reduce.nodes import Node

from ..engine import gather_bytes
from ..parameters import Groups, Parameter, check_groups, names_of_parameters
from ..state.momentum import check_group, check_sparse_step
from .binding import ParameterBinding
from .compressed_optimizer import CompressedOptimizer
from .local_steps import check_users, train_locally
from .nodes import check_options, over_horovod


def wrap_factory(
    hvd: Any,
    factory: Callable[..., Any],
    make_engine: Callable[[Any, float], Engine],
    engine_of: Callable[[Any], Engine],
) -> Callable[..., Any]:
    """Return Horovod's ``DistributedOptimizer`` that takes this package's compressors and training
    methods as well.

    Args:
        hvd: the module ``horovod.torch``.
        factory: its ``DistributedOptimizer``, to which all other compressions go.
        make_engine: of a process set and a predivide factor.
        engine_of: of a process set, a mesh or a group of ``torch.distributed``, for training
            methods.
    """
    signature = with_options(factory, seed=0, sparse_step=False, method=None, nodes=None)

    gather = functools.partial(gather_bytes, hvd)

    @in_place_of(factory)
    def DistributedOptimizer(*args: Any, **kwargs: Any) -> Any:  # noqa: N802
        """Return an optimizer whose ``step()`` steps along compressed averages over all ranks::

            optimizer = hvd.DistributedOptimizer(
                optimizer, model.named_parameters(), compression=hvd.DGC(density=0.01)
            )

        Its class is made from that of ``optimizer``: it is a :class:`CompressedOptimizer`, or with
        ``method`` a :class:`LocalStepsOptimizer`.

        Args:
            optimizer: of any class of ``torch.optim`` but ``LBFGS``; methods that take momentum and
                weight decay over get them from it.
            named_parameters: ``model.named_parameters()``, for statistics and rules by name.
            compression: a method such as ``hvd.DGC``, an instance, its name, or a text such as
                "dgc:density=0.01".  With Horovod's own, and with none unless ``HVD_COMPRESSION``
                names one, the optimizer is Horovod's.
            seed: for randomness that the ranks share.
            sparse_step: averages of top-k's elements are sparse gradients, so that
                ``torch.optim.SGD`` writes no other elements of a parameter.
            method: a training method, such as ``hvd.DiLoCo(sync_every=100)``, instead.
            nodes: "auto" or a number; ranks of a node then share one exchange with other nodes.

        Raises:
            MismatchError: ranks differ in method or options, mostly in the first step.
        """
        given = signature.bind(*args, **kwargs)
        if given.arguments.get("method") is not None:
            from hvd_compress.systems.base import train_by_method

            given.apply_defaults()
            train = functools.partial(train_locally, engine_of)
            return train_by_method(train, signature, given.arguments)
        check_process_set(given.arguments.get("process_set", hvd.global_process_set))
        call = bind_call(signature, args, kwargs, hvd, gather)
        del call.arguments["method"]
        compression = call.arguments["compression"]
        if hasattr(compression, "compress") and not is_ours(compression):
            if call.arguments["sparse_step"] or call.arguments["nodes"] is not None:
                option = "sparse_step=True" if call.arguments["sparse_step"] else "nodes"
                raise ConfigError(f"{option} needs one of this package's methods: hvd.TopK")
            compare(hvd, call.arguments["process_set"], gather, HOROVODS)
            return hand_on(factory, call.arguments)
        in_nodes = functools.partial(over_horovod, hvd, make_engine)
        return distribute(hvd, make_engine, in_nodes, **call.arguments)

    DistributedOptimizer.__signature__ = signature
    DistributedOptimizer.__wrapped_by_hvd_compress__ = True
    return DistributedOptimizer


def distribute(
    hvd: Any,
    make_engine: Callable[[Any, float], Engine],
    in_nodes: Callable[[Any, float], Node | None],
    *,
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Parameter]] | None,
    compression: Any,
    num_groups: int,
    groups: Groups,
    sparse_step: bool,
    nodes: Any,
    **shared: Any,
) -> CompressedOptimizer:
    """Return a distributed optimizer of a class made from that of ``optimizer``.

    Args:
        hvd: the module ``horovod.torch``, or another with its functions.
        make_engine: of the process set and the predivide factor.
        in_nodes: of the nodes and the predivide factor.
        shared: those of :class:`HorovodOptions`.

    The rest are options of ``DistributedOptimizer``.
    """
    method = as_compressor(compression)
    check_process_set(shared["process_set"])  # None, all ranks elsewhere, is no set of Horovod's
    if not is_one_of(num_groups, (0,)):
        warnings.warn(
            "num_groups is deprecated: pass groups instead", DeprecationWarning, stacklevel=3
        )
        check_groups(num_groups, "num_groups")
        groups = num_groups if groups is None else groups
    check_groups(groups)
    options = HorovodOptions.checked(hvd, method, groups=groups, **shared)
    check_users(optimizer)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedError(
            "LBFGS evaluates gradients inside step(), where they cannot be averaged"
        )
    for group in optimizer.param_groups:
        check_group(method, optimizer, group)
    check_choice("sparse_step", sparse_step, (True, False))
    if sparse_step:
        check_sparse_step(optimizer, method)
    check_options(nodes, method, options, hvd, sparse_step)
    user_class = type(optimizer)
    cls = type(user_class.__name__, (CompressedOptimizer, user_class), {})
    distributed: CompressedOptimizer = cls(
        optimizer,
        names=names_of_parameters(optimizer.param_groups, named_parameters),
        options=options,
    )
    predivide = options.gradient_predivide_factor
    node = None if nodes is None else in_nodes(nodes, predivide)
    binding = ParameterBinding(
        distributed,
        method,
        hvd,
        sums=options.op == hvd.Sum,
        engine=make_engine(options.process_set, predivide) if node is None else node.between,
        node=node,
        seed=options.seed,
        sparse_step=sparse_step,
    )
    distributed.begin(binding)
    return distributed
