"""What a request came to: the text, and how it was made.

The counts reconcile: tokens = 1 (prefill) + Σ over steps (accepted + 1 bonus), less what a stop
inside an accepted block cut off. `tokens_per_step` is committed tokens over target forwards, the
prefill left out; `tokens_per_second` is over decode seconds, which hold everything after the
first token, draft prefill included. Time to first token is apart.

The texts of a batch share seconds: each counts those of every step that it took part in, so that
its speed is what its reader sees, and a batch's is the sum of its texts' while they all run. Where
an engine runs them one after another, each counts its own steps, not those of the others between
them. What others took to read their prompts is in nobody's.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from .alarm import Alarm
from .core import StepResult


@dataclass(frozen=True)
class Stats:
    """Seconds are wall-clock. `by_drafter` maps a drafter to its own verified and accepted tokens,
    to the accepted ones that were not the target's own choice (`loosened`), and to the steps that
    verified some of its tokens. Of the first three the drafters' sums are `verified`, `accepted`
    and `loosened`; a step may count for several drafters. `nats_given_up` is what the target
    preferred its own choices by; it and `loosened` are 0 under a lossless `acceptance_rule`."""

    prompt_tokens: int
    reused_tokens: int
    tokens: int
    steps: int
    plain_steps: int
    verified: int
    accepted: int
    first_token_seconds: float
    draft_seconds: float
    verify_seconds: float
    rest_seconds: float
    by_drafter: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    note: str | None = None
    acceptance_rule: str = "coupled"
    nats_given_up: float = 0.0
    loosened: int = 0

    @property
    def nats_per_token(self) -> float:
        return self.nats_given_up / self.tokens if self.tokens else 0.0

    @property
    def decode_seconds(self) -> float:
        return self.draft_seconds + self.verify_seconds + self.rest_seconds

    @property
    def tokens_per_second(self) -> float:
        return (self.tokens - 1) / self.decode_seconds if self.decode_seconds > 0 else 0.0

    @property
    def tokens_per_step(self) -> float:
        return (self.tokens - 1) / self.steps if self.steps else 1.0

    @property
    def acceptance(self) -> float | None:
        """Accepted over verified draft tokens; None if nothing was verified."""
        return self.accepted / self.verified if self.verified else None

    def to_dict(self) -> dict[str, Any]:
        derived = (
            "decode_seconds",
            "tokens_per_second",
            "tokens_per_step",
            "acceptance",
            "nats_per_token",
        )
        return asdict(self) | {name: getattr(self, name) for name in derived}


@dataclass(frozen=True)
class Result:
    """`token_ids` holds what was generated, an EOS that ended it included; `text` holds neither
    special tokens nor the stop string. `finish_reason`: stop, length or cancelled."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stats: Stats

    def __str__(self) -> str:
        return self.text


class Tally:
    """Adds step results up to Stats."""

    def __init__(
        self,
        prompt_tokens: int,
        note: str | None = None,
        rule: str = "coupled",
        alarm: Alarm | None = None,
    ):
        self._prompt, self._note, self._rule = prompt_tokens, note, rule
        self._alarm = alarm or Alarm()
        # Steps in which a serial drafter was asked, but for the first, which reads the prompt too.
        self.asks, self.asked_tokens, self.asked_seconds = 0, 0, 0.0
        self._count: Counter[str] = Counter()
        self._seconds: dict[str, float] = defaultdict(float)
        self._nats = 0.0
        self._drafters: dict[str, Counter[str]] = {}

    def add(self, r: StepResult) -> None:
        self._count["tokens"] += len(r.committed)
        if r.prefill:
            self._count["reused"] = r.reused
            self._seconds["first"] += r.seconds
            return
        self._alarm.add(r)
        self._count["steps"] += 1
        self._count["plain"] += int(not r.verified)
        self._count["verified"] += r.verified
        self._count["accepted"] += r.accepted
        self._count["loosened"] += r.loosened
        self._nats += r.spent
        if r.asked is not None:
            self.asks += 1
            if self.asks > 1:
                self.asked_tokens += len(r.committed)
                self.asked_seconds += r.seconds / r.batch
        for name in ("draft", "verify", "rest"):
            self._seconds[name] += getattr(r, f"{name}_seconds")
        for name, share in r.shares.items():
            own = self._drafters.setdefault(name, Counter())
            own.update(share._asdict(), steps=1)

    def stats(self) -> Stats:
        c, s = self._count, self._seconds
        news = [note for note in self._alarm.notes if note not in (self._note or "")]
        return Stats(
            self._prompt,
            c["reused"],
            c["tokens"],
            c["steps"],
            c["plain"],
            c["verified"],
            c["accepted"],
            s["first"],
            s["draft"],
            s["verify"],
            s["rest"],
            {name: dict(counts) for name, counts in self._drafters.items()},
            "; ".join(filter(None, (self._note, *news))) or None,
            self._rule,
            self._nats,
            c["loosened"],
        )
