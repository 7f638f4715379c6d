"""Statistics and gradient of the softmax over the sampling mask of each row, and masks recomputed from logits.

Layout: R rows; K ids of a row's sampling mask; W local columns, padding included; C candidates of a rank.
"""

import torch
from torch import Tensor

from tepo_megatron.ops.token_statistics import NO_COLUMNS, Coefficients, compute_dtype
from tepo_megatron.types import MASK_TIES, MOST_CANDIDATES, NO_TOKEN, RecomputedMasks, Truncation


def masked_statistics(logits: Tensor, mask_RK: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return top = max x, sum exp(d) and sum d exp(d) over this rank's columns of each row's mask, d = (x - top) / temperature.

    Args:
        logits: [R, W].
        mask_RK: int64 local columns, NO_TOKEN where another rank has the column.
    Returns:
        Three tensors [R] in `compute_dtype(logits)`. Rows without a local column have NO_COLUMNS, 0 and 0.
    """
    mine_RK = mask_RK >= 0
    x_RK = logits.gather(1, mask_RK.clamp(min=0)).to(compute_dtype(logits)).masked_fill(~mine_RK, NO_COLUMNS)
    top_R = x_RK.amax(1)
    d_RK = torch.where(mine_RK, (x_RK - top_R[:, None]) / temperature, 0)
    e_RK = torch.where(mine_RK, d_RK.exp(), 0)
    return top_R, e_RK.sum(1), (e_RK * d_RK).sum(1)


def write_masked_gradient(
    logits: Tensor, mask_RK: Tensor, column_R: Tensor, temperature: float, row: Coefficients, out: Tensor
) -> None:
    """Write the gradient of the logits into `out`: 0 at all columns but those of the row's mask.

    Args:
        logits: [R, W].
        mask_RK: int64 local columns, NO_TOKEN where another rank has the column.
        column_R: int64, the label's column. It may be any column where `row.label` is 0.
        out: [R, W], written in full. It may be `logits`.
    """
    columns_RK, mine_RK = mask_RK.clamp(min=0), mask_RK >= 0
    d_RK = (logits.gather(1, columns_RK).to(row.top.dtype) - row.top[:, None]) / temperature
    weight_RK = row.constant[:, None] if row.slope is None else row.constant[:, None] + row.slope[:, None] * d_RK
    # the label's two terms are added before they are rounded to the type of `out`
    g_RK = weight_RK * d_RK.exp() + torch.where(mask_RK == column_R[:, None], row.label[:, None], 0)
    out.zero_()
    out.scatter_add_(1, columns_RK, torch.where(mine_RK, g_RK, 0).to(out.dtype))


def candidates(logits: Tensor, columns: int, first: int, truncation: Truncation) -> Tensor:
    """Return [R, 2C]: the C largest logits of this rank's real columns, and their ids.

    Ids are exact in fp32 below 2^24. Candidates that the rank lacks are NO_COLUMNS with id NO_TOKEN. `logits`: [R, W], this
    rank's columns.
    """
    most = MOST_CANDIDATES if truncation.top_k < 0 else min(MOST_CANDIDATES, truncation.top_k + MASK_TIES)
    out = torch.full((logits.size(0), 2 * most), float(NO_TOKEN), dtype=compute_dtype(logits), device=logits.device)
    out[:, :most] = NO_COLUMNS
    if columns and logits.size(0):
        found = logits[:, :columns].topk(min(most, columns), dim=1)
        out[:, : found.values.size(1)] = found.values
        out[:, most : most + found.values.size(1)] = found.indices + first
    return out


def recomputed_masks(offered: Tensor, labels_R: Tensor, temperature: float, truncation: Truncation) -> RecomputedMasks:
    """Return each row's sampling mask. Tokens whose logits equal that of the last of top-k are kept too.

    `labels_R`: int64, global ids of the sampled tokens.
    """
    most = (offered.size(2) - 2) // 2
    x_RC, ids_RC = (part.transpose(0, 1).flatten(1) for part in (offered[:, :, 2 : 2 + most], offered[:, :, 2 + most :].long()))
    ids_RC, order_RC = ids_RC.sort(dim=1)
    x_RC, order_RC = x_RC.gather(1, order_RC).sort(dim=1, descending=True, stable=True)
    x_RC, ids_RC = x_RC[:, :most], ids_RC.gather(1, order_RC)[:, :most]
    p_RC = ((x_RC - x_RC[:, :1]) / temperature).exp()
    kept_RC = ids_RC != NO_TOKEN
    if 0 < truncation.top_k < most:
        kept_RC &= x_RC >= x_RC[:, truncation.top_k - 1, None]
    if truncation.top_p < 1:
        if truncation.renormalizes and truncation.top_k > 0:
            whole_R = torch.where(kept_RC, p_RC, 0).sum(1)
        else:
            whole_R = (((offered[:, :, 0] - x_RC[:, 0]) / temperature).exp() * offered[:, :, 1]).sum(0)
        before_RC = p_RC.cumsum(1) - p_RC
        kept_RC &= before_RC < truncation.top_p * whole_R[:, None]
        kept_RC[:, 0] = True
    outside_R = ~((ids_RC == labels_R[:, None]) & kept_RC).any(1)
    last_RC = torch.where(outside_R, labels_R, NO_TOKEN)[:, None]
    unlimited = truncation.top_k < 0 or truncation.top_k > most
    cut_R = kept_RC[:, -1] if unlimited else torch.zeros_like(outside_R)
    return RecomputedMasks(torch.cat((torch.where(kept_RC, ids_RC, NO_TOKEN), last_RC), 1), outside_R, cut_R)
