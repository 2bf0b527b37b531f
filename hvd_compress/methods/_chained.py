"""Base of the methods that are a chain, chosen per tensor."""

from __future__ import annotations

import abc

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
