"""Load the tokenizer of a Hugging Face model directory, and determine the stop tokens."""

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tepo_megatron.base.errors import CheckpointError, ConfigError, DataError
from tepo_megatron.base.foreign_files import eos_token_ids
from tepo_megatron.base.scratch import PrivateFolder
from tepo_megatron.base.storage import replace_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# each of these files can hold the vocabulary: fast tokenizers, SentencePiece, byte-level BPE
_VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


CLOCK_FILE = "template_clock"
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MONTHS = (
    *("January", "February", "March", "April", "May", "June", "July"),
    *("August", "September", "October", "November", "December"),
)


def load_tokenizer(model_path: str | Path, run_dir: Path | None = None) -> "PreTrainedTokenizerBase":
    """Return the tokenizer in the directory `model_path`. Nothing is downloaded.

    A chat template that asks for the date gets the time of the first call for this `run_dir`, which is stored there; without
    `run_dir`, the time of this call.

    Raises CheckpointError that names the directory, the missing or unreadable file, and the fix.
    """
    from transformers import AutoTokenizer  # imported late: it takes seconds, and only the rank that has the prompts needs it

    directory = Path(model_path)
    if not directory.is_dir():
        raise CheckpointError(
            f"{directory}: no such directory; model.path must name a local Hugging Face model "
            "(`hf download REPO --local-dir DIR` fetches one)"
        )
    if not any((directory / name).is_file() for name in _VOCABULARY_FILES):
        raise CheckpointError(
            f"{directory}: no tokenizer here ({', '.join(_VOCABULARY_FILES)} are all missing); "
            "copy the tokenizer files of the base model into it"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as e:  # transformers passes on whatever its parsers raise, even a bare Exception
        raise CheckpointError(
            f"{directory}: the tokenizer files cannot be read ({type(e).__name__}: {e}); copy them again from the base model"
        ) from e
    if "strftime_now" in str(tokenizer.chat_template):
        # a variable of the template hides the global of this name, which reads the clock, the time zone and the locale
        now = partial(_english_date, _stored_clock(run_dir))
        tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, strftime_now=now)
    return tokenizer


def _stored_clock(run_dir: Path | None) -> datetime:
    path = None if run_dir is None else run_dir / CLOCK_FILE
    if path is not None and path.exists():
        try:
            return datetime.fromisoformat(path.read_text().strip())
        except ValueError:
            raise CheckpointError(f"{path}: holds no time like 2025-01-31T12:00:00+00:00; write the start of the run") from None
    now = datetime.now(UTC).replace(microsecond=0)
    if path is not None:
        replace_file(path, now.isoformat().encode() + b"\n")
    return now


def _english_date(when: datetime, form: str) -> str:
    """Return `when.strftime(form)` in the language of the C locale."""
    day, month = _DAYS[when.weekday()], _MONTHS[when.month - 1]
    names = {"%A": day, "%a": day[:3], "%B": month, "%b": month[:3], "%h": month[:3], "%p": "AM" if when.hour < 12 else "PM"}
    fixed = {"%c": "%a %b %e %H:%M:%S %Y", "%x": "%m/%d/%y", "%X": "%H:%M:%S"}
    form = re.sub("%.", lambda code: fixed.get(code[0], code[0]), form)
    return when.strftime(re.sub("%.", lambda code: names.get(code[0], code[0]), form))


def tokenizer_digests(tokenizer: "PreTrainedTokenizerBase") -> dict[str, str]:
    """Return what a resumed run compares of the tokenizer of model.path: its vocabulary and rules, and its chat template."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    rules = json.dumps(sorted(tokenizer.get_vocab().items())) if fast is None else fast.to_str()
    parts = {"the tokenizer": rules, "the chat template": json.dumps(tokenizer.chat_template)}
    return {
        f"model.path: {name}": hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()
        for name, text in parts.items()
    }


def refuse_changes(before: Mapping[str, object], now: Mapping[str, object]) -> None:
    """Raise DataError for the first value on which the place in the data depends and that the checkpoint has otherwise."""
    for name, value in now.items():
        if name in before and before[name] != value:
            raise DataError(
                f"{name} was {before[name]} in the checkpoint and is {value}, so its place in the data is another one; resume "
                "with what it was, or start a new run"
            )


def text_functions(tokenizer: "PreTrainedTokenizerBase") -> tuple[Callable[[str], list[int]], Callable[[Sequence[int]], str]]:
    """Return the functions (encode, decode) between text and token ids, without special tokens in either direction."""

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False).input_ids)

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    return encode, decode


@contextlib.contextmanager
def decoder_file(tokenizer: "PreTrainedTokenizerBase") -> Iterator[str]:
    """Provide a file with which `tokenizers.Tokenizer` decodes like `text_functions`; "" if there can be none.

    There can be none for a tokenizer that is written in Python, or that edits the text after decoding.
    """
    fast = getattr(tokenizer, "backend_tokenizer", None)
    edits = getattr(tokenizer, "clean_up_tokenization_spaces", False) and type(getattr(fast, "model", None)).__name__ != "BPE"
    with PrivateFolder.create("decoder") as folder:
        path = str(folder.path / "tokenizer.json")
        if fast is not None and not edits:
            fast.save(path)
        yield "" if fast is None or edits else path


def stop_tokens(model_path: str | Path, tokenizer: "PreTrainedTokenizerBase", further: Sequence[int] = ()) -> tuple[int, ...]:
    """Return the sorted ids of the tokens that end a response.

    These are the model's end-of-sequence tokens (config.json), the tokenizer's, and `further`. generation_config.json is
    ignored: it is the model author's advice for chatting.

    Raises:
        ConfigError: An id of `further` is outside the model's vocabulary.
    """
    config = json.loads((Path(model_path) / "config.json").read_text())
    rows = config.get("vocab_size") or config["text_config"]["vocab_size"]
    if wrong := [token for token in further if token >= rows]:
        raise ConfigError(f"rollout.stop_token_ids={list(further)}: {wrong[0]} is no token of {model_path}, which has {rows}")
    stops = {*further, *eos_token_ids(config), tokenizer.eos_token_id} - {None}
    return tuple(sorted(stops))
