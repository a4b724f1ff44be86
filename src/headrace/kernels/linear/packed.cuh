// Weights of 4 or 8 bits for ring.cu and packed_gemm.cu: how a program multiplies them. They leave memory as they are kept, and are widened to bfloat16 in the
// registers that the matrix instruction reads (after MARLIN, Frantar et al. 2024).
//
// A block is 64 rows of W by DEPTH of K (packing.py lays them out): codes, then the scales (float16, in units of ``units``) of each of SETS
// groups of K for 64 rows, then with ZEROS as many offsets (bfloat16): the code of zero, at 4 bits plus 128. A thread has codes of 16 bytes
// and 16 bytes, in the order in which the instruction wants them.
//
// Behind matrix.cuh. Given from outside: ROWS, BITS, SETS, ZEROS, FLOATS (codes are e2m1 or e4m3; else integers, whose zero is in the middle
// unless ZEROS tell), and mma(), the instruction for ROWS that takes
// its 64 rows from registers; without ROWS, how codes are widened is all there is.
#define DEPTH 128
#define HALVES (SETS > 2 ? SETS : 2)  // parts of a step whose sums are kept apart
#define SIXTEENS (DEPTH / 16 / HALVES)
#define WORDS (SIXTEENS * BITS / 4)  // of codes, a thread and half
#define CODE_BYTES (64 * DEPTH * BITS / 8)
#define BLOCK_BYTES (CODE_BYTES + SETS * 128 * (1 + ZEROS))

__device__ __forceinline__ void load_block(u32 to, const unsigned char *blocks, int tile, int step, int steps, u32 bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
    ::"r"(to), "l"(blocks + ((u64)tile * steps + step) * BLOCK_BYTES), "n"(BLOCK_BYTES), "r"(bar), "l"(ONCE) : "memory");
}
__device__ __forceinline__ u32 and_or(u32 a, u32 mask, u32 rest) {
  u32 r;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(r) : "r"(a), "r"(mask), "r"(rest));
  return r;
}
__device__ __forceinline__ u32 sub2(u32 a, u32 b) { u32 r; asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
__device__ __forceinline__ u32 mul2(u32 a, u32 b) { u32 r; asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
__device__ __forceinline__ u32 read_twice(u32 at) {  // a bfloat16, in both halves of a register
  u16 v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(at) : "memory");
  return v * 0x00010001u;
}
__device__ __forceinline__ float read_scale(u32 at) {
  float v;
  asm volatile("{\n.reg .b16 half;\nld.shared.b16 half, [%1];\ncvt.f32.f16 %0, half;\n}" : "=f"(v) : "r"(at) : "memory");
  return v;
}
template <int N> __device__ __forceinline__ void read_words(u32 (&v)[N], u32 at, u32 stride) {  // 16 bytes a thread and piece
  if (N == 2) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v[0]), "=r"(v[1]) : "r"(at) : "memory");
    return;
  }
#pragma unroll
  for (int i = 0; i + 3 < N; i += 4)
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(v[i]), "=r"(v[i + 1]), "=r"(v[i + 2]), "=r"(v[i + 3]) : "r"(at + i / 4 * stride) : "memory");
}

// ``a[h + 2 * side]``: row g + 8 h, columns 2t + 8 side and the next. ``zero[h]``: what is taken away, twice.
__device__ __forceinline__ void widen(u32 (&a)[4], const u32 *codes, const u32 (&zero)[2]) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if (BITS == 4 && !FLOATS) {
      a[i] = sub2(and_or(codes[0] >> 4 * i, 0x000F000F, 0x43004300), zero[i % 2]);  // 128 + code
    } else if (BITS == 4) {  // the exponent is 126 too small
      u32 code = codes[0] >> 4 * i;
      a[i] = mul2(and_or(code << 12, 0x80008000, (code & 0x00070007) << 6), 0x7E807E80);
    } else if (FLOATS) {  // 120 too small
      u32 code = codes[i / 2];
      u32 size = (i % 2 ? code >> 4 : code << 4) & 0x07F007F0;
      a[i] = mul2(and_or(i % 2 ? code : code << 8, 0x80008000, size), 0x7B807B80);
    } else {
      u32 code = codes[i / 2] >> 8 * (i % 2), over;
      asm("lop3.b32 %0, %1, %2, %3, 0xAE;" : "=r"(over) : "r"(code), "r"(0x00800080), "r"(0x43004300));  // 256 for a code below 128, else 128
      a[i] = sub2(and_or(code, 0x007F007F, 0x43004300), over);  // the code's seven low bits and 128: exact, as code - 128
      if (ZEROS) a[i] = sub2(a[i], sub2(zero[i % 2], 0x43004300));
    }
  }
}

#ifdef ROWS
#if SETS == 1
// Of a step all sums have one scale. A half's codes are widened while the half before is multiplied, of the step before, too.
struct Packed {
  float part[ROWS / 2], scale[2];
  u32 a[2][SIXTEENS][4], zero[2], own = threadIdx.x % 128 * 16, beside = CODE_BYTES + (threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4) * 2;

  __device__ __forceinline__ Packed() {
    keep(own), keep(beside);
#pragma unroll
    for (int i = 0; i < ROWS / 2; i++) part[i] = 0;
    scale[0] = scale[1] = 0;
  }
  __device__ __forceinline__ void prepare(u32 block, int half) {
    u32 codes[WORDS];
    read_words(codes, block + half * WORDS / 4 * 2048 + own, 2048);
    finished<1>();  // who reads these registers
#pragma unroll
    for (int j = 0; j < SIXTEENS; j++) widen(a[half][j], codes + j * BITS / 4, zero);
  }
  __device__ __forceinline__ void multiply(u32 inputs, int half) {
    begin();
#pragma unroll
    for (int j = 0; j < SIXTEENS; j++) {
      int k = half * SIXTEENS + j;
      mma(part, a[half][j], described(inputs + k / 4 * (ROWS * 128)) + k % 4 * 2, k);
    }
    commit();
  }
  __device__ __forceinline__ void take(float (&c)[ROWS / 2]) {
    finished<0>();
    hold(part);
#pragma unroll
    for (int i = 0; i < ROWS / 2; i++) c[i] += scale[i / 2 % 2] * part[i];
  }
  // The step before is over behind ``first``: nobody reads its inputs any more. ``inputs``: 64 of K of all rows, and again.
  // ``bar``, ``parity``: of what has arrived. Only what is above a second wait for it is done while something is still multiplied.
  __device__ __forceinline__ void first(float (&c)[ROWS / 2], u32 block, u32 bar, u32 parity) {
    float now[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      zero[h] = ZEROS ? read_twice(block + beside + 128 + h * 16) : BITS == 4 ? 0x43084308u : 0x43004300u;
      now[h] = read_scale(block + beside + h * 16);
    }
    prepare(block, 0);
    wait(bar, parity);
    take(c);
    scale[0] = now[0], scale[1] = now[1];
  }
  __device__ __forceinline__ void second(u32 block, u32 inputs) {
    multiply(inputs, 0);
    prepare(block, 1);
    multiply(inputs, 1);
  }
};
#else
struct Packed {
  float part[2][ROWS / 2], scale[2][2];
  u32 a[2][SIXTEENS][4];

  // One step of K. ``inputs``: 64 of K of all rows, and again.
  __device__ __forceinline__ void step(float (&c)[ROWS / 2], u32 block, u32 inputs) {
    int thread = threadIdx.x % 128, row = thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
      int now = half % 2, set = half * SETS / HALVES;
      u32 codes[WORDS], zero[2] = {BITS == 4 ? 0x43084308u : 0x43004300u, BITS == 4 ? 0x43084308u : 0x43004300u};
      int at = half * WORDS;
      read_words(codes, block + at / 4 * 2048 + thread * 16 + at % 4 * 4, 2048);
      u32 beside = block + CODE_BYTES + (set * 64 + row) * 2;
#pragma unroll
      for (int h = 0; h < 2; h++) {
        if (ZEROS) zero[h] = read_twice(beside + SETS * 128 + h * 16);
        scale[now][h] = read_scale(beside + h * 16);
      }
#pragma unroll
      for (int j = 0; j < SIXTEENS; j++) widen(a[now][j], codes + j * BITS / 4, zero);
      begin();
#pragma unroll
      for (int j = 0; j < SIXTEENS; j++) {
        int k = half * SIXTEENS + j;
        mma(part[now], a[now][j], described(inputs + k / 4 * (ROWS * 128)) + k % 4 * 2, j);
      }
      commit();
      if (half) {
        finished<1>();
        take(c, 1 - now);
      }
    }
    finished<0>();
    take(c, (HALVES - 1) % 2);
  }
  __device__ __forceinline__ void take(float (&c)[ROWS / 2], int which) {
    hold(part[which]);
#pragma unroll
    for (int i = 0; i < ROWS / 2; i++) c[i] += scale[which][i / 2 % 2] * part[which][i];
  }
};
#endif
#endif
