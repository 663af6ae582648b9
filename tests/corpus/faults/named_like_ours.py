# fault: raises an error with the name of what the judge calls a forged reply
# op: fused_add_rms_norm
# device: cpu
# outcome: runtime_error
# caught: runs


class ForgedReplyError(Exception):
    pass


class Protocol(ForgedReplyError):
    pass


def fused_add_rms_norm(input, residual, weight, epsilon):
    raise Protocol("no more to say")
