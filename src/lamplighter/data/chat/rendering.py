"""Messages become text by a Jinja template: ours in this process, everybody else's in one apart.

In:  the text of a template; conversations, and up to where each is wanted.
Out: texts, or why there is none. A template from a model folder may loop without end or ask for all memory: its process
     has a deadline, a limit in bytes and one in characters, sees nothing but the messages, and is ended with the work.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache, cached_property
from typing import TYPE_CHECKING, NoReturn, Protocol

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from lamplighter.errors import BadConfig, ChildLost
from lamplighter.procs.pool import Apart

if TYPE_CHECKING:
    from lamplighter.data.chat.rows import Message

DEADLINE_S = 20.0  # for up to some thousand conversations, which take a tenth of a second
_MEMORY_BYTES = 1 << 30
_MOST_CHARACTERS = 1 << 24  # of one conversation
Cut = tuple[int, bool]  # how many of the messages, and whether the next answer is opened after them
Job = tuple["Sequence[Message]", Sequence[Cut]]


class Refused(Exception):
    """This conversation cannot be rendered by this template; the text says why."""


class RowRefused(Refused):
    """The template itself will not have this conversation (two questions in a row, say); others it may."""


class Renderer(Protocol):
    """For each job its texts, or why there are none."""

    def render(self, jobs: Sequence[Job], marks: Mapping[str, str]) -> list[list[str] | Refused]: ...
    def close(self) -> None: ...


# ---------------------------------------------------------------- Jinja


class _Generation(jinja2.ext.Extension):
    """{% generation %} marks answers for other tools; here it only lets its content through."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    made.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    made.globals["raise_exception"] = _raise
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made


class Here:
    """In this process."""

    def __init__(self, text: str) -> None:
        self.text = text

    @cached_property
    def _compiled(self) -> jinja2.Template:
        try:
            return _environment().from_string(self.text)
        except jinja2.TemplateSyntaxError as error:
            why = f"line {error.lineno}: {error.message}"
            raise BadConfig("it is not a Jinja template", why, "mend it, or --data.template chatml") from error
        except (
            TypeError,
            ValueError,
            SyntaxError,
            RecursionError,
            MemoryError,
        ) as error:  # nested beyond all measure, no text
            why = f"{type(error).__name__}: {error}"
            raise BadConfig("it cannot be compiled", why, "--data.template chatml, or --raw") from error

    def render(self, jobs: Sequence[Job], marks: Mapping[str, str]) -> list[list[str] | Refused]:
        _ = self._compiled  # what is wrong with all of it is no fault of a conversation
        return [self._texts(messages, cuts, marks) for messages, cuts in jobs]

    def _texts(self, messages: Sequence[Message], cuts: Sequence[Cut], marks: Mapping[str, str]) -> list[str] | Refused:
        try:
            return [self._text(messages[:count], open_answer, marks) for count, open_answer in cuts]
        except MemoryError:
            return Refused("it needs more memory than a template may have")
        except (jinja2.TemplateError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError,
                RecursionError) as error:  # fmt: skip
            return Refused(f"{type(error).__name__}: {error}")

    def _text(self, messages: Sequence[Message], open_answer: bool, marks: Mapping[str, str]) -> str:
        pieces = []
        left = _MOST_CHARACTERS
        for piece in self._compiled.generate(
            messages=list(messages), add_generation_prompt=open_answer, tools=None, documents=None, **marks
        ):
            pieces.append(piece)
            left -= len(piece)
            if left < 0:
                raise ValueError(f"its text is longer than {_MOST_CHARACTERS:,} characters")
        return "".join(pieces)

    def close(self) -> None:
        """There is nothing to end."""


# ---------------------------------------------------------------- in a process apart


class Elsewhere:
    """In a process that is ended at its deadline; started where it is needed."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._process = Apart(_render_apart, _MEMORY_BYTES)

    def render(self, jobs: Sequence[Job], marks: Mapping[str, str]) -> list[list[str] | Refused]:
        try:
            found: list[list[str] | Refused] = self._process.call((self.text, jobs, marks), DEADLINE_S)
            return found
        except TimeoutError as error:
            why = f"it had not rendered {len(jobs)} conversations after {DEADLINE_S:.0f} s: a loop without end?"
            raise BadConfig("it takes too long", why, "--data.template chatml, or --raw") from error
        except ChildLost as error:
            raise BadConfig("its process died", error.why, "--data.template chatml, or --raw") from error

    def close(self) -> None:
        self._process.close()


_compiled = cache(Here)


def _render_apart(request: tuple[str, Sequence[Job], Mapping[str, str]]) -> list[list[str] | Refused]:
    text, jobs, marks = request
    return _compiled(text).render(jobs, marks)
