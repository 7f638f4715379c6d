"""Results of tests that are better than the tests."""

from tests.mutants.exhibit import Exhibit

KIND = "test runs"
EXHIBITS = (
    Exhibit(
        name="flaky_tests_are_counted_as_passed",
        source="our own: tests/running",
        bug="A test that fails and passes when it is run again counts as passed, and nothing else is printed about it.",
        cost="A race of the product fails every tenth run of its users, and none of its tests.",
        symbol="Stream._take",
        old='self.outcomes[test] = "flaky"',
        new='self.outcomes[test] = "passed"',
        tests=("tests/unit/test_running.py::test_results_of_all_streams_are_one_line",),
    ),
    Exhibit(
        name="a_stream_that_ends_early_passes",
        source="our own: tests/running",
        bug="A test ended pytest with status 0. Nobody misses the results of the tests that did not run.",
        cost="The tests behind that one never run.",
        symbol="Session.end",
        old='if status != int("failed" in self.outcomes.values()) or len(self.outcomes) != self.collected:',
        new='if status != int("failed" in self.outcomes.values()):',
        tests=("tests/unit/test_running.py::test_results_of_all_streams_are_one_line",),
    ),
    Exhibit(
        name="a_hanging_test_leaves_its_children",
        source="our own: tests/running",
        bug="A test that takes too long fails, and the processes that it started run on.",
        cost="They hold ports, memory and cores that later tests need, and those fail for no reason of their own.",
        symbol="Guard._end_children",
        old="os.kill(pid, signal.SIGKILL)",
        new="os.kill(pid, 0)",
        tests=("tests/unit/test_running.py::test_what_hangs_fails_with_its_stacks_and_the_rest_goes_on",),
    ),
)
