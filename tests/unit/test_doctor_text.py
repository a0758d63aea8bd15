"""lamp doctor, data: files, tokenizer, cache and documents, each fault injected into real files."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from doctor_context import SICK, all_of, context, examine, line_of
from lamplighter.data.chat import rendering
from lamplighter.data.setup import obtain_tokens, open_text
from lamplighter.doctor import data_probes as probes
from lamplighter.doctor import sample_data
from lamplighter.doctor.data_probes import cache
from lamplighter.doctor.document_probe import documents
from lamplighter.doctor.probe import ProbeContext
from lamplighter.readers.local import LocalFile
from lamplighter.rundir import CACHE_NAME, identity
from running import shared

LETTER = "My dear Ned, the fog is so thick that I could not find the bridge. Number {}."


def letters(path: Path, count: int = 300, begin: int = 0) -> Path:
    rows = [
        json.dumps({"text": LETTER.format(n) + f" {n * 7919} lamps were lit at {n}."})
        for n in range(begin, begin + count)
    ]
    path.write_text("\n".join(rows) + "\n")
    return path


# ---------------------------------------------------------------- files


def test_sound_files_are_told_with_their_speed(tmp_path: Path) -> None:
    letters(tmp_path / "a.jsonl", 3000)
    found = all_of(probes.files, context(tmp_path, "--data.paths", str(tmp_path / "a.jsonl")))
    assert [one.level for one in found] == ["ok", "ok"]
    assert "3,000 documents" in found[0].what
    assert found[1].figures["mb_per_s"] > 0


def test_every_broken_file_is_named_and_the_others_are_still_read(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    letters(data / "good.jsonl")
    whole = gzip.compress(letters(tmp_path / "x.jsonl").read_bytes())
    (data / "torn.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    (data / "columns.jsonl").write_text('{"body": "no text here"}\n' * 20)
    found = all_of(probes.files, context(tmp_path, "--data.paths", str(data), "--data.format", "text"))
    faults = {Path(one.culprit["path"]).name: one for one in found if one.level == "fault"}
    assert set(faults) == {"torn.jsonl.gz", "columns.jsonl"}
    assert "cut short" in faults["torn.jsonl.gz"].what


def test_a_missing_and_an_empty_file_are_faults(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    for name, words in (("empty.txt", "empty file"), ("absent.txt", "no such file")):
        found = all_of(probes.files, context(tmp_path, "--data.paths", str(tmp_path / name)))
        assert [one.level for one in found] == ["fault"]
        assert words in found[0].what


def test_dirty_text_is_named_by_file_and_byte(tmp_path: Path) -> None:
    path = letters(tmp_path / "a.jsonl", 3000)
    data = path.read_bytes().splitlines(keepends=True)
    data[1500] = b'{"text": "bad \xff\xfe bytes"}\n'
    path.write_bytes(b"".join(data))
    found = examine(probes.files, context(tmp_path, "--data.paths", str(path)))["dirty_text"]
    assert found.level == "warn"
    assert found.culprit == {"path": str(path), "byte": sum(map(len, data[:1500]))}
    much = tmp_path / "much.txt"
    much.write_bytes(b"\xff\xfe\x00bad\n" * 500)
    assert examine(probes.files, context(tmp_path, "--data.paths", str(much)))["dirty_text"].level == "fault"


def test_a_large_file_is_read_at_its_end_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "WHOLE_BYTES", 10_000)
    monkeypatch.setattr(probes, "TAIL_BYTES", 4_000)
    path = letters(tmp_path / "a.jsonl", 3000)
    found = all_of(probes.files, context(tmp_path, "--data.paths", str(path)))
    assert "0 were read whole, of 1 the end was read" in found[0].what
    with open(path, "ab") as file:
        file.write(b'{"text": "torn' * 20)
    assert any(one.level != "ok" for one in all_of(probes.files, context(tmp_path, "--data.paths", str(path))))


def test_a_slow_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zoo 10: every block takes its time."""
    read = LocalFile.blocks

    def slowly(*arguments: Any) -> Iterator[bytes]:
        for block in read(*arguments):
            time.sleep(0.4)
            yield block

    monkeypatch.setattr(LocalFile, "blocks", slowly)
    path = letters(tmp_path / "a.jsonl", 1500)
    found = examine(probes.files, context(tmp_path, "--data.paths", str(path)))["slow_disk"]
    assert found.culprit["path"] == str(path)
    assert 0 < found.figures["mb_per_s"] < 1


def test_a_stream_that_blocks_in_next_is_named_by_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_data, "QUIET_S", 0.7)
    monkeypatch.chdir(SICK)
    who = context(tmp_path, "--data.source", "streams:blocks")
    found = examine(probes.files, who)["stream_stall"]
    assert found.level == "fault"
    assert found.culprit["line"] == line_of("streams.py", "the line that the doctor must name")
    assert found.culprit["item"] == 3
    assert "sleeps" in found.why


def test_a_source_that_raises_is_named_by_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(SICK)
    found = all_of(probes.files, context(tmp_path, "--data.source", "streams:raises"))[0]
    assert found.level == "fault"
    assert found.culprit["line"] == line_of("streams.py", "raise KeyError")


# ---------------------------------------------------------------- the tokenizer


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    path = letters(tmp_path / "a.jsonl")
    model, other = tmp_path / "model", tmp_path / "other"
    for folder, size in ((model, "300"), (other, "400")):
        words = ["--data.paths", str(path), "--tokenizer.kind", "bpe", "--tokenizer.vocab_size", size]
        who = context(tmp_path, *words)
        _, tokenizer = open_text(who.run, tmp_path / size)
        folder.mkdir()
        tokenizer.save(folder)
    (model / "config.json").write_text(json.dumps({"model_type": "gpt2", "vocab_size": 300}))
    words = ["--model.init_from", str(model), "--tokenizer.path", str(other), "--data.paths", str(path)]
    found = examine(probes.tokenizer, context(tmp_path, *words))
    assert found["token_range"].level == "fault"
    assert "400 tokens" in found["token_range"].what
    assert "knows 300" in found["token_range"].what
    assert found["tokenizer_differs"].settings == {"tokenizer.path": str(model)}
    assert not examine(probes.tokenizer, context(tmp_path, "--data.paths", str(path)))


def test_the_tokenizer_of_an_earlier_run_is_taken(tmp_path: Path) -> None:
    path = letters(tmp_path / "a.jsonl")
    who = context(tmp_path, "--data.paths", str(path), "--tokenizer.kind", "bpe", "--tokenizer.vocab_size", "300")
    open_text(who.run, who.runs_dir / CACHE_NAME)
    found = all_of(probes.tokenizer, who)
    assert [one.level for one in found] == ["ok"]
    assert "kept from before" in found[0].what


def test_a_tokenizer_without_an_end_is_a_fault(tmp_path: Path) -> None:
    path = letters(tmp_path / "a.jsonl")
    bad = tmp_path / "tok"
    bad.mkdir()
    (bad / "tokenizer.json").write_text(
        json.dumps({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "added_tokens": []})
    )
    found = all_of(probes.tokenizer, context(tmp_path, "--data.paths", str(path), "--tokenizer.path", str(bad)))
    assert found[0].level == "fault"


# ---------------------------------------------------------------- the cache


@pytest.fixture
def cached(tmp_path: Path) -> tuple[ProbeContext, Path]:
    """A context whose token cache is built."""
    path = letters(tmp_path / "a.jsonl")
    who = context(tmp_path, "--data.paths", str(path), "--data.workers", "1")
    root = who.runs_dir / CACHE_NAME
    source, tokenizer = open_text(who.run, root)
    return who, obtain_tokens(who.run, root, source, tokenizer)[0].folder


def test_a_sound_cache_is_read_and_left_as_it_is(cached: tuple[ProbeContext, Path]) -> None:
    who, _folder = cached
    before = {path: path.stat().st_mtime_ns for path in who.runs_dir.rglob("*")}
    assert not examine(cache, who)
    assert {path: path.stat().st_mtime_ns for path in who.runs_dir.rglob("*")} == before


def test_a_shard_that_is_cut_short_or_changed_is_found(cached: tuple[ProbeContext, Path]) -> None:
    who, folder = cached
    shard = next(path for path in sorted(folder.iterdir()) if path.suffix == ".bin" and "train" in path.name)
    data = shard.read_bytes()
    shard.write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:])
    found = examine(cache, who)
    assert found["shard_bitflip"].level == "fault"
    assert found["shard_bitflip"].culprit["path"] == str(shard)
    shard.write_bytes(data[: len(data) // 2])
    found = examine(cache, who)
    assert f"{len(data) // 2:,} bytes, expected {len(data):,}" in found["shard_truncated"].what


def test_an_id_beyond_the_vocabulary_is_found(cached: tuple[ProbeContext, Path], tmp_path: Path) -> None:
    who, folder = cached
    manifest = json.loads((folder / "manifest.json").read_text())
    shard = next(path for path in sorted(folder.iterdir()) if path.suffix == ".bin" and "train" in path.name)
    data = bytearray(shard.read_bytes())
    data[40:42] = (60_000).to_bytes(2, "little")
    shard.write_bytes(data)
    manifest["files"][shard.name]["sha256"] = hashlib.sha256(data).hexdigest()
    manifest.pop("check")
    (folder / "manifest.json").write_text(json.dumps(manifest))
    found = examine(cache, who)["token_range"]
    assert found.level == "fault"
    assert f"{shard}:20" in found.what
    assert "id 60,000" in found.why


def test_the_lock_of_a_dead_process_is_told_and_not_removed(cached: tuple[ProbeContext, Path]) -> None:
    who, folder = cached
    lock = folder / "lock"
    lock.write_text(json.dumps({**identity(), "pid": 2**22 - 3, "pid_start": 1, "t": time.time() - 600}))
    found = examine(cache, who)["dead_lock_file"]
    assert found.culprit == {"pid": 2**22 - 3, "path": str(lock)}
    assert lock.read_text()
    lock.write_text(json.dumps({**identity(), "t": time.time()}))
    assert "dead_lock_file" not in examine(cache, who)


def test_a_cache_of_older_text_is_never_taken_for_the_new(cached: tuple[ProbeContext, Path], tmp_path: Path) -> None:
    who, _ = cached
    letters(tmp_path / "a.jsonl", 310)
    found = examine(cache, who)["stale_cache"]
    assert "will not be used" in found.what
    must = context(tmp_path, "--data.paths", str(tmp_path / "a.jsonl"), "--data.cache", "require")
    assert examine(cache, must)["stale_cache"].level == "fault"


# ---------------------------------------------------------------- documents


def test_the_first_document_is_shown_as_tokens(tmp_path: Path) -> None:
    path = letters(tmp_path / "a.jsonl")
    found = all_of(documents, context(tmp_path, "--data.paths", str(path), "--data.seq_len", "64"))
    assert "M|y| |d|e|a|r" in found[0].what
    assert found[0].what.endswith("<|endoftext|>")


def test_padding_is_found_before_the_first_step_with_its_remedy(tmp_path: Path) -> None:
    """System C: 34 tokens in windows of 1024."""
    rows = [{"instruction": f"Add {n}", "output": f"It is {n * 3}."} for n in range(400)]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows))
    words = ["--data.paths", str(path), "--data.seq_len", "1024", "--data.template", "plain"]
    found = examine(documents, context(tmp_path, *words, "--data.packing", "windows", "--data.loss_on", "all"))
    waste = found["padding"]
    assert waste.level == "fault"
    assert waste.figures["padding_to_seq_len"] > 0.95
    assert waste.settings == {"data.packing": "packed"}
    assert found["loss_on_prompt"].settings == {"data.loss_on": "response"}
    assert "padding" not in examine(documents, context(tmp_path, *words))


def test_an_example_shows_what_is_learned_in_brackets(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"How many lamps at {n}?", "completion": f"There are {n}."} for n in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"prompt": "And now?", "completion": " "}]))
    who = context(tmp_path, "--data.paths", str(path), "--data.seq_len", "128", "--data.template", "plain")
    found = all_of(documents, who)
    assert "[There are 0.<|endoftext|>]" in found[0].what.replace("[ There", "[There")
    assert any(one.cause == "empty_answer" for one in found)
    cut = examine(documents, context(tmp_path, "--data.paths", str(path), "--data.seq_len", "16"))
    assert cut["eos_not_trained"].level == "fault"
    assert cut["eos_not_trained"].settings["data.seq_len"] >= 64


def test_another_template_than_the_models_own_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """System C: the prompts of another model."""
    monkeypatch.setattr(rendering, "Elsewhere", rendering.Here)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"Q {n}", "completion": f"A {n}"}) + "\n" for n in range(40)))
    who = context(tmp_path, "--data.paths", str(path))
    model = tmp_path / "model"
    model.mkdir()
    _, tokenizer = open_text(who.run, tmp_path / "c")
    tokenizer.save(model)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    own = "{% for m in messages %}<{{ m.role }}>{{ m.content }}" + tokenizer.end_name + "{% endfor %}"
    own += "{% if add_generation_prompt %}<assistant>{% endif %}"
    (model / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": own}))
    (model / "config.json").write_text(json.dumps({"model_type": "gpt2", "vocab_size": tokenizer.vocab_size}))
    words = ["--data.paths", str(path), "--model.init_from", str(model), "--data.seq_len", "128"]
    found = examine(documents, context(tmp_path, *words, "--data.template", "alpaca"))
    assert found["template_differs"].level == "fault"
    assert "template_differs" not in examine(documents, context(tmp_path, *words))


def test_overlap_repeats_and_too_many_epochs_are_found(tmp_path: Path) -> None:
    """System E: the validation stands in the training text, and 20 epochs where 3 were meant."""
    texts = [
        " ".join(f"word{(n % 60 * 31 + k * k) % 997} of {n % 60 * k}" for k in range(60)) + f" copy {n // 60}"
        for n in range(240)
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": one}) + "\n" for one in [*texts, *texts[:30]]))
    words = ["--data.paths", str(path), "--data.val_fraction", "0.1", "--train.steps", "200000"]
    found = examine(documents, context(tmp_path, *words))
    assert found["validation_overlap"].level == "fault"
    assert found["duplicates"].figures["duplicate_share"] > 0.1
    epochs = found["many_epochs"]
    assert epochs.figures["epochs"] > 20
    steps = epochs.settings["train.steps"]
    assert 2.5 < steps / 200000 * epochs.figures["epochs"] < 3.5


def test_real_rows_are_well(tmp_path: Path) -> None:
    path = shared("finetune", "instruction-data-short.json")
    who = context(tmp_path, "--data.paths", str(path), "--data.seq_len", "512", "--data.template", "plain")
    levels = {one.level for probe in (probes.files, probes.tokenizer, documents) for one in all_of(probe, who)}
    assert "fault" not in levels


def test_a_probe_writes_only_into_its_scratch(tmp_path: Path) -> None:
    path = letters(tmp_path / "a.jsonl")
    who = context(tmp_path, "--data.paths", str(path), "--tokenizer.kind", "bpe", "--tokenizer.vocab_size", "300")
    for probe in (probes.files, probes.tokenizer, cache, documents):
        all_of(probe, who)
    assert sorted(os.listdir(tmp_path)) == ["a.jsonl", "scratch"]
