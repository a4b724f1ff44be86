"""Text to ids and back: whole, in pieces, with special tokens, from files that are wrong."""

from __future__ import annotations

import base64
import itertools
import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from headrace.config import ModelConfig
from headrace.engine.output import MAX_BYTE_RUN, ByteDecoder, PieceDecoder, WindowDecoder
from headrace.engine.text_growth import check_normalizer
from headrace.engine.tokenizer import Tokenizer, load_tokenizer
from headrace.errors import InvalidRequest, ModelError
from headrace.models.files import TokenizerFiles
from headrace.models.gguf_vocab import Piece, PieceType, bpe_tokenizer
from headrace.models.source import find_model


def demo() -> Tokenizer:
    tokenizer = load_tokenizer(find_model(ModelConfig()))
    assert tokenizer is not None
    return tokenizer


def spm_pieces(words: list[str]) -> list[Piece]:
    """The usual head of a SentencePiece vocabulary, single characters, then ``words`` in order of merging."""
    head = [
        Piece("<unk>", 0.0, PieceType.UNKNOWN),
        Piece("<s>", 0.0, PieceType.CONTROL),
        Piece("</s>", 0.0, PieceType.CONTROL),
    ]
    head += [Piece(f"<0x{byte:02X}>", 0.0, PieceType.BYTE) for byte in range(256)]
    letters = sorted(set("".join(words)) | set("▁abcdefé"))
    merged = [*words, *letters]
    return head + [Piece(text, -float(rank), PieceType.NORMAL) for rank, text in enumerate(merged)]


WORDS = ["▁a", "ab", "▁ab", "▁▁", "▁▁▁▁", "cd", "abcd", "▁abcd", "ee", "eeee", "aab"]


def spm(prefix: bool = True) -> Tokenizer:
    text = json.dumps(bpe_tokenizer(spm_pieces(WORDS), add_space_prefix=prefix))
    return Tokenizer(TokenizerFiles("test", text, {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}))


def plain(decoder: Any, vocab: dict[str, int]) -> Tokenizer:
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="?"))
    backend.decoder = decoder
    return Tokenizer(TokenizerFiles("test", backend.to_str()))


def metaspace() -> Tokenizer:
    return plain(decoders.Metaspace(), {"?": 0, "▁Hello": 1, "▁world": 2, "▁▁": 3, "é": 4, "!": 5, "▁": 6})


def wordpiece() -> Tokenizer:
    return plain(decoders.WordPiece(), {"?": 0, "Hello": 1, "##ing": 2, "world": 3, "##é": 4, ",": 5})


def undecoded() -> Tokenizer:
    return plain(None, {"?": 0, "Hello": 1, "world": 2})


# --- decoding in pieces -----------------------------------------------------------------------------------------------

TOKENIZERS = {
    "bytes": demo(),
    "pieces": spm(),
    "pieces-no-prefix": spm(False),
    "metaspace": metaspace(),
    "window": wordpiece(),
    "none": undecoded(),
}


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_pieces_of_text_add_up_to_the_whole(kind: str, data: st.DataObject) -> None:
    """Ids with and without tokens, in any segmentation, special tokens skipped or not: also as the library decodes
    them."""
    tokenizer, skip = TOKENIZERS[kind], data.draw(st.booleans())
    ids = data.draw(st.lists(st.integers(0, min(tokenizer.vocab_size + 2, 8200)), max_size=MAX_BYTE_RUN))
    decoder, text, at = tokenizer.stream_decoder(skip), "", 0
    while at < len(ids):
        step = data.draw(st.integers(1, 4))
        text += decoder.push(ids[at : at + step])
        at += step
    text += decoder.flush()
    assert text == tokenizer.decode(ids, skip)
    assert text == tokenizer._backend.decode(ids, skip_special_tokens=skip)


def test_decoders_are_chosen_by_kind() -> None:
    kinds = {name: type(tokenizer.stream_decoder()) for name, tokenizer in TOKENIZERS.items()}
    assert kinds["bytes"] is ByteDecoder
    assert kinds["pieces"] is kinds["pieces-no-prefix"] is kinds["metaspace"] is PieceDecoder
    assert kinds["window"] is kinds["none"] is WindowDecoder


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=40))
def test_valid_text_never_shows_a_replacement(text: str) -> None:
    """One id at a time, any text that encodes: no U+FFFD, and no delta takes back what an earlier one said."""
    for tokenizer in (TOKENIZERS["bytes"], TOKENIZERS["pieces-no-prefix"]):
        decoder = tokenizer.stream_decoder()
        deltas = [decoder.push([token]) for token in tokenizer.encode(text, add_special_tokens=False)]
        assert "\ufffd" not in "".join(deltas) or "\ufffd" in text
        assert "".join(deltas) + decoder.flush() == tokenizer.decode(tokenizer.encode(text, add_special_tokens=False))


def test_a_character_appears_when_its_last_byte_does() -> None:
    tokenizer = TOKENIZERS["bytes"]
    ids = tokenizer.encode("🦙", add_special_tokens=False)
    assert len(ids) > 1
    decoder = tokenizer.stream_decoder()
    assert [decoder.push([token]) for token in ids] == [""] * (len(ids) - 1) + ["🦙"]


def test_a_broken_tail_is_flushed_and_the_decoder_starts_anew() -> None:
    tokenizer = TOKENIZERS["bytes"]
    head = tokenizer.encode("🦙", add_special_tokens=False)[:1]
    decoder = tokenizer.stream_decoder()
    assert (decoder.push(head), decoder.flush()) == ("", "\ufffd")
    assert (decoder.push(tokenizer.encode("a", add_special_tokens=False)), decoder.flush()) == ("a", "")


def test_a_long_run_of_bytes_is_not_held_for_ever() -> None:
    """A script without pieces of its own: characters come while the run goes on, and none is split."""
    tokenizer = TOKENIZERS["pieces"]
    run = [3 + byte for byte in ("水" * MAX_BYTE_RUN).encode()]
    decoder = tokenizer.stream_decoder()
    before_the_end = "".join(decoder.push([token]) for token in run)
    assert len(before_the_end) >= MAX_BYTE_RUN - MAX_BYTE_RUN // 3
    assert before_the_end + decoder.flush() == tokenizer.decode(run) == "水" * MAX_BYTE_RUN


def test_special_tokens_are_skipped_or_shown() -> None:
    tokenizer = TOKENIZERS["bytes"]
    ids = tokenizer.encode("<|im_start|>hi<tool_call>")
    assert tokenizer.decode(ids) == tokenizer.decode(ids, skip_special_tokens=True) == "hi<tool_call>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|bos|><|im_start|>hi<tool_call>"


def test_a_tokens_own_text_and_bytes() -> None:
    tokenizer = TOKENIZERS["bytes"]
    llama = tokenizer.encode("🦙", add_special_tokens=False)
    assert b"".join(tokenizer.token_bytes(token) for token in llama) == "🦙".encode()
    assert "\ufffd" in tokenizer.token_text(llama[0])
    assert tokenizer.token_bytes(8185) == b"<|bos|>"
    assert tokenizer.token_bytes(10**6) == b"" and tokenizer.token_text(-1) == ""
    pieces = TOKENIZERS["pieces"]
    assert pieces.token_bytes(3 + 0xC3) == b"\xc3"
    assert pieces.token_text(pieces.encode("ab", add_special_tokens=False)[0]) == " ab"
    assert TOKENIZERS["window"].token_text(1) == "Hello"


def test_asking_for_ids_without_tokens_fills_no_table() -> None:
    tokenizer = demo()
    tokenizer.decode(range(10_000, 20_000))
    assert all(len(table) < tokenizer.vocab_size for table in tokenizer._pieces._tables.values())


# --- encoding ---------------------------------------------------------------------------------------------------------


def sentencepiece_bpe(pieces: list[Piece], text: str) -> list[int]:
    """The algorithm by its definition: merge the adjacent pair whose union scores highest, the leftmost of equals."""
    scores = {piece.text: (piece.score, index) for index, piece in enumerate(pieces) if piece.type == PieceType.NORMAL}
    symbols = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        pairs = [(-scores[a + b][0], at) for at, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in scores]
        if not pairs:
            break
        _, at = min(pairs)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    byte = {piece.text: index for index, piece in enumerate(pieces) if piece.type == PieceType.BYTE}
    return [
        token
        for symbol in symbols
        for token in ([scores[symbol][1]] if symbol in scores else [byte[f"<0x{b:02X}>"] for b in symbol.encode()])
    ]


def test_merges_from_scores_encode_as_sentencepiece_does() -> None:
    """Random vocabularies, closed under merging as trained ones are; random texts full of repetitions."""
    chance = random.Random(7)
    for _ in range(40):
        words: list[str] = []
        for _ in range(25):
            parts = [*words, *"▁abc"]
            word = chance.choice(parts) + chance.choice(parts)
            if word not in words and len(word) <= 8:
                words.append(word)
        pieces = spm_pieces(words)
        tokenizer = Tokenizer(TokenizerFiles("test", json.dumps(bpe_tokenizer(pieces, add_space_prefix=True))))
        for _ in range(40):
            text = "".join(chance.choices("aabc éz", k=chance.randint(0, 14)))
            assert tokenizer.encode(text, add_special_tokens=False) == sentencepiece_bpe(pieces, text), (words, text)


def test_bos_and_eos_are_added_as_the_config_says() -> None:
    text = json.dumps(bpe_tokenizer(spm_pieces(WORDS), add_space_prefix=True))
    named = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    body = Tokenizer(TokenizerFiles("t", text, named)).encode("ab")
    for add_bos, add_eos in ((True, False), (False, True), (True, True), (False, False)):
        tokenizer = Tokenizer(TokenizerFiles("t", text, {**named, "add_bos_token": add_bos, "add_eos_token": add_eos}))
        assert tokenizer.encode("ab") == [1] * add_bos + body + [2] * add_eos
        assert tokenizer.encode("ab", add_special_tokens=False) == body
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


def test_tokens_that_only_the_config_names_are_added() -> None:
    text = plain(None, {"?": 0, "a": 1})._backend.to_str()
    extra = {"content": "<|x|>", "special": True, "lstrip": False}
    tokenizer = Tokenizer(
        TokenizerFiles("t", text, {"eos_token": "a", "added_tokens_decoder": {"2": extra, "3": {"content": "<y>"}}})
    )
    assert tokenizer.vocab_size == 4
    assert tokenizer.special_token_ids == {1, 2}
    assert tokenizer.encode("<|x|><y>") == [2, 3]


def test_a_lone_surrogate_is_the_callers_mistake() -> None:
    with pytest.raises(InvalidRequest, match="lone surrogate U\\+D83D"):
        demo().encode("a\ud83d")


# --- files ------------------------------------------------------------------------------------------------------------


def folder_of(tmp_path: Path, *, vocab_size: int, **files: Any) -> ModelConfig:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": vocab_size}))
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return ModelConfig(model=str(tmp_path), load_format="dummy")


def test_a_tokenizer_larger_than_the_logits_does_not_fit(tmp_path: Path) -> None:
    text = json.dumps(bpe_tokenizer(spm_pieces(WORDS), add_space_prefix=True))
    size = len(spm_pieces(WORDS))
    assert load_tokenizer(find_model(folder_of(tmp_path, vocab_size=size, tokenizer=text))) is not None
    with pytest.raises(ModelError, match=f"ids up to {size - 1}, but the model's vocab_size is {size - 1}"):
        load_tokenizer(find_model(folder_of(tmp_path, vocab_size=size - 1, tokenizer=text)))


def test_a_model_may_have_no_tokenizer(tmp_path: Path) -> None:
    assert load_tokenizer(find_model(folder_of(tmp_path, vocab_size=4))) is None


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{}",
        "[1]",
        '{"model": 1}',
        '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 1}, "merges": ["a b"]}}',
    ],
)
def test_a_damaged_tokenizer_is_one_sentence(content: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        load_tokenizer(find_model(folder_of(tmp_path, vocab_size=4, tokenizer=content)))


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def charsmap(longest: int) -> dict[str, Any]:
    data = struct.pack("<I", 4) + bytes(4) + b"a\0" + b"b" * longest + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


DOUBLE = replace({"String": "a"}, "aa")
GROWING = {
    "normalizer": {"type": "Sequence", "normalizers": [DOUBLE] * 40},
    "normalizer nested": {
        "type": "Sequence",
        "normalizers": [DOUBLE, {"type": "Sequence", "normalizers": [DOUBLE] * 30}],
    },
    "normalizer long": replace({"String": "a"}, "a" * 100_000),
    "normalizer regex": replace({"Regex": ""}, "a" * 1000),
    "normalizer map": charsmap(100_000),
    "normalizer prepend": {"type": "Prepend", "prepend": "a" * 10_000_000},
    "decoder": {"type": "Sequence", "decoders": [DOUBLE] * 40},
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 1000,
        "pair": [],
        "special_tokens": {},
    },
}


@pytest.mark.parametrize("kind", GROWING)
@pytest.mark.parametrize("escaped", [False, True])
def test_parts_that_multiply_a_text_are_refused_before_they_see_one(kind: str, escaped: bool) -> None:
    """Also where an added token would go through them while the file is read, and where their names are written in
    escapes."""
    value = bpe_tokenizer(spm_pieces(WORDS), add_space_prefix=True)
    value[kind.partition(" ")[0]] = GROWING[kind]
    token = {
        "id": 999,
        "content": "a" * 100,
        "normalized": True,
        "special": False,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
    }
    value["added_tokens"] = [*value["added_tokens"], token]
    text = json.dumps(value)
    for name in ("Replace", "Precompiled", "Prepend", "TemplateProcessing") if escaped else ():
        text = text.replace(f'"{name}"', f'"\\u00{ord(name[0]):02x}{name[1:]}"')
    with pytest.raises(ModelError, match=rf"the {kind.partition(' ')[0]} of test can make a text more than"):
        Tokenizer(TokenizerFiles("test", text))


def test_parts_as_real_tokenizers_have_them_are_taken() -> None:
    for part in (
        charsmap(33),
        {"type": "NFKC"},
        {"type": "Sequence", "normalizers": [charsmap(33), replace({"Regex": " {2,}"}, "▁")]},
    ):
        check_normalizer(json.dumps({"normalizer": part}), "test")


def test_a_token_name_that_is_no_text_is_left_out(tmp_path: Path) -> None:
    text = json.dumps(bpe_tokenizer(spm_pieces(WORDS), add_space_prefix=True))
    config = folder_of(
        tmp_path, vocab_size=1000, tokenizer=text, tokenizer_config={"bos_token": "\ud800", "eos_token": 5, "unk_token": {"content": []},
        "added_tokens_decoder": {"²": {"content": 1}, "9" * 5000: {}}},
    )  # fmt: skip
    tokenizer = load_tokenizer(find_model(config))
    assert tokenizer is not None and tokenizer.bos_token_id is tokenizer.eos_token_id is None


def test_another_tokenizer_can_be_named(tmp_path: Path) -> None:
    text = json.dumps(bpe_tokenizer(spm_pieces(WORDS), add_space_prefix=True))
    source = find_model(folder_of(tmp_path, vocab_size=10_000))
    other = tmp_path / "other"
    other.mkdir()
    (other / "tokenizer.json").write_text(text)
    for override in (other, other / "tokenizer.json"):
        tokenizer = load_tokenizer(source, str(override))
        assert tokenizer is not None and tokenizer.vocab_size == len(spm_pieces(WORDS))
    with pytest.raises(ModelError, match=r"there is no tokenizer\.json"):
        load_tokenizer(source, str(tmp_path))


def test_a_lone_sentencepiece_model_is_refused_with_the_remedy(tmp_path: Path) -> None:
    config = folder_of(tmp_path, vocab_size=1000)
    (tmp_path / "tokenizer.model").write_bytes(b"anything")
    with pytest.raises(ModelError, match=r"no tokenizer\.json; write one with transformers"):
        load_tokenizer(find_model(config))


@pytest.mark.parametrize("typed", ["~nobody-of-this-name/model", "x" * 5000])
def test_what_can_be_no_path_is_said_and_not_a_traceback(typed: str) -> None:
    for config in (ModelConfig(model=typed), ModelConfig(generation_config=typed)):
        with pytest.raises(ModelError, match="cannot be looked up"):
            find_model(config)
    for options in ({"override": typed}, {"chat_template": typed}):
        with pytest.raises(ModelError, match="cannot be looked up"):
            load_tokenizer(find_model(ModelConfig()), **options)
