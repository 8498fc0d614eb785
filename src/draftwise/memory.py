"""How much memory drafters may take together, and which of them goes when it is too much.

When the drafters' bytes (weights, caches and indexes) exceed the limit, they are unloaded, least
useful first, until the rest fits:

    usefulness = share of time saved / bytes
    saved      = Σ over steps (T(1) · its accepted nodes
                 − (seconds of verifying − T(1)) · its share of the verified nodes)
                 − Σ seconds of drafting with it

as a share of all decode seconds seen. A drafter that was never tried is credited with UNTRIED, so
that of two such the heavier goes first; of those that save nothing, too. Bytes are taken at load
and at the end of every request, before its caches are dropped: what it needed at most.

A drafter that has to go is hidden from new requests at once (`Gone` stands in for it, so that
policies which know its name ask in vain) and is freed when the last request that had it has ended.
Cost: a few additions a step, under 1 ms a request; without a limit nothing of this runs.
"""

from __future__ import annotations

import logging
import re
from collections import ChainMap, Counter, defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence

from .core import Ask, Draft, Request, SeqId, StepResult, UsageError
from .drafters import Drafter, Go
from .drafters.model import ModelDrafter
from .turns import Turn

UNTRIED = 0.05  # share of time that a drafter is taken to save before it was tried
UNITS = {"": 1} | {
    prefix + infix: base**power
    for power, prefix in enumerate("kmgt", 1)
    for infix, base in (("", 1000), ("i", 1024))
}
logger = logging.getLogger("draftwise")


def parse_size(size: int | str | None) -> int | None:
    """Bytes of "500MB", "2GiB", "1.5 g" or a whole number of bytes; None is no limit."""
    if size is None:
        return None
    found = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,6})?)\s*([kmgt]i?)?b?\s*", str(size).lower())
    if found is None or not isinstance(size, (int, str)) or isinstance(size, bool):
        raise UsageError(f"draft_memory must be a size such as 500MB or 2GiB, not {size!r}")
    number = int(float(found[1]) * UNITS[found[2] or ""])
    if number < 1:
        raise UsageError(f"draft_memory must be at least one byte, not {size!r}")
    return number


def shown(size: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} GB"


class Gone:
    """Stands in for a drafter that is no longer there: it never drafts and takes nothing."""

    def __init__(self, drafter: Drafter):
        self.name, self.serial = drafter.name, drafter.serial

    def open(self, seq: SeqId, request: Request) -> None:
        return

    def propose(self, asks: Sequence[Ask], go: Go) -> list[Draft]:
        return []

    def observe(self, seq: SeqId, committed: Sequence[int]) -> None:
        return

    def close(self, seq: SeqId) -> None:
        return

    def stale(self, seq: SeqId) -> int:
        return 0

    def room(self, seq: SeqId) -> int:
        return 0

    def memory(self) -> int:
        return 0


def release(drafter: Drafter) -> None:
    if isinstance(drafter, ModelDrafter):
        drafter.engine.free()


class DraftMemory:
    """Keeps `drafters`, the caller's own dict, within `limit` bytes. `leaves` is called just before
    one of them is taken out of it."""

    def __init__(
        self, limit: int, drafters: dict[str, Drafter], turn: Turn, leaves: Callable[[], None]
    ):
        self.limit, self.drafters = limit, drafters
        self._turn, self._leaves = turn, leaves
        self._gone: dict[str, Drafter] = {}
        self.serving: Mapping[str, Drafter] = ChainMap(drafters, self._gone)
        self._leaving: dict[str, Drafter] = {}
        self._users: Counter[str] = Counter()
        self._saved: dict[str, float] = defaultdict(float)
        self._seconds = 0.0
        self.notes: list[str] = []

    def refused(self, name: str, size: int) -> None:
        """Tells of a draft model that was not even loaded."""
        self._tell(
            f"draft model {name} is not loaded: its {shown(size)} are more than the "
            f"{shown(self.limit)} that drafters may take"
        )

    def watched(
        self, steps: Generator[list[StepResult], None, None], plain: Callable[[int, int], float]
    ) -> Generator[list[StepResult], None, None]:
        """The same steps, from which usefulness is learned; `plain`: T(1) at a context, of a batch
        of so many."""
        with self._turn:
            names = list(self.drafters)
            self._users.update(names)
        sizes: dict[str, int] | None = None
        try:
            for results in steps:
                self._learn(results, plain)
                if any(result.finish is not None for result in results):
                    sizes = self._sizes()
                yield results
        finally:
            sizes = self._sizes() if sizes is None else sizes
            steps.close()
            with self._turn:
                self._users.subtract(names)
                self.fit(sizes)

    def fit(self, sizes: Mapping[str, int] | None = None) -> None:
        """Takes out what is too much; frees what nobody uses any more."""
        with self._turn:
            sizes = dict(self._sizes() if sizes is None else sizes)
            held = {name: sizes.get(name, 0) for name in self.drafters}
            for name in sorted(held, key=lambda name: self._rank(name, held[name])):
                total = sum(held.values())
                if total <= self.limit:
                    break
                self._part(name, held.pop(name), total)
            for name in [name for name in self._leaving if not self._users[name]]:
                release(self._leaving.pop(name))

    def close(self) -> None:
        """Frees what is still on its way out."""
        for drafter in self._leaving.values():
            release(drafter)

    def _part(self, name: str, size: int, total: int) -> None:
        self._leaves()
        self._leaving[name] = drafter = self.drafters.pop(name)
        self._gone[name] = Gone(drafter)
        for other in self.drafters.values():
            if isinstance(other, ModelDrafter):
                other.guess_without(drafter)
        self._tell(
            f"drafter {name} ({shown(size)}) is unloaded: drafters took {shown(total)}, may take "
            f"{shown(self.limit)}, and this one saves the least time for its size"
        )

    def _tell(self, note: str) -> None:
        self.notes.append(note)
        logger.warning("%s", note)

    def _sizes(self) -> dict[str, int]:
        with self._turn:
            return {name: drafter.memory() for name, drafter in self.drafters.items()}

    def _rank(self, name: str, size: int) -> tuple[float, int]:
        tried = name in self._saved and self._seconds > 0
        share = self._saved[name] / self._seconds if tried else UNTRIED
        return max(share, 0.0) / max(size, 1), -size

    def _learn(self, results: Sequence[StepResult], plain: Callable[[int, int], float]) -> None:
        # Outside of the step's turn: an addition that two threads make at once may be lost, which
        # a sum over many steps can bear, while a lock could meet the collector of another request.
        steps = [r for r in results if not r.prefill]
        asked = [r.asked for r in steps if r.asked is not None]
        if steps:
            self._seconds += steps[0].seconds
        for name in asked:
            self._saved[name] -= steps[0].draft_seconds / len(asked)
        verified = sum(r.verified for r in steps)
        for r in steps:
            one = plain(r.context, r.batch) if verified else 0.0
            for name, share in r.shares.items():
                cost = (r.verify_seconds - one) * share.verified / verified
                self._saved[name] += one / r.batch * share.accepted - cost
