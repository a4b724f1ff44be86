// What stands before experts in a layer, for experts.cu with ATTENDED: attention's last product onto the stream, and the router's. Their weights
// are on their way while attention runs. Each program has 16 columns of the first and a row of the second, or some, and says what it found to
// all others: in 64 bits, the upper half of which is the launch's number. So nobody waits for more than what he reads, and nothing is emptied.
__device__ __forceinline__ bool all_said(u32 launch, u64 v) { return v >> 32 == launch; }

struct Before {
  u32 router[ROWS_HERE][DEEP][2];  // a lane's four weights of a step

  __device__ __forceinline__ void ask(const Params &p, Shared &s, u32 ring, int warp, int lane) {
    if (blockIdx.x < STRIPS_2) {
      const unsigned char *from = strip_at((const unsigned char *)p.out, 0, 0, blockIdx.x, 16, STEPS_0);
      u64 once = read_once();
#pragma unroll
      for (int d = 0; d < DEEP_0; d++)
        if (warp + WARPS * d < STEPS_0) copy_strip(ring + d * STAGE, from + (warp + WARPS * d) * STEP, 0, STEPS_0 * 256, (u64)8 * STEPS_0 * 256, once);
      close_group();
    }
#pragma unroll
    for (int r = 0; r < ROWS_HERE; r++)
#pragma unroll
      for (int d = 0; d < DEEP; d++) {
        int expert = blockIdx.x + r * PROGRAMS, step = warp + WARPS * d;
        const u32 *from = (const u32 *)(p.router + (u64)expert * HIDDEN + step * 128 + lane * 4);
        bool there = expert < EXPERTS && step < STEPS_1;
        router[r][d][0] = there ? from[0] : 0, router[r][d][1] = there ? from[1] : 0;
      }
    for (int i = threadIdx.x; i < HIDDEN; i += THREADS) s.between[i] = p.between_bytes == 4 ? ((const float *)p.between)[i] : wide(((const u16 *)p.between)[i]);
  }
  __device__ __forceinline__ void add_output(const Params &p, Shared &s, float (*parts)[32][4], u32 ring, u32 launch, int warp, int lane) {
    if (blockIdx.x >= STRIPS_2) return;
    u32 b[DEEP_0 ? DEEP_0 : 1][16];
    float c[4] = {0, 0, 0, 0};
#pragma unroll
    for (int d = 0; d < DEEP_0; d++)
      if (warp + WARPS * d < STEPS_0) {
        const u16 *from = p.attended + (u64)min(lane / 4, p.tokens - 1) * ATTENDED + (warp + WARPS * d) * 128 + lane % 4 * 8;
#pragma unroll
        for (int i = 0; i < 4; i++) seen(b[d] + 4 * i, from + i * 32);
      }
    int at = threadIdx.x, row = at / 16 + at % 4 / 2 * 8, token = at / 4 % 4 * 2 + at % 2, column = blockIdx.x * 16 + row;
    bool mine = at < 128 && token < p.tokens;
    float sum = mine ? wide(seen(p.residual + (u64)token * HIDDEN + column)) : 0;
    arrived<0>();
#pragma unroll
    for (int d = 0; d < DEEP_0; d++)
      if (warp + WARPS * d < STEPS_0) take_stage(c, b[d], ring + d * STAGE);
    *(float4 *)parts[warp][lane] = make_float4(c[0], c[1], c[2], c[3]);
    __syncthreads();
    if (at >= 128) return;
#pragma unroll
    for (int w = 0; w < (STEPS_0 < WARPS ? STEPS_0 : WARPS); w++) sum += ((const float *)parts[w])[at];
    u32 y = narrow(sum), below = __shfl_xor_sync(~0u, y, 16);
    if (mine) s.stream[token][row] = wide(y);
    if (mine && row % 2 == 0) say(p.heard + token * (HIDDEN / 2) + column / 2, launch, y | below << 16);
  }
  // Memory is idle until experts are known: weights of the next launch come into the second-level cache, which those of experts pass by.
  __device__ __forceinline__ void ask_later(const Params &p) {
    constexpr u32 PIECE = 8192;
    u64 share = (p.later_bytes / PROGRAMS + 127) / 128 * 128, at = share * blockIdx.x + threadIdx.x * PIECE, end = min(share * (blockIdx.x + 1), p.later_bytes);
    if (at < end) asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p.later + at), "r"((u32)min((u64)PIECE, end - at)) : "memory");
  }
  // The stream from all programs, times the weight of the norm; sums of its squares.
  __device__ __forceinline__ void hear(const Params &p, Shared &s, u32 (&x)[TOKENS][DEEP][2], u32 launch, int warp, int lane) {
    bool there;
    do {
      there = true;
#pragma unroll
      for (int token = 0; token < TOKENS; token++)
#pragma unroll
        for (int i = 0; i < 2 * DEEP; i++) {
          if (token >= p.tokens || warp + WARPS * (i / 2) >= STEPS_1) continue;
          u64 v = look(p.heard + token * (HIDDEN / 2) + (warp + WARPS * (i / 2)) * 64 + lane * 2 + i % 2);
          x[token][i / 2][i % 2] = v;
          there &= all_said(launch, v);
        }
    } while (!there);
#pragma unroll
    for (int token = 0; token < TOKENS; token++) {
      float squares = 0;
      if (token >= p.tokens) break;
#pragma unroll
      for (int i = 0; i < 2 * DEEP; i++) {
        if (warp + WARPS * (i / 2) >= STEPS_1) continue;
        u32 &v = x[token][i / 2][i % 2];
        const float *by = s.between + (warp + WARPS * (i / 2)) * 128 + lane * 4 + i % 2 * 2;
        squares += low(v) * low(v) + high(v) * high(v);
        v = pack(low(v) * by[0], high(v) * by[1]);
      }
      squares = sum_of<1, 16>(squares);
      if (lane == 0) s.squares[warp][token] = squares;
    }
  }
  __device__ __forceinline__ void route(const Params &p, Shared &s, u32 launch, int warp, int lane) {
    u32 x[TOKENS][DEEP][2];
    hear(p, s, x, launch, warp, lane);
#pragma unroll
    for (int token = 0; token < TOKENS; token++) {
      if (token >= p.tokens) break;
#pragma unroll
      for (int r = 0; r < ROWS_HERE; r++) {
        float dot = 0;
#pragma unroll
        for (int i = 0; i < 2 * DEEP; i++) {
          if (warp + WARPS * (i / 2) >= STEPS_1) continue;
          u32 v = x[token][i / 2][i % 2], w = router[r][i / 2][i % 2];
          dot += low(v) * low(w) + high(v) * high(w);
        }
        dot = sum_of<1, 16>(dot);
        if (lane == 0) s.dots[warp][r][token] = dot;
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < ROWS_HERE * p.tokens; i += THREADS) {
      int token = i % p.tokens, row = i / p.tokens, expert = blockIdx.x + row * PROGRAMS;
      float dot = 0;
#pragma unroll
      for (int w = 0; w < WARPS; w++) dot += s.dots[w][row][token];
      if (expert < EXPERTS) say(p.said + expert * TOKENS + token, launch, narrow(dot * rstd_of(p, s, token)));
    }
  }
  __device__ __forceinline__ void load_logits(u16 (&logits)[EACH_LANE], const Params &p, u32 launch, int token, int lane) {
    bool there;
    do {
      there = true;
#pragma unroll
      for (int i = 0; i < EACH_LANE; i++) {
        logits[i] = 0xFF80;
        if (lane + 32 * i >= EXPERTS || token >= p.tokens) continue;
        u64 v = look(p.said + (lane + 32 * i) * TOKENS + token);
        logits[i] = v;
        there &= all_said(launch, v);
      }
    } while (!there);
    __syncwarp();
  }
};
// Of a step of the stream as all programs had it: what a lane multiplies.
__device__ __forceinline__ void load_heard(u32 *v, const Params &p, const Shared &s, int token, int step) {
  const u64 *from = p.heard + token * (HIDDEN / 2) + step * 64;
  int t = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < 16; i++) v[i] = seen((const u32 *)(from + i / 4 * 16 + t * 4 + i % 4));
#pragma unroll
  for (int i = 0; i < 16; i++) {
    const float *by = s.between + step * 128 + i / 4 * 32 + t * 8 + i % 4 * 2;
    v[i] = pack(low(v[i]) * by[0], high(v[i]) * by[1]);
  }
}
