"""The samples of a fleet that nothing happens to."""

import pytest

from tests.unit.rollout.test_fleet import PROMPTS, SAMPLING, fleet, ids


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    with fleet(tmp_path_factory.mktemp("one"), servers=1) as one:
        rollouts = one.generate(PROMPTS, SAMPLING, seed=7)
    assert [r.prompt_id for r in rollouts] == [p.id for p in PROMPTS for _ in range(3)]
    return ids(rollouts)
