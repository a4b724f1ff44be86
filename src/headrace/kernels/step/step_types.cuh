// A whole decode step of a dense decoder in one launch: every layer, for up to ROWS sequences of one token each, or of several, one a row.
//
// One program a multiprocessor. Each of its warps owns a ring of shared memory that it fills with weights by bulk copies, in an order that
// is fixed for the whole step: so weights keep coming while programs wait for each other between operators, or attend.
//
// Product: a tile is 8 rows of a weight; K is dealt to the warps (and to TEAMS of them, each with tiles of its own, where K is short).
// Weights are the 8 columns of mma.m16n8k16, the batch its 16 rows. Partial sums of warps meet in shared memory, always in one order.
// Rows i and i + 4 of a tile are a pair: the two halves of a rotation, or gate and up of one inner value.

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
#ifdef FP8
constexpr int ITEM = 1, PAD = 32;  // bytes of a weight, and behind rows that would meet in the banks
#else
constexpr int ITEM = 2, PAD = 64;
#endif
constexpr int SLOT_BYTES = 8 * (CHUNK * ITEM + PAD);
constexpr bool SHARED_SCALES = KV == E4M3 || KV == E5M2;
constexpr int HELD = KV ? D : 2 * D, PART = BLOCK * (HELD + (KV == INT8 ? 2 : 0));  // bytes: of a key, and of a head in a block, scales last
constexpr int UNITS = 6, KV_SCALES = ITEM == 1 ? 10 : 6, FIELDS = KV_SCALES + 2 * SHARED_SCALES;  // of a layer
constexpr u64 PATIENCE_NS = 2000000000ull;

// qkv, output, up and down, bf16 or (FP8) e4m3; two norms, bf16; UNITS: FP8's scales of rows; KV_SCALES: keys' and values', [HK], float32.
struct Layer { const void* fields[FIELDS]; };

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
  unsigned char* kv;            // [blocks, LAYERS, 2, HK, PART]
  bf16* out;                    // [batch, HIDDEN]
  bf16* exchange;               // [2, Exchange]: what programs hand each other, by the layer's parity; then the last norm's sums of squares
  float* parts;                 // [items, G, D]
  float* peaks;                 // [items, 2, G]
  u32* tickets;                 // [row * HK + head]; zero between launches
  long long block_stride;       // bytes of kv from block to block
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
  static constexpr int PITCH = KC * ITEM + (KC * ITEM % (ITEM == 1 ? 64 : 128) == 0 ? PAD : 0);  // no two lanes of a load in one bank
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
// The last layer's become so at the end, when the sums of squares of all programs say that all have read them. So a launch finds NOTHING
// everywhere but in those sums; each program takes its own back before it hands out anything, and without that nobody comes to the end.
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
  const bf16* weights[LAYERS][FIELDS];
  float units[WARPS][8];   // of FP8: what rows of each warp's tile are multiplied by
  int first[4], tiles[4];  // of this program
  int position[ROWS];
  int context[ROWS];
  int drafts[ROWS];  // so many rows before this one are tokens before its own, of the same sequence
  int slot[ROWS];   // -1: nowhere
  int span;         // keys an item has at most
  int items;
  u32 last;
  u64 full[WARPS][SLOTS];
  alignas(8) unsigned char newest[2][KV ? D : 8];  // codes of a newest key and value, of one warp; and of INT8, their scales
  u32 newest_scales[2];
};
constexpr int SHARED_BYTES = (sizeof(Shared) + 127) / 128 * 128;
static_assert(SHARED_BYTES + WARPS * SLOTS * SLOT_BYTES <= 232448, "shared memory");
extern __shared__ __align__(128) unsigned char memory[];
extern "C" __device__ const int shared_bytes = SHARED_BYTES + WARPS * SLOTS * SLOT_BYTES;
extern "C" __device__ const int exchange_bytes = 2 * EXCHANGE * 2 + GRID * ROWS * 4;
