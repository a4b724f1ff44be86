// Weights for experts.cu: what a warp has on their way, and a step of K that has come times inputs.
// A strip is 16 rows. ``strip_at``: where a lane's begin, ``tall`` rows behind each other and as many ``gap`` bytes further; ``copy_strip``: a
// step of it, into ``to`` of shared memory.
#ifdef BITS
constexpr int STEP = BLOCK_BYTES;  // bytes from one step to the next
__device__ __forceinline__ int pair_of(int i) { return i / 2 * 8 + i % 2 * 4 + threadIdx.x % 4; }  // of neighbours in a step of x, a lane's
__device__ __forceinline__ const unsigned char *strip_at(const unsigned char *weights, int expert, int tiles, int row, int, int steps) {
  return weights + (u64)(expert * tiles + row / 4) * steps * BLOCK_BYTES;
}
__device__ __forceinline__ void copy_strip(u32 to, const unsigned char *block, int row, int, u64, u64 once) {
  int lane = threadIdx.x % 32;
  to += lane * 16, block += row % 4 * 512 + lane * 16;
#pragma unroll
  for (int i = 0; i < PIECES; i++) copy16(to + i * 512, block + i * 2048, once);
  if (lane < SIDE / 16) copy16(to + PIECES * 512, block + CODE_BYTES - row % 4 * 480 - lane * 16 + lane / 2 * 128 + lane % 2 * 16, once);
}
#else
constexpr int STEP = 256;
__device__ __forceinline__ int pair_of(int i) { return i / 4 * 16 + threadIdx.x % 4 * 4 + i % 4; }
__device__ __forceinline__ const unsigned char *strip_at(const unsigned char *weights, int expert, int rows, int row, int tall, int steps) {
  int lane = threadIdx.x % 32;
  return weights + ((u64)expert * rows + row * tall + lane / 16) * steps * 256 + lane % 16 * 16;
}
// 256 bytes of each row: whole lines. The second of two has its halves of 64 bytes in turns: no two lanes read from one bank.
__device__ __forceinline__ void copy_strip(u32 to, const unsigned char *from, int, int width, u64 gap, u64 once) {
  int lane = threadIdx.x % 32;
  to += lane / 16 * 256 + (lane % 16 ^ lane / 16 * 4) * 16;
#pragma unroll
  for (int i = 0; i < 8; i++) copy16(to + i * 512, from + i % 4 * 2 * width + i / 4 * gap, once);
}
#endif
__device__ __forceinline__ void load_row(u32 *v, const u16 *x) {  // a step of it
#ifdef BITS
#pragma unroll
  for (int i = 0; i < 16; i++) v[i] = seen((const u32 *)x + pair_of(i));
#else
#pragma unroll
  for (int i = 0; i < 4; i++) seen(v + 4 * i, x + 2 * pair_of(4 * i));
#endif
}
__device__ __forceinline__ float unit_at(const float *units, int tiles, int expert, int row) {  // of a lane's row, as whoever adds up parts has it
#ifdef BITS
  return units[(u64)expert * tiles * 64 + row * 16 + threadIdx.x % 128 / 16 + threadIdx.x % 4 / 2 * 8];
#else
  return 1;
#endif
}
__device__ __forceinline__ u64 read_once() {  // the second-level cache need not keep it
  u64 once;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
  return once;
}

__device__ __forceinline__ int first_later(const Params &p, int program) { return p.later_rows / 16 * program / PROGRAMS; }

// What a warp will want next: its steps of the strips of gate and up that this program has, then those of down, and of the product that follows.
struct Ahead {
  const Params &p;
  const Shared &s;
  const unsigned char *from;  // where a lane's next strip of gate and up begins
  u64 once;
  u32 ring;
  int warp, left, entry, strip, column, step, deep, slot, later, later_end;

  __device__ __forceinline__ Ahead(const Params &p_, const Shared &s_, u32 ring_, int first, int count) : p(p_), s(s_) {
    warp = threadIdx.x / 32, ring = ring_, once = read_once();
    entry = first / STRIPS_1, strip = first % STRIPS_1, left = warp < STEPS_1 ? count : 0;
    slot = deep = 0, column = blockIdx.x;
    later = first_later(p, blockIdx.x), later_end = warp < STEPS_1 ? first_later(p, blockIdx.x + 1) : later;
    if (left) find();
    else begin();
  }
  __device__ __forceinline__ void begin() { entry = warp / STEPS_2, step = warp % STEPS_2; }  // of down
  __device__ __forceinline__ int expert() { return s.expert[entry] & 0xFFF; }
  __device__ __forceinline__ void find() { from = strip_at(p.up, expert(), p.up_tiles, strip, 8, STEPS_1) + warp * STEP; }
  __device__ __forceinline__ void ask() {
    if (left) {
      ask_up();
    } else if (column < STRIPS_2 && entry < s.entries) {
      const unsigned char *down = strip_at(p.down, expert(), p.down_tiles, column, 16, STEPS_2) + step * STEP;
      copy_strip(ring + slot * STAGE, down, column, STEPS_2 * 256, (u64)8 * STEPS_2 * 256, once);
      entry += WARPS / STEPS_2, step += WARPS % STEPS_2;
      if (step >= STEPS_2) step -= STEPS_2, entry++;
      if (entry >= s.entries) {
        column += PROGRAMS;
        begin();
      }
    } else if (ATTENDED && later < later_end) {
      const unsigned char *strip = strip_at(p.later, 0, 0, later, 16, STEPS_1);
      copy_strip(ring + slot * STAGE, strip + (warp + WARPS * deep) * STEP, later, STEPS_1 * 256, (u64)8 * STEPS_1 * 256, once);
      if (++deep == DEEP || warp + WARPS * deep >= STEPS_1) deep = 0, later++;
    }
    close_group();
    if (++slot == STAGES) slot = 0;
  }
  __device__ __forceinline__ void ask_up() {
    copy_strip(ring + slot * STAGE, from + deep * WARPS * STEP, strip, STEPS_1 * 256, (u64)INNER * STEPS_1 * 256, once);
    if (++deep < DEEP && warp + WARPS * deep < STEPS_1) return;
    deep = 0;
    strip++, left--;
    if (!left) {
      begin();
    } else if (strip == STRIPS_1) {
      strip = 0, entry++;
      find();
#ifdef BITS
    } else if (strip % 4 == 0) {
      from += (u64)STEPS_1 * BLOCK_BYTES;
    }
#else
    } else {
      from += (u64)8 * STEPS_1 * 256;
    }
#endif
  }
};

// One step of K: what has come times a lane's inputs.
__device__ __forceinline__ void take_stage(float (&c)[4], const u32 *b, u32 at) {
  int lane = threadIdx.x % 32;
#ifdef BITS
  u32 codes[PIECES * 4], side = at + PIECES * 512 + lane / 4 * 2;
#pragma unroll
  for (int i = 0; i < PIECES; i++) read16(codes + i * 4, at + i * 512 + lane * 16);
#pragma unroll
  for (int set = 0; set < SETS; set++) {
    u32 zero[2] = {BITS == 4 ? 0x43084308u : 0x43004300u, BITS == 4 ? 0x43084308u : 0x43004300u};
    float part[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}}, scale[2];  // two chains
#pragma unroll
    for (int h = 0; h < 2; h++) {
      if (ZEROS) zero[h] = read_twice(side + (SETS + set) * 32 + h * 16);
      scale[h] = read_scale(side + set * 32 + h * 16);
    }
#pragma unroll
    for (int j = set * 8 / SETS; j < (set + 1) * 8 / SETS; j++) {
      u32 a[4];
      widen(a, codes + j * BITS / 4, zero);
      multiply(part[j % 2], a, b[2 * j], b[2 * j + 1]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) c[i] += scale[i / 2] * (part[0][i] + part[1][i]);
  }
#else
  int g = lane / 4, odd = g % 2 * 4;
  float other[4] = {0, 0, 0, 0};  // a second chain
  at += g * 256;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    u32 first[4], second[4];
    read16(first, at + (4 * i + lane % 4 ^ odd) * 16);
    read16(second, at + 2048 + (4 * i + lane % 4 ^ odd) * 16);
#pragma unroll
    for (int j = 0; j < 2; j++) {
      u32 a[4] = {first[2 * j], second[2 * j], first[2 * j + 1], second[2 * j + 1]};
      multiply(j ? other : c, a, b[4 * i + 2 * j], b[4 * i + 2 * j + 1]);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; i++) c[i] += other[i];
#endif
}
__device__ __forceinline__ void take_step(float (&c)[4], const u32 *b, Ahead &ahead, u32 ring, int &slot) {
  arrived<STAGES - 1>();
  take_stage(c, b, ring + slot * STAGE);
  __syncwarp();
  ahead.ask();
  if (++slot == STAGES) slot = 0;
}
