"""A run's own config.yaml: written at its start, understood by later versions, and the ground of a resume.

In:  a resolved run; the file that this or an earlier version wrote.
Out: YAML in which each value says where it came from; the run as it was; what a resume keeps and what it may not change.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from lamplighter import read_back
from lamplighter.config import schema
from lamplighter.config.resolve import Resolved, flat, reaches_out, read_yaml, validate
from lamplighter.config.schema import LENGTH, MAY_CHANGE, NO_MATTER, ROUNDING, Run
from lamplighter.errors import BadConfig
from lamplighter.rundir import VERSIONS
from lamplighter.safe_text import MASK, mask, mask_address, mask_record

_CHECK = "# check: "


def dump(resolved: Resolved) -> str:
    """The run as YAML, each value with where it came from. No child needs the keys to the mirror: they stay out of the folder."""
    import yaml

    save = resolved.run.save
    if save.mirror is not None:
        resolved = replace(resolved, run=replace(resolved.run, save=replace(save, mirror=mask_address(save.mirror))))
    lines = [f"# preset: {resolved.preset}"] if resolved.preset else []
    lines += [f"{name}: {number}" for name, number in VERSIONS.items()]
    for section, values in asdict(resolved.run).items():
        lines.append(f"{section}:")
        for name, value in values.items():
            text = yaml.safe_dump({name: value}, default_flow_style=True, width=10**6, allow_unicode=True).strip()[1:-1]
            lines.append(f"  {text:<38} # {resolved.origin.get(f'{section}.{name}', 'default')}")
    return "\n".join(lines) + "\n"


def shown(resolved: Resolved) -> str:
    """The same for people: no passwords and tokens. Of the address to notify only the host: its path is often the password."""
    care = resolved.run.watch
    if care.notify and (host := re.match(r"https?://([^/?#\s]*@)?([^/?#\s]*)", care.notify)):
        care = replace(care, notify=f"{host[0].partition('://')[0]}://{host[2]}/{MASK}")
    return mask(dump(replace(resolved, run=replace(resolved.run, watch=care))))


def dump_for_mirror(path: Path) -> str:
    """A run's config.yaml for another place: as it is, but without a secret."""
    before = read_dump(path)
    care, save = replace(before.run.watch, notify=None), replace(before.run.save, mirror=None)
    preset = re.match(r"# preset: (.+)", read_back.read_whole(path).decode())
    run = replace(before.run, watch=care, save=save)
    return with_check(shown(Resolved(run, before.origin, preset[1] if preset else None)))


def with_secrets_of(before: Recorded, now: Run) -> Run | None:
    """What `dump_for_mirror` wrote, with the secrets that are given again; None where it lacks none of them."""
    then, given = flat(before.run), flat(now)
    masked = {
        name: given[name] for name, value in then.items() if MASK in str(value) and mask_record(given[name]) == value
    }
    return validate({**then, **masked}, before.origin) if masked else None


def with_check(text: str) -> str:
    """What `dump` gave, with the checksum of it as its last line: as it goes into a run's folder."""
    return f"{text}{_CHECK}{_checksum(text)}\n"


def _checksum(text: str) -> str:
    import xxhash

    return str(xxhash.xxh3_64_hexdigest(text.encode()))


def _was_changed(text: str) -> bool:
    """Whether a config.yaml is not as it was written: by hand, or by damage. Those of earlier versions do not say it."""
    content, found, check = text.rpartition(_CHECK)
    return bool(found) and check.strip() != _checksum(content)


@dataclass(frozen=True)
class Recorded:
    """A run as its config.yaml has it, with today's names."""

    run: Run
    origin: dict[str, str]
    dropped: tuple[str, ...] = ()  # fields that no longer exist, in words
    changed: bool = False  # since it was written


def read_dump(path: Path) -> Recorded:
    """What `dump` wrote, now or in an earlier version."""
    values, dropped, recorded = dict(schema.ADDED), [], read_yaml(path)
    if not recorded:  # `dump` writes every field: an empty file is a torn one, never "all defaults"
        raise BadConfig(f"{path} is empty", "a run's config.yaml has every field", "put it back")
    for name, (value, _) in recorded.items():
        if name in schema.REMOVED:
            dropped.append(f"{name} ({value!r} in this run) no longer exists: {schema.REMOVED[name]}")
        else:
            values[schema.RENAMED.get(name, name)] = value
    text = read_back.read_whole(path).decode()
    return Recorded(validate(values, {}), _origins(text), tuple(dropped), _was_changed(text))


def _origins(text: str) -> dict[str, str]:
    """Where each value came from, by the comment behind it."""
    found, section = {}, ""
    for line in text.splitlines():
        if head := re.fullmatch(r"(\w+):\s*", line):
            section = head[1]
        elif field := re.fullmatch(r"  (\w+): .* # (.*)", line):
            name = f"{section}.{field[1]}"
            found[schema.RENAMED.get(name, name)] = field[2]
    return found


def load_dump(path: Path) -> Run:
    """The run that `dump` wrote."""
    return read_dump(path).run


def carry_over(resolved: Resolved, before: Recorded) -> tuple[Resolved, list[str]]:
    """At resume, what the user does not give comes from the run's own config.yaml, never from a newer default.

    A preset (or --test) counts as given, but not its newer numbers: where the run has a value of the same preset, that
    stays. What was derived is not given. Code, commands and addresses are never taken from a folder: those the user gives again. Also in words, what
    was kept although it is not what the command alone would mean.
    """
    now, then = flat(resolved.run), flat(before.run)
    ours = {name for name, origin in resolved.origin.items() if origin == "--test" or origin.startswith("preset ")}
    given = {name for name in resolved.given if name not in ours or before.origin.get(name) != resolved.origin[name]}
    given |= set(LENGTH) if given & set(LENGTH) else set()
    kept = {name: then[name] for name in now if name not in given and not reaches_out(name, then[name])}
    changed = {name: value for name, value in kept.items() if value != now[name]}
    origin = {**resolved.origin, **{name: before.origin[name] for name in kept if name in before.origin}}
    run = validate({**now, **changed}, origin) if changed else resolved.run
    words = [f"{name} {value} (without it: {now[name]})" for name, value in changed.items()]
    return Resolved(run, origin, resolved.preset), words


def to_give_again(old: Run, resolved: Resolved) -> list[str]:
    """The flags of an old run that are not taken from its folder (`reaches_out`) and were not given now."""
    missing = {name: value for name, value in flat(old).items() if name not in resolved.given}
    return [
        shlex.join([f"--{name}", *map(str, value if isinstance(value, list | tuple) else [value])])
        for name, value in missing.items()
        if name.split(".")[0] not in MAY_CHANGE and reaches_out(name, value)
    ]


def drift(old: Run, new: Run) -> list[str]:
    """What a resume may not change, as 'train.lr: 0.001 -> 0.002'."""
    before = flat(old)
    moves = (
        ("model.init_from", "model.revision") if old.lora.r else ()
    )  # a base may lie elsewhere now: its hash is compared
    return [
        f"{name}: {before[name]} -> {value}"
        for name, value in flat(new).items()
        if name.split(".")[0] not in MAY_CHANGE
        and name not in (*NO_MATTER, *ROUNDING, *moves)
        and before[name] != value
    ]
