// Of the decode step: x, as it comes; weights times x; sums of the warps.

// --- products

constexpr int STEPS = CHUNK / 32;
struct Operand { u32 v[STEPS][4 * HALVES]; };  // x: elements 8 t + 32 s … + 7 of sequence g (and g + 8) are lane (g, t)'s

// ``from``: the first sequence's first element of this chunk.
__device__ __forceinline__ void load_x(Operand& x, const bf16* from, const Deal& d, u32 live, int lane) {
  int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int h = 0; h < HALVES; ++h) {
    bool here = (live >> (g + 8 * h)) & 1;
    const bf16* at = from + (g + 8 * h) * d.k + t * 8;
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      Vec v = {0, 0, 0, 0};
      if (here && s * 32 < d.kc) v = look(at + s * 32);
      x.v[s][4 * h] = v.x; x.v[s][4 * h + 1] = v.y; x.v[s][4 * h + 2] = v.z; x.v[s][4 * h + 3] = v.w;
    }
  }
}

// Looks again at what had not come.
__device__ __forceinline__ void settle_x(Operand& x, const bf16* from, const Deal& d, int lane) {
  int g = lane / 4, t = lane % 4;
  Patience patience;
  bool lacking;
  do {
    lacking = false;
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
      const bf16* at = from + (g + 8 * h) * d.k + t * 8;
#pragma unroll
      for (int s = 0; s < STEPS; ++s) {
        u32 (&v)[4 * HALVES] = x.v[s];
        if (lacks(v[4 * h], v[4 * h + 1], v[4 * h + 2], v[4 * h + 3])) {
          Vec again = look(at + s * 32);
          v[4 * h] = again.x; v[4 * h + 1] = again.y; v[4 * h + 2] = again.z; v[4 * h + 3] = again.w;
          lacking = true;
        }
      }
    }
    lacking = __any_sync(~0u, lacking);
    if (lacking) patience.spend();
  } while (lacking);
}

// Pairs of x as those of codes come out of their words: elements 0 and 2, 1 and 3.
__device__ __forceinline__ void pair_x(Operand& x) {
#pragma unroll
  for (int s = 0; s < STEPS; ++s)
#pragma unroll
    for (int i = 0; i < 4 * HALVES; i += 2) {
      u32 even = permuted(x.v[s][i], x.v[s][i + 1], 0x5410), odd = permuted(x.v[s][i], x.v[s][i + 1], 0x7632);
      x.v[s][i] = even, x.v[s][i + 1] = odd;
    }
}

__device__ __forceinline__ Vec weights_at(u32 at, int step) {
  if (ITEM == 2) return load_shared(at + step * 64);
  u32 first, second;
  Vec w;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(first), "=r"(second) : "r"(at + step * 32) : "memory");
  widen_four(first, w.x, w.y);
  widen_four(second, w.z, w.w);
  return w;
}

__device__ __forceinline__ void multiply(float (&acc)[4], const Operand& x, u32 slot, const Deal& d, int lane) {
  u32 at = slot + (lane / 4) * d.pitch + (lane % 4) * 8 * ITEM;
  float c[4][4] = {};
#pragma unroll
  for (int s = 0; s < STEPS; ++s)
    if (s * 32 < d.kc) {
      Vec w = weights_at(at, s);
      const u32 (&v)[4 * HALVES] = x.v[s];
      mma(c[2 * (s % 2)], v[0], HALVES == 2 ? v[4 * (HALVES - 1)] : 0, v[1], HALVES == 2 ? v[4 * (HALVES - 1) + 1] : 0, w.x, w.y);
      mma(c[2 * (s % 2) + 1], v[2], HALVES == 2 ? v[4 * (HALVES - 1) + 2] : 0, v[3], HALVES == 2 ? v[4 * (HALVES - 1) + 3] : 0, w.z, w.w);
    }
#pragma unroll
  for (int i = 0; i < 2 * HALVES; ++i) acc[i] = (c[0][i] + c[1][i]) + (c[2][i] + c[3][i]);
}

__device__ __forceinline__ void keep_partial(Shared& s, const float (&acc)[4], bool add, int slot, int warp, int lane) {
#pragma unroll
  for (int h = 0; h < HALVES; ++h) {
    float2* at = (float2*)&s.red[((slot * WARPS + warp) * HALVES + h) * 64] + lane;
    float2 before = add ? *at : make_float2(0.0f, 0.0f);
    *at = make_float2(before.x + acc[2 * h], before.y + acc[2 * h + 1]);
  }
}

// Sums of rows t and t + 4 of a tile for sequence g: over the warps of its team, in their order.
__device__ __forceinline__ void whole(const Shared& s, int shift, int slot, int half, int lane, float& first, float& second) {
  int g = lane / 4, t = lane % 4, team = 1 << shift, begin = (slot & ((WARPS >> shift) - 1)) * team;
  first = second = 0.0f;
#pragma unroll
  for (int w = 0; w < WARPS; ++w)
    if (w < team) {
      const float* at = &s.red[((slot * WARPS + begin + w) * HALVES + half) * 64 + g * 8 + t];
      first += at[0];
      second += at[4];
    }
}

// --- between programs

__device__ __forceinline__ bf16* handed(const Params& p, int layer, int at) { return p.exchange + (layer & 1) * EXCHANGE + at; }

__device__ __forceinline__ float* final_squares(const Params& p) { return (float*)(p.exchange + 2 * EXCHANGE); }

// This program's share of the first so many values of a layer's buffers becomes NOTHING.
template <int COUNT> __device__ __forceinline__ void forget_some(const Params& p, int layer) {
  static_assert(COUNT % 8 == 0, "whole vectors");
  Vec* all = (Vec*)handed(p, layer, 0);
  for (int i = blockIdx.x * THREADS + threadIdx.x; i < COUNT / 8; i += GRID * THREADS) all[i] = Vec{NOTHING, NOTHING, NOTHING, NOTHING};
}
__device__ __forceinline__ void forget(const Params& p, int layer) {
  forget_some<EXCHANGE>(p, layer);
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
}
// Of the last layer's, when the step is done: nobody hands on x there, and its sums of squares have a place of their own.
__device__ __forceinline__ void forget_last(const Params& p) { forget_some<NEXT_SQUARES_AT>(p, LAYERS - 1); }
// What the last launch left there is this program's alone to take back: others look there when they have had its part of every product.
__device__ __forceinline__ void forget_final(const Params& p) {
  if (threadIdx.x < ROWS) ((u32*)final_squares(p))[blockIdx.x * ROWS + threadIdx.x] = NOTHING;
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
}
