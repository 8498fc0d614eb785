"""The transformers engine keeps caches exact: every row it returns is the row of plain decoding.

The reference is one forward over the whole text without any cache, or transformers' own `generate`.
"""

from __future__ import annotations

import copy
import gc
import random
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    GraniteConfig,
    GraniteForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from conftest import CONTEXT, VOCABULARY, WINDOW, plain_ids, random_ids, shared_model, tiny_model
from draftwise import Model, UsageError
from draftwise.engines import rows as rows_module
from draftwise.engines import transformers as engine_module
from draftwise.engines.base import PrefillChunk, Rows, Shape, Verify, sweep
from draftwise.engines.transformers import TransformersEngine

TOLERANCE = 1e-4


def reference(model: PreTrainedModel, tokens: Sequence[int]) -> np.ndarray:
    """Logits after every token, from one forward without a cache."""
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return logits[:, :VOCABULARY].float().numpy()


def prefill(engine: TransformersEngine, seq: int, tokens: Sequence[int]) -> tuple[int, Rows]:
    reused = engine.open(seq, tokens)
    return reused, engine.forward([PrefillChunk(seq, tuple(tokens[reused:]))])[0]


def verify(
    engine: TransformersEngine, seq: int, tokens: Sequence[int], keep: int, width: int = 0
) -> list[np.ndarray]:
    rows = engine.forward([Verify(seq, tuple(tokens), width=width)])[0]
    got = [rows.row(i) for i in range(len(tokens))]
    assert list(rows.argmax()) == [int(row.argmax()) for row in got]
    engine.commit(seq, range(keep))
    return got


def wrong(tokens: Sequence[int]) -> list[int]:
    return [(t + 1) % VOCABULARY for t in tokens]


@pytest.mark.parametrize("start", [1, 3, 5 * WINDOW])
def test_chain_rows_are_those_of_one_uncached_forward_after_any_rejections(
    chain_model: PreTrainedModel, start: int
) -> None:
    engine, dice = TransformersEngine(chain_model), random.Random(start)
    text = random_ids(start + 70, seed=start)
    expected = reference(chain_model, text)
    _, rows = prefill(engine, 7, text[:start])
    np.testing.assert_allclose(rows.row(0), expected[start - 1], atol=TOLERANCE)
    at, rejections = start, 0
    while at < len(text):
        right = text[at : at + dice.choice([1, 1, 2, 4, WINDOW, WINDOW + 3])]
        rejected = wrong(text[at + len(right) :][: dice.choice([0, 1, 3, WINDOW + 2])])
        width = dice.choice([0, len(right) + len(rejected) + 4])
        got = verify(engine, 7, [*right, *rejected], len(right), width)
        whole = reference(chain_model, [*text[:at], *right, *rejected])
        np.testing.assert_allclose(np.stack(got), whole[at:], atol=TOLERANCE)
        at, rejections = at + len(right), rejections + len(rejected)
    assert rejections > WINDOW


def test_positions_stay_right_at_long_context_after_rejections(
    chain_model: PreTrainedModel,
) -> None:
    engine, text = TransformersEngine(chain_model), random_ids(440, seed=3)
    expected = reference(chain_model, text)
    prefill(engine, 0, text[:400])
    for at in range(400, 440):
        got = verify(engine, 0, [text[at], *wrong(text[at : at + 5])], 1)
        np.testing.assert_allclose(got[0], expected[at], atol=TOLERANCE)


def test_commit_drops_exactly_the_rejected_rows(chain_model: PreTrainedModel) -> None:
    engine, text = TransformersEngine(chain_model), random_ids(30, seed=1)
    prefill(engine, 0, text[:20])
    sequence = engine._sequences[0]
    for keep, expected in ((3, 23), (1, 24), (6, 30), (0, 30)):
        verify(engine, 0, [*text[expected - keep : expected], *[0] * (6 - keep)], keep, width=9)
        assert sequence.tokens == text[:expected]
        assert sequence.cache.get_seq_length() == expected
        for layer in sequence.cache.layers:
            if getattr(layer, "keys", None) is not None:
                window = getattr(layer, "sliding_window", None)
                assert layer.keys.shape[-2] == (window - 1 if window else expected)


def test_windows_stay_trimmed_where_nothing_is_rejected(chain_model: PreTrainedModel) -> None:
    engine = TransformersEngine(chain_model)
    prefill(engine, 0, random_ids(20, seed=1))
    for n in (1, 1, 5, 1):
        verify(engine, 0, random_ids(n, seed=n), n)
    for layer in engine._sequences[0].cache.layers:
        if hasattr(layer, "sliding_window"):
            assert layer.keys.shape[-2] == layer.sliding_window - 1
        if hasattr(layer, "conv_states"):
            assert layer.conv_states[0].shape[-1] == layer.conv_kernel_size[0]


def test_commit_refuses_what_is_no_beginning_of_the_chain(llama: PreTrainedModel) -> None:
    engine = TransformersEngine(llama)
    prefill(engine, 0, [1, 2, 3])
    engine.forward([Verify(0, (4, 5, 6))])
    for path in ((1,), (0, 2), (0, 1, 2, 3)):
        with pytest.raises(ValueError, match="first rows"):
            engine.commit(0, path)
    with pytest.raises(ValueError, match="committed"):
        engine.forward([Verify(0, (4, 5, 6), parents=(0, 0))])
    with pytest.raises(ValueError, match="open already"):
        engine.open(0, [1])


def test_several_sequences_do_not_touch_each_other(chain_model: PreTrainedModel) -> None:
    engine = TransformersEngine(chain_model)
    texts = {seq: random_ids(40, seed=seq) for seq in range(3)}
    expected = {seq: reference(chain_model, text) for seq, text in texts.items()}
    for seq, text in texts.items():
        prefill(engine, seq, text[: 5 + 7 * seq])
    for offset in range(12):
        for seq, text in texts.items():
            at = 5 + 7 * seq + offset
            got = verify(engine, seq, [text[at], *wrong(text[at : at + seq])], 1)
            np.testing.assert_allclose(got[0], expected[seq][at], atol=TOLERANCE)


@pytest.mark.parametrize("chunk", [1, 5, WINDOW, 13])
def test_a_prefill_in_chunks_is_one_prefill(
    any_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(engine_module, "PREFILL_CHUNK", chunk)
    engine, text = TransformersEngine(any_model), random_ids(42, seed=chunk)
    expected = reference(any_model, text)
    _, rows = prefill(engine, 0, text[:40])
    np.testing.assert_allclose(rows.row(0), expected[39], atol=TOLERANCE)
    for at in (40, 41):
        got = verify(engine, 0, [text[at]], 1)
        np.testing.assert_allclose(got[0], expected[at], atol=TOLERANCE)


def test_only_the_last_row_of_a_prefill_is_computed(llama: PreTrainedModel) -> None:
    engine = TransformersEngine(llama)
    shapes: list[tuple[int, ...]] = []
    hook = llama.lm_head.register_forward_hook(lambda m, i, out: shapes.append(tuple(out.shape)))
    try:
        prefill(engine, 0, random_ids(50))
    finally:
        hook.remove()
    assert shapes == [(1, 1, VOCABULARY)]


def served(engine: TransformersEngine, seq: int, text: Sequence[int], prompt: int) -> int:
    """Serves text token by token, with a rejection at every step, and keeps the cache."""
    reused, _ = prefill(engine, seq, text[:prompt])
    for token in text[prompt:]:
        verify(engine, seq, [token, *wrong([token, token])], 1)
    engine.close(seq, keep=True)
    return reused


def test_a_warm_cache_gives_the_rows_of_a_cold_one_when_the_text_goes_on(
    any_model: PreTrainedModel,
) -> None:
    engine, text = TransformersEngine(any_model), random_ids(60, seed=8)
    expected = reference(any_model, text)
    reused, _ = prefill(engine, 0, text[:20])
    for token in text[20:31]:
        verify(engine, 0, [token], 1)
    engine.close(0, keep=True)
    reused, rows = prefill(engine, 1, text[:50])
    assert reused == 31
    np.testing.assert_allclose(rows.row(0), expected[49], atol=TOLERANCE)
    for at in range(50, 60):
        got = verify(engine, 1, [text[at]], 1)
        np.testing.assert_allclose(got[0], expected[at], atol=TOLERANCE)


@pytest.mark.parametrize("same", [0, 1, 10, 30])
def test_a_warm_cache_is_cropped_where_layers_allow_and_dropped_where_not(
    chain_model: PreTrainedModel, same: int
) -> None:
    engine, text = TransformersEngine(chain_model), random_ids(31, seed=9)
    served(engine, 0, text, 20)
    turned = [*text[:same], *wrong(text[same:]), 5, 6]
    expected = reference(chain_model, turned)
    reused, rows = prefill(engine, 1, turned)
    full = chain_model.config.model_type == "llama"
    assert reused == (same if full else 0)
    np.testing.assert_allclose(rows.row(0), expected[-1], atol=TOLERANCE)
    got = verify(engine, 1, [3, 4, 5], 1)
    whole = reference(chain_model, [*turned, 3, 4, 5])
    np.testing.assert_allclose(np.stack(got), whole[len(turned) :], atol=TOLERANCE)


def test_the_same_prompt_again_leaves_one_token_to_run(llama: PreTrainedModel) -> None:
    engine, text = TransformersEngine(llama), random_ids(25, seed=2)
    served(engine, 0, text, 20)
    for prompt in (text[:20], text[:20], text[:7], text[:1]):
        reused, rows = prefill(engine, 1, prompt)
        np.testing.assert_allclose(rows.row(0), reference(llama, prompt)[-1], atol=TOLERANCE)
        engine.close(1, keep=True)
        assert reused <= len(prompt) - 1


def test_opening_with_nothing_yet_leaves_nothing_of_a_kept_cache(llama: PreTrainedModel) -> None:
    engine, text = TransformersEngine(llama), random_ids(22)
    prefill(engine, 0, text)
    engine.close(0, keep=True)
    assert engine.open(1, ()) == 0
    row = engine.forward([PrefillChunk(1, tuple(text[:5]))])[0].row(0)
    np.testing.assert_allclose(row, reference(llama, text[:5])[-1], atol=TOLERANCE)


def test_rows_between_forward_and_commit_are_not_kept(chain_model: PreTrainedModel) -> None:
    engine, text = TransformersEngine(chain_model), random_ids(40, seed=4)
    prefill(engine, 0, text[:20])
    verify(engine, 0, text[20:22], 2)
    engine.forward([Verify(0, (1, 2, 3))])
    engine.close(0, keep=True)
    reused, rows = prefill(engine, 1, text)
    assert reused == 22
    np.testing.assert_allclose(rows.row(0), reference(chain_model, text)[-1], atol=TOLERANCE)


def test_a_cache_that_a_broken_forward_left_uneven_is_not_kept() -> None:
    model = tiny_model("llama")
    engine, prompt = TransformersEngine(model), [1, 2, 3, 4]
    prefill(engine, 0, prompt)

    def broken(*_: object) -> None:
        raise KeyboardInterrupt

    handle = model.model.layers[1].register_forward_pre_hook(broken)
    with pytest.raises(KeyboardInterrupt):
        engine.forward([Verify(0, (5,))])
    handle.remove()
    engine.close(0, keep=True)
    assert engine.open(1, [*prompt, 5, 6]) == 0


def test_models_that_cannot_roll_back_say_so_and_refuse(plain_model: PreTrainedModel) -> None:
    engine = TransformersEngine(plain_model)
    assert engine.caps.rollback == "none"
    assert not engine.blank(-1, 16)
    prefill(engine, 0, [1, 2, 3])
    engine.forward([Verify(0, (4, 5))])
    with pytest.raises(ValueError, match="rolled back"):
        engine.commit(0, (0,))


def test_they_are_decoded_plainly_with_one_warning(plain_model: PreTrainedModel) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = Model(plain_model, None, policy="fixed:5")
        prompt = [5, 6, 7, 8] * 4
        result = model.generate(prompt, max_new_tokens=30)
        again = model.generate(prompt, max_new_tokens=30, policy="auto")
    ours = [w for w in caught if "recurrent state" in str(w.message)]
    assert len(ours) == 1
    assert list(result.token_ids) == plain_ids(plain_model, prompt, 30)
    assert again.token_ids == result.token_ids
    assert (result.stats.verified, result.stats.plain_steps) == (0, 29)
    assert result.stats.note is not None and "recurrent" in result.stats.note


def test_their_chat_turns_read_only_what_is_new(plain_model: PreTrainedModel) -> None:
    with pytest.warns(UserWarning, match="recurrent"):
        model = Model(plain_model, None)
    first = model.generate(random_ids(12), max_new_tokens=10, reuse=True)
    prompt = [*random_ids(12), *first.token_ids, 9, 8, 7, 6, 5]
    second = model.generate(prompt, max_new_tokens=20, reuse=True)
    assert second.stats.reused_tokens == 12 + 10 - 1
    assert list(second.token_ids) == plain_ids(plain_model, prompt, 20)


@pytest.mark.parametrize("policy", ["plain", "fixed:1", "fixed:7", "fixed:3:suffix", "auto"])
def test_text_is_that_of_transformers_generate(chain_model: PreTrainedModel, policy: str) -> None:
    model = Model(chain_model, None)
    for prompt in ([9], [5, 6, 7, 8] * 6, random_ids(40, seed=5)):
        result = model.generate(prompt, max_new_tokens=60, policy=policy)
        assert list(result.token_ids) == plain_ids(chain_model, prompt, 60)
    assert not model.engine._sequences


@pytest.mark.parametrize("policy", ["plain", "fixed:8", "auto"])
@pytest.mark.parametrize("prompt", [1, 25, 30, 31])
def test_the_context_is_filled_and_never_overshot(policy: str, prompt: int) -> None:
    target = tiny_model("llama", max_position_embeddings=32)
    model, most = Model(target, None), 0

    def watch(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        nonlocal most
        cache = kwargs.get("past_key_values", kwargs.get("cache"))
        most = max(most, cache.get_seq_length() + kwargs["input_ids"].shape[1])

    target.register_forward_pre_hook(watch, with_kwargs=True)
    result = model.generate([4, 5] * 15 + [4] if prompt > 30 else [4] * prompt, policy=policy)
    assert len(result.token_ids) == 32 - prompt
    assert result.finish_reason == "length"
    assert most <= 32
    with pytest.raises(UsageError, match="context holds 32"):
        model.generate([4] * 32, policy=policy)


def test_sweep_reports_what_it_was_asked_and_leaves_open_sequences_alone(
    chain_model: PreTrainedModel,
) -> None:
    engine, text = TransformersEngine(chain_model), random_ids(40, seed=6)
    prefill(engine, 0, text[:20])
    seen: list[tuple[Shape, float]] = []
    sweep(engine, 60.0, lambda shape, seconds: seen.append((shape, seconds)))
    assert {s.width for s, _ in seen} == {1, 2, 4, 8, 16, 32, 64}
    # What a window or a convolution holds cannot be made up, so those are timed at two tokens.
    full = set(getattr(chain_model.config, "layer_types", None) or ["full_attention"])
    made_up = full == {"full_attention"} and not getattr(chain_model.config, "sliding_window", None)
    assert {s.context for s, _ in seen} == ({16, CONTEXT - 17} if made_up else {2})
    assert all(seconds > 0 and s.batch == 1 for s, seconds in seen)
    assert list(engine._sequences) == [0]
    got = verify(engine, 0, text[20:], 20)
    np.testing.assert_allclose(np.stack(got), reference(chain_model, text)[20:], atol=TOLERANCE)


def test_blank_has_the_length_it_is_asked_for(llama: PreTrainedModel) -> None:
    engine = TransformersEngine(llama)
    for length in (1, 2, 3, 100):
        assert engine.blank(-1, length) == length
        sequence = engine._sequences[-1]
        assert sequence.cache.get_seq_length() == len(sequence.tokens) == length
        verify(engine, -1, [0, 0, 0], 0)
        assert sequence.cache.get_seq_length() == length
        engine.close(-1)


@pytest.mark.parametrize("context", [2, 20, 65, 66, 67, 80])
def test_a_model_with_a_tiny_context_can_be_measured(context: int) -> None:
    target = tiny_model("llama", max_position_embeddings=context)
    result = Model(target, None).generate([7], max_new_tokens=5)
    assert list(result.token_ids) == plain_ids(target, [7], min(5, context - 1))


def test_sequences_free_their_caches(llama: PreTrainedModel) -> None:
    engine = TransformersEngine(llama)

    def cache_of(seq: int) -> weakref.ref[Any]:
        prefill(engine, seq, [1, 2, 3])
        return weakref.ref(engine._sequences[seq].cache)

    closed, kept, open_ = cache_of(0), cache_of(1), cache_of(2)
    engine.close(0)
    engine.close(1, keep=True)
    gc.collect()
    assert closed() is None and kept() is not None
    engine.close(0)  # twice is once
    engine.open(3, [9])  # what does not fit is not kept for later
    gc.collect()
    assert kept() is None and open_() is not None
    engine.free()
    gc.collect()
    assert open_() is None and engine.closed


def test_freeing_the_engine_frees_the_weights() -> None:
    target = tiny_model("llama")
    gone, model = weakref.ref(target), Model(target, None)
    model.generate([1, 2, 3], max_new_tokens=5, reuse=True)
    del target
    gc.collect()
    assert gone() is not None
    model.close()
    gc.collect()
    assert gone() is None


def test_a_borrowed_model_goes_with_its_owner() -> None:
    target = tiny_model("llama")
    gone, model = weakref.ref(target), Model(target, None, borrowed=True)
    model.generate([1, 2, 3], max_new_tokens=5, reuse=True)
    del target
    gc.collect()
    assert gone() is None
    with pytest.raises(UsageError, match="closed"):
        model.generate([1, 2, 3])


def test_a_sequence_of_a_freed_engine_says_that_the_model_is_closed() -> None:
    engine = TransformersEngine(tiny_model("llama"))
    prefill(engine, 0, [1, 2, 3])
    engine.free()
    with pytest.raises(UsageError, match="closed"):
        engine.forward([Verify(0, (1,))])


def snapshot(model: PreTrainedModel) -> dict[str, Any]:
    return copy.deepcopy(
        {
            "config": model.config.to_dict(),
            "generation": model.generation_config.to_dict(),
            "weights": {k: v.clone() for k, v in model.state_dict().items()},
            "attributes": sorted(model.__dict__),
            "modules": [(n, type(m).__name__, m.training) for n, m in model.named_modules()],
            "forwards": [n for n, m in model.named_modules() if "forward" in m.__dict__],
            "hooks": sum(len(m._forward_hooks) for m in model.modules()),
            "grad": [p.requires_grad for p in model.parameters()],
        }
    )


def test_a_call_leaves_the_model_and_its_configs_as_they_were(any_model: PreTrainedModel) -> None:
    before = snapshot(any_model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        model = Model(any_model, None)
    model.generate([1, 2, 3] * 5, max_new_tokens=20, temperature=0.8, top_k=20, seed=1)
    model.close()
    after = snapshot(any_model)
    weights, same = before.pop("weights"), after.pop("weights")
    assert before == after
    assert all(torch.equal(weights[k], same[k]) for k in weights | same)


def test_a_model_with_a_kind_of_cache_of_its_own_is_refused() -> None:
    with pytest.raises(UsageError, match="no cache of the usual kind: MiniMax") as caught:
        Model(tiny_model("minimax"), None)
    assert "\n" not in str(caught.value)


def test_encoder_decoder_models_are_refused() -> None:
    config = T5Config(
        vocab_size=20,
        d_model=8,
        d_kv=4,
        d_ff=8,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
    )
    with pytest.raises(UsageError, match="encoder-decoder"):
        TransformersEngine(T5ForConditionalGeneration(config))


def test_rows_past_the_vocabulary_are_not_seen() -> None:
    """The head may be padded beyond the vocabulary that the config names."""
    logits = rows_module.Logits(torch.tensor([[[0.0, 2.0, 1.0, 9.0]]]), 3)
    rows = rows_module.TensorRows(logits, 0, 1)
    assert list(rows.argmax()) == [1]
    assert rows.row(0).tolist() == [0.0, 2.0, 1.0]


def test_no_more_rows_are_copied_to_the_host_than_are_committed(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = 0
    row = rows_module.TensorRows.row

    def counted(self: rows_module.TensorRows, i: int) -> Any:
        nonlocal copied
        copied += 1
        return row(self, i)

    monkeypatch.setattr(rows_module.TensorRows, "row", counted)
    model = Model(llama, None, policy="fixed:6")
    greedy = model.generate([5, 6, 7, 8] * 6, max_new_tokens=40)
    assert copied == 0 and greedy.stats.verified > 0
    model.generate([5, 6, 7, 8] * 6, max_new_tokens=40, temperature=1.0, seed=3)
    assert copied == 40


def test_bfloat16_rows_come_as_float32() -> None:
    engine = TransformersEngine(copy.deepcopy(shared_model("llama")).to(torch.bfloat16))
    _, rows = prefill(engine, 0, [1, 2, 3])
    assert rows.row(0).dtype == np.float32
    assert rows.argmax()[0] == int(rows.row(0).argmax())


@pytest.mark.parametrize("scaling", [1.0, 8.0])
def test_logits_of_the_first_ids_are_those_of_all(scaling: float) -> None:
    config = GraniteConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        logits_scaling=scaling,
    )
    model = GraniteForCausalLM(config).eval()
    engine, text = TransformersEngine(model), random_ids(12, seed=3)
    expected = reference(model, text)
    prefill(engine, 0, text[:8])
    rows = engine.forward([Verify(0, tuple(text[8:]), ids=100)])[0]
    # Where logits are more than the output layer's product, all of them are computed.
    assert len(rows.row(0)) == (100 if scaling == 1.0 else VOCABULARY)
    got = np.stack([rows.row(i)[:100] for i in range(4)])
    np.testing.assert_allclose(got, expected[8:, :100], atol=TOLERANCE)
