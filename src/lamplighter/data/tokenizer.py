"""Text becomes token ids and back: train, load, encode, decode, save; the only home of the over-length policy.

In:  texts to train on, or a tokenizer on disk (tokenizer.json, GPT-2's vocab.json and merges.txt, or a sentencepiece file).
Out: a Tokenizer: exact ids, fast; files that transformers opens as they are.

Over-length policy: a text is never truncated here, whatever its file says; long documents are cut into windows later
(data/batches), so nothing is thrown away. Nothing is added either: no begin or end marks, and a text that happens to
contain "<|endoftext|>" stays a text. The token cache puts one end-of-text after each document, by its id.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from lamplighter import read_back, report
from lamplighter.data import sentencepiece_file
from lamplighter.data.token_cache.encoder import Encoder, Recipe
from lamplighter.errors import BadConfig, BadData, InputMissing
from lamplighter.rundir import human_bytes, write_atomic

END_OF_TEXT = "<|endoftext|>"
_KNOWN_ENDS = (END_OF_TEXT, "</s>", "<eos>", "<|end_of_text|>")
_ROLES = {
    **dict.fromkeys(("<|pad|>", "<pad>", "[PAD]", "<|padding|>"), "pad_token"),
    **dict.fromkeys(("<s>", "<bos>", "<|startoftext|>", "<|begin_of_text|>"), "bos_token"),
    **dict.fromkeys(("<unk>", "<|unk|>", "[UNK]"), "unk_token"),
    **dict.fromkeys(("<mask>", "<|mask|>", "[MASK]"), "mask_token"),
    **dict.fromkeys(("<sep>", "[SEP]"), "sep_token"),
    **dict.fromkeys(("<cls>", "[CLS]"), "cls_token"),
}
_DOCUMENT_MARK = b"\xff"  # never a byte of UTF-8
_PROBE = (
    "The lamp-lighter's 1,837 lamps: it's LIT, they'll say; don't   wait!\r\n\r\n\tif x_1 == 'a':\n        return  {}\n"
    " naïve £5 œuvre — “quote” … e\u0301 Ünïcödé Ελλάδα Россия 日本語 한국어 العربية हिन्दी "
    "🙂👩‍👩‍👧\u200d\u00a0\u3000\x07 https://example.org/?q=%20&r=3.14159 ##x ▁y  \n \n\n  end "
)


@dataclass(frozen=True)
class EncodedTexts:
    """Many texts in one array: text i is ids[offsets[i]:offsets[i + 1]]."""

    ids: np.ndarray[Any, np.dtype[np.uint32]]
    offsets: np.ndarray[Any, np.dtype[np.int64]]


class Tokenizer:
    """Encodes by gigatoken where its ids are exact, else by tokenizers; decodes; saves itself."""

    def __init__(self, content: dict[str, Any], end_name: str, files: dict[str, bytes] | None = None) -> None:
        self.content, self.end_name, self.files = content, end_name, files or {}
        self._reference = tokenizers.Tokenizer.from_str(json.dumps(content))
        self._reference.no_truncation()
        self._reference.no_padding()
        self._reference.encode_special_tokens = True
        if content.get("decoder") is None and (prefix := content["model"].get("continuing_subword_prefix")):
            self._reference.decoder = decoders.WordPiece(prefix=prefix, cleanup=False)
        vocab = self._reference.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocab.values()) + 1
        self.end_of_text: int = vocab[end_name]
        self.added: dict[int, str] = {token["id"]: token["content"] for token in content.get("added_tokens", [])}
        self._bytes = _token_bytes(vocab, self.added) if _is_byte_level(content) else None
        self._fast: Any = None
        self.backend_reason = "its ids are those of tokenizers on a probe text"
        self.batch_bytes = 1 << 19  # of text at once: what the backend encodes in well under a second
        self._choose_backend()

    @property
    def is_byte_level(self) -> bool:
        return self._bytes is not None

    @property
    def backend(self) -> str:
        return "gigatoken" if self._fast else "tokenizers"

    def __str__(self) -> str:
        return f"{self.vocab_size:,} tokens, {self.content['model']['type']}, by {self.backend}"

    def _choose_backend(self) -> None:
        """gigatoken if it gives the very ids of tokenizers on a probe; else say why not."""
        try:
            import gigatoken

            fast = gigatoken.Tokenizer.from_json(json.dumps(_without_specials(self.content))).backend
            probe = _PROBE + " ".join(token["content"] for token in self.content.get("added_tokens", [])[:64])
            exact = fast.encode(probe).tolist() == self._reference.encode(probe, add_special_tokens=False).ids
            reason = "" if exact else "gigatoken gives other ids for a probe text"
        except (ImportError, RuntimeError, ValueError, TypeError, OSError) as error:
            reason = f"gigatoken cannot take this one ({str(error).splitlines()[0]})"
        if reason:
            self.backend_reason = reason
            report.note(f"this tokenizer runs on tokenizers, some 50 times slower: {reason}")
        else:
            self._fast, self.batch_bytes = fast, 1 << 23

    def fingerprint(self) -> str:
        """Changes with any id of any text."""
        text = json.dumps([self.content, self.end_of_text], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    # -- text to ids

    def recipe(self) -> Recipe:
        """For an encoder in another process."""
        return Recipe(json.dumps(_without_specials(self.content)) if self._fast else "", json.dumps(self.content))

    def encoder(self, threads: bool) -> Encoder:
        """For texts as bytes, in this process."""
        return Encoder(self._fast, self._reference, threads)

    def encode(self, text: str) -> np.ndarray[Any, np.dtype[np.uint32]]:
        """The ids of one text; nothing is cut or added."""
        if self._fast:
            return np.asarray(self._fast.encode(text), np.uint32)
        return self.encode_batch([text]).ids

    def encode_batch(self, texts: Sequence[str]) -> EncodedTexts:
        """The ids of many texts, in parallel; by gigatoken without a Python object per text or token."""
        if not texts:
            return EncodedTexts(np.zeros(0, np.uint32), np.zeros(1, np.int64))
        if self._fast:
            rows = self._fast.encode_batch(list(texts), parallel=True).layout
            return EncodedTexts(np.asarray(rows.content.data), np.asarray(rows.offsets.data))
        found = [row.ids for row in self._reference.encode_batch_fast(list(texts), add_special_tokens=False)]
        offsets = np.cumsum([0, *map(len, found)], dtype=np.int64)
        return EncodedTexts(np.fromiter((i for row in found for i in row), np.uint32, int(offsets[-1])), offsets)

    def ids_before_text(self) -> list[int]:
        """What the post-processor of the tokenizer itself puts before every text, such as Llama's <s>.

        What it may put behind a text is left out: nothing could be said after an end of text.
        """
        if self.content.get("post_processor") is None:
            return []
        plain = self._reference.encode("a", add_special_tokens=False).ids
        whole = self._reference.encode("a", add_special_tokens=True).ids
        at = next((n for n in range(len(whole)) if whole[n : n + len(plain)] == plain), 0)
        return list(whole[:at])

    @functools.cached_property
    def begin_of_text(self) -> int:
        """bos_token where the tokenizer names one, else the end of text."""
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            found = json.loads(self.files.get(name) or b"{}").get("bos_token")
            text = found.get("content") if isinstance(found, dict) else found
            by_name = {content: i for i, content in self.added.items()}
            if isinstance(text, str) and text in by_name:
                return by_name[text]
        return self.end_of_text

    # -- ids to text

    @property
    def special(self) -> dict[int, str]:
        """The control tokens, by id: text never becomes one of them."""
        marked = [token for token in self.content.get("added_tokens", []) if token.get("special")]
        return {token["id"]: token["content"] for token in marked}

    def token_bytes(self, i: int) -> bytes:
        """What one token stands for; of a tokenizer that is not byte-level, its name."""
        if self._bytes is not None:
            return self._bytes.get(int(i), b"")
        return str(self._reference.id_to_token(int(i)) or "").encode()

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids, special tokens included."""
        numbers = ids.tolist() if isinstance(ids, np.ndarray) else [int(i) for i in ids]
        if self._bytes is not None:
            return b"".join([self._bytes.get(i, b"") for i in numbers]).decode("utf-8", "replace")
        return self._reference.decode(numbers, skip_special_tokens=False)

    def decode_stream(self, ids: Iterable[int]) -> Iterator[str]:
        """Texts to print as the ids come, `decode(ids)` in pieces: half a character waits for its other half."""
        if self._bytes is None:
            yield from self._decode_by_neighbours(ids)
            return
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for i in ids:
            if text := decoder.decode(self._bytes.get(int(i), b"")):
                yield text
        if text := decoder.decode(b"", final=True):
            yield text

    def _decode_by_neighbours(self, ids: Iterable[int]) -> Iterator[str]:
        """Where a token's text depends on the one before (a space, half a character): what the two have more."""
        run: list[int] = []
        said = ""
        for i in ids:
            run.append(int(i))
            text = self.decode(run)
            if not text.startswith(said):  # a broken byte after whole ones: it begins a run of its own
                run, said, text = [int(i)], "", self.decode([int(i)])
            if text.endswith("\ufffd"):
                continue
            if text != said:
                yield text[len(said) :]
            is_byte = str(self._reference.id_to_token(int(i))).startswith("<0x")
            run, said = (run, text) if is_byte else ([int(i)], self.decode([int(i)]))
        if rest := self.decode(run)[len(said) :]:
            yield rest

    # -- to disk

    def save(self, folder: Path) -> None:
        """The files that AutoTokenizer.from_pretrained wants; those that it was loaded from are copied as they were."""
        folder.mkdir(parents=True, exist_ok=True)
        roles = self._roles() if not self.files else {"eos_token": self.end_name}
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **roles, "clean_up_tokenization_spaces": False}
        made: dict[str, Any] = {
            "tokenizer_config.json": config,
            "special_tokens_map.json": roles,
            "tokenizer.json": self.content,  # the last one: where it is, the others are
        }
        for name in self.files.keys() - made.keys():
            write_atomic(folder / name, self.files[name])
        for name, value in made.items():
            write_atomic(folder / name, self.files.get(name) or json.dumps(value, ensure_ascii=False, indent=1) + "\n")

    def _roles(self) -> dict[str, Any]:
        """What transformers wants to know of the control tokens of a tokenizer that was made here."""
        roles: dict[str, Any] = {"eos_token": self.end_name, "bos_token": self.end_name, "unk_token": self.end_name}
        others = []
        for name in self.special.values():
            if role := _ROLES.get(name):
                roles[role] = name
            elif name != self.end_name:
                others.append(name)
        return {**roles, **({"additional_special_tokens": others} if others else {})}


def first_difference(text: str, other: str) -> int:
    """The number of characters that two texts begin with in common."""
    pairs = enumerate(zip(text, other, strict=False))
    return next((n for n, (one, two) in pairs if one != two), min(len(text), len(other)))


# ---------------------------------------------------------------- reading a tokenizer


_MOST_BYTES = 1 << 28
FILE_NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


def load(path: Path) -> Tokenizer:
    """A tokenizer.json, a folder that holds one, or one with GPT-2's vocab.json and merges.txt, or a sentencepiece file."""
    folder = path if path.is_dir() else path.parent
    if not path.exists():
        raise InputMissing(f"no tokenizer at {path}", "no such file or folder", "check tokenizer.path")
    with report.phase("load tokenizer", unit="B") as p:
        files = {}
        for name in FILE_NAMES:
            if (folder / name).is_file():
                p.tick(0, str(folder / name))
                files[name] = _read(folder / name)
                p.tick(len(files[name]))
        if path.is_file() and path.name not in (*FILE_NAMES, *sentencepiece_file.NAMES):  # a tokenizer.json, renamed
            files["tokenizer.json"] = _read(path)
        content = _content(files, path)
        try:
            return Tokenizer(content, _find_end(content, files, path), files)
        except (LookupError, TypeError, AttributeError, ValueError, RecursionError, OverflowError) as error:
            raise _damaged(path, error) from error
        except Exception as error:
            if type(error) is Exception:  # what tokenizers raises for a file that it cannot read
                raise _damaged(path, error) from error
            raise


def ids_before_prompt(tokenizer: Tokenizer, folder: Path) -> list[int]:
    """What stands before a text that the model in this folder is to continue.

    A model that was trained here has read every document after the end of another. Any other model reads what transformers
    would give it: what its tokenizer puts before a text, which may be nothing.
    """
    is_ours = (folder / "manifest.json").is_file() or tokenizer.begin_of_text == tokenizer.end_of_text
    return [tokenizer.end_of_text] if is_ours else tokenizer.ids_before_text()


def _read(path: Path) -> bytes:
    """A file of a tokenizer; the largest known are 40 MB."""
    try:
        return read_back.read_whole(path, _MOST_BYTES)
    except OSError as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> BadData:
    return BadData(f"cannot read the tokenizer at {path}", f"{type(error).__name__}: {error}", "fetch or save it again")


def _content(files: dict[str, bytes], path: Path) -> dict[str, Any]:
    """The tokenizer.json, as it was or made from vocab.json and merges.txt."""
    try:
        if "tokenizer.json" in files:
            content = json.loads(files["tokenizer.json"])
            if not isinstance(content, dict) or "model" not in content:
                raise ValueError('it has no "model"')
            return content
        if "vocab.json" in files and "merges.txt" in files:
            lines = files["merges.txt"].decode().splitlines()
            merges = [line.split(" ") for line in lines if line and not line.startswith("#version")]
            return _byte_level_content(json.loads(files["vocab.json"]), merges)
    except (ValueError, RecursionError, TypeError, AttributeError, LookupError) as error:
        raise _damaged(path, error) from error
    folder = path if path.is_dir() else path.parent
    for one in sorted(folder.iterdir()):
        if one.suffix == ".tiktoken":
            raise sentencepiece_file.tiktoken_refused(str(path))
        if one.name in sentencepiece_file.NAMES or one.suffix == ".spm":
            return _converted(one, files)
    raise InputMissing(
        f"no tokenizer in {path}",
        "it has neither tokenizer.json, vocab.json with merges.txt, nor a sentencepiece file",
        "name the folder that the tokenizer was saved in",
    )


def _converted(path: Path, files: dict[str, bytes]) -> dict[str, Any]:
    """Of a sentencepiece file; `files` get what it has become, and no class that would read the file by itself again."""
    content = sentencepiece_file.convert(_read(path), str(path))
    report.note(f"{path.name} was converted to a tokenizer.json: the same ids as by sentencepiece on dirty text")
    files["tokenizer.json"] = json.dumps(content, ensure_ascii=False).encode()
    config = json.loads(files.get("tokenizer_config.json", b"{}"))
    files["tokenizer_config.json"] = json.dumps(
        {**config, "tokenizer_class": "PreTrainedTokenizerFast"}, indent=1
    ).encode()
    return content


def _find_end(content: dict[str, Any], files: dict[str, bytes], path: Path) -> str:
    """The name of the end-of-text token: as the configuration says, or one of the known names."""
    vocab = content["model"].get("vocab", {})
    names = set(vocab) if isinstance(vocab, dict) else {row[0] for row in vocab}
    names |= {token["content"] for token in content.get("added_tokens", [])}
    wanted = []
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        token = json.loads(files.get(name, b"{}")).get("eos_token")
        wanted.append(token.get("content") if isinstance(token, dict) else token)
    for end in (*wanted, *_KNOWN_ENDS):
        if end in names:
            return str(end)
    raise BadConfig(
        f"the tokenizer at {path} has no end-of-text token",
        f"neither its configuration nor its vocabulary names one of {', '.join(_KNOWN_ENDS)}",
        'put {"eos_token": "..."} into its tokenizer_config.json',
    )


def _without_specials(content: dict[str, Any]) -> dict[str, Any]:
    """For encoding text as text: no special token is recognised, nothing is cut or added."""
    kept = [token for token in content.get("added_tokens", []) if not token.get("special")]
    return {**content, "added_tokens": kept, "post_processor": None, "truncation": None, "padding": None}


# ---------------------------------------------------------------- byte-level BPE


def _alphabet() -> dict[int, str]:
    """GPT-2's letter for each byte: itself where it can be printed, else one from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


LETTER = _alphabet()
_BYTE = {letter: byte for byte, letter in LETTER.items()}


def _is_byte_level(content: dict[str, Any]) -> bool:
    decoder = content.get("decoder") or {}
    return bool(decoder.get("type") == "ByteLevel")


def _token_bytes(vocab: dict[str, int], added: dict[int, str]) -> dict[int, bytes]:
    """The bytes of each token; an added one, or a name with a letter outside the alphabet, stands for itself."""
    return {
        i: bytes(map(_BYTE.__getitem__, name)) if i not in added and all(c in _BYTE for c in name) else name.encode()
        for name, i in vocab.items()
    }


def _byte_level_content(
    vocab: dict[str, int], merges: Sequence[Sequence[str]], special: Sequence[str] = (END_OF_TEXT,)
) -> dict[str, Any]:
    """A tokenizer.json of GPT-2's kind."""
    added = [{"id": vocab[name], "content": name, "special": True} for name in special if name in vocab]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{**token, **flags} for token in added],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [list(pair) for pair in merges],
        },
    }


def _from_merges(merges: Sequence[Sequence[str]], special: Sequence[str] = ()) -> Tokenizer:
    """Ids as in GPT-2: the 256 bytes, then one per merge, then end-of-text; other control tokens after it."""
    ordinary = dict.fromkeys([*sorted(_BYTE), *(left + right for left, right in merges)])
    ends = tuple(dict.fromkeys([END_OF_TEXT, *special]))
    for name in ends:
        if name in ordinary or not name.strip():
            why = "it is a token of ordinary text already" if name in ordinary else "it holds nothing to see"
            raise BadConfig(f"{name!r} cannot be a control token", why, "choose a name such as <|im_start|>")
    vocab = {name: i for i, name in enumerate([*ordinary, *ends])}
    return Tokenizer(_byte_level_content(vocab, merges, ends), END_OF_TEXT)


def byte_level(special: Sequence[str] = ()) -> Tokenizer:
    """256 bytes and end-of-text: no training, nothing unknown."""
    return _from_merges([], special)


# ---------------------------------------------------------------- training


def train(texts: Iterable[str], vocab_size: int, special: Sequence[str] = ()) -> Tokenizer:
    """Byte-level BPE with GPT-2's pattern, from these texts: lossless for any text. data/sampling says which texts."""
    special = [name for name in dict.fromkeys(special) if name != END_OF_TEXT]
    count = vocab_size - 257 - len(special)
    if count < 0:
        least = f"256 bytes, end-of-text and {len(special)} control tokens" if special else "256 bytes and end-of-text"
        raise BadConfig(f"tokenizer.vocab_size is {vocab_size}", f"{least} need {vocab_size - count}", "set it higher")
    _from_merges([], special)  # what is wrong with their names is said before the work
    sample = [text.encode() for text in texts]
    size = sum(map(len, sample))
    if not size:
        raise BadData("no text to train a tokenizer on", "every document is empty", "check data.paths")
    with report.phase("learn the tokens", total=vocab_size, unit="tokens") as p:
        p.tick(0, f"{len(sample):,} texts, {human_bytes(size)}: pairs are counted and merged in one call")
        merges = _train_fast(sample, count) if count else []
        merges = _train_reference(sample, count) if merges is None else merges
        made = _from_merges(merges, special)
        p.set(made.vocab_size)
    if made.vocab_size < vocab_size:
        report.note(f"the text has no more than {made.vocab_size:,} tokens to offer; {vocab_size:,} were asked for")
    return made


def _train_fast(sample: list[bytes], count: int) -> list[list[str]] | None:
    """The merges by gigatoken; None where it cannot be had, or ran out of pairs (it then invents unused merges)."""
    try:
        import gigatoken
    except ImportError as error:
        report.note(f"the tokenizer is trained by tokenizers, some 10 times slower: {error}")
        return None
    data = _DOCUMENT_MARK.join(sample)
    with _printing_aside():
        _, pairs = gigatoken.train_bpe(data, count + 256, [], tie_breaking="huggingface", separator=_DOCUMENT_MARK)
    merges = [["".join(LETTER[byte] for byte in half) for half in pair] for pair in pairs]
    return merges if _last_is_used(merges, sample) else None


@contextlib.contextmanager
def _printing_aside() -> Iterator[None]:
    """gigatoken prints its progress, from C and past sys.stdout: said after all if it fails, else it is not for people."""
    kept = {fd: os.dup(fd) for fd in (1, 2)}
    with tempfile.TemporaryFile() as printed:
        for fd in kept:
            os.dup2(printed.fileno(), fd)
        try:
            yield
        except BaseException:
            printed.seek(0)
            os.write(kept[2], printed.read())
            raise
        finally:
            for fd, real in kept.items():
                os.dup2(real, fd)
                os.close(real)


def _last_is_used(merges: list[list[str]], sample: list[bytes]) -> bool:
    """Whether the last merge occurs in the sample: if it does, so did all before it when they were made."""
    if not merges or len({left + right for left, right in merges}) < len(merges):
        return False
    tokenizer = _from_merges(merges)
    with report.phase("check the last one", total=len(sample), unit="texts") as p:
        for begin in range(0, len(sample), 256):
            texts = [text.decode() for text in sample[begin : begin + 256]]
            if (tokenizer.encode_batch(texts).ids == tokenizer.end_of_text - 1).any():
                return True
            p.tick(len(texts))
    return False


def _train_reference(sample: list[bytes], count: int) -> list[list[str]]:
    """The merges by tokenizers: the reference, which stops where no pair is left."""
    model = tokenizers.Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=count + 256,
        special_tokens=[],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator((text.decode() for text in sample), trainer)
    return [list(pair) for pair in json.loads(model.to_str())["model"]["merges"]]
