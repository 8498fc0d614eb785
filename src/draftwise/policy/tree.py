"""Merging drafts: all that was proposed at a step as one tree, its most promising nodes first.

Drafts that agree share nodes; where they part they become branches; a continuation of a model's
draft hangs from the end of its main chain. A node's chance given its parent starts from the best
estimate b of the drafters that propose it, times a factor for its company, which is learned:

    chance = b · m(K),   m(K) = (hits + W · m₀) / (Σ b + W)   over all nodes met in company K

K: who proposes it, who proposes its best rival, its place among the rivals, whether several agree;
who is less than half as sure does not count (2026-12-01, with recycling's many unlikely branches:
captured gain 0.86, and 0.89 with it).
Two drafters that are each right four times in five cannot both be right where they differ, and
b alone would verify both (2026-12-01, replay of SmolLM2: captured gain 0.66, and 0.73 with it).

Nodes are taken from a heap by survival S = S_parent · chance, so they come in the order in which
they are worth verifying: every beginning of `nodes` is the best tree of its size. Cost: about 3 µs
a node taken. Lossless because only point drafts are merged, and acceptance judges every node.
Source: docs/design.md §2; arXiv 2402.12374 (Sequoia).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..core import DEEPEST, POINT, Draft, Features, SeqId, main_chain

Company = tuple[str, str, int, bool]  # drafter, the best rival's, place among rivals, agreed
WEIGHT = 8.0
LESSER = 0.3  # m₀ of a node whose rival looks better
DISCOUNT = 0.995
RIVAL = 0.5  # of a node's estimate: who is less sure is no company
SUREST = 0.97  # every copy ends some time, and where verifying is dear that is what costs
Member = tuple[int, int]  # (draft, node in it)
Ranked = tuple[tuple[float, Member], list[Member]]  # a node's best estimate, whose, all members


@dataclass
class Node:
    token: int
    parent: int
    depth: int
    survival: float
    estimate: float  # b
    company: Company
    drafter: str
    features: Features


class Companies:
    """m(K), over all requests."""

    def __init__(self) -> None:
        self._sums: dict[Company, tuple[float, float]] = {}

    def factor(self, company: Company, least: float) -> float:
        hits, expected = self._sums.get(company, (0.0, 0.0))
        return (hits + WEIGHT * least) / (expected + WEIGHT)

    def learn(self, company: Company, estimate: float, hit: bool) -> None:
        hits, expected = self._sums.get(company, (0.0, 0.0))
        self._sums[company] = (DISCOUNT * hits + hit, DISCOUNT * expected + estimate)


class Tree:
    """`estimate(draft, node)` gives b; `nodes` are those of a survival of at least `least`."""

    def __init__(
        self,
        drafts: Sequence[Draft],
        estimate: Callable[[Draft, int], float],
        companies: Companies,
        deepest: int,
        least: float,
    ):
        self._drafts, self._estimate, self._companies = drafts, estimate, companies
        self._least, self._deepest = least, deepest
        self._tails = self._continuations()
        self.nodes: list[Node] = []
        self.seen: list[Node] = []  # all children of the nodes, taken or not
        self._heap: list[tuple[float, int, int, Node, list[Member]]] = []
        self._expand(-1, [(i, -1) for i, draft in enumerate(drafts) if not draft.after])
        while self._heap and len(self.nodes) < DEEPEST:
            *_, node, members = heapq.heappop(self._heap)
            self.nodes.append(node)
            self._expand(len(self.nodes) - 1, members)

    def _continuations(self) -> dict[Member, list[int]]:
        ends: dict[tuple[int, ...], Member] = {}
        if any(draft.after for draft in self._drafts):
            for i, draft in enumerate(self._drafts):
                kept = main_chain(draft.parents)
                if not draft.after and kept:
                    ends[tuple(draft.tokens[node] for node in kept)] = (i, kept[-1])
        tails: dict[Member, list[int]] = {}
        for i, draft in enumerate(self._drafts):
            if draft.after in ends:
                tails.setdefault(ends[draft.after], []).append(i)
        return tails

    def _expand(self, parent: int, members: Sequence[Member]) -> None:
        above = self.nodes[parent] if parent >= 0 else None
        depth = above.depth + 1 if above else 1
        if depth > self._deepest:
            return
        children = self._children(members)
        if not children:
            return
        ranked = sorted(
            ((self._sure(found), found) for found in children.values()),
            key=lambda pair: -pair[0][0],
        )
        left = SUREST
        for place, ((b, best), found) in enumerate(ranked):
            draft = self._drafts[best[0]]
            company = self._company(ranked, place, found)
            features = draft.features[best[1]]
            least = 1.0 if place == 0 or features.rank else LESSER
            chance = min(b * self._companies.factor(company, least), left)
            left = max(left - chance, 0.0)
            survival = chance * (above.survival if above else 1.0)
            token = draft.tokens[best[1]]
            node = Node(token, parent, depth, survival, b, company, draft.drafter, features)
            self.seen.append(node)
            if survival >= self._least:
                heapq.heappush(self._heap, (-survival, depth, len(self.seen), node, found))

    def _children(self, members: Sequence[Member]) -> dict[int, list[Member]]:
        found: dict[int, list[Member]] = {}
        for i, node in members:
            draft = self._drafts[i]
            for child in draft.children(node):
                found.setdefault(draft.tokens[child], []).append((i, child))
            for tail in self._tails.get((i, node), ()):
                for child in self._drafts[tail].children(-1):
                    found.setdefault(self._drafts[tail].tokens[child], []).append((tail, child))
        return found

    def _company(self, ranked: Sequence[Ranked], place: int, members: Sequence[Member]) -> Company:
        b, best = ranked[place][0]
        rival = ""
        if len(ranked) > 1:
            other, (i, _) = ranked[1 if place == 0 else 0][0]
            rival = self._drafts[i].drafter if other >= RIVAL * b else ""
        agreed = len(members) > 1 and self._agreed(members, RIVAL * b)
        return self._drafts[best[0]].drafter, rival, min(place, 3), agreed

    def _agreed(self, members: Sequence[Member], least: float) -> bool:
        sure = [i for i, node in members if self._estimate(self._drafts[i], node) >= least]
        return len({self._drafts[i].drafter for i in sure}) > 1

    def _sure(self, members: Sequence[Member]) -> tuple[float, Member]:
        """The largest estimate for a node, and whose it is."""
        return max((self._estimate(self._drafts[i], node), (i, node)) for i, node in members)

    def draft(self, seq: SeqId, count: int) -> Draft:
        """The best tree of so many nodes."""
        return _draft(seq, self.nodes[:count], [node.parent for node in self.nodes[:count]])

    def paths(self) -> Iterator[list[int]]:
        """Nodes from the root to each leaf: what an engine without trees can verify."""
        inner = {node.parent for node in self.nodes}
        for leaf in range(len(self.nodes)):
            if leaf not in inner:
                path = [leaf]
                while (parent := self.nodes[path[-1]].parent) >= 0:
                    path.append(parent)
                yield path[::-1]

    def chain(self, seq: SeqId, path: Sequence[int]) -> Draft:
        return _draft(seq, [self.nodes[i] for i in path], list(range(-1, len(path) - 1)))

    def learn(self, companies: Companies, committed: Sequence[int]) -> None:
        """Compares the nodes with the text that came, along its path."""
        by_parent: dict[int, list[Node]] = {}
        for node in self.seen:
            by_parent.setdefault(node.parent, []).append(node)
        place = {id(node): i for i, node in enumerate(self.nodes)}
        at: int | None = -1
        for token in committed:
            if at is None:
                return
            children, at = by_parent.get(at, []), None
            for node in children:
                companies.learn(node.company, node.estimate, node.token == token)
                if node.token == token:
                    at = place.get(id(node))


def _draft(seq: SeqId, nodes: Sequence[Node], parents: Sequence[int]) -> Draft:
    sources = tuple(node.drafter for node in nodes)
    return Draft(
        seq,
        max(sorted(set(sources)), key=sources.count),
        tuple(node.token for node in nodes),
        tuple(parents),
        tuple(node.features for node in nodes),
        (POINT,) * len(nodes),
        tuple(node.survival for node in nodes),
        sources=sources,
    )
