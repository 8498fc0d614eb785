"""Retiming: plain steps among speculative ones, and wide ones among plain, to keep the curve true.

Everything is compared with T(1), which speculative steps never measure; so after 2, 4, 8 .. RETIME
steps without a plain one, one is taken, and the gap begins anew when the machine's level moved. A
curve that prices every draft out would never be found wrong either: after WIDEN plain steps in a
row a single node is verified whatever the curve says, then after twice as many, up to WIDEST, and
anew when the level moved. Together they cost well under 1 % where the
curve is right. Source: docs/design.md §2.
"""

from __future__ import annotations

RETIME = 256
RATE = 0.4  # how much of T(1)'s error a plain step that is taken to see it removes
WIDEN, WIDEST = 64, 512


class Retiming:
    def __init__(self, level: float):
        """`level`: the cost curve's drift."""
        self._since_plain, self._since_wide, self._gap, self._level = 0, 0, 2, level
        self._wait = WIDEN

    @property
    def plain_due(self) -> bool:
        return self._since_plain >= self._gap

    @property
    def wide_due(self) -> bool:
        return self._since_wide >= self._wait

    @property
    def rate(self) -> float:
        """The least share of its error that a plain step removes now."""
        return RATE if self._since_plain >= 2 else 0.0

    def learn(self, width: int, level: float) -> None:
        if width > 1:
            if self.wide_due:
                self._wait = min(2 * self._wait, WIDEST)
            self._since_wide = 0
            self._since_plain += 1
            return
        self._since_wide += 1
        moved = not 0.8 < level / self._level < 1.25
        if moved:
            self._wait = WIDEN
        if self.plain_due or moved:
            self._gap = 2 if moved else min(2 * self._gap, RETIME)
            self._level = level
        self._since_plain = 0
