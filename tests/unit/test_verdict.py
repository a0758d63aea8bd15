"""Verdicts are pure: recorded moments in, a cause out; and the rules of acting on them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lamplighter.procs.nvml import GpuLook
from lamplighter.procs.procfs import ProcessLook, ThreadLook
from lamplighter.procs.stacks import OURS, Frame, Stacks, ThreadStack
from lamplighter.procs.waits import ThreadWait, Waits
from lamplighter.report import Verdict
from lamplighter.rundir import RunDir
from lamplighter.slot import Slot, differing_calls
from lamplighter.watch.diagnosis import Diagnosis
from lamplighter.watch.end_diagnosis import death_verdict, was_interrupted
from lamplighter.watch.evidence import GroupSample, from_json, to_json
from lamplighter.watch.process_tree import Exit, Process, ProcessTree, Snapshot
from lamplighter.watch.resources import disk_verdict, memory_verdict
from lamplighter.watch.restart_policy import RestartPolicy
from lamplighter.watch.source_lines import enclosing_loop
from lamplighter.watch.stall import StallDetector
from lamplighter.watch.tree_diagnosis import judge, phase_from_stack

SOURCE = """\
def forward(x):
    for token in range(10):
        x = x + token
    while True:
        x = x
    with lock:
        pass
"""


@pytest.fixture
def user_file(tmp_path: Path) -> str:
    path = tmp_path / "model.py"
    path.write_text(SOURCE)
    return str(path)


def moment(at: float, *, state: str = "S", cpu_s: float = 0.0, read: int = 0, syscall: str = "", compiling: int = 0, collecting: int = 0,
           phase: str = "train", span: str = "compute", children: tuple[ProcessLook, ...] = (), starved_ns: int = 0, cpu_ns: int = 0,
           waits_on: str = "") -> Snapshot:  # fmt: skip
    slot = Slot(pid=7, phase=phase, span=span, tick_ns=0, compiling=compiling, collecting=collecting, step=9)
    thread = ThreadLook(7, state, cpu_ns, starved_ns, "", syscall)
    main = ProcessLook(7, state, cpu_s, 10**8, 1, "python", "", syscall, read, 0, 0, waits_on, (thread,))
    return Snapshot(at, (Process(main, slot, 0, read), *(Process(child, None, 7) for child in children)), worked_at=0.0)


def stack_at(
    file: str, line: int, silent: bool = False, gil: bool | None = None, others: tuple[ThreadStack, ...] = ()
) -> Stacks:
    main = ThreadStack("MainThread", (Frame(file, line, "forward"),), gil)
    return Stacks((main, *others), "py-spy" if silent else "listener", silent)


def cause(window: list[Snapshot], stacks: list[Stacks], usual_s: float = 0.0) -> tuple[str, str, bool] | None:
    found = judge(GroupSample(window[0], window[-1], {7: tuple(stacks)}, usual_s))
    return (found.verdict.state, found.verdict.cause, found.provable) if found else None


def test_the_catalogue(user_file: str) -> None:
    here = [stack_at(user_file, 3)] * 2
    calm = [moment(2.0), moment(4.0)]
    compiler = ProcessLook(8, "R", 1.0, 0, 1, "cc1plus")
    busy = [moment(2.0, state="R"), moment(4.0, state="R", cpu_s=2.0, cpu_ns=2 * 10**9)]
    assert cause([moment(2, state="T"), moment(4, state="T")], here) == ("stopped", "stopped", False)
    assert cause([moment(2, state="t"), moment(4, state="t")], here) == ("waiting", "waiting", False), (
        "traced: looked at by us"
    )
    assert cause([moment(2, state="D"), moment(4, state="D")], here) == ("stuck", "d_state", False)
    assert cause([moment(2, state="D"), moment(4, state="D", read=10**6)], here) == ("slow", "slow_disk", False)
    assert cause([moment(2), moment(4, compiling=1)], []) == ("slow", "compile_slow", False)
    assert cause([moment(2), moment(4, children=(compiler,))], here) == ("slow", "compile_slow", False)
    assert cause([moment(2), moment(4, collecting=1, cpu_s=1.0)], here) == ("slow", "gc", False)
    assert cause([moment(2), moment(4, collecting=1)], here) == ("waiting", "waiting", False), "a finaliser sleeps"
    assert cause([moment(2), moment(4, read=80_000, waits_on="/data/x")], here) == ("slow", "slow_disk", False)
    asleep = [moment(2, syscall="nanosleep"), moment(4, syscall="nanosleep", read=80_000)]
    assert cause(asleep, here) == ("waiting", "sleep", False), "bytes beside a timer are not waited for"
    writing = [moment(2, syscall="write"), moment(4, syscall="write", read=80_000, waits_on="/data/x")]
    assert cause(writing, here) == ("slow", "slow_output", False)
    assert cause(busy, here) == ("slow", "python_loop", False)
    assert cause(busy, [stack_at(user_file, 5)] * 2) == ("slow", "livelock", False)
    assert cause(busy, [stack_at("/elsewhere.py", 5)] * 2) == ("slow", "running", False)
    assert cause(calm, [stack_at(user_file, 3, silent=True, gil=True)] * 2) == ("slow", "gil_hold", False)
    starved = [moment(2.0, state="R"), moment(4.0, state="R", cpu_s=0.3, cpu_ns=3 * 10**8, starved_ns=17 * 10**8)]
    assert cause(starved, here) == ("starved", "starved", False)
    moment_ago = [moment(3.2, state="R"), moment(4.0, state="R", cpu_ns=10**8, starved_ns=7 * 10**8)]
    assert cause(moment_ago, here) is None, "too early to tell"
    other = [stack_at(user_file, 7)] * 2
    keys = {judge(GroupSample(*starved, {7: tuple(stacks)}, 0.0)).key for stacks in (here, other)}  # type: ignore[union-attr]
    assert keys == {"starved"}, "said once, at whatever line it happens to be"
    reading = [moment(2.0), moment(4.0, read=10**6, starved_ns=17 * 10**8, cpu_ns=10**8)]
    assert cause(reading, here) == ("starved", "starved", False), "asked before bytes that move slowly"
    sleeping = [moment(2.0, syscall="clock_nanosleep"), moment(4.0, syscall="clock_nanosleep")]
    assert cause(sleeping, here) == ("waiting", "sleep", False)
    assert cause(calm, here) == ("waiting", "waiting", False)
    assert cause([moment(2), moment(4, read=9_000)], here) == ("waiting", "waiting", False), "a few bytes are no input"


def test_a_busy_card_and_a_thread_that_stands_still_are_a_wait_for_the_gpu(user_file: str) -> None:
    """Situation 2 on a GPU: a kernel that does not end is told from slow work, and neither is called alive or killed early."""
    here, there = stack_at(user_file, 7), stack_at(user_file, 3)
    card = GpuLook(0, "GPU-1a", "A card", util=1.0, processes=((7, 10**9),))

    def found(
        after_s: float, usual_s: float, stacks: list[Stacks], card: GpuLook, spins: bool = True, phase: str = "train"
    ) -> tuple[str, str] | None:
        used = {"state": "R", "cpu_s": 2.0, "cpu_ns": 2 * 10**9} if spins else {}
        window = moment(after_s - 2, state="R" if spins else "S"), moment(after_s, phase=phase, **used)  # type: ignore[arg-type]
        judged = judge(GroupSample(*window, {7: tuple(stacks)}, usual_s, cards=(card,)))
        return (judged.verdict.state, judged.verdict.cause) if judged else None

    hung, slow = ("waiting", "hung_kernel"), ("slow", "gpu_wait")
    assert found(6.0, 0.4, [here, here], card) == hung
    assert found(6.0, 0.4, [here, here], card, spins=False) == hung, "a wait that sleeps"
    assert found(4.0, 0.4, [here, here], card) == slow and found(30.0, 20.0, [here, here], card) == slow
    assert found(300.0, 20.0, [here, here], card) == hung and found(6.0, 0.0, [here, here], card) == hung
    assert found(60.0, 0.0, [here, here], card, phase="first step") == slow, "the first kernels of a run have longer"
    assert found(130.0, 0.0, [here, here], card, phase="first step") == hung
    assert found(6.0, 0.4, [here], card) is None, "one stack cannot stand still"
    assert found(6.0, 0.4, [there, here], card) == ("slow", "running"), "Python moves on"
    assert found(6.0, 0.4, [here, here], replace(card, util=0.2)) == ("slow", "running")
    other = replace(card, processes=((7, 10**9), (99, 10**9)))
    assert found(6.0, 0.4, [here, here], other) == ("slow", "running"), "somebody else may keep it busy"
    unknown = replace(card, processes=())
    assert found(6.0, 0.4, [here, here], unknown) == hung
    assert found(6.0, 0.4, [here, here], unknown, spins=False) == ("waiting", "waiting")
    busy = moment(4.0, state="R"), moment(6.0, state="R", cpu_s=0.4, cpu_ns=4 * 10**8, starved_ns=17 * 10**8)
    spinning = judge(GroupSample(*busy, {7: (here, here)}, 0.4, cards=(card,)))
    assert spinning is not None and spinning.verdict.cause == "hung_kernel", "no core would make that wait shorter"
    starved = judge(GroupSample(*busy, {7: (here, here)}, 0.4))
    assert starved is not None and starved.verdict.cause == "starved", "the control"
    kept = GroupSample(moment(4.0), moment(6.0), {7: (here, here)}, 0.4, cards=(card,))
    assert from_json(to_json(kept)).cards == (card,)
    policy = RestartPolicy("recover", patience_s=60)
    for cause, action in (("gpu_wait", "none"), ("hung_kernel", "restart")):
        verdict = Verdict("waiting", cause, "", "", since_s=700.0)
        assert policy.stuck(Diagnosis(verdict), 5, 4).action == action


def locked_sample(user_file: str, **other: object) -> GroupSample:
    """Two threads that wait for locks of this process; `other` changes what the second one does."""
    stacks = Stacks(
        (ThreadStack("MainThread", (Frame(user_file, 6, "forward"),), tid=7), ThreadStack("other", (), tid=8)),
        "listener",
    )
    waits = Waits(
        {
            7: (
                ThreadWait(7, "lock", peers=(7,), slices=5),
                ThreadWait(8, **{"kind": "lock", "peers": (7,), "slices": 5, **other}),
            )
        }
    )
    moments = [replace(one, processes=(replace(one.processes[0], look=replace(one.processes[0].look, each=tuple(
        ThreadLook(tid, "S", 0, 0, "", "futex", slices=5) for tid in (7, 8)))),)) for one in (moment(2.0), moment(4.0))]  # fmt: skip
    return GroupSample(moments[0], moments[1], {7: (stacks, stacks)}, 0.0, waits)


def test_a_deadlock_is_proved_by_what_every_thread_waits_for(user_file: str) -> None:
    found = judge(locked_sample(user_file))
    assert found is not None and (found.verdict.state, found.provable) == ("stuck", True)
    assert "nobody is left who could end it" in found.verdict.why and found.verdict.waits_for["kind"] == "lock"
    for alive in ({"timed": True}, {"anybody": True}, {"peers": (99,)}, {"kind": ""}, {"slices": 4}):
        found = judge(locked_sample(user_file, **alive))
        assert found is not None and (found.verdict.state, found.provable) == ("waiting", False), alive


def test_signal_handlers_count_in_a_script_that_tells_its_phases_too(user_file: str) -> None:
    """Ours end no wait; those of a script may, whether or not it uses lamplighter.phase."""
    sample = locked_sample(user_file)
    handling = {7: tuple(replace(one, handlers=(10,)) for one in sample.stacks[7])}
    assert judge(replace(sample, stacks=handling)).provable  # type: ignore[union-attr]
    script = Slot(pid=7, phase="tokenise", python="3.11.7")
    last = replace(sample.last, processes=tuple(replace(one, slot=script) for one in sample.last.processes))
    found = judge(replace(sample, last=last, stacks=handling))
    assert found is not None and (found.verdict.state, found.provable) == ("waiting", False)


def test_our_own_questions_are_no_bytes(user_file: str) -> None:
    """What a process writes while it answers us is left out when it is looked at; the rest counts."""
    tree = ProcessTree((), Path("/nowhere"))
    counted = [
        tree._moved_bytes(ProcessLook(7, read_bytes=n), Slot(answers=a))
        for n, a in ((0, 0), (70_000, 1), (70_500, 2), (71_000, 2))
    ]
    assert counted == [0, 0, 0, 500]


def outlived(detector: StallDetector, found: Diagnosis, gap_s: float) -> bool:
    detector.finding, detector.gap_s = found, gap_s
    detector.named.clear()
    return detector.unnamed_finding() is None


def test_what_ended_by_itself_is_said_again_only_when_it_lasts_longer(tmp_path: Path) -> None:
    detector = StallDetector(RunDir(tmp_path), ours=False)
    detector.counted = True
    evaluation = Diagnosis(Verdict("slow", "running", "", "", culprit={"file": "a.py", "func": "evaluate", "line": 3}))
    assert not outlived(detector, evaluation, 5.0)
    detector.outlived_s[evaluation.kind] = 15.0
    assert outlived(detector, evaluation, 15.0) and not outlived(detector, evaluation, 23.0)
    elsewhere = Diagnosis(Verdict("waiting", "lock", "", "", culprit={"file": "a.py", "func": "step", "line": 9}))
    assert not outlived(detector, elsewhere, 5.0), "a hang elsewhere is named as soon as ever"


def test_one_verdict_at_a_time(tmp_path: Path) -> None:
    detector = StallDetector(RunDir(tmp_path), ours=False)
    slow, io = (
        Diagnosis(Verdict("slow", cause, "", "", culprit={"file": "a.py", "line": 3})) for cause in ("running", "io")
    )
    proof = Diagnosis(Verdict("stuck", "deadlock", "", ""), provable=True)
    for found, at, stands in (
        (slow, 1.0, slow),
        (io, 2.0, slow),
        (io, 3.0, slow),
        (io, 3.6, io),
        (proof, 3.7, proof),
        (slow, 3.8, slow),
    ):
        detector._settle(found, at)
        assert detector.finding is stands, at


def test_loops_are_found_by_the_innermost(user_file: str) -> None:
    loop = enclosing_loop(user_file, 3)
    assert loop is not None
    assert (loop.kind, loop.line, loop.text) == ("for", 2, "range(10)")
    assert enclosing_loop(user_file, 6) is None
    assert enclosing_loop("/no/such/file.py", 3) is None


def finding(cause: str, since_s: float, provable: bool = False) -> Diagnosis:
    return Diagnosis(Verdict("stuck", cause, "", "", since_s=since_s, culprit={"file": "a.py", "line": 3}), provable)


def test_naming_is_not_killing() -> None:
    recovery = RestartPolicy("recover", patience_s=600)
    assert recovery.stuck(finding("livelock", 599), 50, 40).action == "none"
    assert recovery.stuck(finding("livelock", 601), 50, 40).action == "restart", (
        "the patience that was asked for, no more"
    )
    assert recovery.stuck(finding("sleep", 1e6), 50, 0).action == "none", "no way back, and it may end by itself"
    assert recovery.stuck(finding("deadlock", 3.0, provable=True), 50, 40).action == "none", "a short grace"
    assert "from the beginning" in RestartPolicy("recover").stuck(finding("deadlock", 5.0, provable=True), 50, 0).why
    assert RestartPolicy("report").stuck(finding("deadlock", 1e6, provable=True), 50, 40).action == "none"
    assert RestartPolicy("stop").stuck(finding("deadlock", 5.0, provable=True), 50, 40).action == "stop"


@pytest.mark.parametrize("cause", ["compile_slow", "gc", "slow_disk", "io", "starved", "stopped", "d_state"])
def test_healthy_but_slow_is_never_killed(cause: str) -> None:
    for policy in ("recover", "stop", "report"):
        assert RestartPolicy(policy, patience_s=1).stuck(finding(cause, 1e6, provable=False), 50, 40).action == "none"


def test_the_same_twice_is_a_bug_and_three_in_vain_are_enough() -> None:
    recovery = RestartPolicy("recover")
    assert recovery.stuck(finding("deadlock", 9, provable=True), 50, 40).action == "restart"
    assert recovery.stuck(finding("deadlock", 9, provable=True), 50, 50).action == "stop"
    deaths = RestartPolicy("recover")
    assert [deaths.dead("killed by SIGKILL", step, 40).action for step in (41, 42, 43, 44)] == ["restart"] * 3 + [
        "stop"
    ]
    progress = RestartPolicy("recover")
    assert [progress.dead("killed by SIGKILL", step, step).action for step in range(10, 90, 10)] == ["restart"] * 8


def test_the_first_rung_is_eager_once() -> None:
    recovery = RestartPolicy("recover")
    assert recovery.dead("killed by SIGSEGV", 0, 0, compiling=True).action == "fallback"
    assert recovery.eager
    assert recovery.dead("killed by SIGSEGV", 0, 0, compiling=True).action == "restart"
    asleep = replace(finding("compile_slow", 601), asleep=True)
    assert RestartPolicy("recover").stuck(asleep, 0, 0).action == "fallback"


def test_memory_that_grows_steadily_is_said_before_it_is_too_late() -> None:
    leak = [(float(t), 1e9 + 2e7 * t) for t in range(0, 60, 5)]
    found = memory_verdict(leak, left_bytes=4e9)
    assert found is not None
    assert "out of memory in about 3:20" in found.why
    assert memory_verdict(leak, left_bytes=1e12) is None, "not soon"
    step_up = [(float(t), 1e9 if t < 30 else 3e9) for t in range(0, 60, 5)]
    assert memory_verdict(step_up, left_bytes=4e9) is None, "a step up is no leak"
    assert memory_verdict([(float(t), 1e9) for t in range(0, 60, 5)], left_bytes=4e9) is None
    loaded = [(float(t), 1e9 + 1e8 * min(t, 45)) for t in range(0, 65, 5)]
    assert memory_verdict(loaded[:10], left_bytes=4e9) is not None
    assert memory_verdict(loaded, left_bytes=4e9) is None, "flat for 15 s: it has loaded what it needs"
    assert disk_verdict(10**9, 6 * 10**8) is not None
    assert disk_verdict(10**10, 6 * 10**8) is None


def rank(number: int, line: int, file: str, **fields: object) -> tuple[Process, Stacks]:
    slot = Slot(pid=number + 10, rank=number, world=2, step=5, **fields)
    return Process(ProcessLook(number + 10, "S", name="python"), slot), stack_at(file, line)


def test_a_tree_is_judged_by_who_is_behind_and_can_be_judged_again(user_file: str) -> None:
    behind, its_stack = rank(1, 3, user_file, coll_seq=6)
    waits, other_stack = rank(0, 7, user_file, coll_seq=7, in_coll=1, coll="all_reduce [4]", coll_at="train.py:9")
    exits = (Exit(99, -9, Slot(pid=99, worker=1, item="40..43"), 1.0, out_of_memory=True),)
    first, last = (Snapshot(at, (waits, behind), worked_at=0.0, exits=exits) for at in (2.0, 4.0))
    sample = GroupSample(first, last, {10: (other_stack,), 11: (its_stack,)}, 0.0)
    found = judge(sample)
    assert found is not None
    assert (found.verdict.state, found.verdict.cause) == ("waiting", "rank_late")
    assert (found.verdict.culprit["rank"], found.verdict.culprit["line"]) == (1, 3)
    assert judge(from_json(to_json(sample))) == found
    assert from_json(to_json(sample)) == sample
    death = death_verdict(exits[0])
    assert death is not None and death.cause == "worker_oom"


def test_ranks_that_all_receive_are_told_so(user_file: str) -> None:
    receiving = {"coll_seq": 7, "in_coll": 1, "coll": "recv [16] float32", "coll_at": "train.py:9"}
    pairs = [rank(number, 3, user_file, **receiving) for number in (0, 1)]
    processes = tuple(process for process, _ in pairs)
    stacks = {process.pid: (stack,) for process, stack in pairs}
    found = judge(GroupSample(*(Snapshot(at, processes, worked_at=0.0) for at in (2.0, 4.0)), stacks, 0.0))
    assert found is not None and (found.verdict.state, found.verdict.cause) == ("stuck", "rank_order")
    assert "none sends" in found.verdict.why and not found.provable


def test_a_launcher_that_looks_after_its_ranks_is_no_finding() -> None:
    """torchrun, before its first rank and after its last one."""
    frames = (Frame("/x/site-packages/torch/distributed/elastic/agent/server/api.py", 923, "_invoke_run"),)
    stacks = {7: (Stacks((ThreadStack("MainThread", frames, tid=7),), "listener", False),)}
    first, last = moment(2.0), moment(4.0)
    waits = Waits({7: (ThreadWait(7, "timer", timed=True),)}, {7: ()}, {}, {7: ()})
    assert judge(GroupSample(first, last, stacks, 0.0, waits)) is None


RECORDINGS = sorted((Path(__file__).parents[1] / "recordings").glob("*.json"))


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_recorded_runs_are_judged_as_they_were(path: Path, tmp_path: Path) -> None:
    """Real observations, kept by real runs (tests/zoo/record.py)."""
    record = json.loads(path.read_text())
    (tmp_path / "animal.py").write_text(record["source"])
    text = json.dumps(record["seen"]).replace("{folder}", str(tmp_path)).replace("{ours}/", OURS)
    sample = from_json(text)
    found = judge(sample)
    assert found is not None
    truth = record["truth"]
    assert (found.verdict.state, found.verdict.cause, found.provable) == (
        truth["state"],
        truth["cause"],
        truth["provable"],
    )
    assert found.verdict.culprit["line"] == truth["line"]
    assert from_json(to_json(sample)) == sample


def test_there_are_recordings() -> None:
    assert len(RECORDINGS) >= 7


def test_a_phase_is_inferred_from_the_stack() -> None:
    def stack(*frames: tuple[str, str]) -> ThreadStack:
        return ThreadStack("MainThread", tuple(Frame(file, 1, func) for file, func in frames))

    site = "/venv/lib/python3.11/site-packages"
    saving = stack((f"{site}/torch/serialization.py", "save"), ("/home/me/train.py", "main"))
    assert phase_from_stack(saving) == "saving"
    loading = stack((f"{site}/safetensors/torch.py", "load_file"), (f"{site}/transformers/x.py", "from_pretrained"))
    assert phase_from_stack(loading) == "loading weights"
    assert phase_from_stack(stack(("/base/lib/python3.11/http/client.py", "read"))) == "downloading"
    assert phase_from_stack(stack((f"{site}/torch/_inductor/codecache.py", "compile"))) == "compiling"
    assert phase_from_stack(stack(("/home/me/train.py", "main"))) == ""
    importing = ("<frozen importlib._bootstrap>", "_find_and_load")
    libraries = (
        (f"{site}/tokenizers/__init__.py", "<module>"),
        (f"{site}/torch/distributed/distributed_c10d.py", "<module>"),
    )
    assert phase_from_stack(stack(*libraries, importing, ("/home/me/train.py", "<module>"))) == "importing"


def test_an_interrupt_is_nobody_s_fault() -> None:
    assert was_interrupted(Slot(error="KeyboardInterrupt:  (/a.py:3)"))
    assert was_interrupted(Slot(error="item 84..87: KeyboardInterrupt:  (/a.py:3)"))
    assert not was_interrupted(Slot(error="item 84..87: ValueError: KeyboardInterrupt (/a.py:3)"))


def _both(*pairs: tuple[Process, Stacks]) -> GroupSample:
    processes = tuple(process for process, _ in pairs)
    stacks = {process.pid: (stack,) for process, stack in pairs}
    return GroupSample(*(Snapshot(at, processes, worked_at=0.0) for at in (2.0, 4.0)), stacks, 0.0)


def test_ranks_of_ours_in_different_collectives_are_a_bug_that_no_attempt_mends(user_file: str) -> None:
    """One in the user's own, one in ours; but a rank that waits in a meeting may have lost one that is still elsewhere."""
    own = rank(0, 3, user_file, coll_seq=7, in_coll=1, coll="barrier", coll_at="own.py:3", phase="train")
    ours = rank(1, 7, user_file, coll_seq=7, in_coll=1, coll="gradients", coll_at="ranks.py:9", phase="train")
    found = judge(_both(own, ours))
    assert found is not None and (found.verdict.state, found.verdict.cause) == ("stuck", "rank_order")
    assert "rank 0 in barrier at own.py:3; rank 1 in gradients at ranks.py:9" in found.verdict.why and found.provable
    named = replace(found, verdict=replace(found.verdict, since_s=9.0))
    assert RestartPolicy("recover").stuck(named, 6, 6).action == "stop", "the first time"
    assert RestartPolicy("report").stuck(named, 6, 6).action == "none"
    meets = rank(1, 7, user_file, coll_seq=7, in_coll=1, coll="rendezvous", coll_at="ranks.py:5", phase="train")
    found = judge(_both(own, meets))
    assert found is None or found.verdict.cause != "rank_order"


def test_calls_that_differ_are_read_from_what_ranks_said_last() -> None:
    one = Slot(coll_seq=7, coll="all_reduce [1000] float32", coll_at="own.py:3")
    other = Slot(coll_seq=7, coll="all_reduce [999] float32", coll_at="own.py:3")
    told = "rank 0 in all_reduce [1000] float32 at own.py:3; rank 1 in all_reduce [999] float32 at own.py:3"
    assert differing_calls({0: one, 1: other}) == ("rank_shape", told)
    for same in (
        one,
        Slot(coll_seq=8, coll="barrier", coll_at="own.py:9"),  # a collective further
        Slot(coll_seq=7, coll="", coll_at="own.py:9"),  # killed while it wrote
        Slot(coll_seq=7, coll="rendezvous", coll_at="ranks.py:9"),
    ):
        assert differing_calls({0: one, 1: same}) == ("", "")
    ours = {rank: Slot(coll_seq=7, coll=coll) for rank, coll in enumerate(("gradients", "agree"))}
    assert differing_calls(ours) == ("", ""), "ours are called by all alike: a rank may only be behind"


def test_a_stopped_process_that_another_rank_waits_for_is_a_stopped_rank(user_file: str) -> None:
    """It was alone, and has no number while the others come back."""
    stopped = Process(ProcessLook(10, "T", name="python"), Slot(pid=10, phase="train"))
    waits, stack = rank(1, 7, user_file, in_coll=1, coll="rendezvous", coll_at="ranks.py:5", phase="ranks")
    found = judge(_both((stopped, stack_at(user_file, 3)), (waits, stack)))
    assert found is not None and (found.verdict.cause, found.provable) == ("rank_sigstop", True)
    assert found.verdict.culprit["pid"] == 10
