"""What a check found, and how it is told."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from tepo_megatron.errors import TepoError
from tepo_megatron.escaping import escaped

Verdict = Literal["pass", "warn", "fail", "skip"]


@dataclass(frozen=True)
class Finding:
    """check: what was looked at; said: what it is like, in one line; mend: what to do about it, unless all is well."""

    check: str
    verdict: Verdict
    said: str
    mend: str = ""

    def __str__(self) -> str:
        """Return it for a terminal: escaped, since models, datasets and servers are quoted, and no line but the first begins at
        the margin, so that nothing quoted looks like another finding.
        """
        mend = f"\n→ {self.mend}" if self.mend else ""
        indented = escaped(self.said + mend).replace("\n", f"\n{'':22}")
        return f"{self.verdict:5} {self.check:16}{indented}"


def found_by(check: str, look: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """What `look` finds; an error of ours that it raises is a failure of `check`, which says its mend itself."""
    try:
        yield from look()
    except TepoError as e:
        yield Finding(check, "fail", str(e))
