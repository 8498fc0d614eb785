"""Keys and values of several sequences in one storage, so that one forward can serve them all.

`Row` is a layer of one sequence's cache: a view of a storage [1, heads, capacity, size] that has
room to spare. Appending writes in place, where the library's own layer copies the whole cache for
every token; cropping and moving kept rows change the view alone.

A batched forward needs the rows of its sequences in one tensor. `Group` allots a storage
[sequences, heads, capacity, size] a layer, copies each cache in once, and binds the sequences' rows
to it as views: whatever a sequence does alone afterwards happens in the group's storage. As long as
the same sequences come back, nothing is copied again; where some of them stay away, their places
between the others run a token along that nobody sees. Rows hold different numbers of tokens, so
each one's new keys are written behind its own, and a mask hides what lies behind them.

Cost: O(new tokens) a forward; one copy of all caches when a sequence joins, ends or outgrows the
capacity. Lossless: what a row attends to is exactly what its sequence holds (tests compare every
row with its own uncached forward).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

IDLE = 8  # places of others that a forward may run along: a copy of all caches costs more
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
        self._at, self._which = at, torch.arange(len(at), device=at.device)[:, None]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for states, new in ((self.keys, key_states), (self.values, value_states)):
            states[self._which, :, self._at] = new.transpose(1, 2)
        return self.keys, self.values


class Group:
    """The storage of some sequences' caches, in this order."""

    def __init__(self, caches: Sequence[Any], new: int):
        """`new`: tokens that each must have room for, beside those it holds."""
        self.caches = list(caches)
        capacity = _capacity(max(map(held, caches)) + new)
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

    def span(self, caches: Sequence[Any], new: int) -> range | None:
        """The places from the first to the last of these caches, if they lie here with room for
        `new` tokens in each place, and not many places between them are others'."""
        places = [self._place(cache) for cache in caches]
        if min(places, default=-1) < 0:
            return None
        span = range(min(places), max(places) + 1)
        storage = next((s for s in self._layers if s is not None), None)
        if storage is None or len(span) > len(caches) + IDLE:
            return None
        rooms = [held(self.caches[i]) + new <= storage[0].shape[-2] for i in span]
        return span if all(rooms) and all(map(self._here, span)) else None

    def _place(self, cache: Any) -> int:
        return next((i for i, one in enumerate(self.caches) if one is cache), -1)

    def _here(self, place: int) -> bool:
        """Whether this cache is where it was put: one that outgrew the capacity has moved out."""
        rows = zip(self.caches[place].layers, self._layers, strict=True)
        return all(
            row.storage[0].data_ptr() == room[0][place].data_ptr() for row, room in rows if room
        )

    def layers(self, span: range, new: int) -> list[DynamicLayer]:
        """The layers of a forward that appends `new` tokens to each in these places."""
        before = [held(self.caches[i]) for i in span]
        at = torch.tensor(before)[:, None] + torch.arange(new)[None]
        made: list[DynamicLayer] = []
        for storage in self._layers:
            if storage is None:
                made.append(DynamicLayer())
                continue
            at = at.to(storage[0].device)  # copies only where layers are on several devices
            rows = [states[span.start : span.stop] for states in storage]
            made.append(_Together(rows, at, max(before) + new))
        return made


class Groups:
    """Those in use; a cache is in one of them at most, and none is held for a closed sequence."""

    def __init__(self) -> None:
        self._groups: list[Group] = []

    def of(self, caches: Sequence[Any], new: int) -> tuple[Group, range]:
        """A group with room for `new` tokens in each of these caches, and which of its places a
        forward is to run: what others hold between them is left as it is."""
        for group in list(self._groups):
            span = group.span(caches, new)
            if span is not None:
                return group, span
        for cache in caches:
            self.leave(cache)
        made = Group(caches, new)
        self._groups.append(made)
        return made, range(len(caches))

    def leave(self, cache: Any) -> None:
        """Drops the group of a cache, if it has one: the others move when they next meet."""
        # In place: the collector may close an abandoned sequence in the midst of `of`.
        self._groups[:] = [g for g in self._groups if all(one is not cache for one in g.caches)]

    def clear(self) -> None:
        self._groups.clear()


def held(cache: Any) -> int:
    """Tokens in a cache of rows."""
    return next((int(r.keys.shape[-2]) for r in cache.layers if r.is_initialized), 0)


def show(cache: Any, tokens: int) -> None:
    """Lets a sequence see so many of the tokens in its place."""
    for row in cache.layers:
        if row.is_initialized:
            row.show(tokens)
