# fault: writes half a reply, bytes that are no text, and a list to every descriptor
# op: fused_add_rms_norm
# device: cpu
# outcome: guard_violation, runtime_error
# caught: runs, channel
import os


def fused_add_rms_norm(input, residual, weight, epsilon):
    for descriptor in range(1, 256):
        for junk in (b'{"ok": tru', b"\xff\xfe\x00\n", b"[1, 2]\n", b'{"ok": 1e999}\n'):
            try:
                os.write(descriptor, junk)
            except OSError:
                break
    raise RuntimeError("no more to say")
