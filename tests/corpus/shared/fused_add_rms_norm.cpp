namespace {

using tvm::ffi::TensorView;

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  _Float16 value;
};

inline float load(const float* p) { return *p; }
inline float load(const BFloat16* p) {
  const uint32_t wide = uint32_t(p->bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}
inline float load(const Float16* p) { return float(p->value); }

inline void store(float* p, float value) { *p = value; }
inline void store(BFloat16* p, float value) {  // round to nearest even; NaN stays NaN
  uint32_t wide;
  std::memcpy(&wide, &value, sizeof wide);
  const uint32_t rounded = (wide + 0x7fffu + ((wide >> 16) & 1u)) >> 16;
  p->bits = uint16_t(value != value ? (wide >> 16) | 0x40u : rounded);
}
inline void store(Float16* p, float value) { p->value = _Float16(value); }

template <typename T, typename Body>
void by_weight(TensorView input, TensorView residual, TensorView weight, Body body) {
  auto* x = static_cast<T*>(input.data_ptr());
  auto* r = static_cast<T*>(residual.data_ptr());
  if (weight.dtype().bits == 32)
    body(x, r, static_cast<const float*>(weight.data_ptr()));
  else
    body(x, r, static_cast<const T*>(weight.data_ptr()));
}

// body(input, residual, weight) with pointers of the dtypes at hand
template <typename Body>
void by_dtype(TensorView input, TensorView residual, TensorView weight, Body body) {
  const DLDataType dtype = input.dtype();
  if (dtype.code == kDLFloat && dtype.bits == 32)
    by_weight<float>(input, residual, weight, body);
  else if (dtype.code == kDLBfloat && dtype.bits == 16)
    by_weight<BFloat16>(input, residual, weight, body);
  else if (dtype.code == kDLFloat && dtype.bits == 16)
    by_weight<Float16>(input, residual, weight, body);
  else
    throw std::runtime_error("fused_add_rms_norm: unsupported dtype");
}
