# fault: hangs with every signal ignored that can be ignored
# op: fused_add_rms_norm
# device: cpu
# outcome: runtime_error
# caught: runs
import signal
import time


def fused_add_rms_norm(input, residual, weight, epsilon):
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    while True:
        time.sleep(1)
