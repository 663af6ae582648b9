namespace {

using tvm::ffi::TensorView;

template <typename T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Pack {
  T item[N];
};
constexpr int VEC = 8;  // the contract: hidden is a multiple of 8

__device__ inline float to_float(float v) { return v; }
__device__ inline float to_float(__half v) { return __half2float(v); }
__device__ inline float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ inline void put(float* p, float v) { *p = v; }
__device__ inline void put(__half* p, float v) { *p = __float2half_rn(v); }
__device__ inline void put(__nv_bfloat16* p, float v) { *p = __float2bfloat16_rn(v); }

// The squares that one of `step` workers sums.
template <typename T>
__device__ float squares_of(const T* x, const T* r, int packs, int first, int step) {
  float squares = 0.0f;
  for (int p = first; p < packs; p += step) {
    const auto a = reinterpret_cast<const Pack<T, VEC>*>(x)[p];
    const auto b = reinterpret_cast<const Pack<T, VEC>*>(r)[p];
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      const float sum = to_float(a.item[i]) + to_float(b.item[i]);
      squares += sum * sum;
    }
  }
  return squares;
}

// Writes the elements that the same worker has read.
template <typename T, typename W>
__device__ void write_row(T* x, T* r, const W* w, int packs, float scale, int first, int step) {
  for (int p = first; p < packs; p += step) {
    auto a = reinterpret_cast<Pack<T, VEC>*>(x)[p];
    auto b = reinterpret_cast<Pack<T, VEC>*>(r)[p];
    const auto gain = reinterpret_cast<const Pack<W, VEC>*>(w)[p];
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      const float sum = to_float(a.item[i]) + to_float(b.item[i]);
      put(&b.item[i], sum);
      put(&a.item[i], sum * scale * to_float(gain.item[i]));
    }
    reinterpret_cast<Pack<T, VEC>*>(r)[p] = b;
    reinterpret_cast<Pack<T, VEC>*>(x)[p] = a;
  }
}

__device__ inline float warp_sum(float v) {
#pragma unroll
  for (int lane = 16; lane > 0; lane >>= 1) v += __shfl_xor_sync(0xffffffffu, v, lane);
  return v;
}

// The sum over a block of whole warps, in every thread.
__device__ inline float block_sum(float v) {
  __shared__ float partial[32];
  v = warp_sum(v);
  __syncthreads();  // the last use of `partial` is over
  if ((threadIdx.x & 31) == 0) partial[threadIdx.x >> 5] = v;
  __syncthreads();
  return warp_sum((threadIdx.x & 31) < (blockDim.x >> 5) ? partial[threadIdx.x & 31] : 0.0f);
}

inline int threads_for(int packs, int most) {
  const int threads = (packs + 31) / 32 * 32;
  return threads < most ? threads : most;
}

inline void check(cudaError_t status) {
  if (status != cudaSuccess) TVM_FFI_THROW(RuntimeError) << cudaGetErrorString(status);
}

inline cudaStream_t stream_of(TensorView tensor) {
  const DLDevice device = tensor.device();
  return static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
}

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
  if (dtype.code == kDLBfloat && dtype.bits == 16)
    by_weight<__nv_bfloat16>(input, residual, weight, body);
  else if (dtype.code == kDLFloat && dtype.bits == 16)
    by_weight<__half>(input, residual, weight, body);
  else if (dtype.code == kDLFloat && dtype.bits == 32)
    by_weight<float>(input, residual, weight, body);
  else
    TVM_FFI_THROW(TypeError) << "unsupported dtype";
  check(cudaGetLastError());
}
