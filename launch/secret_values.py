"""Recognize secrets, by the name of a variable or by the value, so that no script and no log gets them."""

from __future__ import annotations

import re

_WORDS = {"SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL", "CREDENTIALS"}
_LAST_WORDS = {"TOKEN", "PASS", "AUTH", "PAT", "COOKIE", "PWD"}  # of MY_PASS, HF_AUTH, GITHUB_PAT
_PLACES = {"FILE", "PATH", "DIR", "FOLDER", "URL"}  # where a secret is, unless the value shows it
_VALUE = re.compile(
    r"\w://[^\s/:@]*:[^\s/@]+@"  # a password in a URL
    r"|(?<![\w-])(hf_|ghp_|gho_|github_pat_|glpat-|sk-|xox[abp]-|AKIA|ya29\.|eyJ[\w-]+\.eyJ)[\w-]{8}"  # well-known keys
    r"|-----BEGIN [A-Z ]*PRIVATE KEY|\bBearer\s+\S{8}"
)
_ASSIGNMENT = re.compile(r"(?<![\w-])([A-Za-z_]\w*)=(?![\s\"']*[$`])[\"']?[^\s\"';]")


def is_secret_name(name: str) -> bool:
    """Return whether a variable of that name usually holds a secret."""
    words = name.upper().strip("_").split("_")
    if words[-1] in _PLACES or words == ["PWD"]:
        return False
    return bool(_WORDS.intersection(words)) or words[-1] in _LAST_WORDS or words[-1].endswith("KEY")


def has_secret(text: str) -> bool:
    """Return whether a text holds what looks like a secret."""
    return _VALUE.search(text) is not None


def assigns_secret(line: str) -> bool:
    """Return whether a line of bash sets a variable of a secret's name to a literal value."""
    return any(map(is_secret_name, _ASSIGNMENT.findall(line)))
