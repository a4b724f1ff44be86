// The end of a tile of a gate and what it gates: 64 rows of a group of four warps. Behind matrix.cuh and activation.cuh. Given: COLUMNS.
#define ROWS 128                         // of a tile
#define DEPTH 64                         // of K at once
#define X_BYTES (ROWS * DEPTH * 2)
#define W_BYTES (COLUMNS * DEPTH * 2)
#define OUTS (COLUMNS / 2)               // columns of y, a tile
#define GROUPS ((OUTS / 8 + 3) / 4)      // of 32 columns

// ``row``: the thread's first of the 64; the other is 8 further down. ``first``: column of y.
__device__ __forceinline__ void finish(const float (&c)[COLUMNS / 2], u16 *y, int row, int first, int tokens, int outs) {
  int t = threadIdx.x % 4;
#pragma unroll
  for (int g = 0; g < GROUPS; g++) {
    int mine = g * 4 + t, column = first + 8 * mine;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      u32 q[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        int i = g * 4 + j < OUTS / 8 ? (g * 4 + j) * 4 + 2 * h : 0;
        q[j] = pack(act(c[i]) * c[i + COLUMNS / 4], act(c[i + 1]) * c[i + 1 + COLUMNS / 4]);
      }
      transpose(q, t);
      if (mine < OUTS / 8 && column < outs && row + 8 * h < tokens)
        *(uint4 *)(y + (u64)(row + 8 * h) * outs + column) = make_uint4(q[0], q[1], q[2], q[3]);
    }
  }
}
