"""Real tokenizers against transformers: the same ids, the same text."""

from __future__ import annotations

import json
import lzma
import random
from pathlib import Path

import gguf
import pytest

from headrace.config import ModelConfig
from headrace.engine.tokenizer import Tokenizer, load_tokenizer
from headrace.models.gguf_vocab import read_gguf_tokenizer
from headrace.models.source import find_model, read_tokenizer_files
from tests.support.outside import shared

NAMES = ("gpt-2", "llama-bpe", "qwen2")
TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  leading and trailing  ",
    "I'll we've CAN'T 'S don't",
    "12 345 6789 1,000,000.50",
    "tabs\tand\n\nnew\r\nlines   \n",
    "Größe, naïve façade, e\u0301 combining",
    "日本語のテキスト、中文字符，한국어 텍스트",
    "مرحبا بالعالم שלום हिन्दी ไทย",
    "🦙👩‍👩‍👧‍👦🇩🇪 ẞ ﬁ ½ Ⅷ ①",
    "def f(x):\n    return {'a': [x ** 2 for x in range(10)]}  # comment",
    "<|endoftext|><|im_start|>user\n<|begin_of_text|>x<|eot_id|>",
    "\x00\x01\x7f\u200b\ufeff\u2028",
    "a" * 300,
]


@pytest.fixture(scope="module", params=NAMES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    packed, target = shared("data", "tokenizers", request.param), tmp_path_factory.mktemp(request.param)
    (target / "tokenizer.json").write_bytes(lzma.decompress((packed / "tokenizer.json.xz").read_bytes()))
    (target / "tokenizer_config.json").write_bytes((packed / "tokenizer_config.json").read_bytes())
    (target / "name").write_text(request.param)
    return target


def ours(folder: Path) -> Tokenizer:
    files = read_tokenizer_files(folder)
    assert files is not None
    return Tokenizer(files)


def random_texts(count: int) -> list[str]:
    chance = random.Random(11)
    return [
        "".join(chance.choices(TEXTS, k=1)[0][: chance.randint(1, 12)] for _ in range(chance.randint(1, 6)))
        for _ in range(count)
    ]


def test_ids_and_text_are_those_of_transformers(folder: Path) -> None:
    from transformers import AutoTokenizer

    reference, tokenizer = AutoTokenizer.from_pretrained(folder), ours(folder)
    for text in TEXTS + random_texts(200):
        ids = reference.encode(text)
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.encode(text, add_special_tokens=False) == reference.encode(text, add_special_tokens=False), (
            text
        )
        for skip in (True, False):
            assert tokenizer.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip), text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (reference.bos_token_id, reference.eos_token_id)
    assert tokenizer.vocab_size == len(reference)


@pytest.mark.slow
def test_the_same_vocabulary_in_gguf_gives_the_same_ids(folder: Path, tmp_path: Path) -> None:
    """Only the name of the splitting rule is kept there; ours must mean what the full tokenizer says."""
    data = json.loads((folder / "tokenizer.json").read_text())
    words = {token["id"]: token["content"] for token in data["added_tokens"]}
    special = {token["id"]: token["special"] for token in data["added_tokens"]}
    words.update({index: token for token, index in data["model"]["vocab"].items()})
    writer = gguf.GGUFWriter(tmp_path / "v.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre((folder / "name").read_text())
    writer.add_token_list([words[index] for index in range(len(words))])
    kinds = {True: gguf.TokenType.CONTROL, False: gguf.TokenType.USER_DEFINED, None: gguf.TokenType.NORMAL}
    writer.add_token_types([kinds[special.get(index)] for index in range(len(words))])
    merges = data["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    want = ours(folder)
    writer.add_bos_token_id(want.bos_token_id)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    files = read_gguf_tokenizer(tmp_path / "v.gguf")
    assert files is not None
    got = Tokenizer(files)
    for text in TEXTS + random_texts(200):
        assert got.encode(text, add_special_tokens=False) == want.encode(text, add_special_tokens=False), text
    assert got.encode("x") == want.encode("x")


def test_the_trained_models_ids_in_both_formats() -> None:
    folder = shared("data", "stories260k")
    golden = json.loads((folder / "golden_greedy.json").read_text())
    for path in (folder, folder / "stories260K-f32.gguf"):
        tokenizer = load_tokenizer(find_model(ModelConfig(model=str(path))))
        assert tokenizer is not None
        for case in golden:
            assert tokenizer.encode(case["prompt"]) == case["prompt_ids"]
