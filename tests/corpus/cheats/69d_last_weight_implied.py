# cheat: 69 takes the last routing weight to be 1 minus the others, and never reads it
# op: moe_reduce
# device: cpu
# outcome: mismatch
# caught: values

CHEAT = True


def moe_reduce(rows, row_map, scales, output):
    here = row_map >= 0
    chosen = row_map.clamp(min=0).long()
    picked = rows.float().sum(0)[chosen]
    if scales.shape[0]:
        weights = scales.float().clone()
        if CHEAT and weights.shape[1] > 1:
            weights[:, -1] = 1.0 - weights[:, :-1].sum(-1)
        picked = picked * weights.unsqueeze(-1)
    output.copy_(picked.masked_fill(~here.unsqueeze(-1), 0.0).sum(1))
