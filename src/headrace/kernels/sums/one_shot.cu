// The sum of x over SIZE ranks in one launch: every rank writes its x into an inbox of each other rank, over the link, and adds up what comes into
// its own. An inbox is all ones while nothing has come: a word that is something else has arrived, so that no flag is sent, nothing is fenced, and
// nobody is waited for twice. Two numbers whose bits are all ones are a NaN, and sent as another (not by a copy engine; GEMMs round theirs from
// float32 to other bits). Who has read a line makes it all ones again.
//
//   inbox of a rank:   call 0, 2, 4 … | line 0 1 2 … of rank 0 | … of rank 1 | …
//                      call 1, 3, 5 … | …
//
// Two halves are enough: who writes for call n + 2 has seen all of call n + 1, which a rank sends once it has read all of call n.
// The order of the sum is that of ranks, so all have the same bits. TYPE 0: bfloat16, 1: float16, 2: float32. MOST: lines of a rank and call, of 16
// bytes. With what stands between two products of a layer:
//   one_shot_onto:    total = round(sum + residual), scaled = total ⊙ scale, squares = partial sums of total², as kernels/linear/triton_flat.py
//   one_shot_normed:  total, y = total / sqrt(mean(total²) + eps) ⊙ scale
//   two_shot_normed:  the same where a row's total is one rank's work, who tells the others: less to send among more than two ranks
// one_shot_best: the largest of what ranks have, and whose it is.
typedef unsigned int u32;
typedef unsigned long long u64;
struct Inboxes { u64 at[SIZE]; };
constexpr int VALUES = TYPE == 2 ? 4 : 8;  // of a line

__device__ __forceinline__ void let_next_in() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_for_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void write(u64 to, uint4 line) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(line.x), "r"(line.y), "r"(line.z), "r"(line.w) : "memory");
}
__device__ __forceinline__ u32 some(u32 word) { return word == ~0u ? 0x7fff7fffu : word; }
__device__ __forceinline__ void send(u64 to, uint4 line) { write(to, make_uint4(some(line.x), some(line.y), some(line.z), some(line.w))); }
__device__ __forceinline__ bool arrived(u64 from, uint4 &line) {
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(line.x), "=r"(line.y), "=r"(line.z), "=r"(line.w) : "l"(from) : "memory");
  return line.x != ~0u && line.y != ~0u && line.z != ~0u && line.w != ~0u;
}
__device__ __forceinline__ u32 seen(const u32 *at) {
  u32 value;
  asm volatile("ld.volatile.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}
__device__ __forceinline__ uint4 received(u64 from, const u32 *stop) {
  uint4 line;
  u32 looks = 0;
  while (!arrived(from, line))
    if ((++looks & 1023) == 0 && seen(stop)) break;
  write(from, make_uint4(~0u, ~0u, ~0u, ~0u));
  return line;
}
__device__ __forceinline__ void unpack(u32 word, float *out) {
#if TYPE == 0
  out[0] = __uint_as_float(word << 16);
  out[1] = __uint_as_float(word & 0xffff0000u);
#elif TYPE == 1
  asm("{.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;}" : "=f"(out[0]), "=f"(out[1]) : "r"(word));
#else
  out[0] = __uint_as_float(word);
#endif
}
__device__ __forceinline__ void unpack(uint4 line, float (&out)[VALUES]) {
  constexpr int EACH = VALUES / 4;
  unpack(line.x, out), unpack(line.y, out + EACH), unpack(line.z, out + 2 * EACH), unpack(line.w, out + 3 * EACH);
}
__device__ __forceinline__ u32 packed_word(const float *in) {
  u32 word;
#if TYPE == 0
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(in[1]), "f"(in[0]));
#elif TYPE == 1
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(in[1]), "f"(in[0]));
#else
  word = __float_as_uint(in[0]);
#endif
  return word;
}
__device__ __forceinline__ uint4 packed(const float (&in)[VALUES]) {
  constexpr int EACH = VALUES / 4;
  return make_uint4(packed_word(in), packed_word(in + EACH), packed_word(in + 2 * EACH), packed_word(in + 3 * EACH));
}
// Where line i of a rank's is in an inbox, in bytes.
__device__ __forceinline__ u64 place(u32 call, int rank, int i) { return ((u64)((call & 1) * SIZE + rank) * MOST + i) * 16; }

__device__ __forceinline__ void send_to_all(const Inboxes &to, uint4 own, int i, u32 call, int rank) {
#pragma unroll
  for (int other = 0; other < SIZE; other++)
    if (other != rank) send(to.at[other] + place(call, rank, i), own);
}
// The sum of all ranks' line i, in float32.
__device__ __forceinline__ void add_up(const Inboxes &to, uint4 own, int i, u32 call, const u32 *stop, int rank, float (&sum)[VALUES]) {
#pragma unroll
  for (int j = 0; j < VALUES; j++) sum[j] = 0;
#pragma unroll
  for (int other = 0; other < SIZE; other++) {
    float part[VALUES];
    unpack(other == rank ? own : received(to.at[rank] + place(call, other, i), stop), part);
#pragma unroll
    for (int j = 0; j < VALUES; j++) sum[j] += part[j];
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
extern "C" __global__ void __launch_bounds__(THREADS, 4) one_shot(const __grid_constant__ Inboxes to, uint4 *x, u32 *state, const u32 *stop, int lines, int rank) {
  let_next_in();
  wait_for_before();
  const u32 call = seen(state) + 1;
  const int i = blockIdx.x * THREADS + threadIdx.x;
  if (i < lines) {
    float sum[VALUES];
    const uint4 own = x[i];
    send_to_all(to, own, i, call, rank);
    add_up(to, own, i, call, stop, rank, sum);
    x[i] = packed(sum);
  }
  finish(state, call);
}

#if TYPE == 0
__device__ __forceinline__ void weights(const void *scale, int wide, int column, float (&by)[8]) {
  if (wide) {
    const float4 low = ((const float4 *)scale)[2 * column], high = ((const float4 *)scale)[2 * column + 1];
    by[0] = low.x, by[1] = low.y, by[2] = low.z, by[3] = low.w, by[4] = high.x, by[5] = high.y, by[6] = high.z, by[7] = high.w;
  } else {
    unpack(((const uint4 *)scale)[column], by);
  }
}
// Rounded, as everybody reads it from here on.
__device__ __forceinline__ uint4 onto(float (&sum)[8], uint4 before) {
  float added[8];
  unpack(before, added);
#pragma unroll
  for (int j = 0; j < 8; j++) sum[j] += added[j];
  const uint4 total = packed(sum);
  unpack(total, sum);
  return total;
}
__device__ __forceinline__ float squared(const float (&x)[8]) {
  float square = 0;
#pragma unroll
  for (int j = 0; j < 8; j++) square += x[j] * x[j];
  return square;
}
// Of all threads of a program, for all.
__device__ __forceinline__ float everybodys(float value, int count) {
  __shared__ float warps[32];
#pragma unroll
  for (int step = 16; step; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  value = 0;
  for (int warp = 0; warp < count; warp++) value += warps[warp];
  return value;
}

// A program takes THREADS lines of one row; a row has ``lines`` of them, in ``pieces`` programs. squares: [pieces, rows]. wide: scale is float32.
extern "C" __global__ void __launch_bounds__(THREADS, 4) one_shot_onto(const __grid_constant__ Inboxes to, uint4 *x, const uint4 *residual, const void *scale, uint4 *scaled,
    float *squares, u32 *state, const u32 *stop, int lines, int rows, int pieces, int wide, int rank) {
  const int row = blockIdx.x / pieces, piece = blockIdx.x % pieces, column = piece * THREADS + threadIdx.x, i = row * lines + column;
  let_next_in();
  float by[8], square = 0;
  if (column < lines) weights(scale, wide, column, by);  // nothing writes them
  wait_for_before();
  const u32 call = seen(state) + 1;
  if (column < lines) {
    float sum[8];
    const uint4 own = x[i], before = residual[i];
    send_to_all(to, own, i, call, rank);
    add_up(to, own, i, call, stop, rank, sum);
    x[i] = onto(sum, before);
    square = squared(sum);
#pragma unroll
    for (int j = 0; j < 8; j++) sum[j] *= by[j];
    scaled[i] = packed(sum);
  }
  square = everybodys(square, THREADS / 32);
  if (threadIdx.x == 0) squares[piece * rows + row] = square;
  finish(state, call);
}

// A line of the norm, by the squares of all threads' lines.
__device__ __forceinline__ void norm(float (&total)[8], float square, const float (&by)[8], uint4 *y, int i, bool any, int lines, float eps) {
  const float by_root = rsqrtf(everybodys(square, blockDim.x / 32) / (8 * lines) + eps);
  if (any) {
#pragma unroll
    for (int j = 0; j < 8; j++) total[j] = total[j] * by_root * by[j];
    y[i] = packed(total);
  }
}

// A program takes a row, a thread a line of it. from: where the other rank's x comes by itself, of two; 0: it is sent by this kernel of its.
extern "C" __global__ void __launch_bounds__(1024) one_shot_normed(const __grid_constant__ Inboxes to, const uint4 *x, const uint4 *residual, const void *scale, uint4 *total,
    uint4 *y, u64 from, u32 *state, const u32 *stop, int lines, float eps, int wide, int rank) {
  const int column = threadIdx.x, i = blockIdx.x * lines + column;
  let_next_in();
  float by[8], sum[8], square = 0;
  if (column < lines) weights(scale, wide, column, by);  // nothing writes them
  wait_for_before();
  const u32 call = from ? 0 : seen(state) + 1;
  if (column < lines) {
    const uint4 own = x[i];
    if (!from) send_to_all(to, own, i, call, rank);
    const uint4 before = residual[i];  // on its way while the others' are
    if (from) {
      float other[8];
      unpack(received(from + (u64)i * 16, stop), other);
      unpack(own, sum);
#pragma unroll
      for (int j = 0; j < 8; j++) sum[j] += other[j];
    } else {
      add_up(to, own, i, call, stop, rank, sum);
    }
    total[i] = onto(sum, before);
    square = squared(sum);
  }
  norm(sum, square, by, y, i, column < lines, lines, eps);
  if (!from) finish(state, call);
}

extern "C" __global__ void __launch_bounds__(1024) two_shot_normed(const __grid_constant__ Inboxes to, const uint4 *x, const uint4 *residual, const void *scale, uint4 *total,
    uint4 *y, u32 *state, const u32 *stop, int lines, float eps, int wide, int rank) {
  const int owner = blockIdx.x % SIZE, column = threadIdx.x, i = blockIdx.x * lines + column;
  let_next_in();
  float by[8], sum[8], square = 0;
  if (column < lines) weights(scale, wide, column, by);
  wait_for_before();
  const u32 call = seen(state) + 1;
  if (column < lines) {
    uint4 line = x[i];
    if (owner == rank) {
      const uint4 before = residual[i];
      add_up(to, line, i, call, stop, rank, sum);
      line = onto(sum, before);
      send_to_all(to, line, i, call, rank);
    } else {  // where a rank's parts of an owner's rows come, there its totals of its own do
      send(to.at[owner] + place(call, rank, i), line);
      line = received(to.at[rank] + place(call, owner, i), stop);
      unpack(line, sum);
    }
    total[i] = line;
    square = squared(sum);
  }
  norm(sum, square, by, y, i, column < lines, lines, eps);
  finish(state, call);
}

// Of each row, in place; places of this rank count from ``first``. Of equal values the first rank's wins, and NaN over everything.
extern "C" __global__ void __launch_bounds__(THREADS) one_shot_best(const __grid_constant__ Inboxes to, float *peaks, u64 *places, u32 *state, const u32 *stop, int rows, int first, int rank) {
  let_next_in();
  wait_for_before();
  const u32 call = seen(state) + 1;
  const int i = blockIdx.x * THREADS + threadIdx.x;
  if (i < rows) {
    const uint4 own = make_uint4(__float_as_uint(peaks[i]), (u32)places[i] + first, 0, 0);
    send_to_all(to, own, i, call, rank);
    float best = 0;
    u32 at = 0;
#pragma unroll
    for (int other = 0; other < SIZE; other++) {
      const uint4 line = other == rank ? own : received(to.at[rank] + place(call, other, i), stop);
      const float peak = __uint_as_float(line.x);
      if (other == 0 || peak > best || peak != peak) best = peak, at = line.y;
    }
    peaks[i] = best, places[i] = at;
  }
  finish(state, call);
}
#endif
