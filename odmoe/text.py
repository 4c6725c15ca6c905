"""Prompts to token ids, and token ids to text, piece by piece."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from checkpoint.formats.gguf_file import gguf_tokenizer, has_tokenizer, is_gguf
from checkpoint.sharding.generation_file import check_generation_file
from checkpoint.sharding.source import Source, verify_bytes
from checkpoint.store import removal_error
from odmoe.token_length import most_characters
from scheduler.errors import (
    CorruptCheckpointError,
    CorruptStoreError,
    NoTokenizerError,
    ODMoEError,
    PromptError,
    StoreError,
)

_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
"""A token that is one byte of text (SentencePiece's byte fallback)."""
_CUT = "\N{REPLACEMENT CHARACTER}"
"""What an incomplete character is decoded to."""
_LONG = 64
"""Tokens of a line, after which decoding begins anew: each token decodes those before it again."""
_MARKS = ("\U000f0000", "\U000f0001")
"""Around a control token's text where it is text, as Transformers' `mark_control_tokens` writes them."""
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "*.model", "*.tiktoken", "tekken.json")
"""Files that hold the vocabulary of a tokenizer, as patterns."""


def has_vocabulary(folder: Path) -> bool:
    """Whether the folder of a model has a file that a tokenizer's vocabulary is in, or a GGUF file has one."""
    if is_gguf(folder):
        return has_tokenizer(folder)
    return any(True for pattern in _VOCABULARIES for _ in folder.glob(pattern))


def load_tokenizer(folder: Path, kind: type[ODMoEError] = CorruptStoreError) -> Any:
    """The tokenizer of the model in `folder`, which may be a GGUF file.

    Raises NoTokenizerError if it has none, `kind` if it cannot be read, or StoreNotFoundError if the folder is not
    there.
    """
    if is_gguf(folder):
        return gguf_tokenizer(folder)
    if folder.is_dir() and not has_vocabulary(folder):
        again = ", and make its store again" if issubclass(kind, StoreError) else ""
        raise NoTokenizerError(
            f"{folder} has no tokenizer (tokenizer.json, tokenizer.model, ...), which a prompt of text needs; "
            f"add the tokenizer files that the model was published with to the checkpoint{again}"
        )
    from transformers import AutoTokenizer

    try:
        with panics_named(kind, f"no tokenizer can be read from {folder}"):
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except ODMoEError:
        raise
    except Exception as error:  # the tokenizers library raises Exception itself
        if not folder.is_dir():  # Transformers would look for it on the Hub
            raise removal_error(folder) from error
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(" :")
        raise kind(
            f"no tokenizer can be read from {folder}: {reason}; check that the model's tokenizer files are complete"
        ) from error
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):  # Transformers makes it from no file at all
        raise kind(
            f"no tokenizer can be read from {folder}: there is no vocabulary; check that the model's tokenizer files "
            "are complete"
        )
    return tokenizer


@contextmanager
def panics_named(kind: type[ODMoEError], what: str) -> Iterator[None]:
    """Raises `kind` where the library of tokenizers, written in Rust, panics: a regular expression of tokenizer.json
    may exceed its limits. Its PanicException is no Exception, and would end the thread."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        reason = (str(error).splitlines() or ["it panicked"])[0]
        raise kind(f"{what}: {reason}; check the regular expressions in the model's tokenizer.json") from error


def check_tokenizer(source: Source) -> None:
    """Raises NoTokenizerError or CorruptCheckpointError unless the checkpoint has a tokenizer, ConfigError for
    generation settings that cannot be used."""
    check_generation_file(source.path)
    try:
        load_tokenizer(source.path, CorruptCheckpointError)
    except CorruptCheckpointError:
        verify_bytes(source)  # where digests were published, they tell which file is damaged
        raise


def encode(tokenizer: Any, prompt: str, context: int, special: bool = True) -> list[int]:
    """The prompt's token ids. `special`: with the tokenizer's special tokens; a chat template brings its own. Control
    tokens that are marked as text (`odmoe.chat.chat_text`) are encoded as text.

    Raises PromptError for a prompt that is empty or too long: none is truncated.
    """
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise PromptError(f"the prompt is not UTF-8 text (character {error.start}); convert it") from error
    _check_length(tokenizer, prompt, context)
    with panics_named(PromptError, "the model's tokenizer cannot read this prompt"):
        is_marked = not special and _MARKS[0] in prompt
        ids = (
            _encode_marked(tokenizer, prompt)
            if is_marked
            else tokenizer(prompt, add_special_tokens=special)["input_ids"]
        )
    if not prompt or not ids:
        raise PromptError("the prompt is empty; give at least one character")
    if len(ids) >= context:
        raise PromptError(f"the prompt has {len(ids)} tokens, the model's context is {context}; shorten it")
    return ids


def without_marks(text: str) -> str:
    """A chat's text as the model reads it."""
    for mark in _MARKS:
        text = text.replace(mark, "")
    return text


def _encode_marked(tokenizer: Any, text: str) -> list[int]:
    from transformers.utils.chat_template_utils import encode_marked_chat

    try:
        ids: list[int] = encode_marked_chat(tokenizer, text)
    except ValueError:  # plain text gives the token too: take it apart
        start, end = _MARKS
        ids = encode_marked_chat(
            tokenizer, re.sub(f"{start}(.)([^{end}]*){end}", rf"\1{start}\2", text, flags=re.DOTALL)
        )
    return ids


def _check_length(tokenizer: Any, prompt: str, context: int) -> None:
    """Raises PromptError for a text that cannot fit, before tokenising it takes long."""
    most = most_characters(tokenizer) if len(prompt) > context else None
    if most is not None and len(prompt) > context * most:
        raise PromptError(
            f"the prompt has {len(prompt)} characters, and the {context} tokens of the model's context have at most "
            f"{context * most}; shorten it"
        )


class TextStream:
    """The text that tokens add to a prompt, in pieces. Each piece ends at a whole character, and all of them together
    are what the tokenizer's decoding of prompt and tokens has beyond that of the prompt."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = (), special: bool = False) -> None:
        """`prompt`: the tokens before. `special`: the text has special tokens too."""
        self._tokenizer = tokenizer
        self._special = special
        self._ids = self._end_of(prompt)
        self._start = 0  # token at which decoding begins
        self._taken = len(self._ids)  # number of tokens whose text was returned, or is the prompt's
        self._given = self._decode(0)  # the text of these from `_start` on

    def push(self, token: int) -> str:
        """The text that this token completes, often empty within a multi-byte character."""
        self._ids.append(token)
        # A further byte token may change the text of the byte tokens before it, even past a token that is skipped.
        if self._is_byte(token) or not self._decode(len(self._ids) - 1):
            return ""
        text = self._decode(self._start)
        return "" if text.endswith(_CUT) else self._take(text)

    def flush(self) -> str:
        """What is left at the end, whole or not."""
        return self._take(self._decode(self._start))

    @property
    def held_back(self) -> str:
        """The whole characters of tokens that were pushed and not given: a further byte token might change them."""
        if self._taken == len(self._ids):
            return ""
        text, given = self._decode(self._start), self._given.rstrip(_CUT)
        return text[len(given) :].rstrip(_CUT) if text.startswith(given) else ""

    def _end_of(self, prompt: Sequence[int]) -> list[int]:
        """Tokens at the prompt's end after which any text reads as after the whole prompt: many tokenizers leave out a
        text's first space, and some read several byte tokens together."""
        for count in (8, 64, 512):
            if count >= len(prompt):
                break
            end = list(prompt[-count:])
            if not self._is_byte(end[0]) and self._text_of(end).strip(f" {_CUT}"):
                return end
        return list(prompt)

    def _is_byte(self, token: int) -> bool:
        return _BYTE.fullmatch(self._tokenizer.convert_ids_to_tokens(token) or "") is not None

    def _decode(self, start: int) -> str:
        return self._text_of(self._ids[start:])

    def _text_of(self, ids: list[int]) -> str:
        with panics_named(CorruptStoreError, "the model's tokenizer cannot turn tokens into text"):
            text: str = self._tokenizer.decode(ids, skip_special_tokens=not self._special)
        return text

    def _take(self, text: str) -> str:
        # Of a prompt that ends within a character, the tokens may complete it.
        given = self._given if text.startswith(self._given) else self._given.rstrip(_CUT)
        piece, self._given = text[len(given) :], text
        before, self._taken = self._taken, len(self._ids)
        if piece.endswith("\n") or before - self._start > _LONG:
            # Decoding may begin at this piece, which ends with a whole token of text. Its own tokens are kept as
            # context.
            line = self._decode(before)
            if line:
                self._start, self._given = before, line
        return piece


def continuation(tokenizer: Any, prompt: Sequence[int], tokens: Sequence[int], special: bool = False) -> str:
    """The text that tokens add to a prompt. `special`: with special tokens."""
    stream = TextStream(tokenizer, prompt, special)
    return "".join([*map(stream.push, tokens), stream.flush()])


class StoppedText:
    """As TextStream, but the text ends before the first stop text.

    Special tokens, which are not shown, are compared too: a stop text may be one, or a part of one and what is beside
    it. Text that may be the beginning of a stop text is held back until it is clear that it is not. The main node ends
    a request by this class too, so that the answer's tokens and text end together.
    """

    def __init__(
        self, tokenizer: Any, stop: tuple[str, ...], prompt: Sequence[int] = (), shown: frozenset[int] = frozenset()
    ) -> None:
        """`shown`: special tokens that are part of the text."""
        self._tokenizer = tokenizer
        self._stream = TextStream(tokenizer, prompt, bool(shown))
        self._left_out = frozenset(tokenizer.all_special_ids) - shown if shown else frozenset()
        self._stop = stop
        self._waiting = ""
        self._hidden: list[tuple[int, str]] = []
        """Special tokens: (place in `_waiting`, text)."""
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that is now certain to belong to the answer."""
        piece = "" if token in self._left_out else self._stream.push(token)
        hidden = self._hidden_text(token) if self._stop and not piece else ""
        if hidden:
            self._hidden.append((len(self._waiting) + len(self._stream.held_back), hidden))
        return self._take(piece, last=False)

    def _hidden_text(self, token: int) -> str:
        """Of a special token. Empty for others."""
        texts = [self._tokenizer.decode([token], skip_special_tokens=skip) for skip in (False, True)]
        return "" if texts[1] else texts[0]

    def flush(self) -> str:
        """What is left at the end."""
        return self._take(self._stream.flush(), last=True)

    def _take(self, piece: str, last: bool) -> str:
        if self.stopped:
            return ""
        text = self._waiting + piece
        held = self._stream.held_back if self._stop else ""
        for seen in (text, text + held) if held else (text,):
            whole, places = self._with_hidden(seen)
            ends = [at for at in (whole.find(stop) for stop in self._stop) if at >= 0]
            if ends:
                self.stopped, self._waiting = True, ""
                return seen[: places[min(ends)]]
        whole, places = self._with_hidden(text)
        certain = len(whole) - (0 if last else self._unclear(whole))
        cut = places[certain]
        self._drop_hidden(certain, cut)
        self._waiting = text[cut:]
        return text[:cut]

    def _with_hidden(self, seen: str) -> tuple[str, Sequence[int]]:
        """A text with its special tokens, and for each place in that the one in `seen`."""
        if not self._hidden:
            return seen, range(len(seen) + 1)
        whole, places, at = "", [], 0
        for place, text in self._hidden:
            if place <= len(seen):
                whole += seen[at:place] + text
                places += [*range(at, place), *[place] * len(text)]
                at = place
        return whole + seen[at:], [*places, *range(at, len(seen) + 1)]

    def _drop_hidden(self, certain: int, cut: int) -> None:
        """Those before `certain`, a place in the text with them. `cut`: the same place without."""
        kept, before = [], 0
        for place, text in self._hidden:
            before += len(text)
            if place + before > certain:
                kept.append((max(place - cut, 0), text))
        self._hidden = kept

    def _unclear(self, text: str) -> int:
        """The number of characters at the end that may begin a stop text."""
        found = 0
        for stop in self._stop:
            most = min(len(stop) - 1, len(text))
            found = max(found, next((n for n in range(most, found, -1) if text.endswith(stop[:n])), 0))
        return found


class KeptTokenizer:
    """The tokenizer in a folder, which is read now: the folder may be gone when it is needed."""

    def __init__(self, folder: Path) -> None:
        self._found: Any = None
        self._failure: ODMoEError | None = None
        try:
            self._found = load_tokenizer(folder)
        except ODMoEError as error:  # a model without one answers token ids
            self._failure = error

    def __call__(self) -> Any:
        """Raises what reading it has raised."""
        if self._failure is not None:
            raise self._failure
        return self._found


def make_stopper(
    folder: Path, read: Callable[[], Any] | None = None
) -> Callable[[tuple[str, ...], Sequence[int]], Callable[[int], bool]]:
    """(stop texts, prompt) -> a function that takes an answer's tokens in order and is True once it has reached one of
    them. `read`: gives the tokenizer in `folder`; None: it is read now."""
    tokenizer = read or KeptTokenizer(folder)

    def stopper(stop: tuple[str, ...], prompt: Sequence[int]) -> Callable[[int], bool]:
        text = StoppedText(tokenizer(), stop, prompt)

        def push(token: int) -> bool:
            text.push(token)
            return text.stopped

        return push

    return stopper


def end_token(read: Callable[[], Any]) -> int | None:
    """The end of a text as the tokenizer has it that `read` gives. None: it has none, or there is no tokenizer, which
    only prompts of text need."""
    try:
        found: int | None = read().eos_token_id
    except ODMoEError:
        return None
    return found
