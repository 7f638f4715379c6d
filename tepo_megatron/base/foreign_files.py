"""Files that others wrote: recognize one in the place of another by its first bytes, and read the stop tokens of a model."""

from collections.abc import Mapping
from typing import Any

_BEGINNINGS = (
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself; fetch that (`git lfs pull`, or `hf download`)"),
    (b"\xff\xfe\0\0", "encoded in UTF-32; convert it (`iconv -f UTF-32 -t UTF-8`)"),
    (b"\0\0\xfe\xff", "encoded in UTF-32; convert it (`iconv -f UTF-32 -t UTF-8`)"),
    (b"\xff\xfe", "encoded in UTF-16; convert it (`iconv -f UTF-16 -t UTF-8`)"),
    (b"\xfe\xff", "encoded in UTF-16; convert it (`iconv -f UTF-16 -t UTF-8`)"),
    (b"{\0", "encoded in UTF-16 without a mark; convert it (`iconv -f UTF-16LE -t UTF-8`)"),
    (b"\0{", "encoded in UTF-16 without a mark; convert it (`iconv -f UTF-16BE -t UTF-8`)"),
    (b"BZh", "compressed with bzip2; unpack it (`bunzip2`)"),
    (b"\xfd7zXZ", "compressed with xz; unpack it (`unxz`)"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd; unpack it (`unzstd`)"),
    (b"\x04\x22\x4d\x18", "compressed with lz4; unpack it (`unlz4`)"),
    (b"PK\x03\x04", "a zip archive; unpack it (`unzip`)"),
    (b"7z\xbc\xaf", "a 7z archive; unpack it (`7z x`)"),
    (b"ARROW1", "an Arrow file; write it as parquet (`datasets.Dataset.from_file(FILE).to_parquet(...)`)"),
)
SNIFFED_BYTES = 512


def foreign_kind(beginning: bytes) -> str | None:
    """Return what a file is and how to get the right one, by its first SNIFFED_BYTES; None if nothing foreign is recognized."""
    if beginning[257:262] == b"ustar":
        return "a tar archive; unpack it (`tar -xf`)"
    text = beginning.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        return "an HTML or XML page, as servers send for a wrong address or a missing login; download the file itself again"
    return next((kind for start, kind in _BEGINNINGS if beginning.startswith(start)), None)


def eos_token_ids(hf_config: Mapping[str, Any]) -> set[int]:
    """Return the end-of-sequence tokens of a config.json or generation_config.json."""
    text = hf_config.get("text_config") or {}  # of a model that also reads images
    values = (part.get("eos_token_id") for part in (hf_config, text))
    return {token for value in values for token in (value if isinstance(value, list) else [value]) if token is not None}
