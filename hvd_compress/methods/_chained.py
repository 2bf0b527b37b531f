"""Bases of the methods that are a chain: chosen per tensor, or the same for all."""

from __future__ import annotations

import abc
import functools

from hvd_compress.base import Array, Compressor, Context, Exchange, State
from hvd_compress.chain import Chain


class Chained(Compressor):
    @abc.abstractmethod
    def chain(self, gradient: Array, context: Context) -> Chain:
        """The chain for this exchange of a tensor."""

    def template(self, gradient: Array) -> Chain:
        """A chain that keeps the same state as those of all exchanges of the tensor."""
        return self.chain(gradient, Context())

    def init(self, gradient: Array) -> State:
        return self.template(gradient).init(gradient)

    def per_rank(self, gradient: Array) -> frozenset[str]:
        return self.template(gradient).per_rank(gradient)

    def repaired(self, gradient: Array, state: State) -> State:
        return self.template(gradient).repaired(gradient, state)

    def exchange(self, gradient: Array, state: State, context: Context) -> Exchange:
        return self.chain(gradient, context).exchange(gradient, state, context)


class OneChain(Chained):
    """One chain for all tensors and steps, made of the options."""

    def __post_init__(self) -> None:
        assert self._chain  # its blocks check the options

    @functools.cached_property
    @abc.abstractmethod
    def _chain(self) -> Chain: ...

    def chain(self, gradient: Array, context: Context) -> Chain:
        return self._chain

    @property
    def needs_epoch(self) -> bool:
        return self._chain.needs_epoch

    @property
    def homogeneous(self) -> bool:  # type: ignore[override]
        return self._chain.homogeneous
