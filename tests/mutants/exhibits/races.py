"""Memory that changes while somebody reads it."""

from tests.mutants.exhibit import Exhibit

KIND = "races"
EXHIBITS = (
    Exhibit(
        name="the_buffer_is_written_while_it_is_read",
        source="verl #6813 (a completion mark overwrote the first bytes of a weight buffer)",
        bug=(
            "A mark of completion was written over the first four bytes of the buffer in which weights were on "
            "their way: one row of the embedding became 1e17, and now and then a run sampled `!!!!`. Everything "
            "else was right, and most prompts never touch that row."
        ),
        cost="With sync.transport=ipc the next round is written over the one that servers still read.",
        symbol="IpcTransport.stage",
        old="buffer = self._buffer(number % 2)",
        new="buffer = self._buffer(0)",
        tests=("tests/parallel/test_weights.py::test_rounds_bound_the_memory_and_send_every_byte_once",),
    ),
    Exhibit(
        name="weights_change_in_mid_sampling",
        source="NeMo-RL #3839",
        bug=(
            "Weights were replaced while requests were running, so one response was sampled by two versions, some "
            "layers of one and some of the other within a forward pass. Text stays fluent."
        ),
        cost="With on_weight_update=finish the update begins while responses are being sampled.",
        symbol="PoolUpdates._begin",
        old=("        await self._until_idle()\n"),
        new="",
        tests=("tests/unit/rollout/test_fleet.py::test_weights_that_come_in_mid_generation_wait_for_what_is_being_sampled",),
    ),
    Exhibit(
        name="what_is_lent_is_not_copied",
        source="gpu_readiness.md F10 (the clone in each worker)",
        bug=("A module waits for its other parts with a view of memory that the trainer writes over two rounds later."),
        cost=(
            "With sync.transport=ipc q, k, v or gate and up that arrive in different rounds may be read after "
            "they were overwritten."
        ),
        symbol="TepoWeightTransferEngine.receive_weights",
        old="arrived = ((name, tensor.clone()) for name, tensor in arrived)",
        new="pass",
        tests=("tests/server/test_engines.py::test_an_update_replaces_all_weights",),
    ),
    Exhibit(
        name="the_second_guard_forgets_the_first",
        source="our own: trial 22 of make chaos (a guard was killed in the midst of a run)",
        bug="The guard of a server that is started again wrote its own record of shared memory over that of the killed guard.",
        cost="Shared memory of the first server stays until the machine is started again, and nobody knows whose it is.",
        symbol="SharedMemorySegments.__init__",
        old="{} if folder is None else scratch.recorded_segments(folder)",
        new="{}",
        tests=(
            "tests/unit/rollout/test_guard.py::test_segments_of_a_killed_guard_are_recorded_at_once_and_stay_in_the_record",
        ),
    ),
)
