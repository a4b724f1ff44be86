// A whole decode step of a dense decoder in one launch: every layer, for up to ROWS sequences of one token each.
//
// One program a multiprocessor. Each of its warps owns a ring of shared memory that it fills with weights by bulk copies, in an order that
// is fixed for the whole step: so weights keep coming while programs wait for each other between operators, or attend.
//
// Product: a tile is 8 rows of a weight; K is dealt to the warps (and to TEAMS of them, each with tiles of its own, where K is short).
// Weights are the 8 columns of mma.m16n8k16, the batch its 16 rows. Partial sums of warps meet in shared memory, always in one order.
// Rows i and i + 4 of a tile are a pair: the two halves of a rotation, or gate and up of one inner value.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short bf16;

#ifndef GRID
#define GRID 132
#endif
#ifndef ROWS
#define ROWS 8
#endif
#ifndef SLOTS
#define SLOTS 2
#endif
#ifndef CHUNK
#define CHUNK 512
#endif
constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int HALVES = ROWS / 8;      // groups of 8 sequences
constexpr int GROUP_TILES = 8 / HALVES;  // tiles whose partial sums are in shared memory at once
constexpr int G = HQ / HK;
static_assert(G <= 8 && G * D <= 512, "a group's values have to fit into the sums' memory");
constexpr int SLOT_BYTES = 8 * (CHUNK * 2 + 64);
#define MINUS_INFINITY __int_as_float(0xff800000)
constexpr u64 PATIENCE_NS = 2000000000ull;

struct Layer { const bf16* qkv; const bf16* output; const bf16* up; const bf16* down; const bf16* norm1; const bf16* norm2; };

struct Params {
  const Layer* layers;          // [LAYERS]
  const bf16* embedding;        // [vocab, HIDDEN]
  const bf16* final_norm;       // [HIDDEN]
  const long long* token_ids;   // [batch]
  const long long* positions;   // [batch]
  const long long* slots;       // [batch]
  const int* context;           // [batch]; 0: a row of no sequence
  const int* block_table;       // [batch, table_stride]
  const float* cos_sin;         // [positions, D]
  bf16* kv;                     // [blocks, LAYERS, 2, HK, BLOCK, D]
  bf16* out;                    // [batch, HIDDEN]
  bf16* exchange;               // [2, Exchange]: what programs hand each other, by the layer's parity
  float* parts;                 // [items, G, D]
  float* peaks;                 // [items, 2, G]
  u32* sync;                    // [0] barrier, [32] exit, [64 + row * HK + head] tickets; zero between launches
  u64* debug;
  long long block_stride;       // elements of kv from block to block
  int table_stride;
  int batch;
  float eps;
  float scale;
};

// --- shapes

constexpr int QKV_P = 0, OUT_P = 1, UP_P = 2, DOWN_P = 3;
template <int P> struct Shape {
  static constexpr int K = P == OUT_P ? HQ * D : P == DOWN_P ? INNER : HIDDEN;
  static constexpr int N = P == QKV_P ? (HQ + 2 * HK) * D : P == UP_P ? 2 * INNER : HIDDEN;
  static constexpr int TILES = N / 8;
  static constexpr int SHIFT = K / 8 <= 128 ? 1 : K / 8 <= 256 ? 2 : 3;  // a team is so many warps, as a power of 2
  static constexpr int SLICE = K >> SHIFT;                              // of K, a warp's
  static constexpr int CHUNKS = (SLICE + CHUNK - 1) / CHUNK;
  static constexpr int KC = SLICE / CHUNKS;
  static constexpr int PITCH = KC * 2 + ((KC * 2) % 128 == 0 ? 64 : 0);  // no two lanes of a load in one bank
  static constexpr int MOST = (TILES + GRID - 1) / GRID;                 // tiles of a program
  static_assert(SLICE % CHUNKS == 0 && KC % 32 == 0 && K % (8 * 32) == 0 && 8 * PITCH <= SLOT_BYTES, "K cannot be dealt");
};
static_assert(Shape<DOWN_P>::MOST <= GROUP_TILES && Shape<DOWN_P>::TILES >= GRID, "each warp keeps the residual of one tile");

// An operator, for code that serves any: one copy of it stays in the instruction cache.
struct Deal { int k, kc, pitch, shift, slice, chunks, x_at, squares_at; };
template <int P> __host__ __device__ constexpr Deal deal_of(int x_at, int squares_at) {
  using S = Shape<P>;
  return {S::K, S::KC, S::PITCH, S::SHIFT, S::SLICE, S::CHUNKS, x_at, squares_at};
}

// --- what programs hand each other

// Nobody waits at a barrier: a value that has not come yet is NOTHING, a NaN that no conversion makes, and readers look again until it is
// something else. Each layer has the buffers that the one before it does not use; while a layer's last product runs, those of the layer
// before it become NOTHING again: by then everybody has read them, and nobody can write or read them before what this program does next.
constexpr u32 NOTHING = 0xffffffffu;  // two values of 16 bits, or one of 32
constexpr int WIDTH = (HQ + 2 * HK) * D;
constexpr int QKV_AT = 0, ATTENDED_AT = QKV_AT + ROWS * WIDTH, MIDDLE_AT = ATTENDED_AT + ROWS * HQ * D, INNER_AT = MIDDLE_AT + ROWS * HIDDEN,
              NEXT_AT = INNER_AT + ROWS * INNER, MIDDLE_SQUARES_AT = NEXT_AT + ROWS * HIDDEN, NEXT_SQUARES_AT = MIDDLE_SQUARES_AT + 2 * GRID * ROWS,
              EXCHANGE = (NEXT_SQUARES_AT + 2 * GRID * ROWS + 7) / 8 * 8;

__constant__ const Deal deals[4] = {deal_of<QKV_P>(NEXT_AT, NEXT_SQUARES_AT), deal_of<OUT_P>(ATTENDED_AT, 0), deal_of<UP_P>(MIDDLE_AT, MIDDLE_SQUARES_AT),
                                    deal_of<DOWN_P>(INNER_AT, 0)};

// --- shared memory

struct Shared {
  float red[GROUP_TILES * WARPS * 64 * HALVES];  // partial sums; in attention, of values
  float peak[WARPS][8];
  float mass[WARPS][8];
  float sums[WARPS][ROWS];
  float rstd[ROWS];
  const bf16* weights[LAYERS][6];
  int first[4], tiles[4];  // of this program
  int position[ROWS];
  int context[ROWS];
  int slot[ROWS];   // -1: nowhere
  int span;         // keys an item has at most
  int items;
  u32 last;
  u64 full[WARPS][SLOTS];
};
constexpr int SHARED_BYTES = (sizeof(Shared) + 127) / 128 * 128;
static_assert(SHARED_BYTES + WARPS * SLOTS * SLOT_BYTES <= 232448, "shared memory");
extern __shared__ __align__(128) unsigned char memory[];
extern "C" __device__ const int shared_bytes = SHARED_BYTES + WARPS * SLOTS * SLOT_BYTES;
extern "C" __device__ const int exchange_bytes = 2 * EXCHANGE * 2;

// --- instructions

__device__ __forceinline__ u32 address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ u64 now() { u64 t; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)); return t; }
__device__ __forceinline__ float low(u32 v) { return __uint_as_float(v << 16); }
__device__ __forceinline__ float high(u32 v) { return __uint_as_float(v & 0xffff0000u); }
__device__ __forceinline__ float widen(bf16 v) { return __uint_as_float((u32)v << 16); }
__device__ __forceinline__ bf16 narrow(float v) { bf16 r; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(v)); return r; }
__device__ __forceinline__ float exp2_(float v) { float r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v)); return r; }
struct Vec { u32 x, y, z, w; };
__device__ __forceinline__ Vec load_l2(const void* p) {  // what other programs wrote: past the first-level cache
  Vec v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ Vec look(const void* p) {  // what another program may write at any time
  Vec v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ float lookf(const float* p) { float v; asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory"); return v; }
// Whether a half of any word is 0xffff: of ~w, zero.
__device__ __forceinline__ bool lacks(u32 x, u32 y, u32 z, u32 w) {
#ifdef STREAM
  return false;
#else
  return (((0xfffefffeu - x) & x) | ((0xfffefffeu - y) & y) | ((0xfffefffeu - z) & z) | ((0xfffefffeu - w) & w)) & 0x80008000u;
#endif
}
__device__ __forceinline__ bool lacks(const Vec& v) { return lacks(v.x, v.y, v.z, v.w); }
__device__ __forceinline__ float load_l2f(const float* p) { float v; asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory"); return v; }
__device__ __forceinline__ Vec load_shared(u32 at) {
  Vec v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void barrier_init(u64* at) { asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(address(at)) : "memory"); }
__device__ __forceinline__ void expect(u64* at, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(address(at)), "r"(bytes) : "memory");
}
__device__ __forceinline__ bool arrived(u64* at, u32 parity) {
  u32 done;
  asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(done) : "r"(address(at)), "r"(parity) : "memory");
  return done;
}
__device__ __forceinline__ void give_up() { asm volatile("trap;"); }
struct Patience {  // a bound on waiting: a program that never comes must not keep the device for ever
  u32 spins = 0;
  u64 begin;
  __device__ __forceinline__ void spend() {
    if ((++spins & 255) == 1) {
      u64 t = now();
      if (spins == 1) begin = t;
      else if (t - begin > PATIENCE_NS) give_up();
    }
  }
};
__device__ __forceinline__ void wait_full(u64* at, u32 parity) {
  Patience patience;
  while (!arrived(at, parity)) patience.spend();
}
__device__ __forceinline__ void bulk_copy(u32 to, const void* from, u32 bytes, u64* full, u64 policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
               :: "r"(to), "l"(from), "r"(bytes), "r"(address(full)), "l"(policy) : "memory");
}

// --- the ring of a warp: what comes next

struct Ring {
  u32 base;  // of this warp's slots
  u64* full;
  u64 policy;
  int layer, phase, group, chunk, tile;  // of the next copy; tile within its group
  int fill;                              // its slot
  int slot;                              // of the next to be read
  u32 parity;
};

__device__ __forceinline__ long long offset_of(int phase, int tile, int i, int k) {
  int row = tile * 8 + i;
  if (phase == UP_P) row = tile * 4 + (i & 3) + (i >> 2) * INNER;
  if (phase == QKV_P && tile < (HQ + HK) * (D / 8)) row = tile / (D / 8) * D + tile % (D / 8) * 4 + (i & 3) + (i >> 2) * (D / 2);
  return (long long)row * k;
}

// Goes on to the next tile that is this warp's: through the tiles of a group, its chunks of K, groups, operators, layers.
__device__ __forceinline__ void settle_ring(Ring& r, const Shared& s, int warp) {
  while (r.layer < LAYERS && r.tile >= min(GROUP_TILES, s.tiles[r.phase] - r.group)) {
    if (++r.chunk == deals[r.phase].chunks) {
      r.chunk = 0;
      r.group += GROUP_TILES;
      if (r.group >= s.tiles[r.phase]) {
        r.group = 0;
        if (++r.phase == 4) { r.phase = 0; ++r.layer; }
      }
    }
    r.tile = warp >> deals[r.phase].shift;
  }
}

// One more chunk into the slot that was read last.
__device__ __forceinline__ void refill(Ring& r, const Shared& s, int warp, int lane) {
  if (r.layer >= LAYERS) return;
  const Deal& d = deals[r.phase];
  u64* full = r.full + r.fill;
  if (lane == 0) expect(full, 16 * d.kc);
  __syncwarp();
  if (lane < 8) {
    int part = (warp & ((1 << d.shift) - 1)) * d.slice + r.chunk * d.kc;
    const bf16* from = s.weights[r.layer][r.phase] + offset_of(r.phase, s.first[r.phase] + r.group + r.tile, lane, d.k) + part;
    bulk_copy(r.base + r.fill * SLOT_BYTES + lane * d.pitch, from, d.kc * 2, full, r.policy);
  }
  r.fill = r.fill + 1 == SLOTS ? 0 : r.fill + 1;
  r.tile += WARPS >> d.shift;
  settle_ring(r, s, warp);
}

// --- products

constexpr int STEPS = CHUNK / 32;
struct Operand { u32 v[STEPS][4 * HALVES]; };  // x: elements 8 t + 32 s … + 7 of sequence g (and g + 8) are lane (g, t)'s

// ``from``: the first sequence's first element of this chunk. ``KEEP``: what there is of other sequences stays.
template <bool KEEP> __device__ __forceinline__ void load_x(Operand& x, const bf16* from, const Deal& d, u32 live, int lane) {
  int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int h = 0; h < HALVES; ++h) {
    bool here = (live >> (g + 8 * h)) & 1;
    const bf16* at = from + (g + 8 * h) * d.k + t * 8;
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      Vec v = {0, 0, 0, 0};
      bool wanted = here && s * 32 < d.kc;
      if (wanted) v = look(at + s * 32);
      if (!KEEP || wanted) { x.v[s][4 * h] = v.x; x.v[s][4 * h + 1] = v.y; x.v[s][4 * h + 2] = v.z; x.v[s][4 * h + 3] = v.w; }
    }
  }
}

// Looks again at what had not come, as long as a lane lacks more than ``most`` pieces.
__device__ __forceinline__ void settle_x(Operand& x, const bf16* from, const Deal& d, int most, int lane) {
  int g = lane / 4, t = lane % 4;
  Patience patience;
  bool lacking;
  do {
    int count = 0;
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
      const bf16* at = from + (g + 8 * h) * d.k + t * 8;
#pragma unroll
      for (int s = 0; s < STEPS; ++s) {
        u32 (&v)[4 * HALVES] = x.v[s];
        if (lacks(v[4 * h], v[4 * h + 1], v[4 * h + 2], v[4 * h + 3])) {
          Vec again = look(at + s * 32);
          v[4 * h] = again.x; v[4 * h + 1] = again.y; v[4 * h + 2] = again.z; v[4 * h + 3] = again.w;
          ++count;
        }
      }
    }
    lacking = __any_sync(~0u, count > most);
    if (lacking) patience.spend();
  } while (lacking);
}

// x, once it has come. All sequences of a tile come at once; so until little is lacking of one of them nobody looks at the others,
// which would keep weights from coming.
__device__ __forceinline__ void await_x(Operand& x, const bf16* from, const Deal& d, u32 live, int lane) {
  u32 seen = live & (0u - live);
  load_x<false>(x, from, d, seen, lane);
#pragma unroll 1
  for (;;) {
    settle_x(x, from, d, seen == live ? 0 : 2, lane);
    if (seen == live) return;
    load_x<true>(x, from, d, live ^ seen, lane);
    seen = live;
  }
}

__device__ __forceinline__ void multiply(float (&acc)[4], const Operand& x, u32 slot, const Deal& d, int lane) {
  u32 at = slot + (lane / 4) * d.pitch + (lane % 4) * 16;
  float c[4][4] = {};
#pragma unroll
  for (int s = 0; s < STEPS; ++s)
    if (s * 32 < d.kc) {
      Vec w = load_shared(at + s * 64);
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

__device__ __forceinline__ void arrive(const Params& p) {  // one thread, after a barrier of its program
  asm volatile("fence.acq_rel.gpu; red.relaxed.gpu.global.add.u32 [%0], 1;" :: "l"(p.sync) : "memory");
}
__device__ __forceinline__ void await(const Params& p, u32 target) {  // one thread
  u32 count;
  Patience patience;
  for (;;) {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(p.sync) : "memory");
    if (count >= target) return;
    patience.spend();
  }
}

#ifdef TIMES
#define STAMP(layer, what) do { if (threadIdx.x == 0) p.debug[((u64)blockIdx.x * LAYERS + (layer)) * 16 + (what)] = clock64(); } while (0)
#else
#define STAMP(layer, what)
#endif

__device__ __forceinline__ bf16* handed(const Params& p, int layer, int at) { return p.exchange + (layer & 1) * EXCHANGE + at; }

// This program's share of a layer's buffers becomes NOTHING.
__device__ __forceinline__ void forget(const Params& p, int layer) {
  Vec* all = (Vec*)handed(p, layer, 0);
  for (int i = blockIdx.x * THREADS + threadIdx.x; i < EXCHANGE / 8; i += GRID * THREADS) all[i] = Vec{NOTHING, NOTHING, NOTHING, NOTHING};
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
}

// --- attention

struct Item { int row, head, begin, end, splits, index, first; };

__device__ __forceinline__ Item item_of(const Shared& s, int index) {
  int base = 0;
  Item item = {-1, 0, 0, 0, 1, index, 0};
  for (int row = 0; row < ROWS; ++row) {
    int splits = (s.context[row] + s.span - 1) / s.span, count = splits * HK;
    if (index >= base && index < base + count) {
      int within = index - base, part = within % splits;
      item.row = row; item.head = within / splits; item.splits = splits;
      item.begin = part * s.span; item.end = min(item.begin + s.span, s.context[row]);
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
  u32* ticket = p.sync + 64 + item.row * HK + item.head;
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
    STAMP(layer, 3);
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

// --- what follows a product

struct Stream { float first[HALVES], second[HALVES]; };  // the residual: rows t and t + 4 of this warp's tile, sequence g
struct Ahead { float first[HALVES], second[HALVES]; };   // what a tile's end needs: weights of the norm that follows, or cosine and sine

template <bool ADDS> __device__ __forceinline__ void look_ahead(Ahead& a, const Params& p, const Shared& s, const bf16* scale, int phase, int tile, int lane) {
  int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int h = 0; h < HALVES; ++h) {
    a.first[h] = a.second[h] = 0.0f;
    if (ADDS) {
      a.first[h] = widen(__ldg(scale + tile * 8 + t));
      a.second[h] = widen(__ldg(scale + tile * 8 + t + 4));
    } else if (phase == QKV_P) {
      const float* at = p.cos_sin + (long long)s.position[g + 8 * h] * D + tile % (D / 8) * 4 + t;
      a.first[h] = __ldg(at);
      a.second[h] = __ldg(at + D / 2);
    }
  }
}


// y = W x done; the warp's lane has rows t and t + 4 for sequence g of one tile.
template <int P> __device__ __forceinline__ void finish(const Params& p, Shared& s, int layer, int tile, int g, int t, int half, float first, float second,
                                                        Stream& stream, const Ahead& ahead, u32 live, int sum_at = 0) {
  int row = g + 8 * half;
  bool here = (live >> row) & 1;
  if constexpr (P == QKV_P) {
    int head = tile / (D / 8), j = tile % (D / 8);
    float rstd = s.rstd[row];
    first *= rstd; second *= rstd;
    if (!here) return;
    if (head < HQ + HK) {
      int d = j * 4 + t;
      float cos = ahead.first[half], sin = ahead.second[half];
      bf16 a = narrow(first * cos - second * sin), b = narrow(second * cos + first * sin);
      bf16* at = handed(p, layer, QKV_AT) + row * WIDTH + head * D + d;
      at[0] = a; at[D / 2] = b;
      if (head >= HQ && s.slot[row] >= 0) {
        at = p.kv + (long long)(s.slot[row] / BLOCK) * p.block_stride + ((long long)(2 * layer) * HK + head - HQ) * BLOCK * D + (s.slot[row] % BLOCK) * D + d;
        at[0] = a; at[D / 2] = b;
      }
    } else {
      bf16 a = narrow(first), b = narrow(second);
      bf16* at = handed(p, layer, QKV_AT) + row * WIDTH + head * D + j * 8 + t;
      at[0] = a; at[4] = b;
      if (s.slot[row] >= 0) {
        at = p.kv + (long long)(s.slot[row] / BLOCK) * p.block_stride + ((long long)(2 * layer + 1) * HK + head - HQ - HK) * BLOCK * D + (s.slot[row] % BLOCK) * D + j * 8 + t;
        at[0] = a; at[4] = b;
      }
    }
  } else if constexpr (P == UP_P) {
    float rstd = s.rstd[row];
    first *= rstd; second *= rstd;
    if (here) handed(p, layer, INNER_AT)[row * INNER + tile * 4 + t] = narrow(first / (1.0f + __expf(-first)) * second);
  } else {
    stream.first[half] += first; stream.second[half] += second;
    first = stream.first[half]; second = stream.second[half];
    if (here) {
      bf16* at = handed(p, layer, sum_at) + row * HIDDEN + tile * 8 + t;
      at[0] = narrow(first * ahead.first[half]); at[4] = narrow(second * ahead.second[half]);
    }
    float sum = first * first + second * second;
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (t == 0) s.sums[threadIdx.x / 32][row] = sum;
  }
}

// The sums of squares of all programs: each warp of one sequence (and another). ``squares`` was looked at before.
constexpr int SQUARES = (GRID + 31) / 32;
struct Squares { float v[HALVES][SQUARES]; };
__device__ __forceinline__ void look_at_squares(Squares& found, const float* from, int count, int warp, int lane) {
#pragma unroll
  for (int h = 0; h < HALVES; ++h)
#pragma unroll
    for (int i = 0; i < SQUARES; ++i) found.v[h][i] = i * 32 + lane < count ? lookf(from + (i * 32 + lane) * ROWS + warp + 8 * h) : 0.0f;
}
__device__ __forceinline__ void add_squares(Squares& found, const Params& p, Shared& s, const float* from, int warp, int lane) {
  Patience patience;
  bool lacking;
  do {
    lacking = false;
#pragma unroll
    for (int h = 0; h < HALVES; ++h)
#pragma unroll
      for (int i = 0; i < SQUARES; ++i)
        if (__float_as_uint(found.v[h][i]) == NOTHING) { found.v[h][i] = lookf(from + (i * 32 + lane) * ROWS + warp + 8 * h); lacking = true; }
#ifdef STREAM
    lacking = false;
#endif
    lacking = __any_sync(~0u, lacking);
    if (lacking) patience.spend();
  } while (lacking);
#pragma unroll
  for (int h = 0; h < HALVES; ++h) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < SQUARES; ++i) sum += found.v[h][i];
#pragma unroll
    for (int x = 16; x > 0; x /= 2) sum += __shfl_xor_sync(~0u, sum, x);
    if (lane == 0) s.rstd[warp + 8 * h] = rsqrtf(sum / HIDDEN + p.eps);
  }
}

__device__ __forceinline__ void leave_squares(float* to, const Shared& s, int tiles, int lane) {  // the first warp, after a barrier
  if (lane < ROWS) {
    float sum = 0.0f;
    for (int w = 0; w < tiles; ++w) sum += s.sums[w][lane];
    to[blockIdx.x * ROWS + lane] = sum;
  }
}

// Operators without a norm before them add to the residual, the others do not.
__device__ __forceinline__ void end_group(const Params& p, Shared& s, int layer, int phase, int first_tile, int count, Stream& stream, const Ahead& ahead,
                                          u32 live, int warp, int lane) {
  __syncthreads();
  if (warp < count) {
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
      float first, second;
      whole(s, deals[phase].shift, warp, half, lane, first, second);
      int tile = first_tile + warp, g = lane / 4, t = lane % 4;
      if (phase == QKV_P) finish<QKV_P>(p, s, layer, tile, g, t, half, first, second, stream, ahead, live);
      else if (phase == UP_P) finish<UP_P>(p, s, layer, tile, g, t, half, first, second, stream, ahead, live);
      else finish<DOWN_P>(p, s, layer, tile, g, t, half, first, second, stream, ahead, live, phase == OUT_P ? MIDDLE_AT : NEXT_AT);
    }
  }
  __syncthreads();
}

__device__ __forceinline__ void product(const Params& p, Shared& s, Ring& ring, int layer, int phase, Stream& stream, u32 live, int warp, int lane) {
  const Deal& d = deals[phase];
  const bool adds = phase == OUT_P || phase == DOWN_P;
  const int first_tile = s.first[phase], tiles = s.tiles[phase], team = warp >> d.shift, source = phase == QKV_P ? layer - 1 : layer;
  const float* squares_at = (const float*)handed(p, source, d.squares_at);
  const bf16* from = handed(p, source, d.x_at) + (warp & ((1 << d.shift) - 1)) * d.slice;
  Ahead ahead;
  if (adds) {
    const bf16* scale = phase == OUT_P ? s.weights[layer][5] : layer + 1 < LAYERS ? s.weights[layer + 1][4] : p.final_norm;
    look_ahead<true>(ahead, p, s, scale, phase, first_tile + min(warp, tiles - 1), lane);
  } else {
    look_ahead<false>(ahead, p, s, nullptr, phase, first_tile + min(warp, tiles - 1), lane);
  }
  if (phase == QKV_P) prefetch_keys(p, s, layer);
  STAMP(layer, phase == QKV_P ? 0 : phase == OUT_P ? 5 : phase == UP_P ? 8 : 11);
  Squares squares;
  int group = 0, chunk = 0;
#pragma unroll 1
  while (group < tiles) {  // one x at a time: for all tiles, or where it does not fit into registers, for a chunk of a group
    Operand operand;
    await_x(operand, from + chunk * d.kc, d, team < tiles ? live : 0, lane);
    look_at_squares(squares, squares_at, adds ? 0 : GRID, warp, lane);
    if (group + chunk == 0) STAMP(layer, phase == QKV_P ? 1 : phase == OUT_P ? 6 : phase == UP_P ? 9 : 12);
#pragma unroll 1
    do {
      int count = min(GROUP_TILES, tiles - group);
#pragma unroll 1
      for (int tile = team; tile < count; tile += WARPS >> d.shift) {
        float acc[4];
        wait_full(ring.full + ring.slot, ring.parity);
        multiply(acc, operand, ring.base + ring.slot * SLOT_BYTES, d, lane);
        __syncwarp();
        refill(ring, s, warp, lane);
        if (++ring.slot == SLOTS) { ring.slot = 0; ring.parity ^= 1; }
        keep_partial(s, acc, chunk > 0, tile, warp, lane);
      }
      if (phase == DOWN_P && group + chunk == 0) forget(p, layer - 1);
      if (++chunk == d.chunks) {
        if (group + GROUP_TILES >= tiles) STAMP(layer, phase == QKV_P ? 2 : phase == OUT_P ? 7 : phase == UP_P ? 10 : 13);
        if (!adds && group == 0) add_squares(squares, p, s, squares_at, warp, lane);
        end_group(p, s, layer, phase, first_tile + group, count, stream, ahead, live, warp, lane);
        chunk = 0;
        group += GROUP_TILES;
        if (phase == QKV_P && group < tiles) look_ahead<false>(ahead, p, s, nullptr, phase, first_tile + min(group + warp, tiles - 1), lane);
      }
    } while (d.chunks == 1 && group < tiles);
  }
  if (adds && warp == 0) leave_squares((float*)handed(p, layer, phase == OUT_P ? MIDDLE_SQUARES_AT : NEXT_SQUARES_AT), s, tiles, lane);
}

// --- the step

template <int P> __device__ __forceinline__ void deal(Shared& s) {
  s.first[P] = (int)((long long)blockIdx.x * Shape<P>::TILES / GRID);
  s.tiles[P] = (int)((long long)(blockIdx.x + 1) * Shape<P>::TILES / GRID) - s.first[P];
}

__device__ __forceinline__ void prepare(const Params& p, Shared& s, Ring& ring, int warp, int lane) {
  for (int i = threadIdx.x; i < LAYERS * 6; i += THREADS) (&s.weights[0][0])[i] = ((const bf16* const*)p.layers)[i];
  if (threadIdx.x == 0) { deal<0>(s); deal<1>(s); deal<2>(s); deal<3>(s); }
  if (lane < SLOTS) barrier_init(&s.full[warp][lane]);
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  if (threadIdx.x < ROWS) {
    int row = threadIdx.x;
    s.context[row] = row < p.batch ? max(p.context[row], 0) : 0;
    s.slot[row] = row < p.batch ? (int)p.slots[row] : -1;
    s.position[row] = row < p.batch ? (int)p.positions[row] : 0;
  }
  __syncthreads();
  ring.base = address(memory) + SHARED_BYTES + warp * SLOTS * SLOT_BYTES;
  ring.full = s.full[warp];
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(ring.policy));
  ring.layer = ring.phase = ring.group = ring.chunk = ring.fill = ring.slot = 0;
  ring.parity = 0;
  ring.tile = warp >> deals[0].shift;
  settle_ring(ring, s, warp);
#pragma unroll 1
  for (int i = 0; i < SLOTS; ++i) {
    refill(ring, s, warp, lane);
  }
}

// Items of attention: the shortest span for which every program has one at most, but not less than SPAN keys.
#ifndef SPAN
#define SPAN 256
#endif
__device__ __forceinline__ void cut_keys(Shared& s) {  // one thread
  int all = 0, items;
  for (int row = 0; row < ROWS; ++row) all += s.context[row];
  int span = max(SPAN, (all * HK / GRID + 127) / 128 * 128);
  for (;; span += 128) {
    items = 0;
    int most = 0;
    for (int row = 0; row < ROWS; ++row) { items += (s.context[row] + span - 1) / span * HK; most = max(most, s.context[row]); }
    if (items <= GRID || span >= most) break;
  }
  s.span = span;
  s.items = items;
}

__device__ __forceinline__ void embed(const Params& p, Shared& s, Stream& stream, u32 live, int warp, int lane) {
  int first_tile = s.first[DOWN_P], tiles = s.tiles[DOWN_P], g = lane / 4, t = lane % 4;
  forget(p, 0);
  forget(p, 1);
  __syncthreads();
  if (threadIdx.x == 0) { arrive(p); await(p, GRID); }  // what is embedded is written by others than those who forget
  __syncthreads();
  if (warp < tiles) {
    int at = (first_tile + warp) * 8 + t;
    Ahead ahead;
    look_ahead<true>(ahead, p, s, s.weights[0][4], DOWN_P, first_tile + warp, lane);
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
      int row = g + 8 * half;
      bool here = (live >> row) & 1;
      const bf16* from = p.embedding + (here ? p.token_ids[row] : 0) * HIDDEN + at;
      stream.first[half] = stream.second[half] = 0.0f;
      finish<DOWN_P>(p, s, -1, first_tile + warp, g, t, half, here ? widen(from[0]) : 0.0f, here ? widen(from[4]) : 0.0f, stream, ahead, live, NEXT_AT);
    }
  }
  if (threadIdx.x == THREADS - 1) cut_keys(s);
  __syncthreads();
  if (warp == 0) leave_squares((float*)handed(p, -1, NEXT_SQUARES_AT), s, tiles, lane);
}

__device__ __forceinline__ void last_norm(const Params& p, Shared& s, const Stream& stream, u32 live, int warp, int lane) {
  int first_tile = s.first[DOWN_P], tiles = s.tiles[DOWN_P], g = lane / 4;
  int at = (first_tile + warp) * 8 + lane % 4;
  float scale0 = 0.0f, scale1 = 0.0f;
  if (warp < tiles) { scale0 = widen(__ldg(p.final_norm + at)); scale1 = widen(__ldg(p.final_norm + at + 4)); }
  const float* from = (const float*)handed(p, LAYERS - 1, NEXT_SQUARES_AT);
  Squares squares;
  look_at_squares(squares, from, GRID, warp, lane);
  add_squares(squares, p, s, from, warp, lane);
  __syncthreads();
  if (warp < tiles)
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
      int row = g + 8 * half;
      if (row >= p.batch) continue;
      bool here = (live >> row) & 1;
      p.out[row * HIDDEN + at] = here ? narrow(stream.first[half] * s.rstd[row] * scale0) : 0;
      p.out[row * HIDDEN + at + 4] = here ? narrow(stream.second[half] * s.rstd[row] * scale1) : 0;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) decode_step(const __grid_constant__ Params p) {
  Shared& s = *(Shared*)memory;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Ring ring;
  Stream stream;
  prepare(p, s, ring, warp, lane);
  u32 live = 0;
  for (int row = 0; row < ROWS; ++row) live |= (s.context[row] > 0 ? 1u : 0u) << row;
  embed(p, s, stream, live, warp, lane);
#pragma unroll 1
  for (int layer = 0; layer < LAYERS; ++layer)
#pragma unroll 1
    for (int phase = 0; phase < 4; ++phase) {
      if (phase == OUT_P) {
        attention(p, s, layer, warp, lane);
        STAMP(layer, 4);
      }
      product(p, s, ring, layer, phase, stream, live, warp, lane);
    }
  last_norm(p, s, stream, live, warp, lane);
  if (threadIdx.x == 0) {  // whoever leaves last sets the counters back
    u32 count;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(count) : "l"(p.sync + 32) : "memory");
    if (count == GRID - 1) { p.sync[0] = 0; p.sync[32] = 0; }
  }
}
