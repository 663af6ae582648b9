# fault: fills its folder with real bytes, up to 16 GB
# op: fused_add_rms_norm
# device: cpu
# outcome: runtime_error, mismatch
# caught: runs, values
def fused_add_rms_norm(input, residual, weight, epsilon):
    with open("scratch.bin", "wb") as file:
        for _ in range(1024):
            file.write(b"x" * (16 << 20))
    input.zero_()
