"""Which drafts follow the answer: by hand, and against a search through all that were offered."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scheduler.drafts.path import START, extend
from scheduler.drafts.table import DraftTable


def path(*tokens: int) -> int:
    return extend(START, tokens)


def table(*tokens: int) -> DraftTable:
    made = DraftTable()
    made.on_decoded(tokens)
    return made


def test_drafts_follow_each_other_in_any_order_of_their_coming():
    of = table(5)
    of.offer(2, 7, path(5, 6))
    assert of.following() == ()
    of.offer(1, 6, path(5))
    assert of.following() == (6, 7)


def test_a_draft_of_another_answer_is_not_one_of_this():
    of = table(5)
    of.offer(1, 6, path(4))
    assert of.following() == ()
    of.offer(1, 6, path(5))
    of.offer(2, 7, path(5, 8))
    assert of.following() == (6,)


def test_a_draft_may_come_before_the_token_that_it_follows():
    of = table(5)
    of.offer(1, 6, path(5))
    of.offer(2, 7, path(5, 6))
    assert of.on_decoded([6]) is True
    assert of.following() == (7,)


def test_drafts_after_a_wrong_one_are_of_no_use():
    of = table(5)
    of.offer(1, 6, path(5))
    of.offer(2, 7, path(5, 6))
    assert of.on_decoded([9]) is False
    assert of.following() == ()
    of.offer(2, 3, path(5, 9))
    assert of.following() == (3,)


def test_a_draft_replaces_the_one_before_it():
    of = table(5)
    of.offer(1, 6, path(5))
    of.offer(1, 7, path(5))
    assert of.following() == (7,)


def test_only_the_last_token_of_several_is_compared():
    of = table(5)
    of.offer(1, 6, path(5))
    of.offer(2, 7, path(5, 6))
    assert of.on_decoded([6, 7]) is True
    assert of.on_decoded([8]) is None


def test_a_draft_of_a_token_that_exists_is_dropped():
    of = table(5, 6)
    of.offer(1, 6, path(5))
    assert of.on_decoded([7]) is None
    assert of.following() == ()


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=6)


@given(TOKENS, st.lists(st.tuples(TOKENS, st.integers(0, 1), st.integers(1, 5)), max_size=30))
def test_what_follows_is_the_longest_chain_of_the_newest_drafts(answer, events):
    """Tokens of a tiny vocabulary, so that many drafts are of the answer, offered between its tokens."""
    of, offered, count = table(answer[0]), {}, 1
    for before, token, advance in events:
        of.offer(len(before), token, path(*before))
        if len(before) >= count:
            offered[len(before)] = tuple(before), token
        if advance == 1 and count < len(answer):
            right = of.on_decoded([answer[count]])
            known, draft = offered.get(count, (None, None))
            assert right == (draft == answer[count] if known == tuple(answer[:count]) else None)
            count += 1
        chain = tuple(answer[:count])
        while offered.get(len(chain), (None, None))[0] == chain:
            chain += (offered[len(chain)][1],)
        assert of.following() == chain[count:]
