"""lamp train and lamp demo: from a config to a trained model.

In:  a preset, a run.yaml, `--section.key value` pairs.
Out: a run folder. The parent part resolves the config, takes the run and supervises; the child part calls the start-up
     phases in order, each under its name, and then the loop.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamplighter import own_code, report
from lamplighter.commands import result
from lamplighter.commands.arguments import parse, refuse_controls
from lamplighter.commands.launched import LAUNCHERS, Launch, follow, launch_of
from lamplighter.errors import CRASHED, DONE, STOPPED_EARLY, BadConfig, LampError, RefusedByPlan, UsageError
from lamplighter.leaves import leaf_size
from lamplighter.rundir import (
    EVENTS_BYTES,
    FORMAT,
    RunDir,
    cannot_write,
    dollars,
    is_running,
    move_aside,
    newest_first,
    number,
    open_lines,
    read_lines,
    read_status,
    step_of,
    take_lock,
    version_of,
    write_atomic,
)
from lamplighter.safe_text import mask_address

if TYPE_CHECKING:
    from lamplighter.commands.nodes import FirstNode
    from lamplighter.config import Budget, Resolved, Run, Train
    from lamplighter.config.schema import Launch as LaunchSection
    from lamplighter.mirror.mirroring import Mirroring
    from lamplighter.watch.console import Console
    from lamplighter.watch.meeting import Nodes


def _train_flags(
    run_yaml: Path | None = None,
    /,
    *,
    preset: str | None = None,
    run: str | None = None,
    resume: str = "auto",
    test: bool = False,
    verbose: bool = False,
    force: bool = False,
    print_config: bool = False,
    detach: bool = False,
    runs_dir: Path = Path("runs"),
) -> None:
    """What `lamp train` takes besides fields."""


def train(words: list[str]) -> int:
    """Resolve the config, take the run, start the child, stay with it."""
    return _start_training("train", words)


def demo(words: list[str]) -> int:
    """The demo preset under its own name."""
    return _start_training("demo", ["--preset", "demo", *words])


def _start_training(verb: str, words: list[str]) -> int:
    from lamplighter.config import parse_overrides, resolve, shown

    launch = launch_of(os.environ)
    rest, overrides = parse_overrides(words)
    flags = parse(verb, _train_flags, rest)
    resolved = resolve(flags["preset"], flags["run_yaml"], overrides, flags["test"])
    own_code.look_beside(flags["run_yaml"])
    if flags["print_config"]:
        return result(shown(resolved))
    if flags["detach"] and resolved.run.launch.nodes > 1:
        raise UsageError(
            "--detach is given for several nodes",
            "each node has to be seen to begin by whoever starts it",
            "setsid nohup lamp train ... on each node, or lamp launch slurm",
        )
    if flags["detach"]:
        from lamplighter.commands import detached

        words = [word for word in words[2 if verb == "demo" else 0 :] if word != "--detach"]
        return detached.start(verb, words, RunDir(flags["runs_dir"] / run_name(flags)), os.environ)
    run = RunDir(flags["runs_dir"] / run_name(flags))
    if launch is not None and not launch.leads:
        return follow(run if launch.node == 0 else RunDir(run.nodes / str(launch.node)))
    resolved = _for_launch(resolved, launch)
    if launch is None and resolved.run.launch.nodes == 1:
        return _train(verb, words, resolved, flags)
    from lamplighter.commands.nodes import nodes_of, take_part  # a run on one machine does not load them

    nodes = nodes_of(resolved.run, launch)
    if nodes is not None and not nodes.is_first:
        return take_part(resolved, nodes, run, _same_command(verb, words))
    return _train(verb, words, resolved, flags, nodes)


def _for_launch(resolved: Resolved, launch: Launch | None) -> Resolved:
    """As many ranks as the launcher has started processes."""
    train = resolved.run.train
    if launch is None or launch.ranks is None:
        return resolved
    if train.ranks not in ("auto", launch.ranks):
        raise UsageError(
            f"{launch.by} has started {launch.ranks} processes here, and train.ranks is {train.ranks}",
            "a rank is a process of the launcher's",
            "leave train.ranks out",
        )
    run = replace(resolved.run, train=replace(train, ranks=launch.ranks))
    return replace(resolved, run=run, origin={**resolved.origin, "train.ranks": launch.by})


def run_name(flags: dict[str, Any]) -> str:
    yaml: Path | None = flags["run_yaml"]
    if flags["run"] == "":
        raise UsageError("--run is empty", "a run needs a name", "--run my-run")
    name = str(flags["run"] or (yaml.stem if yaml else None) or flags["preset"] or "train")
    refuse_controls(name)
    if "/" in name or name.startswith("."):
        raise UsageError(f"{name} cannot be a run's name", "a run is one folder of --runs-dir", "--run my-run")
    return name + ("-test" if flags.get("test") else "")


def _train(verb: str, words: list[str], resolved: Resolved, flags: dict[str, Any], nodes: Nodes | None = None) -> int:
    """Take the run and its lock, write its config, stay with the child."""
    from lamplighter.watch.console import Console

    began = time.time()
    run = RunDir(flags["runs_dir"] / run_name(flags))
    resume, moved = flags["resume"], None
    if resume == "never" and not is_running(run):
        moved = move_aside(run.path) if run.path.exists() else None
        resume = "auto"
    run.create()
    try:
        lock_fd = take_lock(run)
        console = Console(1, log_fd=open_lines(run.console))
    except OSError as error:
        raise cannot_write(run.path, error) from error
    if moved is not None:
        console.say(f"the old run is kept as {moved}")
    first: FirstNode | None = None
    code, ended = CRASHED, "node 0 has ended"
    try:
        if nodes is not None:
            from lamplighter.commands.nodes import FirstNode

            first = FirstNode.open(run, nodes, resolved.run.launch.secret, console)
        given = resolved  # before this run's own settings are added: what every node must have been given
        if damage := read_status(run)["damage"]:
            console.say(f"WARNING  {damage}; what it said (time and money spent so far) is lost", "bold yellow")
        mirroring = _mirror_of(run, resolved.run, flags["resume"], console)
        resume = _without_second_return(run, resume, flags["force"], console)
        resolved = _settings_at_resume(run, resolved, console)
        from lamplighter.commands.eval_of_run import Evaluations

        if resume == "auto" and (paused := _paused_already(run, resolved.run.budget)):
            console.say(
                f"{run.name} has reached step {paused} (budget.until_step {resolved.run.budget.until_step}): nothing is trained"
            )
            from lamplighter.watch.trainer import with_settings

            console.say(f"next: {with_settings(_same_command(verb, words), '--budget.until_step none')}")
            code, ended = STOPPED_EARLY, f"{run.name} has paused"
            return code
        if resume == "auto" and _finished_already(run, resolved, console):
            code, ended = DONE, f"{run.name} is finished"
            mirroring.begin()  # what its end had no time for
            mirroring.finish()
            Evaluations(run, resolved.run.eval, console.say).finish()
            return code
        from lamplighter.procs.nvml import count_ranks

        here, why = count_ranks(resolved.run.train.ranks, resolved.run.train.device)
        if (launcher := given.origin.get("train.ranks")) in LAUNCHERS:
            why = f"{launcher} has started as many processes; the first starts the ranks and replaces one that dies, the others wait for its end"
        card = first.card(given, here) if first else None
        arrivals = first.gather(card) if first and card else []
        ranks = here + sum(one.card.ranks for one in arrivals)
        resolved = _with_leaves(run, resolved, ranks)
        resolved = replace(resolved, run=replace(resolved.run, launch=_of_one_node(resolved.run.launch)))
        if ranks > 1:
            console.say(f"note  {ranks} ranks: {why}{f', on {len(arrivals) + 1} nodes' if first else ''}")
        _refuse_spent_budget(run, resolved.run.budget.of_nodes(nodes.count if nodes else 1), verb, words)
        same = _same_settings(run, resolved)
        unrecorded = _write_config(run, resolved, console)
        from lamplighter.watch.elsewhere import Elsewhere

        budget, elsewhere = resolved.run.budget, Elsewhere()
        told: dict[str, str] = {}
        if first and card:
            elsewhere, told = first.welcome(arrivals, resolved, here, card)
            budget = budget.of_nodes(len(arrivals) + 1)
        from lamplighter.watch import keep_awake
        from lamplighter.watch.restart_policy import RestartPolicy  # after the first words: this takes a while
        from lamplighter.watch.supervisor import Supervisor
        from lamplighter.watch.trainer import ChildSpec, Trainer

        care = resolved.run.watch
        spec = ChildSpec(
            "train",
            {
                "resume": resume,
                "preset": resolved.preset,
                "force": flags["force"],
                "same_settings": same,
                **({"facts": first.facts_of_run()} if first else {}),
            },
            resume_command=_same_command(verb, words),
            left_out=_left_out(words),
            steps=resolved.run.train.steps,
            budget=budget,
            grace_s=care.stop_grace_s,
            began=began,
            lock_fd=lock_fd,
            verbose=flags["verbose"],
            ranks=ranks,
            elastic=_is_elastic(resolved.run.train),
            spare=resolved.run.launch.spare,
            elsewhere=elsewhere,
            told=told,
        )
        policy = RestartPolicy(care.on_stuck, care.patience_s)
        evaluations = Evaluations(run, resolved.run.eval, console.say)
        evaluations.begin()
        mirroring.begin()
        awake, words_awake = keep_awake.begin()
        if words_awake:
            console.say(f"note  {words_awake}")
        try:
            trainer = Trainer(run, spec, console)
            code = Supervisor(run, trainer, policy, care.notify, resolved.run.track).supervise()
        except BaseException:
            evaluations.stop()
            mirroring.stop()
            raise
        finally:
            if awake is not None:
                awake.end()
        if code != DONE:
            evaluations.stop()
        mirroring.finish()
        if code == DONE:
            evaluations.finish()
        _write_page(run, console)
        if code == DONE:
            _say_next(run, resolved.run, console, read_status(run).get("step") or 0)
            if flags["test"]:
                _say_whole_run(verb, words, flags, console)
        elif code == BadConfig.code and unrecorded:
            run.config.unlink(missing_ok=True)  # they were not: the right ones must not be refused for these
        return code
    except LampError as error:
        code, ended = error.code, f"{error.what}: {error.why}" if error.why else error.what
        raise
    except OSError as error:
        raise cannot_write(run.path, error) from error
    finally:
        if first is not None:
            first.close(code, ended)
        console.close()


def _of_one_node(launch: LaunchSection) -> LaunchSection:
    """Where the nodes meet is said anew at every start: a run may go on on one machine."""
    return replace(launch, nodes=1, rendezvous=None, node=None, secret=None)


def _mirror_of(run: RunDir, settings: Run, resume: str, console: Console) -> Mirroring:
    """The copies of this run elsewhere, and what of them is newer than what is here."""
    from lamplighter.mirror.mirroring import Mirroring

    address = settings.save.mirror
    if address is None:
        return Mirroring(run, settings.save, "", console.say)
    from lamplighter.mirror import fetching

    named = fetching.prepare(run, settings, console.say, anew=resume != "auto")
    console.say(f"note  checkpoints are copied to {mask_address(address)} (save.mirror)")
    return Mirroring(run, settings.save, named, console.say)


def _is_elastic(train: Train) -> bool:
    """Whether ranks outlive one of them. Not on GPUs: a kernel of NCCL that waits for a dead peer cannot be left."""
    from lamplighter.procs.nvml import cards_here

    return train.device == "cpu" or not cards_here()


def _with_leaves(run: RunDir, resolved: Resolved, ranks: int) -> Resolved:
    """Several ranks need several micro-batches to share out: at a run's first start as many as ranks, and recorded."""
    train = resolved.run.train
    if ranks == 1 or train.micro_batch is not None or newest_first(run.checkpoints):
        return resolved
    changed = replace(resolved.run, train=replace(train, micro_batch=leaf_size(train.batch_size, ranks)))
    return replace(
        resolved, run=changed, origin={**resolved.origin, "train.micro_batch": f"derived from {ranks} ranks"}
    )


def _without_second_return(run: RunDir, resume: str, force: bool, console: Console) -> str:
    """From where to go on. A checkpoint that the run went back to already is not gone back to again by the same words."""
    if resume in ("auto", "never", "") or force:
        return resume
    said = read_lines(run.rank_events(0), EVENTS_BYTES, b'"went back"')
    went_back = [event for event in said if event.get("type") == "went back"]
    newest = max(map(step_of, newest_first(run.checkpoints)), default=-1)
    if not went_back or went_back[-1].get("to") != resume or newest <= number(went_back[-1].get("step"), newest):
        return resume
    console.say(
        f"the run went back to {resume} before and has come to step {newest} since: it goes on from there; to go back once"
        f" more (steps are done again, later checkpoints set aside): --resume {resume} --force",
        "bold yellow",
    )
    return "auto"


def _write_config(run: RunDir, resolved: Resolved, console: Console) -> bool:
    """The settings into the run's folder; whether it has checkpoints, but had no settings."""
    from lamplighter.config import dump, with_check

    unrecorded = not run.config.exists() and bool(newest_first(run.checkpoints))
    if unrecorded:
        console.say(f"WARNING  {run.config} is missing: this command's settings are taken for the run's", "bold yellow")
    write_atomic(run.config, with_check(dump(resolved)), mode=0o600)  # addresses in it may hold secrets
    look = f"look from elsewhere with: lamp watch {run.address}"
    console.say(f"run {run.path}: everything about it is in this folder; {look}")
    return unrecorded


def _refuse_spent_budget(run: RunDir, budget: Budget, verb: str, words: list[str]) -> None:
    """A run that has spent its budget would load everything, and stop at its first step."""
    from lamplighter.watch.status import duration
    from lamplighter.watch.trainer import with_settings

    status = read_status(run)
    spent_s, limit_s = number(status.get("spent_s")), budget.left_s(0.0)
    stopped_by_it = "budget_spent" in status and limit_s <= number(status.get("budget_spent"))
    if spent_s < limit_s and not stopped_by_it:
        return
    usd = f", {dollars(budget.spent_usd(spent_s))} of {dollars(budget.usd)}" if budget.usd is not None else ""
    hours = f"{duration(spent_s)} of {duration(limit_s)}"
    end_s = number(status.get("end_hours_told")) * 3600 or 2 * spent_s
    left_out = f"; {words_left}" if (words_left := _left_out(words)) else ""
    raise RefusedByPlan(
        f"the budget of {run.name} is spent",
        f"{hours}{usd}, over all attempts; step {int(number(status.get('durable_step')))} is safe{left_out}",
        with_settings(_same_command(verb, words), budget.enough_for(end_s)),
        cause="budget",
    )


def _same_command(verb: str, words: list[str], without: tuple[str, ...] = ()) -> str:
    """The command for another time, as it can be pasted; from where to resume is not said again, nor any secret."""
    import shlex

    kept = list(words[2:] if verb == "demo" and words[:2] == ["--preset", "demo"] else words)
    kept = [word for word in kept if word not in without]
    while "--resume" in kept:
        at = kept.index("--resume")
        del kept[at : at + 2]
    return shlex.join(["lamp", verb, *(word for group in by_flag(kept) if not has_secret(group) for word in group)])


def by_flag(words: list[str]) -> list[list[str]]:
    """Each flag with its values; what stands before the first flag alone."""
    groups: list[list[str]] = [[]]
    for word in words:
        if word.startswith("--"):
            groups.append([])
        groups[-1].append(word)
    return groups


def has_secret(words: list[str]) -> bool:
    """Whether it would be shown with *** in a secret's place: wrong as an address."""
    import shlex

    from lamplighter.safe_text import mask

    return mask(shlex.join(words)) != shlex.join(words)


def _left_out(words: list[str]) -> str:
    """In words, what `_same_command` does not repeat; empty where that is nothing."""
    flags = dict.fromkeys(group[0].partition("=")[0] for group in by_flag(words) if group and has_secret(group))
    return f"{', '.join(flags)}: not repeated in the command, because of a secret; give it again" if flags else ""


def _paused_already(run: RunDir, budget: Budget) -> int:
    """The durable step, where it is that of budget.until_step or a later one."""
    status = read_status(run)
    durable = int(number(status.get("durable_step"))) if status.get("state") != "finished" else 0
    return durable if budget.until_step is not None and durable >= budget.until_step else 0


def _finished_already(run: RunDir, resolved: Resolved, console: Console) -> bool:
    """A finished run says so and exits 0, unless train.steps or train.epochs was raised; after an early end, the patience."""
    from lamplighter.config import load_dump

    status = read_status(run)
    if status.get("state") != "finished" or not run.config.exists():
        return False
    before = load_dump(run.config)
    old, new = before.train, resolved.run.train
    raised = (new.steps or 0) > number(status.get("steps")) or (
        new.epochs is not None and new.epochs > (old.epochs or 0)
    )
    raised = raised or (before.data.max_chunks or 0) < (resolved.run.data.max_chunks or 0)
    early, patience = status.get("ended_early"), resolved.run.eval.patience
    if early and (not patience or patience > (early.get("since_best") or 0)):
        return False  # more patience: it goes on
    if raised and not early:
        return False
    if early:
        console.say(
            f"{run.name} is finished, early, at step {status.get('step')} of {status.get('steps')}: {early.get('why')}"
        )
        console.say("A larger eval.patience (0 = without end) goes on, --resume never begins anew.")
    else:
        console.say(
            f"{run.name} is finished: {status.get('step')} steps. Raise train.steps to go on, or --resume never to begin anew."
        )
    console.say(f"next: lamp generate {_to_generate(run, before)}")
    return True


def _settings_at_resume(run: RunDir, resolved: Resolved, console: Console) -> Resolved:
    """What is not given now is as the run has it; save, eval, watch and budget may change, train.steps with a warning."""
    from lamplighter.config import LENGTH, ROUNDING, carry_over, read_dump

    _refuse_newer_status(run)
    began = bool(newest_first(run.checkpoints))
    if not run.config.exists() or (resolved.given and not began):  # nothing is kept yet: settings are as given
        _tell_of_lost_start(run, resolved, console)
        return resolved
    try:
        old = read_dump(run.config)
    except LampError as error:
        if error.cause == "newer_format":
            raise
        raise BadConfig(
            f"{run.config} is damaged",
            f"{error.what}: {error.why}",
            "put it back, or begin anew with --resume never (the old folder is kept)",
        ) from error
    try:
        resolved, kept = carry_over(resolved, old)
    except BadConfig:
        _refuse_drift(run, old.run, resolved)  # what was given does not go with what the run has
        raise
    _refuse_drift(run, old.run, resolved)
    if old.changed:
        console.say(
            f"WARNING  {run.config} is not as it was written (by hand, or by damage): it counts as it stands",
            "bold yellow",
        )
    for words in old.dropped:
        console.say(f"note  {words}")
    if kept:
        console.say(f"note  not given, so as this run has it: {'; '.join(kept)}")
    if old.run.watch.notify is not None and resolved.run.watch.notify is None:
        console.say("note  watch.notify is not taken from a run folder: give it again to be told", "bold yellow")
    if old.run.save.mirror is not None and resolved.run.save.mirror is None:
        console.say("note  save.mirror is not taken from a run folder: give it again to go on with it", "bold yellow")
    if lost := set(old.run.track.to) - set(resolved.run.track.to):
        again = f"--track.to {' '.join(old.run.track.to)}"
        console.say(
            f"note  {', '.join(sorted(lost))} is not taken from a run folder: give {again} to go on with it",
            "bold yellow",
        )
    for name in LENGTH:
        field = name.split(".")[1]
        before, now = getattr(old.run.train, field), getattr(resolved.run.train, field)
        if before != now:
            console.say(f"WARNING  {name}: {before} -> {now}; the schedule changes from here", "bold yellow")
    for name in ROUNDING:
        field = name.split(".")[1]
        before, now = getattr(old.run.train, field), getattr(resolved.run.train, field)
        if before != now:
            words = "the same result but for rounding, so from here on not bit-identical to before"
            console.say(f"WARNING  {name}: {before} -> {now}; {words}", "bold yellow")
    return resolved


def _tell_of_lost_start(run: RunDir, resolved: Resolved, console: Console) -> None:
    """Steps that nothing was saved of, and that were made with other settings."""
    from lamplighter.config import drift, read_dump

    try:
        changes = drift(read_dump(run.config).run, resolved.run) if run.config.exists() else []
    except LampError:  # damaged: it is written anew
        return
    if changes and any("train/loss" in record for record in read_lines(run.metrics)):
        words = f"nothing was saved of the earlier start of this run; it begins again, with other settings: {'; '.join(changes)}"
        console.say(f"WARNING  {words}", "bold yellow")


def _same_settings(run: RunDir, resolved: Resolved) -> bool:
    """Whether an earlier start of this run had the same settings: then steps that it made must come out again."""
    from lamplighter.config import ROUNDING, drift, read_dump

    try:
        old = read_dump(run.config).run if run.config.exists() else None
    except LampError:  # damaged, and said elsewhere
        return False
    if old is None or drift(old, resolved.run):
        return False
    names = [name.split(".")[1] for name in ROUNDING]
    return all(getattr(old.train, name) == getattr(resolved.run.train, name) for name in names)


def _refuse_drift(run: RunDir, old: Run, resolved: Resolved) -> None:
    """Settings that a resume may not change."""
    from lamplighter.config import drift, to_give_again

    changes = drift(old, resolved.run)
    if changes and (again := to_give_again(old, resolved)):
        why = f"code and addresses are never taken from a run folder ({'; '.join(changes)})"
        named = ", ".join(flag.split()[0].removeprefix("--") for flag in again)
        raise BadConfig(f"run {run.name} needs {named} given again", why, f"the same command with {' '.join(again)}")
    if changes:
        raise BadConfig(
            f"run {run.name} was started with other settings",
            "; ".join(changes),
            "give the old settings to go on, --run NAME for a new run, or --resume never to begin anew",
        )


def _refuse_newer_status(run: RunDir) -> None:
    """A folder that a newer version works with is not ours to write into."""
    found = version_of(read_status(run))
    if found > FORMAT:
        raise BadConfig(
            f"{run.path} has format {found}, and this version reads up to format {FORMAT}",
            "a newer version of lamplighter wrote it",
            "use that version, or begin anew with --resume never (the old folder is kept)",
            cause="newer_format",
        )


def _write_page(run: RunDir, console: Console) -> None:
    """report.html, however the run ended; a run that made no step has nothing to show."""
    if not run.metrics.exists():
        return
    try:
        from lamplighter.dash import report_page

        report_page.write(run)
    except OSError as error:  # a full disk: what was done is safe all the same
        console.say(f"WARNING  {run.path / 'report.html'} cannot be written: {error.strerror}", "bold yellow")


def _say_next(run: RunDir, settings: Run, console: Console, step: int) -> None:
    made = run.checkpoint(step)
    opens = "" if ":" in settings.model.family else " (opens with transformers as it is)"
    opens = " (a PEFT adapter)" if (made / "adapter_config.json").exists() else opens
    console.say(f"made: {made}{opens}, {run.report}")
    console.say(f"next: lamp generate {_to_generate(run, settings)}", "bold")
    console.say(f"  or: lamp checkpoints {run.address}", "bold")


def _to_generate(run: RunDir, settings: Run) -> str:
    """The words after `lamp generate`: a model of the user's own is built by code that is named again."""
    import shlex

    family = settings.model.family
    return f"{run.address} --model.family {shlex.quote(family)}" if ":" in family else run.address


def _say_whole_run(verb: str, words: list[str], flags: dict[str, Any], console: Console) -> None:
    """After --test: the same command without it, and what the plan says of it."""
    from lamplighter.config import parse_overrides, resolve
    from lamplighter.plan import render

    _, overrides = parse_overrides(words)
    whole = resolve(flags["preset"], flags["run_yaml"], overrides).run
    try:
        planned = render.estimate_of(whole, str(flags["runs_dir"]))
    except LampError:  # its length or its size is not known on paper: lamp plan looks at the data and says it
        planned = ""
    console.say(f"the whole run takes {planned}" if planned else "how long the whole run takes: lamp plan, same words")
    console.say(f"the whole run: {_same_command(verb, words, without=('--test',))}", "bold")
    if left_out := _left_out(words):
        console.say(left_out)


# ---------------------------------------------------------------- in the child


def train_child(folder: RunDir, request: dict[str, Any]) -> int:
    """From a config to a trained model."""
    with report.phase("config"):
        from lamplighter.config import load_dump

        run = load_dump(folder.config)
        if (count := int(os.environ.get("LAMP_NODES", "1"))) > 1:
            shard = run.train.shard if "LAMP_SHARED" in os.environ else "none"  # one checkpoint, into one folder
            run = replace(run, budget=run.budget.of_nodes(count), train=replace(run.train, shard=shard))
    from lamplighter.commands.start_up import prepare

    try:
        context, state = prepare(run, folder, request)
    except RuntimeError as error:
        if hasattr(error, "of_all_ranks"):  # a rank was lost before all had met: nobody has made a step yet
            error.of_all_ranks = True
        raise
    from lamplighter.train.loop import training  # loaded by prepare, after the data

    with training(context, state) as steps:
        for _ in steps:
            pass
    step = state.progress.step
    report.event("finished", step=step, path=str(folder.checkpoint(step)), tokens=state.progress.tokens)
    return DONE
