"""The one parser of answers: a description (formats.py) tells it what to look for.

What lives here: reasoning first, then content with calls between; or messages with headers that say which is which.
What may not: values themselves (values.py), names of model families.

Text that begins like a call and is none is content, all of it. Of a call that breaks off after its name and the
beginning of its arguments have been given out, the rest is content and the call stays incomplete, which its arguments
show: the brace that makes them JSON is given out only when the call is whole. What an answer that was cut off had begun
of a marker or of a call's head is nothing.
"""

from __future__ import annotations

import re
import secrets
import string
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING

from headrace.server.parsing.arguments import Types, read_tagged, read_up_to
from headrace.server.parsing.cursor import Cursor, Ended, Malformed, Reads, Wait
from headrace.server.parsing.formats import Channels, ReasoningFormat, Style, ToolFormat
from headrace.server.parsing.segments import Content, Reasoning, Segment, ToolCallArguments, ToolCallStart
from headrace.server.parsing.texts import CustomText
from headrace.server.parsing.values import Give, read_keywords, read_text, read_value, read_word

if TYPE_CHECKING:
    from headrace.server.parsing import AnswerFormat

_TRIMMED = 16  # characters of white space before a marker that are dropped
_TRAILING = re.compile(r"[ \t\r\n]+\Z")
_NAMES = ("name", "tool_name")
_ARGUMENTS = ("arguments", "parameters")
_ASIDE = ("id", "type", "tool_call_id")  # what some models add to a call
_NAME = re.compile(r"[\w.:/-]")  # letters of a name that nothing but what follows it ends
_NO_TYPES: Types = {}
_LETTERS = string.ascii_letters + string.digits


class _Markers:
    """Texts that are looked for in running text."""

    __slots__ = ("_longest", "_part", "_whole", "wanted")

    def __init__(self, texts: Iterable[str]) -> None:
        found = sorted({text for text in texts if text}, key=len, reverse=True)
        self._whole = re.compile("|".join(map(re.escape, found)) or "(?!)")
        self._part = re.compile(f"(?:{'|'.join(map(_beginnings, found)) or '(?!)'})\\Z")
        self._longest = max(map(len, found), default=0)
        self.wanted = bool(found)

    def find(self, text: str, begin: int) -> re.Match[str] | None:
        return self._whole.search(text, begin)

    def held(self, text: str, begin: int) -> int:
        """Characters at the end that may be the beginning of one."""
        found = self._part.search(text, max(begin, len(text) - self._longest + 1))
        return 0 if found is None else len(text) - found.start()


def _beginnings(text: str) -> str:
    """A regular expression for what ``text`` may begin with, but not for all of it."""
    letters = [re.escape(letter) for letter in text[:-1]] or ["(?!)"]
    return "(?:".join(letters) + ")?" * (len(letters) - 1)


class OutputParser:
    """One answer's text in pieces, in; segments out. How the text is cut into pieces changes nothing but how segments
    are cut.

    Only a format without a marker must name a function that was offered to be taken for a call, or any with
    ``form.only``.
    """

    def __init__(self, form: AnswerFormat) -> None:
        tools, reasoning = form.tools, form.reasoning
        self._form = form
        self._channels = next(
            (each.channels for each in (reasoning, tools) if each is not None and each.channels is not None), None
        )
        self._known_only = (
            form.only or (tools is not None and tools.bare) or (self._channels is not None and self._channels.known)
        )
        self._cursor = Cursor()
        self._out: list[Segment] = []
        self._ids: set[str] = set()
        self._call = _Call()
        self._count = 0  # of calls that were begun
        self._complete = 0
        self._cut = False  # the text ended inside of a call
        self._cut_off = False  # it was not the model that ended it
        self._steps: Wait | None = self._run()

    def push(self, text: str) -> list[Segment]:
        """What can be said after more text. Never raises."""
        if self._steps is not None:
            self._cursor.push(text)
            self._advance()
        return self._taken()

    def finish(self, reason: str = "stop") -> list[Segment]:
        """What was held back, once the text has ended; ``reason`` is the engine's. Where it is length, half a marker is
        no text."""
        if self._steps is not None:
            self._cursor.ended, self._cut_off = True, reason == "length"
            self._advance()
        self._begin_text()
        return self._taken()

    def end_reason(self, reason: str) -> str:
        """The finish_reason to report, after ``finish()``, where the engine reports ``reason``.

        ``tool_calls`` where the model stopped and its calls are complete; ``length`` where the text ends inside of a
        call.
        """
        if reason != "stop" or self._form.text_of:
            return "tool_calls" if reason == "stop" else reason
        if self._cut:
            return "length"
        return "tool_calls" if self._complete and self._complete == self._count else "stop"

    def _advance(self) -> None:
        assert self._steps is not None
        try:
            next(self._steps)
        except StopIteration:
            self._steps = None

    def _taken(self) -> list[Segment]:
        taken, self._out = self._out, []
        return taken if len(taken) < 2 else _merged(taken)

    # --- the answer

    def _run(self) -> Wait:
        tools, reasoning = self._form.tools, self._form.reasoning
        if self._channels is not None:
            yield from self._read_messages(self._channels)
        else:
            if reasoning is not None:
                yield from self._read_reasoning(reasoning)
            yield from self._read_content(
                tools, (*(tools.wrappers if tools else ()), *(reasoning.wrappers if reasoning else ()))
            )
        yield from self._until(_Markers(()), self._say)

    def _read_reasoning(self, reasoning: ReasoningFormat) -> Wait:
        if (yield from self._cursor.literal(reasoning.begin)) or self._form.opened or reasoning.implied:
            yield from self._cursor.skip_space()
            if (yield from self._until(_Markers((reasoning.end,)), self._think)):
                yield from self._cursor.literal(reasoning.end)
                yield from self._cursor.skip_space()

    def _read_content(self, tools: ToolFormat | None, wrappers: tuple[str, ...]) -> Wait:
        if tools is not None and tools.bare:
            yield from self._read_section(tools)
        if tools is not None and tools.only:
            return
        of_calls = (tools.marker, tools.begin if tools.loose else "") if tools is not None else ()
        markers = _Markers((*of_calls, *wrappers))
        while marker := (yield from self._until(markers, self._say)):
            if marker in wrappers:
                yield from self._cursor.literal(marker)
            elif tools is not None:
                yield from self._read_section(tools)

    # --- messages

    def _read_messages(self, channels: Channels) -> Wait:
        begun = yield from self._cursor.literal(channels.start)
        give = yield from self._read_header(channels, channels.start if begun else "")
        markers = _Markers((channels.start, *channels.ends))
        while marker := (yield from self._until(markers, give)):
            yield from self._cursor.literal(marker)
            give = self._say
            if marker != channels.start:
                yield from self._cursor.skip_space()
            else:
                give = yield from self._read_header(channels, marker)

    def _read_header(self, channels: Channels, before: str) -> Reads[Give]:
        """What the text of the message is for. A call is read here, with its arguments. ``before``: what was taken as
        its start."""
        cursor = self._cursor
        self._call = _Call()
        cursor.record()
        try:
            header = yield from read_up_to(cursor, channels.header_end)
            if re.fullmatch(channels.reasoning, header):
                cursor.head()
                return self._think if self._form.reasoning is not None else self._say
            called = None if re.fullmatch(channels.content, header) else re.fullmatch(channels.call, header)
            if called is not None and self._form.tools is not None:
                yield from self._read_called(self._form.tools, called.groupdict().get("name"))
                yield from cursor.skip_space()
            elif called is not None or not re.fullmatch(channels.content, header):
                raise Malformed
            cursor.head()
        except Malformed:
            self._give_up(before)
        except Ended:
            self._end_early(header=True)
        return self._say

    def _read_called(self, tools: ToolFormat, name: str | None) -> Wait:
        """A call, or a section of them, that a header has announced."""
        if name is None:
            yield from self._read_section(tools)
            return
        if self._form.single and self._count:
            yield from self._drop()
        self._call = _Call()
        self._name(name)
        yield from self._read_arguments()
        self._complete_call()

    # --- running text

    def _think(self, text: str) -> None:
        if text:
            self._out.append(Reasoning(text))

    def _say(self, text: str) -> None:
        if text and self._form.text_of:
            self._begin_text()
            self._out.append(ToolCallArguments(0, text, custom=True))
        elif text:
            self._out.append(Content(text))

    def _begin_text(self) -> None:
        """Of the one call that what the user reads is."""
        if self._form.text_of and not self._count:
            self._count = 1
            self._out.append(ToolCallStart(0, create_call_id(), self._form.text_of, custom=True))

    def _until(self, markers: _Markers, give: Give) -> Reads[str]:
        """Gives out the text before a marker and the white space that leads to it; returns the marker, or nothing where
        none comes."""
        cursor = self._cursor
        while True:
            text, begin = cursor.text, cursor.at
            if found := markers.find(text, begin):
                give(cursor.take(_trimmed(text, begin, found.start())))
                return found[0]
            held = markers.held(text, begin)
            if cursor.ended:
                # a lone < may be anything, but after a call
                half = self._cut_off and held >= (1 if self._complete else 2)
                give(cursor.take(_trimmed(text, begin, len(text) - held) if half else len(text)))
                cursor.at = len(text)
                return ""
            give(cursor.take(_trimmed(text, begin, len(text) - held) if markers.wanted else len(text)))
            yield

    # --- calls

    def _read_section(self, tools: ToolFormat) -> Wait:
        """A run of calls, as far as it is one; what is none is content."""
        cursor = self._cursor
        if not cursor.recording:  # behind a header it is
            cursor.record()
        try:
            yield from self._begin_section(tools)
            while True:
                yield from self._read_call(tools)
                if not (yield from self._next_call(tools)):
                    break
            for literal in tools.section_end:
                yield from cursor.literal(literal)
            yield from cursor.skip_space()
            if (
                cursor.ended
                and self._cut_off
                and any(each.startswith(cursor.text[cursor.at :]) for each in tools.markers)
            ):
                cursor.at = len(cursor.text)  # the beginning of an end
        except Malformed:
            self._give_up()
        except Ended:
            self._end_early()

    def _begin_section(self, tools: ToolFormat) -> Wait:
        for literal in tools.section_begin:
            if tools.bare or tools.loose:
                yield from self._cursor.literal(literal)
            else:
                yield from self._cursor.require(literal)
        if tools.begin:
            yield from self._cursor.require(tools.begin)

    def _next_call(self, tools: ToolFormat) -> Reads[bool]:
        """After a call: up to the next one. What is in the way of it is content."""
        cursor = self._cursor
        if self._form.single or self._form.fixed_name:
            yield from self._drop()
        for literal in tools.end:
            yield from cursor.literal(literal)
        cursor.record()
        separated = bool(tools.separator) and (yield from cursor.literal(tools.separator))
        if (yield from self._begins_call(tools, separated)):
            return True
        if separated:
            raise Ended if cursor.ended and not cursor.text[cursor.at :].strip() else Malformed
        cursor.head()
        return False

    def _begins_call(self, tools: ToolFormat, separated: bool) -> Reads[bool]:
        if tools.begin:
            return (yield from self._cursor.literal(tools.begin))
        if tools.style is Style.KEYWORDS:
            return separated or (not tools.separator and (yield from self._sees_name()))
        return (yield from self._cursor.sees("{"))

    def _sees_name(self) -> Reads[bool]:
        """Whether a letter comes next, after white space."""
        yield from self._cursor.skip_space()
        return bool(_NAME.match((yield from self._cursor.window(1))))

    def _drop(self) -> Wait:
        """Nothing more is wanted."""
        while True:
            self._cursor.at = len(self._cursor.text)
            if self._cursor.ended:
                raise Ended
            yield

    def _read_call(self, tools: ToolFormat) -> Wait:
        self._call = _Call(name=self._form.fixed_name or None)
        if self._form.fixed_name:
            yield from self._read_arguments()
        elif tools.style is Style.OBJECT:
            yield from self._read_object()
        elif tools.style is Style.KEYED:
            yield from self._read_keyed()
        elif tools.style is Style.JSON:
            yield from self._read_named(tools.name_end, tools.name_pattern)
        else:
            yield from self._read_worded(tools)
        self._complete_call()

    def _read_worded(self, tools: ToolFormat) -> Wait:
        """``name name_end`` and arguments that are not JSON."""
        call, cursor = self._call, self._cursor
        yield from cursor.space()
        name = yield from read_word(cursor, _NAME)
        self._name(name)
        if tools.name_end:
            yield from cursor.require(tools.name_end)
        call.in_arguments, call.verbatim = True, False
        self._start_if_known()
        if tools.tags is not None:
            yield from read_tagged(cursor, tools.tags, self._form.functions.get(name, _NO_TYPES), self._argue)
        else:
            yield from read_keywords(cursor, tools.literals, self._argue)
        call.past_arguments = True

    def _read_named(self, name_end: str, pattern: str) -> Wait:
        """``name … arguments``"""
        cursor = self._cursor
        written = ""
        while not (yield from cursor.literal(name_end)):
            yield from cursor.peek()
            written += cursor.take(cursor.at + 1)
        named = re.fullmatch(pattern, written.strip())
        if named is None:
            raise Malformed
        self._name(named["name"])
        self._call.id = named.groupdict().get("id") or ""
        yield from self._read_arguments()

    def _name(self, name: str) -> None:
        if not name or (self._known_only and name not in self._form.functions):
            raise Malformed
        self._call.name = name

    def _read_keyed(self) -> Wait:
        """``{name: arguments}``"""
        yield from self._cursor.expect("{")
        self._name((yield from read_text(self._cursor)))
        yield from self._cursor.expect(":")
        yield from self._read_arguments()
        yield from self._cursor.expect("}")

    def _read_object(self) -> Wait:
        """``{"name": …, "arguments": …}`` in either order."""
        cursor, before = self._cursor, "{"
        while before != "}":
            yield from cursor.expect(before)
            key = yield from read_text(cursor)
            yield from cursor.expect(":")
            yield from self._read_member(key)
            before = "," if (yield from cursor.space()) == "," else "}"
        yield from cursor.expect("}")

    def _read_member(self, key: str) -> Wait:
        call = self._call
        if key in _NAMES and call.name is None:
            self._name((yield from read_text(self._cursor)))
            self._start_if_known()
        elif key in _ARGUMENTS and not call.in_arguments:
            yield from self._read_arguments()
        elif key in _ASIDE:
            yield from read_value(self._cursor, lambda _: None)
        else:
            raise Malformed

    def _read_arguments(self) -> Wait:
        if (yield from self._cursor.space()) != "{":
            raise Malformed
        self._call.in_arguments = True
        self._start_if_known()
        yield from read_value(self._cursor, self._argue)
        self._call.past_arguments = True

    def _start_if_known(self) -> None:
        call = self._call
        if call.name is None or not call.in_arguments:
            return
        self._cursor.head()
        call.index, self._count = self._count, self._count + 1
        fresh = create_call_id(self._form.id_length, self._form.id_form, call.name, call.index)
        id = call.id if call.id and call.id not in self._ids else fresh
        self._ids.add(id)
        custom = call.name in self._form.customs
        call.text = CustomText() if custom else None
        self._out.append(ToolCallStart(call.index, id, call.name, custom))
        held, call.held = "".join(call.held), []
        self._argue(held)

    def _argue(self, text: str) -> None:
        call = self._call
        if call.index is None:
            call.held.append(text)
        elif text := text if call.text is None else call.text.push(text):
            self._out.append(ToolCallArguments(call.index, text, call.text is not None))

    def _complete_call(self) -> None:
        call = self._call
        if call.name is None:
            raise Malformed
        if not call.in_arguments:
            call.in_arguments = True
            self._start_if_known()
            self._argue("{")
        self._argue("}")
        call.complete = True
        self._complete += 1

    # --- what is no call, or not a whole one

    def _give_up(self, before: str = "") -> None:
        """The head is content; of a call that was begun there is none, and what follows is content."""
        head = self._cursor.head()
        self._say(before + head if head else "")

    def _end_early(self, *, header: bool = False) -> None:
        """The text ended inside of a call, or of what might have become one, or of a header."""
        call, cursor = self._call, self._cursor
        if call.complete:  # and what came after it
            after = cursor.head() + cursor.take(len(cursor.text))
            self._say("" if self._cut_off else after)
            return
        rest = cursor.take(len(cursor.text))
        if call.index is None:
            head = cursor.head()
            self._cut = bool(head.strip())
            certain = call.name is not None or (self._may_be_header(head.strip()) if header else not self._known_only)
            if not (self._cut_off and certain):
                self._say(head)
            return
        self._cut = True
        if rest and call.verbatim and not call.past_arguments:
            self._argue(rest)

    def _may_be_header(self, head: str) -> bool:
        return any(
            head.startswith(each) or each.startswith(head) for each in ("<|", "to=", "all", *self._form.functions)
        )


@dataclass(slots=True)
class _Call:
    """One call as far as it is known. ``index`` is set once it has been given out."""

    name: str | None = None
    id: str = ""
    index: int | None = None
    in_arguments: bool = False
    past_arguments: bool = False
    verbatim: bool = True  # its arguments are given out as they are written
    complete: bool = False
    held: list[str] = field(default_factory=list)  # arguments that came before the name
    text: CustomText | None = None  # what its client gets of them, where that is the text in them


def _trimmed(text: str, begin: int, end: int) -> int:
    """``end`` without the white space before it."""
    found = _TRAILING.search(text, max(begin, end - _TRIMMED), end)
    return end if found is None else found.start()


def _merged(segments: list[Segment]) -> list[Segment]:
    """Neighbours of one kind as one."""
    runs = [list(run) for _, run in groupby(segments, key=_kind)]
    return [run[0] if len(run) == 1 else replace(run[0], text="".join(each.text for each in run)) for run in runs]  # type: ignore[union-attr, arg-type]


def _kind(segment: Segment) -> tuple[type, int]:
    return type(segment), getattr(segment, "index", 0)


def create_call_id(length: int = 0, form: str = "", name: str = "", index: int = 0) -> str:
    """Some templates insist on a number of letters and digits, some on the name and the index; others take any."""
    if form:
        return form.format(name=name, index=index)
    return "".join(secrets.choice(_LETTERS) for _ in range(length)) if length else f"call_{uuid.uuid4().hex}"
