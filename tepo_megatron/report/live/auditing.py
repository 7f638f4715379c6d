"""Audit one token for the live page, with `tepo audit` in a process of its own."""

import asyncio
import contextlib
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

from tepo_megatron.audit.command import parse_token
from tepo_megatron.utils.escaping import escaped
from tepo_megatron.utils.processes import KILLED_SECONDS, die_with_parent

SECONDS = 1800.0  # limit since a click: an audit imports PyTorch, 10 minutes on a cold file system; then the page says so
MOST_BYTES = 256 << 10  # of what it prints


class TokenAudit:
    """Runs audits, one at a time."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._busy = asyncio.Lock()

    async def audit(self, run: Path, step: int, token: str) -> dict[str, Any]:
        """Return what `tepo audit` prints of a token: text, and whether everything agrees (None: it failed).

        Raises:
            ConfigError: `token` is no such text.
        """
        sequence, position = parse_token(token)
        if self._busy.locked():
            return {"text": "Another token is being audited; click again when it is done.", "agrees": None}
        async with self._busy:
            words = ["audit", str(run.absolute()), "--step", str(step), "--token", f"{sequence}:{position}"]
            try:
                async with asyncio.timeout(SECONDS):
                    text, status = await self._printed(words)
            except TimeoutError:
                return {"text": f"The audit took more than {SECONDS:g} s: tepo {' '.join(words)}", "agrees": None}
            finally:
                await self.close()
        agrees = {0: True, 1: False}.get(status)
        return {"text": escaped(text), "agrees": None if text.startswith("tepo: error") else agrees}

    async def _printed(self, words: list[str]) -> tuple[str, int]:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "tepo_megatron",
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
        assert self._process.stdout is not None
        data = b""
        while len(data) <= MOST_BYTES and (part := await self._process.stdout.read(MOST_BYTES)):
            data += part
        if len(data) > MOST_BYTES:  # it would wait for ever to print the rest
            self._process.kill()
        return data[:MOST_BYTES].decode(errors="replace"), await asyncio.wait_for(self._process.wait(), SECONDS)

    async def close(self) -> None:
        """End the audit under way, if there is one."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(TimeoutError):  # the kernel has not ended it yet
                await asyncio.wait_for(process.wait(), KILLED_SECONDS)
