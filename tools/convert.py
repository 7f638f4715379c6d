"""Import checkpoints from Hugging Face, export to it, verify, inspect. Usage: `python tools/convert.py COMMAND --help`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tepo_megatron.base.errors import TepoError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and return the exit status: 0, 1 for an error or a failed verification, 130 if interrupted."""
    args = _parser().parse_args(argv)
    try:
        return int({"import": _import, "export": _export, "verify": _verify, "inspect": _inspect}[args.command](args))
    except TepoError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="convert.py", description="Hugging Face models <-> Megatron-Core checkpoints, on a CPU."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    importing = commands.add_parser("import", help="Hugging Face -> Megatron (torch_dist, loads on any parallel layout)")
    importing.add_argument("--hf", required=True, metavar="DIR", help="a model directory, or an id of the Hugging Face hub")
    importing.add_argument("--out", required=True, type=Path, metavar="DIR", help="must not exist")
    exporting = commands.add_parser("export", help="Megatron -> Hugging Face (sharded safetensors)")
    exporting.add_argument(
        "--megatron", required=True, type=Path, metavar="DIR", help="a checkpoint of any layout; one you trust"
    )
    exporting.add_argument("--out", required=True, type=Path, metavar="DIR", help="must not exist")
    exporting.add_argument("--dtype", choices=["bf16", "fp16", "fp32"], help="of all tensors; default: as they are stored")
    exporting.add_argument("--fp8-blockwise", action="store_true", help="linear layers in e4m3, one scale per 128 x 128 block")
    exporting.add_argument("--hf", metavar="DIR", help="config and tokenizer, for a checkpoint that carries none")
    verifying = commands.add_parser("verify", help="compare all tensors bit by bit, and the logits of both models")
    verifying.add_argument("--hf", required=True, metavar="DIR", help="as of import")
    verifying.add_argument("--megatron", required=True, type=Path, metavar="DIR", help="a checkpoint you trust")
    verifying.add_argument("--text", help="what both models read; default: a built-in text")
    verifying.add_argument("--precision", choices=["fp32", "bf16"], default="fp32", help="of both models (default: fp32)")
    inspecting = commands.add_parser("inspect", help="what a checkpoint of either kind holds")
    inspecting.add_argument("directory", type=Path, metavar="DIR")
    inspecting.add_argument("--tensors", action="store_true", help="list them")
    return parser


def _import(args: argparse.Namespace) -> int:
    from tepo_megatron.checkpoint.convert.directories import hf_directory

    source = hf_directory(args.hf)
    _start_streaming()
    from tepo_megatron.checkpoint.convert.importing import import_hf

    start = time.monotonic()
    _tell(args.out, import_hf(source, args.out), start)
    return 0


def _export(args: argparse.Namespace) -> int:
    from tepo_megatron.checkpoint.convert.directories import hf_directory, megatron_directory

    checkpoint = megatron_directory(args.megatron)
    base = hf_directory(args.hf) if args.hf else None
    _start_streaming()
    import torch

    from tepo_megatron.checkpoint.convert.exporting import ExportFormat, export_hf

    dtypes = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    start = time.monotonic()
    _tell(args.out, export_hf(checkpoint, args.out, ExportFormat(dtypes[args.dtype], args.fp8_blockwise), base), start)
    return 0


def _verify(args: argparse.Namespace) -> int:
    from tepo_megatron.checkpoint.convert.directories import hf_directory, megatron_directory

    source, checkpoint = hf_directory(args.hf), megatron_directory(args.megatron)
    _start()
    from tepo_megatron.checkpoint.convert.verify import TEXT, verify

    verdict = verify(source, checkpoint, args.text or TEXT, args.precision)
    print(f"tensors: {verdict.tensors - len(verdict.differing)} of {verdict.tensors} bitwise equal")
    for name in verdict.differing[:10]:
        print(f"  differs: {name}")
    worst, logits = max(error for _, error in verdict.errors), verdict.errors[-1][1]
    print(
        f"relative error over {verdict.tokens} tokens in {args.precision}: "
        f"logits {logits:.1e}, largest of all layers {worst:.1e}"
    )
    print(f"same most likely token: {verdict.agreement:.1%}")
    if verdict.first_wrong_layer is not None:
        print(f"first that differs (above {verdict.tolerance:g}): {verdict.first_wrong_layer}")
    print("passed" if verdict.passed else "FAILED")
    return 0 if verdict.passed else 1


def _inspect(args: argparse.Namespace) -> int:
    from tepo_megatron.checkpoint.convert.dist_reader import inspect

    print("\n".join(inspect(args.directory).lines(args.tensors)))
    return 0


def _start() -> None:
    """Activate Megatron-Core on the CPU, even if the machine has a GPU."""
    from tepo_megatron.base.processes import quiet_upstream
    from tepo_megatron.dist.platform import activate

    quiet_upstream()
    activate("cpu")


def _start_streaming() -> None:
    """Like `_start`, for work that waits for memory and disk.

    It limits PyTorch to one thread, because other threads would only spin concurrently.
    """
    _start()
    import torch
    import torch._dynamo  # half a second, which the first operator on the meta device would take otherwise

    torch.set_num_threads(1)


def _tell(out: Path, nbytes: int, start: float) -> None:
    """Print the size, duration and speed of a conversion."""
    seconds = time.monotonic() - start
    print(f"{out}: {nbytes / 1e9:.2f} GB in {seconds:.2f} s ({nbytes / 1e9 / seconds:.2f} GB/s)")


if __name__ == "__main__":
    sys.exit(main())
