from tepo_megatron.plan.parameters import Held


def state_bytes(held: Held, precision: str) -> dict[str, int]:
    weight = {"fp32": 4, "bf16": 2}[precision]
    return {
        "weights": held.buffer * weight,
        "gradients": held.buffer * 4,
        "optimizer": held.owned * (8 if precision == "fp32" else 12),
    }
