"""Check releases of vLLM, SGLang and Megatron-Core, and write the page of the compatibility matrix.

    python -m tests.matrix [--only vllm-0.31.0 megatron] [--install] [--page]

Each release has an environment of its own below `.cache/matrix`, and its tests are one process with a limited time. The results
file is written after every release, so that what was interrupted loses nothing.
"""

from __future__ import annotations

import argparse
import time

from benchmarks.results import commit
from tests.matrix.checks import PASSED, check
from tests.matrix.environments import NotInstalled, install, versions
from tests.matrix.page import PAGE, Row, load, pinned_names, save, text
from tests.matrix.releases import RELEASES, Release


def main() -> None:
    """Check the releases, the pinned ones first."""
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[], help="releases, such as vllm-0.31.0, or components")
    parser.add_argument("--install", action="store_true", help="only install the environments")
    parser.add_argument("--page", action="store_true", help="only write the page of the results that there are")
    args = parser.parse_args()
    known = {name for release in RELEASES for name in (release.name, release.component)}
    if unknown := [name for name in args.only if name not in known]:
        parser.error(f"--only {' '.join(unknown)}: not among {', '.join(sorted(known))}")
    chosen = [r for r in RELEASES if not args.only or {r.name, r.component} & set(args.only)]
    pinned = pinned_names()
    for release in [] if args.page else sorted(chosen, key=lambda r: r.name not in pinned):
        row = _checked(release, install_only=args.install)
        if row is not None:
            save(load() | {release.name: row})
            _say(row)
    if not args.install:
        PAGE.write_text(text(load(), pinned))


def _checked(release: Release, install_only: bool) -> Row | None:
    """Install and check one release; None if it is only installed."""
    started = time.monotonic()
    try:
        python = install(release)
    except NotInstalled as e:
        print(f"{release.name}: not installed: {e}", flush=True)
        return None if install_only else Row(release.name, {}, {}, str(e), 0, commit())
    if install_only:
        print(f"{release.name}: installed in {time.monotonic() - started:.0f} s", flush=True)
        return None
    started = time.monotonic()
    found = check(release, python)
    return Row(release.name, versions(python), found, "", round(time.monotonic() - started), commit())


def _say(row: Row) -> None:
    failed = {title: found.detail for title, found in row.checks.items() if found.result != PASSED}
    print(f"{row.name}: {len(row.checks) - len(failed)} of {len(row.checks)} passed in {row.seconds} s", flush=True)
    for title, detail in failed.items():
        print(f"    {title}: {detail}", flush=True)


if __name__ == "__main__":
    main()
