"""What an engine is: it owns the target's weights and caches and runs forwards for sequences.

Between two commits an engine has rows in its caches that are not yet text. `commit(seq, path)`
says which rows of the forwards since the last commit stay; the others are rolled back. It is
called after every forward, also when all rows stay: some caches trim themselves there. A tree is
one forward that begins at committed rows, and what stays of it is one path from the anchor.

`rollback` of the capabilities: "free" (rows can be dropped), "refeed" (a rejection takes all rows
of its forward out of the cache; those that were kept are *unfed*, and the engine runs them in front
of the next forward's anchor), "none" (no row can be dropped: the target must be run plainly).
`batch`: "packed" (a forward of several sequences pays for the rows of all), "padded" (each pays for
the widest), "single" (they run one after another).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ..core import FloatRow, SeqId


@dataclass(frozen=True)
class Caps:
    trees: bool  # drafts may branch; else Verify takes chains only
    rollback: str  # free | refeed | none
    batch: str  # packed | padded | single: what sequences of a forward pay for, see below
    context: int | None  # positions that the model was made for
    vocabulary: int


class Shape(NamedTuple):
    """What a forward's seconds depend on: rows, tokens in the cache before them, sequences."""

    width: int
    context: int
    batch: int = 1


STRIPES = 64


@dataclass(frozen=True)
class PrefillChunk:
    """Prompt tokens to take into the cache; logits for the last one only."""

    seq: SeqId
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Verify:
    """The anchor and the draft's nodes (`parents` as in Draft, shifted by one: 0 is the anchor);
    rows from len(tokens) up to `width` are padding, and none of them is ever read. `ids`: logits
    of the first so many ids suffice (0: all); an engine that cannot leave some out ignores it."""

    seq: SeqId
    tokens: tuple[int, ...]
    parents: tuple[int, ...] = ()
    width: int = 0
    ids: int = 0


class Top(NamedTuple):
    """Of every row the best k tokens and their logits, the best first: both [rows, k]."""

    ids: npt.NDArray[np.int64]
    scores: FloatRow


def top_of(logits: FloatRow, k: int) -> Top:
    """The best k of every row of [rows, V], exactly.

    Ids that are alike modulo V / STRIPES form a group. The k groups with the largest maxima hold
    the k best tokens: any other token has k larger ones before it. So one pass of maxima is made,
    and only k · STRIPES numbers a row are sorted. For 16 rows of 152k and k = 8 on one core: five
    times an argmax; `numpy.argpartition` of whole rows takes 140 times one, torch's topk 20 times.
    """
    rows, size = logits.shape
    k, columns = min(k, size), size // STRIPES
    if columns <= k:
        ids = np.broadcast_to(np.arange(size), (rows, size))
    else:
        peaks = logits[:, : STRIPES * columns].reshape(rows, STRIPES, columns).max(1)
        groups = np.argpartition(peaks, -k, 1)[:, -k:]
        ids = (groups[:, :, None] + columns * np.arange(STRIPES)).reshape(rows, -1)
        rest = np.arange(STRIPES * columns, size)
        ids = np.concatenate([ids, np.broadcast_to(rest, (rows, len(rest)))], 1)
    scores = np.take_along_axis(logits, ids, 1)
    kept = np.argpartition(scores, -k, 1)[:, -k:] if ids.shape[1] > k else np.argsort(scores, 1)
    ids, scores = np.take_along_axis(ids, kept, 1), np.take_along_axis(scores, kept, 1)
    order = np.lexsort((ids, -scores), 1)
    return Top(np.take_along_axis(ids, order, 1), np.take_along_axis(scores, order, 1))


class Rows(Protocol):
    """Logits of one sequence's rows, kept where the forward left them until asked for."""

    def argmax(self) -> Sequence[int]:
        """The best token of every row."""

    def row(self, i: int) -> FloatRow:
        """Row i as float32 [V] on the host."""

    def top(self, k: int) -> Top:
        """The best k tokens of every row and their logits, the best first."""


class Engine(Protocol):
    caps: Caps
    name: str  # identifies model, device, dtype and threads: the key of the stored cost curve

    def open(self, seq: SeqId, tokens: Sequence[int], share: SeqId | None = None) -> int:
        """Starts a sequence. Returns how many of `tokens` the cache already holds; without tokens a
        cache that was kept stays for the next."""

    def forward(self, work: Sequence[PrefillChunk | Verify]) -> list[Rows]: ...

    def commit(self, seq: SeqId, path: Sequence[int]) -> None:
        """Keeps rows `path` (indices, ascending) of those since the last commit, drops the rest."""

    def unfed(self, seq: SeqId) -> int:
        """Committed rows that the next forward runs before its anchor; only where rollback is
        "refeed"."""

    def drop(self, seq: SeqId, rows: int) -> None:
        """Drops the last `rows` of those since the last commit; only engines with trees need it."""

    def shape(self, widths: Sequence[int], contexts: Sequence[int]) -> Shape: ...

    def close(self, seq: SeqId, keep: bool = False) -> None:
        """Ends a sequence; `keep` leaves its cache for a later `open` with the same beginning."""

    def blank(self, seq: SeqId, length: int) -> int:
        """Opens a sequence of about `length` meaningless tokens, for measuring. Returns how many
        it holds; 0 if it cannot, and then nothing is open."""

    def memory(self) -> int:
        """Bytes of the weights and of every cache."""

    def free(self) -> None:
        """Drops every cache and the weights."""


# One forward over a very long prompt would hold attention scores of its whole length, and could not
# be stopped; between chunks, other requests get their turn.
PREFILL_CHUNK = 2048
UNFED = 12  # with more unfed rows than this, a plain step feeds them all
PASSES = 3
BATCHES, BATCH_WIDTHS, SHORT = (4, 8), (1, 4), 16
WIDTHS = (1, 16, 4, 2, 8, 32, 64)  # the first two tell how steep the curve is


def sweep(
    engine: Engine,
    budget: float,
    report: Callable[[Shape, float], None],
    widths: Sequence[int] = WIDTHS,
    contexts: Sequence[int] = (16, 1024),
    ids: int = 0,
) -> None:
    """Times forwards of several shapes, most telling first, until `budget` seconds are used; the
    first two widths at the short context are always timed. `ids`: as in Verify.

    Passes follow one another, up to PASSES, and the least time of a shape counts: a stall of the
    machine, or the choosing of kernels in a shape's first forward, then spoils one pass only. The
    very first forwards, which may still read weights from the disk, do not count at all.
    """
    needed = widths[:2]
    for _ in _pass(engine, contexts[0], needed, needed, 0.0, ids):
        pass
    deadline = time.perf_counter() + budget
    best: dict[Shape, float] = {}
    for turn in range(PASSES):
        for context, some in ((contexts[0], widths), (contexts[-1], (1, 16))):
            needed = widths[:2] if turn < 2 and context == contexts[0] else ()
            for shape, seconds in _pass(engine, context, some, needed, deadline, ids):
                best[shape] = min(seconds, best.get(shape, seconds))
    for shape, seconds in best.items():
        report(shape, seconds)


def sweep_batches(
    engine: Engine, budget: float, report: Callable[[Shape, float], None], ids: int = 0
) -> None:
    """Times forwards of several short sequences, as far as `budget` seconds go: what they cost
    does not follow from their rows alone, since each attends to a context of its own."""
    deadline = time.perf_counter() + budget
    best: dict[Shape, float] = {}
    for _ in range(PASSES):
        for batch in BATCHES:
            seqs = [-1 - i for i in range(batch)]
            try:
                if not all(engine.blank(seq, SHORT) for seq in seqs):
                    return
                for width in BATCH_WIDTHS:
                    shape = engine.shape([width] * batch, [SHORT] * batch)
                    if time.perf_counter() + best.get(shape, 0.0) > deadline:
                        break
                    _timed(engine, seqs, width, ids)  # copies the caches into one place
                    seconds = _timed(engine, seqs, width, ids)
                    best[shape] = min(seconds, best.get(shape, seconds))
            finally:
                for seq in seqs:
                    engine.close(seq)
    for shape, seconds in best.items():
        # A width alone would say that rows cost nothing.
        if all(shape._replace(width=width) in best for width in BATCH_WIDTHS):
            report(shape, seconds)


def _pass(
    engine: Engine,
    context: int,
    widths: Sequence[int],
    needed: Sequence[int],
    deadline: float,
    ids: int,
) -> Iterator[tuple[Shape, float]]:
    seq, seconds = -1, 0.0
    if engine.caps.context is not None:
        context = min(context, engine.caps.context - max(widths) - 1)
    if time.perf_counter() > deadline and not needed:
        return
    held = engine.blank(seq, context) if context >= 1 else 0
    if not held:
        return
    try:
        for width in widths:
            if time.perf_counter() + 1.5 * seconds > deadline and width not in needed:
                return
            seconds = _timed(engine, [seq], width, ids)
            yield engine.shape([width], [held]), seconds
    finally:
        engine.close(seq)


def _timed(engine: Engine, seqs: Sequence[SeqId], width: int, ids: int) -> float:
    start = time.perf_counter()
    for rows in engine.forward([Verify(seq, (0,) * width, ids=ids) for seq in seqs]):
        rows.argmax()
    for seq in seqs:
        # The row of a plain step is always kept, and a recurrent state has no copy of what was
        # before.
        engine.commit(seq, range(width == 1))
    return time.perf_counter() - start
