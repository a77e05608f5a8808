r"""The boundary proof over rendered texts.

Guarantees: what follows a captured turn is read off a rendering in which a mark stands where the
turn ends, so literal control tokens in any message cannot move the cut; the text between the mark
and the next observation must be the one that a probe with both ends marked shows. Everything that
is not exactly so raises `NotProvable`, which makes the call a root.

The pieces, for a turn that ends with a tool call (`^` is the mark, `$` the observation's):

    ...{"name": "f", "arguments": {"^": ""}}</tool_call><|im_end|>\n<|im_start|>user\n$...
                                     \____ syntax _____/\________ closing __________/
                                     \_____________________ joint __________________/
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from forest_schema.reasons import Reason

_LOOK_BACK = 8
"""Generated tokens at the end of a turn among which the closing token is looked for."""


class NotProvable(ValueError):
    """The renderings do not prove where the turn ends. `reason` has the effect `root`."""

    def __init__(self, message: str, reason: Reason = Reason.BOUNDARY_NOT_PROVABLE) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Joint:
    """Template text between the end of a turn's own words and the next observation's content."""

    syntax: str
    """Rest of the tool call's syntax, which the model generated itself; empty without calls."""
    closing: str
    """What the template closes the turn with, and the head of the next message."""


@dataclass(frozen=True, slots=True)
class Tail:
    """Text that follows the captured tokens."""

    text: str
    anchor: str
    """The captured closing token in front of `text`, empty where the text stands by itself. It is
    tokenized along, because it may take part in how the text is split, and dropped again."""


def _position(rendered: str, mark: str) -> int:
    found = rendered.find(mark)
    if found < 0 or rendered.find(mark, found + 1) >= 0:
        raise NotProvable("the template drops or repeats what a turn ends with")
    return found


def joint_between(rendered: str, mark: str, observation_mark: str) -> str:
    """Text between the two marks of a probe rendering. Raises `NotProvable`."""
    start = _position(rendered, mark) + len(mark)
    end = _position(rendered, observation_mark)
    if end < start:
        raise NotProvable("the template moves an observation in front of the turn")
    return rendered[start:end]


def split_joint(joint: str, content_joint: str | None, end_texts: Collection[str]) -> Joint:
    """Separate a tool call's syntax from what closes the turn. Raises `NotProvable`.

    `content_joint` is the joint of the same turn without its tool calls, None where the template
    refuses that; `end_texts` are the texts of the tokens that end a generation.
    """
    if content_joint and joint.endswith(content_joint):
        return Joint(joint[: len(joint) - len(content_joint)], content_joint)
    ends = [(joint.find(text), joint.count(text)) for text in end_texts if text in joint]
    if len(ends) == 1 and ends[0][1] == 1:
        return Joint(joint[: ends[0][0]], joint[ends[0][0] :])
    raise NotProvable("nothing tells the end of a tool call from the end of the turn")


def tail_after_mark(rendered: str, mark: str, joint: Joint) -> str:
    """What the template renders after the marked turn, closing first. Raises `NotProvable`."""
    rest = rendered[_position(rendered, mark) + len(mark) :]
    if not rest.startswith(joint.syntax + joint.closing):
        raise NotProvable("the turn is closed differently than in the probe")
    return rest[len(joint.syntax) :]


def tail_for_generation(
    tail: str,
    closing: str,
    generated: Sequence[int],
    *,
    added_tokens: Mapping[str, int],
    end_ids: Collection[int],
    decode: Callable[[Sequence[int]], str],
    stopped_on_string: bool,
) -> Tail:
    """The tail without what the model generated of the closing itself.

    `added_tokens` maps the text of the tokenizer's added tokens to their ids, `end_ids` are the
    ids that end a generation. A generation that stopped before its closing gets all of it, as
    context. Raises `NotProvable` where a plain-text closing may have been generated in part.
    """
    token, at = _first_added(closing, added_tokens)
    if token is None:
        if stopped_on_string:
            raise NotProvable("a plain-text closing may already be part of the generation")
        return Tail(tail, "")
    recent = list(generated[-_LOOK_BACK:])
    token_id = added_tokens[token]
    if token_id not in recent:
        return Tail(tail, "")
    behind = recent[len(recent) - recent[::-1].index(token_id) :]
    while behind and behind[-1] in end_ids:
        behind.pop()
    rest = tail[at + len(token) :]
    if not behind:
        return Tail(rest, token)
    generated_text = decode(behind)
    if rest.startswith(generated_text):
        return Tail(rest[len(generated_text) :], "")
    return Tail(tail, "")


def _first_added(closing: str, added_tokens: Mapping[str, int]) -> tuple[str | None, int]:
    """The added token that comes first in `closing` (the longest there), and its position."""
    best: str | None = None
    best_at = len(closing)
    for token in added_tokens:
        at = closing.find(token) if token else -1
        if at >= 0 and (at < best_at or (at == best_at and len(token) > len(best or ""))):
            best, best_at = token, at
    return best, best_at
