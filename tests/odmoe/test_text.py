"""Pieces of a stream add up to the tokenizer's own decoding of the whole."""

from __future__ import annotations

import functools
import json
import shutil
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from odmoe.text import StoppedText, TextStream, encode, load_tokenizer
from odmoe.token_length import most_characters
from scheduler.errors import CorruptStoreError, NoTokenizerError, PromptError, StoreNotFoundError
from support.paths import ROOT

TEXTS = [
    "One line.\nAnother line,\n\n  indented;\tand a tab.",
    "naïve café 你好世界 \N{FAMILY}\N{ZERO WIDTH JOINER}\N{GRINNING FACE}\n\N{GRINNING FACE}\n ok",
    " leading, double  spaces and trailing ",
    "\n\n\n a\n b",
    "\N{REPLACEMENT CHARACTER} itself\N{REPLACEMENT CHARACTER}",
]
WORDS = ["one", "▁one", "▁", "▁▁", "two", "▁two", ".", ",", "▁.", "\n", "▁\n", "\n\n", "你", "é", "'s", "▁n", "'t"]
SPECIAL = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{n:02X}>" for n in range(256)]


def vocabulary(*parts: list[str]) -> dict[str, int]:
    return {piece: number for number, piece in enumerate(chain(*parts))}


def fast(tokenizer: Tokenizer, **options: Any) -> Any:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", **options
    )


def llama() -> Any:
    """As Llama 2 and Mixtral: byte fallback, and the text's first space stripped."""
    made = Tokenizer(models.BPE(vocabulary(SPECIAL, BYTES, WORDS), [], unk_token="<unk>", byte_fallback=True))
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return fast(made)


def metaspace() -> Any:
    """As T5: a space before every word but the first."""
    made = Tokenizer(models.WordLevel(vocabulary(SPECIAL, WORDS), unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    return fast(made)


TOKENIZERS = {
    "demo": AutoTokenizer.from_pretrained(ROOT / "models" / "demo-moe"),
    "llama": llama(),
    "metaspace": metaspace(),
}
each = pytest.mark.parametrize("name", TOKENIZERS)


def pieces(tokenizer: Any, ids: list[int], prompt: list[int] | None = None) -> list[str]:
    stream = TextStream(tokenizer, prompt or [])
    return [*(stream.push(token) for token in ids), stream.flush()]


def check_after(tokenizer: Any, prompt: list[int], ids: list[int]) -> None:
    """Prompt and answer are the text of both, unless the answer changes the prompt's last characters."""
    before, whole = (tokenizer.decode(part, skip_special_tokens=True) for part in (prompt, [*prompt, *ids]))
    if whole.startswith(before):
        assert before + "".join(pieces(tokenizer, ids, prompt)) == whole


def check(tokenizer: Any, ids: list[int]) -> None:
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


@functools.cache
def any_token(name: str) -> st.SearchStrategy[int]:
    """Special tokens and newlines are frequent."""
    tokenizer = TOKENIZERS[name]
    newlines = [i for i in range(len(tokenizer)) if "\n" in tokenizer.decode([i])]
    return st.sampled_from([*tokenizer.all_special_ids, *newlines]) | st.integers(0, len(tokenizer) - 1)


@functools.cache
def any_word(name: str) -> st.SearchStrategy[int]:
    """Special tokens and words are frequent."""
    tokenizer = TOKENIZERS[name]
    words = tokenizer.convert_tokens_to_ids([word for word in WORDS if word in tokenizer.get_vocab()])
    return st.sampled_from([*tokenizer.all_special_ids, *words]) | st.integers(0, len(tokenizer) - 1)


@each
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_pieces_add_up(name: str, data: st.DataObject) -> None:
    """Any tokens in any order: characters cut short, stray bytes, special tokens."""
    check(TOKENIZERS[name], data.draw(st.lists(any_token(name), max_size=40)))


@each
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_prompt_and_answer_are_the_text_of_both(name: str, data: st.DataObject) -> None:
    """Also where decoding the answer alone leaves out its first space, and after prompts of many tokens."""
    often = any_word(name)
    prompt = data.draw(st.lists(often, max_size=12)) * data.draw(st.sampled_from([1, 1, 10, 100]))
    check_after(TOKENIZERS[name], prompt, data.draw(st.lists(often, max_size=20)))


def test_the_first_space_of_an_answer_stays() -> None:
    for name in ("llama", "metaspace"):
        tokenizer = TOKENIZERS[name]
        one, two, bos = tokenizer.convert_tokens_to_ids(["▁one", "▁two", "<s>"])
        assert tokenizer.decode([two]) == "two"
        for prompt in ([one], [bos, one], [one] * 1000, [one, *[bos] * 20]):
            assert pieces(tokenizer, [two, one], prompt) == [" two", " one", ""]
        assert pieces(tokenizer, [two, one], [bos]) == ["two", " one", ""]


@pytest.mark.parametrize("known", [1, 2, 3])
def test_an_answer_completes_the_prompts_last_character(known: int) -> None:
    tokenizer = TOKENIZERS["llama"]
    spelled = tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in "\N{GRINNING FACE}".encode()])
    word = tokenizer.convert_tokens_to_ids("one")
    answer = [*spelled[known:], word]
    assert "".join(pieces(tokenizer, answer, [word, *spelled[:known]])) == "\N{GRINNING FACE}one"
    demo = TOKENIZERS["demo"]
    ids = demo("a \N{GRINNING FACE}")["input_ids"]
    assert "".join(pieces(demo, ids[-4 + known :], ids[: -4 + known])) == "\N{GRINNING FACE}"


@given(text=st.text(max_size=40))
@example(text="\n \n")
@example(text="你好\n 世界")
@settings(max_examples=250, deadline=None)
def test_text_comes_through(text: str) -> None:
    tokenizer = TOKENIZERS["demo"]
    assume(not any(special in text for special in tokenizer.all_special_tokens))
    ids = tokenizer(text)["input_ids"]
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True) == text


@given(text=st.text(max_size=12), rest=st.lists(st.sampled_from(WORDS), max_size=6), cut=st.integers(0, 3))
@settings(max_examples=250, deadline=None)
def test_bytes_of_llama(text: str, rest: list[str], cut: int) -> None:
    """Characters as byte tokens, the last cut short or followed by words."""
    tokenizer = TOKENIZERS["llama"]
    spelled = [f"<0x{byte:02X}>" for byte in text.encode()]
    check(tokenizer, tokenizer.convert_tokens_to_ids(["▁one", *spelled[: len(spelled) - cut], *rest, *spelled]))


@each
@pytest.mark.parametrize("tokens", [["one", "\n", "▁two"], ["▁one", "\n", "▁", "two"], ["one", "</s>", "▁two"]])
def test_a_space_after_a_line_or_a_special_token_stays(name: str, tokens: list[str]) -> None:
    if name == "demo":
        tokens = [token.replace("▁", "Ġ").replace("\n", "Ċ").replace("two", "to") for token in tokens]
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.convert_tokens_to_ids(tokens)
    assert None not in ids
    check(tokenizer, ids)


@pytest.mark.parametrize("text", TEXTS)
def test_a_piece_comes_as_soon_as_its_characters_are_whole(text: str) -> None:
    tokenizer = TOKENIZERS["demo"]
    ids = tokenizer(text)["input_ids"]
    got = pieces(tokenizer, ids)
    assert "".join(got) == text
    for number in range(1, len(ids) + 1):
        whole = tokenizer.decode(ids[:number], skip_special_tokens=True)
        if not whole.endswith("\N{REPLACEMENT CHARACTER}"):
            assert "".join(got[:number]) == whole


def test_one_character_in_several_tokens() -> None:
    tokenizer = TOKENIZERS["demo"]
    ids = tokenizer("\N{GRINNING FACE}")["input_ids"]
    assert len(ids) > 1
    assert pieces(tokenizer, ids) == [""] * (len(ids) - 1) + ["\N{GRINNING FACE}", ""]
    cut = pieces(tokenizer, ids[:-1])
    assert cut[:-1] == [""] * len(ids[:-1])
    assert cut[-1] == tokenizer.decode(ids[:-1], skip_special_tokens=True)


def test_long_texts_are_not_decoded_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = TOKENIZERS["demo"]
    ids = tokenizer("A line of text.\n" * 200)["input_ids"]
    decoded: list[int] = []
    real = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda part, **k: decoded.append(len(part)) or real(part, **k))
    stream = TextStream(tokenizer)
    assert "".join([*map(stream.push, ids), stream.flush()]) == "A line of text.\n" * 200
    assert max(decoded) < 30


@each
def test_long_lines_and_prompts_are_not_decoded_again_and_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = TOKENIZERS[name]
    words = ["Ġto" if name == "demo" else "▁two"]
    prompt, ids = tokenizer.convert_tokens_to_ids(words) * 5000, tokenizer.convert_tokens_to_ids(words) * 1000
    decoded: list[int] = []
    real = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda part, **k: decoded.append(len(part)) or real(part, **k))
    stream = TextStream(tokenizer, prompt)
    text = "".join([*map(stream.push, ids), stream.flush()])
    assert max(decoded) < 100
    assert text == real([*prompt, *ids])[len(real(prompt)) :]


# --- prompts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", ["\n", "one\n", "\n\n"])
def test_a_stop_text_of_byte_tokens_is_seen_with_its_last_one(stop: str) -> None:
    """A newline is the token `<0x0A>` there, and its text is held back for what a further byte might make of it."""
    tokenizer = llama()
    ids = tokenizer.convert_tokens_to_ids(["▁two", "one", *(["<0x0A>"] * 4)])
    text, found, pushed = StoppedText(tokenizer, (stop,)), "", 0
    while not text.stopped:
        found += text.push(ids[pushed])
        pushed += 1
    assert found == "twoone\n\n\n\n".partition(stop)[0]
    assert pushed == 2 + stop.count("\n"), "it ends with the token that completes the stop text"


def test_a_character_that_is_not_whole_yet_is_no_stop_text() -> None:
    tokenizer = llama()
    text = StoppedText(tokenizer, ("\N{REPLACEMENT CHARACTER}", "é"))
    tokens = ["two", *[f"<0x{byte:02X}>" for byte in "é".encode()]]
    assert [text.push(token) for token in tokenizer.convert_tokens_to_ids(tokens)] == ["two", "", ""]
    assert text.stopped


def test_encode_is_the_tokenizers_own() -> None:
    tokenizer = TOKENIZERS["demo"]
    for text in TEXTS:
        assert encode(tokenizer, text, 1 << 20) == tokenizer(text)["input_ids"]


def test_a_prompt_must_leave_room() -> None:
    tokenizer = TOKENIZERS["demo"]
    ids = tokenizer("a few words here")["input_ids"]
    assert encode(tokenizer, "a few words here", len(ids) + 1) == ids
    with pytest.raises(PromptError, match=rf"has {len(ids)} tokens, the model's context is {len(ids)}; shorten"):
        encode(tokenizer, "a few words here", len(ids))


def nfc() -> Any:
    """As Qwen: bytes, of the text's composed form."""
    made = Tokenizer.from_file(str(ROOT / "models" / "demo-moe" / "tokenizer.json"))
    made.normalizer = normalizers.NFC()
    return fast(made)


def unigram() -> Any:
    """As Llama's, and of a model that chooses among pieces."""
    pieces = [(piece, -1.0) for piece in [*SPECIAL, *BYTES, *WORDS]]
    made = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return fast(made)


BOUNDED = {"demo": TOKENIZERS["demo"], "llama": TOKENIZERS["llama"], "nfc": nfc(), "unigram": unigram()}
BOUNDS = {name: most_characters(tokenizer) for name, tokenizer in BOUNDED.items()}


@pytest.mark.parametrize("name", BOUNDED)
@given(text=st.text(max_size=60) | st.text("one two. 你é\u0301\u0323\u0345ᾳ", max_size=60))
@settings(max_examples=100, deadline=None)
def test_no_token_stands_for_more_characters_than_the_bound(name: str, text: str) -> None:
    most = BOUNDS[name]
    assert most is not None
    ids = BOUNDED[name](text, add_special_tokens=False)["input_ids"]
    assert len(text) <= most * len(ids)


def test_where_a_token_may_stand_for_any_length_there_is_no_bound() -> None:
    assert most_characters(TOKENIZERS["metaspace"]) is None, "a word that is not in its vocabulary is one token"
    stripping = Tokenizer.from_file(str(ROOT / "models" / "demo-moe" / "tokenizer.json"))
    stripping.add_special_tokens([AddedToken("<mask>", rstrip=True)])
    assert most_characters(fast(stripping)) is None, "it takes the blanks after it"
    dropping = Tokenizer.from_file(str(ROOT / "models" / "demo-moe" / "tokenizer.json"))
    dropping.normalizer = normalizers.Replace("  ", "")
    assert most_characters(fast(dropping)) is None
    assert most_characters(object()) is None


def test_a_prompt_that_cannot_fit_is_not_tokenised() -> None:
    tokenizer = TOKENIZERS["demo"]
    most = most_characters(tokenizer) or 0
    assert len(encode(tokenizer, " " * 10 * most, 10 * most)) > 0

    class Untouched:
        backend_tokenizer = tokenizer.backend_tokenizer

    with pytest.raises(PromptError, match=f"has {10 * most + 1} characters, and the 10 tokens .* at most {10 * most};"):
        encode(Untouched(), "a" * (10 * most + 1), 10)


@pytest.mark.parametrize(("prompt", "says"), [("", "empty"), ("a\udcffb", r"not UTF-8 text \(character 1\)")])
def test_prompts_that_cannot_be(prompt: str, says: str) -> None:
    with pytest.raises(PromptError, match=says):
        encode(TOKENIZERS["demo"], prompt, 1024)


def test_a_panic_of_the_tokenizers_library_is_an_error_of_the_prompt(demo: Path, tmp_path: Path) -> None:
    """Its PanicException is no Exception: it would end the thread that answers, or the service."""
    model = Path(shutil.copytree(demo, tmp_path / "model"))
    fields = json.loads((model / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    (model / "tokenizer.json").write_text(json.dumps(fields | {"pre_tokenizer": split}))
    tokenizer = load_tokenizer(model)
    assert encode(tokenizer, "one", 4000)
    with pytest.raises(PromptError, match=r"cannot read this prompt: .*retry-limit.*tokenizer\.json"):
        encode(tokenizer, "a" * 40 + "b", 4000)
    split["pattern"] = {"Regex": "("}
    (model / "tokenizer.json").write_text(json.dumps(fields | {"pre_tokenizer": split}))
    with pytest.raises(CorruptStoreError, match="no tokenizer can be read"):
        load_tokenizer(model)


def test_a_panic_while_a_tokenizer_is_read(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        """Of pyo3, which lets nobody make one."""

    def panic(*_: Any, **__: Any) -> None:
        raise PanicException("out of range")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", panic)
    with pytest.raises(CorruptStoreError, match=r"no tokenizer can be read from .*: out of range"):
        load_tokenizer(demo)


@pytest.mark.parametrize("family", ["qwen2_moe", "olmoe", "mixtral"])
def test_no_tokenizer_files(family: str, tmp_path: Path) -> None:
    """Transformers makes a tokenizer of no tokens for the first two, which would find every prompt empty."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    with pytest.raises(NoTokenizerError, match=r"has no tokenizer .* add the tokenizer files .* store again"):
        load_tokenizer(tmp_path)


def test_broken_tokenizers(demo: Path, tmp_path: Path) -> None:
    with pytest.raises(NoTokenizerError, match="has no tokenizer"):
        load_tokenizer(tmp_path)
    with pytest.raises(StoreNotFoundError, match="none was removed while this program ran"):
        load_tokenizer(tmp_path / "none")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo / name, tmp_path)
    whole = json.loads((tmp_path / "tokenizer.json").read_text())
    broken = ["", "{}", "[]", json.dumps(whole)[:-100], json.dumps(whole | {"model": {"type": "?"}})]
    for text in broken:
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(CorruptStoreError, match="no tokenizer can be read from"):
            load_tokenizer(tmp_path)
