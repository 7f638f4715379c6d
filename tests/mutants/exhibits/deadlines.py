"""Limits that are counted from one event and looked at after another, and waits that nothing ends."""

from __future__ import annotations

from tests.mutants.exhibit import Exhibit

EXHIBITS = (
    Exhibit(
        name="ready_but_looked_at_too_late",
        source="own: every run whose engine took longer than two minutes to give the first response",
        kind="deadlines",
        bug="A wait whose deadline has passed does not look whether the thing it waits for is there.",
        cost="Every real run ended in its first step; where only this process was stopped, right answers counted as 0.",
        symbol="GradingWorker._transfer",
        old="            if self._read():\n                return\n            raise",
        new="            raise",
        tests=("tests/unit/rewards/test_grading_pool.py::test_what_a_worker_wrote_counts_however_late_it_is_read",),
    ),
    Exhibit(
        name="a_late_event_loop_looks_no_more",
        source="own: the class of the late first answer, in every HTTP request and every limit of a user's function",
        kind="deadlines",
        bug="A limit passes while the event loop is held up, and the block is cancelled before it sees what has arrived.",
        cost="A server that answered in time counts as hung and is restarted; the samples on it are made again or lost.",
        symbol="time_limit",
        old="late > LATE_SECONDS",
        new="late > LATE_SECONDS * 1e9",
        tests=("tests/unit/test_waiting.py::test_a_late_event_loop_looks_once_more",),
    ),
    Exhibit(
        name="a_program_that_ended_is_out_of_time",
        source="own: the class of the late first answer, in the sandbox",
        kind="deadlines",
        bug="The time of a program counts as over although it has ended, because its grader was stopped meanwhile.",
        cost="Right programs count as 0, most of all on a busy machine.",
        symbol="_wait",
        old='why == "exited" and not events and now >= deadline',
        new='why == "exited" and now >= deadline',
        tests=("tests/unit/test_waiting.py::test_a_program_that_ended_in_time_is_no_timeout",),
    ),
    Exhibit(
        name="a_stopped_run_blames_the_start_it_waited_for",
        source="our own: starts that end by progress",
        kind="deadlines",
        bug="The time for which a process does nothing is read off a clock that goes on while the run itself is stopped.",
        cost="A run that a site suspends for ten minutes gives its starting servers up when it goes on.",
        symbol="StartProgress.idle_seconds",
        old="min(passed, 2 * LOOK_SECONDS)",
        new="passed",
        tests=("tests/unit/test_progress.py::test_a_pause_of_the_looker_is_no_idle_time",),
    ),
    Exhibit(
        name="a_stuck_service_is_waited_for",
        source="our own: starts that end by progress",
        kind="deadlines",
        bug="A service that has not spoken yet is taken for one that imports its modules, whatever it does.",
        cost="A service that is stuck in its start holds all GPUs until the job's time is over.",
        symbol="ServiceClient.receive",
        old="> max(STUCK_SECONDS, limit):",
        new="< 0:",
        tests=("tests/unit/controller/test_service.py::test_a_service_that_is_stuck_in_its_start_is_noticed",),
    ),
    Exhibit(
        name="a_stuck_grader_is_waited_for",
        source="our own: starts that end by progress",
        kind="deadlines",
        bug="A grading worker that is stuck in its start is waited for until the hard limit of starts.",
        cost="An hour of all GPUs.",
        symbol="GradingWorker.wait_ready",
        old="(idle := progress.idle_seconds()) > STUCK_SECONDS",
        new="(idle := progress.idle_seconds()) > START_SECONDS",
        tests=("tests/unit/rewards/test_grading_pool.py::test_a_worker_that_is_stuck_in_its_start_ends_the_run",),
    ),
)
