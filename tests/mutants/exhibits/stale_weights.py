"""Servers that sample with other weights than they say, and guards that do not look."""

from tests.mutants.exhibit import Exhibit

KIND = "stale weights"
EXHIBITS = (
    Exhibit(
        name="prefix_cache_of_the_old_weights",
        source="prime-rl #1650, NeMo-RL #4018, NeMo-RL #3152",
        bug=(
            "The prefix cache was not emptied when new weights came, so prompts were read with keys and values of "
            "weights up to 17 steps old. Samples look fine, and every version check passes; log-probs are off by "
            "what the prompt's keys changed."
        ),
        cost=(
            "vLLM goes on with cached blocks of the old weights for prompts that come again (evaluations, refills "
            "of a group after an interruption, next epochs)."
        ),
        symbol="VllmApi.finish_update",
        old='cleared = await send("POST", "/reset_prefix_cache", None)',
        new='cleared = {"success": True}',
        tests=("tests/server/test_engines.py::test_an_update_replaces_all_weights",),
    ),
    Exhibit(
        name="radix_cache_of_the_old_weights",
        source="miles #2783",
        bug="The same with SGLang's radix cache after an update from tensors.",
        cost="SGLang, whose cache has pages of one token on a CPU, reads prompts with old keys and values.",
        symbol="SglangApi.finish_update",
        old='await send("POST", f"/flush_cache?timeout={IDLE_SECONDS}", None)',
        new="pass",
        tests=("tests/server/test_engines.py::test_an_update_replaces_all_weights",),
    ),
    Exhibit(
        name="after_the_first_delivery_nothing_is_sent",
        source="verl #7495 (tokenspeed #1373: a transfer that reports success without transferring)",
        bug=(
            "A LoRA adapter never reached a separate engine: 399 tensors were bit-identical at every sync, and "
            "all rollouts were of the first policy. It passed for ordinary staleness; it cost two months."
        ),
        cost=("With sync.delta the first delivery sends all, every later one declares everything unchanged; versions go up."),
        symbol="Delta.changed",
        old="if self._known.get(name) != checksum}",
        new="if name not in self._known}",
        tests=("tests/parallel/test_weights.py::test_only_layers_that_changed_are_sent_and_the_rest_is_named",),
    ),
    Exhibit(
        name="a_part_of_a_module_is_reloaded",
        source="vllm #54477 (selective reload, audit of the layerwise one)",
        bug=(
            "Reloading only what changed is right only if the engine's unit of loading is known: its loader re- "
            "packs a module when all tensors of it have come, and one that gets some of them has something else "
            "in the rest. Nothing is refused."
        ),
        cost=(
            "With sync.delta single parameters are left out instead of whole layers. In bf16 at small learning "
            "rates, with frozen parts or with experts that no token chose, a module then gets a part of its "
            "tensors (garbage in the rest, says our own docstring)."
        ),
        symbol="_unit",
        old="return match.group() if match else name",
        new="return name",
        tests=("tests/parallel/test_weights.py::test_only_layers_that_changed_are_sent_and_the_rest_is_named",),
    ),
    Exhibit(
        name="packed_experts_are_forgotten_by_nobody",
        source="SkyRL #1680",
        bug=(
            "Since vLLM 0.20 `load_weights` wrote plain weights where the kernel of an unquantized mixture of "
            "experts reads re-packed ones, from the first sync on. Samples before the first sync are right; "
            "afterwards log-probs are off, which looks like an expert model's usual mismatch."
        ),
        cost=(
            "On a CPU the experts' kernel is not built again: log-probs are off by about 1 nat after the first "
            "update (our own comment)."
        ),
        symbol="_forget_packed_experts",
        old="module.quant_method.moe_kernel = None",
        new="pass",
        tests=("tests/server/test_delta.py::test_experts_of_layers_that_are_left_out_stay",),
    ),
    Exhibit(
        name="what_newer_weights_wrote_is_said_to_be_old",
        source="NeMo-RL #1035",
        bug=(
            "The version of the weights that was noted with a sample was wrong after an update in flight. "
            "Staleness metrics and filters then act on fiction."
        ),
        cost=(
            "The rest of an interrupted response counts as sampled by the older weights; rollout/mixed_versions is too small."
        ),
        symbol="merge",
        old=("versions += [change for change in [(begun, end.policy_version), *end.later_versions] if change[1] != newest]"),
        new="versions += [change for change in end.later_versions if change[1] != newest]",
        tests=(
            "tests/unit/rollout/test_expert_replay.py::test_a_response_that_new_weights_interrupt_has_the_experts_of_the_last_ones",
        ),
    ),
    Exhibit(
        name="the_gate_is_off_when_sampling_ahead",
        source="reliability_audit.md 2 (HIGH), CHANGELOG Fixed",
        bug=(
            "The stale-weights gate compared only rollouts of the newest version. With max_staleness >= 1 there "
            "are none, so it never compared anything: an engine that ignored all updates trained 8 steps to exit "
            "0 with a mean difference of 4.1 nats against a limit of 1e-4."
        ),
        cost="Older versions are never compared. Healthy runs are the same.",
        symbol="WeightsGate.before_updates",
        old="if version != newest or self._newest_too:",
        new="if self._newest_too:",
        tests=("tests/parallel/test_gate.py::test_each_server_is_compared_with_the_version_that_it_says",),
    ),
    Exhibit(
        name="only_the_first_minibatch_is_compared",
        source="CHANGELOG Fixed (training.old_logprobs: rollout)",
        bug=(
            "With old log-probs of the engine, the gate saw those of the first minibatch alone, since only that "
            "pass computes the actor's own. A server that was wrong for other prompts passed."
        ),
        cost="gate/compared_share falls below 1, and nothing else is said.",
        symbol="WeightsGate.before_updates",
        old='self._newest_too = training.old_logprobs == "rollout" and several',
        new="self._newest_too = False",
        tests=(
            "tests/parallel/test_gate.py::test_an_engine_that_ignores_updates_is_stopped_in_the_first_possible_step",
            "tests/parallel/test_old_statistics.py::test_no_pass_is_wasted_and_the_engine_is_checked_all_the_same",
        ),
    ),
    Exhibit(
        name="one_stale_server_among_many",
        source="reliability_audit.md 2, CHANGELOG Fixed (every server by itself)",
        bug="The gate judged the mean over all servers, in which one stale server of four counts a quarter.",
        cost="A server may be off by nearly the number of servers times the limit.",
        symbol="WeightsGate._judge",
        old="            check_mismatch(difference.mean, version, limit, server, difference.tokens)",
        new="            pass",
        tests=("tests/parallel/test_gate.py::test_each_server_is_compared_with_the_version_that_it_says",),
    ),
    Exhibit(
        name="nan_passes_the_gate",
        source="reliability_audit.md 2 (how the gate compares)",
        bug="`x > limit` is false for NaN: an engine whose log-probs cannot be compared at all passes.",
        cost="A difference that is not a number is no fault any more.",
        symbol="check_mismatch",
        old="if not mean_logprob_diff <= limit:  # nan too",
        new="if mean_logprob_diff > limit:",
        tests=("tests/unit/evaluation/test_evaluation.py::test_mismatch_above_the_limit_is_a_sync_error",),
    ),
    Exhibit(
        name="ranks_with_two_configs",
        source="reliability_audit.md 3 (HIGH), CHANGELOG Fixed; cluster_first_contact.md 3",
        bug=(
            "Two starts of one name mixed their configs, even between the ranks of one run: run A ended with run "
            "B's learning rate and exit 0."
        ),
        cost="Ranks are no longer compared: on several machines one may read another config.yaml.",
        symbol="train",
        old="groups = parallel.initialize(cfg.parallel, platform, cfg.seed, config=plain(cfg))",
        new="groups = parallel.initialize(cfg.parallel, platform, cfg.seed)",
        tests=("tests/parallel/test_one_config.py::test_training_compares_the_configs_before_anything_else",),
    ),
    Exhibit(
        name="a_server_that_came_back_serves_its_first_weights",
        source="reliability_audit.md (held: kills), controller_scale.md 5 and 15 (restarts)",
        bug=(
            "A server that dies and is started again has the weights of model.path. Until it was given the newest "
            "it must not be asked."
        ),
        cost="Requests go to a restarted server that was not updated yet.",
        symbol="ServerPool.serving",
        old=" if slot.endpoint.version == self.version]",
        new="]",
        tests=("tests/unit/rollout/test_fleet.py::test_a_single_server_that_is_killed_comes_back_when_it_gets_its_weights",),
    ),
    Exhibit(
        name="nobody_asks_vllm_which_version_it_served",
        source="reliability_audit.md 2 (echoed versions as first line of defence)",
        bug=(
            "vLLM's JSON does not hold the version of its weights, so it is asked afterwards; without that a "
            "server that others updated meanwhile passes."
        ),
        cost=(
            "The version of a rollout is what the trainer believes. Reachable with rollout.server.urls or a "
            "rendezvous, where another trainer may send weights."
        ),
        symbol="VllmApi.generate",
        old='check_label({served["weight_version"]}, version, self.name)',
        new="pass",
        tests=(
            "tests/unit/rollout/test_vllm_api.py::test_an_answer_counts_only_if_vllm_served_the_version_that_was_asked_for",
        ),
    ),
    Exhibit(
        name="the_tied_output_layer_keeps_old_weights",
        source="own comment in vllm_plugin.py (0.5 nats); reliability_audit.md 2 for the class",
        bug=(
            "On a CPU an output layer that is tied to the embedding keeps a packed copy, which an update leaves "
            "as it was: log-probs were off by 0.5 nats."
        ),
        cost="vLLM on a CPU samples with the old output layer.",
        symbol="TepoWeightTransferEngine.finish_weight_update",
        old="module.quant_method.process_weights_after_loading(module)",
        new="pass",
        tests=("tests/server/test_engines.py::test_an_update_replaces_all_weights",),
    ),
    Exhibit(
        name="the_policy_stays_the_reference",
        source="reliability_audit.md 10 (reference model), own",
        bug="The reference policy's weights take the policy's place for one pass, and have to leave again.",
        cost=(
            "In fp32, whose masters are the weights themselves, training goes on from the reference (and every "
            "other pass exchanges the two again); in bf16 the next update computes its gradient at the reference "
            "and then steps from the policy's masters. The engine is sent what the actor has, so both agree."
        ),
        symbol="HostWeights.in_place",
        old=("        finally:\n            self.exchange()"),
        new=("        finally:\n            pass"),
        tests=("tests/parallel/test_gate.py::test_each_server_is_compared_with_the_version_that_it_says",),
    ),
    Exhibit(
        name="weights_are_sent_before_they_are_gathered",
        source="gpu_readiness.md F1 and F10 (overlap is the default on a GPU)",
        bug=(
            "With overlap_param_gather an update leaves the gathering of parameters to the next forward pass. "
            "Whoever reads them before gets the other ranks' parts of one update ago: the engine was sent a model "
            "of which (dp - 1) / dp is stale."
        ),
        cost=(
            "The push reads the parameters as they lie. After a step with a small learning "
            "rate the difference is far below the gate's limit, in every step of the run."
        ),
        symbol="BatchUpdates.finish",
        old=("            self.actor.finish_step()\n"),
        new="",
        tests=("tests/gate/test_recipes.py",),
    ),
    Exhibit(
        name="streamed_minibatches_meet_newer_old_weights",
        source="own: issue 24 (training.stream)",
        bug=(
            "The old log-probs and entropies of a streamed minibatch are those of the actor as earlier minibatches of the same "
            "batch have left it."
        ),
        cost="Ratios are 1 and dH is 0 in every update: clipping and the KL mask never act.",
        symbol="BatchUpdates.take",
        old="self.gate.weights_of(self.step - 1) if batch.update else contextlib.nullcontext()",
        new="contextlib.nullcontext()",
        tests=("tests/parallel/test_every_objective.py::test_every_row_streams_to_the_reference[CP2]",),
    ),
    Exhibit(
        name="a_restarted_server_gets_half_a_step",
        source="own: issue 24 (training.stream)",
        bug="A server that restarts while a step is streamed gets the actor's weights of that moment, under the old version.",
        cost="Its samples come from weights that no version names; the gate sees it if the update was large.",
        symbol="Schedule._push",
        old="self._gate.weights_of(self.trained) if self._in_updates else contextlib.nullcontext()",
        new="contextlib.nullcontext()",
        tests=("tests/parallel/test_streaming.py::test_a_server_that_restarts_during_a_step_gets_the_weights_that_sample_it",),
    ),
)
