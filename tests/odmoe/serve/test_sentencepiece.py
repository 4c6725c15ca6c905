"""Models whose tokenizers leave out a text's first space, as those of Llama and Mixtral do; answers keep theirs."""

from __future__ import annotations

import itertools
import string
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from main_node.sampling import GREEDY, Sampling
from odmoe.api.model import Model, OpenedModel
from support.machines.http_service import demo_model

if TYPE_CHECKING:
    from openai import OpenAI

NAME = "demo-moe"
CUT = "\N{REPLACEMENT CHARACTER}"
"""What an incomplete character is decoded to."""
SPECIAL = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
CONSONANTS = "bcdfghjklmnprstvwz"
TOKENS = 5
PROMPTS = ["a", "Zoë said: 😀", "line\n", " spaces  "]


def pieces() -> Iterator[str]:
    """Words with and without a space before them, and letters."""
    yield from ["▁", "\n", *string.ascii_letters, *string.punctuation, *string.digits, "é", "你"]
    for word in map("".join, itertools.product(CONSONANTS, "aeiou", CONSONANTS)):
        yield f"▁{word}"
        yield word


def finished(made: Tokenizer) -> Any:
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def llama(size: int) -> Any:
    """As Llama 2 and Mixtral: bytes for what is not in the vocabulary."""
    vocabulary = list(itertools.islice(itertools.chain(SPECIAL, BYTES, pieces()), size))
    scored = [(piece, 0.0 if piece in SPECIAL else -10.0 / len(piece)) for piece in vocabulary]
    made = Tokenizer(models.Unigram(scored, unk_id=0, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return finished(made)


def metaspace(size: int) -> Any:
    """As T5 and XLNet."""
    vocabulary = list(itertools.islice(itertools.chain(SPECIAL, pieces()), size))
    scored = [(piece, 0.0 if piece in SPECIAL else -10.0 / len(piece)) for piece in vocabulary]
    made = Tokenizer(models.Unigram(scored, unk_id=0))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return finished(made)


@pytest.fixture(scope="module")
def demo(demo_store: Callable[[str], Any]) -> Iterator[Model]:
    with demo_model(demo_store("float32")) as made:
        yield made


@pytest.fixture(scope="module", params=[llama, metaspace])
def model(request: pytest.FixtureRequest, demo: Model) -> Model:
    """The demo model with another tokenizer, of as many tokens."""
    opened = demo.opened
    tokenizer = request.param(len(opened.tokenizer))
    assert len(tokenizer) == len(opened.tokenizer)
    return Model(OpenedModel(opened.settings, opened.store, tokenizer, opened.context), demo.cluster)


@pytest.fixture
def unlikely(model: Model) -> dict[int, float]:
    """The biases that keep single bytes out of an answer: most are no text."""
    known = model.opened.tokenizer.get_vocab()
    return {known[byte]: -100.0 for byte in BYTES if byte in known}


def whole(model: Model, prompt: list[int], count: int, bias: dict[int, float]) -> tuple[list[int], list[int]]:
    """Prompt and answer, and the answer alone."""
    sampling = Sampling(logit_bias=tuple(bias.items()))
    *_, last = model.cluster.generate(prompt, count, sampling=sampling, ignore_eos=True)
    assert last.report is not None
    return prompt + last.report.token_ids, last.report.token_ids


@pytest.mark.slow
@pytest.mark.parametrize("prompt", PROMPTS)
def test_prompt_and_answer_are_the_text_of_both(
    client: OpenAI, model: Model, unlikely: dict[int, float], prompt: str
) -> None:
    tokenizer = model.opened.tokenizer
    ids = tokenizer(prompt)["input_ids"]
    both, answer = whole(model, ids, TOKENS, unlikely)
    before, text = (tokenizer.decode(part, skip_special_tokens=True) for part in (ids, both))
    assert text.startswith(before)
    asked: Any = {"model": NAME, "max_tokens": TOKENS, "logprobs": 0, "extra_body": {"ignore_eos": True}}
    asked["logit_bias"] = {str(token): bias for token, bias in unlikely.items()}
    plain = client.completions.create(prompt=prompt, **asked).choices[0]
    assert before + plain.text == text
    streamed = list(client.completions.create(prompt=prompt, stream=True, **asked))
    assert "".join(event.choices[0].text for event in streamed) == plain.text
    echoed = client.completions.create(prompt=ids, echo=True, **asked).choices[0]
    assert echoed.text == text
    for choice, tokens in ((plain, answer), (echoed, both)):
        found = choice.logprobs
        assert found is not None
        assert found.text_offset is not None
        assert len(found.text_offset) == len(tokens)
        rest = both[: len(both) - len(tokens)]
        start = len(tokenizer.decode(rest, skip_special_tokens=True))
        assert found.text_offset == [
            len(tokenizer.decode(rest + tokens[:count], skip_special_tokens=True).rstrip(CUT)) - start
            for count in range(len(tokens))
        ]
    offsets = [at for event in streamed if event.choices[0].logprobs for at in event.choices[0].logprobs.text_offset]
    assert offsets == plain.logprobs.text_offset


def test_an_answers_first_space(client: OpenAI, model: Model) -> None:
    """Its first token's, which the tokenizer leaves out where it decodes it alone."""
    tokenizer = model.opened.tokenizer
    word = tokenizer.convert_tokens_to_ids("▁bab")
    assert tokenizer.decode([word]) == "bab"
    asked: Any = {"model": NAME, "max_tokens": 2, "logit_bias": {str(word): 100}, "logprobs": 0}
    choice = client.completions.create(prompt="bab", **asked).choices[0]
    assert choice.text == " bab bab"
    assert choice.logprobs.tokens == [" bab", " bab"]
    assert choice.logprobs.text_offset == [0, 4]
    choice = client.completions.create(prompt=[1], **asked).choices[0]
    assert choice.text == "bab bab"
    assert choice.logprobs.text_offset == [0, 3]
    with model.answer(tokenizer("bab")["input_ids"], 2, {"sampling": GREEDY}) as answer:
        found = [(piece.text, piece.step.token_id) for piece in answer]
    assert "".join(text for text, _ in found) == tokenizer.decode(
        [*tokenizer("bab")["input_ids"], *(token for _, token in found)], skip_special_tokens=True
    ).removeprefix("bab")
