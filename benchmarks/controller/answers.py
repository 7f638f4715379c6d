"""Answers of a fake vLLM: token ids, log-probs, and the JSON of `/v1/completions` as vLLM 0.32 writes it.

Ids: 0 to 2 are special tokens, then come the printable ASCII characters, space and newline, the rest of the bytes, and pieces
of words. Only numpy is imported, so that the process of the servers starts at once.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

VOCABULARY = 60_000
SPECIAL = ("<pad>", "<bos>", "<eos>")
END = 2  # id of <eos>
_ASCII = [*(chr(code) for code in range(33, 127)), " ", "\n"]
_BYTES = 256
FIRST_PIECE = len(SPECIAL) + _BYTES
SPREAD = 0.7  # sigma of the log-normal lengths
_HEAD = b'{"id":"cmpl-1","object":"text_completion","created":1,"model":"policy","choices":['
_TAIL = (
    b'],"service_tier":null,"system_fingerprint":null,"usage":{"prompt_tokens":1,"total_tokens":1,"completion_tokens":1,'
    b'"prompt_tokens_details":null},"prompt_logprobs":null,"kv_transfer_params":null}'
)


def token_texts() -> list[str]:
    """Return the text of each token, by id. Pieces of words have four characters on average, as tokens of English have."""
    draw = random.Random(0)
    pieces: dict[str, None] = {}
    while len(pieces) < VOCABULARY - FIRST_PIECE:
        word = "".join(draw.choices("etaoinshrdlucmfwypvbgkjqxz", k=draw.choice((2, 3, 3, 4, 4, 5, 7))))
        pieces[draw.choice((" ", "")) + word] = None
    return [*SPECIAL, *_ASCII, *["\N{REPLACEMENT CHARACTER}"] * (_BYTES - len(_ASCII)), *pieces]


def write_tokenizer(folder: Path) -> None:
    """Write the tokenizer of these ids: byte-level BPE without merges, which encodes byte by byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    own = {" ": "\u0120", "\n": "\u010a"}  # how byte-level BPE writes these two
    texts = ["".join(own.get(sign, sign) for sign in text) for text in token_texts()]
    used = {own.get(sign, sign) for sign in _ASCII}
    rest = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - used)
    texts[len(SPECIAL) + len(_ASCII) : FIRST_PIECE] = rest
    tokenizer = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(texts)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    named = dict(zip(("pad_token", "bos_token", "eos_token"), SPECIAL, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(folder)


def lengths(count: int, mean: float, cap: int, draw: np.random.Generator) -> np.ndarray:
    """Return log-normal lengths whose mean is `mean` after those above `cap` were cut off; int64 [count]."""
    shape = np.random.default_rng(0).lognormal(0, SPREAD, 100_000)
    low, high = mean / 10, mean * 10
    for _ in range(40):
        scale = (low * high) ** 0.5
        low, high = (low, scale) if np.minimum(shape * scale, cap).mean() > mean else (scale, high)
    return np.clip((draw.lognormal(0, SPREAD, count) * scale).astype(np.int64), 8, cap)


def boxed(number: int) -> list[int]:
    """Return the ids of an answer in a box, one token for each character."""
    return [len(SPECIAL) + _ASCII.index(sign) for sign in f"\nThe answer is \\boxed{{{number}}}"]


@dataclass(frozen=True)
class SampledAnswer:
    """One sample: int32 ids that end with END, and fp32 log-probs in nats."""

    ids: np.ndarray
    logprobs: np.ndarray


def sample_answers(count: int, mean: float, cap: int, seed: int = 0) -> list[SampledAnswer]:
    """Return random samples, each with a boxed number."""
    draw = np.random.default_rng(seed)
    found = []
    for number in lengths(count, mean, cap, draw).tolist():
        tail = [*boxed(int(draw.integers(1000))), END][-number:]
        ids = np.concatenate((draw.integers(FIRST_PIECE, VOCABULARY, number - len(tail)), tail)).astype(np.int32)
        logprobs = -draw.exponential(0.35, number)
        logprobs[draw.random(number) < 0.6] *= 1e-3
        found.append(SampledAnswer(ids, logprobs.astype(np.float32)))
    return found


def json_choice(answer: SampledAnswer, texts: Sequence[str]) -> tuple[bytes, bytes]:
    """Return a sample as vLLM's JSON: the part between its index and the prompt's ids, and the part after them."""

    def dump(value: object) -> str:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))

    ids, logprobs = answer.ids.tolist(), answer.logprobs.tolist()
    tokens = [texts[i] for i in ids]
    offsets = [0, *np.cumsum([len(token) for token in tokens[:-1]]).tolist()]
    inner = {
        "text_offset": offsets, "token_logprobs": logprobs, "tokens": tokens,
        "top_logprobs": [{token: x} for token, x in zip(tokens, logprobs, strict=True)],
    }  # fmt: skip
    text = f',"text":{dump("".join(tokens))},"logprobs":{dump(inner)},"finish_reason":"stop","stop_reason":null'
    return f'{text},"token_ids":{dump(ids)},"prompt_logprobs":null,"prompt_token_ids":'.encode(), b',"routed_experts":null}'


def json_body(choices: Sequence[tuple[bytes, bytes]], prompt_ids: Sequence[int]) -> list[bytes]:
    """Return the parts of an answer of `/v1/completions`."""
    prompt = json.dumps(list(prompt_ids), separators=(",", ":")).encode()
    parts = [_HEAD]
    for index, (before, after) in enumerate(choices):
        parts += [b'{"index":' if index == 0 else b',{"index":', str(index).encode(), before, prompt, after]
    return [*parts, _TAIL]
