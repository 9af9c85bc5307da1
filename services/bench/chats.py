"""Chats for `outrigger verify --turns`: what a client holds, and scripts of what it does with it, in token ids.

A chat template is imitated at the level of ids: a turn is a role's name, its text and the token that ends a turn, so
that turns can be cut at any length. A script is a generator: it yields one Step after the other and is sent the answer
of each. Knows no host. Used by services.bench.verify_turns.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from common.limits import UBATCH_TOKENS

Ids = NDArray[np.int32]
Text = Callable[[int], Ids]
"""text(n): the next n token ids of natural text; never the same twice."""
Roles = dict[str, Ids]

REASONING_TOKENS = 24
"""So many tokens at the start of an answer count as reasoning."""


@dataclass(frozen=True)
class Step:
    """One request. waits: give the host time to make the answer canonical before the next one."""

    prompt: Ids
    n_answer: int = 12
    waits: bool = True


Script = Generator[Step, tuple[int, ...], None]


@dataclass
class Chat:
    """The turns a client holds. `drops_reasoning`: its template leaves reasoning out of all but the newest answer."""

    text: Text
    roles: Roles
    end_id: int
    drops_reasoning: bool = False
    turns: list[tuple[str, Ids]] = field(default_factory=list)

    def say(self, role: str, n_tokens: int) -> Chat:
        """Add a turn of natural text."""
        self.turns.append((role, self.text(n_tokens)))
        return self

    def answered(self, token_ids: tuple[int, ...]) -> Chat:
        """Add the host's answer."""
        self.turns.append(("assistant", np.array(token_ids, np.int32)))
        return self

    def say_up_to(self, n_prompt: int) -> Chat:
        """Add a user's turn that makes the prompt exactly n_prompt tokens long."""
        self.say("user", 1)
        self.turns[-1] = ("user", self.text(1 + n_prompt - len(self.prompt())))
        return self

    def prompt(self) -> Ids:
        """The whole chat as the template writes it, and the assistant's name."""
        newest = len(self.turns) - 1
        pieces: list[Ids] = []
        for index, (role, ids) in enumerate(self.turns):
            if role == "assistant" and self.drops_reasoning and index + 1 < newest:
                ids = ids[REASONING_TOKENS:]
            pieces += [self.roles[role], ids, np.array([self.end_id], np.int32)]
        return np.concatenate([*pieces, self.roles["assistant"]])


def scripts(text: Text, roles: Roles, end_id: int) -> dict[str, Script]:
    """The courses a chat may take, by name."""

    def chat(*, drops_reasoning: bool = False) -> Chat:
        return Chat(text, roles, end_id, drops_reasoning=drops_reasoning).say("system", 40)

    return {
        "regenerate": regenerate(chat()),
        "edit": edit(chat()),
        "tool_loop": tool_loop(chat()),
        "dropped_reasoning": dropped_reasoning(chat(drops_reasoning=True)),
        "odd_cuts": odd_cuts(chat()),
    }


def regenerate(chat: Chat) -> Script:
    """The same prompt again, at once and after a while, in the first turn and in the second."""
    for n_user in (700, 90):
        chat.say("user", n_user)
        yield Step(chat.prompt(), waits=False)
        yield Step(chat.prompt())
        chat.answered((yield Step(chat.prompt(), n_answer=40)))


def edit(chat: Chat) -> Script:
    """Three turns; then the second one is written anew, then the first, each with less after it."""
    for n_user in (300, 420, 130):
        chat.say("user", n_user)
        chat.answered((yield Step(chat.prompt())))
    for n_turns_left, n_user in ((3, 350), (1, 290)):
        del chat.turns[n_turns_left:]
        chat.say("user", n_user)
        chat.answered((yield Step(chat.prompt())))


def tool_loop(chat: Chat) -> Script:
    """One question, then call after call, most of them answered before the host had an idle moment."""
    chat.say("user", 560)
    for index, n_result in enumerate((30, 190, 5, 610)):
        chat.answered((yield Step(chat.prompt(), n_answer=20, waits=index == 1)))
        chat.say("tool", n_result)
    yield Step(chat.prompt())


def dropped_reasoning(chat: Chat) -> Script:
    """Each new turn takes the reasoning out of the answer before the last one."""
    for n_user in (480, 60, 330, 45):
        chat.say("user", n_user)
        chat.answered((yield Step(chat.prompt(), n_answer=2 * REASONING_TOKENS)))


def odd_cuts(chat: Chat) -> Script:
    """Prompts that end just before, at and after a grid point, and answers that cross one."""
    for n_ubatches, over, n_answer in ((2, 1, 8), (3, 0, 8), (4, -1, 260), (6, 2, 4)):
        chat.say_up_to(n_ubatches * UBATCH_TOKENS + over)
        chat.answered((yield Step(chat.prompt(), n_answer=n_answer)))
