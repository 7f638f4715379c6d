"""A config that says one thing, and a run that does another."""

from tests.mutants.exhibit import Exhibit

KIND = "settings"
EXHIBITS = (
    Exhibit(
        name="the_second_of_two_sections_wins",
        source="ArcticTraining #85, yacs #17",
        bug="YAML keeps the last of two equal keys, so a section that is written twice loses its first keys.",
        cost="The run trains with the default learning rate, and its config file names another one.",
        symbol="_mapping",
        old="if name in lines:",
        new="if False:",
        tests=("tests/unit/config/test_config.py::test_a_key_that_is_written_twice_is_refused",),
    ),
    Exhibit(
        name="numbers_of_yaml_1_1",
        source="own: issue 41",
        bug="PyYAML reads 010 as 8, 1_000 as 1000, 12:30 as 750, and on and off as booleans.",
        cost="A setting has a value that nobody wrote, such as a run with the name 8, or 8 steps.",
        symbol="_number",
        old="return int(text) if _INTEGER.fullmatch(text) else text",
        new="return int(loader.construct_yaml_int(node))",
        tests=("tests/unit/config/test_config.py::test_a_value_is_what_it_looks_like",),
    ),
    Exhibit(
        name="an_export_without_the_stop_tokens_of_its_run",
        source="own: issue 41",
        bug="An exported model names the stop tokens of the base model, not those of rollout.stop_token_ids.",
        cost="An engine samples on where the run's engine stopped, so the model answers otherwise than in training.",
        symbol="carry_over",
        old="if stop_token_ids:",
        new="if False:",
        tests=("tests/unit/models/test_convert.py::test_a_checkpoint_of_a_run_is_exported_without_its_optimizer",),
    ),
)
