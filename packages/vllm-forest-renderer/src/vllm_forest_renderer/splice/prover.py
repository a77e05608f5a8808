"""The boundary proof: which renderings it asks for, and what is remembered.

Guarantees: the tail is read off a rendering of the real messages in which only the end of the
captured turn carries a mark. How a turn of one shape ends is proven by a probe the first time
(and checked against the unmarked rendering), and again whenever a rendering disagrees with what is
remembered. One rendering per call is the usual cost. A proof renders nothing itself, so that it
runs wherever its renderings do.
"""

from collections.abc import Awaitable, Callable, Collection, Generator, Mapping, Sequence
from typing import TypeVar

from forest_schema.reasons import Reason

from vllm_forest_renderer.splice.boundary import (
    Joint,
    NotProvable,
    Tail,
    joint_between,
    split_joint,
    tail_after_mark,
    tail_for_generation,
)
from vllm_forest_renderer.splice.marks import (
    Message,
    TurnShape,
    mark_turn,
    new_mark,
    replace_observation,
    turn_shape,
    with_empty_content,
)

_T = TypeVar("_T")

Proof = Generator[Sequence[Message], str, _T]
"""Yields messages, is sent the template's text for them (generation prompt included) or thrown
what rendering them raised, and returns what it proves. Raises `NotProvable`."""

_MAX_REMEMBERED = 4096


class TailProver:
    """Finds what follows a captured turn, for one tokenizer and template."""

    def __init__(
        self,
        *,
        added_tokens: Mapping[str, int],
        end_ids: Collection[int],
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        """`added_tokens`: text -> id of the tokenizer's added tokens; `end_ids`: ids that end a
        generation; `decode`: text of ids, special tokens kept.
        """
        self._added = dict(added_tokens)
        self._end_ids = frozenset(end_ids)
        self._end_texts = frozenset(
            text for text, token in self._added.items() if token in self._end_ids
        )
        self._decode = decode
        self._joints: dict[tuple[str, TurnShape], Joint] = {}
        self._equivalent: dict[str, bool] = {}

    def prove(
        self,
        messages: Sequence[Message],
        count: int,
        *,
        generated: Sequence[int],
        options: str,
        used_null_empty_equivalence: bool = False,
        stop_token_ids: Collection[int] = (),
        stopped_on_string: bool = False,
    ) -> Proof[Tail]:
        """What the template puts behind the captured turn `messages[count - 1]`.

        `generated` are the turn's captured tokens, `options` the digest of the render options.
        Raises `NotProvable`.
        """
        if used_null_empty_equivalence:
            yield from self._qualify_equivalence(messages, options)
        mark = new_mark()
        marked = yield mark_turn(messages, count, mark)
        key = (options, turn_shape(messages, count))
        joint = self._joints.get(key)
        tail = None
        if joint is not None:
            try:
                tail = tail_after_mark(marked, mark, joint)
            except NotProvable:
                joint = None
        if joint is None or tail is None:
            joint = yield from self._probe(messages, count)
            tail = tail_after_mark(marked, mark, joint)
            if not (yield messages).endswith(tail):
                raise NotProvable("the end of the turn changes what the template renders after it")
            if len(self._joints) >= _MAX_REMEMBERED:
                self._joints.clear()
            self._joints[key] = joint
        return tail_for_generation(
            tail,
            joint.closing,
            generated,
            added_tokens=self._added,
            end_ids=self._end_ids | frozenset(stop_token_ids),
            decode=self._decode,
            stopped_on_string=stopped_on_string,
        )

    def tail_tokens(self, tail: Tail, tokens: Sequence[int]) -> list[int]:
        """The tail's own tokens out of the tokens of `tail.anchor + tail.text`.

        Raises `NotProvable` where they do not spell the tail.
        """
        if not tail.anchor:
            first = next(iter(tokens), None)
            stands_alone = first in self._added.values()
            if not stands_alone and self._decode(tokens) != tail.text:
                raise NotProvable("the tokens of the tail do not spell the tail")
            return list(tokens)
        if not tokens or tokens[0] != self._added[tail.anchor]:
            raise NotProvable("the closing token is not tokenized as the captured one")
        return list(tokens[1:])

    def _probe(self, messages: Sequence[Message], count: int) -> Proof[Joint]:
        mark, seen = new_mark(), new_mark()
        observed = replace_observation(messages, count, seen)
        joint = joint_between((yield mark_turn(observed, count, mark)), mark, seen)
        if not messages[count - 1].get("tool_calls"):
            return Joint("", joint)
        try:
            content = yield mark_turn(observed, count, mark, drop_calls=True)
            content_joint = joint_between(content, mark, seen)
        except Exception:
            # A template may refuse a tool's output without the call; other evidence is tried.
            content_joint = None
        return split_joint(joint, content_joint, self._end_texts)

    def _qualify_equivalence(self, messages: Sequence[Message], options: str) -> Proof[None]:
        if options not in self._equivalent:
            null = yield with_empty_content(messages, None)
            empty = yield with_empty_content(messages, "")
            if len(self._equivalent) >= _MAX_REMEMBERED:
                self._equivalent.clear()
            self._equivalent[options] = null == empty
        if not self._equivalent[options]:
            raise NotProvable(
                "the template renders null and empty content differently",
                Reason.RENDERER_NOT_QUALIFIED,
            )


async def answered_async(
    proof: Proof[_T], render: Callable[[Sequence[Message]], Awaitable[str]]
) -> _T:
    """What a proof returns when `render` gives its renderings. Raises what the proof raises."""
    try:
        asked = next(proof)
        while True:
            try:
                text = await render(asked)
            except Exception as error:
                asked = proof.throw(error)
            else:
                asked = proof.send(text)
    except StopIteration as done:
        proven: _T = done.value
        return proven


def answered(proof: Proof[_T], render: Callable[[Sequence[Message]], str]) -> _T:
    """`answered_async` with renderings that are not waited for; needs no event loop."""

    async def rendered(asked: Sequence[Message]) -> str:
        return render(asked)

    try:
        answered_async(proof, rendered).send(None)
    except StopIteration as done:
        proven: _T = done.value
        return proven
    raise AssertionError("nothing in a proof waits but its renderings")
