"""The words of a command line, bound to the parameters of a function; and what the parent of a run does not load."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from lamplighter.commands.arguments import many, named_again, parse
from lamplighter.errors import UsageError


def flags(
    model: str,
    second: Path | None = None,
    /,
    *files: str,
    seed: int = 1,
    heat: float = 0.8,
    raw: bool = False,
    top_k: int | None = None,
    how: Literal["report", "stop"] = "report",
    runs_dir: Path = Path("runs"),
) -> None:
    """What a verb takes."""


DEFAULTS: dict[str, Any] = {
    "model": "m", "second": None, "files": (), "seed": 1, "heat": 0.8, "raw": False, "top_k": None, "how": "report",
    "runs_dir": Path("runs"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        ("m", {}),
        ("m a b c", {"second": Path("a"), "files": ("b", "c")}),
        ("m --seed 5 --heat=0", {"seed": 5, "heat": 0.0}),
        ("m --seed 1e4", {"seed": 10_000}),
        ("m --seed -5", {"seed": -5}),
        ("m --raw", {"raw": True}),
        ("m --no-raw", {"raw": False}),
        ("m --raw=false", {"raw": False}),
        ("--raw m", {"raw": True}),
        ("m --top-k 3", {"top_k": 3}),
        ("m --top_k=3", {"top_k": 3}),
        ("m --runs_dir a_b", {"runs_dir": Path("a_b")}),
        ("m --how stop", {"how": "stop"}),
    ],
)
def test_every_parameter_has_its_value_or_its_default(words: str, changed: dict[str, Any]) -> None:
    assert parse("verb", flags, words.split()) == {**DEFAULTS, **changed}


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ("", "Parameter MODEL requires an argument."),
        ("m --seed", "Parameter --seed requires an argument."),
        ("m --seed --raw", "Parameter --seed requires an argument."),
        ("m --seed 1 --seed 2", "Parameter --seed specified multiple times."),
        ("m --raw --no-raw", "Parameter --no-raw specified multiple times."),
        ("m --seed x", 'Invalid value for --seed: unable to convert "x" into int.'),
        ("m --seed 1.5", 'Invalid value for --seed: unable to convert "1.5" into int.'),
        ("m --seed inf", 'Invalid value for --seed: unable to convert "inf" into int.'),
        ("m --heat x", 'Invalid value for --heat: unable to convert "x" into float.'),
        ("m --raw=maybe", 'Invalid value for --raw: unable to convert "maybe" into bool.'),
        ("m --how so", 'Invalid value "so" for --how. Choose from: "report", "stop".'),
        ("m --sed 1", "--sed is not a flag"),
        ("m -s", "-s is not a flag"),
    ],
)
def test_a_mistake_is_named(words: str, what: str) -> None:
    with pytest.raises(UsageError) as error:
        parse("verb", flags, words.split())
    assert error.value.what == what


def test_words_that_nobody_takes_are_named() -> None:
    def none(*, json: bool = False) -> None: ...

    with pytest.raises(UsageError, match="a: nothing is expected here"):
        parse("verb", none, ["a", "--json"])


def test_a_flag_with_several_values_is_taken_out() -> None:
    words = ["run.yaml", "--only", "disk", "memory", "--json", "--only=text", "x"]
    assert many(words, "only") == (["run.yaml", "--json"], {"only": ["disk", "memory", "text", "x"]})


def test_the_next_command_names_another_folder_of_runs_again() -> None:
    assert named_again(Path("runs")) == named_again("./runs") == []
    assert named_again("/big/my runs") == ["--runs-dir", "/big/my runs"]
