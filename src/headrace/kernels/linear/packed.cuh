// Weights of 1 to 8 bits for ring.cu and packed_gemm.cu: how a program multiplies them. They leave memory as they are kept, and are widened to bfloat16 in the
// registers that the matrix instruction reads (after MARLIN, Frantar et al. 2024).
//
// A block is 64 rows of W by DEPTH of K (packing.py lays them out): codes, plane by plane, then the scales of each of SETS groups of K for 64
// rows (in units of ``units``), then with ZEROS as many offsets (bfloat16): the code of zero, of fewer than 8 bits plus 128; or with SHIFTS
// what is added, like the scales. A thread has codes of up to 16 bytes and 16 bytes, in the order in which the instruction wants them.
//
// Behind matrix.cuh. Given from outside: ROWS, BITS, SETS, ZEROS, SHIFTS, SCALES (as packing.Scales numbers them), FLOATS (codes are e2m1 or
// e4m3; else integers, whose zero is in the middle unless ZEROS or SHIFTS tell), and mma(), the instruction for ROWS that takes
// its 64 rows from registers. Without ROWS, how codes of 4 and 8 bits are widened is all there is.
#define DEPTH 128
#define HALVES 2  // of a step
#define SIXTEENS (DEPTH / 16 / HALVES)
#define WORDS (SIXTEENS * (BITS & 12) / 4)  // of a thread and half, of the plane of 8 or 4 bits
#define CODE_BYTES (64 * DEPTH * BITS / 8)
#ifndef SCALES
#define SCALES 0
#define SHIFTS 0
#endif
#define SCALE_BYTES (SCALES == 3 ? 128 + 64 * SETS : (SCALES ? 64 : 128) * SETS)
#define BLOCK_BYTES (CODE_BYTES + SCALE_BYTES * (1 + (ZEROS || SHIFTS)))

__device__ __forceinline__ void load_bytes(u32 to, const unsigned char *from, u32 size, u32 bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
    ::"r"(to), "l"(from), "r"(size), "r"(bar), "l"(ONCE) : "memory");
}
__device__ __forceinline__ void load_block(u32 to, const unsigned char *blocks, int tile, int step, int steps, u32 bar) {
  load_bytes(to, blocks + ((u64)tile * steps + step) * BLOCK_BYTES, BLOCK_BYTES, bar);
}
__device__ __forceinline__ u32 and_or(u32 a, u32 mask, u32 rest) {
  u32 r;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(r) : "r"(a), "r"(mask), "r"(rest));
  return r;
}
__device__ __forceinline__ u32 sub2(u32 a, u32 b) { u32 r; asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
__device__ __forceinline__ u32 mul2(u32 a, u32 b) { u32 r; asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
__device__ __forceinline__ u32 fma2(u32 a, u32 b, u32 c) { u32 r; asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c)); return r; }
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
// Codes of up to 8 bits in bfloat16's place are as many times 2^-133: the least that it knows, whose exponent's last bit goes on counting. So one
// fma makes numbers of them. Those of 4 bits of the second row stay 4 bits further up, and get a 16th of the factor.
#define INTEGERS (!FLOATS)
#define IN_PLACE (BITS == 4 && INTEGERS)
#ifndef SCALED_CODES
#define SCALED_CODES (SETS > 1 || SHIFTS)  // each weight is scaled; else sums of a step are
#endif
// Weights are so many powers of 2 too small. A scale is up to 2^15, and what it is read times must hold 2^15 of them beside (SCALES 3), or one.
#define TINY (!INTEGERS ? 0 : !SCALED_CODES ? 6 : SCALES == 3 ? 36 : 21)
#define UNWIDENED ((float)(1ull << TINY))

__device__ __forceinline__ u32 twice(float v) { return pack(v, v); }
__device__ __forceinline__ u32 read_word(u32 at) { u32 v; asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory"); return v; }
__device__ __forceinline__ u32 read_byte(u32 at) { u32 v; asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(at) : "memory"); return v; }

// Scales or shifts of one row, if ``there`` are some, times ``by``. ``at``: where they begin in its block.
struct Section {
  u32 small[SETS > 4 ? 2 : 1], at, row;
  float by, lift;
  __device__ __forceinline__ Section(u32 at_, u32 row_, bool there, float by_) : at(at_), row(row_), by(by_) {
    if (SCALES != 3 || !there) return;
    by *= read_scale(at + row * 2);
#pragma unroll
    for (int i = 0; i < (SETS + 3) / 4; i++) small[i] = read_word(at + 128 + row * SETS + 4 * i) ^ 0x80808080;
    lift = -32896 * by;
  }
  __device__ __forceinline__ float of(int set) {
    if (SCALES == 3) return fmaf(__uint_as_float(__byte_perm(small[set / 4], 0x47000000, 0x7404 | set % 4 << 4)), by, lift);  // 2^15 + byte: exact
    if (SCALES == 0) return read_scale(at + (set * 64 + row) * 2) * by;
    u32 code = read_byte(at + set * 64 + row);
    if (SCALES == 1) return __uint_as_float(code << 23) * by;
    return __uint_as_float((code & 128) << 24 | (code & 127) << 20) * (0x1p120f * by);
  }
};

struct Codes {  // of a thread, 64 of K
  u32 most[WORDS ? WORDS : 1], twos[2], ones;
  __device__ __forceinline__ Codes(u32 own, int half) {  // ``own``: 16 bytes a thread behind the beginning of its block
    if constexpr (WORDS > 0) read_words(most, own + half * (WORDS / 4) * 2048, 2048);
    u32 thread = threadIdx.x % 128;
    if (BITS & 2) read_words(twos, own - thread * 8 + ((BITS & 4) * 1024 + half * 1024), 0);
    if (BITS & 1) ones = read_word(own - thread * 12 + ((BITS & 6) * 1024 + half * 512));
  }
  // The pair of codes that makes ``widen``'s a[i], of 16 of K.
  __device__ __forceinline__ u32 pair(int j, int i) const {
    if (IN_PLACE) return (i / 2 ? most[j] >> 8 : most[j]) & (i % 2 ? 0x00F000F0 : 0x000F000F);
    if (BITS == 8) return i % 2 ? __byte_perm(most[j * 2 + i / 2], 0, 0x4341) : most[j * 2 + i / 2] & 0x00FF00FF;
    constexpr int ABOVE = BITS & 4, LAST = BITS & 6;  // where bits of twos and ones go
    u32 code = BITS & 4 ? most[j] >> 4 * i & 0x000F000F : 0;
    if (BITS & 2) {  // two bits of the first at 2 i, of the second 16 further up
      u32 two = __byte_perm(twos[j / 2], 0, j % 2 ? 0x4342 : 0x4140);
      code = and_or(ABOVE > 2 * i ? two << (ABOVE - 2 * i) : two >> (2 * i - ABOVE), 0x00030003 << ABOVE, code);
    }
    if (BITS & 1) {
      u32 one = __byte_perm(ones, 0, 0x4440 | j) * 0x1001;
      code = and_or(LAST > i ? one << (LAST - i) : one >> (i - LAST), 0x00010001 << LAST, code);
    }
    return code;
  }
};

// What scales of rows g, and g + 8, are read times.
__device__ __forceinline__ constexpr float by_scale(int h) {
  return !INTEGERS ? 1 : ZEROS ? 64 / UNWIDENED : 64 / UNWIDENED * (IN_PLACE && h ? 0x1p123f : 0x1p127f);
}
#define SCALES_OF(at, row, there) {{at, row, there, by_scale(0)}, {at, row + 8, there, by_scale(1)}}
#define SHIFTS_OF(at, row) {{at, row, SHIFTS, 1 / UNWIDENED}, {at, row + 8, SHIFTS, 1 / UNWIDENED}}

struct Factors {  // of rows g and g + 8, twice: codes times ``by`` and ``add``; where each has a zero and a scale, ``times`` comes behind
  u32 by[2], add[2], times[2];
  // ``block``: its scales; ``row``: of the first.
  __device__ __forceinline__ void read(u32 block, u32 row, int set, Section (&scales)[2], Section (&shifts)[2]) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      u32 zero = ZEROS ? read_twice(block + SCALE_BYTES + (set * 64 + row + 8 * h) * 2) : 0;
      bool high = IN_PLACE && h;
      if (INTEGERS && (ZEROS || !SCALED_CODES)) {
        by[h] = high ? 0x7D007D00 : 0x7F007F00;  // 2^123, 2^127
        add[h] = ZEROS ? fma2(zero, 0xBC80BC80, BITS < 8 ? 0x40004000 : 0) : twice(-0x1p-6f * (1 << (BITS - 1)));  // of zeros without their 128
        if (SCALED_CODES) times[h] = twice(scales[h].of(set));
      } else if (INTEGERS) {
        by[h] = twice(scales[h].of(set));
        add[h] = SHIFTS ? twice(shifts[h].of(set)) : mul2(by[h], 0x80008000u | 0x10001u << (BITS - 1 + (high ? 4 : 0)));  // of the middle code
      } else {
        add[h] = ZEROS ? zero : 0x43004300u;
        if (SCALED_CODES) times[h] = twice(scales[h].of(set));
      }
    }
  }
  __device__ __forceinline__ void widen(u32 (&a)[4], const Codes &codes, int j) const {
    if constexpr (INTEGERS) {
#pragma unroll
      for (int i = 0; i < 4; i++) a[i] = fma2(codes.pair(j, i), by[i % 2], add[i % 2]);
    } else {
      ::widen(a, codes.most + j * BITS / 4, add);
    }
    if (SCALED_CODES && (ZEROS || !INTEGERS)) {
#pragma unroll
      for (int i = 0; i < 4; i++) a[i] = mul2(a[i], times[i % 2]);
    }
  }
};

#if ROWS <= 16
#define BY_WARP  // mma of one warp: the other waits for four of them, and takes as long for 8 rows as for more
// Sums of even and odd sixteens of K are kept apart, so that half as many instructions wait for each other; where all of a step have one
// scale, those of a step are.
struct Packed {
  float part[2][ROWS / 2];
  u32 own = threadIdx.x % 128 * 16, row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  u32 place = threadIdx.x % 8 * 128 + (threadIdx.x % 32 / 8 ^ threadIdx.x % 8) * 16;  // of x that a lane reads: a row of eight, 16 bytes of four times as many

  __device__ __forceinline__ Packed() { keep(own), keep(row), keep(place), clear(); }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < ROWS; i++) part[i / (ROWS / 2)][i % (ROWS / 2)] = 0;
  }
  __device__ __forceinline__ void step(float (&c)[ROWS / 2], u32 block, u32 inputs) {
    constexpr int KINDS = SETS > 1 ? SETS / 2 : 1;
    u32 side = block + CODE_BYTES, after = side + SCALE_BYTES;
    Section scales[2] = SCALES_OF(side, row, SCALED_CODES), shifts[2] = SHIFTS_OF(after, row);
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
      Factors factors[KINDS];
      Codes codes(block + own, half);
#pragma unroll
      for (int k = 0; k < KINDS; k++) factors[k].read(side, row, SETS > 1 ? half * KINDS + k : 0, scales, shifts);
      u32 x[ROWS / 8][SIXTEENS][2];
#pragma unroll
      for (int n = 0; n < ROWS / 8; n++)
#pragma unroll
        for (int j = 0; j < SIXTEENS; j += 2)
          asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
            : "=r"(x[n][j][0]), "=r"(x[n][j][1]), "=r"(x[n][j + 1][0]), "=r"(x[n][j + 1][1]) : "r"(inputs + (half * ROWS + n * 8) * 128 + (place ^ j * 32)) : "memory");
#pragma unroll
      for (int j = 0; j < SIXTEENS; j++) {
        u32 a[4];
        factors[j * KINDS / SIXTEENS].widen(a, codes, j);
#pragma unroll
        for (int n = 0; n < ROWS / 8; n++) {
          float *sums = part[j % 2] + 4 * n;
          asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(x[n][j][0]), "r"(x[n][j][1]));
        }
      }
    }
    if (SCALED_CODES) return;
    float scale[2] = {read_scale(side + row * 2), read_scale(side + row * 2 + 16)};
#pragma unroll
    for (int i = 0; i < ROWS / 2; i++) c[i] += scale[i / 2 % 2] * (part[0][i] + part[1][i]);
    clear();
  }
  __device__ __forceinline__ void take(float (&c)[ROWS / 2]) {
#pragma unroll
    for (int i = 0; i < ROWS / 2; i++) c[i] += part[0][i] + part[1][i];
  }
};
#else
// A half's codes are widened while the half before is multiplied, of the step before, too. Where all sums of a step have one scale, they are
// kept apart until then.
struct Packed {
#if !SCALED_CODES
  float part[ROWS / 2], scale[2];
#endif
  u32 a[2][SIXTEENS][4], own = threadIdx.x % 128 * 16, row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;

  __device__ __forceinline__ Packed() {
    keep(own), keep(row);
#if !SCALED_CODES
#pragma unroll
    for (int i = 0; i < ROWS / 2; i++) part[i] = 0;
    scale[0] = scale[1] = 0;
#endif
  }
  __device__ __forceinline__ void prepare(u32 block, int half) {
    constexpr int KINDS = SETS > 1 ? SETS / 2 : 1;
    u32 side = block + CODE_BYTES, after = side + SCALE_BYTES;
    Section scales[2] = SCALES_OF(side, row, SCALED_CODES), shifts[2] = SHIFTS_OF(after, row);
    Factors factors[KINDS];
    Codes codes(block + own, half);
#pragma unroll
    for (int k = 0; k < KINDS; k++) factors[k].read(side, row, SETS > 1 ? half * KINDS + k : 0, scales, shifts);
    finished<1>();  // who reads these registers
#pragma unroll
    for (int j = 0; j < SIXTEENS; j++) factors[j * KINDS / SIXTEENS].widen(a[half][j], codes, j);
  }
  __device__ __forceinline__ void multiply(float (&c)[ROWS / 2], u32 inputs, int half) {
    begin();
#pragma unroll
    for (int j = 0; j < SIXTEENS; j++) {
      int k = half * SIXTEENS + j;
#if SCALED_CODES
      mma(c, a[half][j], described(inputs + k / 4 * (ROWS * 128)) + k % 4 * 2, 1);
#else
      mma(part, a[half][j], described(inputs + k / 4 * (ROWS * 128)) + k % 4 * 2, k);
#endif
    }
    commit();
  }
  __device__ __forceinline__ void take(float (&c)[ROWS / 2]) {
    finished<0>();
#if SCALED_CODES
    hold(c);
#else
    hold(part);
#pragma unroll
    for (int i = 0; i < ROWS / 2; i++) c[i] += scale[i / 2 % 2] * part[i];
#endif
  }
  // The step before is over behind ``first``: nobody reads its inputs any more. ``inputs``: 64 of K of all rows, and again.
  // ``bar``, ``parity``: of what has arrived. Only what is above a second wait for it is done while something is still multiplied.
  __device__ __forceinline__ void first(float (&c)[ROWS / 2], u32 block, u32 bar, u32 parity) {
#if !SCALED_CODES
    float now[2];
#pragma unroll
    for (int h = 0; h < 2; h++) now[h] = read_scale(block + CODE_BYTES + (row + 8 * h) * 2);
#endif
    prepare(block, 0);
    wait(bar, parity);
    take(c);
#if !SCALED_CODES
    scale[0] = now[0], scale[1] = now[1];
#endif
  }
  __device__ __forceinline__ void second(float (&c)[ROWS / 2], u32 block, u32 inputs) {
    multiply(c, inputs, 0);
    prepare(block, 1);
    multiply(c, inputs, 1);
  }
};
#endif
#endif
