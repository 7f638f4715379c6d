"""Section `sft`: supervised fine-tuning, which `tepo sft` does with the same model, layout and checkpoints."""

from typing import Literal

from tepo_megatron.config.data import check_source
from tepo_megatron.config.fields import NonNegative, Positive, PositiveFloat, config


@config
class SftConfig:
    """Supervised fine-tuning (`tepo sft`). `tepo train` ignores this section."""

    # Conversations to train on: a file or dataset, with a slice, as in data.train. Rows hold a chat (messages, conversations)
    # or a prompt and a response. Required by `tepo sft`.
    data: str | None = None
    # Held-out conversations, in the same form, on which the loss is measured. null: none.
    eval: str | None = None
    # Key of the prompt, or of the chat, in a row; a dot leads into an object. null: the key is detected.
    prompt_key: str | None = None
    # Key of the response in a row. null: it is detected; rows with a chat have none.
    response_key: str | None = None
    # Turns whose tokens are learned: all turns of the assistant, or the last one alone.
    train_on: Literal["assistant", "last"] = "assistant"
    # Maximum number of tokens of a conversation. Longer ones are dropped and counted.
    max_tokens: Positive = 4096
    # Number of conversations per update.
    batch_sequences: Positive = 64
    # Passes over the data.
    epochs: Positive = 1
    # Number of updates after which training ends, if it comes before the end of the last pass. null: no limit.
    steps: Positive | None = None
    # Number of updates between measurements of the held-out loss; 0: only at the start and at the end.
    eval_every: NonNegative = 0
    # Held-out loss, in nats per token, at which training ends. Needs `eval` and `eval_every`. null: no such end.
    stop_at_loss: PositiveFloat | None = None

    def __post_init__(self) -> None:
        if self.stop_at_loss is not None and not (self.eval is not None and self.eval_every):
            raise ValueError("sft.stop_at_loss needs held-out conversations (sft.eval) and sft.eval_every above 0")
        for key, source in (("data", self.data), ("eval", self.eval)):
            if source is not None:
                check_source(key, source)
