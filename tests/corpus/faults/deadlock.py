# fault: waits for a thread that waits for it
# op: fused_add_rms_norm
# device: cpu
# outcome: runtime_error
# caught: runs
import threading


def fused_add_rms_norm(input, residual, weight, epsilon):
    lock = threading.Lock()
    lock.acquire()
    thread = threading.Thread(target=lock.acquire, daemon=True)
    thread.start()
    thread.join()
