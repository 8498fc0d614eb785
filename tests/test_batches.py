"""Lists of prompts as people use them: each text is the one it is alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from conftest import plain_ids, random_ids, shared_model
from draftwise import Batch, Model, Result, SamplingParams, UsageError
from draftwise.batches import each_params, is_batch
from draftwise.intake import Wish
from draftwise.stopping import Stopper

PROMPTS = [[5, 6, 7, 8] * 4, random_ids(3, 1), [40, 41, 42] * 12, random_ids(60, 2), [9], [7, 7]]
WANTED = [50, 9, 40, 1, 23, 60]
SAMPLED: dict[str, Any] = {"temperature": 0.9, "seed": 7}


@pytest.fixture(scope="module")
def model(llama: PreTrainedModel, byte_tokenizer: PreTrainedTokenizerFast) -> Iterator[Model]:
    made = Model(llama, byte_tokenizer)
    yield made
    assert not made.engine._sequences, "a test left a sequence open"  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def drafting(llama: PreTrainedModel) -> Iterator[Model]:
    made = Model(llama, None, ["lookup", "suffix", shared_model("llama", 1)])
    yield made
    assert not made.engine._sequences  # type: ignore[attr-defined]
    assert not made.drafters["model"].engine._sequences  # type: ignore[attr-defined]


def ids(results: Sequence[Result]) -> list[list[int]]:
    return [list(result.token_ids) for result in results]


# texts


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("policy", ["auto", "fixed:4", "plain"])
def test_greedy_texts_are_those_of_transformers(model: Model, policy: str, size: int) -> None:
    results = model.generate(PROMPTS, max_new_tokens=WANTED, policy=policy, batch_size=size)
    llama = shared_model("llama")
    assert ids(results) == [plain_ids(llama, p, n) for p, n in zip(PROMPTS, WANTED, strict=True)]
    assert [r.finish_reason for r in results] == ["length"] * len(PROMPTS)
    assert [r.stats.prompt_tokens for r in results] == list(map(len, PROMPTS))


@pytest.mark.parametrize("policy", ["auto", "fixed:4", "plain"])
@pytest.mark.parametrize("which", ["model", "drafting"])
def test_sampled_texts_are_those_of_their_own_seeds(
    which: str, policy: str, request: pytest.FixtureRequest
) -> None:
    model: Model = request.getfixturevalue(which)
    together = model.generate(
        PROMPTS, max_new_tokens=WANTED, policy=policy, batch_size=3, **SAMPLED
    )
    for i, (prompt, wanted, result) in enumerate(zip(PROMPTS, WANTED, together, strict=True)):
        alone = model.generate(
            prompt, max_new_tokens=wanted, policy="plain", temperature=0.9, seed=7 + i
        )
        assert result.token_ids == alone.token_ids and result.text == alone.text
    again = model.generate(
        PROMPTS, max_new_tokens=WANTED, temperature=0.9, seed=[7 + i for i in range(6)]
    )
    assert ids(again) == ids(together)


def test_every_family_decodes_batches(any_model: PreTrainedModel) -> None:
    with Model(any_model, None) as model:
        results = model.generate(PROMPTS[:3], max_new_tokens=20, batch_size=2)
    assert ids(results) == [plain_ids(any_model, prompt, 20) for prompt in PROMPTS[:3]]


def test_a_draft_model_serves_batches(drafting: Model) -> None:
    results = drafting.generate(PROMPTS, max_new_tokens=40, policy="fixed:4", batch_size=4)
    assert ids(results) == [plain_ids(shared_model("llama"), p, 40) for p in PROMPTS]
    assert all(r.stats.by_drafter.get("model", {}).get("verified", 0) > 0 for r in results)


def test_prompts_may_be_texts_messages_or_ids_in_one_batch(model: Model) -> None:
    prompts: list[Any] = ["once", [{"role": "user", "content": "hi"}], [5, 6, 7]]
    results = model.generate(prompts, max_new_tokens=6)
    assert [r.token_ids for r in results] == [
        model.generate(prompt, max_new_tokens=6).token_ids for prompt in prompts
    ]
    assert isinstance(model.generate(["once"], max_new_tokens=2), list)
    assert isinstance(model.generate([[5, 6]], max_new_tokens=2), list)
    assert isinstance(model.generate("once", max_new_tokens=2), Result)


def test_stops_are_each_text_s_own(model: Model) -> None:
    prompts = ["one two", "three", "four five six"]
    whole = model.generate(prompts, max_new_tokens=40)
    stop = whole[0].text[5:7]
    cut = model.generate(prompts, max_new_tokens=40, stop=[[stop], [], []])
    assert cut[0].text == whole[0].text[: whole[0].text.index(stop)]
    assert cut[0].finish_reason == "stop"
    assert [r.text for r in cut[1:]] == [r.text for r in whole[1:]]
    for result, before in zip(
        model.generate(prompts, max_new_tokens=40, stop=stop), whole, strict=True
    ):
        assert result.text == before.text.partition(stop)[0]


def test_counts_reconcile(model: Model) -> None:
    batch = model.stream_batch(PROMPTS, max_new_tokens=WANTED, policy="fixed:3", batch_size=3)
    steps = []
    while results := batch.step():
        steps.append(results)
    for i, (result, wanted) in enumerate(zip(batch.results, WANTED, strict=True)):
        own = [r for rs in steps for r in rs if r.seq == steps[0][0].seq + i]
        stats, cut = result.stats, sum(1 + r.accepted - len(r.committed) for r in own[1:])
        assert stats.tokens == wanted == len(result.token_ids)
        assert wanted == 1 + stats.accepted + stats.steps - cut and cut in (0, 1)
        assert stats.steps == len(own) - 1 and stats.accepted == sum(r.accepted for r in own)
        assert stats.verified == sum(d["verified"] for d in stats.by_drafter.values())
        assert stats.decode_seconds == pytest.approx(sum(r.seconds for r in own[1:]))


# streams


@pytest.mark.parametrize("policy", ["auto", "plain"])
def test_pieces_add_up_and_come_as_they_are_committed(model: Model, policy: str) -> None:
    prompts = ["one two", "three", "four five six", "seven"]
    wanted = [60, 5, 30, 1]
    pieces = ["", "", "", ""]
    order: list[int] = []
    with model.stream_batch(prompts, max_new_tokens=wanted, policy=policy, batch_size=3) as batch:
        for i, piece in batch:
            assert piece
            pieces[i] += piece
            order.append(i)
    assert pieces == [r.text for r in batch.results]
    assert order.index(1) < len(order) - 1 - order[::-1].index(0), "not one text after the other"
    assert pieces == [
        model.generate(p, max_new_tokens=n).text for p, n in zip(prompts, wanted, strict=True)
    ]


def test_results_are_there_at_the_end_only(model: Model) -> None:
    batch = model.stream_batch(PROMPTS[:2], max_new_tokens=5)
    next(batch)
    with pytest.raises(UsageError, match="has not ended"):
        _ = batch.results
    batch.close()
    assert len(batch.results) == 2


def test_no_prompts_make_an_empty_batch(model: Model) -> None:
    batch = model.stream_batch([], max_new_tokens=5)
    assert list(batch) == [] and batch.results == []


# exits


@pytest.mark.parametrize("after", [0, 1, 4, 9])
def test_closing_midway_frees_everything_and_keeps_what_was_written(
    model: Model, after: int
) -> None:
    batch = model.stream_batch(PROMPTS, max_new_tokens=30, batch_size=3)
    for _ in range(after):
        batch.step()
    batch.close()
    assert not model.engine._sequences  # type: ignore[attr-defined]
    whole = model.generate(PROMPTS, max_new_tokens=30)
    for result, complete in zip(batch.results, whole, strict=True):
        assert result.token_ids == complete.token_ids[: len(result.token_ids)]
        whole_text = len(result.token_ids) == 30
        assert result.finish_reason == ("length" if whole_text else "cancelled")
    assert list(batch) == []
    batch.close()


def test_a_cancel_event_ends_all(model: Model) -> None:
    cancel = threading.Event()
    batch = model.stream_batch(PROMPTS, max_new_tokens=[2, *[50] * 5], batch_size=4, cancel=cancel)
    for _ in range(8):
        batch.step()
    cancel.set()
    assert batch.step() == []
    assert not model.engine._sequences  # type: ignore[attr-defined]
    reasons = [r.finish_reason for r in batch.results]
    assert reasons == ["length", *["cancelled"] * 5]
    assert batch.results[5].token_ids == (), "it had not joined yet"


def test_an_error_in_one_text_ends_all_and_not_the_model(model: Model) -> None:
    class Fails:
        calls = 0

        def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls == 4:
                raise RuntimeError("theirs")
            return scores

    params = SamplingParams(max_new_tokens=20)
    wishes = [Wish(params), Wish(params, processors=[Fails()]), Wish(params)]
    batch = model.start_batch(PROMPTS[:3], wishes)
    with pytest.raises(RuntimeError, match="theirs"):
        list(batch)
    assert not model.engine._sequences  # type: ignore[attr-defined]
    assert [r.finish_reason for r in batch.results] == ["cancelled"] * 3
    assert list(batch) == []
    assert model.generate([1, 2], max_new_tokens=3).token_ids


def test_batches_and_calls_of_several_threads_take_turns(model: Model) -> None:
    alone = [plain_ids(shared_model("llama"), prompt, 25) for prompt in PROMPTS]
    found: dict[int, Any] = {}

    def work(n: int) -> None:
        if n % 2:
            found[n] = ids(model.generate(PROMPTS, max_new_tokens=25, batch_size=n))
        else:
            found[n] = [list(model.generate(p, max_new_tokens=25).token_ids) for p in PROMPTS]

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == dict.fromkeys(range(1, 5), alone)


def test_memory_is_watched_in_batches_too(llama: PreTrainedModel) -> None:
    with Model(llama, None, ["lookup", "suffix"], draft_memory=40_000) as model:
        expected = [plain_ids(llama, prompt, 30) for prompt in PROMPTS]
        for _ in range(3):
            assert ids(model.generate(PROMPTS, max_new_tokens=30, batch_size=3)) == expected
        assert not model._memory._users["lookup"]  # type: ignore[union-attr]


# options


def test_options_are_those_of_each_prompt() -> None:
    params = each_params({"seed": 5, "max_new_tokens": [1, 2], "stop": ["a", "b"]}, 2)
    assert [(p.seed, p.max_new_tokens, p.stop) for p in params] == [
        (5, 1, ("a", "b")),
        (6, 2, ("a", "b")),
    ]
    params = each_params({"seed": [9, None], "stop": [["a"], ()], "top_k": 3}, 2)
    assert [(p.seed, p.stop, p.top_k) for p in params] == [(9, ("a",), 3), (None, (), 3)]
    assert [p.seed for p in each_params({}, 2)] == [None, None]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"seed": [1]}, "1 entries for 2 prompts"),
        ({"max_new_tokens": [1, 2, 3]}, "3 entries for 2 prompts"),
        ({"max_new_tokens": [1, 0]}, "max_new_tokens"),
        ({"seed": "x"}, "seed"),
        ({"stop": [["a"]]}, "1 entries"),
        ({"batch_size": 0}, "batch_size"),
        ({"reuse": True}, "single prompt"),
        ({"trace": "t.jsonl"}, "single prompt"),
        ({"temprature": 1.0}, "did you mean"),
        ({"policy": "none"}, "unknown policy"),
        ({"cancel": 3}, "threading.Event"),
    ],
)
def test_what_a_batch_cannot_have_is_refused(
    model: Model, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        model.generate([[1, 2], [3]], **{"max_new_tokens": 2, **options})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("prompts", "says"),
    [
        ([[1, 2], []], "prompt 1: .*empty"),
        (["one", ""], "prompt 1: .*empty"),
        ([[1], [1, 9999]], "prompt 1: token ids"),
        ([[1], [True]], "prompt 1: a prompt is one text"),
    ],
)
def test_a_bad_prompt_is_named(model: Model, prompts: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        model.generate(prompts, max_new_tokens=2)


def test_many_prompts_that_wait_cost_a_step_nothing(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []
    take = Stopper.take
    monkeypatch.setattr(Stopper, "take", lambda self: (taken.append(1), take(self))[1])
    batch = model.stream_batch([[5, 6, 7]] * 60, max_new_tokens=4, batch_size=2, policy="plain")
    assert "".join(piece for i, piece in batch if i == 59) == batch.results[59].text
    # One for the first token, at most three for the others, one at the end.
    assert len(taken) <= 60 * 5


def test_a_batch_may_be_closed_within_its_own_step(model: Model) -> None:
    def ends(ids: torch.Tensor, scores: Any) -> bool:
        if ids.shape[1] > 6:
            batch.close()
        return False

    wishes = [Wish(SamplingParams(max_new_tokens=30), criteria=[ends])] * 2
    batch = model.start_batch([[1, 2], [3]], wishes)
    for _ in batch:
        pass
    assert [result.finish_reason for result in batch.results] == ["cancelled"] * 2
    assert not model.engine._sequences


def test_one_text_is_no_batch(model: Model) -> None:
    with pytest.raises(UsageError, match="list of prompts"):
        model.stream_batch("one", max_new_tokens=2)  # type: ignore[arg-type]


def test_batch_size_belongs_to_lists(model: Model) -> None:
    with pytest.raises(UsageError, match="list of prompts"):
        model.generate("one", batch_size=3, max_new_tokens=2)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("prompt", "batch"),
    [
        ("text", False),
        ([1, 2], False),
        ([{"role": "user"}], False),
        (torch.tensor([[1, 2], [3, 4]]), False),
        ([torch.tensor(1), torch.tensor(2)], False),
        ([], False),
        ([1, "a"], False),
        (["a"], True),
        (("a", [1]), True),
        ([torch.tensor([1])], True),
    ],
)
def test_what_counts_as_a_batch(prompt: Any, batch: bool) -> None:
    assert is_batch(prompt) is batch


def test_a_batch_is_named_in_the_package(model: Model) -> None:
    assert isinstance(model.stream_batch([[1]], max_new_tokens=1), Batch)
