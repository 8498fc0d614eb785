"""The transformers engine: any causal language model of the library, one sequence a forward.

A forward appends its rows to the sequence's DynamicCache; `commit` crops what was rejected. Full
and sliding layers roll back exactly, the latter because past recording is switched on after the
prefill and `crop` follows every forward (crop(0) trims the window). Convolution states do the
same. Recurrent states do not: `crop` leaves rejected tokens in them without a word, so they are put
back and kept rows fed again (recurrent.py, rollback "refeed"). What a cache can do is only known
after some forwards, so `__init__` runs a few; where it can do neither, the model is run plainly.

Lossless because a chain verified in one causal forward has the logits of token-by-token decoding,
up to rounding (docs/design.md §3.5). Trees, where the model can, are in trees.py; a chain is never
run as one. The user's model is never written to.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from ..core import FloatRow, SeqId, UsageError
from . import recurrent, trees
from .base import PREFILL_CHUNK, Caps, PrefillChunk, Rows, Shape, Verify

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TensorRows:
    """Rows that stay on the device; only argmaxes or single rows are copied to the host."""

    def __init__(self, logits: torch.Tensor, vocabulary: int):
        self._logits = logits[:, :vocabulary]
        self._best: list[int] | None = None

    def argmax(self) -> Sequence[int]:
        if self._best is None:
            logits = self._logits.float()
            # 16 rows of 152k on one core: numpy 0.4 ms, torch 2.5 ms, torch in bf16 25 ms.
            best = logits.numpy().argmax(-1) if logits.device.type == "cpu" else logits.argmax(-1)
            self._best = best.tolist()
        return self._best

    def row(self, i: int) -> FloatRow:
        row: FloatRow = self._logits[i].float().cpu().numpy()
        return row


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
        self.refeed: recurrent.Refeed | None = None


class TransformersEngine:
    """See engines/base.py for the methods; `model` must be in eval mode and stays the caller's
    (`borrowed`: is held weakly)."""

    def __init__(self, model: PreTrainedModel, name: str = "", borrowed: bool = False):
        if model.config.is_encoder_decoder:
            raise UsageError(
                "encoder-decoder models are not supported: name a causal language model"
            )
        self._model: Callable[[], PreTrainedModel | None]
        self._model = weakref.ref(model) if borrowed else lambda: model
        self._sequences: dict[SeqId, _Sequence] = {}
        self._kept: _Sequence | None = None
        parameters = inspect.signature(model.forward).parameters
        self._keeps_logits = "logits_to_keep" in parameters
        # Renamed within transformers 5.
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        text = model.config.get_text_config(decoder=True)
        context = getattr(text, "max_position_embeddings", None)
        self._full = False  # every layer keeps all positions
        self._takes_positions = "position_ids" in parameters
        self._positions = self._one_by_one = False  # what its forwards need (recurrent.Probe)
        rollback, branches = self._probe(text.vocab_size, context)
        self.caps = Caps(
            trees=branches,
            rollback=rollback,
            batch="padded",
            context=context,
            vocabulary=text.vocab_size,
        )
        where = f"{model.device.type} {torch.get_num_threads()} threads"
        if model.device.type == "cuda":
            where = torch.cuda.get_device_name(model.device)
        self.name = " | ".join(
            [
                name or model.config.name_or_path or type(model).__name__,
                f"{sum(p.numel() for p in model.parameters())} parameters",
                "transformers",
                where,
                str(model.dtype),
            ]
        )

    def _probe(self, vocabulary: int, context: int | None) -> tuple[str, bool]:
        """How rows are rolled back, and whether trees can be verified."""
        tokens = trees.probe(vocabulary)[: context or None]
        with self._weights() as model:
            cache, name = self._new_cache(), self._cache_name
            ids = torch.tensor([tokens], dtype=torch.long, device=model.device)
            logits = model(input_ids=ids, use_cache=True, **{name: cache}).logits[0]
            types = {type(layer).__name__ for layer in cache.layers}
            self._full = types == {"DynamicLayer"}
            croppable = bool(cache.is_croppable) and cache.get_seq_length() == len(tokens)
            takes_trees = self._full and croppable and trees.possible(model)
            if takes_trees and trees.honoured(model, cache, name, logits):
                return "free", True
            for given in (False, True) if self._takes_positions else (False,):
                self._positions = given
                probe = recurrent.Probe(model, self._new_cache, name, logits, given)
                if probe.honoured():
                    return "free" if croppable else "refeed", False
            short = len(tokens) < len(trees.probe(vocabulary))  # and nothing can be tried out
            if croppable and (short or probe.honoured(roughly=True)):
                return "free", False
            if not probe.apart():
                raise UsageError("this model keeps its state outside of a cache: not supported")
            self._one_by_one = not probe.warm()
            return "none", False

    @contextmanager
    def _weights(self) -> Iterator[PreTrainedModel]:
        model = self._model()
        if model is None:
            raise UsageError("this model is closed")
        with torch.inference_mode():
            yield model

    @property
    def closed(self) -> bool:
        return self._model() is None

    def _new_cache(self) -> Any:
        from transformers import DynamicCache

        with self._weights() as model:
            return DynamicCache(config=model.config)

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
        if surplus and not (self._full and self.caps.rollback == "free"):
            return 0
        if common and surplus:
            kept.cache.crop(-surplus)
            del kept.tokens[common:]
        return common

    def forward(self, work: Sequence[PrefillChunk | Verify]) -> list[Rows]:
        if self.closed:
            raise UsageError("this model is closed")
        return [self._prefill(w) if isinstance(w, PrefillChunk) else self._verify(w) for w in work]

    def _prefill(self, work: PrefillChunk) -> Rows:
        sequence = self._open(work.seq)
        if sequence.refeed and sequence.refeed.unfed:
            raise ValueError("a prefill begins where all of the text is in the cache")
        chunk = PREFILL_CHUNK
        if self._one_by_one:
            chunk = 1 if sequence.tokens else len(work.tokens)
        for start in range(0, len(work.tokens), chunk):
            logits = self._run(sequence, work.tokens[start : start + chunk], 1)
            self.commit(work.seq, range(sequence.pending))
        return TensorRows(logits, self.caps.vocabulary)

    def _verify(self, work: Verify) -> Rows:
        sequence, n = self._open(work.seq), len(work.tokens)
        if not sequence.recording and self.caps.rollback == "free":
            sequence.cache.activate_past_recording()
            sequence.recording = True
        # Padding would be one more thing to take out of a recurrent state.
        padding = max(work.width - n, 0) if sequence.refeed is None else 0
        branches = any(parent != i for i, parent in enumerate(work.parents))
        tree = self._tree(sequence, work.parents, n + padding) if branches else None
        tokens = sequence.refeed.begin(work.tokens) if sequence.refeed else work.tokens
        tokens += (0,) * padding
        logits = self._run(sequence, tokens, n + padding, work.ids, tree)
        sequence.parents = work.parents if branches else ()
        return TensorRows(logits[:n], self.caps.vocabulary)

    def _tree(
        self, sequence: _Sequence, parents: Sequence[int], rows: int
    ) -> dict[str, torch.Tensor]:
        if not self.caps.trees:
            raise NotImplementedError("this model verifies chains only")
        if sequence.pending:
            raise ValueError("a tree begins at committed rows")
        with self._weights() as model:
            return trees.inputs(parents, rows, len(sequence.tokens), model.dtype, model.device)

    def _run(
        self,
        sequence: _Sequence,
        tokens: Sequence[int],
        rows: int,
        first: int = 0,
        tree: dict[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Appends `tokens` to the cache; logits [rows, V] of the last `rows` of them, of the first
        `first` ids if given; `tree`: mask and positions."""
        if sequence.parents:
            raise ValueError("rows after a tree that is not committed")
        with self._weights() as model:
            ids = torch.tensor([tokens], dtype=torch.long, device=model.device)
            options: dict[str, Any] = {self._cache_name: sequence.cache, **(tree or {})}
            if self._positions:
                held = len(sequence.tokens)
                options["position_ids"] = recurrent.positions(held, len(tokens), model.device)
            if self._keeps_logits:
                options["logits_to_keep"] = rows
            if first and self._partial:
                options.pop("logits_to_keep", None)
                states = model.base_model(input_ids=ids, use_cache=True, **options)[0]
                head = model.get_output_embeddings()
                bias = None if head.bias is None else head.bias[:first]
                logits = torch.nn.functional.linear(states[0, -rows:], head.weight[:first], bias)
            else:
                logits = model(input_ids=ids, use_cache=True, **options).logits[0, -rows:]
        sequence.tokens.extend(tokens)
        sequence.pending += len(tokens)
        return logits

    @cached_property
    def _partial(self) -> bool:
        """Whether logits are nothing but the output layer's product with the base model's states,
        as this model shows on two tokens: some scale or cap them, or keep the layer quantised."""
        with self._weights() as model:
            head = model.get_output_embeddings()
            if type(head) is not torch.nn.Linear or model.base_model is model:
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
        if rows > sequence.pending or not self._full:
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
        if not self._full:
            return first  # what a window holds cannot be made up through its API
        with torch.inference_mode():
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
        tensors += [t for cache in held for layer in cache.layers for t in _tensors(vars(layer))]
        # Several tensors may lie in one storage, and a cropped cache keeps the whole of its own.
        storages = [t.untyped_storage() for t in tensors]
        return sum({s.data_ptr(): s.nbytes() for s in storages}.values())

    def free(self) -> None:
        self._sequences.clear()
        self._kept = None
        self._model = lambda: None
