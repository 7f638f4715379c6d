"""`tepo sft CONFIG`: supervised fine-tuning with the model, layout and checkpoints of a training config."""

from collections.abc import Callable

from tepo_megatron.command.nodes import Nodes
from tepo_megatron.command.preflight import preflight
from tepo_megatron.command.start import start
from tepo_megatron.config.io import with_overrides
from tepo_megatron.data.sources import check_readable
from tepo_megatron.trainer.sft.settings import read_tree


def sft(path: str, words: list[str], nodes: Nodes, say: Callable[[str], object]) -> int:
    """Run `tepo sft CONFIG [--key value ...]`; return the exit status."""
    cfg = with_overrides(read_tree(path, words), [], path)
    if nodes.is_first:
        for source in filter(None, (cfg.sft.data, cfg.sft.eval)):
            check_readable(source)
        preflight(cfg, {"sft.max_tokens": cfg.sft.max_tokens})
    start(cfg, worker="tepo_megatron.trainer.sft.worker", nodes=nodes)
    say(f"fine-tuned model: {cfg.run_dir / 'hf'}" if cfg.export_hf else f"finished: {cfg.run_dir}")
    return 0
