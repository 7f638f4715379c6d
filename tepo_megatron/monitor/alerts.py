"""Alerts: rules over the records of steps that find early what goes wrong, and say what to do (`docs/alerts.md`).

A rule judges the records up to a step. It is raised when its condition has held in `hold` consecutive judged steps, and ends
after CLEAR judged steps without it. Steps that lack a value are not judged. The state is a function of the records alone, so
a resumed run and `tepo alerts` come to the same result.
"""

import itertools
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

Record = Mapping[str, float | None]
Condition = Callable[["RecordHistory"], bool | None]

KEY = "alert/"  # first part of the keys in a step's record: 1 while an alert is active, absent otherwise
WARM_UP = 5  # steps whose median a later value is compared with
CLEAR = 5  # judged steps without the condition, after which an alert ends
LATEST = 3  # steps over which a median or the largest value is taken
LEAST_SECONDS = 1.0  # not a limit: shorter steps are not judged by their times
# Why each number is what it is: docs/alerts.md
COLLAPSED, GAIN = 0.25, 0.05
MISMATCH_FLOOR, MISMATCH_GROWTH, NOISES = 2e-6, 4.0, 8.0
CLIPPED, CLIP_GROWTH, CLIPPED_ALL, CLIP_LITTLE, MOVED = 0.3, 1.5, 0.75, 0.005, 0.2
NOISE_SHARE, MASKED = 0.5, 0.01
LONGER, CUT_OFF = 3.0, 0.5
KEPT = 0.1
TAIL, IDLE, SYNC = 0.5, 0.3, 0.3


class RecordHistory:
    """The records of a run so far, as rules read them."""

    def __init__(self) -> None:
        self._first: dict[str, list[float]] = {}
        self._last: dict[str, deque[float]] = {}
        self.now: Record = {}

    def add(self, record: Record) -> None:
        """Take over the record of a step."""
        self.now = record
        for key, value in record.items():
            if value is not None and math.isfinite(value):
                first = self._first.setdefault(key, [])
                if len(first) < WARM_UP:
                    first.append(value)
                self._last.setdefault(key, deque(maxlen=LATEST)).append(value)

    def value(self, key: str) -> float | None:
        """Return the value of the last step; None if it was not measured."""
        value = self.now.get(key)
        return value if value is not None and math.isfinite(value) else None

    def start(self, key: str) -> float | None:
        """Return the median of the first WARM_UP values; None before they are there, and while they are the only ones."""
        first = self._first.get(key, [])
        return statistics.median(first) if len(first) == WARM_UP and self.value(key) is not None else None

    def noise(self, key: str) -> float:
        """Return the standard deviation of the first values around their trend: a model that learns at once is no noise.

        It is estimated by the median absolute deviation of the differences of successive values.
        """
        steps = [after - before for before, after in itertools.pairwise(self._first.get(key, []))]
        middle = statistics.median(steps) if steps else 0.0
        return 1.4826 * statistics.median(abs(step - middle) for step in steps) / math.sqrt(2) if steps else 0.0

    def recent(self, key: str) -> Sequence[float] | None:
        """Return the last LATEST values; None before there are as many, or if the last step has none."""
        last = self._last.get(key, ())
        return tuple(last) if len(last) == LATEST and self.value(key) is not None else None

    def latest(self, key: str) -> float | None:
        """Return the median of the last LATEST values; None where `recent` is None."""
        last = self.recent(key)
        return None if last is None else statistics.median(last)

    def share(self, key: str) -> float | None:
        """Return the part of the last step's seconds; None for steps shorter than LEAST_SECONDS."""
        part, total = self.value(key), self.value("seconds/total")
        return part / total if part is not None and total is not None and total >= LEAST_SECONDS else None


def _entropy_collapse(history: RecordHistory) -> bool | None:
    """Entropy that falls while the reward rises is how a policy learns; without a gain it is a collapse."""
    start, now = history.start("actor/entropy"), history.latest("actor/entropy")
    before, after = history.start("reward/mean"), history.latest("reward/mean")
    if start is None or now is None or before is None or after is None:
        return None
    return now < COLLAPSED * start and after < before + max(GAIN, 2 * history.noise("reward/mean"))


def _mismatch_growth(history: RecordHistory) -> bool | None:
    key = "rollout/logprob_diff_mean"
    start, now = history.start(key), history.value(key)
    if start is None or now is None:
        return None
    return now > max(MISMATCH_FLOOR, MISMATCH_GROWTH * start, start + NOISES * history.noise(key))


def _clip_zero(history: RecordHistory) -> bool | None:
    """Ratios of single steps scatter, so the largest of the last steps counts."""
    lows, highs, clipped = (history.recent(key) for key in ("tepo/ratio_p01", "tepo/ratio_p99", "loss/clip_fraction"))
    if lows is None or highs is None or clipped is None:
        return None
    return max(clipped) < CLIP_LITTLE and max(max(highs) - 1, 1 - min(lows)) > MOVED


def _clip_high(history: RecordHistory) -> bool | None:
    """A share of 30 to 65 % is usual for GSPO, whose range is narrow: so only growth counts, or nearly all tokens."""
    start, now = history.start("loss/clip_fraction"), history.latest("loss/clip_fraction")
    if start is None or now is None:
        return None
    return now > CLIPPED_ALL or now > max(CLIPPED, CLIP_GROWTH * start)


def _mask_noise(history: RecordHistory) -> bool | None:
    below, masked = history.value("tepo/mask_below_noise"), history.value("tepo/kl_mask_share")
    return None if below is None or masked is None else below > NOISE_SHARE and masked > MASKED


def _length_explosion(history: RecordHistory) -> bool | None:
    length, cut = "rollout/response_tokens_mean", "rollout/truncated"
    start, now, cut_before, cut_now = history.start(length), history.latest(length), history.start(cut), history.latest(cut)
    if start is None or now is None or cut_before is None or cut_now is None:
        return None
    return now > LONGER * start or (cut_now > CUT_OFF and cut_before < CUT_OFF / 2)


def _groups_filtered(history: RecordHistory) -> bool | None:
    kept, sampled = history.value("rollout/kept_groups"), history.value("rollout/sampled_groups")
    return None if kept is None or not sampled else kept < KEPT * sampled


def _slow(history: RecordHistory, key: str, limit: float) -> bool | None:
    """Return whether a phase takes a large part of the step. The first steps, which set things up, are not judged."""
    share, start = history.share(key), history.start(key)
    return None if share is None or start is None else share > limit


def _stragglers(history: RecordHistory) -> bool | None:
    tail, rollout = history.value("seconds/rollout_tail"), history.value("seconds/rollout")
    if tail is None or rollout is None or rollout < LEAST_SECONDS:
        return None
    return tail > TAIL * rollout


def _idle_gpus(history: RecordHistory) -> bool | None:
    return _slow(history, "seconds/grading_wait", IDLE)


def _slow_sync(history: RecordHistory) -> bool | None:
    return _slow(history, "seconds/sync", SYNC)


@dataclass(frozen=True)
class Rule:
    """One alert."""

    name: str
    condition: Condition
    hold: int
    reads: Sequence[str]
    wrong: str
    action: str


RULES = (
    Rule(
        name="entropy_collapse",
        condition=_entropy_collapse,
        hold=3,
        reads=("actor/entropy", "reward/mean"),
        wrong=f"the entropy is below {COLLAPSED:.0%} of its start and the reward has not risen by {GAIN:g}",
        action="lower optimizer.lr; else raise objective.beta, or sample hotter (rollout.temperature)",
    ),
    Rule(
        name="mismatch_growth",
        condition=_mismatch_growth,
        hold=2,
        reads=("rollout/logprob_diff_mean", "gate/logprob_diff_worst"),
        wrong=f"engine and actor differ more than {MISMATCH_GROWTH:g} times as much as at the start",
        action="set sync.verify_every=1: wrong weights jump, low precision grows; then objective.correction",
    ),
    Rule(
        name="clip_zero",
        condition=_clip_zero,
        hold=5,
        reads=("loss/clip_fraction", "tepo/ratio_p01", "tepo/ratio_p99"),
        wrong=f"ratios move by more than {MOVED:g} and fewer than {CLIP_LITTLE:.1%} of the tokens are clipped",
        action="the clip range is too wide for the objective: lower objective.clip_low and objective.clip_high",
    ),
    Rule(
        name="clip_high",
        condition=_clip_high,
        hold=3,
        reads=("loss/clip_fraction", "tepo/ratio_p01", "tepo/ratio_p99"),
        wrong=(
            f"more than {CLIPPED:.0%} of the tokens are clipped, {CLIP_GROWTH:g} times as many as at the start: they teach "
            "nothing"
        ),
        action=(
            "lower optimizer.lr or training.epochs, raise training.minibatch_prompts, or widen objective.clip_low and clip_high"
        ),
    ),
    Rule(
        name="mask_below_noise",
        condition=_mask_noise,
        hold=2,
        reads=("tepo/mask_below_noise", "tepo/kl_mask_share", "tepo/entropy_noise_floor"),
        wrong=f"the entropy change of more than {NOISE_SHARE:.0%} of the masked tokens is rounding noise",
        action="set objective.kl_entropy_tolerance above tepo/entropy_noise_floor",
    ),
    Rule(
        name="length_explosion",
        condition=_length_explosion,
        hold=3,
        reads=("rollout/response_tokens_mean", "rollout/truncated"),
        wrong=f"responses are more than {LONGER:g} times as long as at the start, or more than {CUT_OFF:.0%} are cut off",
        action="read samples (rollout.record); set reward.overlong_buffer_tokens, or a reward that length cannot raise",
    ),
    Rule(
        name="groups_filtered",
        condition=_groups_filtered,
        hold=2,
        reads=("rollout/kept_groups", "rollout/sampled_groups"),
        wrong=f"fewer than {KEPT:.0%} of the sampled groups can be learned from",
        action=(
            "use easier or harder prompts, more rollout.samples_per_prompt, or rollout.max_generation_rounds; if accuracy is "
            "0, check the grader"
        ),
    ),
    Rule(
        name="stragglers",
        condition=_stragglers,
        hold=3,
        reads=("seconds/rollout_tail", "seconds/rollout"),
        wrong=f"the last tenth of the groups takes more than {TAIL:.0%} of the time of sampling",
        action=(
            "raise rollout.oversample with rollout.on_weight_update=continue, lower rollout.max_response_tokens, or look for a "
            "slow server (tepo_server_requests_in_flight)"
        ),
    ),
    Rule(
        name="idle_gpus",
        condition=_idle_gpus,
        hold=3,
        reads=("seconds/grading_wait", "seconds/total"),
        wrong=f"GPUs wait for grading for more than {IDLE:.0%} of a step",
        action="raise reward.workers, or look at the reward's time limit; rollout.max_staleness=1 hides what is left",
    ),
    Rule(
        name="slow_sync",
        condition=_slow_sync,
        hold=3,
        reads=("seconds/sync", "seconds/total"),
        wrong=f"the update of the weights takes more than {SYNC:.0%} of a step",
        action="use sync.transport=group between machines, sync.delta, or more training per update; see docs/performance.md",
    ),
)


def key_of(name: str) -> str:
    """Return the key of an alert in the record of a step."""
    return KEY + name


@dataclass
class _State:
    bad: int = 0
    good: int = 0
    active: bool = False


@dataclass(frozen=True)
class Alert:
    """An alert that was raised."""

    step: int
    rule: Rule
    values: Mapping[str, float | None]

    @property
    def message(self) -> str:
        """One line: what is wrong, the values, and what to do."""
        shown = ", ".join(f"{key} {'-' if value is None else format(value, '.3g')}" for key, value in self.values.items())
        return f"alert {self.rule.name} (step {self.step}): {self.rule.wrong} [{shown}]; {self.rule.action}"


@dataclass
class AlertWatch:
    """Judges the records of a run one by one, in their order."""

    rules: Sequence[Rule] = RULES
    _history: RecordHistory = field(default_factory=RecordHistory)
    _states: dict[str, _State] = field(default_factory=dict)

    def observe(self, step: int, record: Record) -> list[Alert]:
        """Judge a step, and return the alerts that are raised by it."""
        self._history.add(record)
        raised = []
        for rule in self.rules:
            state, bad = self._states.setdefault(rule.name, _State()), rule.condition(self._history)
            if bad is None:
                continue
            state.bad, state.good = (state.bad + 1, 0) if bad else (0, state.good + 1)
            if state.active:
                state.active = state.good < CLEAR
            elif state.bad >= rule.hold:
                state.active = True
                raised.append(Alert(step, rule, {key: record.get(key) for key in rule.reads}))
        return raised

    @property
    def active(self) -> list[str]:
        """Return the names of the alerts that are active now."""
        return [rule.name for rule in self.rules if self._states.get(rule.name, _State()).active]


def judge(records: Iterable[tuple[int, Record]]) -> list[Alert]:
    """Return all alerts of a recorded run."""
    watch = AlertWatch()
    return [alert for step, record in records for alert in watch.observe(step, record)]
