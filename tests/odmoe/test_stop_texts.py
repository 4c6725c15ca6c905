"""Where an answer ends: by Transformers' own criterion of stop texts, on random tokens."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, StopStringCriteria

from odmoe.text import KeptTokenizer, StoppedText, end_token
from support.paths import ROOT

WORDS = ["▁the", "▁a", "▁", "t", "he", "▁é", "!", "▁the▁end", "<", "/s>", "aa", "aaa", *"abcdef", "\n"]
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_end|>"]


def sentencepiece() -> Any:
    """As Llama 2 and Mixtral, with a token of chats."""
    vocabulary = {piece: number for number, piece in enumerate([*SPECIAL, *WORDS])}
    made = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, extra_special_tokens=["<|im_end|>"], **names)


def bytes_of_gpt() -> Any:
    """Every byte is a token, so that one character may take four."""
    pieces = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġthe", "Ġa", "he", "aa"]
    made = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, [], unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, extra_special_tokens=["<|im_end|>"], **names)


TOKENIZERS = {
    "demo": AutoTokenizer.from_pretrained(ROOT / "models" / "demo-moe"),
    "sentencepiece": sentencepiece(),
    "bytes": bytes_of_gpt(),
}


def texts_of(tokenizer: Any) -> dict[int, str]:
    """What Transformers' criterion takes each token for."""
    mode = StopStringCriteria._get_stop_string_matching_mode(tokenizer)
    tokens, ids = StopStringCriteria.clean_tokenizer_vocab(tokenizer, stop_string_matching_mode=mode)
    texts = (token.decode(errors="replace") if isinstance(token, bytes) else token for token in tokens)
    return dict(zip(ids, texts, strict=True))


TEXTS = {name: texts_of(tokenizer) for name, tokenizer in TOKENIZERS.items()}


def theirs(tokenizer: Any, stop: tuple[str, ...], answer: list[int]) -> int | None:
    """Tokens with which Transformers' `generate` ends."""
    criterion = StopStringCriteria(tokenizer, list(stop))
    for count in range(1, len(answer) + 1):
        if bool(criterion(torch.tensor([answer[:count]]), None)):
            return count
    return None


def ours(tokenizer: Any, stop: tuple[str, ...], prompt: list[int], answer: list[int]) -> tuple[int | None, list[str]]:
    """Tokens with which the answer ends, and what a stream shows."""
    text, shown = StoppedText(tokenizer, stop, prompt), []
    for count, token in enumerate(answer, 1):
        shown.append(text.push(token))
        if text.stopped:
            return count, [*shown, text.flush()]
    return None, [*shown, text.flush()]


def expected_text(name: str, stop: tuple[str, ...], answer: list[int]) -> str:
    """Without special tokens, up to the first stop text."""
    hidden = set(TOKENIZERS[name].all_special_ids)
    whole, visible = "", []
    for token in answer:
        piece = TEXTS[name][token]
        whole += piece
        visible += [token not in hidden] * len(piece)
    ends = [at for at in map(whole.find, stop) if at >= 0]
    cut = min(ends, default=len(whole))
    return "".join(char for char, is_shown in zip(whole[:cut], visible[:cut], strict=True) if is_shown)


@functools.cache
def drawn_from(name: str) -> tuple[int, st.SearchStrategy[int]]:
    """A word, and tokens of whole characters, many of them special."""
    tokenizer, texts = TOKENIZERS[name], TEXTS[name]
    whole = [token for token, text in texts.items() if "\N{REPLACEMENT CHARACTER}" not in text and text]
    special = [token for token in tokenizer.all_special_ids if token in whole]
    few = [token for token in whole if texts[token].strip() in ("the", "a", "t", "he", "aa", "aaa", "<", "/s>", "b")]
    return few[0], st.sampled_from(special) | st.sampled_from(few) | st.sampled_from(whole)


def draw_case(name: str, data: st.DataObject) -> tuple[tuple[str, ...], list[int], list[int]]:
    """Stop texts, prompt, answer: stop texts are cut from the answer or alike."""
    texts, (word, often) = TEXTS[name], drawn_from(name)
    answer = data.draw(st.lists(often, min_size=1, max_size=14))
    text = "".join(texts[token] for token in answer)
    stop = []
    for _ in range(data.draw(st.integers(1, 3))):
        first = data.draw(st.integers(0, len(text) - 1))
        part = text[first : first + data.draw(st.integers(1, 12))]
        stop.append(part + data.draw(st.sampled_from(["", "", "", "b", "a"])))
    return tuple(stop), [word], answer


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_as_transformers(name: str, data: st.DataObject) -> None:
    """The same last token; the text before the stop text, of which no stream ever shows a part."""
    tokenizer = TOKENIZERS[name]
    stop, prompt, answer = draw_case(name, data)
    count, shown = ours(tokenizer, stop, prompt, answer)
    assert count == theirs(tokenizer, stop, answer)
    assert "".join(shown) == expected_text(name, stop, answer[:count])


@pytest.mark.parametrize("text", ["é", "€", "😀", "x€é", "€</s>", "é<|im_end|>😀"])
@given(data=st.data())
@settings(max_examples=10, deadline=None)
def test_characters_of_several_tokens(text: str, data: st.DataObject) -> None:
    """The token of their last byte ends the answer."""
    tokenizer = TOKENIZERS["bytes"]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    before = tokenizer("ab è", add_special_tokens=False)["input_ids"]
    after = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=4))
    count, shown = ours(tokenizer, (text,), before, [*before, *ids, *after])
    assert count == theirs(tokenizer, (text,), [*before, *ids, *after])
    assert (count, "".join(shown)) == (len(before) + len(ids), "ab è")
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in shown)


@pytest.mark.parametrize(
    ("stop", "answer", "count", "text"),
    [
        ("</s>", ["</s>"], 1, ""),
        ("</s>", ["▁the", "</s>", "b"], 2, " the"),
        ("</s>", ["<", "/s>", "b"], 2, ""),
        ("/s>b", ["▁a", "</s>", "b"], 3, " a"),
        ("the</s", ["▁the", "</s>"], 2, " "),
        ("</s></s>", ["</s>", "b", "</s>", "</s>"], 4, "b"),
        ("aab", ["aa", "aa", "b"], 3, "aa"),
        ("end|>", ["b", "<|im_end|>"], 2, "b"),
        ("b<|im", ["b", "b", "<|im_end|>"], 3, "b"),
    ],
)
def test_special_tokens(stop: str, answer: list[str], count: int, text: str) -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    ids = tokenizer.convert_tokens_to_ids(answer)
    assert theirs(tokenizer, (stop,), ids) == count
    found, shown = ours(tokenizer, (stop,), [4], ids)
    assert (found, "".join(shown)) == (count, text)


def test_special_tokens_that_end_nothing_are_forgotten() -> None:
    text = StoppedText(TOKENIZERS["sentencepiece"], ("</s>b",), [4])
    for _ in range(1000):
        text.push(2)
    assert len(text._hidden) == 1


def test_the_tokenizers_end(demo: Any, tmp_path: Any) -> None:
    assert end_token(KeptTokenizer(ROOT / "models" / "demo-moe")) == TOKENIZERS["demo"].eos_token_id
    assert end_token(KeptTokenizer(tmp_path)) is None, "a store without a tokenizer takes prompts of token ids"
