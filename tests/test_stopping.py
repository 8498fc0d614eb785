"""What of a text may be shown, and where it ends."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, trainers
from tokenizers.pre_tokenizers import ByteLevel
from transformers.convert_slow_tokenizer import bytes_to_unicode

from draftwise.core import SamplingParams
from draftwise.stopping import HALF, PATIENCE, Stopper
from toy import Everything, Target, ToyDrafter, ToyEngine, parts, request, run, scripted, steps

LETTERS = bytes_to_unicode()
EOS = 0
LIMIT = 1 << 30


def byte_level() -> Tokenizer:
    """Byte-level BPE with all bytes and some merges, parts of emoji among them; EOS is special."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        initial_alphabet=ByteLevel.alphabet(),
        special_tokens=[AddedToken("<end>", special=True)],
        show_progress=False,
    )
    text = "the end of the text 😀 😁 is an end 🙂, été is café; 你好 STOP\n\nUser: stop"
    made.train_from_iterator([text] * 50, trainer)
    return made


def byte_fallback() -> Tokenizer:
    """Sentencepiece's ways: words begin with ▁, and what has no piece is spelled in bytes."""
    pieces = ["<end>", "<unk>", "▁the", "▁end", "▁", "s", "t", "o", "p", ".", "▁stop", "▁of"]
    vocabulary = {p: i for i, p in enumerate([*pieces, *(f"<0x{b:02X}>" for b in range(256))])}
    made = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    made.add_special_tokens([AddedToken("<end>", special=True)])
    return made


BYTES, PIECES = byte_level(), byte_fallback()


def ids_of(parts: Sequence[bytes]) -> list[int]:
    """Every part in tokens of its own, whether or not it ends inside a character."""
    return [
        token.id
        for part in parts
        for token in BYTES.model.tokenize("".join(LETTERS[b] for b in part))
    ]


def read(ids: Sequence[int], tokenizer: Tokenizer = BYTES) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=True)


def stopper(stop: Sequence[str] = (), limit: int = LIMIT, **more: Any) -> Stopper:
    return Stopper(more.pop("tokenizer", BYTES), [], limit, frozenset([EOS]), stop, **more)


def feed(stop: Stopper, ids: Sequence[int], sizes: Iterator[int] | None = None) -> list[str]:
    """Pushes ids until the end, in steps of `sizes`, and takes a piece after every step."""
    pieces, at = [], 0
    while at < len(ids) and stop.finish is None:
        for token in ids[at : at + (next(sizes) if sizes else 1)]:
            at += 1
            if stop.push(token) is not None:
                break
        pieces.append(stop.take())
    if stop.finish is None:
        stop.end("cancelled")
        pieces.append(stop.take())
    return pieces


def cyclic(sizes: Sequence[int]) -> Iterator[int]:
    while True:
        yield from sizes


def split(text: str, cuts: Sequence[int]) -> list[bytes]:
    raw = text.encode()
    edges = [0, *sorted({c % (len(raw) + 1) for c in cuts}), len(raw)]
    return [raw[a:b] for a, b in itertools.pairwise(edges) if a < b]


texts = st.text(st.sampled_from([*"abSTOP. \n", "é", "你", "😀", "🙂", "\u200d"]), max_size=24)
cuts = st.lists(st.integers(0, 200), max_size=30)
sizes = st.lists(st.integers(1, 6), min_size=1, max_size=5).map(cyclic)


def test_the_tokenizers_are_as_nasty_as_they_should_be() -> None:
    assert len(ids_of([b"\xf0", b"\x9f", b"\x98", b"\x80"])) == 4
    assert 1 < len(BYTES.encode("🙃").ids) <= 4
    assert any(HALF in read([i]) and len(read([i])) > 1 for i in range(BYTES.get_vocab_size()))
    assert read([2, 3], PIECES) == "the end" and read([3], PIECES) == "end"


# text


@given(text=texts, cuts=cuts, sizes=sizes)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_pieces_add_up_to_the_text_and_hold_no_half_character(
    text: str, cuts: list[int], sizes: Iterator[int]
) -> None:
    ids = ids_of(split(text, cuts))
    stop = stopper()
    pieces = feed(stop, ids, sizes)
    assert "".join(pieces) == stop.text == text == read(ids)
    assert not any(HALF in piece for piece in pieces)


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["bytes", "pieces"])
def test_text_of_any_ids_is_what_the_tokenizer_reads(tokenizer: Tokenizer) -> None:
    top = tokenizer.get_vocab_size() - 1
    # Pieces spell broken bytes by the run, so that what was shown cannot be what is read at last.
    rare = st.integers(0, top if tokenizer is BYTES else 11)

    @given(ids=st.lists(rare, max_size=30), sizes=sizes)
    @settings(max_examples=300, deadline=None, derandomize=True)
    def check(ids: list[int], sizes: Iterator[int]) -> None:
        stop = Stopper(tokenizer, [], LIMIT)
        pieces = feed(stop, ids, sizes)
        assert "".join(pieces) == stop.text == read(ids, tokenizer)

    check()


def test_characters_spelled_in_bytes_among_pieces_are_whole() -> None:
    ids = [PIECES.token_to_id("▁the")]
    ids += [PIECES.token_to_id(f"<0x{b:02X}>") for b in "😀é你😀😀".encode()]
    ids += [PIECES.token_to_id("▁end")]
    stop = stopper(tokenizer=PIECES)
    pieces = feed(stop, ids)
    assert "".join(pieces) == stop.text == "the😀é你😀😀 end"
    assert not any(HALF in piece for piece in pieces)


def test_broken_bytes_are_shown_in_the_end_and_a_character_after_them_is_whole() -> None:
    ids = ids_of([b"\xf0"] * (2 * PATIENCE) + [b"\x9f", b"\x98", b"\x80", b"a"])
    stop = stopper()
    pieces = feed(stop, ids)
    assert "".join(pieces) == stop.text == read(ids) == HALF * (2 * PATIENCE - 1) + "😀a"
    assert "".join(pieces[: PATIENCE + 1]), "a model that babbles bytes must not look stuck"


def test_a_character_cut_by_the_limit_is_shown_as_it_decodes() -> None:
    ids = ids_of([b"a", b"\xf0\x9f", b"\x98"])
    stop = stopper(limit=len(ids))
    pieces = feed(stop, ids)
    assert stop.finish == "length"
    assert "".join(pieces) == stop.text == read(ids) == "a" + HALF


def test_special_tokens_are_not_text() -> None:
    ids = [*ids_of([b"a"]), EOS, *ids_of([b" b"])]
    stop = Stopper(BYTES, [], LIMIT)
    assert "".join(feed(stop, ids)) == stop.text == "a b"


def test_without_a_tokenizer_there_is_no_text() -> None:
    stop = stopper(tokenizer=None, limit=3)
    assert feed(stop, [5, 6, 7, 8]) == ["", "", ""]
    assert stop.tokens == [5, 6, 7] and stop.text == ""


# stop strings


def spelled_out(ids: Sequence[int], stops: Sequence[str]) -> tuple[str, int]:
    """(text, tokens) by the definition: after every token, is a stop string in what is read?"""
    for n in range(1, len(ids) + 1):
        seen = read(ids[:n]).rstrip(HALF)
        found = [seen.find(s) for s in stops if s in seen]
        if found:
            return seen[: min(found)], n
    return read(ids), len(ids)


@given(
    text=texts,
    cuts=cuts,
    sizes=sizes,
    stops=st.lists(
        st.sampled_from(
            ["STOP", "TOP", "P.", "SS", "aba", "a", "\n", " ", "é你", "😀", "😀🙂", "ab"]
        ),
        min_size=1,
        max_size=3,
    ),
)
@settings(max_examples=500, deadline=None, derandomize=True)
def test_no_part_of_a_stop_string_is_shown_and_the_text_ends_before_it(
    text: str, cuts: list[int], sizes: Iterator[int], stops: list[str]
) -> None:
    ids = ids_of(split(text, cuts))
    expected, n = spelled_out(ids, stops)
    stop = stopper(stops)
    pieces = feed(stop, ids, sizes)
    assert "".join(pieces) == stop.text == expected
    assert stop.tokens == ids[:n], "the token that completes the string is the last"
    assert stop.finish == ("stop" if any(s in text for s in stops) else "cancelled")


def test_a_stop_string_across_tokens_and_steps_is_never_shown() -> None:
    stop = stopper(["STOP"])
    ids = ids_of([b"a", b"b", b"S", b"T", b"O", b"P", b"y"])
    assert feed(stop, ids) == ["a", "b", "", "", "", ""]
    assert stop.finish == "stop" and stop.text == "ab"
    assert read(stop.tokens) == "abSTOP"


def test_a_held_back_beginning_is_released_once_it_goes_on_differently() -> None:
    ids = ids_of([b"a", b"S", b"T", b"O", b"X", b"S", b"S"])
    assert feed(stopper(["STOP"]), ids) == ["a", "", "", "", "STOX", "", "S", "S"]


def test_a_held_back_beginning_is_released_at_the_end() -> None:
    for ids in (ids_of([b"a", b"STO"]), [*ids_of([b"a", b"STO"]), EOS]):
        stop = stopper(["STOP"], limit=len(ids))
        assert "".join(feed(stop, ids)) == stop.text == "aSTO"


def test_a_stop_string_is_seen_before_the_rest_of_its_token_is_whole() -> None:
    half = next(i for i in range(BYTES.get_vocab_size()) if read([i]) == " " + HALF)
    stop = stopper([" "])
    assert stop.push(half) == "stop" and stop.text == ""


def test_a_stop_string_in_the_prompt_does_not_count() -> None:
    prompt = ids_of([b"STOP", b"ST"])
    stop = Stopper(BYTES, prompt, LIMIT, stop=["STOP"])
    assert "".join(feed(stop, ids_of([b"OP", b" a"]))) == "OP a"


def test_the_earlier_of_two_stop_strings_wins() -> None:
    whole = next(i for i in range(BYTES.get_vocab_size()) if read([i]) == "the")
    for stops in (["he", "e"], ["e", "he"]):
        stop = stopper(stops)
        assert stop.push(whole) == "stop" and stop.text == "t"


# the ends


def test_eos_ends_the_text_and_is_not_in_it() -> None:
    for eos in ({5, 9}, {9}):
        stop = Stopper(None, [], LIMIT, frozenset(eos))
        assert [stop.push(t) for t in (1, 2, 9)] == [None, None, "stop"]
    stop = stopper()
    assert "".join(feed(stop, [*ids_of([b"ab"]), EOS, *ids_of([b"c"])])) == "ab"
    assert stop.tokens[-1] == EOS


def test_without_eos_only_the_limit_ends() -> None:
    stop = Stopper(None, [], 4)
    assert [stop.push(EOS) for _ in range(4)] == [None, None, None, "length"]


def test_what_ends_the_text_is_named_before_the_limit() -> None:
    assert Stopper(None, [], 1, frozenset([3])).push(3) == "stop"
    assert Stopper(None, [], 1, frozenset([3])).push(4) == "length"


def counting(calls: list[list[int]], last: int) -> Callable[[torch.Tensor, Any], torch.Tensor]:
    """A transformers-style criterion that ends a text at `last` tokens, prompt included."""

    def criterion(ids: torch.Tensor, scores: Any) -> torch.Tensor:
        calls.append(ids[0].tolist())
        return torch.tensor([len(calls[-1]) >= last])

    return criterion


def test_every_criterion_is_called_once_for_every_token() -> None:
    one: list[list[int]] = []
    two: list[list[int]] = []
    stop = Stopper(None, [7, 8], LIMIT, criteria=[counting(one, 5), counting(two, 99)])
    assert [stop.push(t) for t in (1, 2, 3)] == [None, None, "stop"]
    assert one == two == [[7, 8, 1], [7, 8, 1, 2], [7, 8, 1, 2, 3]]


def test_criteria_are_called_for_the_token_that_ends_the_text_otherwise() -> None:
    for token, stops, limit in ((EOS, [], LIMIT), (ids_of([b"a"])[0], ["a"], LIMIT), (5, [], 1)):
        calls: list[list[int]] = []
        stop = stopper(stops, limit, criteria=[counting(calls, 99)])
        assert stop.push(token) is not None
        assert calls == [[token]]


# in the middle of an accepted block

TARGET = Target(6, 2)
PARAMS = SamplingParams(max_new_tokens=16, temperature=1.0, seed=1)
TEXT = run(parts(ToyEngine(TARGET)), request(PARAMS)).tokens


@pytest.mark.parametrize("length", [1, 2, 3, 16])
def test_nothing_after_eos_is_emitted_counted_or_cached(length: int) -> None:
    # Sole EOS ids that first occur anywhere in the text, in blocks of every size.
    for eos in set(TEXT):
        end = TEXT.index(eos) + 1
        drafter = ToyDrafter(lambda g, t, d: scripted(TEXT)(g, t, min(d, length)))
        policy = Everything()
        # `steps` compares the cache with the text after every step, the last one included.
        made = parts(ToyEngine(TARGET), [drafter], policy)
        done = list(steps(made, request(PARAMS, eos=frozenset([eos]))))
        tokens = [t for r in done for t in r.committed]
        assert tokens == TEXT[:end]
        assert done[-1].finish == "stop" and all(r.accepted <= len(r.committed) for r in done)
        assert policy.learned == done[1:]


@given(cut=st.integers(1, 15), length=st.integers(1, 15))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_a_criterion_met_inside_a_block_cuts_it(cut: int, length: int) -> None:
    assume(cut <= len(TEXT))
    calls: list[list[int]] = []
    asked = request(PARAMS)
    criteria = [counting(calls, len(asked.prompt) + cut)]
    stop = Stopper(None, asked.prompt, asked.limit, criteria=criteria)
    drafter = ToyDrafter(lambda g, t, d: scripted(TEXT)(g, t, min(d, length)))
    assert run(parts(ToyEngine(TARGET), [drafter]), asked, stop).tokens == TEXT[:cut]
    assert [call[len(asked.prompt) :] for call in calls] == [TEXT[: i + 1] for i in range(cut)]


@pytest.mark.parametrize("length", range(1, 8))
@pytest.mark.parametrize("string", ["b", "cd", "abc", "ff"])
def test_a_stop_string_cuts_inside_blocks_and_in_the_bonus_token(length: int, string: str) -> None:
    class Letters:
        def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
            return "".join("abcdef"[i] for i in token_ids)

    whole = Letters().decode(TEXT)
    asked = request(PARAMS)
    stop = Stopper(Letters(), asked.prompt, asked.limit, stop=[string])
    drafter = ToyDrafter(lambda g, t, d: scripted(TEXT)(g, t, min(d, length)))
    tokens = run(parts(ToyEngine(TARGET), [drafter]), asked, stop).tokens
    at = whole.find(string)
    assert stop.text == (whole[:at] if at >= 0 else whole)
    assert tokens == (TEXT[: at + len(string)] if at >= 0 else TEXT)


def test_a_long_row_of_invisible_tokens_is_read_in_pieces() -> None:
    class Counting:
        """Decodes nothing but counts what it is given."""

        read = 0

        def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
            self.read += len(token_ids)
            return "".join("x" for t in token_ids if t)

    counting = Counting()
    stopper = Stopper(counting, [], 10_000)
    for token in [1, *[0] * 3000, 1]:
        stopper.push(token)
    assert stopper.text == "xx"
    assert counting.read < 3000 * 2 * 70
