// What the forms of a gate and what it gates share: sizes, the order of tiles, how 64 rows of a group of four warps end. Behind matrix.cuh and
// activation.cuh. Given: COLUMNS. EIGHT: a product alone, of numbers of 8 bits, which lie in pairs; DEPTH and ``ins`` count these.
#define ROWS 128                         // of a tile
#define DEPTH 64                         // of K at once
#define X_BYTES (ROWS * DEPTH * 2)
#define W_BYTES (COLUMNS * DEPTH * 2)
#ifdef EIGHT
#define OUTS COLUMNS                     // columns of y, a tile
#else
#define OUTS (COLUMNS / 2)
#endif

// Tiles in bands, HIGH rows of them each, so that a band's x stays in the second-level cache while all weights pass by. Counted in tiles.
struct Place { int row, column; };
template <int HIGH> __device__ __forceinline__ Place banded(int tile, int down, int across) {
  int band = tile / (HIGH * across), rest = tile - band * HIGH * across, rows = min(HIGH, down - band * HIGH);
  return {band * HIGH + rest % rows, rest / rows};
}

#ifdef EIGHT
// Sums times the scales of rows of x and of W.
template <class T, int SUMS> __device__ __forceinline__ void finish(
    const T (&c)[SUMS], const float *of_x, const float *of_w, u16 *y, int row, int first, int tokens, int outs) {
  int t = threadIdx.x % 4;
  float own[2];
#pragma unroll
  for (int h = 0; h < 2; h++) own[h] = row + 8 * h < tokens ? of_x[row + 8 * h] : 0;
  of_w += first + 2 * t;
  y += (u64)row * outs + first + 8 * t;
  bool there[2] = {row < tokens, row + 8 < tokens};
  int left = outs - first - 2 * t;
#pragma unroll
  for (int g = 0; g < (SUMS / 4 + 3) / 4; g++) {  // of 32 columns
    u32 q[2][4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      int block = g * 4 + j < SUMS / 4 ? g * 4 + j : 0;
      float2 by = left > block * 8 ? *(const float2 *)(of_w + block * 8) : make_float2(0, 0);
#pragma unroll
      for (int h = 0; h < 2; h++)
        q[h][j] = pack((float)c[4 * block + 2 * h] * own[h] * by.x, (float)c[4 * block + 2 * h + 1] * own[h] * by.y);
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
      transpose(q[h], t);
      if (g * 4 + t < SUMS / 4 && left > g * 32 + 6 * t && there[h])
        *(uint4 *)(y + (u64)(8 * h) * outs + g * 32) = make_uint4(q[h][0], q[h][1], q[h][2], q[h][3]);
    }
    asm volatile("" ::: "memory");  // scales of all columns at once would leave no registers
  }
}
#else
// ``row``: the thread's first of the 64; the other is 8 further down. ``first``: column of y. A thread has as many sums as a tile columns of y.
template <int SUMS> __device__ __forceinline__ void finish(const float (&c)[SUMS], u16 *y, int row, int first, int tokens, int outs) {
  int t = threadIdx.x % 4;
#pragma unroll
  for (int g = 0; g < (SUMS / 8 + 3) / 4; g++) {  // of 32 columns
    int mine = g * 4 + t, column = first + 8 * mine;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      u32 q[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        int i = g * 4 + j < SUMS / 8 ? (g * 4 + j) * 4 + 2 * h : 0;
        q[j] = pack(act(c[i]) * c[i + SUMS / 2], act(c[i + 1]) * c[i + 1 + SUMS / 2]);
      }
      transpose(q, t);
      if (mine < SUMS / 8 && column < outs && row + 8 * h < tokens)
        *(uint4 *)(y + (u64)(row + 8 * h) * outs + column) = make_uint4(q[0], q[1], q[2], q[3]);
    }
  }
}
#endif
