"""Samples and what belongs to them drift apart; prompts are lost or doubled."""

from tests.mutants.exhibit import Exhibit

KIND = "prompts"
EXHIBITS = (
    Exhibit(
        name="advantages_of_other_groups",
        source="prime-rl #600",
        bug=(
            "Groups were built as [p1, p2] * n and read as n samples of p1 followed by n of p2, so advantages "
            "belonged to samples of other prompts. Means and variances are right, reward goes up more slowly."
        ),
        cost=(
            "Every minibatch of a shuffled epoch has the advantages of the first groups of the batch. Right with "
            "one minibatch in the order of the batch."
        ),
        symbol="TrainBatch.select",
        old="self.advantages_B[list(indices)],",
        new="self.advantages_B[: len(indices)],",
        tests=("tests/unit/test_batch.py::test_each_epoch_sees_every_sequence_once_in_even_minibatches_of_whole_groups",),
    ),
    Exhibit(
        name="entropies_in_another_order",
        source="JustRL #5 (verl 0.4, dynamic batch sizes)",
        bug=(
            "With dynamic batch sizes log-probs were put back into the order of the batch and entropies were not. "
            "Only what uses the entropy was wrong, by as much as tokens differ: a number of the right size at the "
            "wrong token."
        ),
        cost=(
            "In every update but the first of a batch dH compares entropies of different tokens, so TEPO's KL mask is noise."
        ),
        symbol="TrainBatch.select",
        old="pick(self.old_entropies_N),",
        new="self.old_entropies_N,",
        tests=("tests/unit/test_batch.py::test_old_statistics_travel_with_their_sequence",),
    ),
    Exhibit(
        name="finished_groups_are_thrown_away",
        source="slime #2238",
        bug=(
            "A fully asynchronous rollout dropped groups that were complete or under way when a step had enough. "
            "Since fast groups win, long responses are lost systematically."
        ),
        cost="With oversample > 1 the prompts of groups that were not needed are never trained on in this epoch.",
        symbol="Collector.cancel",
        old=("        self.prompts.give_back(list(self._in_progress.values()))\n"),
        new="",
        tests=(
            "tests/unit/rollout/test_collector.py::test_sampling_ends_with_the_groups_that_are_wanted_and_the_other_prompts_come_next",
        ),
    ),
    Exhibit(
        name="uniform_groups_by_the_shaped_reward",
        source="own (the paper's Section 4.1); CHANGELOG Added (methods of the paper)",
        bug=(
            "The filter of groups that teach nothing must look at the verdict. Shaped by length, all rewards of a "
            "group differ, and nothing is ever filtered."
        ),
        cost=("With overlong shaping or further reward terms groups that are all wrong are trained on their lengths."),
        symbol="informative",
        old="{rollout.score for rollout in group}",
        new="{rollout.reward for rollout in group}",
        tests=(
            "tests/unit/losses/test_advantages.py::test_informative_looks_at_the_unshaped_score",
            "tests/unit/rollout/test_collector.py::test_groups_all_right_or_all_wrong_are_dropped",
        ),
    ),
    Exhibit(
        name="every_epoch_in_the_same_order",
        source="own (CHANGELOG Added: data); lost or doubled prompts",
        bug="The order of an epoch is a hash that has to know the epoch.",
        cost="All epochs have the order of one; the same prompts always share a batch.",
        symbol="_SetCursor.enter",
        old='_digest(f"{self._seed}/{epoch}/{self.prompts[i].id}")',
        new='_digest(f"{self._seed}/{self.prompts[i].id}")',
        tests=("tests/unit/data/test_prompt_stream.py::test_stream_shuffles_each_epoch_in_a_new_order_equal_on_every_rank",),
    ),
    Exhibit(
        name="a_returned_prompt_is_taken_twice",
        source="our own: CHANGELOG Changed (taking back prompts is linear)",
        bug="A prompt that was given back is handed out again, and once more if the next epoch begins within the batch.",
        cost="A prompt comes twice in a step. Responses are grouped by prompt, so it forms one group of twice the size.",
        symbol="PromptStream.take",
        old="            held.add(prompt.id)\n            taken.append(prompt)\n            free[self._set_of",
        new="            taken.append(prompt)\n            free[self._set_of",
        tests=("tests/unit/data/test_prompt_stream.py::test_a_returned_prompt_is_not_taken_twice_where_the_next_epoch_begins",),
    ),
    Exhibit(
        name="returned_prompts_that_the_step_holds_are_lost",
        source="our own: CHANGELOG Changed (taking back prompts is linear)",
        bug="A prompt that was given back is passed over while the step holds it, and is not given back again.",
        cost="Prompts are missing from their epoch, with oversampling and refills in every step.",
        symbol="PromptStream.take",
        old="        self.give_back(skipped)\n",
        new="",
        tests=("tests/unit/data/test_prompt_stream.py::test_prompts_that_the_step_holds_stay_returned_in_their_order",),
    ),
    Exhibit(
        name="the_stop_token_is_not_learned",
        source="own: issue 26",
        bug="Supervised fine-tuning leaves the token that ends a turn out of the loss.",
        cost="The model never learns to stop: its responses run into the token limit from the first RL step on.",
        symbol="_ConversationEncoder.encode",
        old="next((n + 1 for n, i in enumerate(turn)",
        new="next((n for n, i in enumerate(turn)",
        tests=("tests/unit/data/test_conversations.py::test_schemas",),
    ),
    Exhibit(
        name="turns_of_others_are_learned",
        source="own: issue 26",
        bug="Supervised fine-tuning learns the user's turns as well.",
        cost="The loss is mostly that of prompts, and the model writes the next question behind its answer.",
        symbol="_ConversationEncoder._rendered",
        old="places.append((len(before), len(after)))",
        new="places.append((1, len(after)))",
        tests=("tests/unit/data/test_conversations.py::test_schemas",),
    ),
    Exhibit(
        name="the_answer_is_a_sampled_message",
        source="own (issue 41): the layout of OpenR1-Math; open-r1 #648 and #55 show it",
        bug="A row has problem, answer and messages of a sampled generation. The first schema that fits takes the messages.",
        cost="Gold answers are those of samples, some of them wrong. The first row looks right.",
        symbol="load_prompts",
        old="        _refuse_rivals(reader, schema)\n",
        new="        pass\n",
        tests=("tests/unit/data/test_data_schemas.py::test_columns_with_different_answers_are_refused_until_a_key_says_which",),
    ),
    Exhibit(
        name="a_number_is_written_as_python_does",
        source="own (issue 41)",
        bug="Numbers of a dataset become text with str(): 0.00005 is '5e-05'.",
        cost="Graders that know no exponents read another number, and right answers score 0.",
        symbol="digits_of",
        old='return format(Decimal(str(number)), "f")',
        new="return str(number)",
        tests=("tests/unit/data/test_data_schemas.py::test_gold_answers",),
    ),
    Exhibit(
        name="float32_is_read_as_float64",
        source="own (issue 41)",
        bug="Arrow gives a float32 as a Python float: 0.1 is 0.10000000149011612.",
        cost="The right answer 0.1 is wrong, or right only by a tolerance.",
        symbol="_rows",
        old="if _has_short_floats(struct) else rows",
        new="if False else rows",
        tests=("tests/unit/data/test_data_formats.py::test_short_floats_give_their_shortest_decimals",),
    ),
    Exhibit(
        name="turns_of_weight_0_are_learned",
        source="axolotl #1702, fw-ai/cookbook #387, verl #5316",
        bug="The keys of a turn that say whether it is learned (weight, train, loss) are dropped.",
        cost="The model imitates the answers that the data mark as wrong.",
        symbol="_is_learned",
        old=" and all(switches.values())",
        new="",
        tests=("tests/unit/data/test_conversations.py::test_schemas",),
    ),
    Exhibit(
        name="columns_of_the_prompt_are_dropped",
        source="LlamaFactory #8986, unsloth #11053",
        bug="A conversation's columns history and system are not read.",
        cost="The model learns answers without the turns that they answer.",
        symbol="read_row",
        old="if row.get(key):\n            raise",
        new="if False:\n            raise",
        tests=("tests/unit/data/test_conversations.py::test_rows_that_cannot_be_used",),
    ),
    Exhibit(
        name="a_users_text_ends_the_turn",
        source="own: issue 41",
        bug="A message that spells <|im_end|> is tokenized with the special token, in prompts of RL, too.",
        cost="A user's text ends its turn and opens one of the system; a quoted stop token ends what is learned.",
        symbol="ChatRenderer._marked",
        old="if isinstance(value, str):",
        new="if False:",
        tests=("tests/unit/data/test_sft_tokens.py::test_tokens_are_those_of_the_whole_rendering",),
    ),
    Exhibit(
        name="a_turn_begins_inside_of_the_prompts_last_token",
        source="own: issue 41",
        bug="Where a token holds the end of the prompt and the beginning of the answer, the answer loses its first word.",
        cost="The model learns answers without their beginning, such as the sign of a number.",
        symbol="_ConversationEncoder.encode",
        old="            self._refuse_joined(text, begin, tokens)\n",
        new="",
        tests=("tests/unit/data/test_sft_tokens.py::test_a_prompt_that_ends_in_a_space_is_refused",),
    ),
)
