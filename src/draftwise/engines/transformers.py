"""The transformers engine: any causal language model of the library.

A forward appends its rows to the sequence's cache; `commit` crops what was rejected. Models that
verify trees (trees.py) take several sequences in one forward, from one storage (slots.py); others
run them one after another. Full and sliding layers roll back exactly, the latter because past
recording is switched on after the prefill and `crop` follows every forward (crop(0) trims the
window). Convolution states do the same. Recurrent states do not: `crop` leaves rejected tokens in
them without a word, so they are put back and kept rows fed again (recurrent.py, rollback "refeed").
What a cache can do is only known after some forwards, so `__init__` runs a few; where it can do
neither, the model is run plainly.

Lossless because a chain verified in one causal forward has the logits of token-by-token decoding,
up to rounding (docs/design.md §3.5). Trees, where the model can, are in trees.py; a chain is never
run as one. The user's model is never written to, unless it is handed over (prepacked.py).
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from ..core import SeqId, UsageError
from . import prepacked, quantised, recurrent, slots, trees
from .abilities import new_cache, tried_out
from .base import PREFILL_CHUNK, Caps, PrefillChunk, Rows, Shape, Verify
from .compiled import GAIN as COMPILED_GAIN
from .compiled import HELD, LEAST, WIDTHS, Compiled, gain
from .kernels import choose
from .rows import Logits, TensorRows

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


class _Sequence:
    """A cache and the tokens in it; the last `pending` of them are not committed yet, and form a
    tree if there are `parents`."""

    def __init__(self, cache: Any):
        self.cache = cache
        self.tokens: list[int] = []
        self.pending = 0
        self.parents: tuple[int, ...] = ()
        self.recording = False
        self.whole = True  # no forward was broken off, which leaves layers of different lengths
        self.refeed: recurrent.Refeed | None = None


class TransformersEngine:
    """See engines/base.py for the methods; `model` must be in eval mode and stays the caller's
    (`borrowed`: is held weakly), unless `kernels` are other than "eager" (kernels.py)."""

    def __init__(
        self,
        model: PreTrainedModel,
        name: str = "",
        borrowed: bool = False,
        kernels: str = "eager",
    ):
        if model.config.is_encoder_decoder:
            raise UsageError(
                "encoder-decoder models are not supported: name a causal language model"
            )
        self._model: Callable[[], PreTrainedModel | None]
        self._model = weakref.ref(model) if borrowed else lambda: model
        self._sequences: dict[SeqId, _Sequence] = {}
        self._kept: _Sequence | None = None
        self._groups = slots.Groups()
        self._heads: dict[int, prepacked.Prepacked] = {}  # for some of the ids
        parameters = inspect.signature(model.forward).parameters
        self._keeps_logits = "logits_to_keep" in parameters
        # Models of images remember by how much a prompt's pictures shift the positions of what
        # follows, and would shift those of a later text.
        self._shifts = hasattr(model.base_model, "rope_deltas")
        # Renamed within transformers 5.
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self.kernels = choose(model, kernels)
        text = model.config.get_text_config(decoder=True)
        context = getattr(text, "max_position_embeddings", None)
        weights = quantised.described(model)
        # Weights that are tensor subclasses, or are packed at their first use, do not bear it.
        self._mode: Callable[[], Any] = torch.no_grad if weights else torch.inference_mode
        with self._mode():
            can = tried_out(model, self._cache_name, "position_ids" in parameters, context)
        self._can, self.obstacle = can, can.obstacle
        self.caps = Caps(
            trees=can.trees,
            rollback=can.rollback,
            batch="padded" if can.trees else "single",
            context=context,
            vocabulary=text.vocab_size,
        )
        self._compiled: Compiled | None = None
        if kernels == "compiled":
            self._compile()
        where = f"{model.device.type} {torch.get_num_threads()} threads"
        if model.device.type == "cuda":
            where = torch.cuda.get_device_name(model.device)
        self.name = " | ".join(
            [
                name or model.config.name_or_path or type(model).__name__,
                f"{prepacked.parameters(model)} parameters",
                "transformers",
                where,
                str(model.dtype),
                *([weights] if weights else []),
                *self.kernels.used,
            ]
        )

    def _compile(self) -> None:
        """Runs through the compiler from now on, if that pays."""
        if self.caps.batch != "padded":
            self.kernels.without("compiled", "this model's cache has no fixed place")
            return
        with self._weights() as model:
            compiled = Compiled(model.forward)
        if self.caps.context is not None and self.caps.context < HELD + max(WIDTHS):
            self.kernels.without("compiled", "this model's context is too short to try it out")
            return
        self.blank(-1, HELD)

        def run(width: int, with_compiled: bool) -> None:
            self._compiled = compiled if with_compiled else None
            self.forward([Verify(-1, (0,) * width)])[0].argmax()
            self.commit(-1, ())

        try:
            gained = gain(compiled, lambda w: run(w, True), lambda w: run(w, False))
        finally:
            self.close(-1)
        self._compiled = compiled if gained >= COMPILED_GAIN else None
        if self._compiled is not None:
            self.kernels.used += ("compiled",)
        else:
            reason = compiled.failure or f"it gains nothing here ({gained:.2f}x)"
            self.kernels.without("compiled", reason)

    @contextmanager
    def _weights(self) -> Iterator[PreTrainedModel]:
        model = self._model()
        if model is None:
            raise UsageError("this model is closed")
        with self._mode():
            yield model

    @property
    def _device(self) -> torch.device:
        with self._weights() as model:
            return model.device

    @property
    def closed(self) -> bool:
        return self._model() is None

    def _new_cache(self) -> Any:
        with self._weights() as model:
            return new_cache(model, self._can.in_place)

    def open(self, seq: SeqId, tokens: Sequence[int], share: SeqId | None = None) -> int:
        if seq in self._sequences:
            raise ValueError(f"sequence {seq} is open already")
        if share is not None:
            raise NotImplementedError("sharing a live sequence's prefix needs a packed engine")
        kept = None
        if tokens:  # what begins empty has no use for a kept cache, and leaves it to others
            kept, self._kept = self._kept, None
        reused = self._fit(kept, tokens) if kept else 0
        self._sequences[seq] = kept if kept and reused else self._begun()
        return reused

    def _begun(self) -> _Sequence:
        sequence = _Sequence(self._new_cache())
        if self.caps.rollback == "refeed":
            sequence.refeed = recurrent.Refeed(sequence.cache)
        return sequence

    def unfed(self, seq: SeqId) -> int:
        refeed = self._open(seq).refeed
        return len(refeed.unfed) if refeed else 0

    def _open(self, seq: SeqId) -> _Sequence:
        if self.closed:
            raise UsageError("this model is closed")
        return self._sequences[seq]

    def _fit(self, kept: _Sequence, tokens: Sequence[int]) -> int:
        """Crops a kept cache to its common beginning with `tokens`; 0 where it is of no use.

        One token is always left to be run, since the first token needs logits.
        """
        most = max(min(len(kept.tokens), len(tokens) - 1), 0)
        common = next((i for i in range(most) if kept.tokens[i] != tokens[i]), most)
        surplus = len(kept.tokens) - common
        # Sliding and convolution layers forgot what lies before their window.
        if surplus and not (self._can.full and self.caps.rollback == "free"):
            return 0
        if common and surplus:
            kept.cache.crop(-surplus)
            del kept.tokens[common:]
        return common

    def forward(self, work: Sequence[PrefillChunk | Verify]) -> list[Rows]:
        if self.closed:
            raise UsageError("this model is closed")
        # An empty cache has no place yet where others could join it.
        begun = [w for w in work if isinstance(w, Verify) and self._open(w.seq).tokens]
        if len(begun) < 2 or self.caps.batch != "padded":
            begun = []
        found = dict(zip(map(id, begun), self._together(begun) if begun else (), strict=True))
        return [found.get(id(w)) or self._alone(w) for w in work]

    def _alone(self, work: PrefillChunk | Verify) -> Rows:
        return self._prefill(work) if isinstance(work, PrefillChunk) else self._verify(work)

    def _prefill(self, work: PrefillChunk) -> Rows:
        sequence = self._open(work.seq)
        if sequence.refeed and sequence.refeed.unfed:
            raise ValueError("a prefill begins where all of the text is in the cache")
        chunk = PREFILL_CHUNK
        if self._can.one_by_one:
            chunk = 1 if sequence.tokens else len(work.tokens)
        for start in range(0, len(work.tokens), chunk):
            logits = self._run(sequence, work.tokens[start : start + chunk], 1)
            self.commit(work.seq, range(sequence.pending))
        return TensorRows(logits, 0, 1)

    def _verify(self, work: Verify) -> Rows:
        sequence, n = self._open(work.seq), len(work.tokens)
        partial = work.ids and self._partial
        if self._compiled and self._compiled.runs and not (sequence.pending or partial):
            return self._together([work], LEAST)[0]
        if not sequence.recording and self.caps.rollback == "free":
            sequence.cache.activate_past_recording()
            sequence.recording = True
        # Padding would be one more thing to take out of a recurrent state.
        width = max(work.width, n) if sequence.refeed is None else n
        branches = trees.branches(work.parents)
        tree = None
        if branches:
            self._check_branches(sequence)
            with self._weights() as model:
                held = [len(sequence.tokens)]
                tree = trees.inputs([work.parents], width, held, model.dtype, model.device)
        tokens = sequence.refeed.begin(work.tokens) if sequence.refeed else work.tokens
        tokens += (0,) * (width - n)
        logits = self._run(sequence, tokens, width, work.ids, tree)
        sequence.parents = work.parents if branches else ()
        return TensorRows(logits, 0, n)

    def _check_branches(self, sequence: _Sequence) -> None:
        if not self.caps.trees:
            raise NotImplementedError("this model verifies chains only")
        if sequence.pending:
            raise ValueError("a tree begins at committed rows")

    def _together(self, work: Sequence[Verify], width: int = 1) -> list[Rows]:
        """One forward for all, of at least `width`; every sequence pays for the widest, but no
        padding stays in its cache."""
        sequences = [self._open(w.seq) for w in work]
        if len({id(s) for s in sequences}) < len(work):
            raise ValueError("a sequence twice in one forward")
        if any(s.parents for s in sequences):
            raise ValueError("rows after a tree that is not committed")
        branching = [trees.branches(w.parents) for w in work]
        for s, branches in zip(sequences, branching, strict=True):
            if branches:
                self._check_branches(s)
        caches = [s.cache for s in sequences]
        width = max(width, *(max(w.width, len(w.tokens)) for w in work))
        group, span = self._groups.of(caches, width)
        members = [group.caches[i] for i in span]
        at = {id(cache): i for i, cache in enumerate(members)}
        nodes: list[Sequence[int]] = [()] * len(members)
        rows = [(0,) * width] * len(members)
        for w, cache in zip(work, caches, strict=True):
            rows[at[id(cache)]] = w.tokens + (0,) * (width - len(w.tokens))
            nodes[at[id(cache)]] = w.parents or range(len(w.tokens) - 1)
        with self._weights() as model:
            cache = self._new_cache()
            cache.layers = group.layers(span, width)
            held = [slots.held(member) for member in members]
            inputs = trees.inputs(nodes, width, held, model.dtype, model.device)
            if self.caps.context is not None:  # who only runs along may have filled it
                inputs["position_ids"].clamp_(max=self.caps.context - 1)
            first = work[0].ids if len({w.ids for w in work}) == 1 else 0
            logits = self._logits(rows, cache, width, first, inputs)
        for w, s, branches in zip(work, sequences, branching, strict=True):
            s.tokens.extend(w.tokens)
            s.pending, s.recording = s.pending + len(w.tokens), True
            s.parents = w.parents if branches else ()
            slots.show(s.cache, len(s.tokens))
        places = [at[id(cache)] for cache in caches]
        return [TensorRows(logits, i, len(w.tokens)) for i, w in zip(places, work, strict=True)]

    def _run(
        self,
        sequence: _Sequence,
        tokens: Sequence[int],
        rows: int,
        first: int = 0,
        tree: dict[str, torch.Tensor] | None = None,
    ) -> Logits:
        """Appends `tokens` to the sequence's cache; otherwise as `_logits`."""
        if sequence.parents:
            raise ValueError("rows after a tree that is not committed")
        if (self._can.positions or self._shifts) and tree is None:
            held = len(sequence.tokens)
            tree = {"position_ids": recurrent.positions(held, len(tokens), self._device)}
        sequence.whole = False
        logits = self._logits([tokens], sequence.cache, rows, first, tree)
        sequence.whole = True
        sequence.tokens.extend(tokens)
        sequence.pending += len(tokens)
        return logits

    def _logits(
        self,
        tokens: Sequence[Sequence[int]],
        cache: Any,
        rows: int,
        first: int,
        tree: dict[str, torch.Tensor] | None,
    ) -> Logits:
        """Logits of the last `rows` of `tokens`, of the first `first` ids if given; `tree`: mask
        and positions."""
        with self._weights() as model:
            ids = torch.tensor(tokens, dtype=torch.long, device=model.device)
            options: dict[str, Any] = {self._cache_name: cache, **(tree or {})}
            if self._keeps_logits:
                options["logits_to_keep"] = rows
            if first and self._partial:
                options.pop("logits_to_keep", None)
                states = model.base_model(input_ids=ids, use_cache=True, **options)[0][:, -rows:]
                logits = self._first(states, first)
            else:
                run = self._compiled if self._compiled and tree and len(tokens) == 1 else model
                logits = run(input_ids=ids, use_cache=True, **options).logits[:, -rows:]
        return Logits(logits, self.caps.vocabulary)

    def _first(self, states: torch.Tensor, ids: int) -> torch.Tensor:
        """The output layer's first so many logits."""
        with self._weights() as model:
            head = model.get_output_embeddings()
            if isinstance(head, prepacked.Prepacked):
                if ids not in self._heads:
                    self._heads[ids] = head.first(ids) or head
                logits: torch.Tensor = self._heads[ids](states)[..., :ids]
                return logits
            bias = None if head.bias is None else head.bias[:ids]
            return torch.nn.functional.linear(states, head.weight[:ids], bias)

    @cached_property
    def _partial(self) -> bool:
        """Whether logits are nothing but the output layer's product with the base model's states,
        as this model shows on two tokens: some scale or cap them, or keep the layer quantised."""
        with self._weights() as model:
            head = model.get_output_embeddings()
            if (
                type(head) not in (torch.nn.Linear, prepacked.Prepacked)
                or model.base_model is model
            ):
                return False
            if not quantised.plain_weight(head):
                return False
            ids = torch.tensor([[0, 1]], dtype=torch.long, device=model.device)
            states = model.base_model(input_ids=ids, use_cache=False)[0]
            logits = model(input_ids=ids, use_cache=False).logits
            return torch.allclose(head(states).float(), logits.float(), rtol=1e-3, atol=1e-3)

    def commit(self, seq: SeqId, path: Sequence[int]) -> None:
        sequence = self._open(seq)
        if sequence.parents:
            if not trees.is_path(path, sequence.parents):
                raise ValueError(f"rows {list(path)} are not one path of the tree")
            trees.gather(sequence.cache, path, sequence.pending)
            start = len(sequence.tokens) - sequence.pending
            kept = [sequence.tokens[start + row] for row in path]
            sequence.tokens[start : start + len(kept)] = kept
            sequence.parents = ()
        elif list(path) != list(range(len(path))) or len(path) > sequence.pending:
            raise ValueError(f"this engine keeps the first rows of a chain, not {list(path)}")
        surplus = sequence.pending - len(path)
        if sequence.refeed and sequence.refeed.running:
            surplus = sequence.refeed.commit(len(path))
            sequence.pending = 0
            del sequence.tokens[len(sequence.tokens) - surplus :]
            return
        sequence.pending = 0
        if self.caps.rollback != "free":
            if surplus:
                raise ValueError("this model's cache cannot be rolled back")
            return
        if not sequence.recording:
            # After the prefill only: recording from the start would keep the whole prompt in
            # sliding layers.
            sequence.cache.activate_past_recording()
            sequence.recording = True
            if not surplus:
                return
        sequence.cache.crop(-surplus)
        if surplus:
            del sequence.tokens[-surplus:]

    def drop(self, seq: SeqId, rows: int) -> None:
        sequence = self._open(seq)
        if rows > sequence.pending or not self._can.full:
            raise ValueError(f"cannot drop {rows} rows of {sequence.pending}")
        sequence.cache.crop(-rows)
        sequence.pending -= rows
        del sequence.tokens[-rows:]

    def shape(self, widths: Sequence[int], contexts: Sequence[int]) -> Shape:
        return Shape(max(widths), max(contexts), len(widths))

    def close(self, seq: SeqId, keep: bool = False) -> None:
        sequence = self._sequences.pop(seq, None)
        if sequence is None:
            return
        self._groups.leave(sequence.cache)
        keep = keep and sequence.whole
        if keep and sequence.pending:
            # Stopped between forward and commit: those rows are not text.
            keep = sequence.refeed.revocable if sequence.refeed else self.caps.rollback == "free"
            if keep:
                self._sequences[seq] = sequence
                self.commit(seq, ())
                del self._sequences[seq]
        if keep and sequence.refeed:
            sequence.refeed.unfed = ()  # its tokens are those in the cache
        self._kept = sequence if keep else self._kept

    def blank(self, seq: SeqId, length: int) -> int:
        if self.caps.rollback == "none":
            return 0
        self._sequences[seq] = sequence = self._begun()
        first = min(length, 2)
        self._run(sequence, (0,) * first, 1)
        self.commit(seq, range(first))
        if not self._can.full:
            return first  # what a window holds cannot be made up through its API
        with self._mode():
            for i, layer in enumerate(sequence.cache.layers):
                shape = list(layer.keys.shape)
                shape[-2] = length - first
                sequence.cache.update(layer.keys.new_zeros(shape), layer.values.new_zeros(shape), i)
        sequence.tokens.extend([0] * (length - first))
        return length

    def memory(self) -> int:
        model = self._model()
        if model is None:
            return 0
        held = [s.cache for s in (*self._sequences.values(), self._kept) if s is not None]
        tensors = [*model.parameters(), *model.buffers()]
        relaid = [m for m in model.modules() if isinstance(m, prepacked.Prepacked)]
        relaid += self._heads.values()
        tensors += [t for cache in held for layer in cache.layers for t in _tensors(vars(layer))]
        # Several tensors may lie in one storage, and a cropped cache keeps the whole of its own.
        storages = [part.untyped_storage() for t in tensors for part in quantised.parts(t)]
        held_bytes = sum({s.data_ptr(): s.nbytes() for s in storages}.values())
        return held_bytes + sum(layer.nbytes for layer in relaid)

    def free(self) -> None:
        self._sequences.clear()
        self._groups.clear()
        self._kept = self._compiled = None
        self._heads.clear()
        self._model = lambda: None
