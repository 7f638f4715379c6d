"""Call SkyPilot, and NeMo-Run's executor for its managed jobs. Only this file does; it needs `make launch-sky`.

Facts of NeMo-Run 0.11.1 and SkyPilot 0.14.1 that this file depends on: NeMo-Run's scheduler checks for the exact class of the
executor, so a subclass cannot be used in one of its experiments, and SkyPilot has moved the function with which the scheduler
prints a task. The executor supports environment variables, but neither secrets nor volumes nor a number of restarts after
errors. SkyPilot writes into the home folder at import, and sends usage statistics unless they are disabled.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.profile import Cluster
from tepo_megatron.errors import ConfigError
from tepo_megatron.utils.scratch import PrivateFolder

HOME = "/nemo_run"  # on the machines: NeMo-Run's copy of the files from `launch`
CODE, CONFIG = f"{HOME}/code", f"{HOME}/configs/config.yaml"
SETUP, RUN = f"{HOME}/scripts/setup.sh", f"{HOME}/scripts/run.sh"
_DEACTIVATE = "conda deactivate 2>/dev/null || true"  # leaves SkyPilot's own environment, as NeMo-Run does before the run
_INSTALL = "`make launch-sky` makes .venv-sky, whose python has it"


@dataclass(frozen=True)
class ManagedJob:
    """A managed job of SkyPilot.

    Attributes:
        number: Number of this submission from `home`.
        config: The run's resolved config, as YAML.
    """

    name: str
    home: Path
    number: int
    nodes: int
    cluster: Cluster
    setup: str
    run: str
    config: str


def render(job: ManagedJob) -> str:
    """Return the task as SkyPilot would get it, without the values of secrets, and its scripts. Nothing is left on disk."""
    with PrivateFolder.create("launch") as private:
        scratch = str(private.path)
        with _environment(Path(scratch), HOME=scratch, SKY_RUNTIME_DIR=scratch):
            executor = _executor(job, Path(scratch, "job"))
            task = _task(executor, job)
            from sky.utils import yaml_utils

            # for a task that was not read from a file this is everything except the values of secrets
            text = f"#==== task.yaml\n{yaml_utils.dump_yaml_str(task.to_yaml_config(use_user_specified_yaml=True))}"
        for name, script in ((SETUP, job.setup), (RUN, job.run)):
            text += f"\n#==== {name}\n{script}"
        return text.replace(str(Path(scratch, "job")), str(job.home))


def submit(job: ManagedJob) -> str:
    """Submit a job to SkyPilot's API server and return its number there. A local server is started if none is set.

    Raises:
        ConfigError: With SkyPilot's message.
    """
    with _environment(job.home):
        executor = _executor(job, job.home)
        with _reported("SkyPilot refused the job"):
            executor.package(executor.packager, job_name=job.name)
            number, _ = executor.launch(_task(executor, job))
    found = number[0] if isinstance(number, list) and number else number
    if not isinstance(found, int):
        raise ConfigError(f"SkyPilot gave the job no number ({number}); look for it with `sky jobs queue`")
    return str(found)


def _record(number: str) -> Any:
    """Return what SkyPilot's API server has about a job; None if it has nothing. Raise ConfigError."""
    with _environment(Path.cwd()), _reported(f"the state of managed job {number}"):
        import sky
        from sky.jobs.client import sdk

        records = sky.get(sdk.queue_v2(refresh=False, all_users=True, job_ids=[int(number)]))[0]
    return records[0] if records else None


def ended(number: str) -> bool:
    """Return whether a job has ended, or is unknown."""
    record = _record(number)
    return record is None or bool(record.status.is_terminal())


def status(number: str) -> str:
    """Return the state of a job as text."""
    record = _record(number)
    if record is None:
        return "unknown to SkyPilot's API server"
    why = f" ({record.failure_reason})" if record.failure_reason else ""
    return f"{record.status.value}{why}, restarts: {record.recovery_count}"


def logs(number: str, lines: int) -> str:
    """Return the last lines that the job's machines printed."""
    text = io.StringIO()
    with _environment(Path.cwd()), _reported(f"the logs of managed job {number}"):
        from sky.jobs.client import sdk

        sdk.tail_logs(job_id=int(number), follow=False, tail=lines, output_stream=text)
    return text.getvalue().rstrip()


def cancel(number: str) -> None:
    """Cancel a job after its written files have reached their buckets."""
    with _environment(Path.cwd()), _reported(f"cancelling managed job {number}"):
        import sky
        from sky.jobs.client import sdk

        sky.get(sdk.cancel(job_ids=[int(number)], graceful=True))


def _executor(job: ManagedJob, home: Path) -> Any:
    """Return NeMo-Run's executor, with the files of the job in place."""
    with _importing():
        import nemo_run as run
    cluster, sky = job.cluster, job.cluster.skypilot
    assert sky is not None, "checked before"
    title = f"{job.name}_{job.number}"
    executor = run.SkypilotJobsExecutor(
        infra=sky.infra,
        gpus=sky.gpu,
        gpus_per_node=cluster.gpus_per_node or None,
        cpus=sky.cpus,
        memory=sky.memory,
        disk_size=sky.disk_size,
        use_spot=sky.use_spot,
        network_tier=sky.network_tier,
        num_nodes=job.nodes,
        container_image=_image(cluster),
        storage_mounts={path: _given(vars(bucket)) for path, bucket in sky.storage.items()} or None,
        setup=f"{_DEACTIVATE}\nbash {SETUP}",
        env_vars=cluster.environment
        | cluster.network.variables
        | ({} if cluster.cache is None else cluster.cache_variables(home)),
        packager=run.GitArchivePackager(include_submodules=False, check_uncommitted_changes=True),
    )
    executor.assign(title, str(home / "experiments" / job.name / title), job.name, job.name)
    for path, content in ((SETUP, job.setup), (RUN, job.run), (CONFIG, job.config)):
        file = Path(executor.job_dir, Path(path).relative_to(HOME))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    Path(executor.job_dir, Path(CODE).name).mkdir(exist_ok=True)
    return executor


def _task(executor: Any, job: ManagedJob) -> Any:
    """Return NeMo-Run's SkyPilot task, completed with options that its executor lacks."""
    sky = job.cluster.skypilot
    assert sky is not None, "checked before"
    with _reported("SkyPilot refuses the task"):
        task = executor.to_task(job.name, ["bash", RUN])
        task.update_secrets({name: os.environ[name] for name in job.cluster.secrets})
        if sky.volumes:
            task.set_volumes(dict(sky.volumes))
        recovery = {"max_restarts_on_errors": sky.error_restarts}
        task.set_resources({resources.copy(job_recovery=dict(recovery)) for resources in task.resources})
    return task


def _image(cluster: Cluster) -> str | None:
    return None if cluster.container is None else f"docker:{cluster.container.image.removeprefix('docker:')}"


def _given(keys: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in keys.items() if value is not None}


@contextlib.contextmanager
def _environment(nemo_home: Path, **more: str) -> Iterator[None]:
    """Set variables that NeMo-Run and SkyPilot read at import. Those of `more` are restored afterwards."""
    before = {name: os.environ.get(name) for name in more}
    os.environ |= {"NEMORUN_HOME": str(nemo_home), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1", **more}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _importing() -> Iterator[None]:
    import logging
    import warnings

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # their dependencies warn about each other
            import sky  # noqa: F401

            yield
    except ModuleNotFoundError as e:
        raise ConfigError(f"{e.name} is not installed here; {_INSTALL}") from None
    logging.getLogger("nemo_run").setLevel(logging.WARNING)


@contextlib.contextmanager
def _reported(what: str) -> Iterator[None]:
    """Turn an error of SkyPilot or NeMo-Run into a ConfigError with a one-line message."""
    try:
        with _importing():
            yield
    except ConfigError:
        raise
    except Exception as e:
        raise ConfigError(f"{what}: {' '.join(str(e).split()) or type(e).__name__}") from None
