"""`tepo evaluate`: evaluate a model on benchmarks or on a user's files, with an engine started for it or on running servers."""

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from tepo_megatron.base.errors import CheckpointError, ConfigError
from tepo_megatron.base.scratch import PrivateFolder
from tepo_megatron.config import AnswerTermConfig, Benchmark, Config
from tepo_megatron.config.io import read_layers, with_overrides
from tepo_megatron.config.layers import Layers
from tepo_megatron.data import decoder_file, load_tokenizer, stop_tokens, text_functions, tokenizer_digests
from tepo_megatron.engines.engine import RolloutEngine
from tepo_megatron.engines.engine_api import LaunchSpec
from tepo_megatron.engines.engines import build_engine
from tepo_megatron.engines.servers.environment import check_cache
from tepo_megatron.evaluation.benchmarks import BENCHMARKS, Problems, load_benchmarks, load_files, rows_of, title_of
from tepo_megatron.evaluation.folder import (
    RECORD_FILE,
    TABLE_FILE,
    EvaluationFolder,
    compare_folders,
    read_record,
    samples_file,
)
from tepo_megatron.evaluation.results import Result, figures, paper_table
from tepo_megatron.evaluation.samples import sample_benchmark
from tepo_megatron.models.families import find_family, read_config
from tepo_megatron.models.hf_io import check_positions
from tepo_megatron.monitor.run_dir import CONFIG_FILE
from tepo_megatron.monitor.sinks import METRICS_FILE
from tepo_megatron.rewards.build import build_reward, check_reward
from tepo_megatron.rollout.chat import ChatFormat
from tepo_megatron.rollout.custom import open_sampler

# Nothing is trained, even if the config is for training: no ranks, and servers that keep the weights of the checkpoint.
_SERVES_ALONE = (
    *(f"--parallel.{axis}=1" for axis in ("tp", "pp", "vpp", "cp", "ep", "dp")),
    *("--parallel.sequence_parallel=false", "--rollout.only=true", "--rollout.colocate=false", "--rollout.replay=null"),
    *("--rollout.max_staleness=0", "--rollout.on_weight_update=finish"),
    *("--evaluation.every=0", "--evaluation.patience=null", "--checkpoint.keep_best=false"),
)

EngineFactory = Callable[[Config, LaunchSpec, Path], RolloutEngine]


@dataclass(frozen=True)
class EvaluationRequest:
    """Arguments of `tepo evaluate`."""

    checkpoint: Path  # model to evaluate; see `hf_model`
    # config, argv: YAML file of settings, and settings of the command line (`--key value`), which override those of the file
    config: str | None
    argv: Sequence[str]
    out: Path | None  # folder to write; None for a folder in `evaluations/` named after the checkpoint
    against: Path | None  # folder of another evaluation to compare with
    published: str  # rows of the paper to print; see `rows_of`
    data: Sequence[str] = ()  # files or datasets to evaluate, named as in `data.eval`


def settings(request: EvaluationRequest) -> Config:
    """Return the config of an evaluation: of the files alone if there are any, else of the benchmarks that it names, or of all
    seven. Without another config, files are evaluated with that of the checkpoint's run. Raises ConfigError.
    """
    source, argv = request.config, list(request.argv)
    if request.data and any(word.startswith("--evaluation.benchmark") for word in argv):
        raise ConfigError("--data takes the place of the benchmarks; leave out --evaluation.benchmark..., or --data")
    if source is None and request.data and (own := _config_of_run(request.checkpoint)) is not None:
        source, argv = str(own), ["--resume=false", "--overwrite=false", *argv]
    if source is None:
        layers = Layers()
        needed = {"name": "evaluation", "model": {"path": str(request.checkpoint)}, "data": {"train": "nothing"}}
        layers.add(needed, "tepo evaluate")
    else:
        layers = read_layers(source)
    cfg = with_overrides(layers, [*argv, *_SERVES_ALONE], source or "tepo evaluate")
    names = [] if request.data else cfg.evaluation.benchmarks or list(get_args(Benchmark))
    return replace(cfg, evaluation=replace(cfg.evaluation, benchmarks=names))


def _config_of_run(checkpoint: Path) -> Path | None:
    """Return the config of the run that a checkpoint belongs to; None if there is no such run."""
    folder = checkpoint.resolve()
    runs = (path for path in (folder, *folder.parents[:3]) if (path / METRICS_FILE).exists() and (path / CONFIG_FILE).exists())
    return next((path / CONFIG_FILE for path in runs), None)


def run(request: EvaluationRequest, tell: Callable[[str], None], make_engine: EngineFactory | None = None) -> Path:
    """Evaluate, print the tables and write the folder; return the folder. Raises TepoError if the settings, the checkpoint, the
    data, the engine or the grader fail.
    """
    cfg = settings(request)
    out = request.out or Path("evaluations") / "-".join(request.checkpoint.resolve().parts[-2:]).strip("/-")
    if (out / RECORD_FILE).exists() and not (cfg.overwrite or cfg.resume):
        raise ConfigError(
            f"{out} holds an evaluation already; give another --out, replace it with --overwrite true, or have it go on with "
            "--resume true"
        )
    if request.against is not None:
        read_record(request.against)
    out.mkdir(parents=True, exist_ok=True)
    with hf_model(request.checkpoint, out, tell) as model:
        cfg = replace(cfg, model=replace(cfg.model, path=str(model)))
        folder = _evaluate(cfg, request, out, tell, make_engine)
    grids = [
        figures(str(request.checkpoint), folder.results, folder.changes),
    ]
    if BENCHMARKS.keys() & folder.results:
        grids.append(paper_table("this model", folder.results, rows_of(request.published, str(request.checkpoint.resolve()))))
    if request.against is not None:
        grids.append(compare_folders(out, request.against))
    for grid in grids:
        grid.print()
    (out / TABLE_FILE).write_text("\n".join([f"# {request.checkpoint}", "", *(grid.markdown() for grid in grids)]))
    return out


def _evaluate(
    cfg: Config, request: EvaluationRequest, out: Path, tell: Callable[[str], None], make_engine: EngineFactory | None
) -> EvaluationFolder:
    keys, hf_config = list(cfg.lengths)[-1], read_config(cfg.model.path)  # of benchmarks, or of files if there are some
    lengths = {keys: cfg.lengths[keys]}
    check_positions(find_family(hf_config), hf_config, lengths)
    check_cache(cfg.rollout, Path(cfg.model.path), cfg.model.dtype, lengths)
    tokenizer = load_tokenizer(cfg.model.path, out)
    suite = load_benchmarks(cfg.evaluation, tokenizer, cfg.data.max_prompt_tokens)
    if request.data:
        check_reward(cfg.reward)
        suite = load_files(request.data, cfg, tokenizer, tell)
    stops = stop_tokens(cfg.model.path, tokenizer, cfg.rollout.stop_token_ids)
    encode, decode = text_functions(tokenizer)
    about = {"checkpoint": str(request.checkpoint), "its weights": weights_digest(Path(cfg.model.path)), "seed": cfg.seed}
    folder = EvaluationFolder(out, about | {"stop tokens": list(stops)} | tokenizer_digests(tokenizer))
    if cfg.resume:
        folder.refuse_changes(suite)
    todo = folder.take_over(suite) if cfg.resume else suite
    for name in folder.results:
        tell(f"{title_of(name)}: evaluated before, kept")
    if not todo:
        return folder
    launch = LaunchSpec(
        model_path=Path(cfg.model.path),
        max_model_len=lengths[keys],
        platform=cfg.platform,
        precision=cfg.rollout.server.precision or cfg.model.dtype,
        seed=cfg.seed,
    )
    with contextlib.ExitStack() as stack:
        log_path = out / "server.log"
        built = make_engine(cfg, launch, log_path) if make_engine else build_engine(cfg.rollout, launch, log_path)
        engine: RolloutEngine = stack.enter_context(built)
        chat = ChatFormat(tokenizer, encode, decode)
        opened = open_sampler(engine, cfg.rollout.function, encode, decode, limits=cfg.rollout.limits, chat=chat)
        sampler, sampler_events = stack.enter_context(opened)
        engine.start()
        terms = cfg.reward.terms if request.data else [AnswerTermConfig(type="math")]
        reward_cfg, file = replace(cfg.reward, terms=terms), stack.enter_context(decoder_file(tokenizer))
        reward = stack.enter_context(build_reward(reward_cfg, decode, file))
        engine.wait_ready()
        for problems in todo:
            tell(f"{problems.entry.title}: {_description(problems)}")
            samples = sample_benchmark(
                problems,
                sampler,
                reward,
                decode,
                stops,
                cfg.seed,
                max_failed_share=cfg.rollout.max_failed_share,
            )
            result = folder.add(problems, samples)
            tell(f"{problems.entry.title}: {_score(result)} {100 * result.accuracy.mean:.2f} %")
            if result.accuracy.mean == 0:
                tell(f"{problems.entry.title}: no sample was graded above 0; see each in {samples_file(out, problems.name)}")
            for event in (*engine.take_events(), *sampler_events()):
                tell(event)
    return folder


def _score(result: Result) -> str:
    return f"avg@{result.samples}" if result.pass_at else "mean score"


def _description(problems: Problems) -> str:
    entry = problems.entry
    how = f"temperature {entry.temperature:g}" if entry.temperature else "greedy"
    size = f"{len(problems.prompts)} problems x {entry.samples}"
    return f"{size}, {how}, up to {problems.max_tokens} tokens, of {problems.source}"


@contextlib.contextmanager
def hf_model(path: Path, scratch: Path, tell: Callable[[str], None]) -> Iterator[Path]:
    """Yield a Hugging Face directory of the model.

    This is `path` itself, the `hf` folder in it (of a run, or of a checkpoint saved with checkpoint.hf), or the result of
    converting the Megatron checkpoint (the newest one of a run). A converted model is deleted on exit. Raises CheckpointError:
    something is missing, which the message names; or as `checkpoint.convert.exporting`.
    """
    for folder in (path, path / "hf"):
        if is_model(folder):
            yield folder
            return
    if not path.is_dir():
        raise CheckpointError(
            f"{path}: no such directory; give a Hugging Face model, a run, or a Megatron checkpoint "
            "(`hf download REPO --local-dir DIR` fetches a model)"
        )
    from tepo_megatron.checkpoint.convert.directories import megatron_directory

    checkpoint = megatron_directory(path / "checkpoints" if (path / "checkpoints").is_dir() else path)
    if not (checkpoint / ".metadata").exists():
        raise CheckpointError(
            f"{checkpoint}: neither a Hugging Face model (config.json and *.safetensors) nor a Megatron checkpoint (.metadata)"
        )
    if is_model(checkpoint / "hf"):
        yield checkpoint / "hf"
        return
    with PrivateFolder.create("converted", scratch) as converted:
        tell(f"{checkpoint} is converted to a Hugging Face model")
        _convert(checkpoint, converted.path / "hf")
        yield converted.path / "hf"


def is_model(folder: Path) -> bool:
    """Return whether the folder holds a config and weights."""
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def weights_digest(folder: Path) -> str:
    """Return a digest of the weights in a Hugging Face directory, whose files it reads once."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "blake2b").digest())
    return digest.hexdigest()


def _convert(checkpoint: Path, out: Path) -> None:
    """Convert the checkpoint on the CPU, even if the machine has a GPU."""
    from tepo_megatron.base.processes import quiet_upstream
    from tepo_megatron.dist.platform import activate

    quiet_upstream()
    activate("cpu")
    from tepo_megatron.checkpoint.convert.exporting import export_hf

    export_hf(checkpoint, out)
