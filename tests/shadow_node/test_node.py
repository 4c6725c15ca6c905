"""The shadow node on the demo model: when it may depart, what an alignment changes, and what it says of a wrong one."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from checkpoint.tensors import tensor_bytes
from scheduler.errors import LinkError, ODMoEError
from shadow_node.model import ShadowModel
from shadow_node.node import Shadow
from wire import inprocess
from wire.base import Channel
from wire.messages import (
    PROTOCOL_VERSION,
    Align,
    AskUsage,
    CloseRequest,
    Failed,
    Hello,
    Load,
    Message,
    OpenRequest,
    Prediction,
    ShadowReady,
    ShadowUsage,
    Tensor,
)

pytestmark = pytest.mark.timeout(60)

WAIT_S = 20.0
LAYERS = list(range(8))
PROMPT_TOKENS = 12
STEPS = 9
FENCE = 1 << 20  # numbers of the requests that only show that earlier work is done
ROW_ELEMENTS = 8 * 2 * 2 * 32  # layers, keys and values, heads, D


@dataclass
class Answer:
    """What the main model makes of a prompt: its tokens, and keys and values of all layers, [1, heads, T, D] each."""

    prompt: tuple[int, ...]
    tokens: list[int]
    kv: list[torch.Tensor]

    def rows(self, start: int, stop: int) -> tuple[Tensor, ...]:
        return tuple(Tensor(*tensor_bytes(t[:, :, start:stop])) for t in self.kv)


@pytest.fixture(scope="module")
def answers(demo: Any, gsm8k: list[str]) -> list[Answer]:
    """Two short prompts, answered by Transformers in float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo)
    model = AutoModelForCausalLM.from_pretrained(demo, dtype="float32", experts_implementation="eager")
    made = []
    for text in gsm8k[:2]:
        ids = torch.tensor([tokenizer(text)["input_ids"][:PROMPT_TOKENS]])
        with torch.inference_mode():
            out = model.generate(
                ids, max_new_tokens=STEPS + 1, do_sample=False, eos_token_id=None, pad_token_id=1,
                return_dict_in_generate=True,
            )  # fmt: skip
        kv = [t for layer in out.past_key_values.layers for t in (layer.keys, layer.values)]
        made.append(Answer(tuple(ids[0].tolist()), out.sequences[0, PROMPT_TOKENS:].tolist(), kv))
    return made


@pytest.fixture(scope="module")
def model_of(demo_store: Callable[[str], Any]) -> Callable[[str], ShadowModel]:
    made: dict[str, ShadowModel] = {}

    def model(scheme: str) -> ShadowModel:
        if scheme not in made:
            made[scheme] = ShadowModel(demo_store("float32"), scheme)
        return made[scheme]

    return model


class Main:
    """The main node's end: keeps what it is told, sends alignments, and knows when the shadow has nothing to do."""

    def __init__(self, shadow: Shadow) -> None:
        self.shadow = shadow
        self.got: list[Message] = []
        self.on_prediction: Callable[[Prediction], None] = lambda message: None
        self._changed = threading.Condition()
        self._fences = FENCE
        self._requests: dict[int, tuple[OpenRequest, Answer]] = {}
        self.channel: Channel = inprocess.connect(shadow, self)

    def on_message(self, message: Message) -> None:
        with self._changed:
            self.got.append(message)
            self._changed.notify_all()
        if isinstance(message, Prediction):
            self.on_prediction(message)

    def on_close(self, error: ODMoEError | None) -> None:
        pass

    def hello(self, **changes: Any) -> None:
        fields = {"version": PROTOCOL_VERSION, "fingerprint": "abc", "dtype": "float32", "node": "main"}
        self.channel.send(Hello(**(fields | changes)))

    def of(self, kind: type) -> list[Any]:
        with self._changed:
            return [m for m in self.got if isinstance(m, kind)]

    def wait(self, ready: Callable[[], object], what: str) -> None:
        with self._changed:
            assert self._changed.wait_for(ready, WAIT_S), f"{what} did not come within {WAIT_S:g} s: {self.got[-3:]}"

    def open(
        self, number: int, answer: Answer, token: int = 1, kv: int = 1, first: int = 0, new: int = STEPS,
        lookahead: int = 2,
    ) -> None:  # fmt: skip
        prompt = (*answer.prompt, *answer.tokens[:first])
        message = OpenRequest(number, prompt, first, new, token, kv, lookahead)
        self._requests[number] = (message, answer)
        self.channel.send(message)

    def align(self, number: int, step: int, kv_from: int | None = None, parts: int = 1, **changes: Any) -> None:
        """What the engine would send before that pass: token and rows where due, here all rows since `kv_from`."""
        opened, answer = self._requests[number]
        token = answer.tokens[step] if opened.align_token and step % opened.align_token == 0 else None
        stop = len(answer.prompt) + step
        if not opened.align_kv or step % opened.align_kv:
            self.channel.send(Align(number, step, changes.get("token", token), stop, ()))
            return
        start = kv_from if kv_from is not None else (stop - opened.align_kv if step else 0)
        cuts = [start + (stop - start) * i // parts for i in range(parts + 1)]
        for a, b in itertools.pairwise(cuts):
            self.channel.send(Align(number, step, changes.get("token", token), a, answer.rows(a, b), b < stop))

    def _fence(self) -> int:
        """A request of one pass that waits for nothing: when it was predicted, all that was sent before was begun."""
        self._fences += 1
        number = self._fences
        self.channel.send(OpenRequest(number, (3,), 0, 2, 0, 0, 1))
        self.wait(lambda: sum(isinstance(m, Prediction) and m.request == number for m in self.got) == 8, "a fence")
        self.channel.send(CloseRequest(number))
        return sum(isinstance(m, Prediction) and m.request < FENCE for m in self.of(Prediction))

    def settle(self) -> None:
        """Until the shadow waits for us: between two fences a request that may go on would have run a pass."""
        before = -1
        while before != (before := self._fence()):
            pass

    def passes(self, number: int) -> list[int]:
        """Decode passes predicted so far, in order; each of them whole, every layer once, at the right position."""
        self.settle()
        answer = self._requests[number][1]
        found = [m for m in self.of(Prediction) if m.request == number]
        positions = [m.position for m in found[::8]]
        assert [m.position for m in found] == [p for p in positions for _ in LAYERS]
        assert [m.layer for m in found] == LAYERS * len(positions)
        assert all(len(set(m.experts)) == 2 and len(m.scores) == 2 for m in found)
        assert len(set(positions)) == len(positions)
        return [p - len(answer.prompt) for p in positions]

    def routes(self, number: int, step: int) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
        """(experts, scores) of every layer in one pass."""
        position = len(self._requests[number][1].prompt) + step
        return [(m.experts, m.scores) for m in self.of(Prediction) if (m.request, m.position) == (number, position)]

    def cache(self, number: int) -> list[torch.Tensor]:
        """The shadow's own keys and values."""
        session = self.shadow.sessions._served
        assert session is not None
        return [t for layer in session._requests[number].cache.layers for t in (layer.keys, layer.values)]


@pytest.fixture
def shadow_of(model_of: Callable[[str], ShadowModel]) -> Iterator[Callable[..., Shadow]]:
    made: list[Shadow] = []

    def build(scheme: str = "fp16") -> Shadow:
        made.append(Shadow("shadow", model_of(scheme), "abc", "float32"))
        return made[-1]

    yield build
    for shadow in made:
        shadow.close()


@pytest.fixture
def main_of(shadow_of: Callable[..., Shadow]) -> Callable[..., Main]:
    def build(scheme: str = "fp16") -> Main:
        main = Main(shadow_of(scheme))
        main.hello()
        assert isinstance(main.got[0], ShadowReady)
        return main

    return build


def routes_of(model: ShadowModel, tokens: list[int], cache: Any) -> tuple[int, list[Any]]:
    """The next token, and what the model itself routes for the last of `tokens`."""
    found: list[Any] = []
    model.routed = lambda layer, experts, scores: found.append((tuple(experts), tuple(scores)))
    try:
        return model.forward(tokens, cache), found
    finally:
        model.routed = None


both = pytest.mark.parametrize("scheme", ["fp16", "nf4"])

# --- the handshake ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"version": 9}, "protocol version"), ({"fingerprint": "xyz"}, "fingerprint"), ({"dtype": "float16"}, "dtype")],
)
def test_refuses_what_does_not_belong(changes: dict[str, Any], named: str, shadow_of: Any) -> None:
    main = Main(shadow_of())
    main.hello(**changes)
    (failure,) = main.got
    assert isinstance(failure, Failed)
    assert failure.error == ("VersionError" if "version" in changes else "ModelMismatchError")
    assert named in failure.message


def test_out_of_turn_is_named_and_forgiven(shadow_of: Any, answers: list[Answer]) -> None:
    main = Main(shadow_of())
    main.open(1, answers[0])
    main.hello()
    main.channel.send(Load(1, 0, 0, 0))
    kinds = [type(m) for m in main.got]
    assert kinds == [Failed, ShadowReady, Failed]
    assert [f.error for f in main.of(Failed)] == ["ProtocolError"] * 2
    ready = main.got[1]
    model = main.shadow.model
    assert isinstance(ready, ShadowReady)
    assert (ready.scheme, ready.device_bytes) == ("fp16", model.device_bytes)


@pytest.mark.parametrize(("prompt", "first"), [((), 0), ((5, 6), 2), ((5, 6), 3)])
def test_a_request_without_a_prompt_is_refused(prompt: tuple[int, ...], first: int, main_of: Any) -> None:
    main = main_of()
    main.channel.send(OpenRequest(1, prompt, first, 4, 1, 1, 2))
    assert [f.error for f in main.of(Failed)] == ["ProtocolError"]
    main.settle()


# --- departures -------------------------------------------------------------------------------------------------


@both
def test_periods_of_one_wait_for_every_alignment(scheme: str, main_of: Any, answers: list[Answer]) -> None:
    main = main_of(scheme)
    main.open(1, answers[0], new=5)
    assert main.passes(1) == []
    for step in range(4):
        main.align(1, step)
        assert main.passes(1) == list(range(step + 1))
    main.align(1, 4)  # there is no fifth pass: the last token is not read
    assert main.passes(1) == [0, 1, 2, 3]
    assert main.of(Failed) == []


@pytest.mark.parametrize("lookahead", [0, 1, 2, 3])
def test_never_aligned_runs_ahead_by_lookahead(lookahead: int, main_of: Any, answers: list[Answer]) -> None:
    main = main_of()
    main.open(1, answers[0], token=0, kv=0, new=7, lookahead=lookahead)
    assert main.passes(1) == list(range(lookahead))  # before the first: as if pass -1 had been announced
    for step in range(8):
        main.align(1, step)
        assert main.passes(1) == list(range(min(6, step + 1 + lookahead)))


def test_a_period_of_four_waits_at_every_fourth(main_of: Any, answers: list[Answer]) -> None:
    main = main_of()
    main.open(1, answers[0], token=4, kv=4, lookahead=9)
    assert main.passes(1) == []
    main.align(1, 0)
    assert main.passes(1) == [0, 1, 2, 3]
    for step in (1, 2, 3):
        main.align(1, step)
    assert main.passes(1) == [0, 1, 2, 3]
    main.align(1, 4)
    assert main.passes(1) == list(range(8))
    assert main.of(Failed) == []


def test_lookahead_bounds_passes_between_alignments(main_of: Any, answers: list[Answer]) -> None:
    main = main_of()
    main.open(1, answers[0], token=4, kv=0, lookahead=2)
    main.align(1, 0)
    assert main.passes(1) == [0, 1, 2]
    main.align(1, 1)
    assert main.passes(1) == [0, 1, 2, 3]


def test_token_and_kv_periods_are_their_own(main_of: Any, answers: list[Answer]) -> None:
    """Token every 2, KV every 3: it waits at 0, 2, 3, 4, 6, 8 and nowhere else."""
    main = main_of()
    main.open(1, answers[0], token=2, kv=3, lookahead=9, new=STEPS + 1)
    seen = []
    for step in range(STEPS):
        main.align(1, step)
        seen.append(main.passes(1)[-1])
    assert seen == [1, 1, 2, 3, 5, 5, 7, 7, 8]
    assert main.of(Failed) == []


def test_a_single_token_answer_is_never_predicted(main_of: Any, answers: list[Answer]) -> None:
    main = main_of()
    main.open(1, answers[0], token=0, kv=0, new=1, lookahead=5)
    assert main.passes(1) == []


# --- what an alignment changes ----------------------------------------------------------------------------------


@both
def test_an_aligned_pass_reads_the_main_models_token(scheme: str, main_of: Any, answers: list[Answer]) -> None:
    main = main_of(scheme)
    model, cache = main.shadow.model, main.shadow.model.new_cache()
    own, _ = routes_of(model, list(answers[0].prompt), cache)
    other = (own + 7) % 2048
    _, expected = routes_of(model, [other], cache)
    main.open(1, answers[0], token=1, kv=0)
    main.align(1, 0, token=other)
    assert main.passes(1) == [0]
    assert main.routes(1, 0) == expected


def test_an_unaligned_pass_reads_the_shadows_own_token(main_of: Any, answers: list[Answer]) -> None:
    """Token never, KV every pass: the main model's rows, the shadow's token."""
    main = main_of("nf4")
    model, cache = main.shadow.model, main.shadow.model.new_cache()
    own, _ = routes_of(model, list(answers[0].prompt), cache)
    for layer, (keys, values) in zip(cache.layers, pairs(answers[0].kv), strict=True):
        layer.keys = keys[:, :, :PROMPT_TOKENS].to(layer.keys.dtype)
        layer.values = values[:, :, :PROMPT_TOKENS].to(layer.values.dtype)
    _, expected = routes_of(model, [own], cache)
    main.open(1, answers[0], token=0, kv=1)
    main.align(1, 0)
    assert main.passes(1) == [0]
    assert main.routes(1, 0) == expected


def pairs(kv: list[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(kv[::2], kv[1::2], strict=True))


@both
@pytest.mark.parametrize("parts", [1, 3])
def test_aligned_rows_are_the_main_models(scheme: str, parts: int, main_of: Any, answers: list[Answer]) -> None:
    main = main_of(scheme)
    main.open(1, answers[0], token=2, kv=2, lookahead=9)
    for step in (0, 2, 4):
        main.align(1, step, parts=parts)
        main.align(1, step + 1)
        assert main.passes(1)[-1] == step + 1
        end = PROMPT_TOKENS + step
        for held, told in zip(main.cache(1), answers[0].kv, strict=True):
            assert torch.equal(held[:, :, :end], told[:, :, :end].to(held.dtype))
            assert held.shape[2] == end + 2
    assert main.of(Failed) == []


def test_without_kv_alignment_the_rows_stay_its_own(main_of: Any, answers: list[Answer]) -> None:
    main = main_of("nf4")
    main.open(1, answers[0], token=1, kv=0)
    for step in range(3):
        main.align(1, step)
    assert main.passes(1) == [0, 1, 2]
    assert not any(
        torch.equal(held, told[:, :, : PROMPT_TOKENS + 3].to(held.dtype))
        for held, told in zip(main.cache(1), answers[0].kv, strict=True)
    )


@both
def test_parts_do_not_depart_before_the_last(scheme: str, main_of: Any, answers: list[Answer]) -> None:
    main = main_of(scheme)
    main.open(1, answers[0])
    rows, token = answers[0].rows, answers[0].tokens[0]
    main.channel.send(Align(1, 0, token, 0, rows(0, 5), more=True))
    main.channel.send(Align(1, 0, token, 5, rows(5, 6), more=True))
    assert main.passes(1) == []
    main.channel.send(Align(1, 0, token, 6, rows(6, PROMPT_TOKENS)))
    assert main.passes(1) == [0]


@both
def test_a_late_join_predicts_as_if_it_had_followed(scheme: str, main_of: Any, answers: list[Answer]) -> None:
    main = main_of(scheme)
    main.open(1, answers[0])
    for step in range(6):
        main.align(1, step)
    main.open(2, answers[0], first=3)
    assert main.passes(2) == []
    main.align(2, 3, kv_from=0)
    for step in (4, 5):
        main.align(2, step)
    assert main.passes(1) == [0, 1, 2, 3, 4, 5]
    assert main.passes(2) == [3, 4, 5]
    for step in (3, 4, 5):
        assert main.routes(2, step) == main.routes(1, step)


def test_a_late_join_between_alignments_goes_on_at_once(main_of: Any, answers: list[Answer]) -> None:
    main = main_of()
    main.open(1, answers[0], token=4, kv=4, first=5, lookahead=2)
    assert main.passes(1) == []
    main.align(1, 5)
    assert main.passes(1) == [5, 6, 7]


@both
def test_two_requests_do_not_disturb_each_other(scheme: str, main_of: Any, answers: list[Answer]) -> None:
    main = main_of(scheme)
    for alone in (1, 2):
        main.open(alone, answers[alone - 1])
        for step in range(4):
            main.align(alone, step)
        assert main.passes(alone) == [0, 1, 2, 3]
    main.open(3, answers[0])
    main.open(4, answers[1])
    for step in range(4):
        main.align(4, step)
        main.align(3, step)
    for number in (3, 4):
        assert main.passes(number) == [0, 1, 2, 3]
        assert [main.routes(number, s) for s in range(4)] == [main.routes(number - 2, s) for s in range(4)]


def test_one_that_runs_ahead_lets_others_in(main_of: Any, answers: list[Answer]) -> None:
    """A request that waits for nothing has one pass a turn."""
    main = main_of()
    main.open(1, answers[0], token=0, kv=0, new=500, lookahead=500)
    main.open(2, answers[1], token=0, kv=0, new=4, lookahead=3)
    main.wait(lambda: sum(isinstance(m, Prediction) and m.request == 2 for m in main.got) == 24, "the second")
    main.channel.send(CloseRequest(1))
    assert sum(m.request == 1 for m in main.of(Prediction)) < 8 * 20


# --- closing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [0, 2, 7])
def test_closing_within_a_pass_ends_it(layer: int, main_of: Any, answers: list[Answer]) -> None:
    main = main_of()

    def close(message: Prediction) -> None:
        if (message.request, message.layer) == (1, layer):
            main.channel.send(CloseRequest(1))

    main.on_prediction = close
    main.open(1, answers[0], token=0, kv=0)
    main.settle()
    assert [m.layer for m in main.of(Prediction) if m.request == 1] == list(range(layer + 1))
    main.align(1, 0)  # on its way when the request was closed
    main.open(2, answers[1])
    main.align(2, 0)
    assert main.passes(2) == [0]
    assert main.of(Failed) == []


def test_a_new_stream_takes_over(shadow_of: Any, answers: list[Answer]) -> None:
    shadow = shadow_of()
    first, second = Main(shadow), Main(shadow)
    second.hello()
    second.open(1, answers[0])
    second.align(1, 0)
    assert second.passes(1) == [0]
    assert first.got == []
    third = Main(shadow)
    third.hello()
    assert [m.error for m in second.of(Failed)] == ["LinkError"]


def test_an_error_that_cannot_be_told_does_not_end_the_thread(shadow_of: Any, answers: list[Answer]) -> None:
    """The thread of the passes outlives a report that fails."""
    told, predicted = threading.Event(), threading.Event()

    class Reply:
        def send(self, message: Message) -> None:
            if isinstance(message, Failed):
                told.set()
                raise LinkError("the queue is full")
            if isinstance(message, Prediction) and message.layer == 7:
                predicted.set()

        def close(self) -> None: ...

    session = shadow_of().accept(Reply())
    session.on_message(Hello(PROTOCOL_VERSION, "abc", "float32", "main"))
    session.on_message(OpenRequest(1, (99_999,), 0, 4, 0, 0, 2))
    assert told.wait(WAIT_S)
    session.on_message(OpenRequest(2, answers[0].prompt, 0, 4, 0, 0, 2))
    assert predicted.wait(WAIT_S)


# --- wrong alignments -------------------------------------------------------------------------------------------


def wrong_alignments(answer: Answer) -> dict[str, list[Align]]:
    rows, token, end = answer.rows, answer.tokens[0], PROMPT_TOKENS

    def all_rows(change: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Tensor, ...]:
        return tuple(Tensor(*tensor_bytes(change(t[:, :, :end]))) for t in answer.kv)

    whole = rows(0, end)
    torn = Tensor(whole[-1].dtype, whole[-1].shape, bytes(whole[-1].data)[:-4])
    return {
        "a layer short": [Align(1, 0, token, 0, whole[:-2])],
        "a tensor too many": [Align(1, 0, token, 0, (*whole, whole[0]))],
        "one head": [Align(1, 0, token, 0, all_rows(lambda t: t[:, :1]))],
        "half the dimension": [Align(1, 0, token, 0, all_rows(lambda t: t[..., :16]))],
        "no batch": [Align(1, 0, token, 0, all_rows(lambda t: t[0]))],
        "one row short": [Align(1, 0, token, 0, rows(0, end - 1))],
        "past the cache": [Align(1, 0, token, 0, rows(0, end + 1))],
        "beyond the cache": [Align(1, 0, token, end + 4, rows(0, 1))],
        "last part first": [Align(1, 0, token, 5, rows(5, end), more=True), Align(1, 0, token, 0, rows(0, 5))],
        "a hole": [Align(1, 0, token, 0, rows(0, 5), more=True), Align(1, 0, token, 7, rows(7, end))],
        "last tensor shorter": [Align(1, 0, token, 0, (*whole[:-1], rows(0, end - 1)[-1]))],
        "torn bytes": [Align(1, 0, token, 0, (*whole[:-1], torn))],
        "unknown dtype": [Align(1, 0, token, 0, tuple(Tensor("complex64", t.shape, t.data) for t in whole))],
        "token of another model": [Align(1, 0, 99_999, 0, whole)],
    }


WRONG = [
    "a layer short", "a tensor too many", "one head", "half the dimension", "no batch", "one row short",
    "past the cache", "beyond the cache", "last part first", "a hole", "last tensor shorter", "torn bytes",
    "unknown dtype", "token of another model",
]  # fmt: skip
BY_TRANSPORT = {"torn bytes", "unknown dtype", "token of another model"}  # the codec refuses the first two


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_alignment_is_named(name: str, main_of: Any, answers: list[Answer]) -> None:
    main = main_of()
    main.open(1, answers[0])
    for message in wrong_alignments(answers[0])[name]:
        main.channel.send(message)
    main.wait(lambda: any(isinstance(m, Failed) for m in main.got), "a refusal")
    main.settle()
    (failure,) = main.of(Failed)
    assert failure.message.startswith("shadow: ")
    assert failure.error == "ProtocolError" or name in BY_TRANSPORT
    assert not [m for m in main.of(Prediction) if m.request == 1]
    main.open(2, answers[1])  # and the thread lives
    main.align(2, 0)
    assert main.passes(2) == [0]


def test_an_alignment_for_nobody_is_passed_over(main_of: Any, answers: list[Answer]) -> None:
    main = main_of()
    main.channel.send(Align(77, 0, 5, 0, answers[0].rows(0, 4)))
    main.channel.send(CloseRequest(78))
    main.settle()
    assert main.of(Failed) == []


# --- usage ------------------------------------------------------------------------------------------------------


def test_usage_is_measured(main_of: Any, answers: list[Answer]) -> None:
    """Weights and the caches of all open requests: the most at once."""
    main = main_of()

    def held() -> int:
        main.channel.send(AskUsage())
        return main.of(ShadowUsage)[-1].device_bytes_max - main.shadow.model.device_bytes

    assert held() == 0
    main.open(1, answers[0])
    main.align(1, 0)
    assert main.passes(1) == [0]
    row = ROW_ELEMENTS * main.cache(1)[0].element_size()
    one = held()
    assert one == row * (PROMPT_TOKENS + 1 + 2)  # the fence has two
    main.align(1, 1)
    assert main.passes(1) == [0, 1]
    assert held() == one + row
    main.open(2, answers[1])
    main.align(2, 0)
    assert main.passes(2) == [0]
    before = held()
    assert before == row * (2 * PROMPT_TOKENS + 3 + 2)
    main.channel.send(CloseRequest(1))
    main.settle()
    assert held() == before
