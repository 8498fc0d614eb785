"""Fixtures that several test modules share."""

from __future__ import annotations

import functools
import io
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# Models are built here or read from a local folder: nothing may wait for a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from draftwise import cli

VOCABULARY = 300
WINDOW = 8
CONTEXT = 512
# Families whose caches roll back (full, sliding, both, convolution), those whose state is put back
# and fed again, and those that read no warm state but row by row.
CHAINS = ("llama", "mistral", "gemma3", "lfm2")
# Full attention that takes trees, and full caches whose models do not.
TREES = ("llama", "qwen2", "gpt2")
NO_TREES = ("bloom", "gpt_neo")
RECURRENT = ("mamba2", "qwen3_next", "falcon_h1", "granite_hybrid")
ONE_BY_ONE = ("mamba", "jamba")

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.25,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "gpt2": ("GPT2Config", {}),
    "bloom": ("BloomConfig", {}),
    "gpt_neo": (
        "GPTNeoConfig",
        {"window_size": WINDOW, "attention_types": [[["global", "local", "global"], 1]]},
    ),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "lfm2": (
        "Lfm2Config",
        {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
    ),
    "mamba2": (
        "Mamba2Config",
        {"num_heads": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8},
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
    ),
    "falcon_h1": (
        "FalconH1Config",
        {
            "mamba_d_ssm": 32,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_n_groups": 1,
            "mamba_d_state": 8,
            "mamba_chunk_size": 8,
        },
    ),
    "qwen3": ("Qwen3Config", {}),
    "qwen3_moe": ("Qwen3MoeConfig", _EXPERTS | {"moe_intermediate_size": 16}),
    "phi3": ("Phi3Config", {"sliding_window": WINDOW}),
    "gpt_neox": ("GPTNeoXConfig", {}),
    "olmo2": ("Olmo2Config", {}),
    "granite": ("GraniteConfig", {"residual_multiplier": 0.8, "logits_scaling": 0.5}),
    "granite_hybrid": (
        "GraniteMoeHybridConfig",
        {
            "layer_types": ["mamba", "attention", "mamba"],
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_n_groups": 1,
            "mamba_d_state": 8,
            "mamba_chunk_size": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 32,
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            "sliding_window": WINDOW,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "bamba": (
        "BambaConfig",
        {
            "attn_layer_indices": [1],
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_n_groups": 1,
            "mamba_d_state": 8,
            "mamba_chunk_size": 8,
        },
    ),
    "mamba": ("MambaConfig", {"state_size": 8}),
    "jamba": (
        "JambaConfig",
        _EXPERTS | {"attn_layer_period": 3, "attn_layer_offset": 1, "use_mamba_kernels": False},
    ),
    "minimax": ("MiniMaxConfig", {}),
    "recurrent_gemma": (
        "RecurrentGemmaConfig",
        {"lru_width": 32, "attention_window_size": WINDOW},
    ),
}


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Matrices this small are slower on two threads than on one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny_model(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A new random model of a few thousand float32 parameters; `changes` go into its config."""
    name, special = _FAMILIES[family]
    config = getattr(transformers, name)(**_COMMON | special | changes)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config)
    made: PreTrainedModel = model.float().eval()
    return made


@functools.cache
def shared_model(family: str, seed: int = 0) -> PreTrainedModel:
    """The same, one for all tests that only read it."""
    return tiny_model(family, seed)


@pytest.fixture(scope="session", params=CHAINS)
def chain_model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return shared_model(request.param)


@pytest.fixture(scope="session", params=RECURRENT)
def recurrent_model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return shared_model(request.param)


@pytest.fixture(scope="session", params=ONE_BY_ONE)
def plain_model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return shared_model(request.param)


@pytest.fixture(scope="session", params=CHAINS + RECURRENT + ONE_BY_ONE)
def any_model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return shared_model(request.param)


@pytest.fixture(scope="session")
def llama() -> PreTrainedModel:
    return shared_model("llama")


def plain_ids(model: PreTrainedModel, prompt: Sequence[int], n: int, **options: Any) -> list[int]:
    """What transformers' own greedy `generate` writes after `prompt`: the independent reference."""
    ids = torch.tensor([list(prompt)], device=model.device)
    options = {"do_sample": False, "max_new_tokens": n} | options
    made: Any = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return [int(t) for t in made[0, len(prompt) :]]


def random_ids(n: int, seed: int = 0, below: int = VOCABULARY) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(t) for t in torch.randint(below, (n,), generator=generator)]


@pytest.fixture(scope="session")
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, then pairs of letters up to the tiny models' vocabulary, and ChatML-like
    turns. Random ids read as broken UTF-8 often, as they should."""
    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = []
    pairs = itertools.permutations("etaoinshr", 2)
    for first, second in itertools.islice(pairs, VOCABULARY - len(vocabulary)):
        vocabulary[first + second] = len(vocabulary)
        merges.append((first, second))
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    return fast


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's folder in the user's own cache, so that only the first run unpacks it."""
    from draftwise.models import embedded_path

    return embedded_path(progress=False)


# Commands


LONG_CONTEXT = 1200  # of the models on disk that commands load
TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


class Ran(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Ran]


def save_tiny(folder: Path, shift: int = 0, template: str | None = TEMPLATE) -> Path:
    """A random model with one token a byte; `shift` gives the bytes other ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {c: i for i, c in enumerate(alphabet[shift:] + alphabet[:shift])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", chat_template=template
    )
    torch.manual_seed(shift)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=LONG_CONTEXT,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, cache: str
) -> Iterator[Run]:
    """Runs the program in this process."""
    monkeypatch.setenv("DRAFTWISE_CACHE", cache)
    monkeypatch.delenv("DRAFTWISE_DEBUG", raising=False)
    threads = torch.get_num_threads()

    def run(*args: object, stdin: str | bytes = "") -> Ran:
        data = stdin.encode() if isinstance(stdin, str) else stdin
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), "utf-8"))
        capsys.readouterr()
        code = cli.main([str(a) for a in args])
        return Ran(code, *capsys.readouterr())

    yield run
    torch.set_num_threads(threads)


def assert_refused(ran: Ran, *parts: str) -> None:
    assert ran.code == 2
    assert ran.out == ""
    assert ran.err.startswith("draftwise: ")
    assert ran.err.count("\n") == 1, ran.err
    for part in parts:
        assert part in ran.err
