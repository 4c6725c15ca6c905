"""Log-probabilities of answers and prompts are those of Transformers' own logits."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

from main_node.answer import Step
from main_node.choosing import prompt_scores
from main_node.logprobs import TokenLogprobs
from main_node.sampling import Sampling
from odmoe.clusters.embedded import EmbeddedCluster
from scheduler.errors import ConfigError, NonFiniteError, RequestCancelledError
from support.cases import slow_except
from support.nodes.engine_world import Later
from support.shadows.scripted_drafts import ScriptedDrafts

COUNT = 12
TOP = 5


def steps_of(cluster: EmbeddedCluster, prompts: list[list[int]], **how: Any) -> list[list[Step]]:
    """The steps of these answers, computed at once, without the closing ones."""
    runs = [cluster.generate(prompt, COUNT, ignore_eos=True, **how) for prompt in prompts]
    return [one.result()[:-1] for one in [Later(lambda run=run: list(run)) for run in runs]]


def told(logits: torch.Tensor, token: int, top: int = TOP) -> TokenLogprobs:
    """By torch, from logits [V]."""
    every = logits.float().log_softmax(-1)
    best = every.topk(top)
    return TokenLogprobs(
        token, float(every[token]), tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    )


def check_close(found: TokenLogprobs, wanted: TokenLogprobs) -> None:
    assert found.token_id == wanted.token_id
    assert found.logprob == pytest.approx(wanted.logprob, abs=1e-4)
    assert [value for _, value in found.top] == pytest.approx([value for _, value in wanted.top], abs=1e-4)
    others = dict(wanted.top)
    assert all(others[token] == pytest.approx(value, abs=1e-4) for token, value in found.top if token in others)


@pytest.fixture(scope="module")
def prompt_logprobs(whole: Any) -> Callable[[list[int]], list[TokenLogprobs]]:
    """Of a prompt's tokens but the first, from the whole model's logits of all of them."""

    def of(prompt: list[int]) -> list[TokenLogprobs]:
        with torch.inference_mode():
            logits = whole(torch.tensor([prompt])).logits[0]
        return [told(row, token) for row, token in zip(logits, prompt[1:], strict=False)]

    return of


@pytest.mark.parametrize(("count", "drafts"), slow_except([(3, True)], product((1, 3), (False, True))))
def test_of_an_answers_tokens(count: int, drafts: bool, cluster: EmbeddedCluster, reference: Any) -> None:
    """To the last bit, alone or beside others, and in blocks."""
    expected = [reference("float32", number, COUNT) for number in range(count)]
    if drafts:
        cluster.main.drafting = ScriptedDrafts({tuple(one.prompt): one.tokens for one in expected})
    for steps, one in zip(steps_of(cluster, [one.prompt for one in expected], logprobs=TOP), expected, strict=True):
        wanted = [told(logits, token) for logits, token in zip(one.logits, one.tokens, strict=True)]
        assert [step.logprobs for step in steps] == wanted
        assert [step.token_id for step in steps] == one.tokens
        assert {step.prompt_logprobs for step in steps} == {None}


def test_they_are_the_models_own_whatever_is_drawn(cluster: EmbeddedCluster, reference: Any) -> None:
    """Before temperature, top-k, penalties and biases. Asking for them changes no draw."""
    one, logits = reference("float32", 0, COUNT), list[torch.Tensor]()
    sampling = Sampling(temperature=1.7, top_k=20, frequency_penalty=1.0, logit_bias=((40, 3.0),), seed=5)
    cluster.main.on_logits = lambda number, row: logits.append(row)
    (steps,) = steps_of(cluster, [one.prompt], sampling=sampling, logprobs=0)
    (plain,) = steps_of(cluster, [one.prompt], sampling=sampling)
    assert [step.token_id for step in steps] == [step.token_id for step in plain]
    assert {step.logprobs for step in plain} == {None}
    assert [step.logprobs for step in steps] == [
        told(row, step.token_id, 0)
        for step, row in zip(steps, logits[:COUNT], strict=True)
        if step.token_id is not None
    ]


@pytest.mark.parametrize("rows", [7, 1 << 20])
def test_of_a_prompts_tokens(
    rows: int, cluster: EmbeddedCluster, reference: Any, prompt_logprobs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the first step; the answer's tokens and logits stay what they are without, bit for bit."""
    monkeypatch.setattr(cluster.main._output_layer, "rows", rows)
    one, logits = reference("float32", 0, COUNT), list[torch.Tensor]()
    cluster.main.on_logits = lambda number, row: logits.append(row)
    (steps,) = steps_of(cluster, [one.prompt], prompt_logprobs=TOP)
    assert [step.token_id for step in steps] == one.tokens
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(logits, one.logits, strict=True))
    first, *others = [step.prompt_logprobs for step in steps]
    assert first is not None
    assert first[0] is None
    assert set(others) == {None}
    for found, wanted in zip(first[1:], prompt_logprobs(one.prompt), strict=True):
        check_close(found, wanted)
    assert {step.logprobs for step in steps} == {None}
    assert pickle.loads(pickle.dumps(steps)) == steps


@pytest.mark.slow
def test_in_batched_steps(made: Callable[..., EmbeddedCluster], reference: Any, prompt_logprobs: Any) -> None:
    """Requests share products, so that the last bit may differ."""
    expected = [reference("float32", number, COUNT) for number in range(3)]
    got = steps_of(made(batch_dense=True), [one.prompt for one in expected], logprobs=TOP, prompt_logprobs=TOP)
    for steps, one in zip(got, expected, strict=True):
        assert [step.token_id for step in steps] == one.tokens
        for step, logits in zip(steps, one.logits, strict=True):
            check_close(step.logprobs, told(logits, step.token_id))
        for found, wanted in zip(steps[0].prompt_logprobs[1:], prompt_logprobs(one.prompt), strict=True):
            check_close(found, wanted)


@pytest.mark.slow
def test_of_a_prompt_that_is_read_in_chunks(
    made: Callable[..., EmbeddedCluster], reference: Any, prompt_logprobs: Any
) -> None:
    """As it is while another answer is open."""
    cluster, one = made(prefill_chunk=16), reference("float32", 0, COUNT)
    with cluster.generate([5, 6], COUNT) as other:
        next(other)
        *steps, last = cluster.generate(one.prompt, 4, logprobs=TOP, prompt_logprobs=TOP)
    assert last.report.prefill_passes == -(-len(one.prompt) // 16)
    check_close(steps[0].logprobs, told(one.logits[0], one.tokens[0]))
    for found, wanted in zip(steps[0].prompt_logprobs[1:], prompt_logprobs(one.prompt), strict=True):
        check_close(found, wanted)


def test_a_prompt_of_one_token_and_an_answer_of_one(cluster: EmbeddedCluster) -> None:
    (step, closing_step) = cluster.generate([7], 1, logprobs=1, prompt_logprobs=3)
    assert step.prompt_logprobs == (None,)
    assert step.finish == "length"
    assert step.logprobs is not None
    assert step.logprobs.top[0] == (step.token_id, step.logprobs.logprob)
    assert closing_step.report is not None


def test_the_most_there_can_be(cluster: EmbeddedCluster) -> None:
    (step, _) = cluster.generate([7], 1, logprobs=2048)
    assert step.logprobs is not None
    assert sorted(token for token, _ in step.logprobs.top) == list(range(2048))
    assert sum(torch.tensor([value for _, value in step.logprobs.top]).exp().tolist()) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("how", [{"logprobs": -1}, {"logprobs": 2049}, {"prompt_logprobs": 9999}], ids=str)
def test_what_is_refused(how: dict[str, Any], cluster: EmbeddedCluster) -> None:
    ((name, value),) = how.items()
    with pytest.raises(ConfigError, match=f"{name} is {value}; allowed: 0 to 2048"):
        cluster.generate([5, 6], 4, **how)


def test_a_prompts_logits_that_are_no_numbers(
    cluster: EmbeddedCluster, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = cluster.main._output_layer.logits

    def broken(states: torch.Tensor) -> torch.Tensor:
        found = logits(states)
        found[4] = torch.nan
        return found

    monkeypatch.setattr(cluster.main._output_layer, "logits", broken)
    with pytest.raises(NonFiniteError, match="logits of the prompt's token 6 are not finite"):
        list(cluster.generate(reference("float32", 0, 4).prompt, 4, prompt_logprobs=0))


def test_an_answer_is_given_up_while_its_prompt_is_scored(
    cluster: EmbeddedCluster, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No logits are computed after that, and the cluster goes on."""
    output, made, wanted = cluster.main._output_layer, list[int](), reference("float32", 0, COUNT)
    logits = output.logits
    answer = cluster.generate(wanted.prompt, COUNT, prompt_logprobs=0)

    def cancelling(states: torch.Tensor) -> torch.Tensor:
        made.append(states.shape[1])
        if len(made) == 2:
            canceller = threading.Thread(target=answer.cancel)
            canceller.start()
            canceller.join(10)
        return logits(states)

    monkeypatch.setattr(output, "rows", 8)
    monkeypatch.setattr(output, "logits", cancelling)
    with pytest.raises(RequestCancelledError):
        list(answer)
    assert made == [8, 8]
    (steps,) = steps_of(cluster, [wanted.prompt])
    assert [step.token_id for step in steps] == wanted.tokens


def test_no_more_logits_are_there_at_once_than_said() -> None:
    """Whatever the prompt's length: rows of a vocabulary of 150,000 tokens."""

    class Model(torch.nn.Module):
        device = torch.device("cpu")

        def __init__(self) -> None:
            super().__init__()
            self.base_model = torch.nn.Identity()

        def get_input_embeddings(self) -> Any:
            return torch.nn.Embedding(150_000, 1)

    rows = prompt_scores.OutputLayer(Model(), lambda: None).rows
    assert rows * 150_000 * 4 <= prompt_scores.LOGITS_BYTES < (rows + 1) * 150_000 * 4
