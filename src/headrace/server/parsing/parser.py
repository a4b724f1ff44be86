"""The one parser of answers: a description (formats.py) tells it what to look for.

What lives here: reasoning first, then content with calls between. What may not: JSON itself (json_text.py), names of model families.

Text that begins like a call and is none is content, all of it. Of a call that breaks off after its name and the beginning of its
arguments have been given out, the rest is content and the call stays incomplete, which its arguments show: the brace that makes
them JSON is given out only when the call is whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from itertools import groupby

from headrace.server.parsing.arguments import Types, read_keywords, read_tagged, read_word
from headrace.server.parsing.cursor import Cursor, Ended, Malformed, Wait
from headrace.server.parsing.formats import ReasoningFormat, Style, ToolFormat
from headrace.server.parsing.json_text import read_text, read_value
from headrace.server.parsing.segments import Content, Reasoning, Segment, ToolCallArguments, ToolCallStart

_TRIMMED = 16  # characters of white space before a marker that belong to nobody
_TRAILING = re.compile(r"[ \t\r\n]+\Z")
_ARGUMENTS = ("arguments", "parameters")
_ASIDE = ("id", "type")  # what some models add to a call
_NAME = re.compile(r"[\w.:/-]")  # letters of a name that nothing but what follows it ends
_NO_TYPES: Types = {}

CreateId = Callable[[], str]


class FormatParser:
    """``tools``: the format of calls, None: there are none. ``reasoning``: None: there is none. ``opened``: the prompt began it.

    ``functions``: what may be called, with the types of parameters; only a format without a marker must name one to be taken for a call.
    ``fixed_name``: calls are of this function, and only their arguments are written. ``single``: nothing follows the first call.
    """

    def __init__(
        self,
        tools: ToolFormat | None,
        reasoning: ReasoningFormat | None,
        *,
        create_id: CreateId,
        opened: bool = False,
        functions: Mapping[str, Types] | None = None,
        fixed_name: str = "",
        single: bool = False,
    ) -> None:
        self._tools, self._reasoning, self._opened = tools, reasoning, opened
        self._create_id, self._functions, self._fixed_name, self._single = create_id, functions or {}, fixed_name, single
        self._cursor = Cursor()
        self._out: list[Segment] = []
        self._call = _Call()
        self._count = 0  # of calls that were begun
        self._complete = 0
        self._cut = False  # the text ended inside of a call
        self._steps: Wait | None = self._run()

    def push(self, text: str) -> list[Segment]:
        if self._steps is not None:
            self._cursor.push(text)
            self._advance()
        return self._taken()

    def finish(self) -> list[Segment]:
        if self._steps is not None:
            self._cursor.ended = True
            self._advance()
        return self._taken()

    def end_reason(self, reason: str) -> str:
        if reason != "stop":
            return reason
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
        if self._reasoning is not None:
            yield from self._read_reasoning(self._reasoning)
        if self._tools is not None:
            yield from self._read_calls(self._tools)
        yield from self._until("", self._say)

    def _read_reasoning(self, reasoning: ReasoningFormat) -> Wait:
        if (yield from self._cursor.literal(reasoning.begin)) or self._opened or reasoning.implied:
            yield from self._cursor.skip_space()
            if (yield from self._until(reasoning.end, self._think)):
                yield from self._cursor.literal(reasoning.end)
                yield from self._cursor.skip_space()

    def _read_calls(self, tools: ToolFormat) -> Wait:
        if tools.bare:
            yield from self._read_section(tools)
        while not tools.only and (yield from self._until(tools.marker, self._say)):
            yield from self._read_section(tools)

    # --- running text

    def _think(self, text: str) -> None:
        if text:
            self._out.append(Reasoning(text))

    def _say(self, text: str) -> None:
        if text:
            self._out.append(Content(text))

    def _until(self, marker: str, give: Callable[[str], None]) -> Generator[None, None, bool]:
        """Gives out the text before ``marker`` and the white space that leads to it; False where it never comes."""
        cursor = self._cursor
        while True:
            found = cursor.text.find(marker, cursor.at) if marker else -1
            if found >= 0:
                give(cursor.take(_trimmed(cursor.text, cursor.at, found)))
                return True
            give(cursor.take(len(cursor.text) if cursor.ended or not marker else _certain(cursor.text, cursor.at, marker)))
            if cursor.ended:
                return False
            yield

    # --- calls

    def _read_section(self, tools: ToolFormat) -> Wait:
        """A run of calls, as far as it is one; what is none is content."""
        cursor = self._cursor
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
        except Malformed:
            self._give_up()
        except Ended:
            self._cut_off()

    def _begin_section(self, tools: ToolFormat) -> Wait:
        for literal in tools.section_begin:
            if tools.bare:
                yield from self._cursor.literal(literal)
            else:
                yield from self._cursor.require(literal)
        if tools.begin:
            yield from self._cursor.require(tools.begin)

    def _next_call(self, tools: ToolFormat) -> Generator[None, None, bool]:
        """After a call: up to the next one. What is in the way of it is content."""
        cursor = self._cursor
        if self._single or self._fixed_name:
            yield from self._drop()
        for literal in tools.end:
            yield from cursor.literal(literal)
        cursor.record()
        separated = bool(tools.separator) and (yield from cursor.literal(tools.separator))
        if (yield from self._begins_call(tools, separated)):
            return True
        if separated:
            raise Malformed
        cursor.head()
        return False

    def _begins_call(self, tools: ToolFormat, separated: bool) -> Generator[None, None, bool]:
        if tools.begin:
            return (yield from self._cursor.literal(tools.begin))
        return separated if tools.style is Style.KEYWORDS else (yield from self._cursor.sees("{"))

    def _drop(self) -> Wait:
        """Nothing more is wanted."""
        while True:
            self._cursor.at = len(self._cursor.text)
            if self._cursor.ended:
                raise Ended
            yield

    def _read_call(self, tools: ToolFormat) -> Wait:
        self._call = _Call(name=self._fixed_name or None)
        if self._fixed_name:
            yield from self._read_arguments()
        elif tools.style is Style.OBJECT:
            yield from self._read_object(known_only=tools.bare)
        elif tools.style is Style.JSON:
            yield from self._read_named(tools.name_end, tools.name_pattern)
        else:
            yield from self._read_worded(tools)
        self._complete_call()

    def _read_worded(self, tools: ToolFormat) -> Wait:
        """``name name_end`` and arguments that are not JSON."""
        call, cursor = self._call, self._cursor
        yield from cursor.space()
        call.name = yield from read_word(cursor, _NAME)
        if tools.bare and call.name not in self._functions:
            raise Malformed
        if tools.name_end:
            yield from cursor.require(tools.name_end)
        call.in_arguments, call.verbatim = True, False
        self._start_if_known()
        if tools.tags is not None:
            yield from read_tagged(cursor, tools.tags, self._functions.get(call.name, _NO_TYPES), self._argue)
        else:
            yield from read_keywords(cursor, self._argue)
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
        self._call.name = named["name"]
        yield from self._read_arguments()

    def _read_object(self, *, known_only: bool) -> Wait:
        """``{"name": …, "arguments": …}`` in either order."""
        cursor = self._cursor
        if (yield from cursor.space()) != "{":
            raise Malformed
        ended = ","
        while ended == ",":
            cursor.take(cursor.at + 1)
            key = yield from read_text(cursor)
            if (yield from cursor.space()) != ":":
                raise Malformed
            cursor.take(cursor.at + 1)
            yield from self._read_member(key, known_only=known_only)
            ended = yield from cursor.space()
        if ended != "}":
            raise Malformed
        cursor.take(cursor.at + 1)

    def _read_member(self, key: str, *, known_only: bool) -> Wait:
        call = self._call
        if key == "name" and call.name is None:
            name = yield from read_text(self._cursor)
            if not name or (known_only and name not in self._functions):
                raise Malformed
            call.name = name
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
        self._out.append(ToolCallStart(call.index, self._create_id(), call.name))
        held, call.held = "".join(call.held), []
        if held:
            self._argue(held)

    def _argue(self, text: str) -> None:
        call = self._call
        if call.index is None:
            call.held.append(text)
        else:
            self._out.append(ToolCallArguments(call.index, text))

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

    def _give_up(self) -> None:
        """The head is content; of a call that was begun there is none, and what follows is content."""
        self._say(self._cursor.head())

    def _cut_off(self) -> None:
        call, cursor = self._call, self._cursor
        if call.complete:
            return
        if call.index is None:
            head = cursor.head()
            self._cut = bool(head.strip())
            self._say(head)
            return
        self._cut = True
        rest = cursor.take(len(cursor.text))
        if rest and call.verbatim and not call.past_arguments:
            self._argue(rest)


@dataclass(slots=True)
class _Call:
    """One call as far as it is known. ``index`` is set once it has been given out."""

    name: str | None = None
    index: int | None = None
    in_arguments: bool = False
    past_arguments: bool = False
    verbatim: bool = True  # its arguments are given out as they are written
    complete: bool = False
    held: list[str] = field(default_factory=list)  # arguments that came before the name


def _trimmed(text: str, begin: int, end: int) -> int:
    """``end`` without the white space before it."""
    found = _TRAILING.search(text, max(begin, end - _TRIMMED), end)
    return end if found is None else found.start()


def _certain(text: str, begin: int, marker: str) -> int:
    """Up to where text is no part of a marker and of the white space before it, whatever follows."""
    end = len(text)
    longest = min(len(marker) - 1, end - begin)
    overlap = next((size for size in range(longest, 0, -1) if marker.startswith(text[end - size :])), 0)
    return _trimmed(text, begin, end - overlap)


def _merged(segments: list[Segment]) -> list[Segment]:
    """Neighbours of one kind as one."""
    found: list[Segment] = []
    for kind, group in groupby(segments, key=_kind):
        run = list(group)
        if len(run) == 1:
            found += run
        elif kind == (Reasoning, 0):
            found.append(Reasoning(_joined(run)))
        elif kind == (Content, 0):
            found.append(Content(_joined(run)))
        else:
            found.append(ToolCallArguments(kind[1], _joined(run)))
    return found


def _kind(segment: Segment) -> tuple[type, int]:
    return type(segment), segment.index if isinstance(segment, (ToolCallStart, ToolCallArguments)) else 0


def _joined(run: list[Segment]) -> str:
    return "".join(segment.text for segment in run if not isinstance(segment, ToolCallStart))
