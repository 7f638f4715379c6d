"""Make foreign text safe to print: output of a server, a model or a dataset must not control the terminal."""

import unicodedata

# Control and format characters (bidirectional overrides, zero-width), lone surrogates, line and paragraph separators.
_UNSAFE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
_KEPT = frozenset("\n\t")


def escaped(text: str) -> str:
    r"""Return `text` with every control character except line break and tab as \xNN, \uNNNN or \UNNNNNNNN."""
    if text.isascii() and text.replace("\n", "").replace("\t", "").isprintable():
        return text
    return "".join(_shown(character) for character in text)


def excerpt(text: str, limit: int = 200) -> str:
    """Return the beginning of `text`, on one line and escaped, for a message."""
    line = escaped(" ".join(text[: 4 * limit].split()))
    return line if len(line) <= limit and len(text) <= 4 * limit else line[:limit] + "..."


def _shown(character: str) -> str:
    if character in _KEPT or unicodedata.category(character) not in _UNSAFE:
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
