// What experts.cu is made for and from: sizes, what it is given, what a program shares, single instructions, inputs in 8 bits.
constexpr int WARPS = 16, THREADS = 32 * WARPS, TOGETHER = 8;
constexpr int STEPS_1 = HIDDEN / 128, STEPS_2 = INNER / 128, DEEP = (STEPS_1 + WARPS - 1) / WARPS;  // DEEP: steps of a warp, of gate and up
constexpr int STRIPS_1 = INNER / 8, STRIPS_2 = HIDDEN / 16;
constexpr int SHARERS = STEPS_1 < WARPS ? STEPS_1 : WARPS;  // warps that have steps of gate and up
constexpr int PAIRS = TOKENS * TOP_K, ENTRIES = (EXPERTS < PAIRS ? EXPERTS : PAIRS) + PAIRS / TOGETHER;
constexpr int STEPS_0 = ATTENDED / 128, DEEP_0 = (STEPS_0 + WARPS - 1) / WARPS;  // of attention's last product
constexpr int ROWS_HERE = ATTENDED ? (EXPERTS + PROGRAMS - 1) / PROGRAMS : 1;     // of the router, a program
constexpr int EACH_LANE = (EXPERTS + 31) / 32, MOST_ENTRIES = EXPERTS + 4 * TOP_K;  // of 32 tokens
constexpr u16 NONE = 0xFFFF;
#ifdef BITS
constexpr int PAD = 16;  // of rows of x: no two lanes read from one bank
constexpr int PIECES = BITS / 2, SIDE = 32 * SETS * (1 + ZEROS), STAGE = PIECES * 512 + SIDE, BATCH = 4;
#else
constexpr int PAD = 32, STAGE = 4096, BATCH = 1;
#endif
static_assert(HIDDEN % 128 == 0 && INNER % 128 == 0 && TOKENS <= 32 && TOP_K <= 32 && EXPERTS <= 1024, "shapes this kernel is for");
static_assert(!EIGHT || TOKENS >= TOGETHER, "inputs are rounded eight tokens at a time");
static_assert(!ATTENDED || (TOKENS <= 8 && !EIGHT && ATTENDED % 128 == 0 && STRIPS_2 <= PROGRAMS), "before which attention may be");

struct Params {
  const u16 *x, *logits;              // [T, HIDDEN], [T, EXPERTS]
  const unsigned char *up, *down;     // of all experts
  const float *up_unit, *down_unit;   // of codes: of each row as it lies
  const float *squares;               // [pieces, T]
  const u16 *residual;                // [T, HIDDEN]
  const void *scale;                  // [HIDDEN], scale_bytes each
  u16 *y, *scaled;                    // [T, HIDDEN]
  float *sums;                        // [STRIPS_2, T]
  u16 *inner;                         // [T, TOP_K, INNER]
  u64 *met;                           // programs that are through with gate and up, in all launches
  u32 *done;                          // [2, most entries]: strips, of this launch and (zeros) of the next
  const u16 *attended, *router;       // with ATTENDED alone, as is all below: [T, ATTENDED], [EXPERTS, HIDDEN]
  const unsigned char *out, *later;   // [HIDDEN, ATTENDED]; [later_rows, HIDDEN], of the product that follows, or null: scaled and sums are wanted
  const float *out_unit, *later_unit; // of codes
  const void *between;                // [HIDDEN], as scale: of the norm before experts
  u64 *heard, *said, *handed;         // behind the launch's number: two values of the stream [TOKENS, HIDDEN / 2], a logit [TOKENS, EXPERTS]; two of y
  u16 *projected;                     // [T, later_rows]
  int tokens, pieces, logits_row, up_tiles, down_tiles, scale_bytes, between_bytes, later_rows;
  float eps;
};

struct Shared {
  u32 members[EXPERTS];             // tokens, a bit each
  u16 pair[ENTRIES][TOGETHER];      // token * TOP_K + choice
  u16 expert[ENTRIES];
  u16 chosen[PAIRS];
  float weight[PAIRS], unit[PAIRS], rstd[TOKENS], x_unit[TOKENS];
  float squares[WARPS][TOKENS], peak[EIGHT ? WARPS : 1][TOKENS], dots[WARPS][ROWS_HERE][ATTENDED ? TOKENS : 1];
  float stream[ATTENDED ? TOKENS : 1][16];
  alignas(16) u16 x[ATTENDED ? TOKENS : 1][ATTENDED ? HIDDEN + PAD : 8];  // times the weight of the norm
  int entries;
};
union Meeting {
  float parts[2][BATCH][WARPS][32][4];
  float sums[WARPS][TOKENS][16];
};
constexpr int BESIDE = (sizeof(Shared) + 127) / 128 * 128 + sizeof(Meeting);
constexpr int FITTING = (232448 - BESIDE - 1024) / (WARPS * STAGE), STAGES = FITTING < 3 ? FITTING : 3;  // more only keep the first ones waiting
static_assert(STAGES >= 2 && DEEP_0 <= STAGES, "a ring");
extern __shared__ __align__(128) unsigned char memory[];
extern "C" __device__ const int shared_bytes = BESIDE + STAGES * WARPS * STAGE;

__device__ __forceinline__ float low(u32 v) { return __uint_as_float(v << 16); }
__device__ __forceinline__ float high(u32 v) { return __uint_as_float(v & 0xffff0000u); }
__device__ __forceinline__ u16 narrow(float v) { u16 r; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(v)); return r; }
__device__ __forceinline__ float seen(const float *p) { float v; asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory"); return v; }
__device__ __forceinline__ u16 seen(const u16 *p) { u16 v; asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(v) : "l"(p) : "memory"); return v; }
__device__ __forceinline__ u32 seen(const u32 *p) { u32 v; asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v; }
__device__ __forceinline__ void seen(u32 *v, const void *p) {
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "l"(p) : "memory");
}
__device__ __forceinline__ void read16(u32 *v, u32 at) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(at) : "memory");
}
__device__ __forceinline__ void say(u64 *to, u32 launch, u32 what) {  // to all programs
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"((u64)launch << 32 | what) : "memory");
}
__device__ __forceinline__ u64 look(const u64 *at) {  // at what another program may say at any time
  u64 v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(at) : "memory");
  return v;
}
__device__ __forceinline__ void look(u64 (&v)[2], const u64 *at) {
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(v[0]), "=l"(v[1]) : "l"(at) : "memory");
}
__device__ __forceinline__ void copy16(u32 to, const void *from, u64 once) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "l"(once) : "memory");
}
__device__ __forceinline__ void close_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void arrived() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
  __syncwarp();
}
__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
    : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <int FIRST, int LAST> __device__ __forceinline__ float most(float v) {  // of lanes that differ in these bits
#pragma unroll
  for (int far = FIRST; far <= LAST; far *= 2) v = fmaxf(v, __shfl_xor_sync(~0u, v, far));
  return v;
}
template <int FIRST, int LAST> __device__ __forceinline__ float sum_of(float v) {
#pragma unroll
  for (int far = FIRST; far <= LAST; far *= 2) v += __shfl_xor_sync(~0u, v, far);
  return v;
}

// --- inputs in 8 bits, as norm/triton_rounded.py has them

__device__ __forceinline__ float unit_of(float peak) {
  float unit = fmaxf(peak, 1e-10f) / (EIGHT == 1 ? 448.0f : 127.0f);
  return POWERS ? __uint_as_float((__float_as_uint(unit) + 0x7FFFFF) & 0x7F800000) : unit;
}
__device__ __forceinline__ u32 rounded(u32 v, float unit, float inverse) {
  float a = low(v) * inverse, b = high(v) * inverse;
  if (EIGHT == 1) {
    asm("{\n.reg .b16 c, l, h;\n.reg .b32 w;\ncvt.rn.satfinite.e4m3x2.f32 c, %1, %0;\ncvt.rn.f16x2.e4m3x2 w, c;\nmov.b32 {l, h}, w;\n"
        "cvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;\n}" : "+f"(a), "+f"(b));
  } else {
    a = rintf(fminf(fmaxf(a, -128.0f), 127.0f)), b = rintf(fminf(fmaxf(b, -128.0f), 127.0f));
  }
  return pack(a * unit, b * unit);
}
__device__ __forceinline__ float peak_of(const u32 *v) {  // of 32 values
  float peak = 0;
#pragma unroll
  for (int i = 0; i < 16; i++) peak = fmaxf(peak, fmaxf(fabsf(low(v[i])), fabsf(high(v[i]))));
  return peak;
}
__device__ __forceinline__ void round_inputs(u32 *v, float unit) {  // a lane's 32 of a step
  if (EACH) unit = unit_of(most<1, 2>(peak_of(v)));
  float inverse = 1.0f / unit;
#pragma unroll
  for (int i = 0; i < 16; i++) v[i] = rounded(v[i], unit, inverse);
}
