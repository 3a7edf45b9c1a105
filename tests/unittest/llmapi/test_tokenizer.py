# SPDX-License-Identifier: Apache-2.0
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders

from tensorrt_llm.llmapi.tokenizer import Detokenizer, Tokenizer
from tests.unittest.executor_api.toy_tokenizer import EOS_TEXT, MARK_TEXT, eos_id, toy_backend, toy_tokenizer

TOKENIZER = toy_tokenizer()
BACKEND = toy_backend()
ANY_IDS = st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=40)


@given(st.text(max_size=60))
def test_decode_inverts_encode(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


@given(ANY_IDS, st.booleans())
def test_decode_agrees_with_the_library_on_any_ids(ids: list[int], skip: bool) -> None:
    assert TOKENIZER.decode(ids, skip_special_tokens=skip) == BACKEND.decode(ids, skip_special_tokens=skip)


@given(ANY_IDS, st.booleans())
def test_detokenizer_pieces_join_to_the_decoded_text(ids: list[int], skip: bool) -> None:
    detokenizer = Detokenizer(TOKENIZER, skip_special_tokens=skip)
    pieces = [detokenizer.push(token_id) for token_id in ids]
    assert "".join(pieces) + detokenizer.flush() == TOKENIZER.decode(ids, skip_special_tokens=skip)


def test_character_split_over_tokens_comes_whole_with_its_last_byte() -> None:
    ids = TOKENIZER.encode("a€b")
    assert len(ids) == 5
    detokenizer = Detokenizer(TOKENIZER)
    assert [detokenizer.push(token_id) for token_id in ids] == ["a", "", "", "€", "b"]
    assert detokenizer.flush() == ""


def test_character_cut_in_half_becomes_a_replacement_at_the_end() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    first, second, _ = TOKENIZER.encode("€")
    assert detokenizer.push(first) + detokenizer.push(second) == ""
    assert detokenizer.flush() == "\ufffd"


def test_only_special_tokens_are_skipped() -> None:
    ids = TOKENIZER.encode(f"x{MARK_TEXT}y{EOS_TEXT}")
    assert TOKENIZER.special_ids == {eos_id(TOKENIZER)}
    assert TOKENIZER.decode(ids) == f"x{MARK_TEXT}y"
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == f"x{MARK_TEXT}y{EOS_TEXT}"


def test_ids_beyond_the_vocabulary_have_no_text() -> None:
    assert TOKENIZER.token_bytes(TOKENIZER.vocab_size + 5) == b""


def test_padding_of_the_training_run_is_switched_off(tmp_path) -> None:
    backend = toy_backend()
    backend.enable_padding(length=50)
    backend.enable_truncation(2)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.from_path(tmp_path).encode("abc") == TOKENIZER.encode("abc")


def test_a_folder_and_its_file_name_the_same_tokenizer(tmp_path) -> None:
    toy_backend().save(str(tmp_path / "tokenizer.json"))
    for path in (tmp_path, tmp_path / "tokenizer.json", str(tmp_path)):
        assert Tokenizer.from_path(path).vocab_size == TOKENIZER.vocab_size


def test_missing_and_malformed_files_are_named(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"no file .*tokenizer\.json; give a folder"):
        Tokenizer.from_path(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a tokenizer"):
        Tokenizer.from_path(tmp_path)


def test_vocabularies_that_are_not_byte_level_are_refused() -> None:
    backend = toy_backend()
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match="WordPiece.*only byte-level"):
        Tokenizer(backend)


def test_byte_level_inside_a_sequence_is_accepted() -> None:
    backend = toy_backend()
    backend.decoder = decoders.Sequence([decoders.ByteLevel()])
    assert Tokenizer(backend).decode(TOKENIZER.encode("def x")) == "def x"
