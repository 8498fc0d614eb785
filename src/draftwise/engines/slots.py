"""Keys and values of several sequences in one storage, so that one forward can serve them all.

`Row` is a layer of one sequence's cache: a view of a storage [1, heads, capacity, size] that has
room to spare. Appending writes in place, where the library's own layer copies the whole cache for
every token; cropping and moving kept rows change the view alone.

A batched forward needs the rows of its sequences in one tensor. `Group` allots a storage
[sequences, heads, capacity, size] a layer, copies each cache in once, and binds the sequences' rows
to it as views: whatever a sequence does alone afterwards happens in the group's storage. As long as
the same sequences come back, nothing is copied again. Rows hold different numbers of tokens, so
each one's new keys are written behind its own, and a mask hides what lies behind them.

Cost: O(new tokens) a forward; one copy of all caches when a sequence joins, leaves or outgrows the
capacity. Lossless: what a row attends to is exactly what its sequence holds (tests compare every
row with its own uncached forward).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

BLOCK = 256  # capacity grows by a half, in blocks of so many tokens


def _capacity(tokens: int) -> int:
    return -(-(tokens + tokens // 2) // BLOCK) * BLOCK


class Row(DynamicLayer):
    """`keys` and `values` are what is held, as everywhere; the storage behind them is larger."""

    keys: Any
    values: Any

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        held = self.keys.shape[-2] if self.is_initialized else 0
        n = held + key_states.shape[-2]
        if not self.is_initialized:
            self.device, self.is_initialized = key_states.device, True
            self.storage = [self._room(key_states, n), self._room(value_states, n)]
        elif n > self.storage[0].shape[-2]:
            held_states = (self.keys, self.values)
            self.storage = [self._room(states, n) for states in held_states]
            for room, states in zip(self.storage, held_states, strict=True):
                room[..., :held, :] = states
        self.storage[0][..., held:n, :] = key_states
        self.storage[1][..., held:n, :] = value_states
        self.show(n)
        return self.keys, self.values

    @staticmethod
    def _room(states: torch.Tensor, tokens: int) -> torch.Tensor:
        batch, heads, _, size = states.shape
        return states.new_empty((batch, heads, _capacity(tokens), size))

    def show(self, tokens: int) -> None:
        self.keys, self.values = (room[..., :tokens, :] for room in self.storage)

    def bind(self, storage: list[torch.Tensor]) -> None:
        """Moves to another storage, with what is held."""
        held = self.keys.shape[-2]
        for room, states in zip(storage, (self.keys, self.values), strict=True):
            room[..., :held, :] = states
        self.storage = storage
        self.show(held)


class _Together(DynamicLayer):
    """A layer of all sequences of a group, during one forward; `at` is where each row's new keys
    go: [sequences, new tokens]."""

    keys: Any
    values: Any

    def __init__(self, storage: Sequence[torch.Tensor], at: torch.Tensor, length: int):
        super().__init__()
        self.is_initialized = True
        self.keys, self.values = (room[..., :length, :] for room in storage)
        self._which = torch.arange(len(at), device=at.device)[:, None]
        self._at = at

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for states, new in ((self.keys, key_states), (self.values, value_states)):
            states[self._which, :, self._at] = new.transpose(1, 2)
        return self.keys, self.values


class Group:
    """The storage of some sequences' caches, in this order."""

    def __init__(self, caches: Sequence[Any], tokens: int):
        """`tokens`: how many each must have room for."""
        self._caches = list(caches)
        capacity = _capacity(tokens)
        self._layers: list[list[torch.Tensor] | None] = []
        for rows in zip(*(cache.layers for cache in caches), strict=True):
            if not rows[0].is_initialized:  # layers that use another's keys
                self._layers.append(None)
                continue
            storage = []
            for states in (rows[0].keys, rows[0].values):
                _, heads, _, size = states.shape
                storage.append(states.new_empty((len(rows), heads, capacity, size)))
                # What no row sees must still be numbers: 0 times NaN is NaN.
                storage[-1].zero_()
            for i, row in enumerate(rows):
                row.bind([room[i : i + 1] for room in storage])
            self._layers.append(storage)

    def holds(self, caches: Sequence[Any], tokens: int) -> bool:
        """Whether these are its caches, in their places, with room for so many tokens each."""
        if len(caches) != len(self._caches):
            return False
        if any(one is not other for one, other in zip(caches, self._caches, strict=True)):
            return False
        for i, storage in enumerate(self._layers):
            if storage is not None:
                rows = [cache.layers[i].storage[0] for cache in caches]
                # A cache that outgrew the capacity alone has moved out.
                return storage[0].shape[-2] >= tokens and all(
                    row.data_ptr() == room.data_ptr()
                    for row, room in zip(rows, storage[0], strict=True)
                )
        return True

    def layers(self, held: Sequence[int], new: int) -> list[DynamicLayer]:
        """The layers of a forward that appends `new` tokens to each."""
        device = next(s for s in self._layers if s is not None)[0].device
        at = torch.tensor(held)[:, None] + torch.arange(new)[None]
        at, length = at.to(device), max(held) + new
        return [
            DynamicLayer() if storage is None else _Together(storage, at, length)
            for storage in self._layers
        ]

    def show(self, held: Sequence[int]) -> None:
        """Lets each sequence see so many of the tokens in its place."""
        for cache, tokens in zip(self._caches, held, strict=True):
            for row in cache.layers:
                if row.is_initialized:
                    row.show(tokens)
