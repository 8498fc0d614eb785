"""Rollback of models with recurrent state: mamba, linear attention, and hybrids with attention.

A recurrent state is a sum over all that was read, so rejected rows cannot be cut out of it. Before
a forward that verifies a draft, the state is copied; after a rejection that copy is put back, and
the rows that were kept (the anchor and what was accepted) are text which the cache lacks: they are
*unfed*, and run in front of the next forward's anchor. Keys, values and convolution states are not
copied: the library's own crop takes the rows off them.

    forward i      [unfed | anchor, draft]      rejected: unfed ← unfed + kept rows, state restored
    forward i + 1  [unfed | anchor, draft]      none rejected: unfed ← nothing

Feeding the kept rows at once would cost a forward of their own for every rejection; in front of
the next one they only make it wider, which is nearly free where verification pays at all. The state
that is put back is exact whenever it came to be, so no second copy is made. It is bounded: beyond
UNFED rows (base.py) the loop takes a plain step, whose forward feeds them all. Cost: a copy of the
recurrent states for every forward with a draft, and unfed rows in the next one (the policy prices
them); a plain step costs what it did. Lossless because every row is computed from the state of the
text alone, by a forward of several rows on a warm state, which Probe tries out at load.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from . import trees

if TYPE_CHECKING:
    from transformers import PreTrainedModel

States = list[dict[int, torch.Tensor]]

# The probe, in kinds of tokens (trees.py): a draft that is wrong but for its last token, of which
# nothing may stay.
WRONG = (6, 7, trees.CHAIN[-1])


def saved(cache: Any) -> States:
    """Copies of the recurrent states, and from here on the other layers can be cropped."""
    cache.activate_past_recording()
    return [
        {i: state.clone() for i, state in _states(layer).items() if state is not None}
        for layer in cache.layers
    ]


def restore(cache: Any, states: States, rows: int) -> None:
    """The cache before its last `rows`, which came after `saved`. The copies become its own."""
    cache.crop(-rows)
    _settled(cache)
    for layer, kept in zip(cache.layers, states, strict=True):
        if kept:
            layer.recurrent_states.update(kept)


def settle(cache: Any) -> None:
    """After a forward of which all rows stay: what was recorded to be cropped goes."""
    cache.crop(0)
    _settled(cache)


def _settled(cache: Any) -> None:
    # Recording costs linear layers their fast path for single rows, which plain steps have.
    for layer in cache.layers:
        if hasattr(layer, "record_past"):
            layer.record_past = False


def _states(layer: Any) -> dict[int, torch.Tensor | None]:
    return getattr(layer, "recurrent_states", None) or {}


class Refeed:
    """What one sequence of such a model has unfed, and its state before the present forward."""

    def __init__(self, cache: Any):
        self._cache = cache
        self.unfed: tuple[int, ...] = ()
        self._rows: tuple[int, ...] | None = None  # of a forward that is not committed
        self._saved: States | None = None

    def begin(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """What to run so that the last rows are those of `tokens`."""
        if self._rows is not None:
            raise ValueError("a forward before the last one was committed")
        with torch.inference_mode():
            self._saved = saved(self._cache) if len(tokens) > 1 else None
        self._rows = tokens
        return self.unfed + tokens

    @property
    def running(self) -> bool:
        return self._rows is not None

    @property
    def revocable(self) -> bool:
        """Whether the rows of the present forward can be taken back."""
        return self._saved is not None

    def commit(self, kept: int) -> int:
        """Keeps the first `kept` rows; how many of the last tokens are out of the cache again."""
        rows, self._rows = self._rows or (), None
        states, self._saved = self._saved, None
        if kept > len(rows):
            raise ValueError(f"cannot keep {kept} rows of {len(rows)}")
        if kept == len(rows):
            self.unfed = ()
            if states is not None:
                settle(self._cache)
            return 0
        if states is None:
            raise ValueError("the row of a plain step cannot be rolled back")
        gone = len(self.unfed) + len(rows)
        restore(self._cache, states, gone)
        self.unfed += rows[:kept]
        return gone


class Probe:
    """What a model's cache can do, tried out on the text that trees.probe ran, whose `logits` are
    known. `name`: the argument that takes a cache; `positions`: positions are given, too, since
    some models count a forward's rows from 0 without them. Its methods never raise."""

    def __init__(
        self,
        model: PreTrainedModel,
        new_cache: Callable[[], Any],
        name: str,
        logits: torch.Tensor,
        positions: bool = False,
    ):
        self._model, self._new_cache, self._name = model, new_cache, name
        self._logits, self._positions = logits.float(), positions

    def _run(self, cache: Any, kinds: Sequence[int], held: int) -> torch.Tensor:
        model = self._model
        vocabulary = model.config.get_text_config(decoder=True).vocab_size
        options: dict[str, Any] = {self._name: cache}
        if self._positions:
            options["position_ids"] = positions(held, len(kinds), model.device)
        ids = torch.tensor([trees.ids(vocabulary, kinds)], device=model.device)
        rows: torch.Tensor = model(input_ids=ids, use_cache=True, **options).logits[0]
        return rows[-len(kinds) :].float()

    def _close(self, rows: torch.Tensor, other: torch.Tensor) -> bool:
        return trees.close(rows, self._logits[-len(rows) :], other, self._model.dtype)

    def honoured(self, roughly: bool = False) -> bool:
        """Whether a cache can be put back, and a forward of several rows on it then has the logits
        of the text, at a distance from what a wrong draft would leave. For any kind of layer.
        `roughly`: whatever the rounding, which experts and low precision may make large."""
        held, chain = len(trees.HELD), trees.CHAIN
        if len(self._logits) < held + len(chain):
            return False
        try:
            cache = self._new_cache()
            self._run(cache, trees.HELD, 0)
            states = saved(cache)
            wrong = self._run(cache, WRONG, held)
            restore(cache, states, len(WRONG))
            saved(cache)
            several = self._run(cache, chain[:-1], held)
            settle(cache)
            last = self._run(cache, chain[-1:], held + len(chain) - 1)
        except Exception:  # whatever a layer does that cannot be cropped
            return False
        rows = torch.cat([several, last])
        if roughly:
            return trees.nearer(rows, self._logits[-len(rows) :], wrong[-1])
        return self._close(rows, wrong[-1]) and self._read()

    def _read(self) -> bool:
        """Whether a forward of several rows reads the state that is there: in bfloat16, what an
        unread one does to the logits of a short text may pass for rounding."""

        def rows(factor: float) -> torch.Tensor:
            cache = self._new_cache()
            self._run(cache, trees.HELD, 0)
            for layer in cache.layers:
                for state in _states(layer).values():
                    if state is not None:
                        state *= factor
                        found.append(state)
            return self._run(cache, trees.CHAIN, len(trees.HELD))

        found: list[torch.Tensor] = []
        return not torch.equal(rows(1.0), rows(4.0)) or not found

    def warm(self) -> bool:
        """Whether several rows in one forward are right on a cache that holds some: a few models
        begin their recurrent state anew there, and must be fed one by one."""
        rows = self._continued((trees.CHAIN,), None)
        return rows is None or (self._close(rows, self._logits[-2]) and self._read())

    def apart(self) -> bool:
        """Whether rows fed one by one are right while another cache is used: some models have no
        cache that this engine knows, or keep a state in their own modules."""
        single = [(kind,) for kind in trees.CHAIN]
        alone, beside = self._continued(single, None), self._continued(single, WRONG)
        if alone is None or beside is None:
            return True
        expected = self._logits[-len(trees.CHAIN) :]
        noise = (alone - expected).abs().max() + 1e-3 * expected.abs().max()
        mixed = (beside - alone).abs().max()
        return bool(mixed <= 4 * noise) and trees.nearer(alone, expected, self._logits[-2])

    def _continued(
        self, parts: Sequence[tuple[int, ...]], other: tuple[int, ...] | None
    ) -> torch.Tensor | None:
        """The rows of the chain, run in parts; None where the context is too short for it."""
        held = len(trees.HELD)
        if len(self._logits) < held + len(trees.CHAIN):
            return None
        cache, rows = self._new_cache(), []
        try:
            self._run(cache, trees.HELD, 0)
            if other is not None:
                self._run(self._new_cache(), other, 0)
            for part in parts:
                rows.append(self._run(cache, part, held))
                held += len(part)
        except Exception:  # whatever a model does with what it does not expect
            return self._logits[:1] + torch.inf
        return torch.cat(rows)


def positions(held: int, rows: int, device: torch.device) -> torch.Tensor:
    return torch.arange(held, held + rows, device=device)[None]
