"""An Ollama Modelfile that says what the checkpoint says: template, stop marks, system prompt, parameters.

In:  the chat template of a checkpoint.
Out: the text of a Modelfile. The Jinja template is taken apart into what stands before and after each speaker's words, and
     put together again for several conversations: only where both give the same text is there a Modelfile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lamplighter.data.chat.rendering import Refused
from lamplighter.data.chat.rows import Message
from lamplighter.data.chat.template import ChatTemplate
from lamplighter.errors import BadConfig

_S, _U, _A = "\x02system words\x03", "\x02user words\x03", "\x02answer words\x03"


@dataclass(frozen=True)
class Turns:
    """A template in pieces: (before, after) of each speaker's words, what stands at the very beginning, what opens an answer."""

    begin: str
    system: tuple[str, str] | None
    user: tuple[str, str]
    assistant: tuple[str, str]
    opening: str
    default_system: str = ""

    def render(self, messages: Sequence[Message]) -> str:
        said = self.begin
        if self.default_system and messages[0]["role"] != "system" and self.system:
            said += self.default_system.join(self.system)
        for message in messages:
            pieces = {"system": self.system or self.user, "user": self.user, "assistant": self.assistant}[
                message["role"]
            ]
            said += message["content"].join(pieces)
        return said + self.opening


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def take_apart(template: ChatTemplate) -> Turns:
    """By rendering conversations whose words are known; a template that is not made of turns is refused."""
    user, answer = _message("user", _U), _message("assistant", _A)
    try:
        one = template.render([user], True)
        closed = template.render([user, answer], False)
        two = template.render([user, answer, user], True)
    except Refused as error:
        raise _cannot(str(error)) from error
    before, _, rest = one.partition(_U)
    after_user, middle = rest, closed.partition(_U)[2]
    between, found, after_answer = middle.partition(_A)
    if not found or _U not in one:
        raise _cannot("it changes what is said")
    # "after_user" is what closes a question and opens an answer; a second question shows where the border lies
    tail = two.partition(_A)[2]
    before_second = tail.partition(_U)[0]
    if not before_second.startswith(after_answer):
        raise _cannot("it changes earlier turns")
    before_user = before_second[len(after_answer) :]
    if not before.endswith(before_user):
        raise _cannot("its first question looks unlike the others")
    begin = before[: len(before) - len(before_user)]
    opening = _common_end(after_user, between)
    turns = Turns(
        begin, None, (before_user, after_user[: len(after_user) - len(opening)]), (opening, after_answer), opening
    )
    turns = _with_system(template, turns)
    _check(template, turns)
    return turns


def _common_end(after_user: str, between: str) -> str:
    """What opens an answer in both: here all of it belongs to the opening but what closes the question."""
    if after_user != between:
        raise _cannot("an answer is opened otherwise than it was trained")
    cut = after_user.find("<|im_start|>")
    return after_user[cut:] if cut > 0 else after_user


def _with_system(template: ChatTemplate, turns: Turns) -> Turns:
    try:
        said = template.render([_message("system", _S), _message("user", _U)], True)
    except Refused:
        return turns  # it knows no system message
    question = turns.user[0] + _U + turns.user[1] + turns.opening
    if not said.endswith(question) or _S not in said:
        return turns
    before, _, after = said[: len(said) - len(question)].partition(_S)
    for begin in (turns.begin, ""):  # what stands before the first question may itself be a system message
        if not before.startswith(begin):
            continue
        system = (before[len(begin) :], after)
        if begin == turns.begin:
            return Turns(begin, system, turns.user, turns.assistant, turns.opening)
        if turns.begin.startswith(system[0]) and turns.begin.endswith(system[1]):
            words = turns.begin[len(system[0]) : len(turns.begin) - len(system[1])]
            return Turns("", system, turns.user, turns.assistant, turns.opening, words)
    return turns


def _check(template: ChatTemplate, turns: Turns) -> None:
    user, answer = _message("user", "Who?"), _message("assistant", "The lamp-lighter.")
    talks = [[user], [user, answer, _message("user", "When?\nToday")], [user, answer, user, answer, user]]
    if turns.system is not None:
        talks += [[_message("system", "Be brief."), *talk] for talk in talks]
    for talk in talks:
        if (theirs := template.render(talk, True)) != (ours := turns.render(talk)):
            raise _cannot(f"the two give {theirs[:80]!r} and {ours[:80]!r}")


def _cannot(why: str) -> BadConfig:
    return BadConfig(
        "this chat template cannot be written for Ollama", why, "lamp export RUN --to gguf, and a Modelfile by hand"
    )


def go_template(turns: Turns) -> str:
    """In the language of Ollama's TEMPLATE."""
    parts = ["{{- range .Messages }}"]
    first = True
    for name, pieces in (("system", turns.system), ("user", turns.user), ("assistant", turns.assistant)):
        if pieces is None:
            continue
        parts.append(
            f'{{{{- {"if" if first else "else if"} eq .Role "{name}" }}}}{_go(pieces[0])}{{{{ .Content }}}}{_go(pieces[1])}'
        )
        first = False
    return f"{_go(turns.begin)}{''.join(parts)}{{{{- end }}}}{{{{- end }}}}{_go(turns.opening)}"


def _go(text: str) -> str:
    """As it is; white space beside an action is kept by writing it as a string."""
    if not text:
        return ""
    if '"""' in text or "\x00" in text:
        raise _cannot('it contains """')
    quoted = (
        text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t").replace("\r", "\\r")
    )
    return f'{{{{ "{quoted}" }}}}'


def stops_of(template: ChatTemplate) -> list[str]:
    return list(dict.fromkeys([template.stop, template.tokenizer.end_name]))


def modelfile(file_name: str, template: ChatTemplate | None, temperature: float = 0.7) -> str:
    """FROM, TEMPLATE, SYSTEM, PARAMETER lines."""
    lines = [f"FROM ./{file_name}"]
    if template is None:
        lines.append('TEMPLATE """{{ .Prompt }}"""')
    else:
        turns = take_apart(template)
        lines.append(f'TEMPLATE """{go_template(turns)}"""')
        if '"""' in turns.default_system:
            raise _cannot('its system message contains """')
        if turns.default_system:
            lines.append(f'SYSTEM """{turns.default_system}"""')
        lines += [f'PARAMETER stop "{stop}"' for stop in stops_of(template)]
    lines.append(f"PARAMETER temperature {temperature}")
    return "\n".join(lines) + "\n"
