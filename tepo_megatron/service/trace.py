"""The service's side of a traced step: it records, merges what all processes wrote, and answers requests for a trace."""

from collections.abc import Callable
from pathlib import Path

from tepo_megatron.base.save_requests import TraceRequest, answer_trace, take_trace
from tepo_megatron.monitor.trace_file import SERVICE, TracePart, merge, part_paths, rank_name, step_folder, write_part
from tepo_megatron.monitor.tracer import SAME, tracer

MERGED_BYTES = 16 * 2**20  # of the files of a step that are merged while rank 0 waits, about a second


class ServiceTrace:
    """Makes the calls `trace.*` of rank 0."""

    def __init__(self, run_dir: Path, log: Callable[[str], object]) -> None:
        self._run_dir, self._log = run_dir, log
        self._asked = False  # whether the ranks are tracing steps on request

    def take_request(self) -> TraceRequest | None:
        """Return a request to trace steps, which the ranks then do; None without one."""
        request = take_trace(self._run_dir)
        self._asked |= request is not None
        return request

    def lost(self) -> None:
        """Stop, because the ranks are gone; answer the request that they were following."""
        tracer.discard()
        if self._asked:
            answer_trace(self._run_dir, "refused: the ranks were restarted before the steps were traced; ask again")
            self._asked = False

    def begin(self) -> None:
        """Begin to record a step."""
        tracer.begin()

    def end(self, step: int, ranks: int, answers: bool) -> None:
        """Stop, and merge what ranks wrote with what was recorded here. Larger files are left to `tepo trace RUN --step`."""
        recording = tracer.end()
        recording.spans = [span for span in recording.spans if span.name != "trace.end"]  # this call, which is not over
        write_part(self._run_dir, TracePart(SERVICE, 0, step, recording, SAME))
        folder = step_folder(self._run_dir, step)
        names = [SERVICE, *map(rank_name, range(ranks))]
        size = sum(path.stat().st_size for path in part_paths(self._run_dir, step, names))
        if size > MERGED_BYTES:
            text = (
                f"trace of step {step}: {size >> 20} MiB in {folder}; merge them with tepo trace {self._run_dir} --step {step}"
            )
        else:
            path, missing = merge(self._run_dir, step, names)
            text = f"trace of step {step}: {path}; open it in ui.perfetto.dev"
            if missing:
                text += (
                    f"; it lacks {', '.join(missing)}, on machines that do not share the run's folder: copy their files into "
                    f"{folder}, and merge them with tepo trace {self._run_dir} --step {step}"
                )
        self._log(text)
        if answers:
            self._asked = False
            answer_trace(self._run_dir, text)
