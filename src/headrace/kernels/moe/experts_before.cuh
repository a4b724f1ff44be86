// What stands before experts in a layer, for experts.cu with ATTENDED: attention's last product onto the stream, and the router's. Their weights
// are on their way while attention runs. Each program has 16 columns of the first and a row of the second, or some, and says what it found to
// all others: in 64 bits, the upper half of which is the launch's number. So nobody waits for more than what he reads, and nothing is emptied.

// Of a norm's weight: what a lane's four values of each step are multiplied by.
struct Scale {
  float v[DEEP][4];

  __device__ __forceinline__ void load(const void *scale, int bytes, int warp, int lane) {
#pragma unroll
    for (int d = 0; d < DEEP; d++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        int at = (warp + WARPS * d) * 128 + lane * 4 + i;
        v[d][i] = at >= HIDDEN ? 0 : bytes == 4 ? ((const float *)scale)[at] : wide(((const u16 *)scale)[at]);
      }
  }
};
// What all programs said of a warp's steps, for all tokens: sums of squares, and, times the norm's weight, ``x`` (a lane's four values of a step),
// which it leaves in shared memory for itself. What is said of one token comes with what is said of the others: one is looked at until it is there.
__device__ __forceinline__ void hear(u32 (&x)[TOKENS][DEEP][2], const u64 *from, const Params &p, Shared &s, const Scale &scale, u32 launch, int warp, int lane) {
#pragma unroll
  for (int part = 0; part < 2; part++) {
    bool there;
    do {
      there = true;
#pragma unroll
      for (int token = part; token < (part ? TOKENS : 1); token++)
#pragma unroll
        for (int d = 0; d < DEEP; d++) {
          if (token >= p.tokens || warp + WARPS * d >= STEPS_1) continue;
          u64 v[2];
          look(v, from + token * (HIDDEN / 2) + (warp + WARPS * d) * 64 + lane * 2);
          x[token][d][0] = v[0], x[token][d][1] = v[1];
          there &= v[0] >> 32 == launch && v[1] >> 32 == launch;
        }
    } while (!there);
  }
#pragma unroll
  for (int token = 0; token < TOKENS; token++) {
    if (token >= p.tokens) break;
    float squares = 0;
#pragma unroll
    for (int d = 0; d < DEEP; d++) {
      if (warp + WARPS * d >= STEPS_1) continue;
#pragma unroll
      for (int i = 0; i < 2; i++) {
        u32 &v = x[token][d][i];
        squares += low(v) * low(v) + high(v) * high(v);
        v = pack(low(v) * scale.v[d][2 * i], high(v) * scale.v[d][2 * i + 1]);
        *(u32 *)&s.x[token][(warp + WARPS * d) * 128 + lane * 4 + 2 * i] = v;
      }
    }
    squares = sum_of<1, 16>(squares);
    if (lane == 0) s.squares[warp][token] = squares;
  }
  __syncwarp();
}
__device__ __forceinline__ void load_heard(u32 *v, const Shared &s, int token, int step) {
  const u16 *from = s.x[token] + step * 128;
#ifdef BITS
#pragma unroll
  for (int i = 0; i < 16; i++) v[i] = *(const u32 *)(from + 2 * pair_of(i));
#else
#pragma unroll
  for (int i = 0; i < 4; i++) read16(v + 4 * i, shared(from + 2 * pair_of(4 * i)));
#endif
}

struct Before {
  u32 router[ROWS_HERE][DEEP][2];  // a lane's four weights of a step
  Scale between;

  __device__ __forceinline__ void ask(const Params &p, Shared &s, u32 ring, int warp, int lane) {
    if (blockIdx.x < STRIPS_2) {
      const unsigned char *from = strip_at(p.out, 0, 0, blockIdx.x, 16, STEPS_0);
      u64 once = read_once();
#pragma unroll
      for (int d = 0; d < DEEP_0; d++)
        if (warp + WARPS * d < STEPS_0) copy_strip(ring + d * STAGE, from + (warp + WARPS * d) * STEP, blockIdx.x, STEPS_0 * 256, (u64)8 * STEPS_0 * 256, once);
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
    between.load(p.between, p.between_bytes, warp, lane);
  }
  __device__ __forceinline__ void add_output(const Params &p, Shared &s, float (*parts)[32][4], u32 ring, u32 launch, int warp, int lane) {
    if (blockIdx.x >= STRIPS_2) return;
    u32 b[DEEP_0 ? DEEP_0 : 1][16];
    float c[4] = {0, 0, 0, 0};
#pragma unroll
    for (int d = 0; d < DEEP_0; d++)
      if (warp + WARPS * d < STEPS_0) load_row(b[d], p.attended + (u64)min(lane / 4, p.tokens - 1) * ATTENDED + (warp + WARPS * d) * 128);
    int at = threadIdx.x, row = at / 16 + at % 4 / 2 * 8, token = at / 4 % 4 * 2 + at % 2, column = blockIdx.x * 16 + row;
    bool mine = at < 128 && token < p.tokens;
    float sum = 0, rest = mine ? wide(seen(p.residual + (u64)token * HIDDEN + column)) : 0, unit = at < 128 ? unit_at(p.out_unit, 0, 0, blockIdx.x) : 1;
    arrived<0>();
#pragma unroll
    for (int d = 0; d < DEEP_0; d++)
      if (warp + WARPS * d < STEPS_0) take_stage(c, b[d], ring + d * STAGE);
    *(float4 *)parts[warp][lane] = make_float4(c[0], c[1], c[2], c[3]);
    __syncthreads();
    if (at >= 128) return;
#pragma unroll
    for (int w = 0; w < (STEPS_0 < WARPS ? STEPS_0 : WARPS); w++) sum += ((const float *)parts[w])[at];
    u32 y = narrow(sum * unit + rest), below = __shfl_xor_sync(~0u, y, 16);
    if (mine) s.stream[token][row] = wide(y);
    if (mine && row % 2 == 0) say(p.heard + token * (HIDDEN / 2) + column / 2, launch, y | below << 16);
  }
  __device__ __forceinline__ void route(const Params &p, Shared &s, u32 launch, int warp, int lane) {
    u32 x[TOKENS][DEEP][2];
    hear(x, p.heard, p, s, between, launch, warp, lane);
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
      if (expert < EXPERTS) say(p.said + token * EXPERTS + expert, launch, narrow(dot * rstd_of(p, s, token)));
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
        u64 v = look(p.said + token * EXPERTS + lane + 32 * i);
        logits[i] = v;
        there &= v >> 32 == launch;
      }
    } while (!there);
    __syncwarp();
  }
};
// The product that follows, whose weights came behind those of down: y from all programs, normed.
__device__ __forceinline__ void project(const Params &p, Shared &s, Meeting &meeting, Ahead &ahead, u32 ring, int &slot, u32 launch) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  u32 b[DEEP][16], x[TOKENS][DEEP][2];
  Scale scale;
  scale.load(p.scale, p.scale_bytes, warp, lane);
  hear(x, p.handed, p, s, scale, launch, warp, lane);
#pragma unroll
  for (int d = 0; d < DEEP; d++)
    if (warp + WARPS * d < STEPS_1) load_heard(b[d], s, min(lane / 4, p.tokens - 1), warp + WARPS * d);
  int at = threadIdx.x, end = first_later(p, blockIdx.x + 1), row = at / 16 + at % 4 / 2 * 8, token = at / 4 % 4 * 2 + at % 2, turn = 0;
#pragma unroll 1
  for (int strip = first_later(p, blockIdx.x); strip < end; strip++, turn ^= 1) {
    if (warp < STEPS_1) {
      float c[4] = {0, 0, 0, 0};
#pragma unroll
      for (int d = 0; d < DEEP; d++)
        if (warp + WARPS * d < STEPS_1) take_step(c, b[d], ahead, ring, slot);
      *(float4 *)meeting.parts[turn][0][warp][lane] = make_float4(c[0], c[1], c[2], c[3]);
    }
    __syncthreads();
    if (at >= 128 || token >= p.tokens) continue;
    float sum = 0, unit = unit_at(p.later_unit, 0, 0, strip);
#pragma unroll
    for (int w = 0; w < SHARERS; w++) sum += ((const float *)meeting.parts[turn][0][w])[at];
    p.projected[(u64)token * p.later_rows + strip * 16 + row] = narrow(sum * unit * rstd_of(p, s, token));
  }
}
