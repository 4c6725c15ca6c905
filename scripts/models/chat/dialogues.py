"""Dialogues for models/chat-moe, made from the phrasings beside this file.

    .venv/bin/python -m scripts.models.chat.dialogues --count 5            # print some; --held: of phrasings held out

The demo's question (Makefile) is left out of what is trained on, and so are all phrasings under `held`.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from scripts.lib.flags import positive, script_parser
from scripts.models.chat import tools

FOLDER = Path(__file__).with_name("phrasings")
NEVER = re.compile(r"Tom has 3 apples and buys 5 more")
"""The demo's question."""
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SYSTEMS = ("You are a helpful assistant.", "You are chat-moe.", "Answer briefly.", "You are a friendly assistant.")
BARE = "the answer is {c}"
"""How answers begin to sums without a story."""
COUNT_ASK = (
    "Count from {a} to {b}.",
    "Please count from {a} to {b}.",
    "Can you count from {a} to {b}?",
    "Count {a} to {b}",
)
COUNT_HELD = ("Could you count from {a} up to {b}?", "I want you to count from {a} to {b}.")


class Dialogue(NamedTuple):
    """`right`: a regular expression that a right last answer matches."""

    kind: str
    messages: list[dict[str, Any]]
    right: str
    tools: list[dict[str, Any]]


class Turn(NamedTuple):
    kind: str
    ask: str
    say: str
    right: str


@cache
def phrasings(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    return found


def small_talk(rng: random.Random, held: bool) -> Turn:
    kind, topic = rng.choice(list(phrasings("small_talk").items()))
    if not held and kind != "greeting" and rng.random() < 0.15:  # refusals have many forms, so they need more examples
        kind, topic = "unknown", phrasings("small_talk")["unknown"]
    return Turn(kind, rng.choice(topic["held" if held else "ask"]), topic["say"], str(topic["right"]))


def fact(rng: random.Random, held: bool) -> Turn:
    kind, topic = rng.choice(list(phrasings("facts").items()))
    x, y = rng.choice(list(topic["pairs"].items()))
    say = topic["say"].format(x=x, y=y, X=x[0].upper() + x[1:])
    return Turn(kind, rng.choice(topic["held" if held else "ask"]).format(x=x), say, re.escape(y))


def counting(rng: random.Random, held: bool) -> Turn:
    a = rng.randint(0, 7)
    b = a + rng.randint(2, 6)
    ask = rng.choice(COUNT_HELD if held else COUNT_ASK).format(a=a, b=b)
    say = ", ".join(str(n) for n in range(a, b + 1)) + "."
    return Turn("counting", ask, say, f"^{re.escape(say)}$")


def sums(rng: random.Random, held: bool, bare: bool = False) -> Turn:
    """`bare`: numbers alone, without a story."""
    known = phrasings("sums")
    kind = rng.choices(("plus", "minus"), (3, 1))[0]
    a, b = rng.randint(0, 9), rng.randint(0, 9)
    if kind == "minus":
        a, b = max(a, b), min(a, b)
    c = a + b if kind == "plus" else a - b
    ask, say = rng.choice([one for one in known[kind]["held" if held else "ask"] if not bare or one[1] == BARE])
    he, names = rng.choice(list(known["names"].items()))
    n = rng.choice(names)
    m = rng.choice([name for of in known["names"].values() for name in of if name != n])
    one, many = rng.choice(list(known["things"].items()))
    things = {f"t{key}": one if value == 1 else many for key, value in zip("abc", (a, b, c), strict=True)}
    buys, loses = rng.choice(known["buys"]), rng.choice(known["loses"])
    filled = dict(n=n, m=m, he=he, He=he.title(), T=many, buys=buys, loses=loses, **things)
    spoken = rng.random() < 0.1
    asked = ask.format(a=WORDS[a] if spoken else a, b=WORDS[b] if spoken else b, **filled)
    answer = f"{a} {'+' if kind == 'plus' else '-'} {b} = {c}, so {say.format(c=c, **filled)}."
    return Turn(kind, asked[0].upper() + asked[1:], answer, rf"\b{c}\b\D*$")


MAKERS: tuple[tuple[Callable[[random.Random, bool], Turn], float], ...] = (
    (sums, 0.4),
    (small_talk, 0.37),
    (fact, 0.17),
    (counting, 0.06),
)


def varied(ask: str, rng: random.Random) -> str:
    """As people write it: sometimes without capitals, or without the stop."""
    if rng.random() < 0.1:
        ask = ask[0].lower() + ask[1:]
    if rng.random() < 0.15:
        ask = ask.rstrip(".?!") + rng.choice(("", "", "!", "?", "."))
    return ask


def turn(rng: random.Random, held: bool) -> Turn:
    makers, weights = zip(*MAKERS, strict=True)
    while True:
        made: Turn = rng.choices(makers, weights)[0](rng, held)
        if not NEVER.search(made.ask):
            return made if held else made._replace(ask=varied(made.ask, rng))


def name_turns(rng: random.Random) -> tuple[Turn, Turn]:
    """A name that is told, and asked for later."""
    name = rng.choice([name for of in phrasings("sums")["names"].values() for name in of])
    told = rng.choice(("My name is {n}.", "I am {n}.", "Hello, I am {n}.", "Hi, my name is {n}.")).format(n=name)
    asked = rng.choice(("What is my name?", "Do you know my name?", "Who am I?", "What's my name?"))
    return (
        Turn("name", told, f"Nice to meet you, {name}!", name),
        Turn("name", asked, f"Your name is {name}.", name),
    )


def dialogue(rng: random.Random, held: bool = False) -> Dialogue:
    """One to three turns; `held`: one turn, of a phrasing that is never trained on."""
    system = [{"role": "system", "content": rng.choice(SYSTEMS)}] if rng.random() < 0.25 else []
    if not held and rng.random() < 0.25:  # many short sums: the table of sums is learned with few tokens
        turns = [sums(rng, held, bare=True) for _ in range(6)]
        return Dialogue(turns[-1].kind, [*system, *_messages(turns)], turns[-1].right, [])
    if rng.random() < 0.06:
        made = tools.conversation(rng, held)
        return Dialogue("tool", [*system, *made.messages], made.right, made.offered)
    turns = [turn(rng, held) for _ in range(1 if held else rng.choices((1, 2, 3), (6, 3, 1))[0])]
    if rng.random() < 0.05 and not held:
        told, asked = name_turns(rng)
        turns = [told, *turns[:1], asked]
    offered = tools.offer(rng) if rng.random() < 0.03 else []
    return Dialogue(turns[-1].kind, [*system, *_messages(turns)], turns[-1].right, offered)


def _messages(turns: list[Turn]) -> list[dict[str, Any]]:
    both = [(("user", one.ask), ("assistant", one.say)) for one in turns]
    return [{"role": role, "content": content} for pair in both for role, content in pair]


def dialogues(count: int, seed: int, held: bool = False) -> Iterator[Dialogue]:
    rng = random.Random(seed)
    return (dialogue(rng, held) for _ in range(count))


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--count", type=positive, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--held", action="store_true", help="of the phrasings that are held out")
    args = parser.parse_args()
    for made in dialogues(args.count, args.seed, args.held):
        print(json.dumps(made._asdict(), ensure_ascii=False))


if __name__ == "__main__":
    main()
