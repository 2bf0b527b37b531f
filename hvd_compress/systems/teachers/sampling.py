"""The same examples in the same order on ranks that exchange predictions."""

from __future__ import annotations

from collections.abc import Iterator, Sized

import numpy as np
import numpy.typing as npt

from hvd_compress.config import check_seed, check_whole
from hvd_compress.errors import ConfigError


class CoordinatedSampler:
    """Indices of examples, drawn from seed and epoch alone: a ``sampler=`` of torch's
    ``DataLoader``, and an iterable of indices for any other use.

    With ``places`` > 1, ranks that train data parallel share the examples: those of one place see
    the same ones.  Up to ``places`` - 1 examples are left out in an epoch, so that all places have
    equally many.

    Args:
        examples: the data set, or its length.
        seed: the same on all ranks.
        place, places: this rank's place in its group, and the size of the group.
        shuffle: draw another order in every epoch.

    >>> sampler = CoordinatedSampler(5, seed=1, place=0, places=2)
    >>> list(sampler), len(sampler)
    ([4, 1], 2)
    """

    def __init__(
        self,
        examples: Sized | int,
        *,
        seed: int = 0,
        place: int = 0,
        places: int = 1,
        shuffle: bool = True,
    ) -> None:
        self.length = len(examples) if isinstance(examples, Sized) else examples
        check_whole("examples", self.length, 1)
        check_seed(seed)
        check_whole("places", places, 1)
        check_whole("place", place, 0)
        if place >= places:
            raise ConfigError(f"place={place} must be less than places={places}")
        self.seed, self.place, self.places, self.shuffle = seed, place, places, shuffle
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of this epoch; call it on all ranks at the start of each."""
        check_whole("epoch", epoch, 0)
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length // self.places

    def __iter__(self) -> Iterator[int]:
        order: npt.NDArray[np.int_] = np.arange(self.length)
        if self.shuffle:
            order = np.random.default_rng([self.seed % 2**64, self.epoch]).permutation(order)
        return iter(order[: len(self) * self.places][self.place :: self.places].tolist())
