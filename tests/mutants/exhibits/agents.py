"""What an agent asks of the gateway, and what the gateway makes of it."""

from tests.mutants.exhibit import Exhibit

_TESTS = "tests/unit/rollout/test_gateway_requests.py"

KIND = "agents"
EXHIBITS = (
    Exhibit(
        name="fields_of_a_request_are_ignored",
        source="our own: a request with tool_choice, min_tokens or chat_template_kwargs",
        bug="The gateway has a list of fields that it refuses, and ignores those that nobody put on it.",
        cost="The agent trains without the constraint that it asks for, and is served with it.",
        symbol="checked_fields",
        old='            refuse(f"{name}: not supported by the gateway; leave it out")',
        new="            continue",
        tests=(f"{_TESTS}::test_every_field_of_the_openai_package_is_honoured_or_refused",),
    ),
    Exhibit(
        name="a_message_that_no_model_reads",
        source="our own: a developer's message under templates in the manner of Qwen's",
        bug="A chat template leaves out messages of roles that it does not know, without an error.",
        cost="The model never reads the agent's rules, and is rewarded as if it had.",
        symbol="ChatFormat._require_shown",
        old="if form in self._shown:",
        new="if self._shown is not None:",
        tests=(f"{_TESTS}::test_each_message_is_found_in_what_the_model_reads_or_refused",),
    ),
    Exhibit(
        name="arguments_are_compared_as_text",
        source="our own: clients that write the arguments of tool calls again",
        bug="A client that parses the arguments of a call and writes them with other spaces sends back another text.",
        cost="Every turn is a rewrite: a sequence of its own, whose earlier turns are encoded again.",
        symbol="_arguments",
        old="    with contextlib.suppress(ValueError, RecursionError):",
        new="    with contextlib.suppress(ValueError, RecursionError):\n        return arguments",
        tests=(f"{_TESTS}::test_tool_arguments_that_a_client_writes_again_are_no_rewrite",),
    ),
    Exhibit(
        name="a_turn_that_nobody_saw_is_trained_on",
        source="our own: a client with a timeout and retries",
        bug="The server goes on with a request whose client has gone, as aiohttp does by default.",
        cost="The sample's reward trains a turn that the agent never saw, or the sample is lost.",
        symbol="Gateway.start",
        old="handler_cancellation=True",
        new="handler_cancellation=False",
        tests=(f"{_TESTS}::test_a_turn_whose_client_has_gone_is_cancelled_and_left_out",),
    ),
)
