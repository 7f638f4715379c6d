"""Traces that show what did not happen."""

from tests.mutants.exhibit import Exhibit

KIND = "traces"
EXHIBITS = (
    Exhibit(
        name="the_offset_of_a_clock_has_the_wrong_sign",
        source="our own: docs/traces.md (one clock)",
        bug=(
            "Processes of one machine share their clock, so that the offset is 0 up to noise, and its sign does not matter. On "
            "several machines the spans are twice as far apart as the clocks."
        ),
        cost="A stage seems to wait for another machine, or to begin before it has its input.",
        symbol="best_offset",
        old="reference - (sent + received) // 2",
        new="(sent + received) // 2 - reference",
        tests=("tests/unit/test_traces.py::test_the_offset_of_a_clock_is_off_by_less_than_it_says",),
    ),
    Exhibit(
        name="ranks_are_on_the_clock_of_rank_0",
        source="our own: docs/traces.md (one clock)",
        bug="Ranks measure their offset to rank 0, whose own offset to the service was left out. All ranks agree.",
        cost="Where rank 0 and the service differ, ranks train on rollouts before they are sampled, or long after that.",
        symbol="StepTracer._write",
        old="offset_to_rank_0(host, tracer.clock) + broadcast_result(self._service_offset, host)",
        new="offset_to_rank_0(host, tracer.clock)",
        tests=("tests/parallel/test_traces.py::test_a_trace_has_all_processes_on_one_clock",),
    ),
    Exhibit(
        name="a_request_lies_in_another_one",
        source="our own: docs/traces.md (rows of requests)",
        bug="A short request that falls into a longer one is drawn in its row, as if the longer one had made it.",
        cost="The decoding of one group seems to consist of other groups.",
        symbol="in_lanes",
        old="if not lane or (nests and lane[-1][1] and end <= lane[-1][0]):",
        new="if not lane or end <= lane[-1][0]:",
        tests=("tests/unit/test_traces.py::test_a_trace_of_threads_and_of_an_event_loop_is_valid",),
    ),
    Exhibit(
        name="a_name_of_a_moved_file_is_left",
        source="our own: the watchdog skipped the frames of a file by its old name",
        bug="The file was renamed, and the string that names it was not; nothing imports it, so nothing fails.",
        cost="A rank that hangs in a traced step is reported at the tracer's own line.",
        symbol="place_of",
        old="frame.f_code.co_name == TRACED",
        new='frame.f_code.co_filename.endswith("distributed/collective_spans.py")',
        tests=("tests/unit/test_traces.py::test_a_rank_that_hangs_in_a_traced_step_is_at_the_caller_of_its_collective",),
    ),
)
