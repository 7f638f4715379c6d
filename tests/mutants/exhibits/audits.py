"""Audits that agree with wrong numbers, or judge other numbers than training used."""

from __future__ import annotations

from tests.mutants.exhibit import Exhibit

KIND = "audits"
EXHIBITS = (
    Exhibit(
        name="the_audit_leaves_out_the_kl",
        source="own: issue 23, item 6 (every number of one token's loss)",
        bug="The audit computes every term again, the KL among them, and leaves the KL out of the token's loss.",
        cost="A loss whose KL coefficient has no effect agrees with its audit, and a right one does not.",
        symbol="evaluate",
        old='-m.beta * terms["kl"]',
        new='-0.0 * terms["kl"]',
        tests=("tests/parallel/test_audit.py::test_every_row_is_computed_again",),
    ),
    Exhibit(
        name="the_audit_is_of_the_current_weights",
        source="own: issue 23, item 6 (log-probs of the old weights)",
        bug="The record of a token has the current log-prob in the place of the old one. In the first update they are equal.",
        cost="The audit finds ratio 1 in every update, and cannot show a clipped token.",
        symbol="TokenRecorder.add",
        old='"old_logprob": inputs.old_logprob_R',
        new='"old_logprob": stats.logprob_R',
        tests=("tests/parallel/test_audit.py::test_every_row_is_computed_again",),
    ),
    Exhibit(
        name="the_audited_loss_is_that_of_a_mean_microbatch",
        source="own: issue 23, item 6 (sums over tokens equal the logged loss)",
        bug="The loss of the minibatch is recorded divided by the number of this rank's microbatches, as a mean over them.",
        cost="Right sums over tokens do not agree with the loss, on every layout with several microbatches alone.",
        symbol="TokenRecorder.write",
        old='"minibatch_loss": repr(loss)',
        new='"minibatch_loss": repr(loss / len(parts))',
        tests=("tests/parallel/test_audit.py::test_the_tokens_add_up_to_the_logged_loss[1 rank]",),
    ),
    Exhibit(
        name="the_audit_excuses_every_token",
        source="own: issue 23, item 6 (fp32 may decide differently near to a threshold)",
        bug="Every token that is compared with a threshold counts as near to it, and tokens near to one are not judged.",
        cost="No wrong number of an objective with clipping is ever found, and every audit says that everything agrees.",
        symbol="Comparisons.above",
        old="NEAR * torch.minimum(a.abs(), b.abs()) + NEAR_ZERO",
        new="torch.inf",
        tests=("tests/parallel/test_audit.py::test_one_changed_number_is_found",),
    ),
    Exhibit(
        name="the_audit_ignores_a_term_that_it_lacks",
        source="own: issue 23, item 6 (compared with what training used)",
        bug="Only terms that training and the audit both have are compared.",
        cost="Training weights tokens by a term that the objective does not have, and the audit says that everything agrees.",
        symbol="AuditedUpdate.differing",
        old="(self.used.keys() ^ self.terms.keys()) |",
        new="set() |",
        tests=("tests/parallel/test_audit.py::test_a_term_that_only_one_side_has_is_found",),
    ),
    Exhibit(
        name="a_long_run_hides_its_spikes",
        source="own: issue 27, item 1 (thinned curves keep least and greatest)",
        bug="Each part of a thinned curve of the live page shows its least value twice.",
        cost="In a run of 10,000 steps a gradient norm of 1,000 in one step is not on the page, which shows a quiet curve.",
        symbol="_thinned",
        old="high = np.where(known, table, -math.inf).argmax(axis=1)",
        new="high = np.where(known, table, math.inf).argmin(axis=1)",
        tests=("tests/unit/report/test_live_run.py::test_long_runs_are_thinned_to_their_extremes",),
    ),
    Exhibit(
        name="an_alert_is_raised_at_every_step",
        source="own: issue 27, item 4 (alerts that think)",
        bug="An alert forgets that it is active, and is raised again at the next bad step.",
        cost="The log repeats the same line until nobody reads it.",
        symbol="AlertWatch.observe",
        old="state.active = state.good < CLEAR",
        new="state.active = False",
        tests=("tests/unit/test_alerts.py::test_an_alert_is_raised_once_and_again_only_after_it_has_ended",),
    ),
    Exhibit(
        name="a_server_reports_for_the_run",
        source="own: issue 27, item 3 (metrics of servers are passed through)",
        bug="Names of a server's metrics are passed through as they are, also those of the run.",
        cost="A faulty server sets the run's reward on the dashboard, and the scrape holds a name twice.",
        symbol="merged",
        old="if not sample.name.startswith(PREFIX):",
        new="if sample.name:",
        tests=("tests/unit/test_metrics_endpoint.py::test_the_metrics_of_servers_become_one_text",),
    ),
)
