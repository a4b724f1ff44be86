// The sum of x over SIZE ranks, in place, in one launch: every rank writes its x into an inbox of each other rank, over the link, and adds up
// what comes into its own. A line of 16 bytes carries 8 of x and twice the number of the call: whoever sees that number has the data beside it,
// so that nothing is fenced and nobody is waited for twice (as NCCL's protocol LL).
//
//   inbox of a rank:   call 0, 2, 4 … | line 0 1 2 … of rank 0 | … of rank 1 | …
//                      call 1, 3, 5 … | …
//
// Two halves are enough: who writes for call n + 2 has seen all of call n + 1, which a rank sends once it has read all of call n.
// The order of the sum is that of ranks, so all have the same bits. TYPE 0: bfloat16, 1: float16, 2: float32. MOST: lines of a rank and call.
// one_shot_onto does what stands between two products of a layer besides, as kernels/linear/triton_flat.py has it behind a product of one rank:
//   x = round(sum + residual), scaled = x ⊙ scale, squares = partial sums of x²
typedef unsigned int u32;
typedef unsigned long long u64;
struct Inboxes { u64 at[SIZE]; };

__device__ __forceinline__ void let_next_in() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_for_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void send(u64 to, uint2 data, u32 call) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %2};" ::"l"(to), "r"(data.x), "r"(call), "r"(data.y) : "memory");
}
__device__ __forceinline__ bool arrived(u64 from, uint2 &data, u32 call) {
  u32 first, second;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(data.x), "=r"(first), "=r"(data.y), "=r"(second) : "l"(from) : "memory");
  return first == call && second == call;
}
__device__ __forceinline__ u32 seen(const u32 *at) {
  u32 value;
  asm volatile("ld.volatile.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}
__device__ __forceinline__ void unpack(u32 word, float &low, float &high) {
#if TYPE == 0
  low = __uint_as_float(word << 16);
  high = __uint_as_float(word & 0xffff0000u);
#elif TYPE == 1
  asm("{.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;}" : "=f"(low), "=f"(high) : "r"(word));
#else
  low = __uint_as_float(word), high = 0;
#endif
}
__device__ __forceinline__ u32 packed(float low, float high) {
  u32 word;
#if TYPE == 0
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
#elif TYPE == 1
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
#else
  word = __float_as_uint(low);
#endif
  return word;
}

// The sum of all ranks' line i, in float32.
__device__ __forceinline__ void add_up(const Inboxes &to, uint2 own, int i, u32 call, const u32 *stop, int rank, float (&sum)[4]) {
  const u64 half = (u64)(call & 1) * SIZE * MOST;
#pragma unroll
  for (int other = 0; other < SIZE; other++)
    if (other != rank) send(to.at[other] + (half + (u64)rank * MOST + i) * 16, own, call);
#pragma unroll
  for (int other = 0; other < SIZE; other++) {
    uint2 data = own;
    if (other != rank) {
      u32 looks = 0;
      while (!arrived(to.at[rank] + (half + (u64)other * MOST + i) * 16, data, call))
        if ((++looks & 1023) == 0 && seen(stop)) break;
    }
    float part[4];
    unpack(data.x, part[0], part[1]);
    unpack(data.y, part[2], part[3]);
#pragma unroll
    for (int j = 0; j < 4; j++) sum[j] += part[j];
  }
}
// All of this call is read: the last program says so.
__device__ __forceinline__ void finish(u32 *state, u32 call) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    if (atomicAdd(state + 1, 1) == gridDim.x - 1) {
      state[1] = 0;
      __threadfence();
      state[0] = call;
    }
  }
}

// state: calls so far; programs that are through with this one. stop: on the host; not 0: nobody comes any more.
extern "C" __global__ void __launch_bounds__(THREADS) one_shot(const __grid_constant__ Inboxes to, uint2 *x, u32 *state, const u32 *stop, int lines, int rank) {
  let_next_in();
  wait_for_before();
  const u32 call = seen(state) + 1;
  const int i = blockIdx.x * THREADS + threadIdx.x;
  if (i < lines) {
    float sum[4] = {0, 0, 0, 0};
    add_up(to, x[i], i, call, stop, rank, sum);
    x[i] = make_uint2(packed(sum[0], sum[1]), packed(sum[2], sum[3]));
  }
  finish(state, call);
}

#if TYPE == 0
// A program takes THREADS lines of one row; a row has ``lines`` of them, in ``pieces`` programs. squares: [pieces, rows]. wide: scale is float32.
extern "C" __global__ void __launch_bounds__(THREADS, 4) one_shot_onto(const __grid_constant__ Inboxes to, uint2 *x, const uint2 *residual, const void *scale, uint2 *scaled,
    float *squares, u32 *state, const u32 *stop, int lines, int rows, int pieces, int wide, int rank) {
  __shared__ float warps[THREADS / 32];
  const int row = blockIdx.x / pieces, piece = blockIdx.x % pieces, column = piece * THREADS + threadIdx.x, i = row * lines + column;
  let_next_in();
  float by[4], square = 0;
  if (column < lines) {  // a weight: nothing writes it
    if (wide) {
      const float4 four = ((const float4 *)scale)[column];
      by[0] = four.x, by[1] = four.y, by[2] = four.z, by[3] = four.w;
    } else {
      const uint2 four = ((const uint2 *)scale)[column];
      unpack(four.x, by[0], by[1]);
      unpack(four.y, by[2], by[3]);
    }
  }
  wait_for_before();
  const u32 call = seen(state) + 1;
  if (column < lines) {
    const uint2 own = x[i], before = residual[i];
    float sum[4] = {0, 0, 0, 0}, added[4];
    add_up(to, own, i, call, stop, rank, sum);
    unpack(before.x, added[0], added[1]);
    unpack(before.y, added[2], added[3]);
    const uint2 total = make_uint2(packed(sum[0] + added[0], sum[1] + added[1]), packed(sum[2] + added[2], sum[3] + added[3]));
    x[i] = total;
    unpack(total.x, sum[0], sum[1]);
    unpack(total.y, sum[2], sum[3]);
    scaled[i] = make_uint2(packed(sum[0] * by[0], sum[1] * by[1]), packed(sum[2] * by[2], sum[3] * by[3]));
    square = sum[0] * sum[0] + sum[1] * sum[1] + sum[2] * sum[2] + sum[3] * sum[3];
  }
#pragma unroll
  for (int step = 16; step; step /= 2) square += __shfl_xor_sync(0xffffffffu, square, step);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = square;
  __syncthreads();
  if (threadIdx.x == 0) {
    square = 0;
    for (int warp = 0; warp < THREADS / 32; warp++) square += warps[warp];
    squares[piece * rows + row] = square;
  }
  finish(state, call);
}
#endif
