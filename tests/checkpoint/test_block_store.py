"""The store of blocks beside a plain dictionary that obeys the same rules, slowly."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from checkpoint.block_store import BlockStore, key_of

BOUND = 30


@dataclass(frozen=True)
class Piece:
    nbytes: int


@dataclass
class Plain:
    """What a store must hold: by path of tokens, size, users, and when it was used last."""

    sizes: dict[tuple[int, ...], int] = field(default_factory=dict)
    users: dict[tuple[int, ...], int] = field(default_factory=dict)
    used: dict[tuple[int, ...], int] = field(default_factory=dict)
    now: int = 0

    def put(self, path: tuple[int, ...], size: int) -> bool:
        if path not in self.sizes:
            free = [one for one in sorted(self.sizes, key=self.used.__getitem__) if not self.users.get(one)]
            gone: list[tuple[int, ...]] = []
            while sum(self.sizes.values()) - sum(self.sizes[one] for one in gone) + size > BOUND:
                if not free:
                    return False
                gone.append(free.pop(0))
            for one in gone:
                del self.sizes[one]
            self.sizes[path] = size
            self.touch(path)
        self.users[path] = self.users.get(path, 0) + 1
        return True

    def touch(self, path: tuple[int, ...]) -> None:
        self.now += 1
        self.used[path] = self.now


prompts = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 12)), min_size=1, max_size=5)
"""Tokens of a prompt's blocks, one each, and the sizes that the blocks get where they are new."""
acts = st.lists(st.tuples(st.booleans(), prompts, st.integers(0, 3)), max_size=25)
"""Read a prompt, or end the reading of an earlier one."""


@given(acts)
def test_it_holds_what_a_dictionary_with_the_same_rules_holds(acts: list) -> None:
    store, plain = BlockStore[Piece](BOUND), Plain()
    keys: dict[tuple[int, ...], bytes] = {(): b"root"}
    open_chains: list[list[tuple[int, ...]]] = []
    for reads, prompt, which in acts:
        if not reads and open_chains:
            chain = open_chains.pop(which % len(open_chains))
            store.release([keys[path] for path in chain])
            for path in reversed(chain):
                plain.users[path] -= 1
                plain.touch(path)
        elif reads:
            chain = []
            for end in range(1, len(prompt) + 1):
                path = tuple(token for token, _ in prompt[:end])
                keys[path] = key_of(keys[path[:-1]], path[-1:])
                found = store.use(keys[path])
                assert (found is not None) is (path in plain.sizes)
                if found is not None:
                    assert found.nbytes == plain.sizes[path]
                    plain.users[path] = plain.users.get(path, 0) + 1
                else:
                    kept = store.put(keys[path], Piece(prompt[end - 1][1]))
                    assert kept is plain.put(path, prompt[end - 1][1])
                    if not kept:
                        break
                chain.append(path)
            open_chains.append(chain)
        assert {path for path in keys if path and keys[path] in store} == set(plain.sizes)
        assert store.nbytes == sum(plain.sizes.values()) <= BOUND
        assert all(path in plain.sizes for chain in open_chains for path in chain), "a block in use was evicted"
        for path in plain.sizes:
            assert path[:-1] in plain.sizes or len(path) == 1, "no prompt finds it any more"


def test_a_key_tells_every_token_and_every_block_before() -> None:
    chains = [([1, 2], [3]), ([1], [2, 3]), ([2, 1], [3]), ([1, 2, 3], []), ([256], [3]), ([1, 2], [3, 0])]
    assert len({key_of(key_of(b"", first), second) for first, second in chains}) == len(chains)
