// Keys and values in 8 and 4 bits (kernels/attention/kv_codes.py): what a head of bfloat16 becomes, to the bit as the twin has it. For sources
// that are compiled with KV, D (elements of a head) and whatever else they want.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short bf16;

#ifndef KV
#define KV 0
#endif
enum { PLAIN, INT8, E4M3, E5M2, UINT4 };  // KV, as KINDS of kernels/attention/kv_codes.py
constexpr bool WHOLE_CODES = KV == INT8 || KV == UINT4;  // codes are whole numbers, with scales of their own
#define MINUS_INFINITY __int_as_float(0xff800000)

__device__ __forceinline__ float low(u32 v) { return __uint_as_float(v << 16); }
__device__ __forceinline__ float high(u32 v) { return __uint_as_float(v & 0xffff0000u); }
__device__ __forceinline__ u32 pack(float first, float second) { u32 r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(second), "f"(first)); return r; }
__device__ __forceinline__ u32 transposed(u32 v) { u32 r; asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v)); return r; }

struct Scale { float by, least; u32 held; };  // of a head's codes: least is what code 0 means; as the cache holds both

__device__ __forceinline__ float most_of(float v) {
#pragma unroll
  for (int lanes = 16; lanes; lanes /= 2) v = fmaxf(v, __shfl_xor_sync(~0u, v, lanes));
  return v;
}

// Of one head, as words of two elements; a head that holds no finite numbers alone has NaN.
template <int WORDS> __device__ __forceinline__ Scale own_scale(const u32 (&x)[WORDS]) {
  u32 most = 0;
  float top = MINUS_INFINITY, bottom = MINUS_INFINITY;  // the least, negative
#pragma unroll
  for (int i = 0; i < WORDS; ++i) {
    most = max(most, max(x[i] << 16 & 0x7fffffff, x[i] & 0x7fff0000));
    top = fmaxf(top, fmaxf(low(x[i]), high(x[i])));
    bottom = fmaxf(bottom, fmaxf(-low(x[i]), -high(x[i])));
  }
  most = __reduce_max_sync(~0u, most);
  if (most >= 0x7f800000) return {0.0f, 0.0f, 0x7fc0};
  float least = KV == UINT4 ? -most_of(bottom) : 0.0f, span = KV == UINT4 ? fmaxf(most_of(top) - least, 0.0f) : __uint_as_float(most);
  u32 both = pack(__fdiv_rn(span, KV == UINT4 ? 15.0f : 127.0f), least);
  return {low(both), high(both), both};
}

__device__ __forceinline__ u32 whole(float x, const Scale& s) {
  int code = __float2int_rn(__fdiv_rn(x - s.least, s.by));
  return KV == UINT4 ? min(max(code, 0), 15) : min(max(code, -127), 127) & 255;
}

// Two elements' codes; floats that are too large saturate.
__device__ __forceinline__ u32 coded(u32 x, const Scale& s) {
  if (WHOLE_CODES) return s.by > 0.0f ? whole(low(x), s) | whole(high(x), s) << (KV == UINT4 ? 4 : 8) : 0;
  bf16 r;
  float first = __fdiv_rn(low(x), s.by), second = __fdiv_rn(high(x), s.by);
  if (KV == E4M3) asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(second), "f"(first));
  else asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(r) : "f"(second), "f"(first));
  return r;
}
