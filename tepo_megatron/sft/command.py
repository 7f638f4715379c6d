"""`tepo sft CONFIG`: supervised fine-tuning with the model, layout and checkpoints of a training config."""

from collections.abc import Callable

from tepo_megatron.config.io import with_overrides
from tepo_megatron.launcher.launcher import inside_torchrun, run_rank
from tepo_megatron.launcher.preflight import preflight
from tepo_megatron.launcher.ranks import has_failed_for_good
from tepo_megatron.launcher.start import start
from tepo_megatron.observability import run_dir
from tepo_megatron.sft.settings import read_tree
from tepo_megatron.sft.worker import work
from tepo_megatron.utils.supervisor import is_restart


def sft(path: str, words: list[str], is_main: bool, say: Callable[[str], object]) -> int:
    """Run `tepo sft CONFIG [--key value ...]`; return the exit status."""
    if has_failed_for_good():
        return 1
    again = ["--resume", "true", "--overwrite", "false"] if is_restart() else []
    cfg = with_overrides(read_tree(path, [*words, *again]), [], path)
    if is_main and not is_restart():
        preflight(cfg, {"sft.max_tokens": cfg.sft.max_tokens})
    if inside_torchrun():
        if not is_main:
            return run_rank(cfg, work=work)
        with run_dir.claim(cfg):
            return run_rank(cfg, work=work)
    start(cfg, worker="tepo_megatron.sft.worker")
    say(f"fine-tuned model: {cfg.run_dir / 'hf'}" if cfg.export_hf else f"finished: {cfg.run_dir}")
    return 0
