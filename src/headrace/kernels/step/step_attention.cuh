// Of the decode step: attention of one query a sequence over a paged cache, keys dealt to programs and warps.

// --- attention

constexpr int WHOLE = 512, SPAN = 256;  // up to WHOLE keys are one item: another round of keys is quicker than joining parts

__device__ __forceinline__ int parts_of(int context, int span) { return context <= WHOLE ? context > 0 : (context + span - 1) / span; }

struct Item { int row, head, begin, end, splits, index, first; };

__device__ __forceinline__ Item item_of(const Shared& s, int index) {
  int base = 0;
  Item item = {-1, 0, 0, 0, 1, index, 0};
  for (int row = 0; row < ROWS; ++row) {
    int splits = parts_of(s.context[row], s.span), count = splits * HK;
    if (index >= base && index < base + count) {
      int within = index - base, part = within % splits;
      item.row = row; item.head = within / splits; item.splits = splits;
      item.begin = part * s.span; item.end = splits == 1 ? s.context[row] : min(item.begin + s.span, s.context[row]);
      item.first = index - part;
    }
    base += count;
  }
  return item;
}

struct Keys { Vec k[2][D / 32], v[2][D / 32]; };  // 16 keys: of key 8 n + g, elements 32 j + 8 t … + 7 come to lane (g, t)

__device__ __forceinline__ const bf16* keys_at(const Params& p, int layer, const Item& item, int key) {
  long long block = __ldg(p.block_table + (long long)item.row * p.table_stride + key / BLOCK);
  return p.kv + block * p.block_stride + ((long long)(2 * layer) * HK + item.head) * BLOCK * D + (key % BLOCK) * D;
}

__device__ __forceinline__ void load_keys(Keys& keys, const Params& p, int layer, const Item& item, int round, int warp, int lane) {
  int key = item.begin + round * 16 * WARPS + warp * 16, g = lane / 4, t = lane % 4;
  bool any = key < item.end;  // every register is set on every way: what the compiler takes for kept from layer to layer it spills
  const bf16* base = any ? keys_at(p, layer, item, key) : p.kv;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    bool here = key + n * 8 + g < item.end;
    const bf16* at = base + (n * 8 + g) * D + t * 8;
#pragma unroll
    for (int j = 0; j < D / 32; ++j) {
      keys.k[n][j] = keys.v[n][j] = Vec{0, 0, 0, 0};
      if (here) keys.k[n][j] = load_l2(at + j * 32);
      if (here) keys.v[n][j] = load_l2(at + HK * BLOCK * D + j * 32);
    }
  }
}

// The newest key is of this very step, and comes from the programs that computed it.
__device__ __forceinline__ void load_newest(Keys& keys, const Params& p, int layer, const Item& item, int newest, int round, int warp, int lane) {
  int key = item.begin + round * 16 * WARPS + warp * 16, g = lane / 4, t = lane % 4;
  if (newest < key || newest >= key + 16 || newest >= item.end) return;
  const bf16* from = handed(p, layer, QKV_AT) + item.row * WIDTH + (HQ + item.head) * D + t * 8;
  Patience patience;
  bool lacking;
  do {
    lacking = false;
#pragma unroll
    for (int n = 0; n < 2; ++n)
      if (key + n * 8 + g == newest) {
#pragma unroll
        for (int j = 0; j < D / 32; ++j) {
          keys.k[n][j] = look(from + j * 32);
          keys.v[n][j] = look(from + HK * D + j * 32);
        }
#pragma unroll
        for (int j = 0; j < D / 32; ++j) lacking |= lacks(keys.k[n][j]) | lacks(keys.v[n][j]);
      }
    lacking = __any_sync(~0u, lacking);
    if (lacking) patience.spend();
  } while (lacking);
}

// What a program will attend to comes into the second-level cache while it computes queries.
__device__ __forceinline__ void prefetch_keys(const Params& p, const Shared& s, int layer) {
  if ((int)blockIdx.x >= s.items) return;
  Item item = item_of(s, blockIdx.x);
  int key = item.begin + threadIdx.x;
  if (key >= item.end) return;
  const bf16* at = keys_at(p, layer, item, key);
#pragma unroll
  for (int i = 0; i < D; i += 64) {
    asm volatile("prefetch.global.L2 [%0];" :: "l"(at + i));
    asm volatile("prefetch.global.L2 [%0];" :: "l"(at + HK * BLOCK * D + i));
  }
}

// peak and mass: of query g; mass is this lane's share. o[2 j + h]: elements 32 j + 8 (g / 2) + 4 h + g % 2 and 2 more, of queries 2 t, 2 t + 1.
struct Softmax { float peak, mass; float o[D / 16][4]; };

__device__ __forceinline__ u32 transposed(u32 v) { u32 r; asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v)); return r; }
__device__ __forceinline__ u32 pack(float first, float second) { u32 r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(second), "f"(first)); return r; }

__device__ __forceinline__ void attend_keys(Softmax& a, const Keys& keys, const u32 (&q)[D / 32][4], const Item& item, float scale, int round, int warp, int lane) {
  int key = item.begin + round * 16 * WARPS + warp * 16, t = lane % 4;
  if (key >= item.end) return;
  float c[2][4] = {};
#pragma unroll
  for (int j = 0; j < D / 32; ++j)
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      mma(c[n], q[j][0], 0, q[j][1], 0, keys.k[n][j].x, keys.k[n][j].y);
      mma(c[n], q[j][2], 0, q[j][3], 0, keys.k[n][j].z, keys.k[n][j].w);
    }
  float most = MINUS_INFINITY;
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      c[n][e] = key + n * 8 + 2 * t + e < item.end ? c[n][e] * scale : MINUS_INFINITY;
      most = fmaxf(most, c[n][e]);
    }
  most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
  most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
  most = fmaxf(most, a.peak);
  float alpha = exp2_(a.peak - most), sum = 0.0f;
  a.peak = most;
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      c[n][e] = exp2_(c[n][e] - most);
      sum += c[n][e];
    }
  a.mass = a.mass * alpha + sum;
  u32 early = pack(c[0][0], c[0][1]), late = pack(c[1][0], c[1][1]);  // sequences' weights as the other operand wants them
  float first = __shfl_sync(~0u, alpha, 8 * t), second = __shfl_sync(~0u, alpha, 8 * t + 4);
#pragma unroll
  for (int j = 0; j < D / 32; ++j) {
    const Vec &v0 = keys.v[0][j], &v1 = keys.v[1][j];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float (&o)[4] = a.o[2 * j + h];
      o[0] *= first; o[1] *= second; o[2] *= first; o[3] *= second;
      mma(o, transposed(h ? v0.z : v0.x), transposed(h ? v0.w : v0.y), transposed(h ? v1.z : v1.x), transposed(h ? v1.w : v1.y), early, late);
    }
  }
}

// What the warps found becomes one: in ``attended``, or in ``parts`` where an item is not the whole sequence.
__device__ __forceinline__ void join_warps(Softmax& a, const Params& p, Shared& s, int layer, const Item& item, int warp, int lane) {
  int g = lane / 4, t = lane % 4;
  a.mass += __shfl_xor_sync(~0u, a.mass, 1);
  a.mass += __shfl_xor_sync(~0u, a.mass, 2);
  if (t == 0) { s.peak[warp][g] = a.peak; s.mass[warp][g] = a.mass; }
#pragma unroll
  for (int i = 0; i < D / 16; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      int query = 2 * t + e % 2, d = i / 2 * 32 + g / 2 * 8 + i % 2 * 4 + e / 2 * 2 + g % 2;
      if (query < G) s.red[(warp * G + query) * D + d] = a.o[i][e];
    }
  __syncthreads();
  for (int at = threadIdx.x; at < G * D; at += THREADS) {
    int query = at / D;
    float most = s.peak[0][query];
#pragma unroll
    for (int w = 1; w < WARPS; ++w) most = fmaxf(most, s.peak[w][query]);
    float mass = 0.0f, sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      float by = exp2_(s.peak[w][query] - most);
      mass += by * s.mass[w][query];
      sum += by * s.red[(w * G + query) * D + at % D];
    }
    if (item.splits == 1) {
      handed(p, layer, ATTENDED_AT)[(item.row * HQ + item.head * G) * D + at] = narrow(sum / mass);
    } else {
      p.parts[(long long)item.index * G * D + at] = sum;
      if (at % D == 0) { p.peaks[item.index * 2 * G + query] = most; p.peaks[(item.index * 2 + 1) * G + query] = mass; }
    }
  }
}

// The last of the programs that share a sequence's head adds up their parts, in the order of the keys.
__device__ __forceinline__ void join_parts(const Params& p, Shared& s, int layer, const Item& item) {
  u32* ticket = p.tickets + item.row * HK + item.head;
  __syncthreads();
  if (threadIdx.x == 0) {
    u32 count;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(count) : "l"(ticket) : "memory");
    s.last = count == (u32)item.splits - 1;
    if (s.last) *ticket = 0;
  }
  __syncthreads();
  if (!s.last) return;
  for (int at = threadIdx.x; at < G * D; at += THREADS) {
    int query = at / D;
    float most = MINUS_INFINITY, mass = 0.0f, sum = 0.0f;
#pragma unroll 4
    for (int i = item.first; i < item.first + item.splits; ++i) most = fmaxf(most, load_l2f(&p.peaks[i * 2 * G + query]));
#pragma unroll 4
    for (int i = item.first; i < item.first + item.splits; ++i) {
      float by = exp2_(load_l2f(&p.peaks[i * 2 * G + query]) - most);
      mass += by * load_l2f(&p.peaks[(i * 2 + 1) * G + query]);
      sum += by * load_l2f(&p.parts[(long long)i * G * D + at]);
    }
    handed(p, layer, ATTENDED_AT)[(item.row * HQ + item.head * G) * D + at] = narrow(sum / mass);
  }
}

__device__ __forceinline__ void load_query(u32 (&q)[D / 32][4], const Params& p, int layer, const Item& item, int lane) {
  int g = lane / 4, t = lane % 4;
  const bf16* from = handed(p, layer, QKV_AT) + item.row * WIDTH + (item.head * G + g) * D;
  Patience patience;
  bool lacking;
  do {
    lacking = false;
#pragma unroll
    for (int j = 0; j < D / 32; ++j) {
      Vec v = {0, 0, 0, 0};
      if (g < G) { v = look(from + j * 32 + t * 8); lacking |= lacks(v); }
      q[j][0] = v.x; q[j][1] = v.y; q[j][2] = v.z; q[j][3] = v.w;
    }
    lacking = __any_sync(~0u, lacking);
    if (lacking) patience.spend();
  } while (lacking);
}

__device__ __forceinline__ void attention(const Params& p, Shared& s, int layer, int warp, int lane) {
  float scale = p.scale * 1.4426950408889634f;
  Keys keys[2];
  u32 q[D / 32][4];
  for (int index = blockIdx.x; index < s.items; index += GRID) {
    Item item = item_of(s, index);
    int newest = s.context[item.row] - 1, rounds = (item.end - item.begin + 16 * WARPS - 1) / (16 * WARPS);
    load_keys(keys[0], p, layer, item, 0, warp, lane);  // what this step does not change comes before its queries
    load_keys(keys[1], p, layer, item, 1, warp, lane);
    load_query(q, p, layer, item, lane);
    Softmax a = {MINUS_INFINITY, 0.0f, {}};
    for (int round = 0; round < rounds; round += 2) {
      load_newest(keys[0], p, layer, item, newest, round, warp, lane);
      load_newest(keys[1], p, layer, item, newest, round + 1, warp, lane);
      attend_keys(a, keys[0], q, item, scale, round, warp, lane);
      load_keys(keys[0], p, layer, item, round + 2, warp, lane);
      attend_keys(a, keys[1], q, item, scale, round + 1, warp, lane);
      load_keys(keys[1], p, layer, item, round + 3, warp, lane);
    }
    join_warps(a, p, s, layer, item, warp, lane);
    if (item.splits > 1) join_parts(p, s, layer, item);
    __syncthreads();
  }
}
